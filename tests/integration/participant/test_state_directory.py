"""A participant that is killed after training comes back with its result."""

import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from integration.participant.scripted import PATIENCE_S, Ledger, ScriptedCoordinator, failure
from support.logs import capture_logs
from xain_participant import Agent, Participant, StateDirectory, run
from xain_participant.client import CoordinatorClient
from xain_participant.events import Trained
from xain_participant.result import NotKept, Result
from xain_participant.values import Call
from xain_participant.work import Work
from xain_proto.fl import coordinator_pb2 as pb

Serve = Callable[..., ScriptedCoordinator]


class Adder(Participant):
    """Adds 1 to every weight."""

    def __init__(self) -> None:
        self.trained: list[float] = []  # the first weight of each model that was trained

    def init_weights(self) -> Any:
        raise AssertionError("there is a model")

    def train_round(self, weights: Any, epochs: int, epoch_base: int) -> Any:
        self.trained.append(float(weights[0]))
        self.update_metrics(loss=float(weights[0]))
        return weights + 1, 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def state(folder: Path) -> Iterator[StateDirectory]:
    with StateDirectory(folder, "ward-7") as state:
        yield state


def trained_by_another_process(
    state: StateDirectory, ledger: Ledger, session_id: str = "s1"
) -> Result:
    """It has been killed since. Adding 10 tells its result from ours."""
    result = Result(session_id, ledger.round, ledger.model + 10, 7, '[{"loss": 1}]')
    state.keep(result)
    return result


@pytest.mark.parametrize("size", [4, 50_000], ids=["small", "large"])
def test_a_result_from_before_is_handed_in(serve: Serve, state: StateDirectory, size: int) -> None:
    ledger = Ledger(model=np.zeros(size, dtype=np.float32))
    result = trained_by_another_process(state, ledger)
    adder = Adder()
    assert run(adder, serve(ledger).target, state=state) == 0
    assert adder.trained == [10], "only the second round"
    num_samples, vector, metrics = ledger.accepted[0]
    assert (num_samples, metrics) == (7, '[{"loss": 1}]')
    assert vector.tobytes() == result.vector.tobytes()
    assert ledger.accepted[1][0] == 5


def test_what_is_handed_in_is_not_kept(serve: Serve, state: StateDirectory) -> None:
    server = serve()
    server.before["EndTrainingRound"].append(failure(grpc.StatusCode.UNAVAILABLE))
    assert run(Adder(), server.target, state=state) == 0
    assert state.load() is None


def test_a_result_of_another_session_is_not_sent(serve: Serve, state: StateDirectory) -> None:
    ledger = Ledger(session_id="s2")
    trained_by_another_process(state, ledger)
    adder = Adder()
    assert run(adder, serve(ledger).target, state=state) == 0
    assert adder.trained == [0, 1]


def test_a_result_of_another_round_is_not_sent(serve: Serve, state: StateDirectory) -> None:
    ledger = Ledger()
    trained_by_another_process(state, ledger)
    ledger.round = 1
    adder = Adder()
    assert run(adder, serve(ledger).target, state=state) == 0
    assert adder.trained == [0]
    assert sorted(ledger.accepted) == [1]


def test_a_result_whose_acknowledgement_was_lost_with_its_maker_counts_once(
    serve: Serve, state: StateDirectory
) -> None:
    """It is sent again, and answered as the first time."""
    server = serve()
    server.tells_accepted = False
    result = trained_by_another_process(state, server.ledger)
    server.ledger.accepted[0] = (7, result.vector, "[]")
    adder = Adder()
    assert run(adder, server.target, state=state) == 0
    assert adder.trained == [10]
    assert server.ledger.accepted[0][2] == "[]", "the first one"


def test_without_a_session_id_nothing_is_kept(serve: Serve, state: StateDirectory) -> None:
    """Nobody could tell later whether it is still the same session; XAIN's coordinator has none."""
    server = serve(Ledger(session_id=""))
    adder = Adder()
    with CoordinatorClient(server.target, "ward-7") as client:
        client.rendezvous()
        work = Work(adder, client, "ward-7", state)
        work.do(Call.BEGIN_ROUND, 0)
        assert work.do(Call.TRAIN, 0) == Trained(0, is_durable=False)
        assert state.load() is None
        work.session_id = "s1"
        work.do(Call.BEGIN_ROUND, 0)
        assert work.do(Call.TRAIN, 0) == Trained(0, is_durable=True)
        assert state.load() is not None
        work.drop()
        assert state.load() is None


def test_a_full_disk_costs_no_training(
    serve: Serve, state: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is still in memory; only a kill would lose it now."""

    def fail(_: Result) -> None:
        raise NotKept("No space left on device")

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
def test_a_stop_says_goodbye_unless_the_result_is_kept(
    serve: Serve, state: StateDirectory, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """A participant that comes back with its result keeps its place in the round. A participant
    whose result is lost gives its place to another one."""

    def fail(_: Result) -> None:
        raise NotKept("No space left on device")

    if not is_kept:
        monkeypatch.setattr(state, "keep", fail)
    server = serve()
    server.before["EndTrainingRound"].extend([failure(grpc.StatusCode.UNAVAILABLE)] * 10_000)
    agent = Agent(Adder(), server.target, "ward-7", state=state)
    codes: list[int] = []
    running = threading.Thread(target=lambda: codes.append(agent.run()))
    running.start()
    server.wait_until(lambda: server.calls["EndTrainingRound"] >= 1)
    agent.stop(143)
    running.join(PATIENCE_S)
    assert codes == [143]
    assert (pb.FINISHED in {said for said, _ in server.heartbeats}) == (not is_kept)


@pytest.fixture
def stuck(state: StateDirectory, monkeypatch: pytest.MonkeyPatch) -> Iterator["Stuck"]:
    stuck = Stuck(state)
    monkeypatch.setattr(state, "keep", stuck.keep)
    yield stuck
    stuck.may_write.set()


class Stuck:
    """A disk that is slow."""

    def __init__(self, state: StateDirectory) -> None:
        self._keep = state.keep
        self.is_writing = threading.Event()
        self.may_write = threading.Event()
        self.has_written = threading.Event()

    def keep(self, result: Result) -> None:
        self.is_writing.set()
        assert self.may_write.wait(PATIENCE_S)
        self._keep(result)
        self.has_written.set()


def test_who_is_stopped_while_its_result_is_written_keeps_its_place(
    serve: Serve, state: StateDirectory, stuck: Stuck
) -> None:
    """It comes back with it."""
    server = serve()
    agent = Agent(Adder(), server.target, "ward-7", state=state)
    codes: list[int] = []
    running = threading.Thread(target=lambda: codes.append(agent.run()))
    running.start()
    assert stuck.is_writing.wait(PATIENCE_S)
    agent.stop(143)
    running.join(PATIENCE_S)
    stuck.may_write.set()
    assert codes == [143]
    assert pb.FINISHED not in {said for said, _ in server.heartbeats}, "that would be goodbye"
    assert stuck.has_written.wait(PATIENCE_S)
    left = state.load()
    assert left is not None
    assert left.round == 0


class Slow(Adder):
    """Trains until it may end, whatever becomes of its run."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def train_round(self, weights: Any, epochs: int, epoch_base: int) -> Any:
        self.has_begun.set()
        assert self.may_end.wait(PATIENCE_S)
        return super().train_round(weights, epochs, epoch_base)


def test_a_run_that_was_left_keeps_nothing(serve: Serve, state: StateDirectory) -> None:
    """The participant's own code cannot be interrupted. When it is done the next run may have kept
    what it has trained itself."""
    server = serve()
    server.before["EndTrainingRound"].extend([failure(grpc.StatusCode.UNAVAILABLE)] * 10_000)
    slow = Slow()
    left = Agent(slow, server.target, "ward-7", state=state)
    running = threading.Thread(target=left.run)
    running.start()
    assert slow.has_begun.wait(PATIENCE_S)
    left.stop()
    running.join(PATIENCE_S)
    server.ledger.round = 1
    second = Agent(Adder(), server.target, "ward-7", state=state)
    running = threading.Thread(target=second.run)
    running.start()
    server.wait_until(lambda: server.calls["EndTrainingRound"] >= 1)
    slow.may_end.set()
    left._tasks[0].join(PATIENCE_S)
    kept = state.load()
    second.stop()
    running.join(PATIENCE_S)
    assert kept is not None
    assert kept.round == 1


def test_the_name_is_the_states(serve: Serve, folder: Path) -> None:
    server = serve()
    with StateDirectory(folder) as state:
        assert run(Adder(), server.target, state=state) == 0
        assert server.identities == {state.participant_id}
        with pytest.raises(ValueError, match="participant_id is 'ward-8', but the state is that"):
            Agent(Adder(), server.target, "ward-8", state=state)


# --- processes ---

PROGRAM = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from xain_participant import Agent, Participant, StateDirectory
    from xain_participant.signals import stopped_by_signals

    class Adder(Participant):
        def init_weights(self):
            raise AssertionError("there is a model")

        def train_round(self, weights, epochs, epoch_base):
            print("training", epoch_base, flush=True)
            return weights + 1, 5

    with StateDirectory(Path(sys.argv[2])) as state:
        agent = Agent(Adder(), sys.argv[1], state=state)
        with stopped_by_signals(agent):
            code = agent.run()
    sys.exit(code)
    """
)


class Process:
    """A participant of its own."""

    def __init__(self, server: ScriptedCoordinator, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, server.target, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Exit status, and what it has trained."""
        trained, _ = self._process.communicate(timeout=PATIENCE_S)
        return self._process.returncode, trained

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def launch(folder: Path) -> Iterator[Callable[[ScriptedCoordinator], Process]]:
    running: list[Process] = []

    def start(server: ScriptedCoordinator) -> Process:
        running.append(Process(server, folder))
        return running[-1]

    yield start
    for process in running:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("size", [4, 50_000], ids=["small", "large"])
def test_a_participant_that_is_stopped_with_a_result_does_not_train_it_again(
    serve: Serve,
    launch: Callable[[ScriptedCoordinator], Process],
    number: signal.Signals,
    size: int,
) -> None:
    """It is the same participant when it is back, still has its place, and hands in. Nobody has
    given it a name."""
    server = serve(Ledger(model=np.zeros(size, dtype=np.float32)))
    server.before["EndTrainingRound"].extend([failure(grpc.StatusCode.UNAVAILABLE)] * 10_000)
    first = launch(server)
    server.wait_until(lambda: server.calls["EndTrainingRound"] >= 1)
    first.send(number)
    code, trained = first.end()
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    assert trained == "training 0\n"
    assert pb.FINISHED not in {state for state, _ in server.heartbeats}, "that would be goodbye"
    server.before["EndTrainingRound"].clear()
    second = launch(server)
    assert second.end() == (0, "training 1\n")
    assert server.ledger.model[0] == 2
    assert len(server.identities) == 1
