"""Members that are gone, and since when: what says that others wait for a worker no longer."""

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Absences(Generic[Key]):
    """Processes that are awaited and no members.

    A membership lasts for `lease_s` after the last sign of life, so that a process is dead
    `worker_lease_s` after that sign. Times are seconds on any clock that does not go back.
    """

    def __init__(self, lease_s: float, worker_lease_s: float) -> None:
        self._extra_s = max(0.0, worker_lease_s - lease_s)
        self._since: dict[Key, float] = {}

    def dead(
        self, now: float, awaited: Mapping[Key, tuple[str, int]], members: Mapping[str, int]
    ) -> list[Key]:
        """Return the awaited processes that are dead by now; each is told again until it is
        awaited no more.

        awaited: name and incarnation of each process. members: the incarnation of each name.
        """
        self._since = {
            key: self._since.get(key, now)
            for key, (name, incarnation) in awaited.items()
            if members.get(name) != incarnation
        }
        return [key for key, since in self._since.items() if since + self._extra_s <= now]

    def next_due(self, now: float) -> float | None:
        """When the next process will be dead; None: none is gone."""
        due = (since + self._extra_s for since in self._since.values())
        return min((at for at in due if at > now), default=None)
