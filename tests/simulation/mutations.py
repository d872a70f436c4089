"""Defects, put into the code under test on purpose: what would come of forgetting something. Each
must be found by some seed; see test_mutations.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from simulation import oracle as oracle_module
from simulation.network import Noise
from simulation.scenario import Kind
from xain_coordinator.aggregation import engine
from xain_coordinator.aggregation.robust import distances
from xain_coordinator.core.machine import answers, decider, steps
from xain_coordinator.core.machine import evolve as evolve_module
from xain_coordinator.core.machine.needed import Needed
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts import control
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.rules import pacing
from xain_coordinator.core.rules.pacing import Buffer, Pacing, Quorum, WantedUpdates
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.commands import Command
from xain_coordinator.core.vocabulary.effects import Aggregate, Effect
from xain_coordinator.core.vocabulary.script import RoundConfig
from xain_coordinator.driver import driver as driver_module
from xain_coordinator.driver.driver import Driver
from xain_coordinator.driver.effects import StoreWorker
from xain_coordinator.journal import restore as restore_module
from xain_coordinator.ports import Journal, Record, Snapshot, Unfinished
from xain_coordinator.server.weights.downloads import Downloads
from xain_coordinator.updates.measured_upload import MeasuredUpload
from xain_coordinator.updates.measuring import Inspector
from xain_coordinator.upkeep import fence as fencing
from xain_coordinator.upkeep import retention
from xain_coordinator.upkeep.fence import Fence
from xain_coordinator.upkeep.retention import Retention
from xain_foundation.clock_table import ClockTable
from xain_participant.agent import protocol
from xain_participant.agent import work as work_module
from xain_participant.agent.protocol import Held, Protocol
from xain_participant.agent.work import Work
from xain_participant.keep.result import Result
from xain_participant.keep.versions import Versions
from xain_participant.sdk import events
from xain_participant.sdk.encoded import quantise
from xain_participant.wire.download import Download

Mutation = Callable[[], AbstractContextManager[Any]]

commit = Driver._commit
counted_after = control.counted_after
evolve = evolve_module.evolve
owed_work = decider._owed_work
restore = driver_module.restore
is_complete = pacing.is_complete
aggregate = StoreWorker._aggregate
expired = answers._expired
begin_protocol = Protocol.__init__
drop = Protocol._drop
joined = Protocol._on_joined
keep_result = Work._keep
pick_up = MeasuredUpload.pick_up
note_refused = answers._note_refused


async def _acknowledge_early(self: Driver) -> None:
    for decided in self._waiting:
        driver_module._resolve(decided.answer, decided.outcome)
    await commit(self)


async def _effects_early(self: Driver) -> None:
    for decided in self._waiting:
        now = [effect for effect in decided.effects if isinstance(effect, Aggregate)]
        decided.effects = [effect for effect in decided.effects if effect not in now]
        for effect in now:
            self._worker.perform(effect)
    await commit(self)


@contextmanager
def _take_again() -> Iterator[None]:
    """Nothing is known of the first one."""
    with (
        mock.patch.object(Session, "accepted", return_value=None),
        mock.patch.object(answers, "require_uncounted"),
    ):
        yield


def _count_twice(session: Session) -> tuple[Effect, ...]:
    """The first update once more."""
    return tuple(
        replace(effect, updates=(*effect.updates, effect.updates[0]), staleness=())
        if isinstance(effect, Aggregate)
        else effect
        for effect in owed_work(session)
    )


def _drop_one(session: Session) -> tuple[Effect, ...]:
    return tuple(
        replace(effect, updates=effect.updates[:-1], staleness=effect.staleness[:-1])
        if isinstance(effect, Aggregate) and len(effect.updates) > 1
        else effect
        for effect in owed_work(session)
    )


def _as_they_came(session: Session) -> tuple[Effect, ...]:
    """Updates in the order of acceptance, which is chance."""
    assert session.open_round is None or session.open_round.updates is not None
    order = list(session.open_round.updates) if session.open_round is not None else []
    return tuple(
        replace(
            effect,
            updates=tuple(sorted(effect.updates, key=lambda u: order.index(u.participant_id))),
        )
        if isinstance(effect, Aggregate) and not any(effect.staleness)
        else effect
        for effect in owed_work(session)
    )


def _expired_early(session: Session, now: float) -> Iterator[e.ParticipantLeft]:
    """A lease is as long as the interval of heartbeats, without the timeout."""
    return expired(session, now + session.rules.heartbeat_timeout_s)


def _without_lease_floor(session: Session, event: e.Event) -> Session:
    return session if isinstance(event, e.Restarted) else evolve(session, event)


def _pause_loses_updates(session: Session, event: e.Event) -> Session:
    session = evolve(session, event)
    if isinstance(event, e.RoundPaused) and session.open_round is not None:
        return replace(session, open_round=replace(session.open_round, updates={}))
    return session


def _selection_puts_off(session: Session, event: e.Event) -> Session:
    """The deadline of the round."""
    session = evolve(session, event)
    if isinstance(event, e.ParticipantsSelected) and session.open_round is not None:
        opened_at = session.open_round.opened_at + 3.0
        return replace(session, open_round=replace(session.open_round, opened_at=opened_at))
    return session


@contextmanager
def _evolve(mutant: Callable[[Session, e.Event], Session]) -> Iterator[None]:
    """Replace evolve() also where the oracle folds the journal, which must not rely on it."""
    with (
        mock.patch.object(evolve_module, "evolve", mutant),
        mock.patch.object(decider, "evolve", mutant),
        mock.patch.object(driver_module, "evolve", mutant),
        mock.patch.object(restore_module, "evolve", mutant),
        mock.patch.object(oracle_module, "evolve", mutant),
    ):
        yield


@contextmanager
def _without_deadlines() -> Iterator[None]:
    with (
        mock.patch.object(steps, "round_deadline", return_value=None),
        mock.patch.object(decider, "round_deadline", return_value=None),
    ):
        yield


def _complete_at_the_least(round_: Round, rule: Pacing) -> bool:
    return True


def _complete_without_quorum(round_: Round, rule: Pacing) -> bool:
    return is_complete(round_, WantedUpdates() if isinstance(rule, Quorum) else rule)


def _complete_without_buffer(round_: Round, rule: Pacing) -> bool:
    return is_complete(round_, replace(rule, size=1) if isinstance(rule, Buffer) else rule)


@contextmanager
def _without_closing_times() -> Iterator[None]:
    with (
        mock.patch.object(steps, "closing_time", return_value=None),
        mock.patch.object(decider, "closing_time", return_value=None),
    ):
        yield


def _select_no_more(num_connected: int, fraction: Fraction, over_selection: Fraction) -> int:
    return pacing.num_wanted(num_connected, fraction)


def _aggregate_and_drop(self: StoreWorker, effect: Aggregate) -> Command:
    """The updates are gone before the journal says that their model is there."""
    done = aggregate(self, effect)
    Retention(self._store, 0).drop(Needed(effect.round + 1, effect.round + 1))
    return done


def _need_the_newest(session: Session) -> Needed:
    """Nothing of those that are behind."""
    newest = 0 if session.model is None else session.model.round
    return Needed(newest, newest)


class _Short:
    """A journal that loses the first record behind a snapshot."""

    def __init__(self, journal: Journal) -> None:
        self.snapshot = journal.snapshot
        self._journal = journal

    def load(self, after: int = 0) -> Iterable[Record]:
        return self._journal.load(after + 1 if after else 0)


def _restore_too_little(journal: Any) -> tuple[Snapshot, int] | None:
    return restore(_Short(journal))


@contextmanager
def _session_time_starts_anew() -> Iterator[None]:
    opened = Driver.open.__func__

    def open_at_zero(cls: type[Driver], journal: Any, clock: Any, *rest: Any) -> Driver:
        return opened(cls, journal, lambda _: clock(0.0), *rest)

    with mock.patch.object(Driver, "open", classmethod(open_at_zero)):
        yield


def _overwrite(self: fencing._FencedUpload, *, overwrite: bool) -> None:
    self._upload.commit(overwrite=True)


def _forget_done(self: Protocol, round_: int, why: str) -> None:
    if self._held == round_:
        self._drop(why)


def _forget_result(self: Protocol, retry_after_s: float = 0.0) -> None:
    """A failure of the call costs the result."""
    self._drop("it could not be handed in")
    self._backing_off = False
    self._set_contact(0.0)


def _begin_empty(
    self: Protocol, chance: Random, held: Held | None = None, *, serve: bool = False
) -> None:
    begin_protocol(self, chance, serve=serve)


@contextmanager
def _forget_kept_results() -> Iterator[None]:
    """A process begins without its result, and does not look for it before it trains either."""
    with (
        mock.patch.object(Protocol, "__init__", _begin_empty),
        mock.patch.object(Work, "_kept", return_value=None),
    ):
        yield


@contextmanager
def _keep_what_was_trained() -> Iterator[None]:
    """The state directory gets the vector from before its encoding."""
    trained: dict[int, Any] = {}

    def remember(vector: Any, base: Any) -> Any:
        trained[id(base)] = vector.copy()
        return quantise(vector, base)

    def keep(self: Work, result: Result) -> bool:
        plain = trained.get(id(result.vector), result.vector)
        return keep_result(self, replace(result, vector=plain))

    with (
        mock.patch.object(work_module, "quantise", remember),
        mock.patch.object(Work, "_keep", keep),
    ):
        yield


def _the_first_five(session: Session) -> tuple[Effect, ...]:
    return tuple(
        replace(effect, updates=effect.updates[:5], staleness=effect.staleness[:5])
        if isinstance(effect, Aggregate)
        else effect
        for effect in owed_work(session)
    )


def _drop_unless_over(self: Protocol, why: str, *, invalid: bool = False) -> None:
    """A result stays when another round is open."""
    if not why.startswith("round "):
        drop(self, why, invalid=invalid)


def _joined_late(self: Protocol, event: events.Joined) -> None:
    """Heartbeats as late as a lease allows, if both clocks are right."""
    joined(self, event)
    self._heartbeat_interval_s *= 1.19


def _pick_up_as_sent(self: MeasuredUpload, unfinished: Unfinished) -> bool:
    is_good = pick_up(self, unfinished)
    self._is_picked_up = False
    return is_good


def _count(self: Inspector, elements: Any) -> None:
    self._num_elements += len(elements)


def _patch(target: Any, name: str, value: Any) -> Mutation:
    return partial(mock.patch.object, target, name, value)


# What each defect is, in the words of the decision page.
def _newest_version(versions: Versions, session_id: str, round_: int) -> bytes | None:
    return versions.load(session_id, 10**9)


def _lost_or_not(round_: Round, counted: Any, members: Any) -> Any:
    return counted_after(replace(round_, lost_control=False), counted, members)


MUTATIONS: Mapping[str, Mutation] = {
    "acknowledge before the commit": _patch(Driver, "_commit", _acknowledge_early),
    "run effects before the commit": _patch(Driver, "_commit", _effects_early),
    "never send a tick": _patch(Driver, "_arm", lambda self: None),
    "never let a lease run out": _patch(answers, "_expired", lambda session, now: ()),
    "let a lease run out early": _patch(answers, "_expired", _expired_early),
    "never close a round for its deadline": _without_deadlines,
    "put a deadline off when somebody is replaced": partial(_evolve, _selection_puts_off),
    "close a round at the minimum": _patch(steps, "is_complete", _complete_at_the_least),
    "ignore the quorum": _patch(steps, "is_complete", _complete_without_quorum),
    "let a pacing rule close no round": _without_closing_times,
    "make do with a buffer of one": _patch(steps, "is_complete", _complete_without_buffer),
    "wait for nobody who is too far behind": _patch(
        ClockTable, "admits", lambda table, clock: True
    ),
    "select no more than are wanted": _patch(steps, "num_selected", _select_no_more),
    "lose the updates of a round that is paused": partial(_evolve, _pause_loses_updates),
    "take a second update for a new one": _take_again,
    "count an update twice": _patch(decider, "_owed_work", _count_twice),
    "leave an update out": _patch(decider, "_owed_work", _drop_one),
    "aggregate in the order of arrival": _patch(decider, "_owed_work", _as_they_came),
    "forget the work that is owed after a restart": _patch(
        driver_module, "resume", lambda session: ()
    ),
    "let leases go on over a restart": _patch(driver_module, "evolve", _without_lease_floor),
    "begin session time anew at a restart": _session_time_starts_anew,
    "lose a record behind a snapshot": _patch(driver_module, "restore", _restore_too_little),
    "accept a small update without writing it": _patch(
        driver_module, "_objects", lambda records, update: {}
    ),
    "keep a part of a model that could not be read": _patch(
        Downloads, "_forget_failed_block", lambda self, offset, read: None
    ),
    "go on from the newest control variate": _patch(Versions, "of_round", _newest_version),
    "take each round for all sites": _patch(control, "share_of", lambda round_, counted: 1.0),
    "go on where a control variate is lost": _patch(control, "counted_after", _lost_or_not),
    "never look for a newer coordinator": _patch(Fence, "check", lambda self: None),
    "overwrite a published model": _patch(fencing._FencedUpload, "commit", _overwrite),
    "drop updates with the publication of their model": _patch(
        StoreWorker, "_aggregate", _aggregate_and_drop
    ),
    "drop updates that are behind": _patch(retention, "needed_by", _need_the_newest),
    "train again what was acknowledged": _patch(Protocol, "_note_over", _forget_done),
    "drop a result that could not be handed in": _patch(Protocol, "_back_off", _forget_result),
    "forget a kept result": _forget_kept_results,
    "keep a result from before its encoding": _keep_what_was_trained,
    "hold on to a result that a power cut has brought back": _patch(
        Protocol, "_drop", _drop_unless_over
    ),
    "never join again": _patch(Protocol, "_rejoin", lambda self: self._set_contact(1.0)),
    "leave clocks no room to drift": _patch(Protocol, "_on_joined", _joined_late),
    "blame the sender for what a power cut has spoilt": _patch(
        MeasuredUpload, "pick_up", _pick_up_as_sent
    ),
    "believe what a store has sent": _patch(Download, "check", lambda self: None),
    "take what is not finite": _patch(Inspector, "_scan", _count),
    "stay though every update is refused": _patch(protocol, "MAX_INVALID", 1_000_000),
    "leave nobody out": _patch(
        answers, "_note_refused", lambda session, command: note_refused(session, command)[:1]
    ),
    "select those who are left out": _patch(
        Session, "pool", property(lambda self: tuple(self.selection.unselected))
    ),
    "forget what an optimiser remembers": _patch(engine._Making, "_state", lambda self: {}),
    "clip nothing": _patch(distances, "_clipping", lambda norms, radius: np.ones_like(norms)),
    "aggregate five updates at most": _patch(decider, "_owed_work", _the_first_five),
    "let a script configure a round twice": _patch(
        answers, "require_configurable", lambda session, command: True
    ),
    "let a script evaluate a model twice": _patch(
        answers, "require_measurable", lambda session, command, evaluation: True
    ),
    "open a round that a script has not configured": _patch(
        Session, "waits_for_script", property(lambda self: False)
    ),
    "forget what a script has decided for a site": _patch(
        RoundConfig, "epochs_of", lambda config, participant_id, epochs: epochs
    ),
    "select those whom a script has not chosen": _patch(
        Session, "chosen_of", lambda self, participants: tuple(participants)
    ),
}

# The fault in which it shows, where that is a rare one; then every fault is of this kind. None: it
# shows where nothing goes wrong.
SHOWS_IN: Mapping[str, Kind | None] = {
    # This defect shows with every fault. With a slow disk a lease can begin before the end of the
    # one before is durable, and the oracle must tell the two apart.
    "let a lease run out early": Kind.SLOW_DISK,
    "keep a part of a model that could not be read": Kind.STORE_DOWN,
    "never look for a newer coordinator": Kind.OVERTAKE,
    "overwrite a published model": Kind.OVERTAKE,
    "drop updates with the publication of their model": Kind.KILL_COORDINATOR_IN_IO,
    "forget a kept result": Kind.KILL_PARTICIPANT,
    "keep a result from before its encoding": Kind.KILL_PARTICIPANT,
    "hold on to a result that a power cut has brought back": Kind.CUT_POWER_OF_PARTICIPANT,
    "never join again": Kind.FREEZE_PARTICIPANT,
    "leave clocks no room to drift": None,
    "blame the sender for what a power cut has spoilt": Kind.CUT_POWER,
}

# The weights' way in which it shows, where that is one of several, and a network that spoils them.
TRAVELS: Mapping[str, Mapping[str, Any]] = {
    "keep a part of a model that could not be read": {"is_inline": False, "is_direct": False},
    "blame the sender for what a power cut has spoilt": {
        "is_inline": False,
        "is_direct": False,
        "keeps_parts": True,
    },
    "believe what a store has sent": {
        "is_inline": False,
        "is_direct": True,
        "noise": Noise(lost=0.05),
    },
}

# The seed to begin with, where most plans do not show it: the search stays short.
FIRST_SEED: Mapping[str, int] = {
    "clip nothing": 10,
    "go on from the newest control variate": 160,
    "go on where a control variate is lost": 20,
    "ignore the quorum": 5,
    "leave clocks no room to drift": 18,
    "select those whom a script has not chosen": 100,
    "take each round for all sites": 9,
    "aggregate five updates at most": 16,
    "blame the sender for what a power cut has spoilt": 120,
    "drop updates that are behind": 1427,
    "forget the work that is owed after a restart": 30,
    "leave nobody out": 20,
    "let a pacing rule close no round": 186,
    "make do with a buffer of one": 20,
    "overwrite a published model": 437,
    "select no more than are wanted": 62,
    "select those who are left out": 3006,
    "stay though every update is refused": 12,
    "take a second update for a new one": 107,
    "take what is not finite": 12,
    "wait for nobody who is too far behind": 40,
}

# What is seen of each: a pattern of Failed.what.
SEEN: Mapping[str, str] = {
    "go on from the newest control variate": "the mean of all is",
    "take each round for all sites": "it should be",
    "go on where a control variate is lost": "was told that its variate",
    "acknowledge before the commit": "is not in the journal",
    "run effects before the commit": "before the journal asks for it|there are no weights under",
    "never send a tick": "there is no end",
    "never let a lease run out": "there is no end to them",
    "let a lease run out early": "has a lease until",
    "never close a round for its deadline": "its deadline was at|the limit is",
    "put a deadline off when somebody is replaced": "its deadline was at|the limit is",
    "close a round at the minimum": "RoundClosed does not follow: it is not complete",
    "ignore the quorum": "stays open, complete",
    "let a pacing rule close no round": "its pacing closes it at",
    "make do with a buffer of one": "RoundClosed does not follow: it is not complete",
    "wait for nobody who is too far behind": "RoundClosed does not follow: it is not complete",
    "select no more than are wanted": "RoundOpened does not follow: .* were selected, and not",
    "lose the updates of a round that is paused": "stays open, complete|were selected, and not",
    "take a second update for a new one": "counted twice|counts twice",
    "count an update twice": "the model of round",
    "leave an update out": "the model of round",
    "aggregate in the order of arrival": "the model of round",
    "forget the work that is owed after a restart": "there is no end",
    "let leases go on over a restart": "has a lease until",
    "begin session time anew at a restart": "session time went back",
    "lose a record behind a snapshot": "its journal folds to",
    "accept a small update without writing it": "is not durable",
    "keep a part of a model that could not be read": "there is no end",
    "never look for a newer coordinator": "was overtaken|before the journal asks for it",
    "overwrite a published model": "before the journal asks for it|is overwritten",
    "drop updates with the publication of their model": "is gone",
    "drop updates that are behind": "there are no weights under|is gone",
    "train again what was acknowledged": "again, which was acknowledged",
    "drop a result that could not be handed in": "twice in one life",
    "forget a kept result": "whose result it has kept",
    "keep a result from before its encoding": "was never trained",
    "hold on to a result that a power cut has brought back": "would be lost",
    "never join again": "there is no end",
    "leave clocks no room to drift": "was never away",
    "blame the sender for what a power cut has spoilt": "update_invalid",
    "believe what a store has sent": "a model that was never published",
    "take what is not finite": "was never trained",
    "stay though every update is refused": "there is no end",
    "leave nobody out": "are not left out",
    "select those who are left out": "are not all of|were selected, and not",
    "forget what an optimiser remembers": "the model of round",
    "clip nothing": "it should be near",
    "aggregate five updates at most": "the model of round",
    "let a script configure a round twice": "RoundConfigured does not follow",
    "let a script evaluate a model twice": "ScriptEvaluated does not follow",
    "open a round that a script has not configured": "its script has not configured it",
    "forget what a script has decided for a site": "epochs, and not",
    "select those whom a script has not chosen": "were selected, and not|are not all of",
}
