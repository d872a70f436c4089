"""Terminals in which the commands of a page are typed, one after the other."""

import asyncio
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

from xain_foundation.net.sockets import free_ports

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PROGRAMS = ("xain-coordinator", "xain-participant", "python")


def commands_of(page: str) -> list[str]:
    """Lines of a page that are indented by four blanks and call one of our programs, or Python, or
    stop the coordinator."""
    lines = re.findall(r"^    ((?:\.venv/bin/)?(?:[a-z-]+)(?: .*)?)$", page, re.MULTILINE)
    names = (*PROGRAMS, "kill")
    return [line for line in lines if line.split()[0].removeprefix(".venv/bin/") in names]


def files_of(page: str) -> dict[str, str]:
    """Code blocks of a page behind a `file:` mark, by the name of the file."""
    return dict(_marked("file", page))


def added_by(page: str) -> list[tuple[str, str]]:
    """(name of the file, text) of the code blocks behind a `more:` mark, which a reader adds."""
    return _marked("more", page)


def _marked(mark: str, page: str) -> list[tuple[str, str]]:
    block = rf"<!-- {mark}: ([\w.-]+) -->\n```\w*\n(.*?)```"
    return re.findall(block, page, re.DOTALL)


class Terminals:
    """Terminals in one folder. A coordinator and participants run beside the next command; all
    other commands wait for the participants without --serve to end. All use one free port instead
    of 50051.

    scripts: names of the Python files that take part, as xain-participant does.
    """

    def __init__(self, folder: Path, scripts: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.scripts = scripts
        self.port = free_ports(1)[0]
        self.coordinator: asyncio.subprocess.Process | None = None
        self.participants: list[asyncio.subprocess.Process] = []
        self.serving: list[asyncio.subprocess.Process] = []  # participants that do not end
        self._log_path = folder / "coordinator.log"

    def words(self, line: str) -> list[str]:
        """The words of a command, with the port and the programs of this test."""
        line = line.replace("HOST:50051", "localhost:50051").replace("50051", str(self.port))
        first, *rest = shlex.split(line)
        name = first.removeprefix(".venv/bin/")
        return [str(BIN / name) if name in PROGRAMS else first, *rest]

    async def do(self, line: str) -> str:
        """Type a command. Returns its output; "" if it goes on beside the next one."""
        words = self.words(line)
        program, command = Path(words[0]).name, words[1] if len(words) > 1 else ""
        is_command = command and not command.startswith("-")
        if (program == "xain-participant" and not is_command) or command in self.scripts:
            await self.participate(words)
            return ""
        await self.wait_for_participants()
        if program == "kill":
            await self.stop_coordinator()
            return ""
        if program == "xain-coordinator" and not is_command:
            await self.coordinate([word for word in words if word != "&"])
            return ""
        if command == "status":
            words = [*words, *self.unless(words, "--address")]
        return "".join(await self.run(*words))

    def unless(self, words: list[str], flag: str) -> list[str]:
        """A flag with the coordinator's address, unless the command has it."""
        return [] if flag in words else [flag, f"localhost:{self.port}"]

    async def run(self, *words: str) -> tuple[str, str]:
        """Run a command to its end, which must be good. Returns its two outputs."""
        process = await asyncio.create_subprocess_exec(
            *words, cwd=self.folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        output, errors = await process.communicate()
        assert process.returncode == 0, (words, output, errors)
        return output.decode(), errors.decode()

    async def coordinate(self, words: list[str]) -> None:
        """Start a coordinator in the place of the one before. Returns when it serves."""
        await self.stop_coordinator()
        with self._log_path.open("wb") as log:
            self.coordinator = await asyncio.create_subprocess_exec(
                *words, f"--port={self.port}", cwd=self.folder, stderr=log
            )
        while '"coordinator_serving"' not in self.log():
            assert self.coordinator.returncode is None, (words, self.log())
            await asyncio.sleep(0.02)  # a poll, not a race: it ends when the line is there

    def log(self) -> str:
        """The log of the coordinator; a file, since a pipe that is not read would fill."""
        return self._log_path.read_text() if self._log_path.exists() else ""

    async def stop_coordinator(self) -> None:
        """Stop it with Ctrl-C. It must not have taken up the session of an example before."""
        if self.coordinator is not None and self.coordinator.returncode is None:
            self.coordinator.send_signal(signal.SIGINT)
            assert await self.coordinator.wait() == 0
            assert "session_is_finished" not in self.log()
            assert "rules_differ" not in self.log()

    async def participate(self, words: list[str]) -> None:
        """Start a participant. A script gets the port from the environment."""
        if Path(words[0]).name == "xain-participant" and not self.has_joined(words):
            words = [*words, *self.unless(words, "--coordinator")]
        process = await asyncio.create_subprocess_exec(
            *(word for word in words if word != "&"),
            cwd=self.folder,
            env={
                **os.environ,
                "XAIN_PARTICIPANT_COORDINATOR__PORT": str(self.port),
                "OMP_NUM_THREADS": "1",  # PyTorch's threads of several sites wait for each other
            },
        )
        (self.serving if "--serve" in words else self.participants).append(process)

    def has_joined(self, words: list[str]) -> bool:
        """Whether the state directory of a participant has the coordinator's address."""
        *_, folder = [b for a, b in pairwise(words) if a == "--state-dir"] or [""]
        return bool(folder) and (self.folder / folder / "tls").exists()

    async def wait_for_participants(self) -> None:
        """Wait until all participants have ended by themselves, with status 0."""
        ends = await asyncio.gather(*(process.wait() for process in self.participants))
        assert not any(ends), ends
        self.participants.clear()

    async def end(self) -> None:
        """Kill what still runs."""
        for process in (*self.participants, *self.serving, self.coordinator):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()


@asynccontextmanager
async def followed(
    page: str,
    folder: Path,
    *,
    scripts: tuple[str, ...] = (),
    shorter: Mapping[str, str] | None = None,
) -> AsyncIterator[tuple[dict[str, str], Terminals]]:
    """Write the files of a page, and type its commands, step by step; what a step adds to a file is
    there before its first command.

    shorter: texts of commands and what takes their place, where a part of the rounds suffices.
    Yields the output of each command that has ended, that of a second time with the number of the
    step behind it, and the terminals.
    """
    for file, text in files_of(page).items():
        (folder / file).write_text(text)
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    terminals = Terminals(folder, scripts)
    outputs: dict[str, str] = {}
    try:
        for number, part in enumerate(re.split(r"^(?=\*\*\d+\. )", page, flags=re.MULTILINE)):
            for file, text in added_by(part):
                with (folder / file).open("a") as opened:
                    opened.write(f"\n{text}")
            for line in commands_of(part):
                typed = line
                for long, short in (shorter or {}).items():
                    typed = typed.replace(long, short)
                name = f"{line} # {number}" if line in outputs else line
                outputs[name] = await terminals.do(typed)
        yield outputs, terminals
    finally:
        await terminals.end()
