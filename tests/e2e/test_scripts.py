"""Scripts with a loop over xain.rounds(), as processes: killed, interrupted, and with mistakes."""

import asyncio
import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from support.process import PATIENCE_S, CoordinatorProcess, Process

SCRIPT = Path(__file__).parents[1] / "support" / "script.py"
ROUNDS = 4

pytestmark = pytest.mark.frameworks


class Script(Process):
    """One script; its id and its book stay the same over restarts."""

    def __init__(self, folder: Path, coordinator: CoordinatorProcess, name: str = "a") -> None:
        super().__init__(folder, name)
        self.name = name
        self._coordinator = coordinator
        self._book = folder / f"{name}.book"

    async def start(self, *flags: str) -> None:
        command = [str(SCRIPT), self.target, self.name, str(self._book), *flags]
        self._process = await self.run(command)

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self._coordinator.port}"

    def book(self) -> list[tuple[int, int]]:
        """(round, rounds that its state counts) of each body that has begun."""
        if not self._book.exists():
            return []
        lines = self._book.read_text().splitlines()
        return [(int(line.split()[0]), int(line.split()[1])) for line in lines]

    async def until(self, found: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not found():
                assert self.status is None, self.log()
                await asyncio.sleep(0.01)  # a poll, not a race: it ends when it is found

    async def until_coordinator_says(self, event: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while event not in self._coordinator.log():  # noqa: ASYNC110  # a log has no event
                await asyncio.sleep(0.01)  # as above


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[CoordinatorProcess]:
    process = CoordinatorProcess(tmp_path, {"rounds.rounds": ROUNDS, "rounds.min_participants": 1})
    await process.start()
    yield process
    await process.end()


@pytest.fixture
async def script(tmp_path: Path, coordinator: CoordinatorProcess) -> AsyncIterator[Script]:
    script = Script(tmp_path, coordinator)
    yield script
    await script.end()


def accepted(folder: Path) -> Counter[int]:
    """Updates of each round that the journal has."""
    path = folder / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT body FROM record WHERE type = 'UpdateAccepted'").fetchall()
    return Counter(json.loads(text)["round"] for (text,) in rows)


@pytest.mark.parametrize("moment", ["body", "saved", "kept"])
async def test_killed_script_goes_on_with_the_state_of_its_round(
    script, coordinator, tmp_path, moment
):
    """A round that must be trained again begins with the state of the first time, and one whose
    result is kept is not trained again: the state counts every round once."""
    state = f"--state-dir={tmp_path / 'state'}"
    await script.start(state, f"--dies={moment}:2")
    assert await script.died() == -signal.SIGKILL
    await script.start(state, "--forks")
    assert await script.died() == 0, script.log()
    assert "fork" not in script.log(), "gRPC tells of each process that a data loader forks"
    book = script.book()
    numbers = [number for number, _ in book]
    assert numbers.count(2) == (1 if moment == "kept" else 2)
    assert all(count == number - numbers[0] for number, count in book)
    await coordinator.stop()
    assert set(accepted(tmp_path).values()) == {1}
    assert max(numbers) == ROUNDS - 1


@pytest.mark.parametrize("where", ["main", "thread"])
async def test_exception_ends_the_script_and_is_told(script, coordinator, where):
    """The script shows its own traceback, once, and the coordinator need not wait for the lease."""
    flags = ["--thread"] if where == "thread" else []
    await script.start("--raises=2", *flags)
    assert await script.died() == (1 if where == "main" else 0), script.log()
    log = script.log()
    assert log.count("Traceback") == 1, log
    assert "KeyError: 'no such column'" in log
    # Its text may tell of rows, so that it travels only if the participant allows it.
    await script.until_coordinator_says('"training_failed"')
    # Python keeps only an exception that has ended the main thread.
    await script.until_coordinator_says("KeyError" if where == "main" else "RoundAbandoned")
    await script.until_coordinator_says("participant_left")
    assert "no such column" not in coordinator.log()


GUEST = """
import gc, logging, signal, sys, threading

def state():
    root = logging.getLogger()
    return (
        [signal.getsignal(n) for n in signal.valid_signals()], sys.excepthook,
        threading.excepthook, root.level, root.handlers[:], root.filters[:], logging._srcfile,
        logging.logThreads, logging.logProcesses, gc.get_threshold(),
        gc.get_freeze_count(), gc.isenabled(), sys.getswitchinterval(),
    )

before = state()
import numpy as np
import xain, xain_messaging, xain_parameters, xain_participant

for round_ in xain.rounds(np.zeros(4, np.float32), coordinator=sys.argv[1], id=sys.argv[2]):
    assert state() == before
    round_.submit(round_.weights, samples=1)
assert state() == before
sys.stderr.write("over")
"""


@pytest.mark.real_exec  # objects of a forked process are frozen
async def test_script_keeps_the_settings_of_its_process(script, tmp_path):
    """Signal handlers, exception hooks, logging and garbage collection belong to the program that
    imports the SDK."""
    program = tmp_path / "guest.py"
    program.write_text(GUEST)
    script._process = await script.run([str(program), script.target, "a"])
    assert await script.died() == 0, script.log()
    assert script.log().endswith("over")


def test_import_is_quick():
    """No third party's module comes with it: what rounds() needs is imported when it is called."""
    code = "import sys; import xain; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"grpc", "numpy", "pydantic", "torch"} & set(done.stdout.split())
