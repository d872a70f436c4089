"""Threads on virtual time: each is a greenlet that runs until it waits for something.

Between two waits a thread is never interrupted, except by the death of its process, which it hears
of as Killed from whatever it waits in.
"""

from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import Generic, TypeVar

from greenlet import getcurrent, greenlet

from simulation.hub import Hub, Killed, Process, Step

T = TypeVar("T")

ROUNDING_S = 1e-9  # of a time that one clock tells and another one measures


class Thread(greenlet):
    """Runs `target`; the hub's own greenlet is where it returns to."""

    def __init__(self, hub: Hub, process: Process, name: str, target: Callable[[], None]) -> None:
        super().__init__(self._run_target, _hub_greenlet(getcurrent()))
        self.name = name
        self.is_over = False
        self._hub = hub
        self._process = process
        self._target = target
        self._timer: Step | None = None
        self._is_parked = True
        self._permit = False
        self._joining: list[Thread] = []
        hub.after(jitter_s(hub), process, lambda: self._resume(True))

    def _run_target(self, _: bool) -> None:
        try:
            self._target()
        except Killed:
            if self._process.is_alive:
                raise
        finally:
            self.is_over = True
            for other in self._joining:
                other.unpark()

    def now(self) -> float:
        """The time by the clock of the thread's process."""
        return self._hub.now * self._process.clock_rate

    def park(self, timeout_s: float | None = None) -> bool:
        """Wait until this thread is unparked; False if it was not in time. May return without
        a reason, as all such waits do. Only in the thread itself. Raises Killed."""
        if not self._process.is_alive:
            raise Killed
        if self._permit:
            self._permit = False
            return True
        if timeout_s is not None:
            after_s = timeout_s / self._process.clock_rate
            self._timer = self._hub.after(after_s, self._process, lambda: self._resume(False))
        self._is_parked = True
        woken: bool = _hub_greenlet(self).switch()
        if not self._process.is_alive:
            raise Killed
        return woken

    def unpark(self) -> None:
        if not self._is_parked:
            self._permit = True
            return
        self._is_parked = False
        self._cancel_timer()
        delay_s = jitter_s(self._hub)
        self._hub.after(delay_s, self._process, lambda: self.switch(True))

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, in another thread."""
        waiter = current()
        deadline = None if timeout is None else waiter.now() + timeout
        self._joining.append(waiter)
        while not self.is_over:
            left = None if deadline is None else deadline - waiter.now()
            if left is not None and left <= ROUNDING_S:
                break
            waiter.park(left)
        self._joining.remove(waiter)

    def bury(self) -> None:
        """End the thread, whose process is dead. Called in the hub's greenlet."""
        if self:  # begun, and not over
            self.throw(Killed)

    def _resume(self, woken: bool) -> None:
        if self._is_parked:
            self._is_parked = False
            self._cancel_timer()
            self.switch(woken)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def jitter_s(hub: Hub) -> float:
    """Seconds that an operating system takes to wake a thread."""
    return hub.chance.random() * 0.002


def current() -> Thread:
    running = getcurrent()
    assert isinstance(running, Thread), "only threads can wait"
    return running


def _hub_greenlet(running: greenlet) -> greenlet:
    """Where steps are taken: what has no parent is not a thread of ours."""
    while isinstance(running, Thread):
        assert running.parent is not None
        running = running.parent
    return running


def sleep(seconds: float) -> None:
    """In a thread, for that long by the clock of its process."""
    thread = current()
    until = thread.now() + seconds
    while (left := until - thread.now()) > ROUNDING_S:
        thread.park(left)


class Queue(Generic[T]):
    """Between threads of one process."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiting: list[Thread] = []

    def put(self, item: T) -> None:
        self._items.append(item)
        for thread in self._waiting:
            thread.unpark()

    def get(self, *, timeout: float | None = None) -> T:
        """Raises queue.Empty."""
        thread = current()
        deadline = None if timeout is None else thread.now() + timeout
        while not self._items:
            left = None if deadline is None else deadline - thread.now()
            if left is not None and left <= ROUNDING_S:
                raise Empty
            self._waiting.append(thread)
            try:
                thread.park(left)
            finally:
                self._waiting.remove(thread)
        return self._items.popleft()


class Runtime:
    """The machine that an agent runs on: the port of xain_participant.agent.runtime."""

    def __init__(self, hub: Hub, process: Process) -> None:
        self._hub = hub
        self._process = process
        self._threads: list[Thread] = []

    def now(self) -> float:
        return self._hub.now * self._process.clock_rate

    def queue(self) -> Queue[T]:
        return Queue()

    def spawn(self, name: str, target: Callable[[], None]) -> Thread:
        thread = Thread(self._hub, self._process, name, target)
        self._threads.append(thread)
        return thread

    def bury(self) -> None:
        """The process is dead: end its threads."""
        for thread in self._threads:
            thread.bury()
