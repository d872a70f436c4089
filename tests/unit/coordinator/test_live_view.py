"""The live view of a session."""

import io
import re

import pytest
from rich.console import Console

from support import inspected
from xain_coordinator.cli.live_view import line
from xain_coordinator.cli.status import frame, sparkline
from xain_coordinator.inspection.client import Snapshot
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection


def after_three_rounds(**status: object) -> Snapshot:
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
        inspection.ParticipantStatus(
            participant_id="f", not_eligible_because="left out until round 7: it missed deadlines"
        ),
    ]
    known = {"phase": "collecting", "round": 3, "num_rounds": 9, "num_trained": 3, **status}
    return inspected.snapshot(participants=sites, rounds=rounds, **known)


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
def test_a_sparkline_goes_from_the_lowest_to_the_highest(values, bars):
    assert sparkline(values, columns=8) == bars


def test_the_view_shows_state_curves_sites_and_problems():
    """Names come from the network, and move no cursor."""
    console = Console(file=io.StringIO(), width=120)
    now = after_three_rounds(num_updates=1, num_selected=2, warnings=["site c is left out"])
    console.print(frame(now, is_live=True))
    shown = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    for told in (
        "3 of 9 rounds",
        "updates       1 of 2 in",
        "time left     60.0 s",  # six rounds of ten seconds
        "accuracy  0.5",
        "handed in",
        "trains",
        "downloading 80 %",
        "uploading 0 %",
        "left out until round 7  ",
        "failed: TypeError",
        "warning       site c is left out",
    ):
        assert told in shown
    assert "\x1b" not in shown


def test_long_warning_is_shown_to_its_end_and_no_more_than_three_of_them():
    console = Console(file=io.StringIO(), width=80)
    warnings = [f"warning {number}: {'so it goes on ' * 8}until you act" for number in range(4)]
    console.print(frame(after_three_rounds(warnings=warnings), is_live=True))
    shown = console.file.getvalue()
    assert "warning 0" not in shown
    assert " ".join(shown.split()).count("until you act") == 3


def test_view_names_sites_that_are_away_and_why():
    """A site that failed and left is not forgotten while the session goes on."""
    sites = [
        inspection.SiteAccount(
            participant_id="a",
            rounds_selected=3,
            rounds_contributed=1,
            rounds_missed=2,
            last_reason="deadline passed",
        ),
        inspection.SiteAccount(
            participant_id="north",
            rounds_selected=2,
            last_failure="round 1: failed: MemoryError",
            away="expired",
        ),
    ]
    console = Console(file=io.StringIO(), width=120)
    console.print(frame(after_three_rounds(sites=sites), is_live=True))
    # The file of this console is a StringIO.
    told = [" ".join(row.split()) for row in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert "a handed in 0 of 3 not counted for 2 rounds: deadline passed" in told
    assert "north expired 0 of 2 round 1: failed: MemoryError" in told


def test_facts_fit_80_columns():
    """The state is the longest, and the numbers are those of a long session."""
    console = Console(file=io.StringIO(), width=80)
    now = after_three_rounds(
        num_updates=10,
        num_selected=12,
        num_connected=12,
        num_required=8,
        num_waiting=3,
        max_participants=12,
        waiting_for="2 of 12 updates: north and south.",
    )
    console.print(frame(now, is_live=True))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO
    told = [" ".join(line.split()) for line in lines]
    assert told[0].startswith("state collecting round 3, 3 of 9 rounds done")
    assert told[2:3] == ["waiting for 2 of 12 updates: north and south."]
    assert re.search("12 connected, 8 required, 3 not let in", told[3])
    assert told[4] == "updates 10 of 12 in"


def test_finished_view_says_why_and_shows_the_sites():
    """A session that stopped early does not show all of its rounds as made."""
    console = Console(file=io.StringIO(), width=120)
    over = after_three_rounds(
        state=pb.FINISHED, cause="completed", ended_because="stopped early: no gain"
    )
    over.status.phase = "finished"
    console.print(frame(over, is_live=True))
    told = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]  # a StringIO
    assert "3 of 9 rounds" in told
    assert "completed: stopped early: no gain" in told
    assert "waiting for" not in told
    assert "a handed in" in told
    assert re.fullmatch(r"finished \(.*no gain\); model 2: accuracy 0\.5", line(over))
