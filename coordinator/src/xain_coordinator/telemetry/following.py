"""Telling trackers of the rounds of a session, each tracker in a thread of its own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from xain_coordinator.telemetry.trackers import Position, Tracker
from xain_foundation.logs.group_commit import GroupCommit
from xain_foundation.logs.logger import get_logger
from xain_foundation.net.backoff import Backoff

log = get_logger(__name__)

MAX_WAITING: Final = 10_000  # rounds; as many as the history of a session has
CLOSE_S: Final = (
    5.0  # how long the end waits for a tracker, which hears of the rest at the next start
)
FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class TrackedRound:
    """See trackers.Round."""

    session: str
    round: int
    model: int
    samples: int
    num_updates: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrackedEnd:
    """See trackers.End."""

    session: str
    model: int
    cause: str
    metrics: Mapping[str, float] = field(default_factory=dict)


class Follower:
    """Tells a tracker of each round of one session, in their order, from the first that it has not
    taken on. A round that it does not take is told again after a wait, and those behind it wait.

    name: of the tracker, for the log. position: of the tracker, which is moved when a call has
        returned: a kill between two rounds has no round told twice, and loses none.
    """

    first_wait_s = 1.0  # after it a call that failed is made again, then after twice as long
    longest_wait_s = 60.0
    close_timeout_s = 5.0  # the next start tells the tracker of the rest

    def __init__(self, name: str, tracker: Tracker, position: Position, session_id: str) -> None:
        self._name = name
        self._tracker = tracker
        self._position = position
        self._session_id = session_id
        self._taken = position.taken(session_id)
        self._has_ended = position.has_ended(session_id)
        self._has_given_up = False
        self._queue: GroupCommit[TrackedRound | TrackedEnd] = GroupCommit(
            self._tell_all, name=f"tracker-{name}", max_waiting=MAX_WAITING
        )

    def tell(self, told: TrackedRound | TrackedEnd) -> None:
        """Have the tracker take a round, or the end, soon. Does not wait."""
        self._queue.put(told)

    def close(self) -> None:
        """Wait for what was told, for close_timeout_s at most."""
        self._queue.close(self.close_timeout_s)

    def _tell_all(self, group: list[TrackedRound | TrackedEnd]) -> int:
        """Tell the tracker of a group in its order. Returns the number of those that are left
        untold."""
        for index, told in enumerate(group):
            if not self._is_taken(told) and not self._tell(told):
                return len(group) - index
        return 0

    def _is_taken(self, told: TrackedRound | TrackedEnd) -> bool:
        """Whether the tracker has taken this round, or the end, before."""
        if isinstance(told, TrackedEnd):
            return self._has_ended
        return told.round <= self._taken

    def _tell(self, told: TrackedRound | TrackedEnd) -> bool:
        """Call the tracker until it has taken a round, or the end. Returns whether it has; the rest
        is left to the next start where the process ends before."""
        backoff = Backoff(self.first_wait_s, self.longest_wait_s)
        while not self._has_given_up:
            try:
                self._call(told)
            except Exception as error:  # another's program, and its server
                if not backoff.has_failed:
                    self._warn(error)
            else:
                self._note(told)
                return True
            self._has_given_up = self._queue.closing.wait(backoff.next_s())
        return False

    def _call(self, told: TrackedRound | TrackedEnd) -> None:
        """Call the tracker with a round, or with the end. Raises what it raises."""
        if isinstance(told, TrackedEnd):
            self._tracker.on_end(told)
        else:
            self._tracker.on_round(told)

    def _note(self, told: TrackedRound | TrackedEnd) -> None:
        """Note, in the position file too, that the tracker has taken a round or the end."""
        if isinstance(told, TrackedEnd):
            self._has_ended = True
        else:
            self._taken = told.round
        try:
            self._position.take(self._session_id, self._taken, is_end=self._has_ended)
        except OSError as error:  # after a restart the tracker may be told again
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        """Log that the tracker, or noting its position, has failed."""
        log.warning("tracker_failed", tracker=self._name, round=self._taken + 1, error=str(error))
