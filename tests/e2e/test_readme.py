"""The commands of the README, run."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from support.process import CoordinatorProcess, ended
from support.terminals import Terminals
from support.wire import Member

pytestmark = [pytest.mark.real_exec, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LAYOUT = re.compile(r"[a-z.]+/ +\w")  # of "Where things are": a folder and what is in it

# What this test does not do: it would set up another environment, needs a program that is not ours,
# measures, or has a test of its own.
NOT_RUN = (
    ".venv/bin/xain-coordinator demo ",
    "make ",
    "grpcurl ",
    "docker ",
    "kubectl ",
    ".venv/bin/python benchmarks/",
    ".venv/bin/python examples/",
)


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
    async with ended(coordinator):
        (tmp_path / "a.txt").write_text("1\n2\n3\n")
        (tmp_path / "b.txt").write_text("10\n")
        address = f"localhost:{coordinator.port}"
        ends = await asyncio.gather(
            *(run(sys.executable, "mean.py", address, f, cwd=tmp_path) for f in ("a.txt", "b.txt"))
        )
        assert [status for status, _ in ends] == [0, 0], ends
        reader = Member(coordinator.port, "reader")
        model = await reader.model(8)
        await reader.close()
        assert model == pytest.approx([(3 * 2 + 10) / 4], abs=0.1)  # 3 samples of mean 2, 1 of 10


def command_lines() -> list[str]:
    """The commands of the README, in their order, without comments."""
    blocks = re.sub(r"```python.*?```", "", README, flags=re.DOTALL)
    lines = re.findall(r"^    (\S.*?)(?:  +#.*)?$", blocks, re.MULTILINE)
    return [line for line in lines if not LAYOUT.match(line)]


class ReadmeTerminals(Terminals):
    """Terminals in which a newcomer types what the README says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, scripts=("mean.py",))
        (folder / "configs").symlink_to(ROOT / "configs")

    def words(self, line: str) -> list[str]:
        return super().words(line.replace("coordinator.example.org", "localhost"))

    async def do(self, line: str) -> str:
        words = self.words(line)
        program, command = Path(words[0]).name, words[1]
        if command == "tokens":
            for site in ("ward-7", "ward-8"):
                *create, _, file = (word.replace("ward-7", site) for word in words)
                made, _ = await self.run(*create, f"--address=localhost:{self.port}")
                (self.folder / file).write_text(made)
        elif command == "join":
            for site in ("ward-7", "ward-8"):
                await self.run(*(word.replace("ward-7", site) for word in words))
        elif program == "seq":
            await self.wait_for_participants()
            (self.folder / words[-1]).write_text((await self.run(*words[:-2]))[0])
        elif command == "extend":
            await self.wait_for_participants()
            await self.stop_coordinator()
            assert "20 more passes after the 50" in await super().do(line)
        elif command == "status":
            await self.wait_for_participants()
            if "--data-dir" not in words:
                words = [*words, *self.unless(words, "--address")]
            shown, _ = await self.run(*words)
            assert "finished" in shown
        else:
            return await super().do(line)
        return ""

    async def participate(self, words: list[str]) -> None:
        """On "each machine that has data" there is one of two participants."""
        await super().participate(words)
        if "ward-7" in words:
            await super().participate([word.replace("ward-7", "ward-8") for word in words])


async def test_the_commands_in_their_order(tmp_path):
    """Every command of the README, typed one after the other in one folder, does what it is there
    for: no example gets the finished session of another."""
    (tmp_path / "mean.py").write_text(example("participant"))
    rows = [f"{i % 7},{i % 5},{'yes' if i % 7 > 3 else 'no'}" for i in range(60)]
    (tmp_path / "patients.csv").write_text("\n".join(["age,dose,outcome", *rows, ""]))
    terminals = ReadmeTerminals(tmp_path)
    done = []
    try:
        for line in command_lines():
            if not line.startswith(NOT_RUN):
                await terminals.do(line)
                done.append(line)
        await terminals.stop_coordinator()
    finally:
        await terminals.end()
    assert sum("xain-" in line for line in done) > 8
