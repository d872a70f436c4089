"""Control variates of SCAFFOLD: which updates the server's is the mean of, and who begins anew."""

from typing import Any

import pytest
from tests.unit.core.bench import Bench, make_rules

from xain_coordinator.core.parts.control import MAX_ROUNDS_AWAY
from xain_coordinator.core.vocabulary import errors
from xain_workloads.model import CONTROL_LOST, TensorSpec

LAYOUT = (TensorSpec("w", (2,), "float32"), TensorSpec("control", (2,), "float32", "control"))
LOST = {CONTROL_LOST: 1.0}


class Variates(Bench):
    """A session whose model has a control variate."""

    def __init__(self, *names: str, **rules: Any) -> None:
        super().__init__(make_rules(initial="first", rounds=40, **rules))
        self.join(*names)
        (first,) = self.selected
        self.end(first, shape=(4,), layout=LAYOUT)

    def bring(self, name: str, num_samples: int, training: Any = None) -> None:
        number = self.session.trained_by(name)
        self.end(name, f"{name}@{number}", num_samples=num_samples, shape=(4,), training=training)

    @property
    def share(self) -> float | None:
        return self.aggregates[-1].control_share


def test_sites_without_rows_share_alike():
    bench = Variates("a", "b", fraction=0.5, controller="round_robin")
    bench.bring(*bench.selected, 0)
    assert bench.share == 1.0
    bench.bring(*bench.selected, 0)
    assert bench.share == 0.5


def test_all_begin_anew_if_one_has_lost_its_variate():
    """Nothing tells what it has added to the mean."""
    bench = Variates("a", "b", min_participants=2)
    for training in ({}, LOST):
        bench.bring("a", 10)
        bench.bring("b", 30, training)
    assert bench.share == 1.0
    assert (bench.start("a").counted_round, bench.start("b").counted_round) == (-1, -1)
    bench.restart()
    bench.bring("a", 10)
    bench.bring("b", 30)
    assert bench.start("a").counted_round == 3


@pytest.mark.parametrize("comes_back", [True, False])
def test_all_begin_anew_if_one_stays_away(comes_back):
    bench = Variates("a", "b")
    bench.bring("a", 10)
    bench.bring("b", 10)
    bench.leave("b")
    for _ in range(MAX_ROUNDS_AWAY - 1):
        bench.bring("a", 10)
    assert bench.start("a").counted_round == MAX_ROUNDS_AWAY
    if comes_back:
        bench.join("b")
    bench.bring("a", 10)
    assert bench.start("a").counted_round == (1 + MAX_ROUNDS_AWAY if comes_back else -1)
    if comes_back:
        assert bench.start("b").counted_round == 1


@pytest.mark.parametrize(
    ("layout", "rules", "told"),
    [
        (LAYOUT[::-1], {}, "is not its last tensor"),
        ((TensorSpec("w", (3,), "float32"), TensorSpec("c", (1,), "float32", "control")), {}, "3;"),
        (LAYOUT, {"consistency": "asp", "staleness": None}, "updates of earlier rounds"),
    ],
)
def test_initial_weights_whose_variate_cannot_be_are_refused(layout, rules, told):
    bench = Bench(make_rules(initial="first", **rules))
    bench.join("a")
    with pytest.raises(errors.InvalidUpdate, match=told):
        bench.end("a", shape=(4,), layout=layout)
