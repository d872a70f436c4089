"""The clock, threads and queues of the agent.

All waiting but that for the network goes through a queue, so another Runtime can decide when time
passes and which thread runs next.
"""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class Runtime:
    """Threads, queues and clock of an agent."""

    def now(self) -> float:
        """Monotonic time in seconds."""
        return time.monotonic()

    def queue(self) -> "SimpleQueue[Any]":
        """Make an empty queue between threads. Unbounded: its users bound what they put in."""
        return SimpleQueue()  # the only queue that a signal handler may put to

    def spawn(self, name: str, target: Callable[[], None]) -> threading.Thread:
        """Start a thread, which does not keep the process from ending."""
        # A daemon: the participant's own code cannot be interrupted, and must not keep the process.
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread
