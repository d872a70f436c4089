"""A session on a bench: commands go in at stated times, events, replies and effects are kept.

The bench does what the driver does, without I/O: it decides, keeps the durable events as a journal
would, evolves, and plays the outside when it is told to answer an effect. With every command it
also checks what must hold for all of them: decide is pure, a refusal changes nothing, and every
event follows the rules of pacing and selection as tests/oracle has them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pytest

from oracle.rounds import Rounds
from support.refusals import Why, is_refused
from xain_coordinator.core.machine.decider import Decision, decide, next_deadline, resume
from xain_coordinator.core.machine.evolve import begin, fold, open_session
from xain_coordinator.core.machine.questions import (
    AssignmentFor,
    MayUpload,
    Question,
    advertise,
    ask,
)
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.machine.strategy import Strategy
from xain_coordinator.core.parts.evaluation import EvaluationProgress
from xain_coordinator.core.rules.pacing import exact_fraction, num_required
from xain_coordinator.core.view.history import History
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.effects import (
    Aggregate,
    Effect,
    InitialiseModel,
    Notify,
    RecordMetrics,
)
from xain_coordinator.core.vocabulary.errors import InvalidUpdate, Refusal
from xain_coordinator.core.vocabulary.keys import model_key, update_key
from xain_coordinator.core.vocabulary.values import (
    DataProfile,
    GlobalModel,
    Layout,
    ParticipantState,
    Phase,
    Point,
    Rules,
    StoredWeights,
    WeightsRef,
)
from xain_wire.metadata import COMPLETED

HEARTBEAT_TIME_S = 10.0
HEARTBEAT_TIMEOUT_S = 5.0
LEASE_S = HEARTBEAT_TIME_S + HEARTBEAT_TIMEOUT_S
START_TIMEOUT_S = 60.0
DEADLINE_S = 100.0
IDLE_S = 400.0
SHAPE = (3,)

Owed = InitialiseModel | Aggregate
EventT = TypeVar("EventT")

TIMED: Mapping[str, Any] = {"deadline_s": DEADLINE_S, "idle_timeout_s": IDLE_S}

# The profile of each participant, unless a test is about that.
PROFILE = DataProfile(num_samples=10, num_features=4, classes=("no", "yes"))


def make_rules(
    *,
    rounds: int = 2,
    epochs: int = 5,
    min_participants: int = 1,
    fraction: float | str = 1.0,
    max_participants: int = 100,
    start_participants: int | None = None,
    controller: str = "ordered",
    seed: int = 7,
    initial: str = "workload",
    **pacing: Any,
) -> Rules:
    """Rules with N worked out as the configuration does it; start_participants defaults to N.

    pacing: the fields that have defaults.
    """
    exact = exact_fraction(fraction)
    required = num_required(min_participants, exact)
    assert initial in ("first", "empty", "workload")
    return Rules(
        rounds=rounds,
        epochs=epochs,
        min_participants=min_participants,
        fraction_participants=exact,
        num_required=required,
        max_participants=max_participants,
        start_participants=required if start_participants is None else start_participants,
        start_timeout_s=START_TIMEOUT_S,
        controller=controller,
        aggregation="weighted_average",
        seed=seed,
        heartbeat_time_s=HEARTBEAT_TIME_S,
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        initial=initial,  # type: ignore[arg-type]  # as asserted
        **pacing,
    )


def stored(
    key: str,
    digest: str = "good",
    *,
    shape: tuple[int, ...] = SHAPE,
    dtype: str = "float32",
    first_bad: int | None = None,
) -> StoredWeights:
    """An uploaded object as the store measured it."""
    return StoredWeights(WeightsRef(key, 128, digest), dtype, shape, first_bad)


def model_from(effect: Owed) -> GlobalModel:
    """The model that carrying out this effect gives; the same effect gives the same model."""
    match effect:
        case InitialiseModel(initial):
            shape = SHAPE if initial == "workload" else (0,)
            return GlobalModel(0, WeightsRef(model_key(0), 128, "initial"), "float32", shape)
        case Aggregate(round=number, updates=updates):
            first = updates[0].weights
            digest = "+".join(update.weights.ref.digest for update in updates)
            ref = WeightsRef(model_key(number + 1), 128, digest)
            layout, metadata = effect.base.layout, effect.base.metadata
            return GlobalModel(number + 1, ref, first.dtype, first.shape, layout, metadata)


def answer_to(effect: Owed) -> c.InitialisationDone | c.AggregationDone:
    """The command with which a carried-out effect comes back."""
    model = model_from(effect)
    if isinstance(effect, InitialiseModel):
        return c.InitialisationDone(model)
    return c.AggregationDone(model)


class Bench:
    """One session, its journal, and the work that it waits for."""

    def __init__(self, rules: Rules | None = None, *, answers: bool = True) -> None:
        self.now = 0.0
        self.answers = answers
        self.strategy: Strategy | None = None  # the one that the rules describe
        self.session, opened = open_session("s1", rules or make_rules(), self.now)
        self.journal: list[e.DurableEvent] = [opened]
        # The oracle follows sessions all of whose rules it knows.
        self.oracle = Rounds(opened) if opened.rules.aggregation != "assemble" else None
        self.owed: list[Owed] = []
        self.aggregates: list[Aggregate] = []
        self.points: list[Point] = []
        self.effects: tuple[Effect, ...] = ()

    # --- what the session looks like ---

    @property
    def phase(self) -> Phase:
        return self.session.phase

    @property
    def selected(self) -> tuple[str, ...]:
        """The selection of the open round; empty if none is open."""
        return self.session.open_round.selected if self.session.open_round else ()

    @property
    def outstanding(self) -> tuple[str, ...]:
        return self.session.open_round.outstanding if self.session.open_round else ()

    @property
    def connected(self) -> tuple[str, ...]:
        return tuple(self.session.members)

    @property
    def notified(self) -> bool:
        """Whether the last command woke the watchers."""
        return any(isinstance(effect, Notify) for effect in self.effects)

    @property
    def evaluation(self) -> EvaluationProgress:
        return self.session.evaluation

    @property
    def history(self) -> History:
        """The history that the journal tells."""
        history = History(rules=self.session.rules)
        for event in self.journal:
            history.apply(event)
        return history

    @property
    def is_completed(self) -> bool:
        return (self.phase, self.session.cause) == (Phase.FINISHED, COMPLETED)

    def happened(self, kind: type[EventT]) -> list[EventT]:
        """The events of this kind in the journal."""
        return [event for event in self.journal if isinstance(event, kind)]

    # --- commands ---

    def send(self, command: c.Command, *, at: float | None = None) -> Decision:
        """Decide, commit, evolve. Work that is owed is done at once if the bench `answers`."""
        if at is not None:
            self.now = at
        before = repr(self.session)
        try:
            decision = decide(self.session, command, self.now, self.strategy)
        except Refusal:
            assert repr(self.session) == before, "a refusal changed the session"
            raise
        assert repr(self.session) == before, "decide changed the session by itself"
        again = decide(self.session, command, self.now, self.strategy)
        assert again == decision, "decide is not deterministic"
        self.session = fold(self.session, decision.events)
        self._require_who_is_left_out()
        new = durable(decision.events)
        self.journal += new
        if self.oracle is not None and self.strategy is None:
            for event in new:
                self.oracle.take(event, self.now)
            if new or isinstance(command, c.Tick):  # nothing follows from a heartbeat
                self.oracle.settled(self.now)
        self.effects = decision.effects
        for effect in decision.effects:
            if isinstance(effect, InitialiseModel | Aggregate):
                self.owed.append(effect)
            if isinstance(effect, Aggregate):
                self.aggregates.append(effect)
            if isinstance(effect, RecordMetrics):
                self.points += effect.points
        if self.answers and self.owed:
            self.answer()
            self.effects = (*decision.effects, *self.effects)
        return decision

    def ask(self, question: Question) -> r.Reply:
        before = repr(self.session)
        try:
            return ask(self.session, question)
        finally:
            assert repr(self.session) == before, "a question changed the session"

    def _require_who_is_left_out(self) -> None:
        """The session keeps them apart, so that it need not look at all refusals to find them."""
        found = {p for p in self.session.members.eligible if self.session.is_left_out(p)}
        left_out = set(self.session.selection.left_out)
        assert left_out == found, "others are left out than the faults say"

    def answer(self) -> None:
        """Carry out the work that is owed, and what that leads to."""
        while self.owed:
            self.send(answer_to(self.owed.pop(0)))

    def join(
        self,
        *names: str,
        profile: DataProfile | None = PROFILE,
        tags: Mapping[str, str] | None = None,
        at: float | None = None,
        **known: Any,
    ) -> r.Reply:
        """Rendezvous of each, in this order; the reply to the last."""
        assert names
        for name in names:
            reply = self.send(c.Rendezvous(name, profile, tags or {}, **known), at=at).reply
        return reply

    def heartbeat(self, *names: str, at: float | None = None) -> r.Advertisement:
        """A heartbeat of each; what the last one is told."""
        assert names
        for name in names:
            seen = advertise(
                self.session, name
            )  # before this heartbeat counts, as the service asks
            assert self.send(c.Heartbeat(name), at=at).reply == r.Heard()
        return seen

    def leave(self, *names: str) -> None:
        for name in names:
            self.send(c.Heartbeat(name, ParticipantState.FINISHED))

    def start(self, name: str) -> r.Assignment:
        reply = self.ask(AssignmentFor(name))
        assert isinstance(reply, r.Assignment)
        return reply

    def begin_upload(
        self, name: str, digest: str = "good", *, round_: int | None = None
    ) -> r.Reply:
        number = self.session.trained_by(name) if round_ is None else round_
        return self.ask(MayUpload(name, number, digest))

    def end(
        self,
        name: str,
        digest: str = "good",
        *,
        upload_name: str | None = None,
        round_: int | None = None,
        num_samples: int = 1,
        shape: tuple[int, ...] = SHAPE,
        dtype: str = "float32",
        first_bad: int | None = None,
        metrics: tuple[Point, ...] = (),
        layout: Layout = (),
        training: Mapping[str, float] | None = None,
    ) -> Decision:
        """Hand in; a good update unless told otherwise, of the round that it trains."""
        under = name if upload_name is None else upload_name
        number = self.session.trained_by(name) if round_ is None else round_
        key = update_key(number, under)
        weights = stored(key, digest, shape=shape, dtype=dtype, first_bad=first_bad)
        return self.send(
            c.EndTrainingRound(
                name, number, num_samples, weights, metrics, layout=layout, training=training or {}
            )
        )

    def end_all(self) -> None:
        """Hand in for all selected participants."""
        for name in self.outstanding:
            self.end(name, f"{name}@{self.session.round}")

    def bring_refused(self, name: str, times: int = 1) -> None:
        """Updates that cannot be used are refused, and that is noted, as the server does it."""
        for _ in range(times):
            with pytest.raises(InvalidUpdate) as caught:
                self.end(name, "bad", first_bad=0)
            self.send(c.NoteRefusedUpdate(name, self.session.trained_by(name), str(caught.value)))

    def tick(self, *, at: float | None = None) -> Decision:
        return self.send(c.Tick(), at=at)

    def pass_time(self, seconds: float, *silent: str) -> None:
        """Let time pass, with a Tick when one is due. All but the silent are heard meanwhile."""
        end = self.now + seconds
        while True:
            for name in self.connected:
                if name not in silent:
                    self.heartbeat(name)
            due = next_deadline(self.session, self.strategy)
            if due is not None and due <= min(end, self.now + HEARTBEAT_TIME_S):
                self.tick(at=max(due, self.now))
                due = next_deadline(self.session, self.strategy)
                assert due is None or due > self.now, "the driver would spin"
            elif self.now == end:
                return
            else:
                self.now = min(end, self.now + HEARTBEAT_TIME_S)

    def expire(self, *names: str) -> None:
        """Let a whole lease pass in which all but these are heard."""
        self.now += LEASE_S
        for name in self.connected:
            if name not in names:
                self.heartbeat(name)
        self.tick()

    def refuses(self, sent: c.Command | Question, why: Why) -> Refusal:
        """The command or question is refused for this reason, and for exactly this one."""
        with pytest.raises(Refusal) as caught:
            self.ask(sent) if isinstance(sent, Question) else self.send(sent)
        assert is_refused(caught.value, why), f"refused with {caught.value!r}"
        return caught.value

    def refuses_end(self, why: Why, name: str, digest: str = "good", **kwargs: object) -> None:
        with pytest.raises(Refusal) as caught:
            self.end(name, digest, **kwargs)  # type: ignore[arg-type]  # on purpose
        assert is_refused(caught.value, why), f"refused with {caught.value!r}"

    # --- restarts ---

    def restart(self) -> tuple[Effect, ...]:
        """Die and come back: fold the journal, give each member a new lease, owe the work again."""
        before = self.session
        self.session = replay(self.journal)
        assert self.session == before, "the journal does not fold to the session it came from"
        self.session = fold(self.session, [e.Restarted(self.now)])
        assert self.session == before, "a restart changed more than the leases"
        effects = resume(self.session)
        self.owed = [work for work in effects if isinstance(work, InitialiseModel | Aggregate)]
        return effects


def durable(events: Sequence[e.Event]) -> list[e.DurableEvent]:
    """The events that a journal keeps."""
    return [event for event in events if not isinstance(event, e.SoftEvent)]


def replay(journal: Sequence[e.DurableEvent]) -> Session:
    """The session that a journal describes."""
    opened, *later = journal
    assert isinstance(opened, e.SessionOpened)
    return fold(begin(opened), later)


def opened_round(*names: str, answers: bool = True, rules: Rules | None = None) -> Bench:
    """A bench on which these have joined and round 0 is collecting.

    rules: by default all of these are needed. answers: whether the bench goes on answering effects.
    """
    bench = Bench(rules or make_rules(min_participants=len(names)))
    bench.join(*names)
    assert bench.phase is Phase.COLLECTING
    bench.answers = answers
    return bench


def timed_round(*names: str, **rules: Any) -> Bench:
    """Round 0 was opened now, and these are connected."""
    bench = Bench(make_rules(**{**TIMED, "start_participants": len(names), **rules}))
    bench.join(*names)
    assert bench.phase is Phase.COLLECTING
    return bench


def counted(bench: Bench) -> tuple[str, ...]:
    """The contributors of the newest model."""
    return tuple(update.participant_id for update in bench.aggregates[-1].updates)


def closing(bench: Bench) -> tuple[float | None, str]:
    """Time and cause of the last closing of a round."""
    closed = bench.happened(e.RoundClosed)[-1]
    return closed.at, closed.cause
