"""Many participants on one machine: xain.simulate(main, participants=100, workers=2).

A real coordinator runs in a process of its own, on a free port and with a folder of its own. The
participants are divided among worker processes. All agents of a worker join, send heartbeats and
wait for rounds at the same time, and the worker trains one participant at a time: when a
participant is given a round, the worker calls main(site), whose loop gets this round and ends with
it. So a worker has one model at a time, however many participants it has.
"""

import contextlib
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
from threading import Thread
from typing import Any, TextIO

import cloudpickle  # type: ignore[import-untyped]  # it has no types
import grpc

from xain.loop import Loop, Rounds, rounds_of_site
from xain.result import LastModel, ResultMissing, fetch_last_model
from xain.round import Round
from xain.settings_file import as_toml
from xain_foundation import child, streams
from xain_foundation.wheels import pip_install
from xain_participant.client import open_channel
from xain_participant.config import ENV_PREFIX
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_wire.fl.inspection_pb2_grpc import InspectionStub
from xain_workloads.model import unflatten

START_S = 60.0
STOP_S = 10.0
# Pause between two looks at another process.
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
    """The result of a simulation.

    weights: the last model, as arrays by name, or a flat vector if the model has no layout.
    history: one mapping for each round: round, num_updates, num_samples, seconds, and the metrics
        of round.submit(), averaged over the updates that counted, weighted by samples.
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
    settings: other settings of the coordinator by dotted key, such as "aggregation.rule", and of
        the type that they have in a file.
    evaluates: as in xain.rounds().
    folder: of the coordinator's data, which stays; by default a temporary one.
    progress: whether to print a line for each round to standard error.
    In a script, call it from `if __name__ == "__main__":`, as workers import the script anew.
    Raises ValueError for a setting that TOML cannot hold, SimulationError if main() fails, or
    nothing can be started; KeyboardInterrupt after everything has been stopped.
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
    main = _for_another_process(main)
    given: dict[str, Any] = {
        "rounds.rounds": rounds,
        "rounds.epochs": epochs,
        "rounds.seed": seed,
        "rounds.fraction_participants": fraction,
        "rounds.min_participants": max(1, ceil(round(fraction * participants, 6))),
        "rounds.start_participants": participants,
        "rounds.max_participants": participants,
        "rounds.start_timeout_s": START_S,
        # Training takes all processors, so heartbeats may come late.
        "server.heartbeat_timeout_s": 60.0,
        "train": train or {},
        **(settings or {}),
    }
    streams.fill()  # before pipes to workers take their numbers
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
        stub = InspectionStub(stack.enter_context(open_channel(coordinator.target)))
        tell = _printer(stack) if progress else None
        history = _watch(stub, pool, coordinator, rounds, tell)
        last = _last_model(coordinator.target)
    weights = unflatten(last.vector, last.layout) if last.layout else last.vector
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
            f"a simulation needs the coordinator on this machine: {pip_install('xain-coordinator')}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    log, port_file = folder / "coordinator.log", folder / "coordinator.address"
    port_file.unlink(missing_ok=True)  # of a coordinator that was killed in this folder
    in_folder = {
        "storage.path": folder / "weights",
        "journal.path": folder / "journal.sqlite",
        "metrics.path": folder / "metrics.jsonl",
        "parameters.path": folder / "parameters",
        "server.port": 0,
        "logging.console": False,
    }
    config = folder / "simulation.toml"
    text = as_toml({**in_folder, **settings, "server.port_file": port_file.absolute()})
    config.touch(0o600)  # it may hold secrets
    config.write_text(text, encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XAIN_COORDINATOR_")}
    with log.open("wb") as file:
        process = child.start(
            "xain_coordinator",
            f"--config={config}",
            "--new-session",
            stderr=file,
            stdout=file,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for us: we stop it after the workers
        )
    one = _Coordinator(process, log)
    try:
        one.target = _address_in(port_file, one)
        yield one
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address_in(port_file: Path, coordinator: _Coordinator) -> str:
    """Where the coordinator listens, which it writes into a file when it serves. Raises
    SimulationError."""
    deadline = time.monotonic() + START_S
    while not port_file.exists():
        if coordinator.process.poll() is not None:
            raise SimulationError(coordinator.why_it_ended())
        if time.monotonic() > deadline:
            raise SimulationError(
                f"the coordinator does not serve after {START_S:g} s; its log is {coordinator.log}"
            )
        time.sleep(0.02)  # a poll of the file
    return f"127.0.0.1:{port_file.read_text(encoding='utf-8').strip().rpartition(':')[2]}"


# --- the workers ---


class _ByValue:
    """A function that other processes cannot import: pickled, it becomes its own code."""

    def __init__(self, main: Main) -> None:
        self._data = cloudpickle.dumps(main)

    def __reduce__(self) -> tuple[Any, ...]:
        # Only workers are given it, through the pipe in which multiprocessing gives them the rest.
        return cloudpickle.loads, (self._data,)

    def __call__(self, site: Site) -> object:
        raise AssertionError("workers have the function itself")


def _for_another_process(main: Main) -> Main:
    """The function as a worker can be given it: by its name, or else, as in a notebook, by its
    code. Raises SimulationError if neither works."""
    try:
        if hasattr(sys.modules["__main__"], "__file__"):
            with contextlib.suppress(Exception):  # whatever a reducer of the caller's raises
                ForkingPickler.dumps(main)
                return main
        return _ByValue(main)
    except Exception as error:  # a reducer of the caller's may raise anything
        raise SimulationError(
            f"main cannot be given to another process ({error}); define it at the top of a module, "
            "not within a function or a notebook"
        ) from None


class _Parked(BaseException):
    """Raised in main() to leave it until its site is given another round."""


class _SiteRounds(Rounds):
    """The one round of a site that main() is called for."""

    _given: Round | None = None

    def __next__(self) -> Round:
        if self._given is None or not self._given.is_done:  # next_round() refuses an open round
            self._given = self._loop.next_round(self._declared, wait=False)
            if self._given is not None:
                return self._given
        raise _Parked

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Keep the site in its session, which Rounds.__exit__ would end for it."""

    def __del__(self) -> None:
        """Keep the site in its session, which Rounds.__del__ would leave."""


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
        # torch and numpy read the variable when the worker imports them, before it runs any code.
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
        except BaseException:  # raised again
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

    def check(self, timeout_s: float) -> None:
        """Wait so long for a worker to end. Raises SimulationError if main() or a worker failed."""
        for end in wait(list(self.ends), timeout_s):
            assert isinstance(end, Connection)
            try:
                raise SimulationError(end.recv())
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
    streams.unblock()  # what main() prints holds up no round

    def end(*_: object) -> None:
        streams.close()
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    Thread(target=_end_with_parent, name="parent", daemon=True).start()
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        del os.environ[name]  # a setting of one participant, such as its name

    def fail(site: Site, why: str, trace: str = "") -> None:
        with contextlib.suppress(OSError):  # the parent has gone, and takes us with it
            pipe.send(f"main() failed at {site.id}: {why}\n\n{trace}".rstrip())

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
            except BaseException as error:  # of the agent; the parent hears it
                fail(sites[i], str(error))
        elif loops[i].is_asked:
            _run_main(main, sites[i], loops[i], fail)


def _end_with_parent() -> None:
    """End the worker when the script was killed, which stops nobody then."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    # A process that the script has forked keeps the pipe of multiprocessing open.
    while parent.is_alive() and os.getppid() == parent.pid:
        parent.join(LOOK_S)
    os._exit(1)


def _run_main(main: Main, site: Site, loop: Loop, fail: Callable[[Site, str, str], None]) -> None:
    rounds_of_site.set(lambda declared: _SiteRounds(loop, declared))
    try:
        main(site)
        raise RuntimeError("main() ended without a loop over xain.rounds()")
    except _Parked:
        pass
    except BaseException as error:  # of main(); the coordinator and the parent hear it
        loop.fail(error)
        fail(site, repr(error), traceback.format_exc())


# --- watching ---


def _watch(
    stub: InspectionStub,
    workers: _Workers,
    coordinator: _Coordinator,
    num_rounds: int,
    tell: Callable[[str], None] | None,
) -> list[dict[str, Any]]:
    """Wait for the end of the session, and tell a line for each of the first num_rounds rounds.

    Returns the entries of Simulation.history. Raises SimulationError.
    """
    rounds: dict[int, inspection.RoundStatus] = {}
    shown: set[int] = set()
    has_ended = False
    while not has_ended:
        has_ended = not workers.ends
        if not has_ended:
            workers.check(LOOK_S)
            if coordinator.process.poll() is not None:
                raise SimulationError(coordinator.why_it_ended())
        # A coordinator that is busy answers the next time; one that has ended is seen above.
        with contextlib.suppress(grpc.RpcError):
            answer = stub.ListRounds(inspection.ListRoundsRequest(limit=1000), timeout=5.0)
            rounds |= {r.round: r for r in answer.rounds if r.task == pb.TRAIN}
        for number in sorted(rounds.keys() - shown):
            if rounds[number].phase == "published" and len(shown) < num_rounds:
                shown.add(number)
                if tell is not None:
                    tell(_line(rounds[number], f"{len(shown)}/{num_rounds}"))
    if not any(r.phase == "published" for r in rounds.values()):
        raise SimulationError("the session has ended without a model")
    return [
        {
            "round": r.round,
            "num_updates": r.num_contributors,
            "num_samples": r.num_samples,
            "seconds": r.seconds,
            **r.metrics,
        }
        for _, r in sorted(rounds.items())
    ]


def _printer(stack: ExitStack) -> Callable[[str], None]:
    """A print() to standard error that waits for no reader."""
    stream: TextIO = sys.stderr
    if stream is sys.__stderr__:  # a notebook's is its own affair
        descriptor = streams.Descriptor(stream.fileno())
        stack.callback(descriptor.close, streams.CLOSE_S)
        stream = streams.open_stream(descriptor, stream.encoding)
    return partial(print, file=stream, flush=True)


def _line(r: inspection.RoundStatus, label: str) -> str:
    metrics = "".join(f", {name} {value:.4g}" for name, value in sorted(r.metrics.items()))
    return f"round {label}: {r.num_contributors} updates in {r.seconds:.1f} s{metrics}"


def _last_model(target: str) -> LastModel:
    """Read the model that the last round has made. Raises SimulationError."""
    try:
        return fetch_last_model(target, "simulation")
    except ResultMissing as missing:
        raise SimulationError(str(missing)) from None
