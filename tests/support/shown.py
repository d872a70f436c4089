"""A program whose output is read while it runs."""

import asyncio
from collections.abc import Callable


class Shown:
    """A running program and what it has printed so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.output = ""

    async def until(self, found: Callable[[str], object]) -> None:
        """Read until the output satisfies `found`."""
        while not found(self.output):
            line = await self.process.stdout.readline()
            assert line, f"the program ended early:\n{self.output}"
            self.output += line.decode()

    async def end(self) -> int:
        """Read to the end; returns the exit status."""
        self.output += (await self.process.stdout.read()).decode()
        return await self.process.wait()
