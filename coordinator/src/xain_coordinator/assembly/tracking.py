"""Trackers that follow a session: they hear of what the journal has, and of all of it."""

import contextlib
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.view.records import RoundRecord
from xain_coordinator.core.vocabulary.errors import Unavailable
from xain_coordinator.core.vocabulary.values import Phase, Task
from xain_coordinator.driver.driver import Driver
from xain_coordinator.extensions import plugins
from xain_coordinator.extensions.options import WrongOption, make_named
from xain_coordinator.telemetry.following import Follower, TrackedEnd, TrackedRound
from xain_coordinator.telemetry.trackers import METHODS, TRACKERS, Position, Tracker
from xain_foundation.exit_statuses import CannotStart, CommandFailed


class Tracking:
    """Followers of a session.

    names: of trackers. folder: of those that keep files. journal: beside which each has its
        position.
    Raises PluginFailed.
    """

    def __init__(self, names: Sequence[str], folder: Path, journal: Path, session_id: str) -> None:
        """Make the trackers and their followers. Raises CannotStart and PluginFailed."""
        made = [(name, _made(name, folder)) for name in names]
        self._followers = [
            Follower(
                name, tracker, Position(journal.with_suffix(f".tracked-{name}.json")), session_id
            )
            for name, tracker in made
        ]
        self._last = -1  # number of the last round that the followers were told
        self._seen: tuple[int, Phase, tuple[int, ...]] | None = None
        self._has_ended = False

    async def watch(self, driver: Driver) -> None:
        """Tell the followers of each round when it is over, until the driver stops."""
        with contextlib.suppress(Unavailable):
            while not self._has_ended:
                self._look(driver)
                await driver.wait_for_change()

    def finish(self, driver: Driver) -> None:
        """Tell the followers of what has come since the last look, and wait for them, for a while.
        Blocks."""
        if self._seen is not None:  # else the start has failed, and another one may own the session
            self._look(driver)
        for one in self._followers:
            one.close()

    def _look(self, driver: Driver) -> None:
        """Tell the followers of rounds that are over and not told yet, and of the session's end.
        Does nothing if neither model, phase nor owed evaluations have changed."""
        session = driver.session
        # A round waits for the coordinator's own evaluation of its model.
        owed = tuple(model.round for model in session.evaluation.owed)
        # The history writes the names of a round that runs when it is asked for: not at each event.
        seen = -1 if session.model is None else session.model.round, session.phase, owed
        if not self._followers or self._has_ended or seen == self._seen:
            return
        self._seen = seen
        for record in self._new_records(driver.history.rounds):
            if record.seconds is None or record.round in owed:
                break
            self._last = record.round
            self._tell(_tracked(session.session_id, record, record.seconds))
        if session.phase is Phase.FINISHED:
            self._has_ended = True
            self._tell(_end(session, driver.history.rounds))

    def _new_records(self, rounds: Sequence[RoundRecord]) -> list[RoundRecord]:
        """Records of the rounds after the last one told, oldest first."""
        new = takewhile(lambda record: record.round > self._last, reversed(rounds))
        return [*new][::-1]

    def _tell(self, told: TrackedRound | TrackedEnd) -> None:
        """Have each follower tell its tracker, in a thread of its own."""
        for one in self._followers:
            one.tell(told)


def _tracked(session_id: str, record: RoundRecord, seconds: float) -> TrackedRound:
    """The figures of a round that followers are told; measures of the coordinator itself are named
    "coordinator/..."."""
    evaluation = dict(record.evaluation.metrics) if record.evaluation is not None else {}
    if record.coordinator_evaluation is not None:
        own = record.coordinator_evaluation.metrics
        evaluation |= {f"coordinator/{name}": value for name, value in own.items()}
    trains = record.task is Task.TRAIN
    return TrackedRound(
        session_id,
        record.round,
        record.round + trains,
        record.num_samples if trains else 0,
        record.num_contributors if trains else 0,
        seconds,
        record.metrics,
        evaluation,
    )


def _end(session: Session, records: Iterable[RoundRecord]) -> TrackedEnd:
    """The end of a session as followers are told of it: number of the last model, cause, metrics of
    the last training."""
    trained = [one for one in records if one.task is Task.TRAIN and one.seconds is not None]
    return TrackedEnd(
        session.session_id,
        -1 if session.model is None else session.model.round,
        session.cause,
        trained[-1].metrics if trained else {},
    )


def _made(name: str, folder: Path) -> Tracker:
    """The tracker of this name, one of ours or a plug-in's. Raises PluginFailed."""
    try:
        if name in TRACKERS:
            return TRACKERS[name](folder)
        kind: object = plugins.load(plugins.TRACKERS, name, {})
        made: Tracker = make_named(kind, "tracker", name, {}, METHODS)
        return made
    except KeyError:
        raise plugins.PluginFailed(f"the tracker {name!r} is not installed") from None
    except (CommandFailed, WrongOption) as error:
        raise CannotStart(f"metrics.trackers: {error}") from None
