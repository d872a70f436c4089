"""The supervisor of a launch: starts its programs, watches them, starts dead ones again, and stops
all of them. What the programs are, and when their training is over, rounds.py and sparse.py say."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from xain_coordinator.cli.launch.actors import ActorBackend
from xain_coordinator.cli.launch.containers import DockerBackend
from xain_coordinator.cli.launch.logs import LogView
from xain_coordinator.cli.launch.plan import (
    JOIN_TIMEOUT_S,
    KILLED,
    SCHEDULER,
    STOP_TIMEOUT_S,
    Program,
    Running,
)
from xain_coordinator.cli.launch.processes import ProcessBackend
from xain_coordinator.cli.launch.work_folder import hold
from xain_coordinator.config.sections.launch import COORDINATOR
from xain_foundation.exit_statuses import (
    EXIT_NO_BETTER,
    EXIT_NOTHING_COUNTED,
    EXIT_ROWS_MISSED,
    CommandFailed,
)
from xain_foundation.net.backoff import Backoff
from xain_foundation.security.identity import Role

if TYPE_CHECKING:
    from xain_coordinator.cli.launch.certificates import LaunchCertificates

POLL_S = 0.1
# The first death of a program is answered at once, further ones after these waits.
FIRST_RESTART_S, LAST_RESTART_S = 1.0, 30.0
STEADY_S = 600.0  # a program that has run for so long is counted and waited for anew
# Statuses of programs that somebody has told to stop: they stay away.
TOLD_TO_STOP = (128 + signal.SIGTERM, 128 + signal.SIGINT)

Backend = ProcessBackend | DockerBackend | ActorBackend


class Rank(IntEnum):
    """The order in which programs are stopped: tools first, servers last."""

    SERVER = 0  # of parameters; the scheduler would report one that stops before it as dead
    HEAD = 1  # coordinator or scheduler
    WORKER = 2
    TOOL = 3


@dataclass(frozen=True, slots=True)
class Launcher:
    """The process of a launch.

    say: prints a line of the launcher's own.
    pause: sleeps for so many seconds; raises KeyboardInterrupt if a signal has come.
    clock: seconds that only go forward.
    max_restarts: how often each program is started again within STEADY_S.
    """

    backend: Backend
    view: LogView
    say: Callable[[str], None]
    pause: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    max_restarts: int = 5


class Launch(Protocol):
    """A supervisor's programs, and their course."""

    def follow(self) -> int:
        """Start the programs, wait for the end of the training, and print the result. Returns the
        exit status. Raises CommandFailed if the training cannot come to its end."""

    def stop(self) -> None:
        """Stop and remove all programs."""


@dataclass(slots=True)
class _Watched:
    """A program that is supervised.

    make: the command to start.
    restarts_s: the waits before further restarts.
    due_at: when it is started again; None while it runs or has ended for good.
    status: its exit status, once it has ended for good.
    """

    make: Callable[[], Program]
    rank: Rank
    max_restarts: int
    running: Running
    began_at: float
    restarts_s: Backoff = field(default_factory=lambda: Backoff(FIRST_RESTART_S, LAST_RESTART_S))
    num_deaths: int = 0
    due_at: float | None = None
    status: int | None = None


class Supervisor:
    """The programs of a launch by name, from the first start until stop().

    A program that a signal has ended is started again, as the same participant or server, unless
    the signal told it to stop. The first time at once, then after growing waits, and up to
    Launcher.max_restarts times. After the end of a program of rank SERVER or HEAD the launch cannot
    go on.
    """

    def __init__(self, launcher: Launcher, work: Path) -> None:
        """work: the folder of the launch."""
        self.backend = launcher.backend
        self.say = launcher.say
        self.pause = launcher.pause
        self.work = work
        self.is_ready = False  # all programs have come
        self.deaths: Counter[str] = Counter()  # by program: those that were answered by a restart
        # Told the new lines of each program's log.
        self.on_lines: Callable[[str, Sequence[str]], None] = lambda name, lines: None
        self._view = launcher.view
        self._clock = launcher.clock
        self._max_restarts = launcher.max_restarts
        self._programs: dict[str, _Watched] = {}
        self._lock: int | None = None  # of the work folder
        self._certificates: LaunchCertificates | None = None

    def prepare(self) -> None:
        """Lock the work folder, and look for what the programs need. Raises CommandFailed."""
        work = self.work
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
        self.backend.prepare(work)

    # --- certificates ---

    def close_to_others(self) -> Path:
        """Give each program a certificate from now on. Returns the folder of the launcher's own."""
        # Imported where it is used: it takes 50 ms.
        from xain_coordinator.cli.launch.certificates import CERTIFICATES, NAME, LaunchCertificates

        self._certificates = LaunchCertificates(self.work / CERTIFICATES)
        return self._certificates.issue(NAME, Role.OPERATOR)

    def certificate(self, name: str, role: Role, *hosts: str) -> str | None:
        """The folder of a program's certificate, which is issued at the first call; None if
        programs have none. hosts: that others reach it by."""
        if self._certificates is None:
            return None
        return str(self._certificates.issue(name, role, *hosts).absolute())

    # --- programs ---

    def _begin(self, program: Program) -> Running:
        """Start a program, and make the folder of its own first."""
        if program.folder is not None:  # an engine makes no folders that it mounts
            (self.work / program.folder).mkdir(parents=True, exist_ok=True)
        return self.backend.start(program)

    def start(
        self,
        make: Callable[[], Program],
        rank: Rank,
        *,
        max_restarts: int | None = None,
    ) -> None:
        """Start a program and supervise it; an earlier one of its name must have ended.

        make: the program, at the first start and after each death.
        max_restarts: by default Launcher.max_restarts.
        """
        program = make()
        if (before := self._programs.get(program.name)) is not None:
            before.running.remove(0)
            self._show_lines(before.running)
        self._programs[program.name] = _Watched(
            make,
            rank,
            self._max_restarts if max_restarts is None else max_restarts,
            self._begin(program),
            self._clock(),
        )

    def run(self, program: Program) -> list[str]:
        """Run a tool to its end and show its log. Returns its output. Raises CommandFailed if it
        fails."""
        self.start(lambda: program, Rank.TOOL, max_restarts=0)
        one = self._programs[program.name].running
        lines = []
        while (status := one.status()) is None:
            lines += self._show_lines(one)
            self.pause(POLL_S)  # between two looks
        one.remove(0)
        lines += self._show_lines(one)
        if status:
            raise CommandFailed(f"{program.name} ended with status {status}")
        return lines

    def running(self, rank: Rank) -> dict[str, Running]:
        """The latest process or container of each program of a rank, dead or alive."""
        return {name: one.running for name, one in self._of(rank).items()}

    def end_statuses(self, rank: Rank) -> dict[str, int]:
        """Exit statuses of the programs of a rank that have ended for good."""
        found = {name: one.status for name, one in self._of(rank).items()}
        return {name: status for name, status in found.items() if status is not None}

    def have_ended(self, rank: Rank) -> bool:
        """Whether all programs of a rank have ended for good."""
        return len(self.end_statuses(rank)) == len(self._of(rank))

    @property
    def awaiting_restart(self) -> list[str]:
        """Dead programs that are about to be started again."""
        return [name for name, one in self._programs.items() if one.due_at is not None]

    def _of(self, rank: Rank) -> dict[str, _Watched]:
        """The programs of a rank by name."""
        return {name: one for name, one in self._programs.items() if one.rank is rank}

    # --- looking after them ---

    def look(self) -> None:
        """Wait for a moment, show new lines of the logs, note the ends of programs, and start dead
        ones again. Raises CommandFailed at the end of one that the launch cannot go on without."""
        self.pause(POLL_S)  # between two looks
        self.show()
        for name, one in self._programs.items():
            if one.status is None and one.rank is not Rank.TOOL:
                self._look_after(name, one)

    def until(self, missing: Callable[[], Collection[str]]) -> None:
        """Look after the programs until `missing` lists nothing. Raises CommandFailed after
        JOIN_TIMEOUT_S."""
        deadline = self._clock() + JOIN_TIMEOUT_S
        while names := missing():
            if self._clock() > deadline:
                listed = ", ".join(sorted(names))
                raise CommandFailed(f"after {JOIN_TIMEOUT_S:g} s still not there: {listed}")
            self.look()

    def _look_after(self, name: str, one: _Watched) -> None:
        """Note the end of a program, and start it again: at once after the first death, later after
        further ones. Raises CommandFailed if the launch needs it, and it is not started again."""
        now = self._clock()
        if one.due_at is not None:
            if now >= one.due_at:
                one.due_at = None
                one.running.remove(0)
                self._show_lines(one.running)
                one.running, one.began_at = self._begin(one.make()), now
            return
        status = one.running.status()
        if status is None:
            return
        if now - one.began_at >= STEADY_S:
            one.num_deaths = 0
            one.restarts_s.reset()
        if not _is_death(status) or one.num_deaths >= one.max_restarts:
            one.status = status
            self._tell_end(name, one)
            return
        wait_s = one.restarts_s.next_s() if one.num_deaths else 0.0
        one.num_deaths += 1
        self.deaths[name] += 1
        one.due_at = now + wait_s
        how = how_it_ended(status, one.num_deaths)
        when = f" in {wait_s:g} s" if wait_s else ""
        self.say(f"{_called(name)} {how}; it is started again{when}")
        if not wait_s:
            self._look_after(name, one)

    def _tell_end(self, name: str, one: _Watched) -> None:
        """Print that a program has ended for good. Raises CommandFailed if the launch cannot go on
        without it."""
        assert one.status is not None
        how = how_it_ended(one.status, one.num_deaths + 1)
        if one.rank in (Rank.SERVER, Rank.HEAD):
            raise CommandFailed(f"{_called(name)} {how}")
        if one.status:
            go_on = self.is_ready and not self.have_ended(one.rank)
            others = "; the others go on" if go_on else ""
            self.say(f"{name} {how}{others}")

    def show(self) -> None:
        """Show new lines of the logs."""
        for one in sorted(self._programs.values(), key=lambda one: one.rank, reverse=True):
            self._show_lines(one.running)

    def _show_lines(self, one: Running) -> list[str]:
        """Show new lines of a program's log. Returns them."""
        lines = one.new_lines()
        self._view.show(one.name, lines)
        self.on_lines(one.name, lines)
        return lines

    def stop(self) -> None:
        """Stop and remove all programs, the workers first; close the backend and unlock the
        folder."""
        for rank in sorted(Rank, reverse=True):
            group = self.running(rank).values()
            for one in group:
                one.terminate()
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for one in group:
                one.remove(max(0.1, deadline - time.monotonic()))
                self._show_lines(one)
        self.backend.close()
        if self._certificates is not None:
            self._certificates.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _called(name: str) -> str:
    """A program's name in a sentence, such as "the coordinator"."""
    return f"the {name}" if name in (COORDINATOR, SCHEDULER) else name


def _is_death(status: int) -> bool:
    """Whether a signal has ended the program that did not tell it to stop."""
    return status > 128 and status not in TOLD_TO_STOP


def how_it_ended(status: int, num_deaths: int = 1) -> str:
    """The end of a program with this status, in words. num_deaths: how often it died."""
    if status == EXIT_NO_BETTER:
        return f"has trained a model that is no better than the baseline (status {status})"
    if status == EXIT_NOTHING_COUNTED:
        return f"has trained nothing that counted (status {status})"
    if status == EXIT_ROWS_MISSED:
        return f"says that rows were read twice or not at all (status {status})"
    times = f" {num_deaths} times" if num_deaths > 1 and _is_death(status) else ""
    return f"was killed{times}" if status == KILLED else f"ended with status {status}{times}"


def ended_early(worker: str, status: int, work: Path) -> str:
    """The message for a worker that ended too early, whether or not it had joined.

    The message names the log, which --quiet does not show.

    work: the folder of the launch.
    """
    log = work / "logs" / f"{worker}.log"
    return f"{worker} ended with status {status} before all workers had joined; its log is {log}"
