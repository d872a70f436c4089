"""Points on their way to a store: a bounded queue, and the one thread that empties it."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from sys import getsizeof
from typing import Protocol

import structlog

from xain_coordinator.core.values import Point

log = structlog.get_logger(__name__)

# Whichever is reached first: a point takes 1 KB as a rule, and 260 KB with the longest text.
MAX_WAITING = 10_000
MAX_WAITING_BYTES = 32 * 1024 * 1024
# A batch that is being written is in memory a second time, as lines.
MAX_BATCH_BYTES = 4 * 1024 * 1024
CLOSE_TIMEOUT_S = 5.0

Stamped = tuple[int, Point]  # nanoseconds since 1970

_POINT_BYTES = 200  # without what it holds: the Point, its tuples, its time


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of writing a batch.

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


def cost(point: Point) -> int:
    """Bytes of memory that the point takes, roughly; what it shares with others counts for each."""
    try:
        texts = chain(point.fields.items(), point.tags.items())
        dicts = getsizeof(point.fields) + getsizeof(point.tags)
        return (
            _POINT_BYTES + dicts + sum(getsizeof(name) + getsizeof(value) for name, value in texts)
        )
    except AttributeError:  # no point after all, which the writer will find
        return _POINT_BYTES


class _Waiting:
    """Points, oldest first, and what they cost."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, Stamped]] = deque()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._points)

    def append(self, points: Iterable[tuple[int, Stamped]]) -> None:
        for size, stamped in points:
            self._points.append((size, stamped))
            self.num_bytes += size

    def put_back(self, points: Sequence[tuple[int, Stamped]]) -> None:
        for size, stamped in reversed(points):
            self._points.appendleft((size, stamped))
            self.num_bytes += size

    def pop(self) -> Stamped:
        size, stamped = self._points.popleft()
        self.num_bytes -= size
        return stamped

    def batch(self, max_points: int, max_bytes: int) -> list[Stamped]:
        """Take a batch: at least one point, if there is one."""
        taken: list[Stamped] = []
        room = max_bytes
        while self._points and len(taken) < max_points:
            room -= self._points[0][0]
            if taken and room < 0:
                break
            taken.append(self.pop())
        return taken

    def clear(self) -> None:
        self._points.clear()
        self.num_bytes = 0


class QueuedMetrics:
    """A MetricsStore whose writer works in a thread of its own, so that it holds nobody up.

    wall_ns: the time for points that have none.
    batch: points that are written together, at most; fewer if they are large.
    linger_s: how long a point waits for others to be written with. Points come in bursts; waking
        up for each would take the interpreter away from the very round that they tell of.
    max_waiting: points that may wait, if they take no more than MAX_WAITING_BYTES; of more, the
        oldest are lost, and counted. Who looks at a series wants to know the present first.
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
        self._waiting = _Waiting()
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
        stamped = [
            (cost(point), (now if point.at_ns is None else point.at_ns, point)) for point in points
        ]
        with self._changed:
            if self._closing.is_set():
                self._num_lost += len(stamped)
                return
            was_waiting = bool(self._waiting)
            self._waiting.append(stamped)
            self._lose_oldest()
            if not was_waiting or self._is_full():
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
        """Never all: the thread takes an empty queue for the end."""
        while len(self._waiting) > 1 and (
            len(self._waiting) > self._max_waiting or self._waiting.num_bytes > MAX_WAITING_BYTES
        ):
            self._waiting.pop()
            self._num_lost += 1

    def _is_full(self) -> bool:
        """A batch is complete and need not wait."""
        return len(self._waiting) >= self._batch or self._waiting.num_bytes >= MAX_BATCH_BYTES

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
                lambda: self._closing.is_set() or self._is_full(), timeout=self._linger_s
            )
            batch = self._waiting.batch(self._batch, MAX_BATCH_BYTES)
            self._num_in_hand = len(batch)
            return batch

    def _write(self, batch: Sequence[Stamped]) -> Outcome:
        try:
            return self._writer.write(batch)
        except Exception:  # a defect of ours; it may cost these points, but not all that follow
            log.exception("metrics_crashed", points=len(batch))
            return Outcome(num_lost=len(batch))

    def _settle(self, outcome: Outcome) -> None:
        rest = [(cost(stamped[1]), stamped) for stamped in outcome.rest]
        with self._changed:
            if self._abandoned:  # close() has counted the batch
                return
            self._num_in_hand = 0
            self._num_lost += outcome.num_lost
            self._waiting.put_back(rest)
            self._lose_oldest()

    def _wait(self, retry_s: float) -> bool:
        """Whether to try again. At the end there is one more try, and further ones while their
        time comes before the deadline."""
        if not self._closing.is_set():
            self._closing.wait(retry_s)
            return True
        if retry_s > self._deadline - time.monotonic():
            return False
        time.sleep(retry_s)  # nothing can come in any more that would be worth waking up for
        return True
