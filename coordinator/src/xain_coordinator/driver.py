"""The one owner of the session.

Commands are decided one at a time, on the event loop, so no two ever race. Their events go to the
journal in groups: while one transaction is being written, the decisions of the next gather. Nobody
hears of anything before it is durable: a reply, a refusal or an effect waits for the commit of all
that was decided before it. That is why there are two sessions here, `_decided`, which is ahead, and
`session`, which is on disk.

If the journal cannot be written, what was decided is lost to everybody alike: nothing more is
answered, and the process is to end and be started again.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from xain_coordinator.core import events as e
from xain_coordinator.core.commands import Command, Tick
from xain_coordinator.core.effects import Effect, Notify
from xain_coordinator.core.errors import NotAMember, Refusal, Unavailable
from xain_coordinator.core.replies import Advertisement, Reply, UploadTo
from xain_coordinator.core.session import (
    Session,
    advertise,
    begin,
    decide,
    evolve,
    fold,
    next_deadline,
    open_session,
    resume,
)
from xain_coordinator.core.values import Phase, Rules
from xain_coordinator.history import History
from xain_coordinator.ports import Clock, Journal, JournalError, Record

log = structlog.get_logger(__name__)

_STOPPING = "the coordinator is shutting down; try again in a moment"


class Worker(Protocol):
    """Does the effects. What it brings back, it submits."""

    def perform(self, effect: Effect) -> None:
        """Begin; must not block."""


@dataclass(slots=True)
class _Decided:
    """A decision on its way to the disk."""

    records: Sequence[Record]
    session: Session
    effects: Sequence[Effect]
    outcome: Reply | Refusal
    answer: asyncio.Future[Reply]


class Driver:
    """Make one with `Driver.open`, then `start` it inside a running event loop."""

    def __init__(self, session: Session, history: History, journal: Journal, clock: Clock) -> None:
        self.session = session
        self.history = history
        self.clock = clock
        self.failed: asyncio.Event = asyncio.Event()
        self.failure: BaseException | None = None
        self._decided = session
        self._journal = journal
        self._opening: Record | None = None
        self._worker: Worker | None = None
        self._waiting: list[_Decided] = []
        self._committing = False
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._watchable = True
        self._disk = ThreadPoolExecutor(1, "journal")
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
    ) -> "Driver":
        """Take up the journal's latest session, or prepare a new one with these rules.

        Writes nothing: a new session is in the journal only from `start` on, so that whatever
        prevents the start, such as a busy port, leaves the one before in its place.

        make_clock: a clock that begins at the given session time.
        Raises JournalError.
        """
        records = [] if new_session else journal.load()
        if not records:
            clock = make_clock(0.0)
            session, opened = open_session(new_session_id(), rules, clock.now())
            driver = cls(session, History(), journal, clock)
            driver._opening = Record(opened.at, opened)
            return driver
        session, history = _replay(records)
        clock = make_clock(records[-1].at)
        return cls(evolve(session, e.Restarted(clock.now())), history, journal, clock)

    def start(self, worker: Worker) -> None:
        """Begin to decide; what was owed when the last process died is done first.

        Raises JournalError if a new session cannot be written.
        """
        self._worker = worker
        if self._opening is not None:
            self._journal.append([self._opening])  # blocks, but nobody is served yet
            self._opening = None
        for effect in resume(self.session):
            worker.perform(effect)
        self._arm()

    async def submit(self, command: Command) -> Reply:
        """Decide a command; the answer comes when all that led to it is durable.

        Raises the core's Refusals, and Unavailable while closing or after a failure.
        """
        if self._closing or self.failure is not None:
            raise Unavailable(_STOPPING)
        now = self.clock.now()
        records: list[Record] = []
        effects: Sequence[Effect] = ()
        outcome: Reply | Refusal
        try:
            decision = decide(self._decided, command, now)
        except Refusal as refusal:
            outcome = refusal
        else:
            outcome, effects = decision.reply, decision.effects
            self._decided = fold(self._decided, decision.events)
            records = [
                Record(now, event)
                for event in decision.events
                if not isinstance(event, e.SoftEvent)
            ]
        if isinstance(outcome, UploadTo):
            return outcome  # an instruction to ourselves: nobody hears of it, so it need not wait
        if not records and not self._waiting and not self._committing:
            self._take_effect((), self._decided, effects)
            return _unwrap(outcome)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Decided(records, self._decided, effects, outcome, answer))
        if not self._committing:
            self._committing = True
            self._spawn(self._commit())
        return await answer

    async def _commit(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                group, self._waiting = self._waiting, []
                records = [record for decided in group for record in decided.records]
                if records:
                    await loop.run_in_executor(self._disk, self._journal.append, records)
                for decided in group:
                    self._take_effect(decided.records, decided.session, decided.effects)
                    _resolve(decided.answer, decided.outcome)
                if records:
                    self._arm()
        except Exception as error:  # whatever it is, nobody may wait for this group for ever
            self.fail(error)
            for decided in [*group, *self._waiting]:
                _resolve(decided.answer, Unavailable("the coordinator lost its journal"))
            self._waiting = []
        finally:
            self._committing = False

    def _take_effect(
        self, records: Sequence[Record], session: Session, effects: Sequence[Effect]
    ) -> None:
        assert self._worker is not None, "start() comes first"
        for record in records:
            self.history.apply(record.event)
            _log_event(session, record.event)
        self.session = session
        for effect in effects:
            if isinstance(effect, Notify):
                self._wake_watchers()
            else:
                self._worker.perform(effect)

    def fail(self, error: BaseException) -> None:
        """Something the coordinator cannot go on after; the process should end."""
        if self.failure is None:
            self.failure = error
            log.error("coordinator_failed", error=str(error), kind=type(error).__name__)
        self.failed.set()
        self._wake_watchers()

    # --- time ---

    def _arm(self) -> None:
        """Wake up when something is due. Heartbeats only ever move that later, so they need not
        come here: at worst a tick finds nothing to do and sleeps again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = next_deadline(self._decided)
        if deadline is not None and not self._closing:
            delay = max(0.0, deadline - self.clock.now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._spawn(self._tick())

    async def _tick(self) -> None:
        try:
            await self.submit(Tick())
        except Unavailable:
            return
        except Exception as error:
            # Nobody waits for a tick: going on would be a session whose time stands still.
            log.exception("tick_crashed", round=self.session.round)
            self.fail(error)
            return
        self._arm()

    # --- watching ---

    async def watch(self, participant_id: str) -> AsyncIterator[Advertisement]:
        """The state as this participant sees it: now, and after every change.

        Ends after FINISHED. Raises NotAMember when it is not, or no longer, in the session, and
        Unavailable when the coordinator stops.
        """
        last: Advertisement | None = None
        while True:
            changed = self._changed
            if not self._watchable or self.failure is not None:
                raise Unavailable(_STOPPING)
            finished = self.session.phase is Phase.FINISHED
            if not finished and participant_id not in self.session.members:
                raise NotAMember(participant_id)
            seen = advertise(self.session, participant_id)
            if seen != last:
                yield seen
                last = seen
                continue  # something may have changed while it was being sent
            if finished:
                return
            await changed.wait()

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- the end ---

    def end_watches(self) -> None:
        """Every watch ends with Unavailable, so that a server waiting for its calls can stop."""
        self._watchable = False
        self._wake_watchers()

    async def close(self) -> None:
        """Refuse what comes from now on, wait for what is on its way to the disk, and close the
        journal. Harmless when repeated."""
        if self._closing:
            return
        self._closing = True
        self.end_watches()
        if self._timer is not None:
            self._timer.cancel()
        while self._committing:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, self._journal.close)
        finally:
            self._disk.shutdown()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _replay(records: Sequence[Record]) -> tuple[Session, History]:
    """Raises JournalError."""
    first, *later = records
    if not isinstance(first.event, e.SessionOpened):
        raise JournalError(
            f"the journal begins with {type(first.event).__name__}, not with a session"
        )
    session, history = begin(first.event), History()
    for number, record in enumerate(later, 1):
        try:
            session = evolve(session, record.event)
            history.apply(record.event)
        except Exception as error:  # whatever a record leads to that this version never writes
            raise JournalError(
                f"the journal cannot be replayed: record {number}, {type(record.event).__name__}: "
                f"{type(error).__name__}: {error}; use the version of the program that wrote it"
            ) from error
    return session, history


def _unwrap(outcome: Reply | Refusal) -> Reply:
    if isinstance(outcome, Refusal):
        raise outcome
    return outcome


def _resolve(answer: asyncio.Future[Reply], outcome: Reply | Refusal) -> None:
    if answer.done():  # the caller has gone away; what it asked for has happened all the same
        return
    if isinstance(outcome, Refusal):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def _log_event(session: Session, event: e.DurableEvent) -> None:
    fields: dict[str, object] = {"round": session.round}
    match event:
        case e.ParticipantJoined(participant_id):
            log.info(
                "participant_joined",
                participant=participant_id,
                connected=len(session.members),
                required=session.rules.num_required,
                **fields,
            )
        case e.ParticipantLeft(participant_id, cause):
            log.info("participant_left", participant=participant_id, cause=cause, **fields)
        case e.RoundOpened(number, selected):
            log.info("round_opened", round=number, participant=list(selected))
        case e.ParticipantsSelected(number, selected):
            log.info("participants_selected", round=number, participant=list(selected))
        case e.RoundPaused(number):
            log.warning("round_paused", round=number, connected=len(session.members))
        case e.RoundResumed(number):
            log.info("round_resumed", round=number, connected=len(session.members))
        case e.UpdateAccepted(number, update):
            log.info(
                "update_accepted",
                round=number,
                participant=update.participant_id,
                num_samples=update.num_samples,
            )
        case e.ModelPublished(number, model):
            log.info("model_published", round=number, key=model.ref.key)
        case e.SessionFinished(cause):
            log.info("session_finished", cause=cause, **fields)
        case _:
            log.debug(type(event).__name__, **fields)
