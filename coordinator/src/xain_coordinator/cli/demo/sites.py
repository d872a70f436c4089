"""The launch of the demo: its sites, and its course."""

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.console import Console

from xain_coordinator.cli.demo import view
from xain_coordinator.cli.demo.training import (
    Split,
    centralised_accuracy,
    participant_settings,
    split,
)
from xain_coordinator.cli.launch.plan import PARTICIPATE, Program, Running, Worker
from xain_coordinator.cli.launch.processes import LocalProcess
from xain_coordinator.cli.launch.rounds import Request, RoundsLaunch, exit_status
from xain_coordinator.cli.launch.supervisor import Launcher, Rank
from xain_coordinator.cli.live_view import shown
from xain_coordinator.cli.report.files import report
from xain_coordinator.cli.report.page import page
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.config.sections.launch import COORDINATOR
from xain_coordinator.config.sections.workload import WorkloadSettings
from xain_coordinator.inspection.client import NoStatus
from xain_foundation.exit_statuses import CommandFailed
from xain_wire.fl import coordinator_pb2 as pb

MAX_BASELINE_EPOCHS = 200  # beyond it the baseline has long converged
LOG_LINES = 3  # of a log, quoted where it says why something failed
KILLED_BY = 128  # exit statuses above it are those of signals


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the demo. epochs: local passes between two aggregations."""

    participants: int
    rounds: int
    alpha: float
    seed: int
    epochs: ClassVar = 5
    eta0: ClassVar = 0.1

    @property
    def of_coordinator(self) -> dict[str, object]:
        """Settings of the demo's coordinator by dotted key."""
        return {
            "workload.name": "sgd",
            "workload.options.eta0": self.eta0,
            "rounds.epochs": self.epochs,
            "rounds.rounds": self.rounds,
            # Two are enough to go on with: the demo is there to have participants killed.
            "rounds.min_participants": 2,
            "rounds.start_participants": self.participants,
            "rounds.max_participants": self.participants,
            "rounds.start_timeout_s": 15,
            "rounds.seed": self.seed,
            # Local models and importances of 64 pixels would only make the demo longer: it trains
            # the same model in one place.
            "evaluate.importance": False,
            "evaluate.local": False,
            "server.heartbeat_time_s": 1,
            "server.heartbeat_timeout_s": 2,
            "server.drain_s": 1,
        }


class DemoLaunch(RoundsLaunch):
    """See RoundsLaunch. Each participant has its settings in a file of the folder, so that it can
    be started again by hand. report: where the page about the session is written."""

    def __init__(
        self, settings: Settings, folder: Path, report: Path, console: Console, launcher: Launcher
    ) -> None:
        self._settings = settings
        self._report = report
        self._console = console
        workers = [Worker(f"site-{index}", "") for index in range(settings.participants)]
        request = Request(
            workers,
            folder,
            None,
            (0, 0),
            settings.of_coordinator,
            {},
            WorkloadSettings(),  # the participants of the demo have files of their own
            worker_restarts=0,
        )
        super().__init__(request, launcher)

    def follow(self) -> int:
        """Start the demo, show its session to the end, and return the exit status. Raises
        CommandFailed, with the last lines of the logs of programs that have failed."""
        settings = self._settings
        try:
            data = split(settings.participants, settings.alpha, settings.seed)
            self.start()
            return self._follow(data)
        except CommandFailed as error:
            raise CommandFailed(f"{error}{self._ends_of_logs()}") from None

    def _follow(self, data: Split) -> int:
        """Start the sites, show the session until it is finished, and compare its model with one
        trained in one place. Returns the exit status. Raises CommandFailed."""
        settings, console, supervisor = self._settings, self._console, self._supervisor
        supervisor.is_ready = True  # what has not joined is looked after all the same
        pids = {name: _pid(one) for name, one in supervisor.running(Rank.WORKER).items()}
        console.print(view.sites(pids, data))
        command = [*_participant(), "--config", str(self._config_of("site-0"))]
        pid = _pid(supervisor.running(Rank.HEAD)[COORDINATOR])
        console.print(view.invitation(pid, self.address, command), soft_wrap=True)
        snapshot = None
        with shown(console) as show:
            while snapshot is None or snapshot.status.state != pb.FINISHED:
                # Before looking: those that leave after the end must not be taken for lost.
                are_gone = supervisor.have_ended(Rank.WORKER)
                snapshot = self._look()
                if snapshot is None:
                    continue
                show(snapshot, "")
                # Participants that the demo has not started count, too.
                is_empty = not snapshot.status.num_connected
                if are_gone and is_empty and snapshot.status.state != pb.FINISHED:
                    raise CommandFailed("all participants are gone, and the training is not done")
        self._let_workers_end()
        epochs = min(settings.rounds * settings.epochs, MAX_BASELINE_EPOCHS)
        with console.status("Training the same model on all rows in one place ..."):
            baseline = centralised_accuracy(data, epochs, settings.eta0, settings.seed)
        supervisor.pause(0.0)  # for a signal that came meanwhile
        console.print(view.comparison(snapshot, data.test.num_samples, baseline))
        try:
            html = report(CoordinatorConfig(), self.address).html
        except NoStatus:  # killed at the very end; what is known of the latest rounds remains
            html = page(snapshot)
        self._report.write_text(html, encoding="utf-8")
        console.print(f"Report with curves and sites: {self._report}", soft_wrap=True)
        return exit_status(snapshot)

    def _worker_program(self, worker: Worker) -> Program:
        """The program of a site. Writes the file of its settings."""
        settings, index = self._settings, self._request.workers.index(worker)
        host, _, port = self.address.rpartition(":")
        sections = {
            **participant_settings(index, settings.participants, settings.alpha, settings.seed),
            "coordinator": {"host": host, "port": int(port)},
        }
        config = self._config_of(worker.name)
        config.write_text(_toml(sections), encoding="utf-8")
        return Program(worker.name, [f"--config={config}"], command=PARTICIPATE)

    def _config_of(self, name: str) -> Path:
        """The file of a site's settings."""
        return self._request.work / f"{name}.toml"

    def _ends_of_logs(self) -> str:
        """Last lines of the logs of programs that have failed by themselves."""
        told = ""
        for rank in (Rank.HEAD, Rank.WORKER):
            for name, one in self._supervisor.running(rank).items():
                if 0 < (one.status() or 0) < KILLED_BY:
                    log = self._request.work / "logs" / f"{name}.log"
                    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                    told += f"\nThe log of {name} ends with:"
                    told += "".join(f"\n  {line}" for line in lines[-LOG_LINES:])
        return told


def _pid(process: Running) -> int:
    """Process id of a program that was started."""
    assert isinstance(process, LocalProcess)
    return process.pid


def _participant() -> list[str]:
    """Command that starts a participant from any folder, with this interpreter's program."""
    # Not resolved: in a virtual environment the interpreter is a link to one that is elsewhere.
    program = shutil.which("xain-participant", path=str(Path(sys.executable).parent))
    return [program] if program else [sys.executable, "-m", "xain_participant"]


def _toml(sections: Mapping[str, Mapping[str, object]]) -> str:
    """Sections of strings and numbers; JSON's notation of those is TOML's too."""
    lines: list[str] = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(v)}" for key, v in values.items()), ""]
    return "\n".join(lines)
