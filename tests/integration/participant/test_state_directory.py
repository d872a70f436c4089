"""A participant that is killed after training comes back with its result."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from integration.participant.agents import Adder
from integration.participant.scripted import PATIENCE_S, Ledger, failure
from support.logs import capture_logs
from xain_participant import StateDirectory, run
from xain_participant.keep.result import Result
from xain_wire.fl import coordinator_pb2 as pb


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def state(folder: Path) -> Iterator[StateDirectory]:
    with StateDirectory(folder, "ward-7") as state:
        yield state


def trained_by_another_process(state: StateDirectory, ledger: Ledger) -> Result:
    """Keep a result as a process did that was killed since. Adding 10 tells it from ours."""
    result = Result("s1", ledger.round, ledger.model + 10, 7, '[{"loss": 1}]')
    state.keep(result)
    return result


@pytest.mark.parametrize("size", [4, 50_000], ids=["small", "large"])
def test_a_result_from_before_is_handed_in(serve, state, size):
    ledger = Ledger(model=np.zeros(size, dtype=np.float32))
    result = trained_by_another_process(state, ledger)
    adder = Adder()
    assert run(adder, serve(ledger).target, state=state) == 0
    assert adder.trained == [10], "only the second round"
    num_samples, vector, metrics = ledger.accepted[0]
    assert (num_samples, metrics) == (7, '[{"loss": 1}]')
    assert vector.tobytes() == result.vector.tobytes()
    assert ledger.accepted[1][0] == 5


def test_a_result_whose_acknowledgement_was_lost_with_its_maker_counts_once(serve, state):
    """The result is sent again, and answered as the first time."""
    server = serve()
    server.tells_accepted = False
    result = trained_by_another_process(state, server.ledger)
    server.ledger.accepted[0] = (7, result.vector, "[]")
    adder = Adder()
    assert run(adder, server.target, state=state) == 0
    assert adder.trained == [10]
    assert server.ledger.accepted[0][2] == "[]", "the first one"


def test_a_full_disk_costs_no_training(serve, state, monkeypatch):
    """The result is still in memory; only a kill would lose it now."""

    def fail(_: Result) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(state, "keep", fail)
    adder = Adder()
    with capture_logs() as logs:
        assert run(adder, serve().target, state=state) == 0
    assert adder.trained == [0, 1]
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [(e["event"], e["round"], e["reason"]) for e in warnings] == [
        ("result_not_kept", 0, "No space left on device"),
        ("result_not_kept", 1, "No space left on device"),
    ]


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "not kept"])
def test_a_stop_says_goodbye_unless_the_result_is_kept(serve, launch, state, monkeypatch, is_kept):
    """A participant that comes back with its result keeps its place in the round. A participant
    whose result is lost gives its place to another one."""

    def fail(_: Result) -> None:
        raise OSError("No space left on device")

    if not is_kept:
        monkeypatch.setattr(state, "keep", fail)
    server = serve()
    server.before["EndTrainingRound"].extend([failure(grpc.StatusCode.UNAVAILABLE)] * 10_000)
    running = launch(Adder(), server.target, state=state)
    server.wait_until(lambda: server.calls["EndTrainingRound"] >= 1)
    running.agent.stop(143)
    assert running.code() == 143
    assert (pb.FINISHED in {said for said, _ in server.heartbeats}) == (not is_kept)


def test_a_run_that_was_left_keeps_nothing(serve, launch, adder, state):
    """The participant's own code cannot be interrupted. When it is done the next run may have kept
    what it has trained itself."""
    server = serve()
    server.before["EndTrainingRound"].extend([failure(grpc.StatusCode.UNAVAILABLE)] * 10_000)
    adder.may_finish.clear()
    left = launch(adder, server.target, state=state)
    assert adder.entered.wait(PATIENCE_S)
    left.agent.stop()
    left.code()
    server.ledger.round = 1
    launch(Adder(), server.target, state=state)
    server.wait_until(lambda: server.calls["EndTrainingRound"] >= 1)
    adder.may_finish.set()
    left.agent._tasks[0].join(PATIENCE_S)
    kept = state.load()
    assert kept.round == 1
