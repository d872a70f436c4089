"""Bounded queue of metric points, and the one thread that writes them to a store."""

import threading
from collections.abc import Callable, Sequence
from itertools import chain
from sys import getsizeof
from typing import Protocol

from xain_coordinator.core.vocabulary.values import Point
from xain_foundation.logs.group_commit import GroupCommit
from xain_foundation.logs.logger import get_logger

log = get_logger(__name__)

# A point takes 1 KB as a rule, and 260 KB with the longest text.
MAX_WAITING_BYTES = 32 * 1024 * 1024

Stamped = tuple[int, Point]  # nanoseconds since 1970

_POINT_BYTES = 264  # without what it holds: the Point, its tuples, its time


class Writer(Protocol):
    """Writes batches. All methods are called from one thread."""

    def write(self, batch: Sequence[Stamped], closing: threading.Event) -> int:
        """Number of points that are lost. It may take its time until `closing` is set."""

    def close(self) -> None:
        """Release the writer's resources after its last write()."""


def cost(point: Point) -> int:
    """Bytes of memory that a point takes, roughly; what it shares with others counts for each."""
    try:
        fields, tags = point.fields, point.tags
        held = chain((fields, tags), fields, fields.values(), tags, tags.values())
        return _POINT_BYTES + sum(map(getsizeof, held))
    except AttributeError:  # no point after all, which the writer will find
        return _POINT_BYTES


class QueuedMetrics:
    """MetricsStore whose writer works in a thread of its own, so that calls never block.

    wall_ns: the time for points that have none.
    linger_s: how long a point waits for others to be written with. Points come in bursts; waking
        up for each would take the interpreter away from the very round that they tell of.
    max_waiting_bytes: of points that wait; of more, the oldest are lost, and counted. A reader of
        a series wants to know the present first.
    max_batch_bytes: of a batch; while it is written, it is in memory a second time, as lines.
    """

    close_timeout_s = 5.0

    def __init__(
        self,
        writer: Writer,
        wall_ns: Callable[[], int],
        *,
        linger_s: float,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        max_batch_bytes: int = 1024 * 1024,
    ) -> None:
        self._writer = writer
        self._wall_ns = wall_ns
        self._points: GroupCommit[Stamped] = GroupCommit(
            self._write,
            name="metrics",
            linger_s=linger_s,
            max_group=max_batch_bytes,
            max_waiting=max_waiting_bytes,
        )

    @property
    def num_lost(self) -> int:
        return self._points.num_lost

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            at_ns = self._wall_ns() if point.at_ns is None else point.at_ns
            self._points.put((at_ns, point), cost(point))

    def close(self) -> None:
        """Write what waits, for close_timeout_s at most; what is not known to be written then is
        lost."""
        before = self.num_lost
        if self._points.close(self.close_timeout_s):
            self._writer.close()
        if num_lost := self.num_lost - before:
            log.warning("metrics_lost", points=num_lost, in_all=self.num_lost)

    def _write(self, batch: list[Stamped]) -> int:
        """Write a batch. Returns the number of points that are lost."""
        return self._writer.write(batch, self._points.closing)
