"""The driver: the only writer of a session.

Commands are decided one at a time, on the event loop, so no two ever race. Their events go to the
journal in groups: while one transaction is being written, the decisions of the next gather, and an
update waits gather_s for the others of its round. Nobody hears of anything before it is durable: a
reply, a refusal or an effect waits for the commit of all that was decided before it. That is why
there are two sessions here, `_decided`, which is ahead, and `session`, which is on disk.

If the journal cannot be written, what was decided is lost to everybody alike: nothing more is
answered, and the process is to end and be started again.

So that a start need not read all that ever happened, what it has led to is saved now and then.
Nobody waits for that, and nothing rests on it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

from xain_coordinator.core.machine.decider import decide, next_expiry, next_wait, resume
from xain_coordinator.core.machine.evolve import evolve, open_session
from xain_coordinator.core.machine.questions import MayUpload, Question, advertise, ask, is_late
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.machine.strategy import Strategy, builtin_strategy
from xain_coordinator.core.parts.points import late_point
from xain_coordinator.core.rules.selection import PluginFailed
from xain_coordinator.core.view.history import History
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.commands import (
    AggregationDone,
    Command,
    EndTrainingRound,
    Heartbeat,
    Tick,
)
from xain_coordinator.core.vocabulary.effects import Aggregate, Effect, Notify, RecordMetrics
from xain_coordinator.core.vocabulary.errors import (
    LateUpdate,
    NotAMember,
    Refusal,
    Unavailable,
)
from xain_coordinator.core.vocabulary.replies import Advertisement, Heard, Reply
from xain_coordinator.core.vocabulary.values import Lineage, ParticipantState, Phase, Rules
from xain_coordinator.driver.broadcast import Broadcast
from xain_coordinator.driver.lateness import Lateness
from xain_coordinator.journal.restore import restore
from xain_coordinator.ports import Clock, Journal, Record, Snapshot
from xain_coordinator.telemetry.log_files import LatencyFile
from xain_coordinator.telemetry.log_lines import (
    MAX_UPDATE_LINES,
    log_event,
    log_lacking,
    log_many_updates,
)
from xain_foundation.logs.logger import get_logger

log = get_logger(__name__)

# How soon leases are looked at again whose time may be up for what we are late with ourselves.
LOOK_AGAIN_S = 0.5

_STOPPING = "the coordinator is shutting down; try again in a moment"


@dataclass(frozen=True, slots=True)
class Made:
    """A model that is made. objects: by key, to be written to the journal with the command's
    events."""

    command: AggregationDone
    objects: Mapping[str, bytes]


class Worker(Protocol):
    """Runs the effects, and submits their results as commands."""

    def make_at_once(self, effect: Aggregate, objects: Mapping[str, bytes]) -> Made | None:
        """Make a small model of updates that are in memory. None if it is not small, an update is
        not in memory, or anything is wrong: `perform` makes it then. Does not wait.

        objects: updates that are not in the journal yet, by key.
        """

    def perform(self, effect: Effect) -> None:
        """Start an effect; must not block."""


@dataclass(slots=True)
class _Decided:
    """A decision whose events are being committed."""

    records: Sequence[Record]
    session: Session
    effects: Sequence[Effect]
    outcome: Reply | Refusal
    answer: asyncio.Future[Reply | Refusal]
    objects: Mapping[str, bytes]  # written with the records


class Driver:
    """Owner of a session: decides commands, commits their events, replies, runs effects.

    Made by `Driver.open`, then `start`ed inside a running event loop.

    num_late: updates that came when their round was over, each participant's once a round, since
        the start of the process.
    latencies: told how long after its round has opened each update is accepted.
    goes_on: whether another session follows the present one, once that is finished: participants
        then see STANDBY.
    took_part: participants that counted in earlier sessions of the same study.
    """

    # A snapshot is due at the end of a round when so many records have come since the last one. A
    # start reads them in the time that it takes to import what it needs, and they took fifty times
    # as long to be written as a snapshot does.
    snapshot_records = 10_000
    # Inside a round a snapshot is due after so many: participants may come and go for days.
    max_unsaved_records = 30_000
    # How long an update that leaves its round open waits for others to be committed with, at most.
    # A commit costs a small round a tenth of its time, and the last update would have to wait.
    gather_s = 0.01
    # How long an update waits for the model that is being made, and for the next round, which takes
    # it: a participant that cannot come again would give up.
    next_round_s = 30.0

    def __init__(
        self,
        session: Session,
        history: History,
        journal: Journal,
        clock: Clock,
        strategy: Strategy | None = None,
    ) -> None:
        self.session = session
        self.history = history
        self.clock = clock
        self.failed: asyncio.Event = asyncio.Event()
        self.failure: BaseException | None = None
        self.goes_on: Callable[[], bool] = lambda: False
        self.took_part: frozenset[str] = frozenset()
        self._decided = session
        self.strategy = strategy or builtin_strategy(session.rules)
        self._journal = journal
        self._opening: list[Record] = []  # to be written at the start
        self._worker: Worker | None = None
        self._waiting: list[_Decided] = []
        self._writing: list[_Decided] = []
        self._unwritten: dict[str, bytes] = {}  # small updates of `_waiting` and of its group
        self._committing = False
        self._gathering: asyncio.TimerHandle | None = None  # begins the commit of `_waiting`
        self._changes = Broadcast()
        self._timer: asyncio.TimerHandle | None = None
        self._expiry: float | None = None  # no lease ends before it; None: not known
        self._due = 0.0  # what the timer waits for
        self._looked_at = 0.0  # when the leases were last looked through
        self._active_at = 0.0
        self.lateness = Lateness(session.rules.lease_s, session.rules.heartbeat_time_s)
        self._closing = self._closed = False
        self._watchable = True
        self.num_late = 0
        self.latencies: LatencyFile | None = None
        self._late_rounds: dict[str, int] = {}  # the last round of each participant's late updates
        # Records of the session in the journal: how many, the time of the last one, and how many
        # there were when a snapshot was last begun.
        self._num_records = 0
        self._at = 0.0
        self._num_saved = 0
        self._saving = False
        self._disk = ThreadPoolExecutor(2, "journal")  # one appends, one saves
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def open(
        cls,
        journal: Journal,
        make_clock: Callable[[float], Clock],
        rules: Rules,
        new_session_id: Callable[[], str],
        *,
        new_session: bool = False,
        lineage: Lineage | None = None,
        make_strategy: Callable[[Rules], Strategy] = builtin_strategy,
    ) -> "Driver":
        """Take up the journal's latest session, or prepare a new one with these rules.

        Writes nothing: a new session is in the journal only from `start` on, so that whatever
        prevents the start, such as a busy port, leaves the one before in its place.

        The times for heartbeats are those of `rules`, also of a session that is taken up.

        make_clock: a clock that begins at the given session time.
        lineage: of a new session whose first model is given to `begin_with`.
        make_strategy: of the rules of the session, which need not be `rules`.
        Raises JournalError, and PluginFailed if a plug-in of the session cannot be had.
        """
        restored = None if new_session else restore(journal)
        if restored is None:
            clock = make_clock(0.0)
            unix_s = clock.wall_ns() // 10**9
            session, opened = open_session(new_session_id(), rules, clock.now(), lineage, unix_s)
            strategy = make_strategy(rules)
            driver = cls(session, History(rules=rules), journal, clock, strategy)
            driver._opening.append(Record(opened.at, opened))
            return driver
        last, num_saved = restored
        clock = make_clock(last.at)
        session = evolve(last.session, e.Restarted(clock.now()))
        kept = session.rules
        opening: list[Record] = []
        changed = e.HeartbeatChanged(rules.heartbeat_time_s, rules.heartbeat_timeout_s)
        before = e.HeartbeatChanged(kept.heartbeat_time_s, kept.heartbeat_timeout_s)
        if changed != before and session.phase is not Phase.FINISHED:
            session = evolve(session, changed)
            opening.append(Record(clock.now(), changed))
        strategy = make_strategy(kept)
        last.history.max_lost_share = rules.max_lost_share
        last.history.max_share = rules.max_share
        driver = cls(session, last.history, journal, clock, strategy)
        driver._opening = opening
        driver._num_records, driver._at, driver._num_saved = last.num_records, last.at, num_saved
        return driver

    @property
    def is_new(self) -> bool:
        """Whether the session is a new one that is not in the journal yet."""
        return any(isinstance(record.event, e.SessionOpened) for record in self._opening)

    @property
    def num_records(self) -> int:
        """Events of the session on the disk, to which `session` is folded."""
        return self._num_records

    @property
    def is_closed(self) -> bool:
        """Whether the journal is closed, or about to be."""
        return self._closed

    def begin_with(self, events: Sequence[e.DurableEvent]) -> None:
        """Add events to the beginning of a new session. To be called before `start`, which writes
        them."""
        assert self.is_new, "the session has begun"
        for event in events:
            self.session = self._decided = evolve(self.session, event)
            self.history.apply(event)
            self._opening.append(Record(self._opening[0].at, event))

    def start(self, worker: Worker) -> None:
        """Begin to decide commands, after the effects that the last process still owed. Raises
        JournalError if the beginning of a new session cannot be written."""
        if self._opening:
            self._journal.append(self._opening)  # blocks, but no call is served yet
            self._num_records += len(self._opening)
            self._at = self._opening[-1].at
            self._opening = []
        self._worker = worker
        for effect in resume(self.session):
            worker.perform(effect)
        self._active_at = self.clock.now()
        self._arm()
        self._save_if_due(self.snapshot_records)  # not even the next start is to read so much again

    async def submit(self, command: Command, update: bytes = b"") -> Reply:
        """Decide a command; the answer comes when all that led to it is durable.

        update: of an EndTrainingRound whose update is to lie in the journal.
        Raises the core's Refusals, and Unavailable while closing or after a failure, such as of the
        controller.
        """
        began = asyncio.get_running_loop().time()
        while True:
            decided = self._decided
            try:
                # However slow the journal is: what was decided counts, and its sender hears so.
                return _reply_or_raise(await self._outcome(command, update))
            except Refusal as refusal:
                if not refusal.waits:
                    raise
                # While the refusal waited for the disk, the next round may have been decided.
                if self._decided is decided:
                    try:
                        async with asyncio.timeout_at(began + self.next_round_s):
                            await self.wait_for_change()
                    except TimeoutError:
                        raise refusal from None

    async def ask(self, question: Question) -> Reply:
        """Answer a question by all that was decided. The answer comes at once where the session on
        disk gives the same one: a fleet asks for the work of a round while the first updates of
        that round are being written. Any other answer, and every refusal, waits until all that led
        to it is durable.

        Raises the core's Refusals, and Unavailable as `submit` does.
        """
        return _reply_or_raise(await self._answer(question))

    async def _answer(self, question: Question) -> Reply | Refusal:
        """The answer to a question, or its refusal without the traceback. It waits for the disk
        unless the durable session answers the same. A late update is counted. Raises
        Unavailable."""
        self._take_up()
        outcome = _answer_or_refusal(self._decided, question)
        effects: Sequence[Effect] = ()
        if isinstance(outcome, LateUpdate) and isinstance(question, MayUpload):
            effects = self._note_late(question)
        if self._is_durable:
            if effects or self.session is not self._decided:
                self._take_effect((), self._decided, effects)
            return outcome
        if outcome == _answer_or_refusal(self.session, question):  # two refusals are never equal
            return outcome
        return await self._when_durable((), effects, outcome, {}).answer

    async def _outcome(self, command: Command, update: bytes) -> Reply | Refusal:
        """Decide a command, and give its reply, or its refusal without the traceback, once its
        records are on disk. A model that is small enough is made at once. Raises Unavailable."""
        now = self._take_up()
        records: Sequence[Record] = ()
        effects: Sequence[Effect] = ()
        outcome: Reply | Refusal
        try:
            decision = decide(self._decided, command, now, self.strategy)
        except PluginFailed as failed:
            # The session has not changed. Once the plug-in is mended, it goes on from here.
            self.fail(failed)
            raise Unavailable("a plug-in of the coordinator has failed; its log says why") from None
        except Refusal as refusal:
            outcome = refusal.with_traceback(None)
            if isinstance(refusal, LateUpdate) and isinstance(command, EndTrainingRound):
                effects = self._note_late(command)
        else:
            outcome, effects = decision.reply, decision.effects
            if isinstance(command, Heartbeat) and command.waited_s is not None:
                self.lateness.note_wait(command.participant_id, now, command.waited_s)
            self._decided = decision.session
            if not isinstance(outcome, Heard):
                records = _records(decision.events, now)
            if isinstance(command, Tick):
                # Before it is on the disk: that we stand still until then is to be seen, too.
                self._arm()
        is_durable = self._is_durable
        if not records and (is_durable or isinstance(outcome, Heard)):
            # A sign of life does not wait for a disk that is busy, and costs no participant its
            # lease.
            self._take_effect((), self._decided if is_durable else self.session, effects)
            return outcome
        objects = _objects(records, update) if update else {}
        self._unwritten |= objects
        # The decision waits for the disk before a model is made of it: an error then must not lose
        # the records of what `_decided` and the next replies take as given.
        decided = self._when_durable(records, effects, outcome, objects)
        if effects:
            made, decided.effects = self._make_at_once(effects)
            if made is not None:
                self._decide_made(made, now)
        return await decided.answer

    def _take_up(self) -> float:
        """Take up a command or a question: note activity, and a stall of the timer. Returns the
        time. Raises Unavailable while the driver does not run."""
        if self._worker is None or self._closing or self.failure is not None:
            raise Unavailable(_STOPPING)
        now = self.clock.now()
        if now > self._due:
            self._note_stall(now)
        self._active_at = now
        return now

    @property
    def _is_durable(self) -> bool:
        """Whether all that was decided is on disk."""
        return not self._waiting and not self._committing

    def _when_durable(
        self,
        records: Sequence[Record],
        effects: Sequence[Effect],
        outcome: Reply | Refusal,
        objects: Mapping[str, bytes],
    ) -> _Decided:
        """Queue records behind all decided before. When they are on disk, the reply is given and
        the effects run. An update that leaves its round open waits gather_s for others; all else
        begins a commit."""
        answer: asyncio.Future[Reply | Refusal] = asyncio.get_running_loop().create_future()
        decided = _Decided(records, self._decided, effects, outcome, answer, objects)
        self._waiting.append(decided)
        if self._committing:
            return decided
        if len(records) != 1 or not isinstance(records[0].event, e.UpdateAccepted):
            self._begin_commit()
        elif self._gathering is None:  # an update that its round does not close with
            loop = asyncio.get_running_loop()
            self._gathering = loop.call_later(self.gather_s, self._begin_commit)
        return decided

    def _begin_commit(self) -> None:
        """Begin to write what waits; an update that waited for others waits no more."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        self._committing = True
        self._spawn(self._commit())

    def _make_at_once(self, effects: Sequence[Effect]) -> tuple[Made | None, Sequence[Effect]]:
        """Make a small model at once if the effects ask for one. Returns it, or None, and the
        effects that are left.

        The model and the opening of the next round are then committed with the update that closed
        the round: no transaction more, and no object of the store.
        """
        work = next((effect for effect in effects if isinstance(effect, Aggregate)), None)
        if work is None or self._worker is None:
            return None, effects
        made = self._worker.make_at_once(work, self._unwritten)
        return made, effects if made is None else [one for one in effects if one is not work]

    def _decide_made(self, made: Made, now: float) -> None:
        """Decide what follows from a model that was made at once. Called right after the decision
        that asked for it, so that both are in one group."""
        try:
            decision = decide(self._decided, made.command, now, self.strategy)
        except Exception as error:  # a plug-in's, or a defect of ours
            self.fail(error)  # the round is closed; the next start makes the model again
            return
        self._decided = decision.session
        records = _records(decision.events, now)
        self._when_durable(records, decision.effects, decision.reply, made.objects)

    async def _commit(self) -> None:
        """Write all that waits to the journal, group by group, until nothing waits. After each
        group its replies are given and its effects run. If the journal fails, all callers are
        refused and the driver fails."""
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                group, self._waiting = self._waiting, []
                self._writing = group
                records: list[Record] = []
                objects: dict[str, bytes] = {}
                for decided in group:
                    records += decided.records
                    objects |= decided.objects
                kinds = {type(record.event) for record in records}
                if records:
                    commit = self._journal.prepare(records, objects)
                    await loop.run_in_executor(self._disk, commit)
                    for key in objects:
                        self._unwritten.pop(key, None)
                is_logged = len(records) > MAX_UPDATE_LINES and log_many_updates(records)
                for decided in group:
                    self._take_effect(
                        decided.records, decided.session, decided.effects, is_logged=is_logged
                    )
                    _resolve(decided.answer, decided.outcome)
                if e.ParticipantJoined in kinds:
                    self._begin_leases(group)
                if records:
                    self._num_records, self._at = self._num_records + len(records), records[-1].at
                    self._arm()
                    is_over = e.ModelPublished in kinds
                    limit = self.snapshot_records if is_over else self.max_unsaved_records
                    self._save_if_due(limit)
        except Exception as error:  # after any error every caller of this group needs an answer
            self.fail(error)
            for decided in [*group, *self._waiting]:
                _resolve(decided.answer, Unavailable("the coordinator lost its journal"))
            self._waiting = []
        finally:
            self._committing, self._writing = False, []

    def _begin_leases(self, joins: Iterable[_Decided]) -> None:
        """Begin anew the leases of participants whose joins are being written: none of them can
        send a sign of life before its join, which waits for the disk, is answered.

        Nothing after the end of the session: a sign of life then says that its sender has heard of
        the end.
        """
        if self._decided.phase is Phase.FINISHED:
            return
        now = self.clock.now()
        for decided in joins:
            for record in decided.records:
                if isinstance(record.event, e.ParticipantJoined):
                    joined = record.event.participant_id
                    if joined in self._decided.members:
                        sign = Heartbeat(joined)
                        self._decided = decide(self._decided, sign, now, self.strategy).session

    def _take_effect(
        self,
        records: Sequence[Record],
        session: Session,
        effects: Sequence[Effect],
        *,
        is_logged: bool = False,
    ) -> None:
        """Make a session that is on disk the one that others see: history, log and watchers learn
        of its records, and its effects run. is_logged: the log has a line already for all updates
        that are accepted here."""
        assert self._worker is not None, "start() comes first"
        for record in records:
            self.history.apply(record.event)
            if not (is_logged and isinstance(record.event, e.UpdateAccepted)):
                log_event(self.session, session, record.event, self.history)
            if self.latencies is not None and isinstance(record.event, e.UpdateAccepted):
                _note_latency(self.latencies, self.session, record.at, record.event)
        if session.model is not None and session.model.is_empty:
            log_lacking(self.session, session)
        self.session = session
        for effect in effects:
            if isinstance(effect, Notify):
                self._changes.wake()
            else:
                self._worker.perform(effect)

    def _note_late(self, sent: MayUpload | EndTrainingRound) -> Sequence[Effect]:
        """Count a late update that was awaited, once for each participant and round. Returns the
        effect that records it; none if it does not count.

        A participant that the weights port has refused asks again through gRPC.
        """
        participant_id, round_ = sent.participant_id, sent.round
        is_counted = self._late_rounds.get(participant_id, -1) >= round_
        if is_counted or not is_late(self._decided, participant_id, round_):
            return ()
        self.num_late += 1
        self._late_rounds[participant_id] = round_
        members = self.session.members
        if len(self._late_rounds) > 2 * len(members) + 100:
            self._late_rounds = {p: r for p, r in self._late_rounds.items() if p in members}
        log.info("update_late", round=round_, participant=participant_id)
        return (RecordMetrics((late_point(participant_id, round_),)),)

    def fail(self, error: BaseException) -> None:
        """Note an error after which the coordinator cannot continue: `failed` is set, and watches
        end. The process should end; only the first error is kept."""
        if self.failure is None:
            self.failure = error
            log.error("coordinator_failed", error=str(error), kind=type(error).__name__)
        self.failed.set()
        self._changes.wake()

    # --- snapshots ---

    def _save_if_due(self, num_records: int) -> None:
        """Save a snapshot of the durable session, beside the appends, if enough records have come
        since the last one."""
        if self._saving or self._num_records - self._num_saved < num_records:
            return
        # If it fails, it is tried again when as many have come again.
        self._num_saved = self._num_records
        self._saving = True
        snapshot = Snapshot(self._num_records, self._at, self.session, self.history.copy())
        self._spawn(self._save(snapshot))

    async def _save(self, snapshot: Snapshot) -> None:
        """Save a snapshot in a thread. A failure is logged and costs the next start some time."""
        round_ = snapshot.session.round
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._disk, self._journal.save, snapshot)
        except Exception as error:
            # Without the snapshot the next start takes longer; no record is lost, not even by a
            # defect of ours. If the disk is full, the next append says so.
            log.warning("snapshot_failed", round=round_, error=str(error))
            log.debug("snapshot_failed_because", exc_info=error)
        else:
            log.debug("snapshot_saved", round=round_, num_records=snapshot.num_records)
        finally:
            self._saving = False

    # --- time ---

    def _arm(self) -> None:
        """Set the timer for the session's next deadline. Heartbeats only move deadlines later, so
        they need not set it: at worst a tick finds nothing due.

        The leases, of which there may be thousands, are looked through at ticks only. A participant
        that joins or is heard in between has a longer lease than the first that was found then.
        """
        now = self.clock.now()
        if now > self._due:
            self._note_stall(now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._expiry is None:
            self._expiry = next_expiry(self._decided)
        due = [
            at for at in (self._expiry, next_wait(self._decided, self.strategy)) if at is not None
        ]
        if self.lateness.at(now):
            # Counted from the last look, not from now: commits must not put the next one off.
            again_at = self._looked_at + LOOK_AGAIN_S
            due = [max(at, again_at) if at == self._expiry else at for at in due]
        if due and not self._closing:
            self._due = max(now, min(due))
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._due - now, lambda: self._spawn(self._tick()))

    def _note_stall(self, now: float) -> None:
        """Note that the process stood still past its timer. The first work after the stall must do
        it, before it looks like activity or sets another timer."""
        if self._timer is not None:
            self.lateness.note_stall(now, self._due, self._active_at)

    async def _tick(self) -> None:
        """Let the session act on its deadlines. Leases of participants whose join is being written
        begin anew first."""
        now = self._looked_at = self.clock.now()
        self._note_stall(now)
        self._begin_leases([*self._writing, *self._waiting])
        self._expiry = None  # to be found anew without the members that have gone
        try:
            await self.submit(Tick(self.lateness.at(now)))
        except Unavailable:
            return
        except Exception as error:
            # No caller waits for a tick: going on would be a session whose time stands still.
            log.exception("tick_crashed", round=self.session.round)
            self.fail(error)

    # --- watching ---

    def advertise(self, participant_id: str) -> Advertisement:
        """The state as a participant sees it, by what is durable; STANDBY between two sessions."""
        seen = advertise(self.session, participant_id)
        if seen.phase is Phase.FINISHED and self.goes_on():
            return replace(seen, phase=Phase.STANDBY)
        return seen

    async def watch(
        self, participant_id: str, instance_id: str = ""
    ) -> AsyncIterator[Advertisement]:
        """States as this process of a participant sees them: now, and after every change.

        Ends after FINISHED. Where another session may follow it stays open, so that participants
        hear at once that the next session is opened. Raises NotAMember when the participant
        is not, or no longer, in the session, and Unavailable when the coordinator stops.
        """
        last: Advertisement | None = None
        while True:
            if not self._watchable or self.failure is not None:
                raise Unavailable(_STOPPING)
            finished = self.session.phase is Phase.FINISHED
            if not finished and not self.session.members.is_instance(participant_id, instance_id):
                raise NotAMember(participant_id)
            seen = self.advertise(participant_id)
            is_last = seen.phase is Phase.FINISHED and self.session.rules.start != "request"
            if is_last and seen != last:
                # Written down before it is sent: a participant that has read it closes the stream.
                with contextlib.suppress(Unavailable):
                    await self.submit(
                        Heartbeat(participant_id, ParticipantState.FINISHED, seen.round)
                    )
            if last is None or _is_news(seen, last):
                yield seen
                last = seen
                continue  # something may have changed while it was being sent
            if is_last:
                return
            await self._changes.wait()

    async def wait_for_change(self) -> None:
        """Wait for the next change that watchers may see. Raises Unavailable when the coordinator
        stops."""
        if self._watchable and self.failure is None:
            await self._changes.wait()
        if not self._watchable or self.failure is not None:
            raise Unavailable(_STOPPING)

    # --- the end ---

    def end_watches(self) -> None:
        """End every watch with Unavailable, so that a server waiting for its calls can stop."""
        self._watchable = False
        self._changes.wake()

    async def end(self) -> None:
        """Refuse new commands, end watches, and wait until the decided events are on disk."""
        self._closing = True
        self.end_watches()
        if self._timer is not None:
            self._timer.cancel()
        if self._gathering is not None:
            self._begin_commit()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """End the driver and close the journal. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        await self.end()
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, self._journal.close)
        finally:
            self._disk.shutdown()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task of its own, which end() waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _note_latency(
    latencies: LatencyFile, before: Session, at: float, event: e.UpdateAccepted
) -> None:
    """Write down how long after the opening of its round an update was accepted. before: the
    session that accepted it."""
    round_ = event.round - event.staleness
    base = before.base if round_ == event.round else before.buffered.bases[round_]
    latencies.update(event.update.participant_id, round_, at - base.opened_at)


def _records(events: Iterable[e.Event], now: float) -> Sequence[Record]:
    """Records of those events that are durable."""
    return [Record(now, event) for event in events if not isinstance(event, e.SoftEvent)]


def _objects(records: Iterable[Record], update: bytes) -> Mapping[str, bytes]:
    """The bytes of an update by its key, if one of these records accepts it; else none."""
    for record in records:
        if isinstance(record.event, e.UpdateAccepted):
            return {record.event.update.weights.ref.key: update}
    return {}


def _is_news(seen: Advertisement, last: Advertisement) -> bool:
    """Whether a participant is told of a state after the last one. A participant that waits is not
    told of each round: a message to all of 2,000 would hold up their heartbeats for 0.2 s."""
    if seen.phase is last.phase is Phase.STANDBY:
        return seen.warning != last.warning
    return seen != last


def _answer_or_refusal(session: Session, question: Question) -> Reply | Refusal:
    """The session's answer to a question, or its refusal without the traceback."""
    try:
        return ask(session, question)
    except Refusal as refusal:
        return refusal.with_traceback(None)


def _reply_or_raise(outcome: Reply | Refusal) -> Reply:
    """Return a reply, or raise a refusal."""
    if not isinstance(outcome, Refusal):
        return outcome
    try:
        raise outcome
    finally:
        # The refusal holds this frame, which must not hold the refusal: only the garbage collector
        # would free them, and with them whatever the callers hold.
        del outcome


def _resolve(answer: asyncio.Future[Reply | Refusal], outcome: Reply | Refusal) -> None:
    """Give a caller its outcome, unless it has gone."""
    if not answer.done():  # else the caller has gone; what it asked for has happened all the same
        answer.set_result(outcome)
