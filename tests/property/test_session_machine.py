"""The session under everything that can come to it, in any order, at any time.

A Hypothesis state machine plays participants good and bad, the clock, the workers that carry out
effects, and the power cut. Beside the session it keeps its own small book of what was acknowledged,
and predicts from that book what every update must be answered. After each step the invariants
hold; at the end of each run well-behaved participants must be able to bring the session to its end.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.core.bench import (
    LEASE_S,
    SHAPE,
    START_TIMEOUT_S,
    answer_to,
    durable,
    make_rules,
    model_from,
    replay,
    stored,
)

from oracle.rounds import Rounds
from support.refusals import Why, is_refused
from xain_coordinator.core.machine.answers import MAX_NOTED
from xain_coordinator.core.machine.decider import Decision, decide, next_deadline, resume
from xain_coordinator.core.machine.evolve import evolve, fold, open_session
from xain_coordinator.core.machine.questions import (
    AssignmentFor,
    MayUpload,
    Question,
    advertise,
    ask,
)
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.effects import Aggregate, InitialiseModel
from xain_coordinator.core.vocabulary.keys import attempt_key, update_key
from xain_coordinator.core.vocabulary.values import DataProfile, ParticipantState, Phase, Rules

RULE_SETS = {
    "one": make_rules(rounds=2, initial="empty"),
    "everybody": make_rules(rounds=3, min_participants=3, max_participants=4, initial="empty"),
    "half": make_rules(
        rounds=2, min_participants=2, fraction="0.5", controller="random", start_participants=5
    ),
    "a third, empty": make_rules(
        rounds=3,
        min_participants=2,
        fraction="1/3",
        controller="random",
        max_participants=6,
        initial="empty",
    ),
    "all": make_rules(rounds=2, min_participants=2, fraction="0.6", controller="all", seed=3),
    "loose": make_rules(rounds=2, min_participants=1, fraction="0.9", start_participants=4),
    "strict": make_rules(
        rounds=4,
        min_participants=2,
        start_participants=4,
        controller="round_robin",
        refused_limit=2,
        refused_rounds=1,
    ),
    "strict half": make_rules(
        rounds=4,
        min_participants=2,
        fraction="0.5",
        start_participants=5,
        controller="weighted",
        refused_limit=1,
        refused_rounds=2,
    ),
    "one site": make_rules(
        rounds=2,
        min_participants=2,
        max_participants=4,
        start_participants=3,
        controller="weighted",
        refused_limit=2,
        refused_rounds=1,
        tags={"site": ("north", "west")},
    ),
}
NAMES = tuple(f"p{i}" for i in range(8))
SPARE = tuple(f"q{i}" for i in range(8))
INDEX = st.integers(0, 7)
# Tags of participants outside the north: sites of which "one site" asks for one, and none.
NORTH = {"site": "north"}
TAGS: dict[str, dict[str, str]] = {
    "p1": {"site": "south"},
    "p2": {"site": "west"},
    "p3": {},
    "p5": {"site": "south"},
}
DIGESTS = st.sampled_from(["x", "y", "z"])
PROFILES = st.sampled_from(
    [None, DataProfile(10, 4), DataProfile(3, 4), DataProfile(0, 99), DataProfile(5, 7)]
)
UPLOAD_NAMES = st.sampled_from(["own", "uuid", "uuid", "somebody", "counted"])

# Shape, dtype, index of the first element that is not finite; None where nothing is wrong.
Wrong = tuple[tuple[int, ...] | None, str | None, int | None]
WRONG: list[Wrong] = [
    ((4,), None, None),
    ((0,), None, None),
    ((), None, None),
    ((3, 1), None, None),
    (None, "float64", None),
    (None, "int64", None),
    (None, "object", None),
    (None, None, 0),
    (None, None, 2),
]
TROUBLE = st.none() | st.sampled_from(WRONG)


@dataclass(frozen=True)
class Acknowledged:
    """An update that was acknowledged."""

    digest: str
    num_samples: int
    key: str


class SessionMachine(RuleBasedStateMachine):
    """Commands in, invariants out."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.session: Session
        self.journal: list[e.DurableEvent] = []
        # The fold of the first events of the journal, and how many these are.
        self.folded: tuple[Session, int]
        # A session, and how it was shown when it came to be.
        self.shown: tuple[Session, str]
        # (round, participant) -> what was acknowledged; the book that the session must agree with.
        self.book: dict[tuple[int, str], Acknowledged] = {}
        self.owed: InitialiseModel | Aggregate | None = None
        self.done: list[InitialiseModel | Aggregate] = []
        self.aggregated: list[int] = []
        # Shape and dtype of the first accepted update of the open round.
        self.fixed: tuple[tuple[int, ...], str] | None = None
        # Refused updates in a row, and the round before which a participant is left out for them.
        self.rows: dict[str, int] = {}
        self.out_until: dict[str, int] = {}
        # participant -> when it was last heard, or the coordinator came back.
        self.heard_at: dict[str, float] = {}

    @initialize(name=st.sampled_from(sorted(RULE_SETS)), steps=st.integers(0, 12), trouble=TROUBLE)
    def open(self, name: str, steps: int, trouble: Wrong | None) -> None:
        """Begin anywhere in the first rounds: trouble is rarer at the beginning."""
        self.rules: Rules = RULE_SETS[name]
        self.session, opened = open_session("s", self.rules, self.now)
        self.oracle = Rounds(opened)
        self.journal.append(opened)
        self.folded = (self.session, 1)
        self.shown = (self.session, repr(self.session))
        self.go_on(steps, trouble)

    # --- sending ---

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """The core changes no session that it is given, whether it refuses or not."""
        session = self.session
        if self.shown[0] is not session:
            self.shown = (session, repr(session))
        try:
            yield
        finally:
            assert repr(session) == self.shown[1], "the session that was given has changed"

    def send(self, command: c.Command) -> Decision:
        """Decide and carry on; every check that concerns one decision is here."""
        with self._unchanged():
            decision = decide(self.session, command, self.now)
        for event in decision.events:
            was = self.session
            self.session = evolve(was, event)
            self._check_event(was, event)
        new = durable(decision.events)
        self.journal += new
        for event in new:
            self.oracle.take(event, self.now)
        if new or isinstance(command, c.Tick):
            self.oracle.settled(self.now)
        if isinstance(command, c.Rendezvous | c.Heartbeat):
            self.heard_at[command.participant_id] = self.now
        for effect in decision.effects:
            if isinstance(effect, InitialiseModel | Aggregate):
                assert self.owed is None, "new work before the old one was answered"
                self.owed = effect
            if isinstance(effect, Aggregate):
                self._check_aggregate(effect)
        return decision

    def _check_event(self, was: Session, event: e.Event) -> None:
        now = self.session
        if was.phase is Phase.FINISHED:
            assert isinstance(event, e.SoftEvent), f"{event} after the end"
        assert now.round >= was.round
        assert now.epoch_base >= was.epoch_base
        if now.round != was.round:
            assert now.round == was.round + 1
            assert isinstance(event, e.ModelPublished)
        if isinstance(event, e.ParticipantLeftOut):
            assert self.out_until.get(event.participant_id, 0) == event.until > was.round

    def _check_aggregate(self, effect: Aggregate) -> None:
        """Exactly what was acknowledged for this round, each once, in the order of the names."""
        assert effect.round not in self.aggregated, "a round aggregated twice"
        self.aggregated.append(effect.round)
        entered = [update.participant_id for update in effect.updates]
        acknowledged = {who for (number, who) in self.book if number == effect.round}
        assert len(entered) == len(set(entered))
        assert set(entered) == acknowledged
        assert len(entered) >= self.rules.min_participants
        assert self.session.open_round is not None
        assert entered == sorted(self.session.open_round.selected)
        keys = set()
        for update in effect.updates:
            word = self.book[effect.round, update.participant_id]
            assert (update.weights.ref.digest, update.weights.ref.key) == (word.digest, word.key)
            equal = self.session.model is not None and self.session.model.is_empty
            assert update.num_samples == (0 if equal else word.num_samples)
            assert (update.weights.shape, update.weights.dtype) == (
                effect.updates[0].weights.shape,
                effect.updates[0].weights.dtype,
            )
            keys.add(update.weights.ref.key)
        assert len(keys) == len(entered), "one object entered twice"

    def attempt(self, command: c.Command) -> Decision | errors.Refusal:
        """Send something that may be refused."""
        try:
            return self.send(command)
        except errors.Refusal as refusal:
            return refusal

    def ask(self, question: Question) -> r.Reply | errors.Refusal:
        try:
            with self._unchanged():
                return ask(self.session, question)
        except errors.Refusal as refusal:
            return refusal

    def _is_eligible(self, name: str) -> bool:
        """Written down anew."""
        return not self.rules.tags or TAGS.get(name, NORTH).get("site") in ("north", "west")

    def _eligible(self) -> list[str]:
        return [name for name in self.session.members if self._is_eligible(name)]

    def _rendezvous(self, name: str, profile: DataProfile | None) -> c.Rendezvous:
        return c.Rendezvous(name, profile, TAGS.get(name, NORTH))

    def maybe(self, command: c.Command) -> Decision | None:
        """Send something that may be refused, whatever for."""
        outcome = self.attempt(command)
        return outcome if isinstance(outcome, Decision) else None

    def refused(self, command: c.Command, why: Why) -> None:
        assert is_refused(self.attempt(command), why)

    def _profile(self, profile: DataProfile | None = None) -> DataProfile | None:
        """A model that is made from profiles needs some that say something."""
        if self.rules.initial == "workload" and (profile is None or not profile.num_samples):
            return DataProfile(10, 4)
        return profile

    def _fitting_profile(self) -> DataProfile | None:
        """A profile with the width of the members' data."""
        members = self.session.members
        known = [*(self.session.requested or ()), *(members[p].profile for p in self._eligible())]
        widths = [one.num_features for one in known if one is not None and one.num_samples]
        return self._profile(DataProfile(10, widths[0])) if widths else self._profile()

    # --- participants ---

    @rule(i=INDEX, profile=PROFILES, enrolled=st.booleans())
    def rendezvous(self, i: int, profile: DataProfile | None, enrolled: bool) -> None:
        name = NAMES[i]
        here, full = name in self.session.members, self._is_full(name)
        before = self.session
        command = self._rendezvous(name, self._profile(profile))
        decision = self.maybe(replace(command, is_enrolled=enrolled))
        if here or self.session.phase is Phase.FINISHED:
            assert decision is not None
            assert isinstance(decision.reply, r.Accepted)
            assert durable(decision.events) == []
            assert self.session == before
        elif full:
            assert decision is not None
            assert isinstance(decision.reply, r.Later)
            assert decision.reply.retry_after_s > 0
            assert durable(decision.events) == []
            assert self.session == before
            assert name in self.session.members.not_admitted
        elif decision is not None and isinstance(decision.reply, r.Later):
            assert enrolled
            assert decision.reply.why
            assert self.session == before
            assert name in self.session.members.unlike
        elif decision is not None:
            assert name in self.session.members

    @precondition(lambda self: self.session.requested is None)
    @rule(widths=st.permutations([4, 7]))
    def outvote(self, widths: list[int]) -> None:
        """All who are absent come, the first one with other data than the rest."""
        absent = [name for name in (*NAMES, *SPARE) if name not in self.session.members]
        for i, name in enumerate(absent):
            command = self._rendezvous(name, DataProfile(10, widths[i > 0]))
            self.maybe(replace(command, is_enrolled=True))

    def _is_full(self, name: str) -> bool:
        """There is no place for one like this."""
        alike = [p for p in self.session.members if self._is_eligible(p) == self._is_eligible(name)]
        return len(alike) >= self.rules.max_participants

    @rule(i=INDEX, state=st.sampled_from([ParticipantState.READY, ParticipantState.TRAINING]))
    def heartbeat(self, i: int, state: ParticipantState) -> None:
        name = NAMES[i]
        known = name in self.session.members or self.session.phase is Phase.FINISHED
        before = self.session
        decision = self.maybe(c.Heartbeat(name, state, self.session.round))
        assert (decision is not None) == known
        assert self.session == before, "a heartbeat is not durable"
        if decision is None:
            return
        assert durable(decision.events) == []
        assert decision.reply == r.Heard()
        reply = advertise(self.session, name)
        assert reply.round == self.session.round
        if self.session.phase is Phase.FINISHED:
            assert reply.phase is Phase.FINISHED
        elif name in (self.session.open_round.selected if self.session.open_round else ()):
            assert reply.phase is self.session.phase
            assert reply.update_accepted == ((reply.round, name) in self.book)
            assert not (reply.update_accepted and reply.update_damaged)
        else:
            assert reply.phase is Phase.STANDBY

    def heartbeats(self) -> None:
        """All members are heard."""
        for name in self.session.members:
            self.send(c.Heartbeat(name))

    @precondition(lambda self: self.session.members)
    @rule(i=INDEX)
    def leave(self, i: int) -> None:
        known = NAMES[i] in self.session.members or self.session.phase is Phase.FINISHED
        ended = self.session.phase is Phase.FINISHED
        decision = self.maybe(c.Heartbeat(NAMES[i], ParticipantState.FINISHED))
        assert (decision is not None) == known
        assert ended or NAMES[i] not in self.session.members

    @rule(i=INDEX, num_new=st.integers(0, 2))
    def lose(self, i: int, num_new: int) -> None:
        """One who owes an update leaves, with or without others waiting for its place."""
        for name in [n for n in SPARE if n not in self.session.members][:num_new]:
            self.maybe(self._rendezvous(name, self._profile()))
        if outstanding := self._outstanding():
            self.maybe(c.Heartbeat(outstanding[i % len(outstanding)], ParticipantState.FINISHED))

    @rule(i=INDEX)
    def start(self, i: int) -> None:
        session, name = self.session, NAMES[i]
        reply = self.ask(AssignmentFor(name))
        round_ = session.open_round
        may = session.phase is Phase.COLLECTING and round_ is not None and name in round_.selected
        if name not in session.members:
            may = False
        assert isinstance(reply, r.Assignment) == may
        if isinstance(reply, r.Assignment):
            assert (reply.round, reply.epoch_base) == (session.round, session.epoch_base)
            assert reply.model == session.model
            assert reply.epochs == (0 if reply.model.is_empty else self.rules.epochs)

    # --- updates ---

    def _recognised(self) -> set[int]:
        """The rounds of which resends are recognised: the open one, and the last one before."""
        opened = [event.round for event in self.journal if isinstance(event, e.RoundOpened)]
        published = sum(isinstance(event, e.ModelPublished) for event in self.journal)
        between = published == len(opened) or self.session.phase is Phase.FINISHED
        return set(opened[-1:] if between else opened[-2:])

    def _word(self, name: str, number: int) -> Acknowledged | None:
        return self.book.get((number, name)) if number in self._recognised() else None

    def _barred(self, name: str, sent: int | None) -> str | None:
        """Code of why this participant hands in nothing for this round now, if it does not."""
        session = self.session
        if session.phase is Phase.FINISHED:
            return "ROUND_CLOSED"
        if name not in session.members:
            return "NOT_A_MEMBER"
        if sent is not None and sent != session.round:
            return "STALE_ROUND"
        if session.phase is Phase.AGGREGATING:
            return "ROUND_CLOSED"
        if session.phase is Phase.STANDBY:
            return "NOT_IN_ROUND"
        assert session.open_round is not None
        if name not in session.open_round.selected:
            return "NOT_SELECTED"
        return None

    def _counts_already(self, name: str, key: str) -> bool:
        """Whether the upload is that of an acknowledged update, or of another participant."""
        others = {update_key(self.session.round, p) for p in self.session.members if p != name}
        is_own = key == update_key(self.session.round, name)
        return not is_own and key in others | {word.key for word in self.book.values()}

    def _good_weights(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype that an update of the open round must have now, if they are fixed."""
        model = self.session.model
        if model is not None and not model.is_empty:
            return model.shape, model.dtype
        return self.fixed or (SHAPE, "float32")

    def _fits(self, shape: tuple[int, ...], dtype: str) -> bool:
        model = self.session.model
        if model is not None and model.is_empty and self.fixed is None:
            return len(shape) == 1 and shape[0] > 0 and dtype.startswith("float")
        return (shape, dtype) == self._good_weights()

    def end(
        self,
        name: str,
        digest: str,
        num_samples: int,
        *,
        under: str | None = None,
        sent: int | None = None,
        shape: tuple[int, ...] | None = None,
        dtype: str | None = None,
        first_bad: int | None = None,
    ) -> None:
        """Hand in, and compare the answer with what the book says it must be.

        shape and dtype: None for what the round needs.
        """
        number = self.session.round if sent is None else sent
        under = name if under is None else under
        shape = self._good_weights()[0] if shape is None else shape
        dtype = self._good_weights()[1] if dtype is None else dtype
        key = update_key(number, under)
        word = self._word(name, number)
        again = word is not None and (word.digest, word.num_samples) == (digest, num_samples)
        expected = self._barred(name, sent)
        if expected is None and word is not None:
            expected = "DUPLICATE_UPDATE"
        if expected is None and self._counts_already(name, key):
            expected = "UPLOAD_NAME_TAKEN"
        if expected is None and (
            num_samples < 0 or first_bad is not None or not self._fits(shape, dtype)
        ):
            expected = "INVALID_UPDATE"
        if expected is None:
            self.book[number, name] = Acknowledged(digest, num_samples, key)
            self.fixed = self.fixed or (shape, dtype)
            self.rows.pop(name, None)
            self.out_until.pop(name, None)
        before = self.session
        weights = stored(key, digest, shape=shape, dtype=dtype, first_bad=first_bad)
        outcome = self.attempt(c.EndTrainingRound(name, number, num_samples, weights))
        if isinstance(outcome, errors.Refusal):
            assert not again, f"a resend was refused: {outcome!r}"
            assert outcome.code == expected, f"{outcome!r}, expected {expected}"
            if isinstance(outcome, errors.InvalidUpdate):
                self._note(name, str(outcome))
            return
        assert again or expected is None, f"accepted, expected {expected}"
        assert outcome.reply == r.Done()
        if again:
            assert outcome.events == ()
            assert self.session == before

    def _note(self, name: str, reason: str) -> None:
        """Note a refusal as the server does, before it answers."""
        rules, number = self.rules, self.session.round
        counts = (
            name in self._outstanding()
            and self.session.phase is not Phase.FINISHED
            and (rules.refused_limit > 0 or self.rows.get(name, 0) < MAX_NOTED)
            and self.out_until.get(name, 0) <= number
        )
        if counts:
            self.rows[name] = self.rows.get(name, 0) + 1
        if counts and self.rows[name] == rules.refused_limit > 0:
            del self.rows[name]
            self.out_until[name] = number + rules.refused_rounds + 1
        before = self.session
        self.send(c.NoteRefusedUpdate(name, self.session.trained_by(name), reason))
        assert counts or self.session == before

    @rule(i=INDEX, times=st.integers(1, 3))
    def note(self, i: int, times: int) -> None:
        """Note refused updates that had not come whole, of any participant, at any time."""
        outstanding = self._outstanding()
        names = (*NAMES, *outstanding, *outstanding)
        for _ in range(times):
            self._note(names[i % len(names)], "it is too large")

    def _outstanding(self) -> tuple[str, ...]:
        round_ = self.session.open_round
        return () if round_ is None else round_.outstanding

    @precondition(lambda self: self._outstanding())
    @rule(i=INDEX, digest=DIGESTS, num_samples=st.integers(0, 3), says_round=st.booleans())
    def end_good(self, i: int, digest: str, num_samples: int, says_round: bool) -> None:
        """One who owes an update brings it."""
        name = self._outstanding()[i % len(self._outstanding())]
        self.end(name, digest, num_samples, sent=self.session.round if says_round else None)

    @precondition(lambda self: self._outstanding())
    @rule(i=INDEX, j=INDEX, how=UPLOAD_NAMES, digest=DIGESTS)
    def end_under_a_name(self, i: int, j: int, how: str, digest: str) -> None:
        """Hand in under a name, as a XAIN client does, or as a thief."""
        name = self._outstanding()[i % len(self._outstanding())]
        counted = [word.key for word in self.book.values()] or ["0/nothing"]
        under = {
            "own": name,
            "uuid": f"uuid of {name}",
            # Mostly a participant that is not here yet, but may come.
            "somebody": (*SPARE[:4], *NAMES[:4])[j],
            "counted": counted[-1 - j % len(counted)].partition("/")[2],
        }[how]
        self.end(name, digest, 1, under=under)

    @precondition(lambda self: self._outstanding())
    @rule(i=INDEX, wrong=st.sampled_from(WRONG), num_samples=st.sampled_from([1, 1, 1, -1]))
    def end_bad(self, i: int, wrong: Wrong, num_samples: int) -> None:
        """Somewhere wrong, except perhaps for the first update of an initialisation."""
        name = self._outstanding()[i % len(self._outstanding())]
        shape, dtype, first_bad = wrong
        self.end(name, "bad", num_samples, shape=shape, dtype=dtype, first_bad=first_bad)

    @rule(i=INDEX, digest=DIGESTS, num_samples=st.integers(0, 3), off=st.integers(-2, 1))
    def end_anybody(self, i: int, digest: str, num_samples: int, off: int) -> None:
        """Selected or not, here or not, for any round."""
        self.end(NAMES[i], digest, num_samples, sent=self.session.round + off)

    @precondition(lambda self: self.book)
    @rule(i=st.integers(0, 50), says_round=st.booleans(), change=st.integers(0, 3))
    def end_again(self, i: int, says_round: bool, change: int) -> None:
        """Send an acknowledged update again, as it was or changed."""
        (number, name), word = list(self.book.items())[-1 - i % len(self.book)]
        under = word.key.partition("/")[2]
        digest = "changed" if change == 1 else word.digest
        num_samples = word.num_samples + (change == 2)
        self.end(name, digest, num_samples, under=under, sent=number if says_round else None)

    @rule(i=INDEX, digest=DIGESTS, off=st.integers(-2, 1))
    def begin_upload(self, i: int, digest: str, off: int) -> None:
        """Nothing may be written over what was acknowledged."""
        name, number = NAMES[i], self.session.round + min(off, 0)
        word = self._word(name, number)
        outcome = self.ask(MayUpload(name, number, digest))
        if isinstance(outcome, errors.Refusal):
            assert word is None or word.digest != digest
            expected = self._barred(name, number) or "DUPLICATE_UPDATE"
            assert outcome.code == expected, f"{outcome!r}, expected {expected}"
            return
        if word is not None:
            assert outcome == r.AlreadyUploaded(stored(word.key, digest))
        else:
            assert isinstance(outcome, r.Ticket)
            assert outcome.key == attempt_key(update_key(number, name), "")
            assert self._barred(name, number) is None

    # --- effects ---

    @precondition(lambda self: self.owed is not None)
    @rule()
    def answer(self) -> None:
        """The work that is owed is done."""
        assert self.owed is not None
        done, self.owed = self.owed, None
        self.done.append(done)
        self.fixed = None
        self.send(answer_to(done))

    @precondition(lambda self: self.session.open_round and self.session.open_round.updates)
    @rule(i=INDEX)
    def damage(self, i: int) -> None:
        """An accepted update turns out to be damaged: what was acknowledged counts no more."""
        round_ = self.session.opened
        updates = list(round_.updates.values())
        update = updates[i % len(updates)]
        if self.session.phase is Phase.AGGREGATING:
            self.owed = None
            self.aggregated.remove(round_.number)
        del self.book[round_.number, update.participant_id]
        if len(updates) == 1:
            self.fixed = None
        self.send(c.NoteDamagedUpdates({update.weights.ref.key: "a bit"}))
        assert update.participant_id not in self.session.opened.updates

    @rule(i=st.integers(0, 5), off=st.integers(-2, 2))
    def answer_again_or_wrongly(self, i: int, off: int) -> None:
        """Work that was done comes back a second time, from a worker thought dead; and a model
        comes for a round that is not being aggregated."""
        if self.done:
            self.refused(answer_to(self.done[i % len(self.done)]), errors.StaleModel)
        number = self.session.round + 1 + off
        model = replace(model_from(InitialiseModel("workload", ())), round=number)
        if not isinstance(self.owed, Aggregate) or self.owed.round + 1 != number:
            self.refused(c.AggregationDone(model), errors.StaleModel)
        if not isinstance(self.owed, InitialiseModel):
            self.refused(c.InitialisationDone(model), errors.StaleModel)

    @rule(chance=st.integers(0, 12))
    def fail(self, chance: int) -> None:
        """Sometimes the disk is gone."""
        if chance < (3 if isinstance(self.owed, InitialiseModel) else 12):
            return
        self.send(c.EffectFailed("the disk is gone"))
        assert self.session.phase is Phase.FINISHED
        if self.owed is not None:
            self.refused(answer_to(self.owed), errors.StaleModel)
        self.owed = None

    # --- time ---

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 4.9, 10.0, 14.9, 15.0]), ticks=st.booleans())
    def time_passes(self, seconds: float, ticks: bool) -> None:
        """Without a Tick the driver is busy, or late."""
        self.now += seconds
        if ticks:
            self._tick()

    @rule()
    def tick_when_due(self) -> None:
        """At exactly next_deadline, as the driver does it."""
        due = next_deadline(self.session)
        if due is not None:
            self.now = max(self.now, due)
            self._tick()

    @rule(seconds=st.sampled_from([START_TIMEOUT_S, 1000.0]), heard=st.booleans())
    def jump(self, seconds: float, heard: bool) -> None:
        """Far beyond every deadline; with `heard`, each member is heard just before."""
        self.now += seconds
        if heard:
            self.heartbeats()
        self._tick()

    def _tick(self) -> None:
        before = self.session
        stay = {n for n in before.members if self.heard_at[n] + LEASE_S > self.now}
        self.send(c.Tick())
        if before.phase is Phase.FINISHED:
            assert self.session == before
            return
        assert set(self.session.members) == stay
        due = next_deadline(self.session)
        assert due is None or due > self.now, "the driver would spin"

    @rule(seconds=st.sampled_from([0.0, 20.0]))
    def power_cut(self, seconds: float) -> None:
        """State that was not durable is gone; effects that were owed are owed again."""
        before = self.session
        self.now += seconds
        session = fold(replay(self.journal), [e.Restarted(self.now)])
        assert session == before
        self.session = session
        self.heard_at = dict.fromkeys(session.members, self.now)
        again = resume(session)
        assert again == (() if self.owed is None else (self.owed,))

    # --- what holds after every step ---

    @invariant()
    def the_journal_gives_the_session(self) -> None:
        """Event after event; power cuts and the end fold all of it anew."""
        again = fold(self.folded[0], self.journal[self.folded[1] :])
        self.folded = (again, len(self.journal))
        assert again == self.session
        assert resume(again) == (() if self.owed is None else (self.owed,))

    @invariant()
    def the_round_is_sound(self) -> None:
        session = self.session
        round_ = session.open_round
        if round_ is None:
            assert session.phase in (Phase.STANDBY, Phase.FINISHED)
            return
        assert round_.number == session.round
        assert len(set(round_.selected)) == len(round_.selected) <= round_.target
        assert set(round_.updates) <= set(round_.selected)
        assert set(round_.outstanding) <= set(session.members), "waiting for somebody who has gone"
        assert {
            who: (update.weights.ref.digest, update.num_samples, update.weights.ref.key)
            for who, update in round_.updates.items()
        } == {
            who: (word.digest, word.num_samples, word.key)
            for (number, who), word in self.book.items()
            if number == round_.number
        }
        assert len({update.weights.ref.key for update in round_.updates.values()}) == len(
            round_.updates
        )

    @invariant()
    def only_the_eligible_are_selected(self) -> None:
        session, round_ = self.session, self.session.open_round
        assert session.members.num_eligible == len(self._eligible())
        assert set(session.selection.last_selected) == set(session.members)
        busy = session.buffered.carried if round_ is None else round_.selected
        is_over = session.phase is Phase.FINISHED
        assert set(session.selection.unselected) == (
            set() if is_over else set(self._eligible()) - set(busy)
        )
        if round_ is not None:
            assert all(self._is_eligible(name) for name in round_.selected)

    @invariant()
    def participants_that_owe_an_update_may_upload(self) -> None:
        if self.session.phase is Phase.COLLECTING:
            number = self.session.round
            for name in self._outstanding():
                ticket = self.ask(MayUpload(name, number, "new"))
                assert isinstance(ticket, r.Ticket)
                assert ticket.key == attempt_key(update_key(number, name), "")

    @invariant()
    def models_follow_rounds(self) -> None:
        session = self.session
        published = [event for event in self.journal if isinstance(event, e.ModelPublished)]
        if session.model is not None:
            assert session.model.round == len(published)
        assert session.round == min(len(published), self.rules.rounds - 1)
        trained = len(published) - (1 if self.rules.initial == "empty" and published else 0)
        assert session.epoch_base == trained * self.rules.epochs
        assert (session.cause == "completed") == (len(published) == self.rules.rounds)

    @invariant()
    def data_has_one_width(self) -> None:
        profiles = [self.session.members[name].profile for name in self._eligible()]
        known = [*(self.session.requested or ()), *(p for p in profiles if p is not None)]
        assert len({profile.num_features for profile in known if profile.num_samples}) <= 1
        assert len(self._eligible()) <= self.rules.max_participants
        assert len(self.session.members) <= self.rules.max_connected

    @invariant()
    def the_next_deadline_is_the_first_thing_that_time_brings(self) -> None:
        session = self.session
        due = next_deadline(session)
        if session.phase is Phase.FINISHED or not session.members:
            assert due is None
            return
        expected = min(self.heard_at[name] for name in session.members) + LEASE_S
        if not session.gathered and len(self._eligible()) >= self.rules.num_required:
            first = min(session.members[name].joined_at for name in self._eligible())
            expected = min(expected, first + START_TIMEOUT_S)
        assert due == expected

    @invariant()
    def somebody_has_the_next_move(self) -> None:
        """No state in which nothing can ever happen. Work is owed, and its answer moves the
        session; or a round waits for somebody who is here, and whose update, departure or expiry
        moves it; or participants are waited for, and they are too few."""
        session = self.session
        if session.phase is Phase.FINISHED:
            assert self.owed is None
        elif session.phase is Phase.AGGREGATING:
            assert isinstance(self.owed, Aggregate)
        elif self.owed is not None:
            assert isinstance(self.owed, InitialiseModel)
            assert session.open_round is None
        elif session.phase is Phase.COLLECTING:
            assert session.opened.outstanding
        elif not session.gathered:
            assert len(self._eligible()) < self.rules.start_participants
        else:
            assert len(self._eligible()) < self.rules.num_required

    # --- and at the end of every run ---

    def teardown(self) -> None:
        """Participants that behave bring every session to its end."""
        if not self.journal:
            return
        for _ in range(300):
            self._advance()
        assert replay(self.journal) == self.session
        assert self.session.phase is Phase.FINISHED, f"stuck in {self.session}"
        if self.session.cause == "completed":
            assert self.aggregated == list(range(self.rules.rounds))

    @rule(steps=st.integers(1, 6), trouble=TROUBLE)
    def go_on(self, steps: int, trouble: Wrong | None) -> None:
        """For a while everything is well, or each participant errs once before its good update."""
        for _ in range(steps):
            if self._distance_to_end() > 1:
                self._advance(trouble)

    def _distance_to_end(self) -> int:
        """Answers still to be given before the session is finished; runs should not end early."""
        return self.rules.rounds - len(self.aggregated) + (self.owed is not None)

    def _advance(self, trouble: Wrong | None = None) -> None:
        """One step of all good participants."""
        session = self.session
        if session.phase is Phase.FINISHED:
            return
        if self.owed is not None:
            self.answer()
        elif session.phase is Phase.COLLECTING:
            self._bring_one(trouble)
        elif len(self._eligible()) < self.rules.num_required or (
            not session.gathered and not self._is_full(SPARE[0])
        ):
            absent = (
                name
                for name in (*NAMES, *SPARE)
                if name not in session.members and self._is_eligible(name)
            )
            self.send(self._rendezvous(next(absent), self._fitting_profile()))
        else:
            self.jump(START_TIMEOUT_S, heard=True)

    def _bring_one(self, trouble: Wrong | None) -> None:
        name = self._outstanding()[0]
        # Half of them choose their upload's name, as XAIN's clients do.
        under = f"uuid of {name}" if name in NAMES[::2] else name
        if self._counts_already(name, update_key(self.session.round, under)):
            under = name  # another participant was first with the name
        if trouble is not None:
            shape, dtype, first_bad = trouble
            self.end(name, "bad", 1, under=under, shape=shape, dtype=dtype, first_bad=first_bad)
        self.end(name, f"{name}@{self.session.round}", 2, under=under)


# A run takes seconds; a failing one is first made small, which takes minutes and is worth them.
TestSessionMachine = pytest.mark.timeout(600)(SessionMachine.TestCase)
TestSessionMachine.settings = settings(
    max_examples=600,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
