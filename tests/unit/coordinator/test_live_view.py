"""The live view of a session."""

import io

import pytest
from rich.console import Console

from xain_coordinator.live_view import line, sparkline, view
from xain_coordinator.status_view import Snapshot
from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.fl import inspection_pb2 as inspection


def snapshot(**status: object) -> Snapshot:
    rounds = [
        inspection.RoundStatus(
            round=number,
            phase="published",
            seconds=10.0,
            metrics={"loss": 1.0 / (number + 1)},
            evaluation=pb.Evaluation(num_samples=5, metrics={"accuracy": number / 4}),
        )
        for number in range(3)
    ]
    sites = [
        inspection.ParticipantStatus(participant_id="a", update_accepted=True, selected=True),
        inspection.ParticipantStatus(participant_id="b", reported_state=pb.TRAINING, selected=True),
        inspection.ParticipantStatus(participant_id="c\x1b[2J", last_failure="failed: TypeError"),
        inspection.ParticipantStatus(
            participant_id="d",
            reported_state=pb.TRAINING,
            transfer=pb.Transfer(direction=pb.Transfer.DOWNLOAD, percent=80),
        ),
        inspection.ParticipantStatus(
            participant_id="e",
            reported_state=pb.TRAINING,
            transfer=pb.Transfer(direction=pb.Transfer.UPLOAD, percent=0),
        ),
    ]
    return Snapshot(
        inspection.GetStatusResponse(
            session_id="5e5510", phase="collecting", round=3, num_rounds=9, **status
        ),
        inspection.ListParticipantsResponse(participants=sites),
        inspection.ListRoundsResponse(rounds=rounds),
        inspection.ListModelsResponse(),
    )


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""),
        ([float("nan")], ""),
        ([2.0, 2.0], "▄▄"),
        ([0.0, 1.0], "▁█"),
        ([9.0, *range(8)], "▁▂▃▄▅▆▇█"),
    ],
)
def test_a_sparkline_goes_from_the_lowest_to_the_highest(values: list[float], bars: str) -> None:
    assert sparkline(values, columns=8) == bars


def test_the_view_shows_state_curves_sites_and_problems() -> None:
    """Names come from the network, and move no cursor."""
    console = Console(file=io.StringIO(), width=120)
    console.print(view(snapshot(num_updates=1, num_selected=2, warnings=["site c is left out"])))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for told in (
        "3 of 9 rounds",
        "1 of 2 updates in",
        "60.0 s left",  # six rounds of ten seconds
        "accuracy  0.5",
        "handed in",
        "trains",
        "downloading 80 %",
        "uploading 0 %",
        "failed: TypeError",
        "! site c is left out",
    ):
        assert told in shown
    assert "\x1b" not in shown


def test_a_line_tells_the_latest_evaluation() -> None:
    assert line(snapshot()) == "collecting round 3 of 9; model 2: accuracy 0.5"
