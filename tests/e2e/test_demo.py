"""The demo as a newcomer runs it, and with something killed."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.shown import Shown

pytestmark = pytest.mark.timeout(600)


class Demo(Shown):
    """A running demo and what it has printed so far."""

    def pid(self, name: str) -> int:
        pattern = r"Coordinator: pid (\d+)" if name == "coordinator" else rf"{name}\D+(\d+)"
        return int(re.search(pattern, self.output)[1])

    def rounds(self) -> int:
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


async def end(process: asyncio.subprocess.Process) -> None:
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
