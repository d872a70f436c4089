"""Virtual time: what happens next, and to which process."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from random import Random

MAX_LINES = 60  # of the trace that a failure shows


class Violation(AssertionError):
    """Something happened that must never happen."""


class Clock:
    """A queue of steps. chance: of everything that is not decided by the code under test."""

    def __init__(self, chance: Random, show: Callable[[str], None] | None = None) -> None:
        self.chance = chance
        self.now = 0.0
        self.num_steps = 0
        self.latest: deque[str] = deque(maxlen=MAX_LINES)
        self._show = show
        self._queue: list[tuple[float, int, Process | None, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, process: "Process | None", step: Callable[[], None]) -> None:
        """process: a step of a dead one does not happen."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), process, step))

    def run(self, until: float, is_over: Callable[[], bool]) -> bool:
        while self._queue and self._queue[0][0] <= until:
            if is_over():
                return True
            self.now, _, process, step = heapq.heappop(self._queue)
            self.num_steps += 1
            if process is None or process.is_alive:
                step()
        return is_over()

    def note(self, name: str, text: str) -> None:
        line = f"{self.now:9.4f} {name:10} {text}"
        self.latest.append(line)
        if self._show is not None:
            self._show(line)

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.chance.random()


class Process:
    """A process of a node; a later process of the same name has a higher incarnation."""

    def __init__(self, clock: Clock, name: str, incarnation: int) -> None:
        self.clock = clock
        self.name = name
        self.incarnation = incarnation
        self.is_alive = True

    def after(self, seconds: float, step: Callable[[], None]) -> None:
        self.clock.after(seconds, self, step)

    def note(self, text: str) -> None:
        self.clock.note(f"{self.name}.{self.incarnation}", text)
