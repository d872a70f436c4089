"""How long a training is: decided once, for the sites with which it begins."""

from dataclasses import replace

import pytest
from tests.unit.core.bench import Bench, make_rules

from xain_coordinator.core.view.view import planned
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import DataProfile, Phase, Stride


def rows(number: int) -> DataProfile:
    return DataProfile(num_samples=number, num_features=4, classes=("no", "yes"))


def test_plan_is_decided_once_for_the_sites_that_are_there():
    """Neither a later site nor a restart changes the number of rounds."""
    bench = Bench(make_rules(passes=3, rounds=3, epochs=1, min_participants=2))
    bench.join("a", profile=rows(1000))
    assert planned(bench.session) == "", "nothing is decided before the first round"
    bench.join("b", profile=rows(460))
    assert planned(bench.session) == "3 passes over 1,460 rows at 2 sites: 3 rounds of 1 epoch"
    bench.end_all()
    bench.join("c", profile=rows(9000))
    bench.restart()
    bench.end_all()
    bench.end_all()
    assert bench.phase is Phase.FINISHED
    assert len(bench.happened(e.TrainingPlanned)) == 1
    assert bench.session.num_passes == 3
    assert planned(bench.session) == "3 passes over 1,460 rows at 2 sites: 3 rounds of 1 epoch"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"epochs": 2}, "5 passes over 60 rows at 3 sites: 3 rounds of 2 epochs"),
        ({"plans_epochs": True}, "5 passes over 60 rows at 3 sites: 5 rounds of 1 epoch"),
        (
            {"fraction": "1/3", "start_participants": 3, "controller": "round_robin"},
            "5 passes over 60 rows at 3 sites, 1 of them a round: 15 rounds of 1 epoch",
        ),
        (
            {"fraction": "1/3", "start_participants": 3, "controller": "all"},
            "5 passes over 60 rows at 3 sites: 5 rounds of 1 epoch",
        ),
        (
            {"stride": Stride(step_rows=8), "aggregation": "gradient"},
            "5 passes over 60 rows at 3 sites: 20 rounds of a step each",
        ),
        (
            {"stride": Stride(levels=6), "aggregation": "trees"},
            "5 passes over 60 rows at 3 sites: 30 rounds, 6 for each boosting iteration",
        ),
        (
            {"consistency": "ssp", "staleness": 3, "buffer_size": 2, "start_participants": 3},
            "5 passes over 60 rows at 3 sites, 2 of them a round: 8 rounds of 1 epoch",
        ),
        (
            {"passes": 0, "rounds": 7, "workload": "sgd"},
            "7 rounds of 1 epoch over 60 rows at 3 sites",
        ),
    ],
)
def test_rounds_follow_from_passes_rows_and_sites(given, told):
    """The largest of the sites has 30 rows."""
    rules = {"passes": 5, "epochs": 1, "min_participants": 3, **given}
    if "fraction" in given or "consistency" in given:
        rules["min_participants"] = 1
    aggregation = str(rules.pop("aggregation", "weighted_average"))
    bench = Bench(replace(make_rules(**rules), aggregation=aggregation))  # type: ignore[arg-type]
    for name, number in (("a", 10), ("b", 20), ("c", 30)):
        bench.join(name, profile=rows(number))
    assert planned(bench.session) == told


def test_pass_takes_more_rounds_where_some_sites_train_a_round():
    """Patience is counted in passes, which are several rounds here."""
    bench = Bench(make_rules(fraction="0.5", start_participants=2, passes=50, epochs=1))
    bench.join("a", "b")
    assert bench.session.plan.rounds_per_pass == 2
