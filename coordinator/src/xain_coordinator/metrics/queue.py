"""Points on their way to a store: a bounded queue, and the one thread that empties it."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from xain_coordinator.core.values import Point

log = structlog.get_logger(__name__)

MAX_WAITING = 10_000
CLOSE_TIMEOUT_S = 5.0

Stamped = tuple[int, Point]  # nanoseconds since 1970


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a batch.

    num_lost: points that can never be written.
    rest: points to try again, oldest first, retry_s from now.
    """

    num_lost: int = 0
    rest: Sequence[Stamped] = ()
    retry_s: float = 0.0


class Writer(Protocol):
    """Writes batches. All methods are called from one thread; they may take their time."""

    def write(self, batch: Sequence[Stamped]) -> Outcome: ...

    def close(self) -> None:
        """Nothing more will be written."""


class QueuedMetrics:
    """A MetricsStore whose writer works in a thread of its own, so that it holds nobody up.

    wall_ns: the time for points that have none.
    batch: points that are written together, at most.
    linger_s: how long a point waits for others to be written with. Points come in bursts; waking
        up for each would take the interpreter away from the very round that they tell of.
    max_waiting: points that may wait; of more, the oldest are lost, and counted. Who looks at a
        series wants to know the present first.
    """

    def __init__(
        self,
        writer: Writer,
        wall_ns: Callable[[], int],
        *,
        batch: int,
        linger_s: float,
        max_waiting: int,
    ) -> None:
        self._writer = writer
        self._wall_ns = wall_ns
        self._batch = batch
        self._linger_s = linger_s
        self._max_waiting = max_waiting
        self._waiting: deque[Stamped] = deque()
        self._num_in_hand = 0  # with the writer
        self._num_lost = 0
        self._closing = threading.Event()
        self._deadline = 0.0
        self._abandoned = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        return self._num_lost

    def write(self, points: Sequence[Point]) -> None:
        now = self._wall_ns()
        stamped = [(now if point.at_ns is None else point.at_ns, point) for point in points]
        with self._changed:
            if self._closing.is_set():
                self._num_lost += len(stamped)
                return
            was_waiting = bool(self._waiting)
            self._waiting += stamped
            self._lose_oldest()
            if not was_waiting or len(self._waiting) >= self._batch:
                self._changed.notify()

    def close(self) -> None:
        """Waits at most CLOSE_TIMEOUT_S; what is not known to be written then is lost."""
        with self._changed:
            if not self._closing.is_set():
                self._deadline = time.monotonic() + CLOSE_TIMEOUT_S
                self._closing.set()
            self._changed.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        with self._changed:
            self._abandoned = True
            num_lost = len(self._waiting) + self._num_in_hand
            self._waiting.clear()
            self._num_in_hand = 0
            self._num_lost += num_lost
        if num_lost:
            log.warning("metrics_lost", points=num_lost, in_all=self._num_lost)

    def _lose_oldest(self) -> None:
        while len(self._waiting) > self._max_waiting:
            self._waiting.popleft()
            self._num_lost += 1

    # --- the thread ---

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                outcome = self._write(batch)
                self._settle(outcome)
                if outcome.retry_s > 0 and not self._wait(outcome.retry_s):
                    break
        finally:
            self._writer.close()

    def _next_batch(self) -> list[Stamped]:
        """Waits for points; empty only at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
            self._changed.wait_for(
                lambda: self._closing.is_set() or len(self._waiting) >= self._batch,
                timeout=self._linger_s,
            )
            self._num_in_hand = min(len(self._waiting), self._batch)
            return [self._waiting.popleft() for _ in range(self._num_in_hand)]

    def _write(self, batch: Sequence[Stamped]) -> Outcome:
        try:
            return self._writer.write(batch)
        except Exception:  # a defect of ours; it may cost these points, but not all that follow
            log.exception("metrics_crashed", points=len(batch))
            return Outcome(num_lost=len(batch))

    def _settle(self, outcome: Outcome) -> None:
        with self._changed:
            if self._abandoned:  # close() has counted the batch
                return
            self._num_in_hand = 0
            self._num_lost += outcome.num_lost
            self._waiting.extendleft(reversed(outcome.rest))
            self._lose_oldest()

    def _wait(self, retry_s: float) -> bool:
        """Whether to try again. At the end there is one more try, and further ones while their
        time comes before the deadline."""
        if not self._closing.is_set():
            self._closing.wait(retry_s)
            return True
        if retry_s > self._deadline - time.monotonic():
            return False
        time.sleep(retry_s)
        return True
