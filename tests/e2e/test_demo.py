"""The demo as a newcomer runs it, and with something killed."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


class Demo:
    """A running demo and what it has printed so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.output = ""

    async def until(self, found: Callable[[str], object]) -> None:
        """Read until the output satisfies `found`."""
        while not found(self.output):
            line = await self.process.stdout.readline()
            assert line, f"the demo ended early:\n{self.output}"
            self.output += line.decode()

    async def end(self) -> int:
        """Read to the end; returns the exit status."""
        self.output += (await self.process.stdout.read()).decode()
        return await self.process.wait()

    def pid(self, name: str) -> int:
        pattern = r"Coordinator: pid (\d+)" if name == "coordinator" else rf"{name}\D+(\d+)"
        return int(re.search(pattern, self.output)[1])

    def rounds(self) -> int:
        return len(re.findall(r"^round \d+ of", self.output, re.MULTILINE))


@asynccontextmanager
async def demo(folder: Path, *arguments: str) -> AsyncIterator[Demo]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "xain_coordinator", "demo", "--keep", str(folder), *arguments),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Demo(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await process.wait()


async def test_the_demo_reaches_the_centralised_accuracy(tmp_path):
    """Digits split by label over four processes: within two points of all data in one place."""
    async with demo(tmp_path) as shown:
        assert await shown.end() == 0, shown.output
    assert shown.rounds() == 20
    federated, centralised = map(float, re.findall(r"(\d+\.\d)%\s*│\n", shown.output)[-2:])
    assert centralised > 90
    assert federated >= centralised - 2.0


async def test_the_demo_survives_what_is_killed(tmp_path):
    """kill -9 of a participant does not stop the session, and with its id it joins again; kill -9
    of the coordinator neither: it goes on with the same round."""
    async with demo(tmp_path, "--rounds", "100000") as shown, AsyncExitStack() as stack:
        await shown.until(lambda _: shown.rounds() >= 2)
        os.kill(shown.pid("site-1"), signal.SIGKILL)
        await shown.until(lambda output: "site-1 was killed (SIGKILL)" in output)
        await shown.until(lambda output: re.search(r"of 100000: 3 updates", output))

        again = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "xain_participant", "--config", str(tmp_path / "site-1.toml")),
            stderr=asyncio.subprocess.DEVNULL,
        )
        stack.push_async_callback(end, again)
        seen = len(shown.output)
        await shown.until(lambda output: re.search(r"of 100000: 4 updates", output[seen:]))

        os.kill(shown.pid("coordinator"), signal.SIGKILL)
        await shown.until(lambda output: "The coordinator was killed" in output)
        before = shown.rounds()
        await shown.until(lambda _: shown.rounds() > before + 2)
    numbers = [int(n) for n in re.findall(r"^round (\d+) of", shown.output, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))  # none is missing, none is done twice


async def test_the_demo_survives_a_kill_at_its_very_end(tmp_path):
    """kill -9 of the coordinator while it does its last round or has done it: the last answers come
    from the one that is started in its place."""
    async with demo(tmp_path, "--rounds", "2", "--participants", "2") as shown:
        await shown.until(lambda _: shown.rounds() == 1)
        os.kill(shown.pid("coordinator"), signal.SIGKILL)
        assert await shown.end() == 0, shown.output
    assert "The coordinator was killed" in shown.output
    assert "Test accuracy" in shown.output


async def end(process: asyncio.subprocess.Process) -> None:
    """Whatever its state, it is gone afterwards."""
    if process.returncode is None:
        process.kill()
    await process.wait()


async def test_ctrl_c_stops_the_demo_and_all_it_started(tmp_path):
    """SIGINT ends the demo with 130, and none of its processes stays behind."""
    async with demo(tmp_path, "--rounds", "100000") as shown:
        await shown.until(lambda _: shown.rounds() >= 1)
        pids = [shown.pid(name) for name in ("coordinator", "site-0", "site-3")]
        shown.process.send_signal(signal.SIGINT)
        assert await shown.end() == 130
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
