"""A launch of a coordinator and its workers."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from xain_coordinator.cli import figures
from xain_coordinator.cli import status as status_view
from xain_coordinator.cli.launch.lifecycle import (
    POLL_S,
    Launch,
    Launcher,
    ended_early,
    have_ended,
    how_it_ended,
)
from xain_coordinator.cli.launch.plan import (
    START_TIMEOUT_S,
    Program,
    Worker,
    coordinator_program,
    worker_program,
)
from xain_coordinator.config.launch import COORDINATOR
from xain_coordinator.server import inspection_client
from xain_coordinator.server.inspection_client import NoStatus, Snapshot
from xain_foundation.commands import CommandFailed
from xain_foundation.exit_statuses import EXIT_FAILED, EXIT_NO_BETTER, EXIT_OK
from xain_foundation.fields import join_host_port
from xain_wire.fl.inspection_pb2 import RoundStatus
from xain_wire.metadata import COMPLETED

ASK_EVERY_S = 0.5
NUM_ROUNDS = 60  # of an answer: more than pass between two
LEAVE_TIMEOUT_S = 10.0  # for workers to end by themselves after the session
JSON_BODY = "-H 'content-type: application/json' -d '{}'"


@dataclass(frozen=True, slots=True)
class Request:
    """Programs of a launch and their settings.

    ports: of gRPC and HTTP; 0 for a free one. values: settings of the coordinator by dotted key.
    worker_values: of each worker. task: of the workload. serve: stay after the training, for
        requests over HTTP.
    """

    workers: Sequence[Worker]
    work: Path
    config: Path | None
    ports: tuple[int, int]
    values: Mapping[str, object]
    worker_values: Mapping[str, object]
    task: str
    environ: Mapping[str, str] = field(default_factory=dict)
    serve: bool = False

    @property
    def names(self) -> list[str]:
        """Names of all programs."""
        return [COORDINATOR, *(worker.name for worker in self.workers)]


class RoundsLaunch(Launch):
    """See Launch. The coordinator is started first, and stopped last."""

    def __init__(self, request: Request, launcher: Launcher) -> None:
        super().__init__(launcher)
        self._request = request
        self._coordinator = self._new_group()
        self._workers = self._new_group()
        self._listens = (0, 0)
        self._joined: set[str] = set()
        self._asked_at = 0.0
        self._is_finished = False
        self.address = ""

    def follow(self) -> int:
        """See Launch."""
        number = len(self._request.workers)
        self._say(
            f"starting a coordinator and {number} {'worker' if number == 1 else 'workers'} ..."
        )
        self.start()
        self._until(self._missing_workers)
        self._say(f"ready: all {number} have joined; the coordinator listens on {self.address}")
        if self._request.serve:
            url = f"http://{self._backend.address(self._listens[1])}"
            self._say(f"train with: curl -X POST {url}/v1/fit {JSON_BODY}    (Ctrl-C ends)")
        snapshot = self.watch()
        for line in result_lines(snapshot, self._request.work):
            self._say(line)
        return exit_status(snapshot)

    def start(self) -> None:
        """Start the coordinator, and when it answers the workers. Raises CommandFailed."""
        request, backend = self._request, self._backend
        self._prepare(request.work)
        self._listens = backend.ports(request.ports, http=request.serve)
        self._start_coordinator(is_restart=False)
        address = join_host_port(backend.host(COORDINATOR), self._listens[0])
        for worker in request.workers:
            self._start(self._workers, self._worker_program(worker, address))

    def _worker_program(self, worker: Worker, coordinator: str) -> Program:
        """coordinator: HOST:PORT as programs of the launch reach it."""
        return worker_program(
            worker,
            coordinator,
            self._backend.source(worker.source),
            self._request.task,
            self._request.worker_values,
            serve=self._request.serve,
        )

    def _start_coordinator(self, *, is_restart: bool) -> None:
        coordinator = self._start(self._coordinator, self._program(is_restart=is_restart))
        self.address = ""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            self._show()
            status = coordinator.status()
            if status is not None:
                raise CommandFailed(f"the coordinator ended with status {status}")
            self.address = self._backend.address(self._listens[0])
            if self._ask() is not None:
                return
            if time.monotonic() > deadline:
                raise CommandFailed(f"the coordinator does not answer for {START_TIMEOUT_S:g} s")
            self._pause(POLL_S)  # between two questions

    def _program(self, *, is_restart: bool) -> Program:
        request, backend = self._request, self._backend
        values = dict(request.values)
        if request.serve:
            values |= {"http.port": self._listens[1], **backend.http_values()}
        return coordinator_program(
            (backend.bind_host, self._listens[0]),
            backend.data_dir(request.work),
            backend.config_path(request.config),
            values,
            request.environ,
            is_restart=is_restart,
        )

    def _missing_workers(self) -> Collection[str]:
        """Workers that have not joined; none after the end of the session. Raises CommandFailed if
        one has ended before."""
        ended = {name: one.status() for name, one in self._workers.items()}
        if any(status is not None for status in ended.values()):
            self._ask()  # asked after that: workers also end at the end of a short session
        missing = set() if self._is_finished else self._workers.keys() - self._joined
        for name in sorted(missing):
            status = ended[name]
            if status is not None:
                raise CommandFailed(ended_early(name, status, self._request.work))
        return missing

    def watch(self) -> Snapshot:
        """Follow the session to its end. Raises CommandFailed if it cannot come to one."""
        while True:
            snapshot = self._look()
            all_ended = have_ended(self._workers)
            if all_ended:  # asked after that: workers end when they hear of the end of the session
                snapshot = self._ask()
            if snapshot is None:
                continue
            if snapshot.status.phase != "finished" and all_ended:
                raise CommandFailed("all workers have ended, and the training is not over")
            if snapshot.status.phase == "finished" and (all_ended or not self._request.serve):
                self._let_workers_end()
                return snapshot

    def _look(self) -> Snapshot | None:
        """After POLL_S print new lines of the logs, report programs that died, and start the
        coordinator again if it did. Returns its status every ASK_EVERY_S, and None else."""
        self._pause(POLL_S)  # between two looks
        self._show()
        self._report_workers()
        # On the same port, to go on with its session.
        restart = partial(self._start_coordinator, is_restart=True)
        self._keep_running(self._coordinator, COORDINATOR, restart)
        if time.monotonic() - self._asked_at < ASK_EVERY_S:
            return None
        self._asked_at = time.monotonic()
        return self._ask()

    def _ask(self) -> Snapshot | None:
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
    def _is_ready(self) -> bool:
        return self._workers.keys() <= self._joined

    def _report_workers(self) -> None:
        for name, worker in self._workers.items():
            status = worker.status()
            if status and name not in self._told:
                self._told.add(name)
                how = how_it_ended(status, "was killed")
                self._say(f"{name} {how}" + ("; the others go on" if self._is_ready else ""))

    def _let_workers_end(self) -> None:
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        while time.monotonic() < deadline:
            self._show()
            if have_ended(self._workers):
                return
            self._pause(POLL_S)  # between two looks


def exit_status(snapshot: Snapshot) -> int:
    """The status of a command that has waited for the end of the session."""
    if snapshot.status.cause != COMPLETED:
        return EXIT_FAILED
    return EXIT_NO_BETTER if snapshot.status.no_better else EXIT_OK


def result_lines(snapshot: Snapshot, work: Path) -> list[str]:
    """End of the session: its outcome, and the measurements and place of its last model."""
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
