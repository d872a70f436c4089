"""`xain-coordinator launch --with docker` on a real Docker engine."""

import asyncio
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from e2e.test_launch import launched, write_wards
from support.containers import engine
from support.containers.engine import BAGGING, PARTICIPANT, docker
from xain_coordinator.cli.launch import containers
from xain_coordinator.inspection import client as inspection_client
from xain_coordinator.inspection.client import NoStatus

pytestmark = pytest.mark.timeout(2700)

ACCURACY = re.compile("on rows that workers set aside: accuracy ([0-9.]+)")


@pytest.fixture
def name(tmp_path: Path):
    engine.require()
    engine.build(PARTICIPANT, BAGGING)
    name = f"t{os.getpid()}-{abs(hash(tmp_path)) % 10**8}"
    yield name
    containers.clean(name)


def labelled(name: str) -> dict[str, dict]:
    """State of each container of a launch, by the name of its program."""
    label = f"label=org.xain.launch={name}"
    found = docker("ps", "--all", "--quiet", "--filter", label).split()
    told = [engine.inspect(one) for one in found]
    return {one["Name"].removeprefix(f"/xain-{name}-"): one for one in told}


def assert_nothing_left(name: str) -> None:
    label = f"label=org.xain.launch={name}"
    assert docker("ps", "--all", "--quiet", "--filter", label) == ""
    assert docker("network", "ls", "--quiet", "--filter", label) == ""


async def test_killed_launch_is_found_by_its_label_and_bagging_trains(tmp_path, name):
    """Containers have what [launch] says and see their own data alone; those of a killed launcher
    are removed by the next launch of the name, which trains to its end and leaves nothing."""
    wards = write_wards(tmp_path / "wards", "north", "south")
    (tmp_path / "launch.toml").write_text(
        "[launch]\n"
        f'name = "{name}"\n'
        "cpu_shares = [512, 256]\n"
        f'network_name = "{name}-net"\n'
        'subnet = "192.168.211.0/28"\n'
    )
    common = ("--config=launch.toml", "--data=wards", "--with=docker")
    # They wait for a third worker, and take no processor time.
    waiting = [f"--set=rounds.{key}_participants=3" for key in ("start", "max")]
    waiting.append("--set=rounds.start_timeout_s=86400")
    async with launched(tmp_path, *common, "--workload=sgd", *waiting) as shown:
        await shown.until(lambda output: "launch: ready: all 2 have joined" in output)
        told = labelled(name)
        assert told.keys() == {"coordinator", "north", "south"}
        for worker, shares in (("north", 512), ("south", 256)):
            mounts = {mount["Source"]: mount for mount in told[worker]["Mounts"]}
            own = tmp_path / "xain-launch" / name / "certificates/participant" / worker
            state = tmp_path / "xain-launch" / name / "workers" / worker
            assert mounts.keys() == {str(wards / worker), str(own), str(state)}
            assert mounts[str(wards / worker)]["Destination"] == "/data"
            assert {at for at, mount in mounts.items() if mount["RW"]} == {str(state)}
            host = told[worker]["HostConfig"]
            assert (host["CpuShares"], host["CapDrop"]) == (shares, ["ALL"])
            assert host["ReadonlyRootfs"] is True
            assert told[worker]["NetworkSettings"]["Ports"] in ({}, None)
        (network,) = told["north"]["NetworkSettings"]["Networks"].values()
        assert network["IPAddress"].startswith("192.168.211.")
        (published,) = told["coordinator"]["NetworkSettings"]["Ports"]["50051/tcp"]
        assert published["HostIp"] == "127.0.0.1"
        address = f"127.0.0.1:{published['HostPort']}"
        with pytest.raises(NoStatus, match="nobody in without a certificate"):
            await asyncio.to_thread(inspection_client.fetch, address)
        async with launched(tmp_path, *common, "--workload=sgd") as second:
            assert await second.end() == 1
        assert f"a launch called {name} is running" in second.output
        shown.process.kill()
        assert await shown.end() == -signal.SIGKILL
    assert labelled(name).keys() == {"coordinator", "north", "south"}

    bagging = ("--workload=bagging", "--rounds=1")
    async with launched(tmp_path, *common, *bagging) as shown:
        assert await shown.end() == 0, shown.output
    assert f"an earlier launch called {name} was killed; stopping xain-{name}-" in shown.output
    assert float(ACCURACY.search(shown.output)[1]) > 0.85
    assert_nothing_left(name)
    work = tmp_path / "xain-launch" / name
    assert '"joined"' in (work / "logs/north.log").read_text()
    assert (work / "journal.sqlite").stat().st_uid == os.getuid()


async def test_taken_port_ends_the_launch_and_leaves_nothing(tmp_path, name):
    """The engine makes a container and cannot start it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = f"--set=launch.ports={taken.getsockname()[1]},0"
        arguments = ("--workload=sgd", "--data=iris", "--workers=1", "--with=docker", ports)
        async with launched(tmp_path, f"--name={name}", *arguments) as shown:
            assert await shown.end() == 1, shown.output
    assert "coordinator: Docker says: " in shown.output
    assert_nothing_left(name)


async def test_missing_image_is_told_with_its_command(tmp_path, name):
    async with launched(
        tmp_path, f"--name={name}", "--workload=xgboost", "--data=iris", "--with=docker"
    ) as shown:
        assert await shown.end() == 1
    assert "there is no image with the workload xgboost" in shown.output
    assert_nothing_left(name)
