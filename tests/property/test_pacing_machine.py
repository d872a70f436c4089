"""Deadlines, quorum, over-selection, SSP and ASP under participants of every speed.

The machine of test_session_machine.py sends anything to a session that waits for everybody. This
one plays participants that fetch their work and bring what they have trained, sooner or later,
twice or never, who leave and come back, while time jumps and the power is cut. tests/oracle says
when a round may wait and when not, and whom it selects. The machine's own book has what was
assigned and what was acknowledged; from that it says which update must be taken. From every state
time alone must lead to the end, and good will to the last model.
"""

from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.core.bench import (
    LEASE_S,
    PROFILE,
    START_TIMEOUT_S,
    answer_to,
    durable,
    make_rules,
    replay,
    stored,
)

from oracle.rounds import Rounds
from xain_coordinator.core.machine.decider import Decision, decide, next_deadline, resume
from xain_coordinator.core.machine.evolve import evolve, fold, open_session
from xain_coordinator.core.machine.questions import AssignmentFor, advertise, ask
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.effects import Aggregate, InitialiseModel
from xain_coordinator.core.vocabulary.keys import update_key
from xain_coordinator.core.vocabulary.script import RoundConfig
from xain_coordinator.core.vocabulary.values import ParticipantState, Phase, Rules

DEADLINE_S = 30.0
IDLE_S = 100.0
WAITS = {"deadline_s": DEADLINE_S, "idle_timeout_s": IDLE_S}
BUFFERED = {**WAITS, "rounds": 8, "start_participants": 4}

RULE_SETS = {
    "bsp": make_rules(rounds=6, fraction="0.5", start_participants=5, **WAITS),
    "empty": make_rules(
        rounds=6, min_participants=2, start_participants=4, initial="empty", **WAITS
    ),
    "quorum": make_rules(
        rounds=6,
        start_participants=4,
        quorum=("participant:update:60%", "p0:update:1", "OR"),
        **WAITS,
    ),
    "after first": make_rules(
        rounds=6,
        min_participants=2,
        start_participants=4,
        pacing="after_first",
        pacing_options={"seconds": 8.0},
        **WAITS,
    ),
    "over-selection": make_rules(
        rounds=6,
        min_participants=2,
        fraction="0.4",
        start_participants=5,
        controller="random",
        over_selection=Fraction(1, 2),
        **WAITS,
    ),
    "asp": make_rules(**BUFFERED, consistency="asp", staleness=None, buffer_size=1),
    "asp of two": make_rules(
        **BUFFERED,
        consistency="asp",
        staleness=None,
        min_participants=2,
        buffer_size=2,
        fraction="0.6",
        controller="random",
    ),
    "asp, empty": make_rules(
        **BUFFERED, consistency="asp", staleness=None, buffer_size=2, initial="empty"
    ),
    "ssp of one": make_rules(**BUFFERED, consistency="ssp", staleness=1, buffer_size=1),
    "ssp of two": make_rules(
        **BUFFERED, consistency="ssp", staleness=2, buffer_size=2, fraction="0.8"
    ),
    "strict": make_rules(
        rounds=6,
        min_participants=2,
        fraction="0.6",
        start_participants=4,
        refused_limit=1,
        refused_rounds=2,
        **WAITS,
    ),
    "strict over-selection": make_rules(
        rounds=6,
        min_participants=2,
        fraction="0.5",
        start_participants=5,
        controller="round_robin",
        over_selection=Fraction(1, 2),
        refused_limit=2,
        refused_rounds=1,
        **WAITS,
    ),
    "strict asp": make_rules(
        **BUFFERED,
        consistency="asp",
        staleness=None,
        min_participants=2,
        buffer_size=2,
        fraction="0.6",
        refused_limit=1,
        refused_rounds=2,
    ),
    "strict ssp": make_rules(
        **BUFFERED, consistency="ssp", staleness=1, buffer_size=1, refused_limit=1, refused_rounds=1
    ),
    "scripted": make_rules(
        rounds=6, min_participants=2, start_participants=4, scripted=True, **WAITS
    ),
    "strict, scripted": make_rules(
        rounds=6,
        min_participants=2,
        fraction="0.6",
        start_participants=4,
        controller="random",
        over_selection=Fraction(1, 2),
        refused_limit=1,
        refused_rounds=2,
        scripted=True,
        **WAITS,
    ),
}
NAMES = tuple(f"p{i}" for i in range(6))
SPARE = tuple(f"q{i}" for i in range(6))
INDEX = st.integers(0, 5)
CHOSEN = st.sets(st.sampled_from(NAMES[:4]), max_size=4)  # of those that come first


@dataclass(frozen=True)
class Work:
    """The round that a participant trains, or has trained. told: it has been a member of the
    session ever since it was told so."""

    round: int
    digest: str
    told: bool = True


class PacingMachine(RuleBasedStateMachine):
    """Participants of every speed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.session: Session
        self.journal: list[tuple[float, e.DurableEvent]] = []
        self.owed: InitialiseModel | Aggregate | None = None
        self.done: list[InitialiseModel | Aggregate] = []
        self.work: dict[str, Work] = {}
        # (round trained, participant) -> (digest, the round that counts it).
        self.book: dict[tuple[int, str], tuple[str, int]] = {}
        self.aggregated: list[int] = []
        self.num_trained = 0
        self.chosen: tuple[str, ...] = ()

    @initialize(name=st.sampled_from(sorted(RULE_SETS)), steps=st.integers(0, 20), chosen=CHOSEN)
    def open(self, name: str, steps: int, chosen: set[str]) -> None:
        self.rules: Rules = RULE_SETS[name]
        self.chosen = tuple(sorted(chosen))
        self.session, opened = open_session("s", self.rules, self.now)
        self.oracle = Rounds(opened)
        self.journal.append((self.now, opened))
        self.go_on(steps)

    # --- sending ---

    def send(self, command: c.Command) -> Decision:
        decision = decide(self.session, command, self.now)
        for event in decision.events:
            was_in = set(self.session.members)
            self.session = evolve(self.session, event)
            for one in durable([event]):
                self.journal.append((self.now, one))
                self.oracle.take(one, self.now)
            self._follow(event, was_in)
        if durable(decision.events) or isinstance(command, c.Tick):
            self.oracle.settled(self.now)
        for effect in decision.effects:
            if isinstance(effect, InitialiseModel | Aggregate):
                assert self.owed is None, "new work before the old one was answered"
                self.owed = effect
            if isinstance(effect, Aggregate):
                self._check_aggregate(effect)
        if self.session.phase is Phase.FINISHED:
            self.owed = None
        for name in self.work.keys() - self.session.members.keys():
            self.work[name] = Work(self.work[name].round, self.work[name].digest, told=False)
        self._decide()
        return decision

    def _decide(self) -> None:
        """The script of the session, if it waits for one, decides at once."""
        if not self.session.waits_for_script:
            return
        if self.session.is_trained:
            self.send(c.EndScript())
            return
        number = self.session.round
        chosen = c.ConfigureRound(number, RoundConfig(selected=self.chosen))
        if isinstance(self.attempt(chosen), errors.Refusal):  # too few, or nobody knows them
            self.send(c.ConfigureRound(number, RoundConfig()))

    @rule(chosen=CHOSEN)
    def choose(self, chosen: set[str]) -> None:
        """The participants that the script chooses for the next rounds."""
        self.chosen = tuple(sorted(chosen))

    def attempt(self, command: c.Command) -> Decision | errors.Refusal:
        try:
            return self.send(command)
        except errors.Refusal as refusal:
            return refusal

    def _follow(self, event: e.Event, was_in: set[str]) -> None:
        """Note participants that were told of another round than they train, and that none is
        carried over for longer than the oracle says."""
        released = isinstance(event, e.ParticipantLeftOut | e.TrainingFailed)
        if released and event.participant_id in self.work:
            # Another participant does what it owed.
            held = self.work[event.participant_id]
            self.work[event.participant_id] = Work(held.round, held.digest, told=False)
        if isinstance(event, e.ModelPublished):
            assert self.session.buffered.carried == self.oracle.clocks
            assert set(self.session.buffered.bases) == set(self.oracle.clocks.values())
        if isinstance(event, e.RoundOpened):
            assert set(event.selected) <= was_in

    def _check_aggregate(self, effect: Aggregate) -> None:
        """Exactly what was acknowledged and is counted by this round, each once, with its
        staleness, in the order of the names."""
        assert effect.round == len(self.aggregated), "a round aggregated twice, or left out"
        self.aggregated.append(effect.round)
        counted = sorted(
            (name, digest, effect.round - trained)
            for (trained, name), (digest, round_) in self.book.items()
            if round_ == effect.round
        )
        assert counted == [
            (update.participant_id, update.weights.ref.digest, staleness)
            for update, staleness in zip(effect.updates, effect.staleness, strict=True)
        ]
        assert max(staleness for _, _, staleness in counted) <= self._limit()

    def _limit(self) -> float:
        return self.oracle.limit

    # --- participants ---

    @rule(num_away=INDEX)
    def come(self, num_away: int) -> None:
        for name in NAMES[num_away:]:
            self.attempt(c.Rendezvous(name, PROFILE))

    @precondition(lambda self: self.session.members)
    @rule(i=INDEX, is_back=st.booleans())
    def leave(self, i: int, is_back: bool) -> None:
        """Perhaps to be back at once, as after a crash: with its result, but not as who it was."""
        name = tuple(self.session.members)[i % len(self.session.members)]
        self.attempt(c.Heartbeat(name, ParticipantState.FINISHED))
        if is_back:
            self.attempt(c.Rendezvous(name, PROFILE))

    @rule(i=INDEX, all_of_them=st.booleans())
    def fetch(self, i: int, all_of_them: bool) -> None:
        """A heartbeat, and if it says so, the work."""
        for name in NAMES if all_of_them else NAMES[i : i + 1]:
            self._fetch(name)

    def _fetch(self, name: str) -> None:
        outcome = self.attempt(c.Heartbeat(name))
        if isinstance(outcome, errors.Refusal):
            assert type(outcome) is errors.NotAMember
            assert name not in self.session.members
            return
        assert outcome.reply == r.Heard()
        seen = advertise(self.session, name)
        word = self.book.get((seen.round, name))
        if seen.phase not in (Phase.COLLECTING, Phase.AGGREGATING):
            return
        assert self.session.open_round is not None
        assert seen.update_accepted == (word is not None)
        assert self.session.open_round.number - seen.round <= self._limit()
        if seen.phase is not Phase.COLLECTING or seen.update_accepted:
            return
        assignment = ask(self.session, AssignmentFor(name))
        assert isinstance(assignment, r.Assignment)
        # What was advertised is assigned: that round, with its own model.
        assert assignment.round == assignment.model.round == seen.round
        trained = seen.round - (self.rules.initial == "empty" and seen.round > 0)
        assert assignment.epoch_base == trained * self.rules.epochs
        assert assignment.epochs == (0 if assignment.model.is_empty else self.rules.epochs)
        held = self.work.get(name)
        if held is not None and held.told and held.round != seen.round:
            assert self._was_left_behind(name, held), "it was told to begin another round"
        if held is None or held.round != seen.round:
            self.num_trained += 1
            held = Work(seen.round, f"{name}@{seen.round}, {self.num_trained}")
        self.work[name] = Work(held.round, held.digest)

    def _was_left_behind(self, name: str, held: Work) -> bool:
        """A participant may drop what it trains only if that has been counted, or cannot be."""
        assert self.session.open_round is not None
        open_ = self.session.open_round.number
        from_nothing = self.rules.initial == "empty" and held.round == 0 < open_
        return (held.round, name) in self.book or from_nothing or open_ - held.round > self._limit()

    def _must_be_taken(self, name: str, held: Work) -> bool:
        """ASP takes whatever is brought by one who was never away, SSP what is not too old, BSP
        what is of the open round."""
        session = self.session
        if session.phase is not Phase.COLLECTING or not held.told or session.open_round is None:
            return False
        return not self._was_left_behind(name, held)

    @precondition(lambda self: self.work)
    @rule(i=INDEX, again=st.booleans())
    def bring(self, i: int, again: bool) -> None:
        """A result, whenever it was trained, and perhaps the same once more."""
        name = sorted(self.work)[i % len(self.work)]
        for _ in range(1 + again):
            self._bring(name)

    @precondition(lambda self: self.work and self.rules.refused_limit)
    @rule(i=INDEX)
    def bring_rubbish(self, i: int) -> None:
        """The server notes a refused update. A participant that is still asked trains again."""
        name = sorted(self.work)[i % len(self.work)]
        self.send(c.NoteRefusedUpdate(name, self.session.trained_by(name), "rubbish"))

    @precondition(lambda self: self.work)
    @rule(i=INDEX)
    def fail(self, i: int) -> None:
        """The participant's own code has failed, and it stays. Another participant replaces it."""
        name = sorted(self.work)[i % len(self.work)]
        if name not in self.session.members:
            return
        owed = self.session.owes_update(name)
        self.send(c.NoteFailure(name, self.session.trained_by(name), "TypeError"))
        round_ = self.session.open_round
        if owed and round_ is not None and self.session.phase is not Phase.FINISHED:
            assert name not in round_.selected or round_.number > self.work[name].round

    @rule(i=INDEX)
    def bring_all_but_one(self, i: int) -> None:
        """The others are faster."""
        self.fetch(i, all_of_them=True)
        for name in sorted(self.work):
            if name != NAMES[i]:
                self._bring(name)

    def _bring(self, name: str) -> None:
        held, before = self.work[name], self.session
        key = (held.round, name)
        word = self.book.get(key)
        must = self._must_be_taken(name, held)
        if word is None and before.open_round is not None:
            # Known before it is sent: what follows at once from it may be that it is aggregated.
            self.book[key] = (held.digest, before.open_round.number)
        weights = stored(update_key(held.round, name), held.digest)
        outcome = self.attempt(c.EndTrainingRound(name, held.round, 1, weights))
        if isinstance(outcome, Decision):
            accepted = [one for one in outcome.events if isinstance(one, e.UpdateAccepted)]
            if word is not None:
                assert word[0] == held.digest
                assert not accepted, "counted twice"
            else:
                (one,) = accepted
                assert before.open_round is not None
                assert one.round == before.open_round.number
                assert one.staleness == one.round - held.round <= self._limit()
            return
        if word is None:
            self.book.pop(key, None)
        assert not must, f"{held} of {name} was refused: {outcome!r}"
        if word is not None and word[0] == held.digest:
            # In SSP and ASP the latest of each participant is known, for any number of models.
            from_nothing = self.rules.initial == "empty" and held.round == 0
            forgets = self.rules.consistency == "bsp" or from_nothing or not held.told
            assert forgets, f"a resend was refused: {outcome!r}"
            assert word[1] < self._oldest_known(), f"a resend was refused: {outcome!r}"
        if isinstance(outcome, errors.LateUpdate) and word is None and held.told:
            assert self._is_over(held), f"{held} of {name} is still wanted: {outcome!r}"

    def _oldest_known(self) -> int:
        """Resends are recognised that count in the open round, or the last one before."""
        num_opened = sum(isinstance(event, e.RoundOpened) for _, event in self.journal)
        return num_opened - (1 if self.session.open_round is None else 2)

    def _is_over(self, held: Work) -> bool:
        """No model of the rounds to come can count it."""
        if self.session.phase is Phase.FINISHED:
            return True
        closed = len(self.aggregated)
        if closed == self.rules.num_rounds:
            return True
        from_nothing = self.rules.initial == "empty" and held.round == 0
        if from_nothing or self.rules.consistency == "bsp":
            return held.round < closed
        return closed - held.round > self._limit()

    # --- effects ---

    @precondition(lambda self: self.owed is not None)
    @rule()
    def answer(self) -> None:
        if self.owed is None:
            return
        done, self.owed = self.owed, None
        self.done.append(done)
        self.send(answer_to(done))

    @precondition(lambda self: self.session.open_round and self.session.open_round.updates)
    @rule(i=INDEX)
    def damage(self, i: int) -> None:
        """An accepted update turns out to be damaged. It is as if it had not come."""
        round_ = self.session.opened
        update = list(round_.updates.values())[i % len(round_.updates)]
        name = update.participant_id
        if self.session.phase is Phase.AGGREGATING:
            self.owed = None
            self.aggregated.pop()
        del self.book[round_.trained_by(name), name]
        self.send(c.NoteDamagedUpdates({update.weights.ref.key: "a bit"}))
        is_over = self.session.phase is Phase.FINISHED  # time has passed, and nobody had said so
        assert is_over or name not in self.session.opened.updates

    @precondition(lambda self: self.done)
    @rule(i=INDEX)
    def answer_again(self, i: int) -> None:
        outcome = self.attempt(answer_to(self.done[i % len(self.done)]))
        assert type(outcome) is errors.StaleModel

    # --- time ---

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 10.0, DEADLINE_S]), silent=st.none() | INDEX)
    def time_passes(self, seconds: float, silent: int | None) -> None:
        """All participants but one are heard all the time."""
        end = self.now + seconds
        while self.now < end and self.session.phase is not Phase.FINISHED:
            for name in self.session.members:
                if silent is None or name != NAMES[silent]:
                    self.send(c.Heartbeat(name))
            self.now = min(end, max(self.now, self._due()), self.now + 10.0)
            self._tick()
        self.now = end

    @rule(seconds=st.sampled_from([LEASE_S, 2 * DEADLINE_S, IDLE_S]), chance=st.integers(0, 9))
    def hold_up(self, seconds: float, chance: int) -> None:
        """Sometimes the coordinator is late with a Tick, and everything has run out meanwhile."""
        if chance == 0:
            self.now += seconds
            self._tick()

    @rule(num_brought=st.integers(0, 2), num_late=st.integers(0, 2))
    def a_deadline_passes(self, num_brought: int, num_late: int) -> None:
        """All participants are there all the time, but only some hand in, or too late."""
        self.fetch(0, all_of_them=True)
        names = sorted(self.work)
        for name in names[:num_brought]:
            self._bring(name)
        self.time_passes(DEADLINE_S, None)
        for name in names[num_brought : num_brought + num_late]:
            self._bring(name)

    @rule(times=st.integers(1, 3))
    def tick_when_due(self, times: int) -> None:
        """No participant is heard."""
        for _ in range(times):
            if self.session.phase is not Phase.FINISHED:
                self.now = max(self.now, self._due())
                self._tick()

    def _due(self) -> float:
        due = next_deadline(self.session)
        assert due is not None, "time stands still"
        return due

    def _tick(self) -> None:
        self.send(c.Tick())
        due = next_deadline(self.session)
        assert due is None or due > self.now, "the driver would spin"

    @rule()
    def power_cut(self) -> None:
        """State that was not durable is gone, and session time goes on from the last record."""
        self.now, _ = self.journal[-1]
        session = fold(replay([event for _, event in self.journal]), [e.Restarted(self.now)])
        assert session == self.session
        self.session = session
        again = resume(session)
        assert again == (() if self.owed is None else (self.owed,))

    # --- what holds after every step ---

    @invariant()
    def a_round_waits_only_for_what_it_needs(self) -> None:
        """COLLECTING means that an update is waited for; AGGREGATING, that its work is owed. What
        else must follow is said by the oracle after every command."""
        session, round_ = self.session, self.session.open_round
        if session.phase is Phase.COLLECTING:
            assert round_ is not None
            assert round_.outstanding or round_.failed or session.chosen_away
        elif session.phase is Phase.AGGREGATING:
            assert isinstance(self.owed, Aggregate)

    @invariant()
    def no_participant_is_further_ahead_than_the_staleness(self) -> None:
        round_ = self.session.open_round
        if round_ is None:
            return
        trained = [round_.trained_by(name) for name in round_.outstanding]
        assert all(0 <= round_.number - one <= self._limit() for one in trained)
        assert set(round_.carried) <= set(round_.selected)
        assert set(round_.outstanding) <= set(self.session.members)

    @invariant()
    def only_what_is_needed_is_kept(self) -> None:
        """Bounded by the training participants, for any number of rounds."""
        session = self.session
        carried = session.open_round.carried if session.open_round else session.buffered.carried
        assert session.open_round is None or session.buffered.carried == {}
        busy = session.open_round.selected if session.open_round else session.buffered.carried
        is_over = session.phase is Phase.FINISHED
        assert set(session.selection.unselected) == (
            set() if is_over else set(session.members) - set(busy)
        )
        assert set(session.buffered.bases) >= set(carried.values())
        assert len(session.buffered.bases) <= len(NAMES) + len(SPARE)
        assert session.earlier_rounds == set(carried.values())

    @invariant()
    def every_wait_has_its_end(self) -> None:
        """A Tick is due at the latest when the idle timeout runs out, or the deadline."""
        session, round_ = self.session, self.session.open_round
        if session.phase is Phase.FINISHED:
            return
        ends_at = self.oracle.gives_up_at
        if session.phase is Phase.COLLECTING and round_ is not None and round_.overdue_at is None:
            began = round_.opened_at if round_.reopened_at is None else round_.reopened_at
            ends_at = began + DEADLINE_S
        assert self._due() <= max(ends_at, self.now)

    @invariant()
    def session_time_is_written_down_often(self) -> None:
        """The cost of a power cut is bounded: a Tick is due before that."""
        if self.session.phase is not Phase.FINISHED:
            every_s = min(DEADLINE_S, IDLE_S) / 10
            assert self._due() <= self.session.noted_at + every_s

    # --- and at the end of every run ---

    def teardown(self) -> None:
        """Time alone brings it to an end, good will to its last model."""
        if not self.journal:
            return
        self._ends_by_itself(heard=False, answered=False)
        self._ends_by_itself(heard=True, answered=False)
        self._ends_by_itself(heard=True, answered=True)
        self._tick()
        for _ in range(60):
            self._advance()
        assert self.session.phase is Phase.FINISHED, f"stuck in {self.session}"
        if "rounds.idle_timeout_s" not in self.session.cause:
            assert self.session.cause == "completed"
            assert self.aggregated == list(range(self.rules.rounds))

    def _ends_by_itself(self, *, heard: bool, answered: bool) -> None:
        """On a copy: no participant hands in. heard: all members stay. answered: models are
        made."""
        session, now = self.session, self.now
        # A start that is waited for, the open round to its deadline, and its overdue updates; a
        # pause or a model that does not come begins the last wait anew.
        bound = now + START_TIMEOUT_S + LEASE_S + DEADLINE_S + 3 * IDLE_S
        while session.phase is not Phase.FINISHED and not session.waits_for_script:
            events = [
                e.ParticipantHeard(p, ParticipantState.READY, -1, now) for p in session.members
            ]
            session = fold(session, events if heard else [])
            due = next_deadline(session)
            assert due is not None, "time stands still"
            now = max(now, due)
            assert now <= bound, f"waits for ever in {session}"
            session = fold(session, decide(session, c.Tick(), now).events)
            due = next_deadline(session)
            assert due is None or due > now, "the driver would spin"
            while answered and (owed := resume(session)):
                (work,) = owed
                assert isinstance(work, InitialiseModel | Aggregate)
                session = fold(session, decide(session, answer_to(work), now).events)
                bound += DEADLINE_S

    @rule(steps=st.integers(1, 8))
    def go_on(self, steps: int) -> None:
        """For a while everything is well, but not to the end."""
        for _ in range(steps):
            if len(self.aggregated) < self.rules.rounds - 1:
                self._advance()

    def _advance(self) -> None:
        """One step of all good participants, in no time."""
        session = self.session
        if session.phase is Phase.FINISHED:
            return
        if self.owed is not None:
            self.answer()
        elif session.phase is Phase.COLLECTING and session.opened.outstanding:
            name = session.opened.outstanding[0]
            self._fetch(name)
            assert self._must_be_taken(name, self.work[name])
            self._bring(name)
        elif away := session.chosen_away:
            self.send(c.Rendezvous(away[0], PROFILE))
        else:
            absent = (name for name in (*NAMES, *SPARE) if name not in session.members)
            self.send(c.Rendezvous(next(absent), PROFILE))


TestPacingMachine = pytest.mark.timeout(600)(PacingMachine.TestCase)
TestPacingMachine.settings = settings(
    max_examples=300,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
