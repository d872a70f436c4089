"""The demo's processes: one coordinator, started again if it dies, and its participants."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xain_coordinator.cli.demo.interrupts import Interrupts

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
MAX_STARTS = 5  # in a row, of a coordinator that is killed while it starts
LOG_LINES = 3  # of a log, quoted where it says why something failed

# The children's settings are in their files and flags; over files, the environment would prevail.
SETTINGS_IN_ENVIRONMENT = ("XAIN_COORDINATOR_", "XAIN_PARTICIPANT_")


class FleetError(Exception):
    """A process of the demo did not do its part. The message quotes the end of its log, which may
    be gone when it is read."""


@dataclass(slots=True)
class Process:
    """A child process with a log of its own."""

    name: str
    log_path: Path
    popen: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def status(self) -> int | None:
        """Exit status; negative for the signal that killed it; None while it runs."""
        return self.popen.poll()

    @property
    def status_text(self) -> str:
        """Status of the process, as the end of a sentence that begins with its name."""
        status = self.status
        if status is None:
            return "is running"
        if status < 0:
            return f"was killed ({signal.Signals(-status).name})"
        if status == 128 + signal.SIGTERM:
            return "was stopped"
        return "is done" if status == 0 else f"failed with status {status}"

    @property
    def has_failed(self) -> bool:
        """Whether the process ended with another status than 0."""
        return self.status not in (None, 0)

    def end_of_log(self) -> str:
        """Last lines of the log, to be put after a sentence that says what happened."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()][-LOG_LINES:]
        return "".join(f"\n  {line}" for line in lines) or " Its log is empty."


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
        self.port = 0
        self.restarts = 0
        self._started: list[Process] = []
        self.coordinator: Process | None = None
        self.participants: dict[str, Process] = {}

    def start(self) -> None:
        """Start all processes. Returns when the coordinator serves. Raises FleetError."""
        for name in ("coordinator", *self._configs):
            self._log_path(name).unlink(missing_ok=True)
        self._start_coordinator("--new-session")
        for name, sections in self._configs.items():
            config = self.config_path(name)
            sections = {**sections, "coordinator": {"host": "127.0.0.1", "port": self.port}}
            config.write_text(_toml(sections), encoding="utf-8")
            self.participants[name] = self._spawn(
                name, ["-m", "xain_participant", "--config", str(config)]
            )

    def config_path(self, name: str) -> Path:
        """The settings of a participant."""
        return self._folder / f"{name}.toml"

    def _log_path(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _start_coordinator(self, *extra: str) -> None:
        # On the same port and journal each time: that is all a restart takes.
        flags = [f"--data-dir={self._folder}", f"--port={self.port}"]
        flags += [f"--set={key}={value}" for key, value in self._settings.items()]
        flags += extra
        for attempt in range(1, MAX_STARTS + 1):
            self.coordinator = self._spawn("coordinator", ["-m", "xain_coordinator", *flags])
            try:
                self.port = self._wait_until_serving(self.coordinator)
                return
            except FleetError:
                status = self.coordinator.status
                if status is None or status >= 0 or attempt == MAX_STARTS:
                    raise
                self.restarts += 1  # killed before it served

    def _spawn(self, name: str, arguments: Sequence[str]) -> Process:
        log_path = self._log_path(name)
        with log_path.open("ab") as log, self._interrupts.held():
            popen = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                # Ctrl-C is for the demo, which then stops the others in order.
                start_new_session=os.name == "posix",
            )
            process = Process(name, log_path, popen)
            self._started.append(process)
        return process

    def _wait_until_serving(self, coordinator: Process) -> int:
        """Port of the coordinator, from its log, once it serves."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            for entry in reversed(_entries(coordinator.log_path)):
                if entry.get("event") == "serving" and entry.get("pid", 0) == coordinator.pid:
                    return int(str(entry["address"]).rpartition(":")[2])
            if coordinator.status is not None:
                break
            time.sleep(0.02)  # polls a file; nothing else tells when the line is there
        raise FleetError(
            f"The coordinator did not start. Its log ends with:{coordinator.end_of_log()}"
        )

    def revive(self) -> bool:
        """Start the coordinator again if it has died. Raises FleetError if it gave up by itself."""
        assert self.coordinator is not None
        status = self.coordinator.status
        if status is None:
            return False
        if status >= 0:
            raise FleetError(
                f"The coordinator has ended. Its log ends with:{self.coordinator.end_of_log()}"
            )
        self.restarts += 1
        self._start_coordinator()
        return True

    def wait_for_participants(self) -> None:
        """Wait until the participants have ended by themselves after the session's end."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self.participants.values():
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def stop(self) -> None:
        """Stop all processes, participants first; kill those that do not stop in time."""
        processes = sorted(self._started, key=lambda process: process.name == "coordinator")
        for process in processes:
            if process.status is None:
                process.popen.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in processes:
            try:
                process.popen.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(SETTINGS_IN_ENVIRONMENT)
    }


def _entries(log: Path) -> list[dict[str, object]]:
    """The entries of a JSON log; other lines and an unfinished last line are skipped."""
    found = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        if line.endswith("\n") and line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def _toml(sections: Mapping[str, Mapping[str, object]]) -> str:
    """Sections of strings and numbers; JSON's notation of those is TOML's too."""
    lines: list[str] = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(v)}" for key, v in values.items()), ""]
    return "\n".join(lines)
