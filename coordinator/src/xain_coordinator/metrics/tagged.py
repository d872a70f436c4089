"""Points that carry the id of their session."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from xain_coordinator.core.values import Point
from xain_coordinator.ports import MetricsStore


class TaggedMetrics:
    """A metrics store that adds the same tags to every point.

    As a tag, because every question about a series is about one session, and a database looks tags
    up in an index: a session adds one series for each participant and field.
    """

    def __init__(self, metrics: MetricsStore, tags: Mapping[str, str]) -> None:
        self._metrics = metrics
        self._tags = dict(tags)

    @property
    def num_lost(self) -> int:
        return self._metrics.num_lost

    def write(self, points: Sequence[Point]) -> None:
        tagged = [replace(point, tags={**point.tags, **self._tags}) for point in points]
        self._metrics.write(tagged)

    def close(self) -> None:
        self._metrics.close()
