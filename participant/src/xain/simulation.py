"""Many participants on one machine: xain.simulate(main, participants=100, workers=2).

A real coordinator runs in a process of its own, on a free port and with a folder of its own. Each
worker process has the agents of its share of the participants, which join, send heartbeats and wait
for rounds at the same time. It trains one participant at a time: when a participant is given a
round, the worker calls main(site), whose loop gets this one round and ends with it. So a worker has
one model at a time, however many participants it has.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from math import ceil
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc

from xain.loop import EXIT_SIGTERM, Loop, Rounds, hooks, rounds_of_site
from xain.round import Round
from xain.weights import Declared
from xain_participant.client import CoordinatorClient, open_channel
from xain_participant.config import ENV_PREFIX
from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.fl import inspection_pb2 as inspection
from xain_proto.fl.inspection_pb2_grpc import InspectionStub
from xain_workloads.model import TensorSpec, unflatten

START_S = 60.0
STOP_S = 10.0
# Between two looks at the coordinator.
LOOK_S = 0.25
_LOG_LINES = 5


class SimulationError(RuntimeError):
    """The simulation cannot be run, or main() has failed. The text has main's traceback."""


@dataclass(frozen=True, slots=True)
class Site:
    """One simulated participant. index: from 0, below count. id: its name."""

    index: int
    count: int
    id: str


@dataclass(frozen=True, slots=True)
class Simulation:
    """What came of it.

    weights: the last model, as arrays by name, or a flat vector if the model has no layout.
    history: one mapping for each round: round, num_updates, num_samples, seconds, and the metrics
        of round.submit(), averaged by samples.
    """

    weights: Any
    history: Sequence[Mapping[str, Any]]
    seconds: float


Main = Callable[[Site], object]


def simulate(
    main: Main,
    participants: int,
    workers: int = 2,
    *,
    rounds: int = 10,
    fraction: float = 1.0,
    epochs: int = 1,
    train: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    evaluates: bool = False,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Simulation:
    """Run a script's main(site) as many participants, against a real coordinator on this machine.

    main: a function of a module, with a loop over xain.rounds(). It is called anew for every round
        that a site is given, and ends with that round: the code after the loop does not run, and
        what must last from round to round goes into round.state.
    workers: processes that train. fraction: of the participants that train a round.
    rounds, epochs, seed: of the coordinator's configuration, and train is its section [train].
    settings: other settings of the coordinator by dotted key, such as "aggregation.rule".
    evaluates: as in xain.rounds().
    folder: of the coordinator's data, which stays; by default a temporary one.
    progress: whether to print a line for each round to standard error.
    Call it from `if __name__ == "__main__":`, as workers import the script anew.
    Raises SimulationError if main() fails, or nothing can be started; KeyboardInterrupt after
    everything has been stopped.
    """
    if multiprocessing.parent_process() is not None:
        raise SimulationError(
            "simulate() is called by the script that it runs; put it under "
            'if __name__ == "__main__":'
        )
    if workers < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1")
    if participants < 1 or not 0 < fraction <= 1:
        raise ValueError(
            f"participants is {participants} and fraction {fraction}; at least one participant "
            "trains, and at most all do"
        )
    try:
        ForkingPickler.dumps(main)
    except Exception as error:
        raise SimulationError(
            f"main cannot be given to another process ({error}); define it at the top of a module, "
            "not within a function or a notebook"
        ) from None
    hooks.install()
    given = {
        "rounds.rounds": rounds,
        "rounds.epochs": epochs,
        "rounds.seed": seed,
        "rounds.fraction_participants": fraction,
        "rounds.min_participants": max(1, ceil(round(fraction * participants, 6))),
        "rounds.start_participants": participants,
        "rounds.max_participants": participants,
        "rounds.start_timeout_s": START_S,
        # Training takes all processors, so nobody is given up soon.
        "server.heartbeat_timeout_s": 60.0,
        **{f"train.{name}": value for name, value in (train or {}).items()},
        **(settings or {}),
    }
    with ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="xain-simulation-"))
        started_at = time.monotonic()
        coordinator = stack.enter_context(_coordinator(Path(folder), given))
        sites = [
            Site(i, participants, f"site-{i:0{len(str(participants - 1))}d}")
            for i in range(participants)
        ]
        pool = stack.enter_context(
            _Workers(main, sites, min(workers, participants), coordinator.target, evaluates)
        )
        watcher = stack.enter_context(_Watcher(coordinator.target, rounds, pool, shows=progress))
        watcher.run(coordinator)
        weights = _last_model(coordinator.target, watcher.num_models)
        history = watcher.history()
    return Simulation(weights, history, time.monotonic() - started_at)


# --- the coordinator ---


@dataclass(slots=True)
class _Coordinator:
    """A coordinator in a process of its own."""

    process: "subprocess.Popen[bytes]"
    log: Path
    target: str = ""

    def why_it_ended(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(["the coordinator has ended:", *lines[-_LOG_LINES:]])


@contextlib.contextmanager
def _coordinator(folder: Path, settings: Mapping[str, Any]) -> Iterator[_Coordinator]:
    """Raises SimulationError if it does not start."""
    if find_spec("xain_coordinator") is None:
        raise SimulationError(
            "a simulation needs the coordinator on this machine: pip install xain-coordinator"
        )
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "coordinator.log"
    flags = [f"--set={key}={_toml(value)}" for key, value in settings.items()]
    command = [sys.executable, "-m", "xain_coordinator", f"--data-dir={folder}", "--port=0"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XAIN_COORDINATOR_")}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--new-session", *flags, "--set=logging.console=false"],
            stderr=file,
            stdout=file,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for us: we stop it after the workers
        )
    one = _Coordinator(process, log)
    try:
        one.target = f"127.0.0.1:{_port_in(one)}"
        yield one
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port_in(coordinator: _Coordinator) -> int:
    """The port that the coordinator's log names."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for line in coordinator.log.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                fields = json.loads(line)
                if fields["event"] == "serving":
                    return int(fields["address"].rpartition(":")[2])
        if coordinator.process.poll() is not None:
            break
        time.sleep(0.02)
    raise SimulationError(coordinator.why_it_ended())


def _toml(value: Any) -> str:
    """A value as --set takes it."""
    return value if isinstance(value, str) else json.dumps(value)


# --- the workers ---


class _Parked(BaseException):
    """Ends main() until its site is given another round."""


class _SiteRounds(Rounds):
    """The one round of a site that main() is called for."""

    def __init__(self, loop: Loop, declared: Declared | None, tell: Callable[..., None]) -> None:
        super().__init__(loop, declared)
        self._tell = tell
        self._given: Round | None = None

    def __next__(self) -> Round:
        if self._given is not None and (submitted := self._given.submitted) is not None:
            self._tell("submitted", self._given.number, submitted.num_samples, submitted.metrics)
            raise _Parked
        round_ = self._loop.next_round(self._declared, wait=False)
        if round_ is None:
            raise _Parked
        self._given = round_
        return round_

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """The site stays in its session."""

    def __del__(self) -> None:
        """The site stays in its session."""


@dataclass(slots=True)
class _Workers:
    """Processes that train, each with its share of the sites."""

    main: Main
    sites: Sequence[Site]
    number: int
    target: str
    evaluates: bool
    ends: dict[Connection, Any] = field(default_factory=dict)

    def __enter__(self) -> "_Workers":
        context = multiprocessing.get_context("spawn")
        threads = max(1, (os.cpu_count() or 1) // self.number)
        before = os.environ.get("OMP_NUM_THREADS")
        # Read when torch or numpy is imported, which is before anything of ours runs there.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        try:
            for i in range(self.number):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_work,
                    args=(
                        self.main,
                        self.sites[i :: self.number],
                        self.target,
                        self.evaluates,
                        theirs,
                    ),
                    name=f"xain-worker-{i}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self.ends[ours] = process
        except BaseException:
            self.__exit__()
            raise
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ends.values():
            process.terminate()
        for process in self.ends.values():
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join()

    def messages(self, timeout_s: float) -> Iterator[tuple[Any, ...]]:
        """What the workers tell within this time; at least one of them if there is any.

        Raises SimulationError if a worker has died.
        """
        for end in wait(list(self.ends), timeout_s):
            assert isinstance(end, Connection)
            try:
                while end.poll():
                    yield end.recv()
            except EOFError:
                process = self.ends.pop(end)
                process.join()
                if process.exitcode:
                    raise SimulationError(
                        f"{process.name} has died with status {process.exitcode}"
                    ) from None


def _work(
    main: Main, sites: Sequence[Site], target: str, evaluates: bool, pipe: Connection
) -> None:
    """Run the agents of these sites, and main() whenever one of them is given work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops us
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_SIGTERM))
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        del os.environ[name]  # a setting of one participant, such as its name

    def tell(*message: Any) -> None:
        with contextlib.suppress(OSError):  # the parent has gone, and takes us with it
            pipe.send(message)

    ready: SimpleQueue[int] = SimpleQueue()
    loops = [
        Loop(
            coordinator=target,
            participant_id=site.id,
            evaluates=evaluates,
            notify=partial(ready.put, i),
        )
        for i, site in enumerate(sites)
    ]
    running = set(range(len(loops)))
    while running:
        i = ready.get()
        if loops[i].is_over:
            running.discard(i)
            try:
                loops[i].next_round(None, wait=False)
            except BaseException as error:
                tell("failed", sites[i].id, str(error), "")
        elif loops[i].is_asked:
            _run_main(main, sites[i], loops[i], tell)


def _run_main(main: Main, site: Site, loop: Loop, tell: Callable[..., None]) -> None:
    rounds_of_site.set(lambda declared: _SiteRounds(loop, declared, tell))
    try:
        main(site)
        raise RuntimeError("main() ended without a loop over xain.rounds()")
    except _Parked:
        pass
    except BaseException as error:
        loop.fail(error)
        tell("failed", site.id, repr(error), traceback.format_exc())


# --- watching ---


class _Watcher:
    """Shows the rounds as they are made, and collects their metrics."""

    def __init__(self, target: str, num_rounds: int, pool: _Workers, *, shows: bool) -> None:
        self._channel = open_channel(target)
        self._stub = InspectionStub(self._channel)
        self._num_rounds = num_rounds
        self._pool = pool
        self._shows = shows
        self._rounds: dict[int, dict[str, Any]] = {}
        self._sums: dict[int, dict[str, tuple[float, int]]] = {}  # weighted by samples
        self._shown = -1

    def __enter__(self) -> "_Watcher":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def run(self, coordinator: _Coordinator) -> None:
        """Returns when the session has ended. Raises SimulationError."""
        while self._pool.ends:
            for message in self._pool.messages(LOOK_S):
                self._take(message)
            if coordinator.process.poll() is not None:
                raise SimulationError(coordinator.why_it_ended())
            self._look()
        self._look()

    @property
    def num_models(self) -> int:
        return 1 + max(
            (n for n, r in self._rounds.items() if r["phase"] == "published"), default=-1
        )

    def history(self) -> list[dict[str, Any]]:
        return [
            {
                "round": number,
                "num_updates": r["num_updates"],
                "num_samples": r["num_samples"],
                "seconds": r["seconds"],
                **self._metrics(number),
            }
            for number, r in sorted(self._rounds.items())
        ]

    def _metrics(self, number: int) -> dict[str, float]:
        sums = self._sums.get(number, {})
        return {name: total / max(1, weight) for name, (total, weight) in sums.items()}

    def _take(self, message: tuple[Any, ...]) -> None:
        match message:
            case "submitted", number, num_samples, metrics:
                sums = self._sums.setdefault(number, {})
                for name, value in metrics.items():
                    total, weight = sums.get(name, (0.0, 0))
                    sums[name] = (total + num_samples * value, weight + num_samples)
            case "failed", site, why, trace:
                raise SimulationError(f"main() failed at {site}: {why}\n\n{trace}".rstrip())

    def _look(self) -> None:
        try:
            answer = self._stub.ListRounds(inspection.ListRoundsRequest(limit=1000), timeout=5.0)
        except grpc.RpcError:
            return  # it is busy or has ended, which is seen elsewhere
        for r in answer.rounds:
            if r.task != pb.TRAIN:
                continue  # the initial weights, or the evaluation of the last model
            self._rounds[r.round] = {
                "phase": r.phase,
                "num_updates": r.num_contributors,
                "num_samples": r.num_samples,
                "seconds": r.seconds,
            }
        done = sorted(n for n, r in self._rounds.items() if r["phase"] == "published")
        for number in done:
            if number > self._shown:
                self._shown = number
                self._show(number, done.index(number) + 1)

    def _show(self, number: int, place: int) -> None:
        if not self._shows:
            return
        r = self._rounds[number]
        metrics = "".join(f", {name} {v:.4g}" for name, v in self._metrics(number).items())
        print(  # noqa: T201  # asked for with progress=True
            f"round {place}/{self._num_rounds}: {r['num_updates']} updates in "
            f"{r['seconds']:.1f} s{metrics}",
            file=sys.stderr,
        )


def _last_model(target: str, number: int) -> Any:
    """Read the model that the last round has made. Raises SimulationError if there is none."""
    channel = open_channel(target)
    try:
        models = InspectionStub(channel).ListModels(inspection.ListModelsRequest(limit=1)).models
    except grpc.RpcError as error:
        raise SimulationError(f"the last model cannot be read: {error}") from None
    finally:
        channel.close()
    if not models or number == 0:
        raise SimulationError("the session has ended without a model")
    with CoordinatorClient(target, "simulation") as client:
        vector = client.get_weights(models[-1].ref)
    layout = tuple(TensorSpec(t.name, tuple(t.shape), t.dtype) for t in models[-1].layout)
    return unflatten(vector, layout) if layout else vector
