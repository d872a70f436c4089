"""What the README tells a newcomer to do, done."""

import asyncio
import io
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

from support.process import CoordinatorProcess
from support.wire import Member
from xain_coordinator.cli import app as coordinator_app
from xain_participant.cli import app as participant_app
from xain_proto.fl import coordinator_pb2 as pb

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


def example(name: str) -> str:
    """The code block behind a `tested:` mark."""
    found = re.search(rf"<!-- tested: {name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no example {name}"
    return found[1]


async def run(*command: str, cwd: Path) -> tuple[int, str]:
    """(exit status, output) of a program."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_a_participant_of_ones_own(tmp_path):
    """The example of the README, run by two who hold different numbers, learns their mean."""
    (tmp_path / "mean.py").write_text(example("participant"))
    coordinator = CoordinatorProcess(
        tmp_path, {"rounds.rounds": 8, "rounds.epochs": 5, "rounds.min_participants": 2}
    )
    await coordinator.start()
    try:
        (tmp_path / "a.txt").write_text("1\n2\n3\n")
        (tmp_path / "b.txt").write_text("10\n")
        address = f"localhost:{coordinator.port}"
        ends = await asyncio.gather(
            *(run(sys.executable, "mean.py", address, f, cwd=tmp_path) for f in ("a.txt", "b.txt"))
        )
        assert [status for status, _ in ends] == [0, 0], ends
        reader = Member(coordinator.port, "reader")
        model = np.load(io.BytesIO(await reader.download("8/global")))
        await reader.close()
        assert model == pytest.approx([(3 * 2 + 10) / 4], abs=0.1)  # 3 samples of mean 2, 1 of 10
    finally:
        await coordinator.end()


async def test_by_hand_on_two_machines(tmp_path):
    """A coordinator and two participants with the README's flags train to the end; status tells."""
    coordinator = CoordinatorProcess(
        tmp_path, {"workload.name": "sgd", "rounds.rounds": 3, "rounds.min_participants": 2}
    )
    await coordinator.start()
    try:
        address = f"127.0.0.1:{coordinator.port}"
        shared = ["--data", "digits", "--partition", "iid", "--num-parts", "2"]
        ends = await asyncio.gather(
            *(
                run(
                    str(BIN / "xain-participant"),
                    *("--coordinator", address, "--id", f"site-{index}", "--index", str(index)),
                    *shared,
                    cwd=tmp_path,
                )
                for index in range(2)
            )
        )
        assert [status for status, _ in ends] == [0, 0], ends
        status, shown = await run(
            str(BIN / "xain-coordinator"), "status", "--address", address, cwd=tmp_path
        )
        assert status == 0
        assert "finished" in shown
        assert "3/global" in shown
        late = Member(coordinator.port, "late")
        assert (await late.heartbeat()).state == pb.FINISHED
        await late.close()
    finally:
        await coordinator.end()


def commands() -> list[list[str]]:
    """Every command line of the README that calls one of our programs."""
    lines = re.findall(r"^    (\.venv/bin/xain-.*?)(?:  +#.*)?$", README, re.MULTILINE)
    assert len(lines) > 8, "the README's commands are not where this test looks"
    return [shlex.split(line.removesuffix("&")) for line in lines]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_flag_in_the_readme_exists(command):
    """No command of the README has a flag, a subcommand or a file that is not there."""
    program, *words = command
    root = typer.main.get_command(
        participant_app if program.endswith("participant") else coordinator_app
    )
    known = {option for parameter in root.params for option in parameter.opts}
    subcommands = getattr(root, "commands", {})
    while words:
        word = words.pop(0)
        if word == "demo":
            return  # its flags are checked where it is run
        if word in subcommands:
            known |= {option for p in subcommands[word].params for option in p.opts}
        elif word.startswith("--"):
            assert word in known, f"{word} of {command}"
        elif word.endswith(".toml"):
            assert (ROOT / word).exists(), word
