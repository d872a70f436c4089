"""The clock, threads and queues of the agent.

All waiting but that for the network goes through a queue, so another Runtime can decide when time
passes and which thread runs next.
"""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Queue(Protocol[T]):
    """First-in-first-out queue between threads. Unbounded: its users bound what they put in."""

    def put(self, item: T) -> None:
        """Add an item without waiting, from any thread or signal handler."""
        ...

    def get(self, *, timeout: float | None = None) -> T:
        """Wait for an item, so many seconds; None: as long as it takes. Raises queue.Empty."""
        ...


class Task(Protocol):
    """A thread of the agent."""

    def join(self, timeout: float) -> None: ...


class Runtime(Protocol):
    """Threads, queues and clock of an agent."""

    def now(self) -> float:
        """Monotonic time in seconds."""
        ...

    def queue(self) -> Queue[Any]:
        """Make an empty queue."""
        ...

    def spawn(self, name: str, target: Callable[[], None]) -> Task:
        """Start a thread, which does not keep the process from ending."""
        ...


class Threads:
    """Runtime with real threads and the real clock."""

    def now(self) -> float:
        return time.monotonic()

    def queue(self) -> Queue[Any]:
        return SimpleQueue()  # the only queue that a signal handler may put to

    def spawn(self, name: str, target: Callable[[], None]) -> Task:
        # A daemon: the participant's own code cannot be interrupted, and must not keep the process.
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread
