"""One participant makes the initial weights, and the rounds of training follow."""

from typing import Any

import pytest
from tests.unit.core.bench import IDLE_S, TIMED, Bench, make_rules

from xain_coordinator.core.view.view import waiting_for
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import Phase, Task
from xain_workloads.model import TensorSpec

LAYOUT = (TensorSpec("w", (2,), "float32"), TensorSpec("mean", (), "float32", "statistic"))


def opened(*names: str, **rules: Any) -> Bench:
    """A session whose participants have joined, one of which is asked for initial weights."""
    bench = Bench(make_rules(min_participants=len(names), initial="first", **rules))
    bench.join(*names)
    return bench


def test_one_participant_makes_the_initial_weights_while_the_others_wait():
    bench = opened("a", "b", "c")
    assert bench.selected == ("a",)
    assignment = bench.start("a")
    assert (assignment.task, assignment.round, assignment.epochs) == (Task.INITIALISE, 0, 0)
    assert assignment.model.is_empty
    assert bench.heartbeat("b").phase is Phase.STANDBY
    bench.refuses_end("NOT_SELECTED", "b")


def test_all_train_from_the_weights_and_layout_of_the_first():
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


def test_all_rounds_of_the_configuration_train_after_the_initialisation():
    bench = opened("a", "b", rounds=3)
    assert bench.session.num_trained == 0
    bench.end_all()
    trained = 0
    while bench.phase is not Phase.FINISHED:
        assert bench.start("a").task is Task.TRAIN
        assert bench.session.num_trained == trained
        bench.end_all()
        trained += 1
    assert bench.session.num_trained == trained
    assert trained == 3
    assert bench.session.model.round == 4
    assert bench.session.round == 3  # the last one, counted from 0


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
def test_a_layout_that_does_not_describe_the_weights_is_refused(layout, why):
    bench = opened("a", "b")
    with pytest.raises(errors.InvalidUpdate, match=why):
        bench.end("a", layout=layout)
    bench.end("a", layout=LAYOUT)


def test_layout_of_averaged_weights_is_the_one_that_all_declare():
    for others, kept in ((LAYOUT, LAYOUT), ((), ())):
        bench = Bench(make_rules(min_participants=2, initial="empty"))
        bench.join("a", "b")
        assert bench.start("a").task is Task.INITIALISE
        bench.end("a", layout=LAYOUT)
        bench.end("b", layout=others)
        assert bench.start("a").model.layout == kept


def test_layout_that_comes_with_a_trained_update_is_not_looked_at():
    bench = opened("a")
    bench.end("a", layout=LAYOUT)
    bench.end("a", layout=(TensorSpec("other", (9,), "float32"),))
    assert bench.session.model.layout == LAYOUT


def waiting(**rules: Any) -> Bench:
    """Two participants have joined, and neither can make initial weights."""
    bench = Bench(make_rules(min_participants=2, initial="first", **rules))
    bench.join("a", "b", can_initialise=False)
    return bench


def test_session_waits_for_a_participant_with_initial_weights_and_says_so():
    bench = waiting()
    assert bench.phase is Phase.STANDBY
    assert not bench.happened(e.RoundOpened)
    assert "xain.rounds(model)" in waiting_for(bench.session)
    assert "xain.rounds(model)" in bench.heartbeat("a").warning
    bench.join("c")
    assert bench.selected == ("c",)
    assert waiting_for(bench.session) == "The initial weights, from c."
    assert bench.heartbeat("a").warning == ""


def test_session_without_initial_weights_ends_after_the_idle_timeout():
    bench = waiting(**TIMED)
    bench.pass_time(IDLE_S)
    assert bench.phase is Phase.FINISHED
    assert "waited for initial weights" in bench.session.cause


def test_participant_that_joins_again_with_initial_weights_within_its_lease_makes_them():
    bench = waiting()
    bench.join("b")
    assert bench.selected == ("b",)
    bench.restart()
    bench.end("b")
    assert bench.session.round == 1
    assert bench.session.members.num_eligible == 2


def test_participant_that_joins_again_without_initial_weights_is_not_asked_for_them():
    bench = waiting()
    bench.join("a")
    assert bench.selected == ("a",)
    bench.join("a", can_initialise=False)
    assert bench.session.lacks_initialisers
    bench.join("b")
    assert bench.selected == ("b",)


def test_participant_of_a_trained_model_keeps_its_work_whatever_weights_it_has():
    bench = waiting()
    bench.join("b")
    bench.end("b")
    assert set(bench.selected) == {"a", "b"}
    bench.join("a")
    assert set(bench.selected) == {"a", "b"}
    assert not bench.happened(e.ParticipantLeft)[1:], "b left once, when it came with weights"


def test_average_waits_for_enough_participants_with_initial_weights():
    """Participants without initial weights take part in the rounds of training."""
    bench = Bench(make_rules(min_participants=2, rounds=3, initial="empty"))
    bench.join("a", "b")
    assert set(bench.selected) == {"a", "b"}
    bench = Bench(make_rules(min_participants=2, rounds=3, initial="empty"))
    bench.join("a")
    bench.join("b", can_initialise=False)
    assert bench.phase is Phase.STANDBY
    bench.join("c")
    assert set(bench.selected) == {"a", "c"}
    bench.end_all()
    assert set(bench.selected) == {"a", "b", "c"}
