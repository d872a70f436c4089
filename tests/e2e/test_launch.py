"""`xain-coordinator launch` with processes: workers with their own folders, deaths, and the end."""

import asyncio
import json
import os
import re
import select
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from support.launches import VARIABLE, pid_with, processes_of
from support.shown import Shown
from support.terminals import BIN, Terminals, commands_of, files_of
from xain_coordinator.inspection import client as inspection_client
from xain_coordinator.inspection.client import NoStatus
from xain_workloads.tables.data import load

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.frameworks


def write_wards(root: Path, *names: str) -> Path:
    """The rows of breast_cancer in the folders of workers, as Chimera lays them out."""
    data = load("breast_cancer")
    header = ",".join(data.feature_names)
    for i, name in enumerate(names):
        (root / name).mkdir(parents=True)
        rows = data.features[i :: len(names)].tolist()
        text = "\n".join(",".join(map(repr, row)) for row in rows)
        (root / name / "X_train.csv").write_text(f"{header}\n{text}\n")
        labels = "\n".join(data.target[i :: len(names)].tolist())
        (root / name / "y_train.csv").write_text(f"diagnosis\n{labels}\n")
    return root


@asynccontextmanager
async def launched(folder: Path, *arguments: str) -> AsyncIterator[Shown]:
    name = next((one.removeprefix("--name=") for one in arguments if "--name=" in one), "")
    process = await asyncio.create_subprocess_exec(
        *(str(BIN / "xain-coordinator"), "launch", *arguments),
        cwd=folder,
        env={**os.environ, VARIABLE: name},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=1 << 20,
    )
    try:
        yield Shown(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await process.communicate()


def pid_of(name: str, program: str) -> int:
    """Number of the process of a launch that runs a worker, or the coordinator."""
    return pid_with(name, "xain_coordinator" if program == "coordinator" else f"--id={program}")


def name_of(folder: Path) -> str:
    """The name of a launch that no other test uses at the same time."""
    return f"t{os.getpid()}-{folder.name[-30:].lower().strip('_')}"[:38]


@pytest.fixture
def name(tmp_path: Path) -> str:
    return name_of(tmp_path)


async def test_commands_of_the_page(tmp_path, name):
    """Each launch of docs/launch.md ends by itself, leaves its models and no process, and can be
    repeated. The test of docs/parameter-server.md runs that of sparse workers, with a replica."""
    page = (ROOT / "docs/launch.md").read_text(encoding="utf-8")
    for file, text in files_of(page).items():
        (tmp_path / file).write_text(text)
    commands = [
        line
        for line in commands_of(page)
        if not re.search("--with (docker|ray)|--serve( |$)| sparse", line)
    ]
    assert len(commands) == 6
    outputs = {}
    terminals = Terminals(tmp_path)
    for line in commands:
        # Launches of other tests may run at the same time. Two of the page have the same name.
        if " launch " in line and "--name" not in line:
            line += f" --name {name}"
        line = line.replace("--name wards", f"--name {name}-wards")
        line = line.replace("xain-launch/wards", f"xain-launch/{name}-wards")
        outputs[line] = await terminals.do(line)
        for used in (name, f"{name}-wards"):
            assert processes_of(used) == []
    output = next(text for line, text in outputs.items() if "bagging" in line)
    assert "launch: ready: all 2 have joined" in output
    assert re.search(r"^north       \| \d\d-\d\d \S+ joined ", output, re.MULTILINE)
    measured = re.search(
        r"Model 1, last training, averages over workers: oob_score (0\.\d+)", output
    )
    assert measured, output
    assert float(measured[1]) > 0.8
    accuracy = re.search(
        "on rows that workers set aside: accuracy (0[.][0-9]+)",
        next(text for line, text in outputs.items() if "digits" in line),
    )
    assert accuracy
    assert float(accuracy[1]) > 0.85
    assert (tmp_path / "wards.skops").stat().st_size > 0


LONG = ("--workload", "sgd", "--data", "iris", "--rounds", "1000000")  # without end
# Its worker has joined and waits for another one, without a round that takes processor time.
WAITING = (
    *("--workload", "sgd", "--data", "iris", "--workers", "1"),
    *("--set=rounds.start_participants=2", "--set=rounds.max_participants=2"),
    "--set=rounds.start_timeout_s=86400",
)


async def test_deaths_are_reported_and_two_names_run_side_by_side(tmp_path, name):
    """A killed worker does not end the rounds, and comes back; a killed coordinator goes on with
    its session; a worker that is told to stop stays away; signals end one launch without the
    other."""
    one, two = f"{name}1", f"{name}2"
    async with (
        launched(tmp_path, f"--name={one}", *LONG, "--workers=2") as first,
        launched(tmp_path, f"--name={two}", *WAITING, "--quiet") as second,
    ):
        for shown in (first, second):
            await shown.until(lambda output: "launch: ready: all " in output)
        os.kill(pid_of(one, "worker-1"), signal.SIGKILL)
        await first.until(
            lambda output: re.search(
                "launch: worker-1 was killed; it is started again(?s:.*)"
                "^worker-1 .* joined (?s:.*)model_published",
                output,
                re.MULTILINE,
            )
        )
        async with launched(tmp_path, f"--name={one}", *LONG) as third:
            assert await third.end() == 1
        assert f"a launch is running in xain-launch/{one}" in third.output
        os.kill(pid_of(one, "coordinator"), signal.SIGKILL)
        await first.until(
            lambda output: (
                "launch: the coordinator was killed" in output
                and "model_published" in output.partition("coordinator was killed")[2]
            )
        )
        sessions = set(re.findall(r"serving +.* session=(\w+)", first.output))
        assert len(sessions) == 1

        os.kill(pid_of(one, "worker-2"), signal.SIGTERM)
        await first.until(
            lambda output: "launch: worker-2 ended with status 143; the others go on" in output
        )
        first.process.send_signal(signal.SIGINT)
        assert await first.end() == 130, first.output
        assert processes_of(one) == []
        assert second.process.returncode is None
        second.process.send_signal(signal.SIGTERM)
        assert await second.end() == 143, second.output
        assert processes_of(two) == []
        assert all(line.startswith("launch: ") for line in second.output.splitlines())


async def test_processes_end_with_a_killed_launcher(tmp_path, name):
    """The next launch of the name trains in the same folder."""
    async with launched(tmp_path, f"--name={name}", *WAITING) as shown:
        await shown.until(lambda output: "launch: ready" in output)
        assert len(processes_of(name)) == 2
        handles = [os.pidfd_open(pid) for pid in processes_of(name)]
        shown.process.kill()
        assert await shown.end() == -signal.SIGKILL
        for handle in handles:
            await asyncio.to_thread(select.select, [handle], [], [])
            os.close(handle)
    arguments = ("--workload=sgd", "--data=iris", "--workers=1", "--rounds=1")
    async with launched(tmp_path, f"--name={name}", *arguments) as shown:
        assert await shown.end() == 0, shown.output


async def test_worker_that_cannot_start_ends_the_launch(tmp_path, name):
    """The worker's log says why, and no process is left."""
    write_wards(tmp_path / "wards", "south")
    (tmp_path / "wards/south/y_train.csv").write_text("diagnosis\nbenign\n")
    arguments = ("--workload", "sgd", "--data", "wards")
    async with launched(tmp_path, f"--name={name}", *arguments) as shown:
        assert await shown.end() == 1
    assert re.search("south ended with status 1 .*log", shown.output)
    assert f"xain-launch/{name}/logs/south.log" in shown.output
    assert "south       | xain-participant: " in shown.output
    assert "the files belong together row by row" in shown.output
    assert processes_of(name) == []


def asked_with(folder: Path, output: str) -> tuple[str, ssl.SSLContext, str]:
    """(URL, authority, bearer token) of the command that a closed launch shows."""
    shown = r"POST (\S+)/v1/fit .* --cacert (\S+) -H @(\S+)"
    url, authority, header = re.search(shown, output).groups()
    assert (folder / header).stat().st_mode & 0o777 == 0o600
    context = ssl.create_default_context(cafile=str(folder / authority))
    return (
        url,
        context,
        (folder / header).read_text().strip().removeprefix("authorization: Bearer "),
    )


async def test_launch_that_others_reach_is_closed_to_them(tmp_path, name):
    """The programs have certificates of an authority that ends with the launch, and requests over
    HTTP need the token that the launch names."""
    open_host = ("--set=launch.host=0.0.0.0", "--set=rounds.start_participants=3")
    waiting = (*open_host, "--set=rounds.max_participants=3")
    arguments = ("--workload=sgd", "--data=iris", "--workers=2", "--serve", *waiting)
    async with launched(tmp_path, f"--name={name}", *arguments) as shown:
        await shown.until(lambda output: "launch: train with: " in output)
        address = re.search(r"the coordinator listens on (\S+)", shown.output)[1]
        with pytest.raises(NoStatus, match="nobody in without a certificate"):
            await asyncio.to_thread(inspection_client.fetch, address)
        work = tmp_path / "xain-launch" / name
        assert {file.stat().st_mode & 0o777 for file in work.rglob("tls.key")} == {0o600}
        url, context, token = asked_with(tmp_path, shown.output)
        request = Request(f"{url}/v1/status")
        with pytest.raises(HTTPError, match="401"):
            await asyncio.to_thread(urlopen, request, timeout=60, context=context)
        request.add_header("authorization", f"Bearer {token}")
        answer = await asyncio.to_thread(urlopen, request, timeout=60, context=context)
        assert json.load(answer)["state"] == "waiting"
        shown.process.send_signal(signal.SIGINT)
        await shown.end()
    assert not [*work.rglob("*.key"), *work.rglob("bearer")]
    assert token not in shown.output
