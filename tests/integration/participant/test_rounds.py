"""xain.rounds() against scripted coordinators and real ones."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import xain
from integration.participant.scripted import Ledger, ScriptedCoordinator, refusal
from support.logs import capture_logs
from support.waiting import wait_until
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_wire.fl import coordinator_pb2 as pb
from xain_workloads.errors import DataError
from xain_workloads.tables.data import load

Start = Callable[..., Awaitable[SessionCoordinator]]


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Wait until the agents of a test have ended: the next test would capture their last events."""
    yield
    wait_until(lambda: not any(one.name.startswith("agent-") for one in threading.enumerate()))


def add_one(coordinator: ScriptedCoordinator, **settings: Any) -> list[int]:
    """Add 1 to every weight in each round. Returns the numbers of the rounds."""
    numbers = []
    for round_ in xain.rounds(coordinator=coordinator.target, id="ward-7", **settings):
        numbers.append(round_.number)
        weights = {name: array + 1 for name, array in round_.weights.items()}
        round_.submit(weights, samples=5, metrics={"loss": 0.5})
    return numbers


def test_loop_trains_every_round_and_ends_with_the_session(serve):
    """Each update is what the body has submitted, with its samples and metrics."""
    coordinator = serve(Ledger(rounds=3))
    assert add_one(coordinator) == [0, 1, 2]
    samples, vector, metrics = coordinator.ledger.accepted[2]
    assert samples == 5
    assert vector.tolist() == [3.0] * 4
    assert '"loss": 0.5' in metrics


def test_config_reads_the_section_train(serve):
    """Settings are read by attribute, by key and by get(); a missing setting is named."""
    coordinator = serve(Ledger(rounds=1, train_config='{"lr": 0.5, "opt": {"name": "sgd"}}'))
    with xain.rounds(coordinator=coordinator.target) as rounds:
        round_ = next(rounds)
        assert (round_.config.lr, round_.config["lr"], round_.config.epochs) == (0.5, 0.5, 1)
        assert round_.config.opt.name == "sgd"
        assert round_.config.get("mu", 0.25) == 0.25
        with pytest.raises(AttributeError, match=r"train\.opt\.momentum is not set"):
            _ = round_.config.opt.momentum
        round_.submit(round_.weights, samples=1)


def test_flat_vector_is_given_as_it_was_declared(serve):
    """A flat initial has no names, whatever the session calls its tensors."""
    coordinator = serve(Ledger(rounds=1))
    for round_ in xain.rounds(np.zeros(4, np.float32), coordinator=coordinator.target):
        assert round_.weights.tolist() == [0.0] * 4
        round_.submit(round_.weights + 2, samples=1)
    assert coordinator.ledger.accepted[0][1].tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("initial", "message"),
    [
        ({"w": np.zeros(5)}, r"tensor 'w' has shape \(5,\) in this script and \(4,\)"),
        ({"v": np.zeros(4)}, r"the session's model has a tensor 'w' of shape \(4,\)"),
        (
            {"w": np.zeros(4), "b": np.zeros(1)},
            r"this script's model has a tensor 'b' of shape \(1,\)",
        ),
        (np.zeros(5), "this script's model has 5 values, the session's 4"),
    ],
)
def test_another_model_than_the_session_has_is_refused_by_name(serve, initial, message):
    """Before anything is trained; the participant leaves."""
    coordinator = serve()
    with pytest.raises(xain.LayoutMismatch, match=message):
        next(xain.rounds(initial, coordinator=coordinator.target))
    coordinator.wait_until(lambda: not coordinator.ledger.members)


def test_initial_weights_are_sent_with_their_layout(serve):
    """The participant that is asked for them spends no round of the script."""
    ledger = Ledger(model=np.zeros(0, np.float32), tasks={0: pb.INITIALISE})
    coordinator = serve(ledger)
    initial = {"w": np.arange(4, dtype=np.float32), "bn.running_mean": np.ones(2, np.float32)}
    with xain.rounds(initial, coordinator=coordinator.target) as rounds:
        coordinator_layout = coordinator.ended
        threading.Thread(
            target=lambda: coordinator.wait_until(lambda: 0 in ledger.accepted), daemon=True
        ).start()
        with pytest.raises(xain.LayoutMismatch):  # the script knows one tensor only
            next(rounds)
    assert ledger.accepted[0][1].tolist() == [0, 1, 2, 3, 1, 1]
    (request,) = coordinator_layout
    assert [(t.name, tuple(t.shape), t.kind) for t in request.layout] == [
        ("w", (4,), "weight"),
        ("bn.running_mean", (2,), "statistic"),
    ]


def test_initial_weights_that_were_not_declared_are_asked_for(serve):
    coordinator = serve(Ledger(model=np.zeros(0, np.float32)))
    with pytest.raises(RuntimeError, match=r"declare them with xain\.rounds\(model\)"):
        next(xain.rounds(coordinator=coordinator.target))


def test_evaluation_travels_with_the_update(serve):
    coordinator = serve(Ledger(rounds=1))
    for round_ in xain.rounds(coordinator=coordinator.target, evaluates=True):
        round_.evaluate({"accuracy": 0.75}, samples=20)
        round_.submit(round_.weights, samples=5)
    (request,) = coordinator.ended
    assert request.evaluation.num_samples == 20
    assert dict(request.evaluation.metrics) == {"accuracy": 0.75}


def test_evaluation_round_is_answered_without_weights(serve):
    """A body that trains all the same gets an error."""
    coordinator = serve(Ledger(rounds=2, tasks={1: pb.EVALUATE}))
    for round_ in xain.rounds(coordinator=coordinator.target, evaluates=True):
        if round_.task == "train":
            round_.submit(round_.weights, samples=5)
            continue
        assert round_.wants_evaluation
        with pytest.raises(RuntimeError, match="asks for an evaluation only"):
            round_.submit(round_.weights, samples=5)
        round_.evaluate({"accuracy": 1.0}, samples=3)
    assert coordinator.ended[1].evaluation.num_samples == 3
    assert not coordinator.ended[1].HasField("update")


# --- mistakes of the script ---


def test_body_without_submit_is_a_clear_error(serve):
    coordinator = serve()
    rounds = xain.rounds(coordinator=coordinator.target)
    next(rounds)
    with pytest.raises(RuntimeError, match=r"without round\.submit\(\) in round 0"):
        next(rounds)
    coordinator.wait_until(lambda: not coordinator.ledger.members)


@pytest.mark.parametrize(
    ("weights", "samples", "metrics", "message"),
    [
        ({}, 5, {}, r"round\.submit\(\) was given no tensor 'w'"),
        ({"w": np.zeros(4), "v": np.zeros(4)}, 5, {}, "was given a tensor 'v', which"),
        ({"w": np.zeros(3)}, 5, {}, r"tensor 'w' with shape \(3,\), expected \(4,\)"),
        (np.zeros(3), 5, {}, "was given 3 values; the model has 4"),
        ([1, 2], 5, {}, r"takes model\.state_dict\(\)"),
        ({"w": np.zeros(4)}, -1, {}, "was given -1 samples"),
        ({"w": np.zeros(4)}, 1.5, {}, "the number of samples as an integer, not float"),
        ({"w": np.zeros(4)}, 5, {"loss": float("nan")}, "metric 'loss' is nan"),
    ],
)
def test_submit_refuses_unusable_values(serve, weights, samples, metrics, message):
    """At the line that calls it; a better call may follow."""
    coordinator = serve(Ledger(rounds=1))
    for round_ in xain.rounds(coordinator=coordinator.target):
        with pytest.raises((ValueError, TypeError), match=message):
            round_.submit(weights, samples=samples, metrics=metrics)
        round_.submit(round_.weights, samples=1)
        with pytest.raises(RuntimeError, match="submitted already"):
            round_.submit(round_.weights, samples=1)
    assert len(coordinator.ended) == 1


def test_exception_within_with_is_raised_and_ends_the_participant(serve):
    """The script sees its own exception, unchanged, and the coordinator a participant that left."""
    coordinator = serve()
    error = KeyError("no such column")

    def script() -> None:
        with xain.rounds(coordinator=coordinator.target) as rounds:
            for _ in rounds:
                raise error

    with capture_logs() as logs, pytest.raises(KeyError) as caught:
        script()
    assert caught.value is error
    assert all("_run_jobs" not in str(entry.frame) for entry in caught.traceback)
    coordinator.wait_until(lambda: not coordinator.ledger.members)
    (exiting,) = (entry for entry in logs if entry["event"] == "exiting")
    assert exiting["reason"].endswith("KeyError: 'no such column'")


async def test_cell_of_a_file_that_a_script_fails_to_load_stays_at_the_participant(start, tmp_path):
    """The error of our own loader names column, row and cell; the coordinator hears its type."""
    coordinator = await start(rounds={"rounds": 2, "min_participants": 1})
    (tmp_path / "a.csv").write_text("age,y\n40,0\nJohn Smith,1\n")

    def script() -> None:
        initial = {"w": np.zeros(1, np.float32)}
        target = f"127.0.0.1:{coordinator.port}"
        with xain.rounds(initial, coordinator=target, id="ward-7") as rounds:
            for _ in rounds:
                load(tmp_path / "a.csv")

    with capture_logs() as logs, pytest.raises(DataError, match="John Smith"):
        await asyncio.to_thread(script)
    (told,) = (entry for entry in logs if entry["event"] == "training_failed")
    assert told["reason"] == "DoesNotFit"


def test_loop_that_is_left_early_leaves_the_session(serve):
    """After its last update was acknowledged."""
    coordinator = serve(Ledger(rounds=5))
    for round_ in xain.rounds(coordinator=coordinator.target):
        round_.submit(round_.weights, samples=5)
        if round_.number == 1:
            break
    coordinator.wait_until(lambda: not coordinator.ledger.members)
    assert sorted(coordinator.ledger.accepted) == [0, 1]


def test_loop_that_is_left_within_a_round_tells_where(serve):
    coordinator = serve()
    with capture_logs() as logs:
        for _ in xain.rounds(coordinator=coordinator.target):
            break
        coordinator.wait_until(lambda: not coordinator.ledger.members)
    (left,) = (entry for entry in logs if entry["event"] == "round_abandoned")
    assert "test_rounds.py:" in left["reason"]


def test_loop_without_a_round_has_a_status_of_its_own(serve):
    """A script whose site was never selected must not look as if it had trained."""
    coordinator = serve(Ledger(rounds=0))
    with capture_logs() as logs, xain.rounds(coordinator=coordinator.target) as rounds:
        assert [round_.number for round_ in rounds] == []
        assert rounds.exit_status == 5
    (end,) = (entry for entry in logs if entry["event"] == "exiting")
    assert end["log_level"] == "warning"
    assert "it was never selected to train" in end["reason"]


def test_round_without_samples_is_warned_of_once(serve):
    """An update of no sample has no weight beside others."""
    coordinator = serve(Ledger(rounds=3))
    with capture_logs() as logs:
        for round_ in xain.rounds(coordinator=coordinator.target):
            round_.submit(round_.weights, samples=0)
    told = [entry for entry in logs if entry["event"] == "trained_without_samples"]
    assert [(entry["log_level"], entry["round"]) for entry in told] == [("warning", 0)]


def test_session_that_ends_without_a_result_is_an_error(serve):
    coordinator = serve(Ledger(rounds=0, cause="nobody came"))
    with pytest.raises(xain.SessionError, match="nobody came"):
        add_one(coordinator)


def test_participant_that_waits_tells_each_reason_once(serve):
    coordinator = serve(Ledger(rounds=1))
    coordinator.kept_out.extend(("no column", "no column", "another target"))
    with capture_logs() as logs:
        assert add_one(coordinator) == [0]
    told = [entry["reason"] for entry in logs if entry["event"] == "not_let_in_yet"]
    assert told == ["no column", "another target"]


def test_participant_that_is_refused_is_told_why(serve):
    coordinator = serve()
    coordinator.before["Rendezvous"].append(refusal("PROFILE_MISMATCH"))
    with pytest.raises(xain.SessionError, match="because"):
        add_one(coordinator)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "a/b"}, "participant.id"),
        ({"coordinator": "host:port"}, r"^xain\.rounds\(\): coordinator.port is"),
        ({"tags": {"a b": "x"}}, "participant.tags"),
    ],
)
def test_settings_that_cannot_be_used_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        xain.rounds(**settings)
