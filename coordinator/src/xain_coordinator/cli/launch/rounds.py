"""A launch of a coordinator and its workers."""

import platform
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from xain_coordinator.cli import figures
from xain_coordinator.cli import status as status_view
from xain_coordinator.cli.launch.plan import (
    Program,
    Tls,
    Worker,
    coordinator_program,
    state_of,
    worker_program,
)
from xain_coordinator.cli.launch.supervisor import Launcher, Rank, Supervisor, ended_early
from xain_coordinator.config.sections.launch import COORDINATOR
from xain_coordinator.config.sections.workload import WorkloadSettings
from xain_coordinator.inspection import client as inspection_client
from xain_coordinator.inspection.client import NoStatus, Snapshot
from xain_foundation.durable import replace_file
from xain_foundation.exit_statuses import EXIT_FAILED, EXIT_NO_BETTER, EXIT_OK, CommandFailed
from xain_foundation.net import channels
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import AUTHORITY, Certificates
from xain_foundation.settings.fields import is_loopback, join_host_port
from xain_wire.fl.inspection_pb2 import RoundStatus
from xain_wire.metadata import COMPLETED

ASK_EVERY_S = 0.5
NUM_ROUNDS = 60  # of an answer: more than pass between two
LEAVE_TIMEOUT_S = 10.0  # for workers to end by themselves after the session
BEARER = "bearer"  # file with the header of requests over HTTP, which has the token
JSON_BODY = "-H 'content-type: application/json' -d '{}'"


@dataclass(frozen=True, slots=True)
class Request:
    """Programs of a launch and their settings.

    ports: of gRPC and HTTP; 0 for a free one. values: settings of the coordinator by dotted key.
    worker_values: of each worker. workload: that they import before they join. serve: stay after
        the training, for requests over HTTP. is_insecure: open also where others reach the
        programs.
    worker_restarts: how often a worker is started again; None: as other programs.
    """

    workers: Sequence[Worker]
    work: Path
    config: Path | None
    ports: tuple[int, int]
    values: Mapping[str, object]
    worker_values: Mapping[str, object]
    workload: WorkloadSettings
    environ: Mapping[str, str] = field(default_factory=dict)
    serve: bool = False
    is_insecure: bool = False
    worker_restarts: int | None = None

    @property
    def names(self) -> list[str]:
        """Names of all programs."""
        return [COORDINATOR, *(worker.name for worker in self.workers)]


class RoundsLaunch:
    """A launch of a coordinator and participants. The coordinator is started first, and stopped
    last.

    Programs that others could reach show certificates, and requests over HTTP a bearer token.
    """

    def __init__(self, request: Request, launcher: Launcher) -> None:
        self._request = request
        self._supervisor = Supervisor(launcher, request.work)
        self._listens = (0, 0)
        self._joined: set[str] = set()
        self._asked_at = 0.0
        self._has_begun = False  # its coordinator, with a session
        self._is_finished = False
        self._operator: Certificates | None = None

    def follow(self) -> int:
        """Start all programs, wait for the end of the session, or with --serve for a signal, and
        print the result. Returns the exit status. Raises CommandFailed."""
        number = len(self._request.workers)
        say = self._supervisor.say
        say(f"starting a coordinator and {number} {'worker' if number == 1 else 'workers'} ...")
        self.start()
        self._supervisor.until(self._missing_workers)
        self._supervisor.is_ready = True
        say(f"ready: all {number} have joined; the coordinator listens on {self.address}")
        if self._request.serve:
            say(f"train with: {self._curl()}    (Ctrl-C ends)")
            self._serve()
        snapshot = self.watch()
        for line in result_lines(snapshot, self._request.work):
            say(line)
        return exit_status(snapshot)

    @property
    def address(self) -> str:
        """The coordinator as this machine reaches it, once it is started."""
        return self._supervisor.backend.address(self._listens[0])

    def start(self) -> None:
        """Start the coordinator, and when it answers the workers. Raises CommandFailed."""
        request, backend = self._request, self._supervisor.backend
        self._supervisor.prepare()
        self._listens = backend.ports(request.ports, http=request.serve)
        if not is_loopback(backend.bind_host) and not request.is_insecure:
            self._operator = Certificates(self._supervisor.close_to_others())
            inspection_client.TLS.set(self._operator)
        self._supervisor.start(self._coordinator_program, Rank.HEAD)
        self._has_begun = True
        self._supervisor.until(lambda: [COORDINATOR] if self._ask() is None else [])
        if request.serve and self._operator is not None:
            self._make_bearer(self._operator)
        for worker in request.workers:
            make = partial(self._worker_program, worker)
            self._supervisor.start(make, Rank.WORKER, max_restarts=request.worker_restarts)

    def _make_bearer(self, operator: Certificates) -> None:
        """Make the token of requests over HTTP, which is beside the operator's certificate. That of
        an earlier launch in the folder counts no more."""
        from xain_coordinator.cli.access.names import NewToken
        from xain_coordinator.cli.access.operator import Remote
        from xain_coordinator.cli.launch.certificates import LIFETIME_S, NAME

        with channels.open_channel(self.address, (), operator.of_channel()) as channel:
            coordinator = Remote(channel, self.address, operator)
            if any(entry.name == NAME for entry in coordinator.entries()):
                coordinator.revoke(NAME)
            wanted = NewToken(NAME, Role.OPERATOR, LIFETIME_S, bearer=True)
            text, _, _ = coordinator.create_token(wanted)
        replace_file(operator.folder / BEARER, [f"authorization: Bearer {text}\n".encode()], 0o600)

    def _curl(self) -> str:
        """The curl command by which a person begins a training over HTTP."""
        address = self._supervisor.backend.address(self._listens[1])
        if self._operator is None:
            return f"curl -X POST http://{address}/v1/fit {JSON_BODY}"
        folder = self._operator.folder
        shown = f"--cacert {folder / AUTHORITY} -H @{folder / BEARER}"
        return f"curl -X POST https://{address}/v1/fit {JSON_BODY} {shown}"

    def _tls(self, name: str, role: Role, *hosts: str, number: int = 0) -> Tls | None:
        """Certificates of a program, issued here; None if programs have none. hosts: that others
        reach it by. number: of the folder among Program.data."""
        folder = self._supervisor.certificate(name, role, *hosts)
        if folder is None:
            return None
        return Tls(folder, self._supervisor.backend.source(folder, number))

    def _worker_program(self, worker: Worker) -> Program:
        """The program of a worker. Issues its certificate if programs have some."""
        backend = self._supervisor.backend
        return worker_program(
            worker,
            join_host_port(backend.host(COORDINATOR), self._listens[0]),
            backend.source(worker.source),
            self._request.workload,
            self._request.worker_values,
            f"{backend.data_dir(self._request.work)}/{state_of(worker.name)}",
            serve=self._request.serve,
            tls=self._tls(worker.name, Role.PARTICIPANT, number=1),
        )

    def _coordinator_program(self) -> Program:
        """The program of the coordinator, with a new session; started again, it goes on with that,
        on the same port. Issues its certificate if programs have some."""
        request, backend = self._request, self._supervisor.backend
        values = dict(request.values)
        if request.serve:
            values |= {"http.port": self._listens[1], "http.host": backend.bind_host}
        here = self.address.rpartition(":")[0].strip("[]")
        hosts = (backend.host(COORDINATOR), here, "localhost", platform.node() or "localhost")
        return coordinator_program(
            (backend.bind_host, self._listens[0]),
            backend.data_dir(request.work),
            backend.config_path(request.config),
            values,
            request.environ,
            is_restart=self._has_begun,
            tls=self._tls(COORDINATOR, Role.COORDINATOR, *hosts),
        )

    def stop(self) -> None:
        """Stop and remove all programs."""
        self._supervisor.stop()
        if self._operator is not None:
            inspection_client.TLS.set(None)

    def _missing_workers(self) -> Collection[str]:
        """Workers that have not joined; none after the end of the session. Raises CommandFailed if
        one has ended before."""
        ended = self._supervisor.end_statuses(Rank.WORKER)
        # Asked after that: workers also end at the end of a short session.
        self._ask() if ended else self._ask_now_and_then()
        missing = set() if self._is_finished else self._names - self._joined
        for name in sorted(missing):
            if name in ended:
                raise CommandFailed(ended_early(name, ended[name], self._request.work))
        return missing

    def _serve(self) -> NoReturn:
        """Look after the programs until a signal comes: a service has no end of its own. Raises
        CommandFailed if the coordinator has ended."""
        while not self._supervisor.have_ended(Rank.WORKER):
            self._supervisor.look()
        self._supervisor.say(
            "no worker is left; the coordinator goes on: it predicts with models that it has, and "
            "answers a training with NO_PARTICIPANTS until a worker joins    (Ctrl-C ends)"
        )
        while True:
            self._supervisor.look()

    def watch(self) -> Snapshot:
        """Follow the session to its end. Raises CommandFailed if it cannot come to one."""
        while True:
            snapshot = self._look()
            all_ended = self._supervisor.have_ended(Rank.WORKER)
            if all_ended:  # asked after that: workers end when they hear of the end of the session
                snapshot = self._ask()
            if snapshot is None:
                continue
            if snapshot.status.phase != "finished" and all_ended:
                raise CommandFailed("all workers have ended, and the training is not over")
            if snapshot.status.phase == "finished":
                self._let_workers_end()
                return snapshot

    def _look(self) -> Snapshot | None:
        """Look after the programs. Returns the status of the coordinator every ASK_EVERY_S, and
        None else."""
        self._supervisor.look()
        return self._ask_now_and_then()

    def _ask_now_and_then(self) -> Snapshot | None:
        """The status of the coordinator, asked every ASK_EVERY_S; None in between, and without an
        answer."""
        if time.monotonic() - self._asked_at < ASK_EVERY_S:
            return None
        self._asked_at = time.monotonic()
        return self._ask()

    def _ask(self) -> Snapshot | None:
        """The status of the coordinator; None if it does not answer. Notes which workers have
        joined, and whether the session is finished."""
        try:
            snapshot = inspection_client.fetch(
                self.address, everything=not self._is_ready, num_rounds=NUM_ROUNDS
            )
        except NoStatus:
            return None
        self._joined |= {one.participant_id for one in snapshot.participants.participants}
        self._is_finished = snapshot.status.phase == "finished"
        return snapshot

    @property
    def _names(self) -> set[str]:
        """Names of the workers."""
        return {worker.name for worker in self._request.workers}

    @property
    def _is_ready(self) -> bool:
        """Whether all workers have joined."""
        return self._names <= self._joined

    def _let_workers_end(self) -> None:
        """Wait for the workers to end by themselves, LEAVE_TIMEOUT_S at most."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        while time.monotonic() < deadline and not self._supervisor.have_ended(Rank.WORKER):
            self._supervisor.look()


def exit_status(snapshot: Snapshot) -> int:
    """Exit status of a finished session: failed, no better than the baseline, or 0."""
    if snapshot.status.cause != COMPLETED:
        return EXIT_FAILED
    return EXIT_NO_BETTER if snapshot.status.no_better else EXIT_OK


def result_lines(snapshot: Snapshot, work: Path) -> list[str]:
    """Lines for the end of the session: its outcome, and the measurements of its last model and the
    commands that show it."""
    status, models = snapshot.status, snapshot.models.models
    lines = [f"The session is over: {status.cause}, {status_view.progress(status)}."]
    if not models:
        return [*lines, "There is no model."]
    number = models[-1].round
    rounds = {one.round: one for one in snapshot.rounds.rounds}
    trained, measured = (rounds.get(n, RoundStatus()) for n in (number - 1, number))
    training = ", ".join(f"{name} {value:.4g}" for name, value in sorted(trained.metrics.items()))
    for label, told in (
        ("last training, averages over workers", training),
        ("on rows that workers set aside", figures.sentence(measured.evaluation)),
        ("on the coordinator's data", figures.sentence(measured.coordinator_evaluation)),
    ):
        if told:
            lines.append(f"Model {number}, {label}: {told}")
    if status.no_better:
        lines.append(f"Not better than the baseline: {status.no_better}")
    lines.append(f"All models: xain-coordinator models --data-dir {work}")
    lines.append(f"This one: xain-coordinator export --data-dir {work} --to model.skops")
    return lines
