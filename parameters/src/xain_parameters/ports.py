"""The scheduler as the client uses it."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from xain_parameters.specs import TableSpec, View


class Progress(NamedTuple):
    """The position of a worker in its loop over clocks.

    clock: the clock that it may begin. opened: all pushes of clocks below count by now.
    cut: the checkpoint that is being made, whose mark the worker has to pass; 0: none.
    generation: the group's. A clock of another generation is over, and its pushes are dropped.
    """

    clock: int
    opened: int
    cut: int
    generation: int


class Scheduler(Protocol):
    """The scheduler as one worker sees it, from any thread.

    worker: the name. incarnation: tells the processes of that name apart.
    opened: generation and clock; all pushes of clocks below counted when this worker connected.
    view: the newest that has come. A call with a timeout_s raises Unavailable after it; begin,
    tick and wait_opened have none, and log what they wait for. Any call raises Evicted.
    """

    @property
    def worker(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def opened(self) -> tuple[int, int]: ...

    def opened_now(self, timeout_s: float) -> tuple[int, int]:
        """Generation and clock, asked for now."""
        ...

    def wait_opened(
        self, clock: int, generation: int, is_over: Callable[[], bool]
    ) -> tuple[int, int]:
        """Generation and clock, once all pushes below `clock` count; at once if the generation is
        another. is_over: asked while it waits; True: Closed is raised."""
        ...

    @property
    def view(self) -> View: ...

    def newer_view(self, version: tuple[int, int], timeout_s: float) -> View:
        """The newest view: as soon as it is above `version`, or after timeout_s as it is then."""
        ...

    def declare(self, table: TableSpec, timeout_s: float) -> TableSpec:
        """The table with its number; the view has it. Raises TableConflict, Invalid."""
        ...

    def begin(
        self, staleness: int | None, num_workers: int, is_over: Callable[[], bool]
    ) -> Progress:
        """Begin a loop over clocks; waits until the first one may begin.

        num_workers: wait for as many. is_over: asked while it waits; True: Closed is raised.
        """
        ...

    def tick(self, clock: int, generation: int, is_over: Callable[[], bool]) -> Progress:
        """Complete a clock, and wait until the next one may begin, which is an earlier one after a
        rollback."""
        ...

    def end(self) -> None:
        """End the loop over clocks: nobody waits for this worker any more."""
        ...

    def checkpoint(self, timeout_s: float) -> int:
        """Make a checkpoint; returns its number when it is whole."""
        ...

    def close(self) -> None: ...
