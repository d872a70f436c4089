"""A launch of a parameter server and its workers: the workload `sparse`.

The programs are `xain-parameter-server scheduler`, `xain-parameter-server serve` and
`xain-participant sparse`; at the end `xain-parameter-server export` writes the model.
"""

import json
import math
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from xain_coordinator.cli.launch.lifecycle import (
    POLL_S,
    Launch,
    Launcher,
    Running,
    ended_early,
    how_it_ended,
)
from xain_coordinator.cli.launch.plan import (
    DEFAULT_WORKERS,
    PARAMETERS,
    PARTICIPATE,
    SCHEDULER,
    START_TIMEOUT_S,
    Program,
    Worker,
    assignments,
    with_shares,
)
from xain_coordinator.config.launch import COORDINATOR, LaunchSettings
from xain_foundation.commands import CommandFailed
from xain_foundation.exit_statuses import EXIT_FAILED, EXIT_NOTHING_COUNTED
from xain_foundation.fields import Section, join_host_port
from xain_foundation.hints import hint
from xain_foundation.logs import LoggingSettings
from xain_foundation.settings import Resolved
from xain_parameters.certificates import Certificates
from xain_parameters.config import SchedulerSettings, ServerSettings, TlsSettings
from xain_parameters.errors import ParameterError
from xain_parameters.scheduler.client import SchedulerCalls
from xain_parameters.scheduler.reports import Status
from xain_parameters.specs import cut_folder

ASK_S = 1.0  # for the scheduler to answer
CHECKPOINT_S = 3600.0
# How long workers wait for a killed one: longer than a start takes on a slow machine, so that the
# model is the same with and without the kill.
WORKER_LEASE_S = 60
SCORE, EXPORT = "score", "export"  # names of programs
CHECKPOINTS, MODEL = "checkpoints", "model.npz"  # in the work folder
GROUP = "xain-parameters"  # journal and logs, in the work folder; a launch begins without them
# Flags of `xain-participant sparse` that all workers have.
WORKER_KEYS = (
    "batch",
    "bound",
    "epochs",
    "factors",
    "l2",
    "learning_rate",
    "model",
    "seed",
    "staleness",
    "table",
)
_WILDCARDS = "*?["


class SparseConfig(Section):
    """The file of --config. A launch sets addresses, names and folders by itself."""

    launch: LaunchSettings = LaunchSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    server: ServerSettings = ServerSettings()
    tls: TlsSettings = TlsSettings()
    logging: LoggingSettings = LoggingSettings()


@dataclass(frozen=True, slots=True)
class Request:
    """Programs of a launch and their settings.

    port: of the scheduler; 0 for a free one. test: rows to score the model with; "" for none.
    test_name: as the user gave it.
    values: settings of scheduler and servers by dotted key.
    worker_values: flags of all workers.
    tls: folder with the certificate that all programs show; "": nothing is encrypted.
    """

    workers: Sequence[Worker]
    servers: Sequence[str]
    work: Path
    port: int
    test: str
    test_name: str
    values: Mapping[str, object]
    worker_values: Mapping[str, str]
    tls: str = ""

    @property
    def names(self) -> list[str]:
        """Names of all programs."""
        workers = [worker.name for worker in self.workers]
        return [SCHEDULER, *self.servers, *workers, SCORE, EXPORT]

    @property
    def table(self) -> str:
        """The name of the model at the servers."""
        return self.worker_values.get("table") or self.worker_values.get("model", "logistic")

    def of(self, *sections: str) -> dict[str, object]:
        """The settings of some sections."""
        return {k: v for k, v in self.values.items() if k.partition(".")[0] in sections}


def plan(
    resolved: Resolved[SparseConfig],
    data: str,
    test: str,
    work: Path,
    worker_values: Mapping[str, str],
) -> Request:
    """The programs of a launch. Raises CommandFailed for data or settings that do not fit."""
    settings = resolved.config.launch
    for key in worker_values:
        if key not in WORKER_KEYS:
            raise CommandFailed(
                f"--worker-set has {key!r}; sparse workers have: {', '.join(WORKER_KEYS)}"
            )
    number = settings.workers or len(settings.names) or DEFAULT_WORKERS
    names = settings.names or tuple(f"worker-{i + 1}" for i in range(number))
    servers = tuple(f"server-{i + 1}" for i in range(settings.servers))
    source = _local(data, "--data")
    workers = [Worker(name, source, (i, number)) for i, name in enumerate(names)]
    taken = {SCHEDULER, SCORE, EXPORT, COORDINATOR, *servers}.intersection(names)
    if taken:
        raise CommandFailed(f"launch.names has {min(taken)!r}, which another program is called")
    given = {".".join(key): one.value for key, one in resolved.given.items()}
    return Request(
        with_shares(workers, settings.cpu_shares),
        servers,
        work,
        settings.ports[0],
        _local(test, "--test") if test else "",
        test,
        {key: value for key, value in given.items() if not key.startswith("launch.")},
        worker_values,
        str(folder.absolute()) if (folder := resolved.config.tls.folder) else "",
    )


def _local(source: str, flag: str) -> str:
    """A source, local ones as an absolute path. Raises CommandFailed if one is not there."""
    if "://" in source:
        return source
    path = Path(source).absolute()
    if not path.exists() and not any(sign in source for sign in _WILDCARDS):
        raise CommandFailed(
            f"{flag} {source}: there is no such file or folder; "
            + hint("xain-participant", "xain-participant sparse-data clicks")
            + " to make data to try it with"
        )
    return str(path)


class SparseLaunch(Launch):
    """See Launch. The workers are stopped first, then the scheduler, then the servers.

    A program that is killed is started again, and goes on where it was.
    """

    def __init__(self, request: Request, launcher: Launcher) -> None:
        super().__init__(launcher)
        self._request = request
        # Stopped before the servers, which it would report as dead.
        self._servers = self._new_group()
        self._scheduler = self._new_group()
        self._workers = self._new_group()
        self._tools = self._new_group()
        self._calls: SchedulerCalls | None = None
        self._listens = 0
        self._begun: set[str] = set()  # workers that were in their loop over clocks
        self._idle: set[str] = set()  # workers that have trained nothing
        self._progress: dict[str, Mapping[str, float]] = {}  # the last of each worker
        self._num_rollbacks = 0  # before all workers were started the last time

    def follow(self) -> int:
        """See Launch. A worker that failed makes the exit status 1, and 5 if none had a row."""
        request = self._request
        self._say(
            f"starting a scheduler, {_counted(len(request.servers), 'server')} and "
            f"{_counted(len(request.workers), 'worker')} ..."
        )
        self.start_servers()
        for worker in request.workers:
            self._start_worker(worker)
        self._until(self._missing_workers)
        self._say(
            f"ready: all {len(request.workers)} have joined; "
            f"the scheduler listens on {self.address}"
        )
        while True:
            while not self._are_over():
                self._look()
            failed = sorted(self._told - self._idle)
            if len(failed) == len(request.workers):
                raise CommandFailed("no worker has trained to its end")
            if len(self._idle) == len(request.workers):
                return EXIT_NOTHING_COUNTED
            number, status = self._save()
            # Workers that are started again would wait for failed ones.
            if failed or status.num_rollbacks == self._num_rollbacks:
                break
            self._num_rollbacks = status.num_rollbacks
            self._say("the servers went back to an earlier model; workers repeat what was lost")
            # A worker whose epochs are still complete ends at once.
            for worker in request.workers:
                self._workers[worker.name].remove(0)
                self._show_lines(self._workers[worker.name])
                self._start_worker(worker)
        self._tell_result(failed, number, status)
        return EXIT_FAILED if failed else 0

    # --- programs ---

    @property
    def address(self) -> str:
        """The scheduler as this machine reaches it, once it is started."""
        return self._backend.address(self._listens)

    def start_servers(self) -> None:
        """Start the scheduler and the servers. Returns when they serve. Raises CommandFailed."""
        work, tls = self._request.work, self._request.tls
        try:
            certificates = Certificates(tls) if tls else None
        except ParameterError as error:
            raise CommandFailed(f"tls.folder: {error}") from None
        self._prepare(work)
        # Scheduler and servers would go on with the training of an earlier launch.
        shutil.rmtree(work / GROUP, ignore_errors=True)
        (work / CHECKPOINTS).mkdir(exist_ok=True)
        self._listens = self._backend.ports((self._request.port, 0), http=False)[0]
        self._start_scheduler()
        self._calls = SchedulerCalls(self.address, certificates)
        self._until(lambda: [] if self._status() else [SCHEDULER])
        for name in self._request.servers:
            self._start_server(name)
        self._until(self._missing_servers)

    @property
    def _folder(self) -> str:
        return self._backend.data_dir(self._request.work)

    @property
    def _scheduler_address(self) -> str:
        return join_host_port(self._backend.host(SCHEDULER), self._listens)

    @property
    def _checkpoints(self) -> str:
        """The folder of checkpoints where programs run, or its URL."""
        given = self._request.values.get("scheduler.checkpoints")
        return str(given) if given else f"{self._folder}/{CHECKPOINTS}"

    def _start_scheduler(self) -> None:
        values = {
            "scheduler.worker_lease_s": WORKER_LEASE_S,
            **self._request.of("scheduler", "logging"),
            "scheduler.listen": join_host_port(self._backend.bind_host, self._listens),
            "scheduler.data": f"{self._folder}/{GROUP}/scheduler",
            "scheduler.checkpoints": self._checkpoints,
        }
        program = self._parameter_program(SCHEDULER, "scheduler", values)
        self._start(self._scheduler, replace(program, is_published=True))

    def _start_server(self, name: str) -> None:
        values = {
            # All are stopped at the end: ranges have nowhere to move.
            "server.leave_s": 0,
            **self._request.of("server", "logging"),
            "server.scheduler": self._scheduler_address,
            "server.listen": join_host_port(self._backend.bind_host, 0),
            "server.advertised": self._backend.host(name),
            "server.name": name,
            "server.data": f"{self._folder}/{GROUP}",
        }
        self._start(self._servers, self._parameter_program(name, "serve", values))

    def _parameter_program(self, name: str, command: str, values: Mapping[str, object]) -> Program:
        """A command of `xain-parameter-server` with the settings that scheduler and servers have in
        common."""
        tls = self._request.tls
        common = {
            "logging.console": "false",
            "tls.folder": self._backend.source(tls) if tls else None,
        }
        return Program(
            name,
            [command, *assignments({**values, **common})],
            command=PARAMETERS,
            data=[tls] if tls else [],
            has_work=True,
        )

    def _start_worker(self, worker: Worker) -> None:
        assert worker.part is not None
        index, number = worker.part
        arguments = [
            f"--data={self._backend.source(worker.source)}",
            f"--index={index}",
            f"--workers={number}",
            *_flags(self._request.worker_values),
        ]
        program = self._participant(worker.name, arguments, worker.source, worker.cpu_shares)
        self._start(self._workers, program)

    def _participant(
        self, name: str, arguments: Sequence[str], source: str, cpu_shares: int | None = None
    ) -> Program:
        tls = self._request.tls
        own = [f"--tls={self._backend.source(tls, 1)}"] if tls else []
        return Program(
            name,
            ["sparse", f"--server={self._scheduler_address}", f"--worker={name}", *own, *arguments],
            command=PARTICIPATE,
            data=[source, tls] if tls else [source],
            cpu_shares=cpu_shares,
        )

    def _show_lines(self, one: Running) -> None:
        lines = one.new_lines()
        self._view.show(one.name, lines)
        if one.name in self._workers:
            for line in lines:
                if line.startswith("{") and '"progress"' in line:
                    with suppress(ValueError):  # kill -9 may cut a line
                        self._progress[one.name] = json.loads(line)

    # --- the training ---

    def _status(self) -> Status | None:
        """The status from the scheduler; None if it does not answer."""
        assert self._calls is not None
        try:
            return self._calls.status(ASK_S)
        except ParameterError:
            return None

    def _missing_servers(self) -> Collection[str]:
        """Servers that are not in the group, or have not brought their ranges back yet."""
        status = self._status()
        if status is None:
            return self._request.servers
        absent = set(self._request.servers).difference(status.view.addresses)
        return absent.union(filter(None, status.lost.values()))

    def _missing_workers(self) -> Collection[str]:
        """Workers that have not joined. Raises CommandFailed if one has ended before."""
        ended = {name: one.status() for name, one in self._workers.items()}
        # Asked after that: a short training may be over already.
        status = self._status()
        self._begun.update(() if status is None else status.clocks)
        over = (0, EXIT_NOTHING_COUNTED)
        self._begun.update(name for name, code in ended.items() if code in over)
        for name, code in ended.items():
            if code is not None and name not in self._begun:
                raise CommandFailed(ended_early(name, code, self._request.work))
        return self._workers.keys() - self._begun

    def _look(self) -> None:
        """Show new lines of the logs, and start killed servers and a killed scheduler again."""
        self._pause(POLL_S)  # between two looks
        self._show()
        self._keep_running(self._scheduler, SCHEDULER, self._start_scheduler)
        for name in list(self._servers):
            self._keep_running(self._servers, name, partial(self._start_server, name))

    def _are_over(self) -> bool:
        """Whether all workers have ended. Starts killed ones again, and reports failed ones."""
        is_over = True
        for worker in self._request.workers:
            name = worker.name
            status = self._revive(self._workers, name, partial(self._start_worker, worker))
            is_over &= status is not None
            if status and name not in self._told:
                self._told.add(name)
                how = how_it_ended(status, "was killed too often")
                if status == EXIT_NOTHING_COUNTED:
                    self._idle.add(name)
                self._say(f"{name} {how}; the others go on")
        return is_over

    # --- its end ---

    def _save(self) -> tuple[int, Status]:
        """Make a checkpoint, further ones if a program was killed meanwhile.

        Returns its number and the status afterwards. Raises CommandFailed.
        """
        calls = self._calls
        assert calls is not None
        num_restarts = self._num_restarts.total()
        # The scheduler may notice a death only when the program runs again, so that a second
        # checkpoint fails of the same death: every restart allows new ones for START_TIMEOUT_S.
        deadline = -math.inf
        while True:
            # In a thread, which ends when stop() closes the calls: the call may wait for a server
            # that was killed and is started again meanwhile.
            thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            saved = thread.submit(
                lambda: (calls.checkpoint(CHECKPOINT_S), calls.status(CHECKPOINT_S))
            )
            thread.shutdown(wait=False)
            while not saved.done():
                self._look()
            try:
                return saved.result()
            except ParameterError as error:
                self._look()
                self._until(self._missing_servers)
                if self._num_restarts.total() != num_restarts:
                    num_restarts = self._num_restarts.total()
                    deadline = time.monotonic() + START_TIMEOUT_S
                if time.monotonic() > deadline:
                    raise CommandFailed(f"the model was not saved: {error}") from None

    def _tell_result(self, failed: Sequence[str], number: int, status: Status) -> None:
        """Score and export the model of a checkpoint, and say where it is."""
        request = self._request
        self._show()
        folder = f"{self._checkpoints}/{cut_folder(status.view.generation, number)}"
        to = f"{self._folder}/{MODEL}"
        arguments = ["export", folder, f"--table={request.table}", f"--to={to}"]
        self._run(Program(EXPORT, arguments, command=PARAMETERS, has_work=True))
        scores = self._score() if request.test else []

        lost = f"; {', '.join(failed)} did not train all of their rows" if failed else ""
        if status.num_rollbacks != self._num_rollbacks:
            lost += (
                "; the servers went back to an earlier model, and rows of others may be lost too"
            )
        self._say(f"The training is over at clock {status.opened}{lost}.")
        if self._progress:
            means = (
                f"{key} {sum(p[key] for p in self._progress.values()) / len(self._progress):.4g}"
                for key in ("accuracy", "loss")
            )
            self._say(f"Last training, mean of the workers: {', '.join(means)}")
        for line in scores:
            self._say(f"On {line}")
        here = folder.replace(self._folder, str(request.work), 1)
        self._say(f"Model: {request.work / MODEL}")
        self._say(f"Checkpoint: {here}")

    def _score(self) -> list[str]:
        """Score the model at the servers. Returns a line with the metrics."""
        request = self._request
        values = {**request.worker_values, "epochs": "0"}
        arguments = [f"--test={self._backend.source(request.test)}", *_flags(values)]
        lines = self._run(self._participant(SCORE, arguments, request.test))
        rows = [line.partition(":") for line in lines if ": log loss " in line]
        return [f"{number} of {request.test_name}:{measured}" for number, _, measured in rows]

    def _run(self, program: Program) -> list[str]:
        """Run a program to its end. Returns its output. Raises CommandFailed if it fails."""
        one = self._start(self._tools, program)
        lines = []
        while (status := one.status()) is None:
            new = one.new_lines()
            self._view.show(one.name, new)
            lines += new
            self._pause(POLL_S)  # between two looks
        one.remove(0)
        new = one.new_lines()
        self._view.show(one.name, new)
        if status:
            raise CommandFailed(f"{program.name} ended with status {status}")
        return lines + new

    def stop(self) -> None:
        """See Launch."""
        super().stop()
        if self._calls is not None:
            self._calls.close()


def _flags(values: Mapping[str, str]) -> list[str]:
    return [f"--{key.replace('_', '-')}={value}" for key, value in values.items()]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
