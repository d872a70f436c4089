"""The health check of the image, run on a real coordinator by the path of its socket."""

import asyncio
import signal
import stat
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from integration.conftest import config_for
from support.commands import called
from support.grpc_servers import serving_operators
from support.process import CoordinatorProcess, ran
from support.waiting import until
from xain_coordinator.cli.backup import back_up
from xain_coordinator.inspection import client as inspection_client

SCRIPT = Path(__file__).parents[2] / "deploy/images/health.py"


async def check(folder: Path, *flags: str) -> tuple[int, str]:
    """Exit status of the health check and what it prints."""
    return (await called("-IS", str(SCRIPT), *flags, str(folder)))[:2]


async def until_told(wanted: tuple[int, str], folder: Path) -> None:
    async def is_told() -> bool:
        return await check(folder) == wanted

    await until(is_told)


async def test_health_check_follows_the_coordinator(process):
    """The owner alone may ask. A coordinator that hangs gives no answer, one that was killed leaves
    a socket that its successor replaces, and one that has stopped takes its socket away."""
    folder, path = process.folder, process.folder / "journal.sock"
    await until_told((0, "SERVING\n"), folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    process.send(signal.SIGSTOP)
    for flags in ([], ["--alive"]):
        assert await check(folder, *flags) == (1, f"{path}: timed out\n")
    process.send(signal.SIGCONT)
    await until_told((0, "SERVING\n"), folder)
    await process.kill()
    assert await check(folder) == (1, f"{path}: Connection refused\n")
    await process.start()
    await until_told((0, "SERVING\n"), folder)
    assert await process.stop() == 0
    assert await check(folder) == (1, f"{path}: No such file or directory\n")


@pytest.mark.parametrize("is_serving", [True, False])
async def test_check_whether_it_is_alive_takes_any_answer(tmp_path, *, is_serving):
    """A coordinator that does not serve need not be started again. One without a socket is to be,
    once it has had the time for its start."""
    assert (await check(tmp_path, "--alive"))[0] == 1
    server, servicer = grpc.aio.server(), health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    response = health_pb2.HealthCheckResponse
    await servicer.set("", response.SERVING if is_serving else response.NOT_SERVING)
    async with serving_operators(server, tmp_path):
        answer = "SERVING\n" if is_serving else "NOT_SERVING\n"
        assert await check(tmp_path, "--alive") == (0, answer)
        assert await check(tmp_path) == (0 if is_serving else 1, answer)


async def test_check_of_a_server_that_refuses_it_fails(tmp_path):
    server = grpc.aio.server()
    async with serving_operators(server, tmp_path):
        told = f"{tmp_path / 'journal.sock'}: the coordinator refuses the check\n"
        assert await check(tmp_path, "--alive") == (1, told)


async def test_socket_whose_path_is_too_long_is_elsewhere_and_status_says_where(keep, tmp_path):
    """A backup finds it by the link beside the journal."""
    process = keep(CoordinatorProcess(tmp_path / ("folder" * 20), {"rounds.min_participants": 2}))
    await process.start()

    async def moved_to() -> str:
        target = f"127.0.0.1:{process.port}"
        snapshot = await asyncio.to_thread(inspection_client.fetch, target)
        return snapshot.status.health_socket

    moved = await until(moved_to)  # the socket comes after the port
    folder = Path(moved).parent
    assert await check(folder) == (0, "SERVING\n")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    storage = {"path": str(process.folder / "weights")}
    config = config_for(process.folder, storage=storage)
    assert await asyncio.to_thread(back_up, config, tmp_path / "backup") == 0
    assert await process.stop() == 0
    assert not folder.exists()
    assert not (process.folder / "journal.sock").is_symlink()


def test_health_check_imports_nothing_that_takes_time():
    """A check comes every few seconds, also on a busy machine."""
    script = (
        "import sys; before = set(sys.modules); sys.path.insert(0, sys.argv[1]); import health; "
    )
    script += "print(*sorted(set(sys.modules) - before))"
    found = ran("-IS", "-c", script, SCRIPT.parent)
    assert (found.returncode, found.stdout.split()) == (0, ["_socket", "health"])
