"""Programs of a launch are started, watched and stopped: the base of all launches."""

import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from xain_coordinator.cli.launch.containers import Container, DockerBackend
from xain_coordinator.cli.launch.logs import LogView
from xain_coordinator.cli.launch.plan import (
    KILLED,
    SCHEDULER,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Program,
)
from xain_coordinator.cli.launch.processes import LocalProcess, ProcessBackend
from xain_coordinator.cli.launch.work_folder import hold
from xain_coordinator.config.launch import COORDINATOR
from xain_foundation.commands import CommandFailed
from xain_foundation.exit_statuses import EXIT_NO_BETTER, EXIT_NOTHING_COUNTED

POLL_S = 0.1
MAX_RESTARTS = 5  # of each program

Backend = ProcessBackend | DockerBackend
Running = LocalProcess | Container


@dataclass(frozen=True, slots=True)
class Launcher:
    """The process of a launch.

    say: prints a line of the launcher's own.
    pause: sleeps for so many seconds; raises Interrupted if a signal has come.
    """

    backend: Backend
    view: LogView
    say: Callable[[str], None]
    pause: Callable[[float], None] = time.sleep


def ended_early(worker: str, status: int, work: Path) -> str:
    """The message for a worker that ended too early, whether or not it had joined.

    The message names the log, which --quiet does not show.

    work: the folder of the launch.
    """
    log = work / "logs" / f"{worker}.log"
    return f"{worker} ended with status {status} before all workers had joined; its log is {log}"


class Launch(ABC):
    """The programs of a launch, from the first start until stop()."""

    def __init__(self, launcher: Launcher) -> None:
        self._backend = launcher.backend
        self._view = launcher.view
        self._say = launcher.say
        self._pause = launcher.pause
        self._lock: int | None = None  # of the work folder
        # Programs by name, in groups; the last group is stopped first.
        self._groups: list[dict[str, Running]] = []
        self._num_restarts: Counter[str] = Counter()
        self._told: set[str] = set()  # workers whose end was reported

    @abstractmethod
    def follow(self) -> int:
        """Start the programs, wait for the end of the training, and print the result. Returns the
        exit status.

        Raises CommandFailed if the training cannot come to its end.
        """

    def _new_group(self) -> dict[str, Running]:
        group: dict[str, Running] = {}
        self._groups.append(group)
        return group

    def _prepare(self, work: Path) -> None:
        """Take the work folder. Raises CommandFailed."""
        try:
            (work / "logs").mkdir(parents=True, exist_ok=True)
            self._lock = hold(work)
        except BlockingIOError:
            raise CommandFailed(
                f"a launch is running in {work}; end it with Ctrl-C there, or give this one "
                "another --name"
            ) from None
        except OSError as error:
            raise CommandFailed(f"cannot use the folder {work}: {error.strerror}") from None
        self._backend.prepare(work)

    @abstractmethod
    def _look(self) -> object:
        """Wait for a moment, show new lines of the logs, and start killed programs again."""

    def _until(self, missing: Callable[[], Collection[str]]) -> None:
        """Wait until `missing` lists nothing. Raises CommandFailed after START_TIMEOUT_S."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while names := missing():
            if time.monotonic() > deadline:
                listed = ", ".join(sorted(names))
                raise CommandFailed(f"after {START_TIMEOUT_S:g} s still not there: {listed}")
            self._look()

    def _start(self, group: dict[str, Running], program: Program) -> Running:
        """Start a program; it replaces an earlier process of its name."""
        group[program.name] = self._backend.start(program)
        return group[program.name]

    def _show(self) -> None:
        for group in reversed(self._groups):
            for one in group.values():
                self._show_lines(one)

    def _show_lines(self, one: Running) -> None:
        self._view.show(one.name, one.new_lines())

    def _revive(
        self, group: dict[str, Running], name: str, start: Callable[[], None]
    ) -> int | None:
        """Start a program again if it was killed, but not too often. Returns None if it runs,
        otherwise its exit status."""
        status = group[name].status()
        if status != KILLED or self._num_restarts[name] == MAX_RESTARTS:
            return status
        self._num_restarts[name] += 1
        self._say(f"{_called(name)} was killed; it is started again")
        group[name].remove(0)
        self._show_lines(group[name])
        start()
        return None

    def _keep_running(
        self, group: dict[str, Running], name: str, start: Callable[[], None]
    ) -> None:
        status = self._revive(group, name, start)
        if status is not None:
            raise CommandFailed(f"{_called(name)} ended with status {status}")

    def stop(self) -> None:
        """Stop and remove all programs, the last group first."""
        for group in reversed(self._groups):
            for one in group.values():
                one.terminate()
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for one in group.values():
                one.remove(max(0.1, deadline - time.monotonic()))
                self._show_lines(one)
        self._backend.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _called(name: str) -> str:
    """A program in words."""
    return f"the {name}" if name in (COORDINATOR, SCHEDULER) else name


def how_it_ended(status: int, killed: str) -> str:
    """The end of a program with this status, in words. killed: how a kill is told."""
    if status == EXIT_NO_BETTER:
        return f"has trained a model that is no better than the baseline (status {status})"
    if status == EXIT_NOTHING_COUNTED:
        return f"has trained nothing that counted (status {status})"
    return killed if status == KILLED else f"ended with status {status}"


def have_ended(group: dict[str, Running]) -> bool:
    return all(one.status() is not None for one in group.values())
