"""`xain-coordinator launch --with ray`: participants as actors of a cluster of two nodes on this
machine."""

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from e2e.test_launch import launched
from support.process import PATIENCE_S
from support.ray_nodes import Node, wait_for
from support.terminals import BIN

pytest.importorskip("ray", reason="the extra xain-coordinator[ray] is not installed")


def of(head: Node, *arguments: str) -> tuple[str, ...]:
    common = ("--with=ray", f"--set=launch.ray_address={head.address}", "--work=work")
    return (*common, "--workload=sgd", "--data=iris", *arguments)


def participants(node: Node) -> dict[str, int]:
    """Processes of participants on a node, by their names."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            words = (folder / "cmdline").read_text().split("\0")
            variables = (folder / "environ").read_text().split("\0")
            name = next((word[5:] for word in words if word.startswith("--id=")), "")
            if name and f"NODE={node.name}" in variables:
                found[name] = int(folder.name)
    return found


def updates(folder: Path) -> Counter[int]:
    """How many have counted in each round, by the coordinator's log."""
    lines = (folder / "work/logs/coordinator.log").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return Counter(entry["round"] for entry in entries if entry["event"] == "update_accepted")


async def test_worker_of_a_killed_node_comes_back_in_the_same_round(head, second, tmp_path):
    """The launch starts it on the other node, and it counts in every round, as the others do. One
    that is stopped keeps the round open meanwhile, and a third one begins it."""
    settings = (
        *("--workers=2", "--rounds=3", "--set=server.heartbeat_timeout_s=300"),
        *("--set=rounds.start_participants=3", "--set=rounds.max_participants=3"),
        *("--set=rounds.min_participants=3", "--set=rounds.start_timeout_s=86400"),
    )
    async with launched(tmp_path, *of(head, *settings)) as shown:
        await shown.until(lambda output: "launch: ready: all 2 have joined" in output)
        address = shown.output.partition("the coordinator listens on ")[2].split()[0]
        ((lost, _),) = participants(second).items()
        ((_, held),) = participants(head).items()
        os.kill(held, signal.SIGSTOP)
        third = await asyncio.create_subprocess_exec(
            *(str(BIN / "xain-participant"), f"--coordinator={address}", "--id=third"),
            "--data=iris",
            cwd=tmp_path,
        )
        try:
            await shown.until(lambda output: "round_opened" in output)
            second.kill()
            await shown.until(
                lambda output: f"launch: {lost} was killed; it is started again" in output
            )
            wait_for(lambda: lost in participants(head))
            os.kill(held, signal.SIGCONT)
            assert await shown.end() == 0, shown.output
            assert await asyncio.wait_for(third.wait(), PATIENCE_S) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                third.kill()
    assert updates(tmp_path) == {0: 3, 1: 3, 2: 3}


async def test_signal_and_a_killed_launcher_end_the_participants(head, second, tmp_path):
    """SIGTERM ends them in order; SIGKILL of the launcher ends them by Ray."""
    for number, status in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        async with launched(tmp_path, *of(head, "--rounds=1000000", "--workers=2")) as shown:
            await shown.until(lambda output: "launch: ready: all 2 have joined" in output)
            shown.process.send_signal(number)
            assert await shown.end() == status, shown.output
            assert "infinite retries" not in shown.output, "Ray would call it anew"
        wait_for(lambda: not participants(head) and not participants(second))
