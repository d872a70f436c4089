"""Many participants at once: xain.simulate(main, participants=100, workers=2).

A real coordinator runs in a process of its own, on a free port and with a folder of its own;
simulated.py has the participants.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any, TextIO

import grpc

from xain.result import LastModel, ResultMissing, fetch_last_model
from xain.settings_file import as_toml
from xain_foundation import child, streams
from xain_foundation.fields import is_loopback, join_host_port
from xain_foundation.wheels import pip_install
from xain_participant.client import open_channel
from xain_session.backends import SimulationError
from xain_session.simulated import Pool, simulated
from xain_session.worker import Main
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_wire.fl.inspection_pb2_grpc import InspectionStub
from xain_workloads.model import unflatten

START_S = 60.0
STOP_S = 10.0
# Pause between two looks at another process.
LOOK_S = 0.25
_LOG_LINES = 5


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
    backend: str = "local",
    address: str | None = None,
    resources: Mapping[str, float] | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    insecure: bool = False,
) -> Simulation:
    """Run a script's main(site) as many participants, against a real coordinator on this machine.

    main, workers, evaluates, backend, address, resources, state_dir, insecure: see simulated().
    fraction: of the participants that train a round.
    rounds, epochs, seed: of the coordinator's configuration, and train is its section [train].
    settings: other settings of the coordinator by dotted key, such as "aggregation.rule", and of
        the type that they have in a file.
    folder: of the coordinator's data, which stays; by default a temporary one.
    progress: whether to print a line for each round to standard error.
    In a script, call it from `if __name__ == "__main__":`, as workers import the script anew.
    Raises ValueError for a setting that TOML cannot hold, SimulationError if main() fails, or
    nothing can be started; KeyboardInterrupt after everything has been stopped.
    """
    if participants < 1 or not 0 < fraction <= 1:
        raise ValueError(
            f"participants is {participants} and fraction {fraction}; at least one participant "
            "trains, and at most all do"
        )
    spec = simulated(
        main,
        participants,
        backend=backend,
        workers=workers,
        evaluates=evaluates,
        address=address,
        resources=resources,
        state_dir=state_dir,
        insecure=insecure,
    )
    given: dict[str, Any] = {
        "rounds.rounds": rounds,
        "rounds.epochs": epochs,
        "rounds.seed": seed,
        "rounds.fraction_participants": fraction,
        "rounds.min_participants": max(1, ceil(round(fraction * participants, 6))),
        "rounds.start_participants": participants,
        "rounds.max_participants": participants,
        **spec.settings,
        "train": train or {},
        **(settings or {}),
    }
    with ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="xain-simulation-"))
        started_at = time.monotonic()
        workplace = stack.enter_context(spec.started())
        if not is_loopback(workplace.host):
            given |= {"server.host": workplace.host, "server.insecure": insecure}
        coordinator = stack.enter_context(_coordinator(Path(folder), given, workplace.host))
        pool = workplace.run(coordinator.target)
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
def _coordinator(folder: Path, settings: Mapping[str, Any], host: str) -> Iterator[_Coordinator]:
    """host: at which it is reached. Raises SimulationError if it does not start."""
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
        one.target = join_host_port(host, _port_in(port_file, one))
        yield one
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port_in(port_file: Path, coordinator: _Coordinator) -> int:
    """The port of the coordinator, which it writes into a file when it serves. Raises
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
    return int(port_file.read_text(encoding="utf-8").strip().rpartition(":")[2])


# --- watching ---


def _watch(
    stub: InspectionStub,
    pool: Pool,
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
        has_ended = pool.is_over
        if not has_ended:
            pool.check(LOOK_S)
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
