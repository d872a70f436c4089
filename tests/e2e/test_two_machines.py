"""The README's way to a closed coordinator, from nothing, on two machines."""

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.namespaces import Machine, NoNamespaces, two_machines
from support.process import Process
from support.terminals import commands_of

pytestmark = pytest.mark.timeout(600)
README = Path(__file__).parents[2] / "README.md"
BIN = Path(sys.executable).parent
ROWS = "".join(f"{i % 7},{i % 5},{'yes' if i % 7 > 3 else 'no'}\n" for i in range(60))


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    try:
        with two_machines() as both:
            yield both
    except NoNamespaces as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no network namespaces: {error}")


class Typed(Process):
    """A command on a machine."""

    def __init__(self, folder: Path, machine: Machine, name: str) -> None:
        super().__init__(folder, name)
        self._machine = machine

    async def begin(self, line: str) -> None:
        """Run it as a shell does, which our programs take the place of."""
        command = self._machine.command("sh", "-c", f"exec {line}")
        with self.log_path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, cwd=self.folder, stderr=log
            )


async def test_first_heartbeat_of_a_site_after_the_commands_of_the_readme(
    tmp_path, machines, capsys
):
    """The README's commands end with a participant that the coordinator has accepted, over mTLS
    between two machines. The time is printed."""
    section = README.read_text(encoding="utf-8").partition("## Train on your own tables")[2]
    first = commands_of(section)[:5]
    assert [line.split()[1] for line in first[:2]] == ["certs", "tokens"]
    there, here = (tmp_path / name for name in ("coordinator", "site"))
    coordinator, site = machines
    programs = []

    async def type_(machine: Machine, folder: Path, line: str) -> Typed:
        line = line.replace("coordinator.example.org", coordinator.address)
        program = Typed(folder, machine, f"{len(programs)}")
        programs.append(program)
        await program.begin(re.sub(r"^\.venv/bin", str(BIN), line))
        return program

    try:
        began = time.monotonic()
        for line in first[:2]:
            command = await type_(coordinator, there, line)
            assert await command.died() == 0, command.log()
        running = await type_(coordinator, there, first[2])
        await running.until_logged('"coordinator_serving"')
        # The token is sent by other means.
        here.mkdir()
        (there / "ward-7.token").rename(here / "ward-7.token")
        (here / "patients.csv").write_text(f"age,dose,outcome\n{ROWS}")
        joined = await type_(site, here, first[3])
        assert await joined.died() == 0, joined.log()
        participant = await type_(site, here, first[4])
        await running.until_logged('"participant_joined"')
        needed_s = time.monotonic() - began
        assert participant.status is None, participant.log()
        status = [str(BIN / "xain-coordinator"), "status", "--data-dir=wards", "--json"]
        asked = await asyncio.create_subprocess_exec(
            *coordinator.command(*status), cwd=there, stdout=asyncio.subprocess.PIPE
        )
        told, _ = await asked.communicate()
        (one,) = json.loads(told)["participants"]
        assert one["participant_id"] == "ward-7"
    finally:
        for program in programs:
            await program.end()
    with capsys.disabled():
        sys.stdout.write(f"\naccepted {needed_s:.1f} s after the first command\n")
