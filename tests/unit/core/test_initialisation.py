"""One participant makes the initial weights, and the rounds of training follow."""

from typing import Any

import pytest
from tests.unit.core.bench import DEADLINE_S, Bench, make_rules, timed_round

from xain_coordinator.core import errors
from xain_coordinator.core.values import Phase, Task
from xain_workloads.model import TensorSpec

LAYOUT = (TensorSpec("w", (2,), "float32"), TensorSpec("mean", (), "float32", "statistic"))


def opened(*names: str, **rules: Any) -> Bench:
    """These have joined, and one of them is asked for initial weights."""
    bench = Bench(make_rules(min_participants=len(names), initial="first", **rules))
    bench.join(*names)
    return bench


def test_one_participant_makes_the_initial_weights_while_the_others_wait() -> None:
    bench = opened("a", "b", "c")
    assert bench.selected == ("a",)
    assignment = bench.start("a")
    assert (assignment.task, assignment.round, assignment.epochs) == (Task.INITIALISE, 0, 0)
    assert assignment.model.is_empty
    assert bench.heartbeat("b").phase is Phase.STANDBY
    bench.refuses_end(errors.NotSelected, "b")


def test_all_train_from_the_weights_and_layout_of_the_first() -> None:
    bench = opened("a", "b", "c")
    bench.end("a", "first", layout=LAYOUT, num_samples=0)
    assert bench.aggregates[-1].rule == "identity"
    assert set(bench.selected) == {"a", "b", "c"}
    for name in ("a", "b", "c"):
        assignment = bench.start(name)
        assert (assignment.task, assignment.round) == (Task.TRAIN, 1)
        assert (assignment.epochs, assignment.epoch_base) == (5, 0)
        assert assignment.model.ref.digest == "first"
        assert assignment.model.layout == LAYOUT


def test_all_rounds_of_the_configuration_train_after_the_initialisation() -> None:
    bench = opened("a", "b", rounds=3)
    bench.end_all()
    trained = 0
    while bench.phase is not Phase.FINISHED:
        assert bench.start("a").task is Task.TRAIN
        bench.end_all()
        trained += 1
    assert trained == 3
    assert bench.session.model is not None
    assert bench.session.model.round == 4
    assert bench.session.round == 3  # the last one, counted from 0


def test_another_participant_takes_the_place_of_a_first_that_leaves() -> None:
    bench = opened("a", "b", "c")
    bench.join("d")
    bench.leave("a")
    assert bench.selected == ("b",)
    assert bench.start("b").task is Task.INITIALISE
    bench.end("b")
    assert bench.session.round == 1


def test_another_participant_takes_the_place_of_a_first_whose_weights_are_refused() -> None:
    bench = opened("a", "b", refused_limit=2, refused_rounds=1)
    bench.bring_refused("a", 2)
    assert bench.selected == ("b",)


def test_a_round_that_waits_for_initial_weights_ends_with_the_first_after_its_deadline() -> None:
    bench = timed_round("a", "b", "c", min_participants=2, initial="first")
    bench.pass_time(DEADLINE_S)
    assert bench.selected == ("a", "b", "c")
    assert bench.start("c").task is Task.INITIALISE
    bench.end("c", "of c")
    assert bench.session.round == 1
    assert bench.session.model is not None
    assert bench.session.model.ref.digest == "of c"


def test_initialisation_goes_on_after_a_restart() -> None:
    bench = opened("a", "b")
    bench.restart()
    assert bench.selected == ("a",)
    bench.answers = False
    bench.end("a", "first", layout=LAYOUT)
    bench.restart()
    bench.answer()
    assert bench.session.model is not None
    assert bench.session.model.layout == LAYOUT


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ((TensorSpec("w", (4,), "float32"),), "describes 4 elements"),
        ((TensorSpec("w", (1,), "float32"), TensorSpec("w", (2,), "float32")), "twice"),
        ((TensorSpec("", (3,), "float32"),), "name of its own"),
        ((TensorSpec("w", (-1, -3), "float32"),), "shape"),
        ((TensorSpec("w", (3,), "int64"),), "dtype 'int64'"),
    ],
)
def test_a_layout_that_does_not_describe_the_weights_is_refused(layout: Any, why: str) -> None:
    bench = opened("a", "b")
    with pytest.raises(errors.InvalidUpdate, match=why):
        bench.end("a", layout=layout)
    bench.end("a", layout=LAYOUT)


def test_initial_weights_that_are_not_finite_are_refused() -> None:
    bench = opened("a", "b")
    bench.refuses_end(errors.InvalidUpdate, "a", first_bad=1)


def test_layout_of_averaged_weights_is_the_one_that_all_declare() -> None:
    for others, kept in ((LAYOUT, LAYOUT), ((), ())):
        bench = Bench(make_rules(min_participants=2, initial="empty"))
        bench.join("a", "b")
        assert bench.start("a").task is Task.INITIALISE
        bench.end("a", layout=LAYOUT)
        bench.end("b", layout=others)
        assert bench.start("a").model.layout == kept


def test_layout_that_comes_with_a_trained_update_is_not_looked_at() -> None:
    bench = opened("a")
    bench.end("a", layout=LAYOUT)
    bench.end("a", layout=(TensorSpec("other", (9,), "float32"),))
    assert bench.session.model is not None
    assert bench.session.model.layout == LAYOUT
