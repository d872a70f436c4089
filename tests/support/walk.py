"""Way of one call through a coordinator: the functions of ours that run for it, and their folders.

    python tests/support/walk.py

Three members, no certificates, a model of two numbers; an update comes inside its call. What counts
is the functions that begin, or go on after an await, on the thread of the coordinator's event loop,
from the call to its answer. A folder is the first level below `xain_coordinator`, or another
distribution. A move is a function that begins in another folder than the function before it.
"""

import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from integration.conftest import config_for
from support.wire import Member, inside
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_wire.fl import coordinator_pb2 as pb

REPEATS = 9
NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class Walk:
    """files: of the functions of ours that ran, in order."""

    files: Sequence[Path]

    @property
    def folders(self) -> list[str]:
        """The folder of each function."""
        return [_folder(file) for file in self.files]

    @property
    def figures(self) -> dict[str, int]:
        """calls, moves, and how often `core/` is entered from another folder."""
        moves = [(one, other) for one, other in pairwise(("", *self.folders)) if one != other]
        return {
            "calls": len(self.files),
            "moves": len(moves) - 1,
            "core": sum(other == "core" for _, other in moves),
        }


def _folder(file: Path) -> str:
    parts = file.parts
    at = next(i for i, part in enumerate(parts) if part.startswith("xain"))
    if parts[-1].endswith("_pb2.py") or parts[at:][0] != "xain_coordinator":
        return parts[at]
    return parts[at + 1]


@contextmanager
def walked(walks: list[Walk]) -> Iterator[None]:
    """Note the way of what runs meanwhile."""
    files: list[Path] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "/src/xain" in name:
            files.append(Path(name.partition("/src/")[2]))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
    walks.append(Walk(files))


async def walk(folder: Path, repeats: int = REPEATS) -> dict[str, dict[str, float]]:
    """Medians of the figures of a heartbeat, of an update that leaves its round open, and of the
    update that closes it."""
    coordinator = SessionCoordinator(
        config_for(folder, rounds={"min_participants": len(NAMES), "rounds": repeats + 3})
    )
    await coordinator.start()
    members = [Member(coordinator.port, name) for name in NAMES]
    try:
        ways = await _ways(members, repeats)
    finally:
        for member in members:
            await member.close()
        await coordinator.stop()
    return {name: _medians(walks) for name, walks in ways.items()}


async def _ways(members: Sequence[Member], repeats: int) -> dict[str, list[Walk]]:
    ways: dict[str, list[Walk]] = {"heartbeat": [], "update": [], "last update": []}
    update = inside([1.0, 2.0])
    for member in members:
        await member.rendezvous()
    for number in range(repeats + 2):
        for member in members:
            await member.until(pb.ROUND, number)
        await members[0].heartbeat(pb.TRAINING, number)  # what it ended is over before the next
        calls: list[tuple[str, Awaitable[Any]]] = [
            ("heartbeat", members[0].heartbeat(pb.TRAINING, number)),
            ("first", members[0].end(update, round_=number)),
            ("update", members[1].end(update, round_=number)),
            ("last update", members[2].end(update, round_=number)),
        ]
        for name, call in calls:
            with walked([] if number < 2 or name == "first" else ways[name]):
                await call
    return ways


def _medians(walks: Sequence[Walk]) -> dict[str, float]:
    names = walks[0].figures
    return {name: statistics.median(walk.figures[name] for walk in walks) for name in names}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.stdout.write(f"{json.dumps(asyncio.run(walk(Path(scratch))))}\n")
