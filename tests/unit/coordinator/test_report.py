"""The page about a session: everything is on it, and nothing of it is code."""

from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from json import dumps
from typing import Any

import numpy as np
import pytest

from support.inspected import snapshot
from support.pages import OTHER_HOST
from xain_coordinator.cli.report.charts import Line, chart
from xain_coordinator.cli.report.page import page
from xain_coordinator.inspection.client import Snapshot
from xain_coordinator.server.calls.translate import tallies_message
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_workloads.measures.tallies import Tallies, tally_classes, tally_numbers
from xain_workloads.model import GROUP
from xain_workloads.tables.checks.describe import TableOne
from xain_workloads.tables.preprocessing import CategoryColumn, NumberColumn, Preprocessing
from xain_workloads.tables.reading.scales import Scale
from xain_workloads.tables.schema import Column
from xain_workloads.tables.table import Table

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
        self.labels: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.tips += [value for name, value in attrs if name == "title" and value]
        self.labels += [value for name, value in attrs if name == "aria-label" and value]
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("href", "src")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(whole: Snapshot, *more: Any) -> Checked:
    text = page(whole, *more)
    checked = Checked()
    checked.feed(text)
    checked.close()
    assert checked.open == []
    assert "script" not in checked.tags
    assert not OTHER_HOST.search(text)
    return checked


def evaluated(value: float) -> pb.Evaluation:
    return pb.Evaluation(num_samples=20, metrics={"accuracy": value})


def session(*rounds: inspection.RoundStatus, **status: object) -> Snapshot:
    evil = [inspection.ParticipantStatus(participant_id=EVIL, last_failure=EVIL)]
    return snapshot(session_id="5e5510", num_rounds=3, participants=evil, rounds=rounds, **status)


def test_a_page_shows_curves_sites_rosters_and_reasons():
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


def test_names_and_reasons_are_text():
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


def test_a_session_that_has_not_begun_has_a_page():
    assert "Nothing was measured" in read(session(waiting_for="2 more participants")).text


@pytest.mark.parametrize("x_name", ["", "1 − specificity"])
@pytest.mark.parametrize("values", [[0.0], [1.0, 1.0], [-3e-7, 2e12], [5.0, -5.0]])
def test_a_chart_holds_any_values(values, x_name):
    """Points lie within the picture, whatever their range; in a square they are shares."""
    points = [(float(x), abs(y) % 1 if x_name else y) for x, y in enumerate(values)]
    text = chart("any", [Line("any", "sites", points)], x_name=x_name)
    coordinates = text.partition('polyline class="sites" points="')[2].partition('"')[0].split()
    assert len(coordinates) == len(points)
    for pair in coordinates:
        x, y = map(float, pair.split(","))
        assert 0 <= x <= 640
        assert 0 <= y <= (300 if x_name else 260)


def test_reason_that_comes_again_is_one_row_with_its_rounds():
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


def test_report_names_the_problem_of_a_site_that_is_away():
    """A site that left is not listed among the participants."""
    site = inspection.SiteAccount(
        participant_id="north", rounds_selected=7, rounds_contributed=2, last_failure="no memory"
    )
    text = read(session(sites=[site])).text
    assert "north2 of 7no memory" in text


def test_report_counts_initial_weights_for_nobody():
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


def test_site_of_a_paused_round_still_trains():
    """A round is paused while too few are connected; a site that has not handed in may still."""
    one = inspection.RoundStatus(
        round=4, phase="standby", selected=["a", "b"], missing={"b": "failed: TypeError"}
    )
    assert read(session(one)).tips == ["round 4: trains", "round 4: failed: TypeError"]


# --- model, data and figures ---


def tallied(num_classes: int = 2) -> Tallies:
    """Tallies of ten rows of each class, of which one in five is taken for the next class."""
    target = np.arange(10 * num_classes) % num_classes
    predicted = np.where(
        np.arange(len(target)) < 2 * num_classes, (target + 1) % num_classes, target
    )
    shares = np.full((len(target), num_classes), 0.2 / (num_classes - 1))
    shares[np.arange(len(target)), predicted] = 0.8
    return tally_classes(num_classes, target, predicted, shares)


def of_model(tallies: Tallies, classes: list[str], **status: Any) -> Snapshot:
    """A session whose model 3 has these tallies at two sites together."""
    sites = [
        inspection.SiteMetrics(participant_id=name, evaluation=tallies_message(tallies))
        for name in ("north", "south")
    ]
    few = pb.Evaluation(withheld=True)
    sites.append(inspection.SiteMetrics(participant_id="tiny", evaluation=few))
    one = inspection.RoundStatus(
        round=3,
        phase="evaluated",
        task=pb.EVALUATE,
        evaluation=tallies_message(tallies),
        sites=sites,
    )
    trained = inspection.RoundStatus(round=2, contributors=["north", "south", "tiny", "mute"])
    trained.task = pb.TRAIN
    of = {"measured": tallies_message(tallies), "measured_round": 3, **status}
    columns = (
        NumberColumn("age", 0.0, Scale()),
        NumberColumn("lab", 0.0, Scale()),
        CategoryColumn("ward", ()),
    )
    metadata = {
        "classes": dumps(classes),
        "workload": "sgd",
        "options": '{"eta0": 0.01}',
        "preprocessing": Preprocessing(columns).to_json(),
    }
    models = inspection.ListModelsResponse(models=[inspection.ModelStatus(metadata=metadata)])
    return replace(session(trained, one, **of), models=models)


def test_a_page_says_how_good_the_model_is_with_intervals_matrix_and_curves():
    """Figures of all rows stand beside those of the sites and of the best constant prediction."""
    checked = read(of_model(tallied(), ["alive", EVIL]))
    for told in (
        "How good is model 3?Measured on 20 rows of all sites together",
        f"share of the rows of {EVIL} that are found0.80.4902 to 0.94330",
        "alive8 (80%)2 (20%)10",
        f"ROC of {EVIL}: AUC 0.8 (",
        "north1200.8",
        "0.80.584 to 0.9193",
        "sgd",
        "eta0 = 0.01",
    ):
        assert told in checked.text, told
    assert any(tip.startswith("Calibration") for tip in checked.labels)


def test_of_many_classes_the_curves_of_those_that_are_told_apart_worst_are_drawn():
    checked = read(of_model(tallied(5), list("abcde")))
    assert checked.text.count("ROC of ") == 3
    assert "Of 5 classes the 3 that are told apart worst." in checked.text
    assert "By class" in checked.text


def test_figures_of_a_regression_need_no_classes():
    tallies = tally_numbers(np.arange(30.0), np.arange(30.0) + np.tile([1.0, -1.0, 0.5], 10))
    assert tallies is not None
    checked = read(of_model(tallies, []))
    assert "share of the variance of the target that is explained0.99" in checked.text
    assert "what always predicting the mean has" in checked.text
    assert "Confusion" not in checked.text


@pytest.mark.parametrize(
    ("best", "outcome"),
    [({"best_round": 1}, "got worse"), ({}, "has learned nothing of use")],
    ids=["an earlier model was better", "no model was better"],
)
def test_training_that_is_no_better_than_its_baseline_says_so_first(best, outcome):
    """The first line tells it, once, and below are the other warnings."""
    why = "Model 3 is no better than always predicting the commonest class."
    told = session(no_better=why, warnings=[why, "site b was left out"], state=pb.FINISHED, **best)
    text = read(told).text
    assert text.split("}")[-1].lstrip().startswith(f"Session 5e5510This training {outcome}: {why}")
    assert text.count(why) == 1
    assert "site b was left out" in text


def test_best_model_is_told_first_with_its_interval_and_baseline():
    text = read(of_model(tallied(), list("ab"), best_round=3, metric="log_loss")).text
    assert "Model 3 is the best by log_loss: accuracy 0.8 (0.584 to 0.919, baseline 0.5)" in text
    assert "on 20 held-out rows." in text


def test_sites_without_figures_or_models_are_named_with_the_reason():
    never = inspection.SiteAccount(
        participant_id="far", rounds_selected=4, last_failure="no memory"
    )
    text = read(of_model(tallied(), list("ab"), sites=[never], not_admitted={"odd": "labels"})).text
    assert "oddnot let inlabels" in text
    assert "farin no modelno memory" in text
    assert "tinyin no figuretoo few held-out rows" in text
    assert "mutein no figure" in text
    assert "northin no figure" not in text


def test_columns_are_used_or_left_out_with_a_reason_and_the_data_are_described():
    """Table one and the findings stand on the page, and so does the day of the training."""
    ages = np.linspace(30, 80, 40)
    names = np.array([EVIL, "alive"] * 20)
    data = Table((Column("age", "number"),), {"age": ages}, names, "fate", (EVIL, "alive"))
    described = TableOne.of([("north", data.profile())])
    finding = inspection.DataFinding(
        level="warn", check="constant", column="lab", text="all values are 7", fix="set data.drop"
    )
    now = datetime(2024, 5, 2, 8, 30, tzinfo=UTC)
    opened = int(datetime(2024, 5, 1, 7, 0, tzinfo=UTC).timestamp())
    told = of_model(
        tallied(), list("ab"), findings=[finding], opened_unix_seconds=opened, version="0.1"
    )
    text = read(told, described, now).text
    for part in (
        "fate, predicted by sgd",
        "columns usedage (number)",
        "columns left outward: no category has enough rows at any site, lab: all values are 7",
        "opened2024-05-01 07:00 UTC",
        "this page2024-05-02 08:30 UTC",
        f"{EVIL}20 (50.0 %)20 (50.0 %)",
        "mean (spread)55",
        "warnalllaball values are 7set data.drop",
    ):
        assert part in text, part


def test_method_says_that_rows_of_a_group_were_kept_together():
    ages, names = np.linspace(30, 80, 40), np.array(["a", "b"] * 20)
    groups = np.arange(40, dtype=np.uint64) // 4
    data = Table((Column("age"),), {"age": ages}, names, groups=groups, group="patient")
    described = TableOne.of([("north", data.profile())])
    told = of_model(tallied(), list("ab"))
    text = read(told, described).text
    assert "Rows with the same patient were kept together" in text
    assert "Rows to train on are those of 10 of them." in text
    assert "narrow as far as rows with the same patient are alike" in text
    # A session that measures models of a study has no description; the model knows the column.
    told.models.models[-1].metadata[GROUP] = "patient"
    assert "Rows with the same patient" not in read(told).text
    told.status.study = "folds"
    assert "Rows with the same patient were kept together" in read(told).text


def test_figures_of_the_coordinators_own_rows_are_called_so():
    """The coordinator's own rows may be among those that a site has trained on."""
    told = of_model(tallied(), list("ab"), best_round=3, metric="log_loss")
    told.rounds.rounds[-1].coordinator_evaluation.CopyFrom(tallies_message(tallied()))
    text = read(told).text
    assert "on 20 rows of the coordinator." in text
    assert "Measured on 20 rows of the coordinator. An interval" in text
