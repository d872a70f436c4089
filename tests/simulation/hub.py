"""Virtual time: what happens next, and to whom.

Everything that happens is a step: a callback at an instant. Steps of one instant happen in the
order in which they were asked for. A step belongs to a process, and none of a process that has been
killed ever happens.
"""

import heapq
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from random import Random
from typing import Any

# A run takes a few thousand, and seldom fifty thousand. What needs more makes no progress.
MAX_STEPS = 200_000
# What is kept of the past, for a report.
NUM_LINES_KEPT = 60


class Violation(AssertionError):
    """Something happened that must never happen."""


class Killed(BaseException):
    """Raised in code of a killed process, from any call that blocks or asks."""


class Process:
    """A process of an operating system: it can be killed at any step, and in the middle of one
    wherever it reads or writes.

    on_kill: ends what belongs to it. steps_left, io_left: until it is killed, None: it is not.
    excuse: what it may end for by itself. is_paused: its steps wait until it goes on.
    clock_rate: seconds that its clocks count in a second.
    """

    def __init__(self, name: str, clock_rate: float = 1.0) -> None:
        self.name = name
        self.clock_rate = clock_rate
        self.is_alive = True
        self.steps_left: int | None = None
        self.io_left: int | None = None
        self.excuse = ""
        self.is_paused = False
        self.waiting: list[Callable[[], Any]] = []
        self.on_kill: Callable[[], None] = lambda: None

    def kill(self) -> None:
        """Kill the process at once, without a word."""
        if self.is_alive:
            self.is_alive = False
            self.on_kill()

    def touch(self) -> None:
        """Called before and after each thing that it does to the outside. Raises Killed."""
        if not self.is_alive:
            raise Killed
        if self.io_left is not None:
            self.io_left -= 1
            if self.io_left < 0:
                self.kill()
                raise Killed


class Step:
    """Something that is going to happen, unless it is cancelled."""

    __slots__ = ("call", "process")

    def __init__(self, process: Process | None, call: Callable[[], Any]) -> None:
        self.process = process
        self.call: Callable[[], Any] | None = call

    def cancel(self) -> None:
        self.call = None


class Trace:
    """Events, line by line; all of them go into a digest, the latest lines are kept.

    show: for each line as it comes.
    """

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self.latest: deque[str] = deque(maxlen=NUM_LINES_KEPT)
        self.num_lines = 0
        self._digest = blake2b(digest_size=16)
        self._show = show

    def add(self, now: float, source: str, text: str) -> None:
        line = f"{now:12.6f}  {source:<8}  {text}"
        self.num_lines += 1
        self.latest.append(line)
        self._digest.update(line.encode())
        if self._show is not None:
            self._show(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


class Hub:
    """The clock and the list of what is to come.

    chance: of everything that is left to it. after_step: looks whether all is well.
    """

    def __init__(self, chance: Random, trace: Trace) -> None:
        self.now = 0.0
        self.num_steps = 0
        self.chance = chance
        self.trace = trace
        self.running: Process | None = None  # whose step it is
        self.after_step: Callable[[Process | None], None] = lambda process: None
        self._later: list[tuple[float, int, Step]] = []
        self._soon: deque[Step] = deque()
        self._num_asked = 0
        self._burials: list[Callable[[], None]] = []
        self._failure: str | None = None

    def note(self, source: str, text: str) -> None:
        self.trace.add(self.now, source, text)

    def fail(self, text: str) -> None:
        """Note an event that must never happen. From anywhere, also where an exception would be
        caught; the run ends after this step."""
        if self._failure is None:
            self._failure = text
            self.note("oracle", text)

    def bury_after_step(self, call: Callable[[], None]) -> None:
        """Clear away what is left of a dead process, when nothing of it runs any more, and before
        any other step."""
        self._burials.append(call)

    def soon(self, process: Process | None, call: Callable[[], Any]) -> Step:
        """Run at this very instant, after earlier calls."""
        step = Step(process, call)
        self._soon.append(step)
        return step

    def after(self, delay_s: float, process: Process | None, call: Callable[[], Any]) -> Step:
        return self.at(self.now + delay_s, process, call)

    def at(self, when: float, process: Process | None, call: Callable[[], Any]) -> Step:
        step = Step(process, call)
        self._num_asked += 1
        heapq.heappush(self._later, (max(when, self.now), self._num_asked, step))
        return step

    def go_on(self, process: Process) -> None:
        """Resume a paused process."""
        process.is_paused = False
        waiting, process.waiting = process.waiting, []
        for call in waiting:
            self.soon(process, call)

    def run(self, is_over: Callable[[], bool], until: float) -> bool:
        """Take steps until it is over; False if there is no step left, or none before `until`.

        Raises Violation, also where the steps go on and on.
        """
        soon, later = self._soon, self._later
        while not is_over():
            if soon:
                step = soon.popleft()
            elif later and later[0][0] <= until:
                when, _, step = heapq.heappop(later)
                self.now = when
            else:
                return False
            call, process = step.call, step.process
            if call is None or (process is not None and not process.is_alive):
                continue
            if process is not None and process.is_paused:
                process.waiting.append(call)
                continue
            self.num_steps += 1
            self.running = process
            if self.num_steps > MAX_STEPS:
                raise Violation(f"{MAX_STEPS} steps were taken, and there is no end to them")
            call()
            if process is not None and process.steps_left is not None and process.is_alive:
                process.steps_left -= 1
                if process.steps_left < 0:
                    process.kill()
            while self._burials:
                self._burials.pop()()
            self.after_step(process)
            if self._failure is not None:
                raise Violation(self._failure)
        return True

    def check(self) -> None:
        """Raises Violation if something has failed since the last step."""
        if self._failure is not None:
            raise Violation(self._failure)

    def bury(self) -> None:
        """The end: nothing happens any more, but that dead processes are cleared away."""
        self.running = None
        while self._burials:
            self._burials.pop()()
        self._soon.clear()
        self._later.clear()
