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
from xain_coordinator.cli.launch.supervisor import Launcher, Rank, Supervisor, ended_early
from xain_coordinator.config.sections.launch import COORDINATOR, LaunchSettings
from xain_foundation.exit_statuses import (
    EXIT_FAILED,
    EXIT_NOTHING_COUNTED,
    EXIT_OK,
    EXIT_ROWS_MISSED,
    CommandFailed,
)
from xain_foundation.logs.logs import LoggingSettings
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import Certificates, InvalidCertificates
from xain_foundation.security.tls_settings import TlsSettings
from xain_foundation.settings.fields import Section, is_loopback, join_host_port
from xain_foundation.settings.hints import hint
from xain_foundation.settings.settings import Resolved
from xain_parameters.config import ENV_PREFIX, SchedulerSettings, ServerSettings
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
# Exit statuses of a worker that has come to its end.
OVER = (EXIT_OK, EXIT_NOTHING_COUNTED, EXIT_ROWS_MISSED)
GROUP = "xain-parameters"  # journal and logs, in the work folder; a launch begins without them
# Flags of `xain-participant sparse` that all workers have.
WORKER_KEYS = (
    "batch",
    "bound",
    "categories",
    "epochs",
    "factors",
    "format",
    "l2",
    "learning_rate",
    "model",
    "seed",
    "staleness",
    "table",
    "target",
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
    tls: the certificate that all programs show. Without one each gets its own, unless only this
        machine reaches the programs, or nothing is to be encrypted.
    """

    workers: Sequence[Worker]
    servers: Sequence[str]
    work: Path
    port: int
    test: str
    test_name: str
    values: Mapping[str, object]
    worker_values: Mapping[str, str]
    tls: TlsSettings

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
        resolved.config.tls,
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


class SparseLaunch:
    """A launch of a parameter server and its workers. The workers are stopped first, then the
    scheduler, then the servers.

    A program that is started again goes on where it was.
    """

    def __init__(self, request: Request, launcher: Launcher) -> None:
        self._request = request
        self._supervisor = Supervisor(launcher, request.work)
        self._supervisor.on_lines = self._note_progress
        self._calls: SchedulerCalls | None = None
        self._listens = 0
        self._begun: set[str] = set()  # workers that have begun their loop over clocks
        self._progress: dict[str, Mapping[str, float]] = {}  # the last of each worker
        self._num_rollbacks = 0  # before all workers were started the last time

    def follow(self) -> int:
        """Start all programs, wait until the workers have read all epochs, and save and score the
        model. A rollback of the servers starts the workers again.

        Returns 1 if a worker failed; otherwise 5 if none had a row, and 7 if rows were not read
        once. Raises CommandFailed.
        """
        request, supervisor = self._request, self._supervisor
        supervisor.say(
            f"starting a scheduler, {_counted(len(request.servers), 'server')} and "
            f"{_counted(len(request.workers), 'worker')} ..."
        )
        self.start_servers()
        self._start_workers()
        supervisor.until(self._missing_workers)
        supervisor.is_ready = True
        supervisor.say(
            f"ready: all {len(request.workers)} have joined; "
            f"the scheduler listens on {self.address}"
        )
        while True:
            while not supervisor.have_ended(Rank.WORKER):
                supervisor.look()
            ended = supervisor.end_statuses(Rank.WORKER)
            if all(status == EXIT_NOTHING_COUNTED for status in ended.values()):
                return EXIT_NOTHING_COUNTED
            failed = [n for n, status in ended.items() if status not in OVER]
            if len(failed) == len(request.workers):
                raise CommandFailed("no worker has trained to its end")
            number, status = self._save()
            # Workers that are started again would wait for failed ones.
            if failed or status.num_rollbacks == self._num_rollbacks:
                break
            self._num_rollbacks = status.num_rollbacks
            supervisor.say(
                "the servers went back to an earlier model; workers repeat what was lost"
            )
            self._start_workers()  # a worker whose epochs are still complete ends at once
        self._tell_result(sorted(failed), number, status)
        if failed:
            return EXIT_FAILED
        return EXIT_ROWS_MISSED if EXIT_ROWS_MISSED in ended.values() else EXIT_OK

    # --- programs ---

    @property
    def address(self) -> str:
        """The scheduler as this machine reaches it, once it is started."""
        return self._supervisor.backend.address(self._listens)

    def start_servers(self) -> None:
        """Start the scheduler and the servers. Returns when they serve. Raises CommandFailed."""
        work, tls, supervisor = self._request.work, self._request.tls, self._supervisor
        try:
            certificates = tls.certificates()
        except InvalidCertificates as error:
            raise CommandFailed(f"tls.folder: {error}") from None
        supervisor.prepare()
        is_open = is_loopback(supervisor.backend.bind_host) or self._is_insecure
        if tls.folder is None and not is_open:
            certificates = Certificates(supervisor.close_to_others())
        # Scheduler and servers would go on with the training of an earlier launch.
        shutil.rmtree(work / GROUP, ignore_errors=True)
        (work / CHECKPOINTS).mkdir(exist_ok=True)
        self._listens = supervisor.backend.ports((self._request.port, 0), http=False)[0]
        supervisor.start(self._scheduler_program, Rank.HEAD)
        self._calls = SchedulerCalls(self.address, certificates, insecure=is_open)
        supervisor.until(lambda: [] if self._status() else [SCHEDULER])
        for name in self._request.servers:
            supervisor.start(partial(self._server_program, name), Rank.SERVER)
        supervisor.until(self._missing_servers)

    def _start_workers(self) -> None:
        """Start all workers, also those that have ended."""
        for worker in self._request.workers:
            self._supervisor.start(partial(self._worker_program, worker), Rank.WORKER)

    @property
    def _is_insecure(self) -> bool:
        """Whether the settings allow connections in the clear."""
        given = self._request.values
        return any(given.get(f"{section}.insecure") for section in ("scheduler", "server"))

    def _tls_of(self, name: str, role: Role, *hosts: str) -> list[str]:
        """The folder of a program's certificate in a list, which is empty without one; a
        certificate of the launch is issued here. hosts: that others reach the program by."""
        if self._request.tls.folder is not None:
            return [str(self._request.tls.folder.absolute())]
        folder = self._supervisor.certificate(name, role, *hosts)
        return [] if folder is None else [folder]

    @property
    def _folder(self) -> str:
        """The work folder where programs run."""
        return self._supervisor.backend.data_dir(self._request.work)

    @property
    def _scheduler_address(self) -> str:
        """HOST:PORT at which programs of the launch reach the scheduler."""
        return join_host_port(self._supervisor.backend.host(SCHEDULER), self._listens)

    @property
    def _checkpoints(self) -> str:
        """The folder of checkpoints where programs run, or its URL."""
        given = self._request.values.get("scheduler.checkpoints")
        return str(given) if given else f"{self._folder}/{CHECKPOINTS}"

    def _scheduler_program(self) -> Program:
        """The program of the scheduler. Issues its certificate if programs have some."""
        values = {
            "scheduler.worker_lease_s": WORKER_LEASE_S,
            **self._request.of("scheduler", "logging"),
            "scheduler.listen": join_host_port(self._supervisor.backend.bind_host, self._listens),
            "scheduler.data": f"{self._folder}/{GROUP}/scheduler",
            "scheduler.checkpoints": self._checkpoints,
        }
        program = self._parameter_program(SCHEDULER, "scheduler", values)
        return replace(program, is_published=True)

    def _server_program(self, name: str) -> Program:
        """The program of a server. Issues its certificate if programs have some."""
        values = {
            # All are stopped at the end: ranges have nowhere to move.
            "server.leave_s": 0,
            **self._request.of("server", "logging"),
            "server.scheduler": self._scheduler_address,
            "server.listen": join_host_port(self._supervisor.backend.bind_host, 0),
            "server.advertised": self._supervisor.backend.host(name),
            "server.name": name,
            "server.data": f"{self._folder}/{GROUP}",
        }
        return self._parameter_program(name, "serve", values)

    def _parameter_program(self, name: str, command: str, values: Mapping[str, object]) -> Program:
        """A command of `xain-parameter-server` with the settings that scheduler and servers have in
        common. Issues its certificate if programs have some."""
        reached_by = self.address.rpartition(":")[0].strip("[]")
        tls = self._tls_of(name, Role.NODE, self._supervisor.backend.host(name), reached_by)
        common = {
            "logging.console": "false",
            **self._request.of("tls"),
            "tls.folder": self._supervisor.backend.source(tls[0]) if tls else None,
        }
        return Program(
            name,
            [command, *assignments({**values, **common})],
            command=PARAMETERS,
            data=tls,
            folder="",
        )

    def _worker_program(self, worker: Worker) -> Program:
        """The program of a worker. Issues its certificate if programs have some."""
        assert worker.part is not None
        index, number = worker.part
        arguments = [
            f"--data={self._supervisor.backend.source(worker.source)}",
            f"--index={index}",
            f"--workers={number}",
            *_flags(self._request.worker_values),
        ]
        return self._participant(worker.name, arguments, worker.source, worker.cpu_shares)

    def _participant(
        self, name: str, arguments: Sequence[str], source: str, cpu_shares: int | None = None
    ) -> Program:
        """A command of `xain-participant sparse`. Issues its certificate if programs have some.
        name: by which the servers know it. source: its data on this machine."""
        tls = self._tls_of(name, Role.PARTICIPANT)
        own = [f"--tls={self._supervisor.backend.source(tls[0], 1)}"] if tls else []
        if not tls and not is_loopback(self._supervisor.backend.host(SCHEDULER)):
            own.append("--insecure")
        return Program(
            name,
            ["sparse", f"--server={self._scheduler_address}", f"--worker={name}", *own, *arguments],
            environment=_in_environment(self._request.tls),
            command=PARTICIPATE,
            data=[source, *tls],
            cpu_shares=cpu_shares,
        )

    def _note_progress(self, name: str, lines: Sequence[str]) -> None:
        """Keep the latest progress of a worker among these lines of its log."""
        if not any(worker.name == name for worker in self._request.workers):
            return
        for line in lines:
            if line.startswith("{") and '"progress"' in line:
                with suppress(ValueError):  # kill -9 may cut a line
                    self._progress[name] = json.loads(line)

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
        absent = set(self._request.servers).difference(status.addresses)
        absent.update(self._supervisor.awaiting_restart)
        return absent.union(filter(None, status.lost.values()))

    def _missing_workers(self) -> Collection[str]:
        """Workers that have not joined. Raises CommandFailed if one has ended before."""
        ended = self._supervisor.end_statuses(Rank.WORKER)
        # Asked after that: a short training may be over already.
        status = self._status()
        jobs = () if status is None else status.jobs.values()
        for job in jobs:
            # After the first clock, which waits for all, one with nothing to read is in no loop.
            self._begun.update(job.view.ranks if job.opened else job.clocks)
        self._begun.update(name for name, code in ended.items() if code in OVER)
        for name, code in ended.items():
            if name not in self._begun:
                raise CommandFailed(ended_early(name, code, self._request.work))
        return {worker.name for worker in self._request.workers} - self._begun

    # --- its end ---

    def _save(self) -> tuple[int, Status]:
        """Make a checkpoint, further ones if a program was killed meanwhile. Returns its number and
        the status afterwards. Raises CommandFailed."""
        calls = self._calls
        assert calls is not None
        num_deaths = self._supervisor.deaths.total()
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
                self._supervisor.look()
            try:
                return saved.result()
            except ParameterError as error:
                self._supervisor.look()
                self._supervisor.until(self._missing_servers)
                if self._supervisor.deaths.total() != num_deaths:
                    num_deaths = self._supervisor.deaths.total()
                    deadline = time.monotonic() + START_TIMEOUT_S
                if time.monotonic() > deadline:
                    raise CommandFailed(f"the model was not saved: {error}") from None

    def _tell_result(self, failed: Sequence[str], number: int, status: Status) -> None:
        """Score and export the model of a checkpoint, and say where it is."""
        request = self._request
        self._supervisor.show()
        (job,) = status.jobs.values()
        cut = cut_folder(job.view.generation, number, job.view.job)
        folder = f"{self._checkpoints}/{cut}"
        to = f"{self._folder}/{MODEL}"
        arguments = ["export", folder, f"--table={request.table}", f"--to={to}"]
        self._supervisor.run(Program(EXPORT, arguments, command=PARAMETERS, folder=""))
        scores = self._score() if request.test else []

        lost = f"; {', '.join(failed)} did not train all of their rows" if failed else ""
        if status.num_rollbacks != self._num_rollbacks:
            lost += (
                "; the servers went back to an earlier model, and rows of others may be lost too"
            )
        self._supervisor.say(f"The training is over at clock {job.opened}{lost}.")
        if self._progress:
            means = (
                f"{key} {sum(p[key] for p in self._progress.values()) / len(self._progress):.4g}"
                for key in ("accuracy", "loss")
            )
            self._supervisor.say(f"Last training, mean of the workers: {', '.join(means)}")
        for line in scores:
            self._supervisor.say(f"On {line}")
        here = folder.replace(self._folder, str(request.work), 1)
        self._supervisor.say(f"Model: {request.work / MODEL}")
        self._supervisor.say(f"Checkpoint: {here}")

    def _score(self) -> list[str]:
        """Score the model at the servers. Returns a line with the metrics."""
        request = self._request
        values = {**request.worker_values, "epochs": "0"}
        arguments = [f"--test={self._supervisor.backend.source(request.test)}", *_flags(values)]
        lines = self._supervisor.run(self._participant(SCORE, arguments, request.test))
        rows = [line.partition(":") for line in lines if ": log loss " in line]
        return [f"{number} of {request.test_name}:{measured}" for number, _, measured in rows]

    def stop(self) -> None:
        """Stop and remove all programs, and end calls to the scheduler."""
        self._supervisor.stop()
        if self._calls is not None:
            self._calls.close()


def _in_environment(tls: TlsSettings) -> dict[str, str]:
    """The rules for names in certificates, for programs without a file of settings."""
    if not tls.roles:
        return {}
    roles = {f"ROLES__{role.upper()}": json.dumps(names) for role, names in tls.roles.items()}
    given = {"IDENTITY": tls.identity, **roles}
    return {f"{ENV_PREFIX}TLS__{key}": value for key, value in given.items()}


def _flags(values: Mapping[str, str]) -> list[str]:
    """Options as flags of a command line."""
    return [f"--{key.replace('_', '-')}={value}" for key, value in values.items()]


def _counted(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
