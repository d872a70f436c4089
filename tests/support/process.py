"""A coordinator and participants in processes of their own, to be killed."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from support.waiting import until
from xain_foundation.net.sockets import free_ports

DYING = Path(__file__).with_name("dying.py")
TRAINEE = Path(__file__).with_name("trainee.py")
PATIENCE_S = 240.0  # for what takes seconds, on a machine that has other things to do
Keep = Callable[[Any], Any]  # the fixture `keep`, which takes processes
DeathStep = Literal[
    "sync",
    "before-commit",
    "after-commit",
    "after-opening",
    "audit-before",
    "audit-torn",
    "audit-unsynced",
    "audit-after",
]


@contextlib.asynccontextmanager
async def ended(*processes: Any) -> AsyncIterator[None]:
    """End these processes in the end, in any state."""
    try:
        yield
    finally:
        for process in processes:
            await process.end()


def ran(*words: object, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A program of Python, which has ended. variables: of its environment, beside ours."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


class Lines:
    """The lines that a file gets from now on, each when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = path.stat().st_size if path.exists() else 0

    def new(self) -> list[str]:
        """The lines since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._seen)
            whole = file.read().rpartition(b"\n")[0]
        lines = whole.decode().splitlines()
        self._seen += len(whole) + 1 if whole else 0
        return lines


class Process:
    """A process that writes a log, and may be started again after its end."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.log_path = folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        folder.mkdir(exist_ok=True)

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Lines of the log about these events, by default about all."""
        ours = [line for line in self.log().splitlines() if line[:1] + line[-1:] == "{}"]
        return [line for line in map(json.loads, ours) if not names or line["event"] in names]

    async def until_logged(self, text: str) -> None:
        await until(lambda: text in self.log())

    @property
    def status(self) -> int | None:
        """Exit status, negative for the signal; None while it runs."""
        return self._process.returncode

    @property
    def pid(self) -> int:
        """Process id, of the last one if it was started again."""
        return self._process.pid

    async def run(self, command: Sequence[str]) -> asyncio.subprocess.Process:
        with self.log_path.open("ab") as log:
            return await asyncio.create_subprocess_exec(sys.executable, *command, stderr=log)

    async def died(self) -> int:
        """Wait until it has; returns the exit status, negative for the signal."""
        return await asyncio.wait_for(self._process.wait(), PATIENCE_S)

    def peak_mib(self) -> int:
        """The most memory that the process ever had, in MiB. On Linux only."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) >> 10

    async def kill(self) -> None:
        """kill -9. Harmless if it has ended by itself meanwhile."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop; returns the exit status."""
        self.send(number)
        return await asyncio.wait_for(self._process.wait(), PATIENCE_S)

    async def end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.kill()


class CoordinatorProcess(Process):
    """A coordinator in a process of its own, on a port that stays the same over restarts.

    settings: dotted keys, given as --set. port: 0 chooses one that outgoing connections do not take
    while the coordinator is down.

    dies_at: the step at which it kills itself; None if it lives. dies_of: of which kind; see dying.
    """

    dies_at: int | None = None
    dies_of: DeathStep = "sync"

    def __init__(self, folder: Path, settings: dict[str, object], port: int = 0) -> None:
        super().__init__(folder, "coordinator")
        self.port = port or free_ports(1)[0]
        self._settings = settings
        if "workload.name" not in settings:
            # All participants make initial weights, unless the test wants another way.
            self._settings = {"rounds.initial_weights": "average", **settings}

    async def spawn(self, *extra: str) -> asyncio.subprocess.Process:
        program = ["-m", "xain_coordinator"]
        if self.dies_at is not None:
            program = [str(DYING), self.dies_of, str(self.dies_at)]
        flags = [f"--set={key}={value}" for key, value in self._settings.items()]
        return await self.run(
            [*program, f"--data-dir={self.folder}", f"--port={self.port}", *flags, *extra]
        )

    async def run_command(self, name: str, *extra: str) -> int:
        """Run a command on its data while it is stopped; returns the exit status."""
        flags = [f"--set={key}={value}" for key, value in self._settings.items()]
        program = ["-m", "xain_coordinator", name, f"--data-dir={self.folder}"]
        process = await self.run([*program, *flags, *extra])
        return await asyncio.wait_for(process.wait(), PATIENCE_S)

    async def told(self, *words: str) -> str:
        """Run a command about this coordinator, which may be running. Returns what it prints."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "xain_coordinator", *words, f"--data-dir={self.folder}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        assert process.returncode == 0, errors.decode()
        return output.decode()

    async def begin(self, *extra: str) -> None:
        """Start it. Does not wait for anything."""
        self._process = await self.spawn(*extra)

    async def start(self, *extra: str) -> None:
        """Returns when it serves."""
        lines = Lines(self.log_path)
        await self.begin(*extra)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                has_ended = self.status is not None
                for line in lines.new():
                    if '"coordinator_serving"' in line:
                        self.port = int(json.loads(line)["address"].rpartition(":")[2])
                        return
                if has_ended:
                    raise AssertionError(f"the coordinator did not start:\n{self.log()}")
                await asyncio.sleep(0.02)  # a poll, not a race: it ends when the line is there

    async def fails(self, *extra: str) -> int:
        """Start it where it cannot; returns the exit status."""
        process = await self.spawn(*extra)
        return await asyncio.wait_for(process.wait(), PATIENCE_S)


class SiteProcess(Process):
    """The command xain-participant, whose id is the name of its log."""

    async def start(self, port: int, *flags: str) -> None:
        """Does not wait for anything. port: of the coordinator on this machine."""
        command = ["-m", "xain_participant", f"--coordinator=127.0.0.1:{port}"]
        self._process = await self.run([*command, f"--id={self.log_path.stem}", *flags])


class ParticipantProcess(Process):
    """A Trainee, see there. flags: its own. The participant keeps its id over restarts."""

    def __init__(self, folder: Path, participant_id: str, target: str, *flags: str) -> None:
        super().__init__(folder, participant_id)
        self.participant_id = participant_id
        self.book_path = folder / f"{participant_id}.book"
        self._target = target
        self._flags = flags

    async def start(self) -> None:
        """Does not wait for anything."""
        book = str(self.book_path)
        command = [str(TRAINEE), self._target, self.participant_id, book, *self._flags]
        self._process = await self.run(command)

    def book(self) -> list[tuple[str, int]]:
        """The participant's work in order, as (what, round)."""
        if not self.book_path.exists():
            return []
        lines = (line.split() for line in self.book_path.read_text().splitlines())
        return [(what, int(round_)) for what, round_ in lines]
