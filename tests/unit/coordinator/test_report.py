"""The page about a session: everything is on it, and nothing of it is code."""

from html.parser import HTMLParser

import pytest

from support.pages import OTHER_HOST
from xain_coordinator.cli.report.charts import Line, chart
from xain_coordinator.cli.report.page import page
from xain_coordinator.server.inspection_client import Snapshot
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection

EVIL = '<script>alert("x")</script>'
VOID = {"meta", "link", "br", "img"}


class Checked(HTMLParser):
    """Fails where elements are not closed in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.tips: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.tips += [value for name, value in attrs if name == "title" and value]
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("href", "src")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(snapshot: Snapshot) -> Checked:
    checked = Checked()
    checked.feed(page(snapshot))
    checked.close()
    assert checked.open == []
    assert "script" not in checked.tags
    assert not OTHER_HOST.search(page(snapshot))
    return checked


def evaluated(value: float) -> pb.Evaluation:
    return pb.Evaluation(num_samples=20, metrics={"accuracy": value})


def session(*rounds: inspection.RoundStatus, **status: object) -> Snapshot:
    return Snapshot(
        inspection.GetStatusResponse(session_id="5e5510", num_rounds=3, **status),  # type: ignore[arg-type]
        inspection.ListParticipantsResponse(
            participants=[inspection.ParticipantStatus(participant_id=EVIL, last_failure=EVIL)]
        ),
        inspection.ListRoundsResponse(rounds=rounds),
        inspection.ListModelsResponse(),
    )


def test_a_page_shows_curves_sites_rosters_and_reasons() -> None:
    """Each of two rounds has its cell for each site; a reason is beside it and in a table."""
    checked = read(
        session(
            inspection.RoundStatus(
                round=0,
                phase="published",
                selected=["a", "b"],
                contributors=["a", "b"],
                evaluation=evaluated(0.5),
                metrics={"loss": 0.7},
                seconds=3.0,
                sites=[inspection.SiteMetrics(participant_id="a", num_samples=1200)],
            ),
            inspection.RoundStatus(
                round=1,
                phase="published",
                selected=["a", "b"],
                contributors=["a"],
                missing={"b": "failed: TypeError"},
                evaluation=evaluated(0.75),
                opened_seconds=10.0,
                seconds=90000.0,
            ),
            best_round=1,
            best_value=0.75,
            metric="accuracy",
            warnings=["site b was left out of three rounds"],
            num_trained=2,
        )
    )
    for told in (
        "Session 5e5510",
        "2 of 3",
        "site b was left out",
        "1, accuracy 0.75",
        "1,200",
        "1 d 1 h, 0 of 0",
    ):
        assert told in checked.text
    assert checked.tips.count("round 1: failed: TypeError") == 1
    assert "failed: TypeError" in checked.text
    assert "accuracy" in checked.text
    assert "loss" in checked.text
    assert checked.tips.count("round 0: counted") == 2


def test_names_and_reasons_are_text() -> None:
    """Names and reasons come from the network, and are escaped."""
    checked = read(
        session(
            inspection.RoundStatus(
                round=0,
                phase=EVIL,
                selected=[EVIL],
                missing={EVIL: EVIL},
                metrics={EVIL: 1.0},
                evaluation=pb.Evaluation(num_samples=1, metrics={EVIL: 2.0}),
            ),
            warnings=[EVIL],
            cause=EVIL,
            state=pb.FINISHED,
        )
    )
    assert checked.text.count(EVIL) >= 5


def test_a_session_that_has_not_begun_has_a_page() -> None:
    assert "Nothing was measured" in read(session(waiting_for="2 more participants")).text


@pytest.mark.parametrize("values", [[0.0], [1.0, 1.0], [-3e-7, 2e12], [5.0, -5.0]])
def test_a_chart_holds_any_values(values: list[float]) -> None:
    """Points lie within the picture, whatever their range."""
    points = [(float(x), y) for x, y in enumerate(values)]
    text = chart("any", [Line("any", "sites", points)])
    coordinates = text.partition('polyline class="sites" points="')[2].partition('"')[0].split()
    assert len(coordinates) == len(points)
    for pair in coordinates:
        x, y = map(float, pair.split(","))
        assert 0 <= x <= 640
        assert 0 <= y <= 260


def test_reason_that_comes_again_is_one_row_with_its_rounds() -> None:
    """A site that misses every deadline of two weeks does not hide the other reasons."""
    rounds = [
        inspection.RoundStatus(
            round=number,
            phase="published",
            selected=["a", "b"],
            contributors=["a"],
            missing={"b": "failed: MemoryError" if number == 4 else "deadline passed"},
        )
        for number in (0, 1, 2, 4, 6)
    ]
    text = read(session(*rounds)).text
    assert "bdeadline passed40 to 2, 6bfailed: MemoryError14" in text


def test_report_names_the_problem_of_a_site_that_is_away() -> None:
    """A site that left is not listed among the participants."""
    site = inspection.SiteAccount(
        participant_id="north", rounds_selected=7, rounds_contributed=2, last_failure="no memory"
    )
    text = read(session(sites=[site])).text
    assert "north2 of 7no memory" in text


def test_report_counts_initial_weights_for_nobody() -> None:
    """Round 0 is in the timeline, and neither a column of the roster nor a round of its site."""
    made = inspection.RoundStatus(
        round=0, phase="published", task=pb.INITIALISE, selected=["a"], contributors=["a"]
    )
    trained = inspection.RoundStatus(
        round=1, phase="published", selected=["a", "b"], contributors=["a", "b"]
    )
    checked = read(session(made, trained))
    assert checked.tips.count("round 0: counted") == 0
    assert checked.tips.count("round 1: counted") == 2
    assert "0 initialise" in checked.text


def test_site_of_a_paused_round_still_trains() -> None:
    """A round is paused while too few are connected; a site that has not handed in may still."""
    one = inspection.RoundStatus(
        round=4, phase="standby", selected=["a", "b"], missing={"b": "failed: TypeError"}
    )
    assert read(session(one)).tips == ["round 4: trains", "round 4: failed: TypeError"]
