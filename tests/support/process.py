"""A coordinator in a process of its own, to be killed."""

import asyncio
import json
import signal
import sys
from pathlib import Path

DYING = Path(__file__).with_name("dying.py")


class CoordinatorProcess:
    """settings: dotted keys, given as --set. The port stays the same over restarts.

    dies_at: the sync to disk at which it kills itself; None if it lives.
    """

    dies_at: int | None = None

    def __init__(self, folder: Path, settings: dict[str, object], port: int = 0) -> None:
        self.folder = folder
        self.port = port
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._log_path = folder / "coordinator.log"
        folder.mkdir(exist_ok=True)

    def log(self) -> str:
        return self._log_path.read_text()

    async def spawn(self, *extra: str) -> asyncio.subprocess.Process:
        program = ["-m", "xain_coordinator"]
        if self.dies_at is not None:
            program = [str(DYING), str(self.dies_at)]
        flags = [f"--set={key}={value}" for key, value in self._settings.items()]
        with self._log_path.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *program,
                f"--data-dir={self.folder}",
                f"--port={self.port}",
                *flags,
                *extra,
                stderr=log,
            )

    async def start(self, *extra: str) -> None:
        """Returns when it serves."""
        seen = self._log_path.stat().st_size if self._log_path.exists() else 0
        self._process = await self.spawn(*extra)
        while True:
            with self._log_path.open("rb") as log:
                log.seek(seen)
                lines = log.read().decode().splitlines(keepends=True)
            for line in lines:
                if '"serving"' in line and line.endswith("\n"):
                    self.port = int(json.loads(line)["address"].rpartition(":")[2])
                    return
            if self._process.returncode is not None:
                raise AssertionError(f"the coordinator did not start:\n{self.log()}")
            await asyncio.sleep(0.02)  # a poll, not a race: it ends when the line is there

    async def fails(self, *extra: str) -> int:
        """Start it where it cannot; returns the exit status."""
        process = await self.spawn(*extra)
        return await asyncio.wait_for(process.wait(), 30)

    async def died(self) -> int:
        """Wait until it has; returns the exit status, negative for the signal."""
        assert self._process is not None
        return await self._process.wait()

    async def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop; returns the exit status."""
        assert self._process is not None
        self._process.send_signal(number)
        return await asyncio.wait_for(self._process.wait(), 30)

    async def end(self) -> None:
        """Whatever its state, it is gone afterwards."""
        if self._process is not None and self._process.returncode is None:
            await self.kill()
