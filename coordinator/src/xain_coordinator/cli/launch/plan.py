"""Plan of a launch: its workers, and the command lines of workers and coordinator."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from xain_coordinator.config.sections.launch import COORDINATOR, LaunchSettings
from xain_coordinator.config.sections.workload import WorkloadSettings
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.names import why_not
from xain_foundation.settings.fields import is_loopback
from xain_workloads.tables.data import BUNDLED, FOLDER_FILES, SUFFIXES, is_folder

DEFAULT_WORKERS = 3  # that share one data set, unless their number is given
KILLED = 128 + 9  # exit status of a program that was killed, as a shell and Docker have it
STOP_TIMEOUT_S = 20.0  # above the drain of a coordinator
SPARSE = "sparse"  # the workload that a parameter server trains, without a coordinator
SCHEDULER = "scheduler"  # name of its one scheduler
COORDINATOR_PREFIX = "XAIN_COORDINATOR_"  # of settings in the environment
# Commands of programs.
COORDINATE, PARTICIPATE, PARAMETERS = (
    "xain-coordinator",
    "xain-participant",
    "xain-parameter-server",
)


@dataclass(frozen=True, slots=True)
class Worker:
    """A participant that is to be started.

    source: a bundled data set, or the absolute path of a file or of a folder.
    part: (index, number of parts) of a source that the workers divide; None for all of its rows.
    cpu_shares: relative weight of its container; None for the engine's default.
    """

    name: str
    source: str
    part: tuple[int, int] | None = None
    cpu_shares: int | None = None


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates of a program. folder: on this machine. inside: the same where it runs."""

    folder: str
    inside: str


@dataclass(frozen=True, slots=True)
class Program:
    """A command to start.

    arguments: without the command. environment: settings of the coordinator; others have none.
    data: sources that it reads. folder: the part of the work folder that it writes into, "" for all
        of it; None: it writes nothing. is_published: this machine reaches its ports.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    command: str = COORDINATE
    data: Sequence[str] = ()
    cpu_shares: int | None = None
    folder: str | None = None
    is_published: bool = False


class Running(Protocol):
    """A program that a backend has started."""

    @property
    def name(self) -> str: ...

    def status(self) -> int | None:
        """Exit status, above 128 after a signal; None while it runs."""

    def new_lines(self) -> list[str]:
        """Whole lines of its log since the last call."""

    def terminate(self) -> None:
        """Ask the program to stop. No effect on a program that has ended."""

    def remove(self, timeout_s: float) -> None:
        """Wait for the program's end for so long, then kill it."""


def find_workers(
    data: str, settings: LaunchSettings, *, divided: bool = True
) -> tuple[Worker, ...]:
    """The workers and their data.

    data: a folder with a folder for each worker, or a source that the workers divide at random: a
        file, one folder with the two files of FOLDER_FILES, or a bundled set.
    divided: False if every worker takes all rows of one source, as the stages of a network do.
    Raises CommandFailed if the data are not there or do not fit the settings.
    """
    path = Path(data)
    if data in BUNDLED or path.is_file() or is_folder(path):
        if data not in BUNDLED and path.is_file() and path.suffix.lower() not in SUFFIXES:
            raise CommandFailed(f"--data {data}: a file must end in one of: {', '.join(SUFFIXES)}")
        number = settings.workers or len(settings.names) or DEFAULT_WORKERS
        names = settings.names or tuple(f"worker-{i + 1}" for i in range(number))
        source = data if data in BUNDLED else str(path.absolute())
        parts = [(i, number) if divided else None for i in range(number)]
        found = [Worker(name, source, part) for name, part in zip(names, parts, strict=True)]
    elif path.is_dir():
        found = [Worker(name, str(path.absolute() / name)) for name in _folders(path, settings)]
    else:
        known = f"a file, a folder, or one of: {', '.join(BUNDLED)}"
        raise CommandFailed(f"--data {data}: there is no such file or folder; name {known}")
    return with_shares(found, settings.cpu_shares)


def _folders(path: Path, settings: LaunchSettings) -> Sequence[str]:
    """Names of the workers that have folders below a path: those that settings name, or else the
    first ones. Raises CommandFailed if a folder or file is missing or cannot be a worker's."""
    features, target = FOLDER_FILES
    there = sorted(folder.name for folder in path.iterdir() if is_folder(folder))
    if not there:
        raise CommandFailed(
            f"--data {path}: no folder in it has {features}; it needs a folder for each worker, as "
            f"in {path / 'NAME' / features} and {path / 'NAME' / target}"
        )
    missing = [name for name in settings.names if name not in there]
    if missing:
        raise CommandFailed(
            f"launch.names has {missing[0]!r}, and {path} has no folder of that name with "
            f"{features}; there are: {', '.join(there)}"
        )
    if settings.workers is not None and settings.workers > len(there):
        raise CommandFailed(
            f"launch.workers is {settings.workers}, and {path} has {len(there)} folders with "
            f"{features}: {', '.join(there)}"
        )
    chosen = settings.names or there[: settings.workers]
    for name in chosen:
        if name == COORDINATOR or (why := why_not(name)) is not None:
            said = "it is the coordinator's name" if name == COORDINATOR else why
            raise CommandFailed(f"{path / name}: this cannot be the name of a worker: {said}")
        if not (path / name / target).is_file():
            raise CommandFailed(f"{path / name / target}: there is no such file")
    return chosen


def with_shares(workers: Sequence[Worker], shares: Sequence[int]) -> tuple[Worker, ...]:
    """The workers with launch.cpu_shares. Raises CommandFailed for another number of them."""
    if not shares:
        return tuple(workers)
    if len(shares) == 1:
        shares = [*shares] * len(workers)
    if len(shares) != len(workers):
        raise CommandFailed(
            f"launch.cpu_shares has {len(shares)} numbers for {len(workers)} workers; give one for "
            "each, or one for all"
        )
    return tuple(
        replace(worker, cpu_shares=share) for worker, share in zip(workers, shares, strict=True)
    )


def workload_defaults(
    given: Mapping[str, object], *, can_publish: bool = True
) -> dict[str, object]:
    """Settings that a workload needs, and that need not be written for a launch.

    given: settings by dotted key. can_publish: whether the coordinator can predict with estimators
    of `bagging`, which are then published: all of them stay on this machine.
    """
    key = "workload.options.publish"
    is_needed = given.get("workload.name") == "bagging" and can_publish and key not in given
    return {key: True} if is_needed else {}


def chimera_defaults(environ: Mapping[str, str]) -> dict[str, object]:
    """Settings of a launch in Chimera's environment variables.

    Its ports of workers have no counterpart: workers listen nowhere.
    Raises CommandFailed for a list that is no Python literal.
    """
    values = {
        key: _without_brackets(variable, environ[variable])
        for variable, key in CHIMERA_VARIABLES.items()
        if variable in environ
    }
    prefix = environ.get("CHIMERA_NETWORK_PREFIX")
    mask = environ.get("CHIMERA_NETWORK_SUBNET_MASK")
    if prefix or mask:
        values["launch.subnet"] = f"{prefix or '192.168.10'}.0/{mask or '24'}"
    return values


def _without_brackets(variable: str, text: str) -> object:
    """The text of a variable, or the list that it has as a Python literal. Raises CommandFailed."""
    if not text.lstrip().startswith("["):
        return text
    try:
        return [*ast.literal_eval(text)]
    except (ValueError, SyntaxError):
        raise CommandFailed(f"{variable} is no list, such as ['ward-1', 'ward-2']") from None


CHIMERA_VARIABLES = {
    "CHIMERA_NETWORK_NAME": "launch.network_name",
    "CHIMERA_WORKERS_NODES_NAMES": "launch.names",
    "CHIMERA_WORKERS_CPU_SHARES": "launch.cpu_shares",
    "CHIMERA_WORKERS_HOST": "launch.host",
    "CHIMERA_WORKERS_ENDPOINTS_MAX_RETRIES": "launch.max_retries",
    "CHIMERA_WORKERS_ENDPOINTS_TIMEOUT": "launch.timeout_s",
}


def fleet_defaults(
    names: Sequence[str], settings: LaunchSettings, *, serve: bool
) -> dict[str, object]:
    """Settings of a coordinator that has all workers on one machine.

    Training begins with all of them, goes on with one, and does not wait long for one that died. A
    training that is requested waits for START_WAIT_S alone.

    names: of the workers.
    """
    return {
        "rounds.min_participants": 1,
        "rounds.expected_participants": json.dumps(names),
        "rounds.max_participants": len(names),
        "rounds.start_timeout_s": START_WAIT_S if serve else START_TIMEOUT_S,
        "server.heartbeat_time_s": 2.0,
        "server.heartbeat_timeout_s": 4.0,
        "server.drain_s": 2.0,
        "predict.max_retries": settings.max_retries,
        "predict.timeout_s": settings.timeout_s,
    }


START_TIMEOUT_S = 120.0  # from the first arrival until a training begins without the others
# For all workers to join: imports take minutes on a machine that has other things to do, and nodes
# of a cluster may have to be started.
JOIN_TIMEOUT_S = 600.0
# After the request of a training, for workers that are being started again: longer than most need.
START_WAIT_S = 5.0


def coordinator_program(
    address: tuple[str, int],
    data_dir: str,
    config: str | None,
    values: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    is_restart: bool = False,
    tls: Tls | None = None,
) -> Program:
    """The program of the coordinator, with its command line.

    data_dir, config: paths where it runs. values: settings by dotted key. environ: of which it gets
    the coordinator's settings. is_restart: whether it goes on with its session. tls: without it the
    coordinator is open.
    """
    host, port = address
    arguments = [f"--config={config}"] if config is not None else []
    arguments += [f"--data-dir={data_dir}", f"--host={host}", f"--port={port}"]
    if tls is not None:
        values = {**values, "tls.folder": tls.inside}
    elif not is_loopback(host):
        arguments.append("--insecure")
    arguments += assignments({**values, "logging.console": "false"})
    arguments.append("--resume" if is_restart else "--new-session")
    own = {name: v for name, v in environ.items() if name.upper().startswith(COORDINATOR_PREFIX)}
    data = [] if tls is None else [tls.folder]
    return Program(COORDINATOR, arguments, own, data=data, folder="", is_published=True)


def worker_program(
    worker: Worker,
    coordinator: str,
    source: str,
    workload: WorkloadSettings,
    values: Mapping[str, object],
    state_dir: str,
    *,
    serve: bool = False,
    tls: Tls | None = None,
) -> Program:
    """The program of a worker, with its command line.

    coordinator: "HOST:PORT". source: its data where it runs. workload: its name, task and options,
        which the worker imports before it joins. state_dir: where it runs. tls: that the
        coordinator asks for.
    """
    arguments = [f"--coordinator={coordinator}", f"--id={worker.name}", f"--data={source}"]
    if workload.task:
        arguments.append(f"--task={workload.task}")
    if worker.part is not None:
        index, number = worker.part
        arguments += ["--partition=iid", f"--num-parts={number}", f"--index={index}"]
    if serve:
        arguments.append("--serve")
    # Where others reach the coordinator of a launch, all of its programs are in one network.
    is_open = not is_loopback(coordinator.rpartition(":")[0])
    consent: dict[str, object] = {"training.process_group_insecure": True} if is_open else {}
    if is_open and tls is None:
        consent["coordinator.insecure"] = True
    own = {} if tls is None else {"tls.folder": tls.inside}
    # Builders import code, which a worker allows by itself.
    options = {key: value for key, value in workload.whole_options.items() if key != "builder"}
    state = {
        "participant.state_dir": state_dir,
        "training.workload": workload.name,
        "training.options": json.dumps(options) if options else None,
    }
    arguments += assignments({**consent, **state, **values, **own, "logging.console": "false"})
    return Program(
        worker.name,
        arguments,
        command=PARTICIPATE,
        data=[worker.source] if tls is None else [worker.source, tls.folder],
        cpu_shares=worker.cpu_shares,
        folder=state_of(worker.name),
    )


def state_of(worker: str) -> str:
    """The state directory of a worker, below the work folder."""
    return f"workers/{worker}"


def assignments(values: Mapping[str, object]) -> list[str]:
    """Settings by dotted key as flags."""
    return [
        f"--set={key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in values.items()
        if value is not None
    ]
