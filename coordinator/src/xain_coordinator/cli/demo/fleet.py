"""The demo's processes: one coordinator, started again if it dies, and its participants."""

import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from xain_coordinator.cli.demo.interrupts import EXIT_BASE, Interrupts
from xain_coordinator.cli.launch.plan import PARTICIPATE, Program, assignments
from xain_coordinator.cli.launch.processes import LocalProcess, ProcessBackend
from xain_coordinator.config.launch import COORDINATOR

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.02  # no event tells of a line in a log
MAX_STARTS = 5  # in a row, of a coordinator that is killed while it starts
LOG_LINES = 3  # of a log, quoted where it says why something failed


class FleetError(Exception):
    """A process of the demo did not do its part. The message quotes the end of its log, which may
    be gone when it is read."""


class Fleet:
    """Processes below one folder.

    settings: of the coordinator, by dotted key.
    participants: settings of each participant, by id; written to `folder`/{id}.toml, so that one
        can be started again by hand.
    What an earlier fleet left in the folder is not gone on with.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, object],
        participants: Mapping[str, Mapping[str, Mapping[str, object]]],
        interrupts: Interrupts,
    ) -> None:
        self._interrupts = interrupts
        self._folder = folder.absolute()
        self._settings = settings
        self._configs = participants
        self._backend = ProcessBackend("xain-demo", "127.0.0.1")
        self.port = 0
        self.restarts = 0
        self.coordinator: LocalProcess | None = None
        self.participants: dict[str, LocalProcess] = {}

    def start(self) -> None:
        """Start all processes. Returns when the coordinator serves. Raises FleetError."""
        self._backend.prepare(self._folder)
        for name in (COORDINATOR, *self._configs):
            self._log_path(name).unlink(missing_ok=True)
        self._start_coordinator("--new-session")
        for name, sections in self._configs.items():
            config = self.config_path(name)
            sections = {**sections, "coordinator": {"host": "127.0.0.1", "port": self.port}}
            config.write_text(_toml(sections), encoding="utf-8")
            program = Program(name, [f"--config={config}"], command=PARTICIPATE)
            with self._interrupts.held():
                self.participants[name] = self._backend.start(program)

    def config_path(self, name: str) -> Path:
        """The settings of a participant."""
        return self._folder / f"{name}.toml"

    def _log_path(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"

    def end_of_log(self, name: str) -> str:
        """Last lines of a log, to be put after a sentence that says what happened."""
        text = self._log_path(name).read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()][-LOG_LINES:]
        return "".join(f"\n  {line}" for line in lines) or " Its log is empty."

    def _start_coordinator(self, *extra: str) -> None:
        # On the same port and journal each time: that is all a restart takes.
        flags = [f"--data-dir={self._folder}", f"--port={self.port}"]
        program = Program(COORDINATOR, [*flags, *assignments(self._settings), *extra])
        for attempt in range(1, MAX_STARTS + 1):
            with self._interrupts.held():
                self.coordinator = self._backend.start(program)
            try:
                self.port = self._wait_until_serving(self.coordinator)
                return
            except FleetError:
                if not was_killed(self.coordinator.status()) or attempt == MAX_STARTS:
                    raise
                self.restarts += 1  # killed before it served

    def _wait_until_serving(self, coordinator: LocalProcess) -> int:
        """Port of the coordinator, from its log, once it serves."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            has_ended = coordinator.status() is not None
            for line in coordinator.new_lines():
                if '"event": "serving"' in line:
                    return int(str(json.loads(line)["address"]).rpartition(":")[2])
            if has_ended:
                break
            time.sleep(POLL_S)
        raise FleetError(
            f"The coordinator did not start. Its log ends with:{self.end_of_log(COORDINATOR)}"
        )

    def revive(self) -> bool:
        """Start the coordinator again if it has died. Raises FleetError if it gave up by itself."""
        assert self.coordinator is not None
        status = self.coordinator.status()
        if status is None:
            return False
        if not was_killed(status):
            raise FleetError(
                f"The coordinator has ended. Its log ends with:{self.end_of_log(COORDINATOR)}"
            )
        self.restarts += 1
        self._start_coordinator()
        return True

    def wait_for_participants(self) -> None:
        """Wait until the participants have ended by themselves after the session's end."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            if all(one.status() is not None for one in self.participants.values()):
                return
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Stop all processes, participants first; kill those that do not stop in time."""
        processes = [*self.participants.values()]
        processes += [] if self.coordinator is None else [self.coordinator]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in processes:
            process.remove(max(0.1, deadline - time.monotonic()))


def was_killed(status: int | None) -> bool:
    """Whether a process was ended by a signal that no handler turns into an exit status."""
    signals = {EXIT_BASE + each for each in signal.Signals if each != signal.SIGTERM}
    return status is not None and status in signals


def status_text(status: int | None) -> str:
    """Status of a process, as the end of a sentence that begins with its name."""
    if status is None:
        return "is running"
    if status == EXIT_BASE + signal.SIGTERM:
        return "was stopped"
    if was_killed(status):
        return f"was killed ({signal.Signals(status - EXIT_BASE).name})"
    return "is done" if status == 0 else f"failed with status {status}"


def _toml(sections: Mapping[str, Mapping[str, object]]) -> str:
    """Sections of strings and numbers; JSON's notation of those is TOML's too."""
    lines: list[str] = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(v)}" for key, v in values.items()), ""]
    return "\n".join(lines)
