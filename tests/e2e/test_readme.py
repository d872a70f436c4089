"""What the README tells a newcomer to do, done."""

import asyncio
import io
import re
import shlex
import signal
import socket
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
LAYOUT = re.compile(r"[a-z]+/ +\w")  # of "Where things are": a folder and what is in it

# What this test does not do: it would set up another environment, needs a program that is not ours,
# or measures.
NOT_RUN = (
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


def command_lines() -> list[str]:
    """What the README tells to type, in its order, without comments."""
    blocks = re.sub(r"```python.*?```", "", README, flags=re.DOTALL)
    lines = re.findall(r"^    (\S.*?)(?:  +#.*)?$", blocks, re.MULTILINE)
    return [line for line in lines if not LAYOUT.match(line)]


def commands() -> list[list[str]]:
    """Those that call one of our programs."""
    lines = [line for line in command_lines() if line.startswith(".venv/bin/xain-")]
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


class Terminals:
    """Where a newcomer types what the README says, in one folder: what goes on running does so
    beside the next command. All use one port, which is free, instead of 50051."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.coordinator: asyncio.subprocess.Process | None = None
        self.participants: list[asyncio.subprocess.Process] = []
        self.log = b""
        (folder / "configs").symlink_to(ROOT / "configs")

    async def do(self, line: str) -> None:
        line = line.replace("HOST:50051", "localhost:50051").replace("50051", str(self.port))
        words = shlex.split(line.replace(".venv/bin/", f"{BIN}/"))
        program, command = Path(words[0]).name, words[1]
        if program == "xain-participant" or "mean.py" in words:
            await self._participate(words)
            return
        await self._wait_for_participants()
        if program == "kill":
            await self.stop_coordinator()
        elif program == "seq":
            (self.folder / words[-1]).write_text((await self._run(*words[:-2]))[0])
        elif command == "demo":
            await self._demo(words)
        elif command == "status":
            shown, _ = await self._run(*words, *self._unless(words, "--address"))
            assert "finished" in shown
        elif command == "check-config":
            await self._run(*words)
        elif command == "extend":
            await self.stop_coordinator()
            shown, _ = await self._run(*words)
            assert "20 more rounds after the 20" in shown
        else:
            assert program == "xain-coordinator", line
            await self._coordinate([word for word in words if word != "&"])

    def _unless(self, words: list[str], flag: str) -> list[str]:
        return [] if flag in words else [flag, f"localhost:{self.port}"]

    async def _run(self, *words: str) -> tuple[str, str]:
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=self.folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        assert process.returncode == 0, (words, output, errors)
        return output.decode(), errors.decode()

    async def _demo(self, words: list[str]) -> None:
        """Until it has shown a round, if it is long."""
        if "--help" in words:
            await self._run(*words)
            return
        process = await asyncio.create_subprocess_exec(
            *words, cwd=self.folder, stdout=asyncio.subprocess.PIPE
        )
        while line := await process.stdout.readline():
            if line.startswith(b"round 1 of"):
                process.send_signal(signal.SIGINT)
                await process.communicate()
                break
        assert await process.wait() == 130

    async def _coordinate(self, words: list[str]) -> None:
        """In the place of the one before. Returns when it serves."""
        await self.stop_coordinator()
        self.coordinator = await asyncio.create_subprocess_exec(
            *words,
            f"--port={self.port}",
            cwd=self.folder,
            stderr=asyncio.subprocess.PIPE,
        )
        self.log = b""
        while b'"serving"' not in self.log:
            line = await self.coordinator.stderr.readline()
            assert line, (words, self.log)
            self.log += line

    async def stop_coordinator(self) -> None:
        """With Ctrl-C. It must not have taken up the session of an example before."""
        if self.coordinator is not None and self.coordinator.returncode is None:
            self.coordinator.send_signal(signal.SIGINT)
            _, rest = await self.coordinator.communicate()
            assert self.coordinator.returncode == 0
            assert b"session_is_finished" not in self.log + rest
            assert b"rules_differ" not in self.log + rest

    async def _participate(self, words: list[str]) -> None:
        if "mean.py" not in words:
            words = [*words, *self._unless(words, "--coordinator")]
        teams = [words]
        if "ward-7" in words:  # "on each machine that has data", and there are two
            teams.append([word.replace("ward-7", "ward-8") for word in words])
        for team in teams:
            self.participants.append(await asyncio.create_subprocess_exec(*team, cwd=self.folder))

    async def _wait_for_participants(self) -> None:
        """All end by themselves, and well: they have trained."""
        ends = await asyncio.gather(*(process.wait() for process in self.participants))
        assert not any(ends), ends
        self.participants.clear()

    async def end(self) -> None:
        """Nothing stays behind."""
        for process in (*self.participants, self.coordinator):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()


async def test_the_commands_in_their_order(tmp_path):
    """Every command of the README, typed one after the other in one folder, does what it is there
    for: nobody gets the finished session of an example before."""
    (tmp_path / "mean.py").write_text(example("participant"))
    rows = [f"{i % 7},{i % 5},{'yes' if i % 7 > 3 else 'no'}" for i in range(60)]
    (tmp_path / "patients.csv").write_text("\n".join(["age,dose,outcome", *rows, ""]))
    terminals = Terminals(tmp_path)
    done = []
    try:
        for line in command_lines():
            if not line.startswith(NOT_RUN):
                await terminals.do(line)
                done.append(line)
        await terminals.stop_coordinator()
    finally:
        await terminals.end()
    assert sum("xain-" in line for line in done) == len(commands())


async def test_a_finished_session_is_not_taken_for_another_training(tmp_path):
    """On the folder of a finished training the coordinator serves it again with the same settings;
    with others it says in one line how to train anew, and ends."""
    (tmp_path / "mean.py").write_text(example("participant"))
    (tmp_path / "numbers.txt").write_text("4\n")
    rounds = {"rounds.rounds": 2}
    coordinator = CoordinatorProcess(tmp_path, rounds)
    await coordinator.start()
    try:
        mean = (sys.executable, "mean.py", f"localhost:{coordinator.port}", "numbers.txt")
        assert (await run(*mean, cwd=tmp_path))[0] == 0
        await coordinator.stop()
        await coordinator.start()
        await coordinator.stop()
        seen = len(coordinator.log().splitlines())
        assert await coordinator.fails("--set=rounds.epochs=3") == 2
        refusal = coordinator.log().splitlines()[seen:]
        assert len(refusal) == 1
        assert "rounds.epochs = 1 (configured: 3)" in refusal[0]
        assert "--new-session" in refusal[0]
        await coordinator.start("--set=rounds.epochs=3", "--new-session")
        await coordinator.stop()
    finally:
        await coordinator.end()
