"""Gain of each site, in status and report: global models beside local ones."""

import csv
import io
from html import unescape

import numpy as np
import pytest
from rich.console import Console

from support import inspected
from xain_coordinator.cli.gains import BETTER, EQUAL, WORSE, gains, sentence, to_csv
from xain_coordinator.cli.report.page import page
from xain_coordinator.cli.status import frame
from xain_coordinator.core.parts.evaluation import together
from xain_coordinator.core.vocabulary.values import CentralModel, Evaluation, LocalModel
from xain_coordinator.inspection.client import Snapshot
from xain_coordinator.server.calls.translate import (
    central_message,
    evaluation_message,
    threshold_message,
)
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_workloads.comparing.gains import Difference
from xain_workloads.measures.tallies import Tallies, tally_classes
from xain_workloads.measures.thresholds import choose

# Mean difference of the losses of each row, smaller with the global model, and its spread.
SITES = {"north": (0.2, 0.5), "south": (-0.3, 0.5), "west": (0.01, 0.5)}
ROWS = 100


def tallies(probability: float) -> Tallies:
    """Tallies of a model that gives each row's class this probability."""
    target = np.arange(ROWS) % 2
    of_second = np.where(target == 1, probability, 1 - probability)
    shares = np.stack([1 - of_second, of_second], axis=1)
    return tally_classes(2, target, target, shares)


def at_site(name: str) -> Evaluation:
    """The evaluation of the last model, 4, with a local model; the best is 3."""
    mean, spread = SITES[name]
    sums = Difference(3, ROWS * mean, ROWS * (spread**2 + mean**2))
    local = LocalModel(tallies(0.6), 12, differences=(sums, Difference(4, 0.0, 1.0)))
    return Evaluation(ROWS, {}, tallies(0.7), local=local)


def compared(*, has_best_round: bool = True, lacking: str = "") -> Snapshot:
    """A session that has ended with model 4, whose best is 3. lacking: site without a difference to
    that."""
    without = Evaluation(ROWS, {}, tallies(0.7), local=LocalModel(why_not="all of one class"))
    last = {**{name: at_site(name) for name in SITES}, "east": without}
    if lacking:
        of_last = LocalModel(tallies(0.6), 12, differences=(Difference(4, 0.0, 1.0),))
        last[lacking] = Evaluation(ROWS, {}, tallies(0.7), local=of_last)
    of_best = {name: Evaluation(ROWS, {}, tallies(0.8)) for name in last}
    rounds = [
        inspection.RoundStatus(
            round=number,
            task=pb.EVALUATE if number == 4 else pb.TRAIN,
            evaluation=evaluation_message(together(list(sites.values())), of_sites=True),
            sites=[
                inspection.SiteMetrics(
                    participant_id=name, evaluation=evaluation_message(together([one]))
                )
                for name, one in sites.items()
            ],
        )
        for number, sites in ((3, of_best), (4, last))
    ]
    threshold = choose(tallies(0.8), "youden")
    assert threshold is not None
    return inspected.snapshot(
        rounds=rounds if has_best_round else rounds[1:],
        phase="finished",
        cause="completed",
        best_round=3,
        metric="log_loss",
        trend="The log loss still fell.",
        thresholds=[threshold_message(3, threshold, "ill")],
    )


def with_central(whole: Snapshot, central: CentralModel) -> Snapshot:
    whole.status.central.CopyFrom(central_message(central))
    return whole


@pytest.mark.parametrize("has_sites", [True, False])
def test_central_model_is_the_row_of_the_coordinator(has_sites):
    """The central model is listed beside those of the sites, or alone without held-out rows."""
    whole = compared()
    if not has_sites:
        del whole.rounds.rounds[:]
    whole = with_central(whole, CentralModel(3, at_site("north"), "my models/central.npz"))
    lines = shown(whole)
    assert lines["central"].split("central", 1)[1].strip() == (
        "log loss 0.2 (0.102 to 0.298) less with model 3 than with the central model on 100 "
        "held-out rows of the coordinator; my models/central.npz"
    )
    assert ("gain" in lines) == has_sites
    part = page(whole).split("<h2>What does each site gain?</h2>")[1].split("<h2>")[0]
    (row,) = (line for line in part.split("<tr>")[1:] if "rows of the coordinator" in line)
    assert "0.3567" in row, "the log loss of the global model on the rows that are held out"
    assert "0.5108" in row, "and that of the central one"
    assert BETTER in row
    number = len(SITES) + 1 if has_sites else 1
    assert f"evaluate --model 'my models/central.npz' --min-participants {number}" in unescape(part)
    assert "the central one as the best of up to ten points of its training" in part


def test_csv_has_all_figures_of_sites_and_coordinator():
    whole = with_central(compared(), CentralModel(3, at_site("north")))
    found = gains(whole.status, whole.rounds.rounds)
    assert found is not None
    rows = list(csv.DictReader(io.StringIO(to_csv(found))))
    by_rows = {(one["rows of"], one["site"]): one for one in rows if one["reading"]}
    assert [*by_rows] == [
        ("all sites", ""),
        *(("site", name) for name in sorted((*SITES, "east"))),
        ("coordinator", ""),
    ]
    south = by_rows["site", "south"]
    assert (south["metric"], south["model"], south["rows"]) == ("log_loss", "3", str(ROWS))
    assert float(south["global"]) == pytest.approx(-np.log(0.8))
    assert float(south["own"]) == pytest.approx(-np.log(0.6))
    assert float(south["difference"]) == pytest.approx(-0.3)
    assert float(south["difference low"]) < float(south["difference high"]) < 0
    assert by_rows["site", "east"]["reading"] == "all of one class"
    assert float(by_rows["coordinator", ""]["difference"]) == pytest.approx(0.2)
    of_south = {one["metric"]: one for one in rows if one["site"] == "south"}
    assert of_south["accuracy"]["global"] == of_south["accuracy"]["own"] == "1.0"
    assert of_south["accuracy"]["difference"] == ""


def test_reason_without_a_central_model_is_told():
    without = Evaluation(0, {}, local=LocalModel(why_not="own.csv is gone"))
    whole = with_central(compared(), CentralModel(3, without))
    assert "not compared with model 3: own.csv is gone" in shown(whole)["central"]
    part = page(whole).split("<h2>What does each site gain?</h2>")[1].split("<h2>")[0]
    (row,) = (line for line in part.split("<tr>")[1:] if "rows of the coordinator" in line)
    assert "own.csv is gone" in row
    assert "evaluate --model" not in part


@pytest.mark.parametrize("has_best_round", [True, False])
def test_each_site_is_told_by_its_paired_difference_to_the_best_model(has_best_round):
    """Also where the round of the best model is not among those that are listed."""
    whole = compared(has_best_round=has_best_round)
    found = gains(whole.status, whole.rounds.rounds)
    assert found.number == 3
    assert {name: one.reading for name, one in found.sites.items()} == {
        "north": BETTER,
        "south": WORSE,
        "west": EQUAL,
        "east": "all of one class",
    }
    difference = found.together.difference
    assert difference.value == pytest.approx(-0.03)
    assert found.together.local.num_samples == 3 * ROWS
    told = sentence(found)
    assert told.startswith("log loss 0.03 (-0.0")
    assert "more with model 3 than with local models" in told
    assert "better at 1 of 4 sites, worse at 1 of 4 sites" in told
    assert "its own model is better at south; east: all of one class" in told


def shown(whole: Snapshot) -> dict[str, str]:
    """Lines of the status by their first word."""
    text = io.StringIO()
    Console(file=text, width=200).print(frame(whole))
    return {line.split("  ")[0]: line for line in text.getvalue().splitlines()}


def test_status_has_a_line_of_gain_trend_and_threshold():
    lines = shown(compared())
    assert "with model 3 than with local models" in lines["gain"]
    assert lines["more passes"].rstrip().endswith("The log loss still fell.")
    assert "0.799 of ill, by youden: sensitivity 1 (0.9" in lines["threshold"]


def test_report_has_both_figures_of_each_site():
    text = page(compared())
    part = text.split("<h2>What does each site gain?</h2>")[1].split("<h2>")[0]
    assert "log loss, model 3" in part
    assert "log loss, its own alone" in part
    (south,) = (line for line in part.split("<tr>") if "south" in line)
    assert "0.2231" in south, "the log loss of model 3"
    assert "0.5108" in south, "and that of the local model"
    assert f"<b>{WORSE}</b>" in south
    (east,) = (line for line in part.split("<tr>") if "east" in line)
    assert "all of one class" in east
    assert "The log loss still fell." in part


def test_models_with_class_weights_are_compared_by_auc():
    """The log loss of such models is too high on purpose."""
    whole = compared()
    whole.status.weighs_classes = True
    found = gains(whole.status, whole.rounds.rounds)
    assert found.metric == "auc"
    assert sentence(found).startswith("AUC 0.03 (-0.0")
    assert "less with model 3 than with local models" in sentence(found)
    assert "AUC, its own alone" in page(whole)


def test_difference_of_all_rows_is_of_the_sites_that_have_one():
    """The rows of others do not count as if the two models were equally good there."""
    whole = compared(lacking="south")
    found = gains(whole.status, whole.rounds.rounds)
    difference = found.together.difference
    assert difference.value == pytest.approx((0.2 + 0.01) / 2)
    rows = f"on {2 * ROWS:,} of {3 * ROWS:,} rows"
    assert rows in sentence(found)
    assert rows in page(whole)


def test_session_without_local_models_has_no_such_section():
    whole = compared()
    for one in whole.rounds.rounds:
        one.evaluation.ClearField("local")
        for site in one.sites:
            site.evaluation.ClearField("local")
    assert gains(whole.status, whole.rounds.rounds) is None
    assert "What does each site gain?" not in page(whole)
