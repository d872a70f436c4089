"""The demo as a newcomer runs it, and with something killed."""

import asyncio
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from support.shown import Shown

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


class Demo(Shown):
    """A running demo and what it has printed so far."""

    def pid(self, name: str) -> int:
        pattern = r"Coordinator: pid (\d+)" if name == "coordinator" else rf"{name}\D+(\d+)"
        return int(re.search(pattern, self.output)[1])

    def rounds(self) -> int:
        """Rounds that are done."""
        return max(map(int, re.findall(r"(\d+) of \d+ rounds done", self.output)), default=0)


@asynccontextmanager
async def demo(
    folder: Path | None,
    *arguments: str,
    temp: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Demo]:
    """folder: to keep; without it the demo makes one in `temp`."""
    keep = [] if folder is None else ["--keep", str(folder)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "xain_coordinator", "demo", *keep, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **(environment or {}), **({"TMPDIR": str(temp)} if temp else {})},
    )
    try:
        yield Demo(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            # Not wait(): the demo would block on a full pipe that is not read.
            await process.communicate()


async def test_the_demo_reaches_the_centralised_accuracy(tmp_path):
    """Digits split by label over four processes: within two points of all data in one place."""
    async with demo(tmp_path) as shown:
        assert await shown.end() == 0, shown.output
    assert "finished (completed); model 20: accuracy" in shown.output
    federated, centralised = map(float, re.findall(r"(\d+\.\d)%\n", shown.output)[-2:])
    assert centralised > 90
    assert federated >= centralised - 2.0
    (difference,) = re.findall(r"([+-]\d+\.\d) points", shown.output)
    assert float(difference) == pytest.approx(federated - centralised), "of the two that are shown"
    number = r"0\.\d+ \(0\.\d+ to (0\.\d+|1)"
    told = " ".join(shown.output.split())  # lines are as wide as the terminal
    assert re.search(rf"all figures: accuracy {number}[^a-z]*[^)]*\), auc {number}", told), told
    (report,) = re.findall(r"^Report .*: (\S+)$", shown.output, re.MULTILINE)
    assert report == str(tmp_path / "report.html")
    page = await asyncio.to_thread(Path(report).read_text)
    assert "<svg" in page
    assert "Confusion matrix" in page
    assert "rows of all sites together" in page


async def test_the_demo_survives_kills(tmp_path):
    """kill -9 of a participant does not stop the session, and with its id it joins again; kill -9
    of the coordinator neither: it goes on with the same round. The demo does not give up while
    others than its own children take part; and it does when none is left."""
    long = ("--rounds", "100000", "--participants", "3")
    async with demo(tmp_path, *long) as shown, AsyncExitStack() as stack:
        await shown.until(lambda _: shown.rounds() >= 2)
        command = re.search(r"^.*--config .*site-0\.toml$", shown.output, re.MULTILINE)[0]
        assert Path(shlex.split(command)[0]).is_absolute()
        by_hand = []

        async def replace(name: str, told: str) -> int:
            """Kill a site, and start it by hand. Returns how much was shown before the start."""
            os.kill(shown.pid(name), signal.SIGKILL)
            await shown.until(lambda output: told in output)
            if not by_hand:
                await shown.until(
                    lambda output: "of 2 updates in" in output.partition("was killed")[2]
                )
            seen = len(shown.output)
            words = shlex.split(command.replace("site-0", name))
            by_hand.append(
                await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.DEVNULL)
            )
            stack.push_async_callback(end, by_hand[-1])
            return seen

        seen = await replace("site-1", "site-1 was killed; the others go on")
        await shown.until(lambda output: "of 3 updates in" in output[seen:])

        os.kill(shown.pid("coordinator"), signal.SIGKILL)
        await shown.until(
            lambda output: "the coordinator was killed; it is started again" in output
        )
        before = shown.rounds()
        await shown.until(lambda _: shown.rounds() > before + 2)

        await replace("site-0", "site-0 was killed")
        seen = await replace("site-2", "site-2 was killed")
        await shown.until(lambda output: "of 3 updates in" in output[seen:])
        for process in by_hand:
            await end(process)
        assert await shown.end() == 1
    assert "all participants are gone" in shown.output
    numbers = [int(n) for n in re.findall(r"(\d+) of \d+ rounds done", shown.output)]
    assert numbers == sorted(numbers)  # none is done twice


async def end(process: asyncio.subprocess.Process) -> None:
    """End a process in any state."""
    if process.returncode is None:
        process.kill()
    await process.wait()


async def test_ctrl_c_stops_the_demo_and_all_it_started(tmp_path):
    """The status is 128 and the signal's number, and neither a process nor a folder of the demo
    stays behind."""
    async with demo(None, "--rounds", "100000", "--participants", "2", temp=tmp_path) as shown:
        await shown.until(lambda _: shown.rounds() >= 1)
        pids = [shown.pid(name) for name in ("coordinator", "site-0", "site-1")]
        assert list(tmp_path.glob("xain-demo-*"))
        shown.process.send_signal(signal.SIGINT)
        assert await shown.end() == 128 + signal.SIGINT
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list(tmp_path.glob("xain-demo-*"))


async def test_demo_that_is_killed_at_its_very_end_can_be_repeated_in_its_folder(tmp_path):
    """kill -9 of the coordinator while it does its last round or has done it: what the demo does
    not know yet, the one that is started in its place tells. The second run in the folder shows all
    its rounds, whatever the first one left there, and whatever the environment says about other
    coordinators and participants."""
    short = ("--rounds", "2", "--participants", "2")
    async with demo(tmp_path, *short) as shown:
        await shown.until(lambda output: shown.rounds() >= 1 or "finished" in output)
        with suppress(ProcessLookupError):  # it has ended with the demo
            os.kill(shown.pid("coordinator"), signal.SIGKILL)
        assert await shown.end() == 0, shown.output
    assert "finished (completed); model 2: accuracy" in shown.output
    assert "Test accuracy" in shown.output
    other = {"XAIN_COORDINATOR_SERVER__PORT": "x", "XAIN_PARTICIPANT_DATA": "x"}
    async with demo(tmp_path, *short, environment=other) as shown:
        assert await shown.end() == 0, shown.output
    assert "finished (completed); model 2: accuracy" in shown.output
