"""Runs a participant against a coordinator: threads, clock and log around the Protocol.

    run(participant, "localhost:50051")

The calling thread takes one event after another, asks the Protocol, carries out the actions, and
sends the heartbeats, so they go on while the participant trains. A worker thread does one piece of
work at a time, and handles the events of its work itself while the calling thread waits: two
threads that wake each other four times took a sixth of a small round's processor time. A watch
thread listens, and only posts events. Where fitted estimators stay at the participant, one more
thread answers questions for predictions. Why no coordinator answers, a thread looks that ends with
its line of the log.
"""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from random import Random
from threading import Thread
from typing import TYPE_CHECKING

import grpc

from xain_foundation.exit_statuses import EXIT_FAILED, EXIT_NO_BETTER, EXIT_NOTHING_COUNTED
from xain_foundation.logs.logger import get_logger
from xain_foundation.names import why_not
from xain_foundation.net.backoff import Backoff
from xain_foundation.net.channels import proxy_to, require_private_way
from xain_foundation.settings import tags as tag_rules
from xain_participant.agent.alive import Alive
from xain_participant.agent.answering import Answering
from xain_participant.agent.protocol import Held, Protocol, jittered
from xain_participant.agent.runtime import Runtime
from xain_participant.agent.work import Work
from xain_participant.keep.state import StateDirectory
from xain_participant.sdk import actions as a
from xain_participant.sdk import events as e
from xain_participant.sdk.failures import Failure
from xain_participant.sdk.identity import default_participant_id, new_instance_id
from xain_participant.sdk.participant import Participant
from xain_participant.sdk.values import Call, State, Timer
from xain_participant.wire.client import CoordinatorClient, OpenChannel, Refused, open_channel
from xain_participant.wire.direct import DirectTransfer, OfferFailed
from xain_participant.wire.download import Download
from xain_participant.wire.upload import Upload
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.refusals_pb2 import RefusalReason
from xain_workloads.tables.division import Division
from xain_workloads.tables.profile import DataProfile

if TYPE_CHECKING:
    from xain_foundation.security.tls import Certificates
    from xain_participant.enrolment.upkeep import Upkeep

# A stop waits for the goodbye this long; a lost goodbye ends by the coordinator's lease.
LEAVE_TIMEOUT_S = 2.0
# Threads that are not in the participant's own code end by themselves once the channel is closed.
JOIN_TIMEOUT_S = 2.0

# Why a coordinator is away is looked at again after this.
LOOK_AGAIN_S = 15.0
NO_WATCH_PAUSE_S = 30.0  # where there is no stream
# How long a participant waits to divide its rows while the last training of another session ends.
DIVIDE_PAUSE_S = 0.5

_NOT_A_MEMBER = RefusalReason.Name(RefusalReason.NOT_A_MEMBER)
# Statuses that gRPC itself gives to a call for which no coordinator is reached.
AWAY = (grpc.StatusCode.UNAVAILABLE.name, grpc.StatusCode.DEADLINE_EXCEEDED.name)

# A state that we do not know asks nothing of us, as STANDBY does.
_STATES: Mapping[int, State] = {pb.ROUND: State.ROUND, pb.FINISHED: State.FINISHED}

# A step such as "training" or "handed_in", its round (the last one that was begun, or -1), and why.
Observer = Callable[[str, int, str], None]


def run(
    participant: Participant,
    target: str,
    participant_id: str | None = None,
    *,
    tags: Mapping[str, str] | None = None,
    direct: bool = True,
    observer: Observer | None = None,
    alive: Alive | None = None,
    state: StateDirectory | None = None,
    instance_id: str | None = None,
    tells_messages: bool = False,
    serve: bool = False,
    tls: "Certificates | None" = None,
    insecure: bool = False,
) -> int:
    """Take part until the session is finished. Returns the exit status for the process.

    0: finished. 1: the participant's code failed, the coordinator refuses us or our updates for
    good, or the session has ended without a result. 5: there is nothing to train on, or the session
    is finished and nothing that we trained counted in it; initial weights are not trained.
    target: HOST:PORT. participant_id: by default the state's, or the host's name and a random
    suffix.
    tags: what a selection may ask for, such as {"site": "north"}.
    direct: fetch and put weights at the URLs that the coordinator offers; if not, through it.
    observer: told every step, in one thread at a time. alive: the file of the health check.
    state: keeps a result until it is handed in, so that a participant that is killed after training
    need not train again. It stays open.
    instance_id: tells this process from others with the same participant id; by default a random
    one. A process that is started again with the one of a killed process takes over at once, so no
    two that run at a time may have the same. By default the state's.
    tells_messages: whether the coordinator may know the text of an exception in the participant's
    code, which may quote the data; type, files, lines and functions always travel.
    serve: stay after the end of a session, and take part in the coordinator's next one; then only
    a signal, a failure or a refusal ends the run.
    tls: certificates of this participant; without them all goes in the clear. insecure: also to a
    coordinator on another machine.
    Signals are the program's own. KeyboardInterrupt and SystemExit, which its handlers may raise,
    leave the session on their way; another handler calls stop() of an Agent.
    Logs go to loggers of the standard library's `logging`, below "xain_participant". It stays
    as the caller has configured it: logging.basicConfig(level=logging.INFO) shows every step.
    Raises ValueError if participant_id or instance_id cannot be a name or is another than the
    state's, the tags cannot be sent, or the coordinator is on another machine and there is neither
    `tls` nor `insecure`.
    """
    return Agent(
        participant,
        target,
        participant_id,
        tags=tags,
        direct=direct,
        observer=observer,
        alive=alive,
        state=state,
        instance_id=instance_id,
        tells_messages=tells_messages,
        serve=serve,
        tls=tls,
        insecure=insecure,
    ).run()


@dataclass(frozen=True, slots=True)
class _Posted:
    """An event of another thread.

    handled: to call when the event is handled. work: what an advertisement brought with it.
    """

    event: e.Event
    handled: Callable[[], None] = lambda: None
    work: pb.StartTrainingRoundResponse | None = None


class Agent:
    """One participant's run. Use it once.

    insecure: whether a coordinator on another machine may be called without `tls`. upkeep: of the
    certificates, for as long as it runs.
    runtime, channel, chance: where it runs, how it connects to `target`, and what its pauses are
    drawn from; the defaults are the real ones.
    Raises ValueError as run() does.
    """

    min_watch_pause_s, max_watch_pause_s = 0.1, 2.0

    def __init__(
        self,
        participant: Participant,
        target: str,
        participant_id: str | None = None,
        *,
        tags: Mapping[str, str] | None = None,
        direct: bool = True,
        observer: Observer | None = None,
        alive: Alive | None = None,
        state: StateDirectory | None = None,
        instance_id: str | None = None,
        tells_messages: bool = False,
        serve: bool = False,
        tls: "Certificates | None" = None,
        insecure: bool = False,
        upkeep: "Upkeep | None" = None,
        runtime: Runtime | None = None,
        channel: OpenChannel = open_channel,
        chance: Random | None = None,
    ) -> None:
        if participant_id is None:
            participant_id = state.participant_id if state is not None else default_participant_id()
        if (why := why_not(participant_id)) is not None:
            raise ValueError(f"participant_id is {participant_id!r}: {why}")
        if state is not None and state.participant_id != participant_id:
            raise ValueError(
                f"participant_id is {participant_id!r}, but the state is that of "
                f"{state.participant_id!r}"
            )
        if (why := tag_rules.why_not(tags or {})) is not None:
            raise ValueError(why)
        require_private_way(target, tls, insecure=insecure)
        self.participant_id = participant_id
        chance = chance or Random()
        self._watch_chance = Random(chance.getrandbits(64))  # of a thread of its own
        if instance_id is None:
            instance_id = new_instance_id(chance) if state is None else state.instance_id
        if (why := why_not(instance_id)) is not None:
            raise ValueError(f"instance_id is {instance_id!r}: {why}")
        if state is not None and state.instance_id != instance_id:
            raise ValueError(
                f"instance_id is {instance_id!r}, but the state is that of {state.instance_id!r}"
            )
        self._tags = dict(tags or {})
        self._participant = participant
        self._target = target
        self._observer = observer
        self._alive = alive
        self._runtime = runtime = runtime or Runtime()
        self._log = get_logger(__name__).bind(participant=self.participant_id)
        self._client = CoordinatorClient(
            target,
            self.participant_id,
            instance_id=instance_id,
            direct=DirectTransfer(certificates=tls) if direct else None,
            on_offer_failed=self._note_failed_offer,
            channel=channel,
            clock=self._runtime.now,
            tls=tls,
        )
        self._upkeep = upkeep
        self._work = Work(
            participant,
            self._client,
            self.participant_id,
            state,
            on_saving=self._note_saving,
            tells_messages=tells_messages,
        )
        self._profile: DataProfile | None = None
        self._division: Division | None = None  # by which the profile was made
        # A weak reference: the buffer of a transfer that has ended must be free for the next one.
        self._noted_transfer: weakref.ref[Download | Upload] | None = None

        left = self._work.result  # by an earlier process
        held = None if left is None else Held(left.session_id, left.round, left.is_training)
        self._serve = serve
        self._finished_session = ""  # the last one whose end was logged, with serve
        self._protocol = Protocol(chance, held, serve=serve)
        self._timers: dict[Timer, float] = {}  # the runtime's time at which each is due
        self._answers: deque[e.Event] = deque()  # to calls that the loop itself has made
        # At most three events, two of the watch thread, which waits until its last one was handled,
        # and one of stop(); and three of the worker that are None.
        self._mailbox: SimpleQueue[_Posted | None] = runtime.queue()  # None: look at the rest again
        # A lock, held by the thread that got its only element: it owns the protocol, the timers and
        # the four below. The calling thread holds it except while it waits for events.
        self._protocol_lock: SimpleQueue[None] = runtime.queue()
        self._code: int | None = None  # the exit status, at the end
        self._error: BaseException | None = None  # of the worker, for run() to raise
        self._jobs: SimpleQueue[tuple[Call, int] | None] = runtime.queue()  # one, then the end
        self._watch_credit: SimpleQueue[None] = runtime.queue()  # one: to post what the stream says
        self._watch_credit.put(None)
        self._tasks: list[Thread] = []
        self._answering: Answering | None = None
        self._warning = ""  # the coordinator's latest
        self._findings: set[str] = set()  # of its checks of the data, those that were logged
        self._known_findings = b""  # their digest
        self._refusals: dict[Call, tuple[str, str]] = {}  # the last ones since anything worked
        self._cause = ""  # why the coordinator is away, as last told
        self._kept_out = ""  # why it does not let us in, as last told
        self._looked_at = 0.0  # for it
        self.look_again_s = LOOK_AGAIN_S
        self._stopping = False
        self._closing = False
        self._hung_up: SimpleQueue[None] = runtime.queue()  # wakes the watch thread from its pause
        # No call was answered since the stream broke off. The watch thread waits for an entry in
        # the queue, which says that calls are answered again.
        self._is_away = False
        self._is_back: SimpleQueue[None] = runtime.queue()

    def stop(self, code: int = 0) -> bool:
        """Leave the session and let run() return `code`. From any thread or signal handler.

        Returns whether this was the first time.
        """
        if self._stopping:
            return False
        self._stopping = True
        self._mailbox.put(_Posted(e.StopRequested(code)))
        return True

    def run(self) -> int:
        """Take part until the session is finished; see the function of this name."""
        try:
            self._profile = self._participant.profile()
            if self._profile is not None and self._profile.num_samples == 0:
                reason = "the local data has no rows; not joining"
                self._log.warning("nothing_to_train_on", reason=reason)
                self._tell("finished", "the local data has no rows")
                return EXIT_NOTHING_COUNTED
            self._info("starting", coordinator=self._target, proxy=proxy_to(self._target))
            if (left := self._work.result) is not None:
                self._info("result_found", round_=left.round, session=left.session_id)
            if self._upkeep is not None:
                self._spawn("upkeep", self._upkeep.run)
            self._spawn("work", self._run_jobs)
            return self._loop()
        finally:
            self._close()

    # --- the loop ---

    def _loop(self) -> int:
        """Handle events until the exit. Returns the exit status. Raises what the worker has
        raised."""
        posted: _Posted | None = _Posted(e.Started())
        try:
            while self._code is None:
                if self._error is not None:
                    raise self._error
                if posted is not None:
                    self._handle(posted)
                posted = self._next() if self._code is None else None
        except (KeyboardInterrupt, SystemExit):  # of the program's signal handlers
            self._step(_Posted(e.StopRequested(1)))
            raise
        return self._code

    def _handle(self, posted: _Posted) -> None:
        """Handle an event, and the answers to the calls that follow from it."""
        self._step(posted)
        while self._answers and self._code is None:
            self._step(_Posted(self._answers.popleft()))

    def _step(self, posted: _Posted) -> None:
        """Log an event, have the protocol decide, and carry its actions out."""
        self._note(posted.event)
        for action in self._protocol.handle(posted.event):
            if isinstance(action, a.Exit):
                self._on_exit(action)
                self._code = action.code
                return
            self._do(action, posted.work)
        posted.handled()

    def _next(self) -> _Posted | None:
        """Wait for an event. None if the worker has moved a timer, or has come to the end."""
        # The protocol always has a rendezvous or a heartbeat before it, so there is a timer.
        timer, due = min(self._timers.items(), key=lambda one: one[1])
        wait_s = max(0.0, due - self._runtime.now())
        if self._alive is not None:
            self._alive.expect(wait_s)
        self._protocol_lock.put(None)
        try:
            return self._mailbox.get(timeout=wait_s)
        except Empty:
            pass
        finally:
            self._protocol_lock.get()
        if self._timers.get(timer) != due:
            return None
        del self._timers[timer]
        return _Posted(e.TimerFired(timer))

    def _do(self, action: a.Action, announced: pb.StartTrainingRoundResponse | None) -> None:
        """Carry out an action of the protocol.

        announced: the work that came with the event, of the same session and round.
        """
        match action:
            case a.SetTimer(timer, after_s):
                self._timers[timer] = self._runtime.now() + after_s
            case a.Rendezvous():
                self._answers.append(self._answer(Call.RENDEZVOUS, self._rendezvous))
            case a.SendHeartbeat(training, round_):
                transfer = self._note_transfer()
                state = pb.TRAINING if training else pb.READY
                self._answers.append(
                    self._answer(
                        Call.HEARTBEAT,
                        lambda: self._heartbeat(state, round_, transfer),
                    )
                )
            case a.StartWatch():
                self._spawn("watch", self._watch)
            case a.BeginRound(round_, ask):
                if announced is not None and announced.round == round_ and not ask:
                    self._answers.append(self._work.assign(announced))
                else:
                    self._jobs.put((Call.BEGIN_ROUND, round_))
            case a.Train(round_):
                begins = "evaluating" if self._work.is_evaluation else "training"
                self._info(begins, round_=round_)
                self._tell(begins, round_=round_)
                self._work.session_id = self._protocol.session_id
                self._jobs.put((Call.TRAIN, round_))
            case a.HandIn(round_):
                self._jobs.put((Call.HAND_IN, round_))
            case a.ReportGroupBroken(round_):
                self._jobs.put((Call.REPORT, round_))
            case a.EndAttempt(round_, attempt):
                self._participant.end_attempt(round_, attempt)
            case a.Drop():
                self._drop(action)
            case a.ReportFailure(round_, failure):
                self._report_failure(round_, failure)
            case a.Leave():
                self._leave()
            case a.Exit():
                raise AssertionError("the loop ends with it")

    def _answer(self, call: Call, ask: Callable[[], e.Event]) -> e.Event:
        """Make a call, and return its event, or that of its refusal. An answer ends the watch
        thread's wait for the coordinator."""
        try:
            event = ask()
        except Refused as refused:
            return refused.event(call)
        if self._is_away:
            self._is_away = False
            self._is_back.put(None)
        return event

    def _heartbeat(
        self, state: "pb.State.ValueType", round_: int, transfer: pb.Transfer | None
    ) -> e.Event:
        """Send a heartbeat. Returns its answer as an event. Raises Refused."""
        return advertised(
            self._client.heartbeat(
                state, round_, transfer=transfer, known_findings=self._known_findings
            )
        )

    def _rendezvous(self) -> e.Event:
        """Ask to join, and divide the rows first if the session wants that. Returns the answer as
        an event. Raises Refused."""
        response = self._ask_to_join()
        if response.HasField("division"):
            if self._protocol.is_busy:  # with rows of the session before
                return e.AskedToWait(DIVIDE_PAUSE_S)
            self._divide(response.division)
            response = self._ask_to_join()
        return joined(response)

    def _ask_to_join(self) -> pb.RendezvousResponse:
        """Send a rendezvous with the profile as it is now. Raises Refused."""
        return self._client.rendezvous(
            self._profile,
            self._tags,
            can_evaluate=self._participant.can_evaluate,
            can_initialise=self._participant.can_initialise,
            process_group_address=self._participant.process_group_address,
            can_divide=self._participant.can_divide,
            division=self._division,
        )

    def _divide(self, asked: pb.Division) -> None:
        """Divide the rows as the session asks for, and describe the part that is trained on."""
        division = None
        if asked.folds:
            division = Division(asked.folds, asked.fold, asked.seed, asked.measures)
        self._participant.divide(division)
        self._division = division
        self._profile = self._participant.profile()
        rows = 0 if self._profile is None else self._profile.num_samples
        self._info("rows_divided", rows=rows, division="" if division is None else str(division))

    def _drop(self, drop: a.Drop) -> None:
        """Drop the result; log that it was refused as invalid, if it was."""
        self._work.drop(is_kept=drop.accepted)
        if drop.invalid:
            self._log.error("update_invalid", round=drop.round, reason=drop.why)
            self._tell("dropped", drop.why, drop.round)
        elif self._log.is_on(logging.DEBUG):
            self._log.debug("result_dropped", round=drop.round, reason=drop.why)

    def _report_failure(self, round_: int, failure: Failure) -> None:
        """Tell the coordinator that the training has failed; not repeated if it refuses."""
        try:
            self._client.report_failure(round_, failure, LEAVE_TIMEOUT_S)
        except Refused as refused:
            # A coordinator of an earlier version does not know the call.
            self._info("failure_not_reported", round_=round_, reason=str(refused))

    def _leave(self) -> None:
        """Tell the coordinator that this participant leaves; not repeated if it refuses."""
        try:
            self._client.heartbeat(pb.FINISHED, self._protocol.round, timeout_s=LEAVE_TIMEOUT_S)
        except Refused as refused:
            if refused.reason != _NOT_A_MEMBER:  # one that has never joined need not leave
                self._info("left_without_goodbye", reason=str(refused))

    def _on_exit(self, action: a.Exit) -> None:
        """Log the end, and tell the observer."""
        is_told = action.code in (EXIT_NO_BETTER, EXIT_NOTHING_COUNTED)
        calm = self._log.warning if is_told else self._log.info
        log = self._log.error if action.code == EXIT_FAILED else calm
        log("exiting", round=self._protocol.round, code=action.code, reason=action.message)
        self._tell("finished", action.message)

    # --- the other threads ---

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        """Start a thread that _close() waits for."""
        self._tasks.append(self._runtime.spawn(f"{name}-{self.participant_id}", target))

    def _begin_answering(self) -> None:
        """Answer questions for predictions from now on, if the participant has estimators. One that
        stays after the end answers in any case, so that it can say that it has lost them."""
        if self._answering is None and (self._participant.can_predict or self._serve):
            self._answering = Answering(
                self._participant, self._client, self.participant_id, self._runtime
            )
            self._spawn("predict", self._answering.run)

    def _run_jobs(self) -> None:
        """The worker's thread: do the pieces of work that the protocol asks for, one after the
        other."""
        while (job := self._jobs.get()) is not None:
            self._deliver(_Posted(self._work.do(*job)))
            news, self._work.next_round = self._work.next_round, None
            if news is not None:
                self._deliver(_posted(news))

    def _deliver(self, posted: _Posted) -> None:
        """Handle an event of the worker in its thread, once the calling thread waits; wake that if
        an earlier timer or the end follows."""
        self._protocol_lock.get()
        due = min(self._timers.values(), default=inf)
        try:
            if not self._closing and self._code is None:
                self._handle(posted)
        except BaseException as error:  # of an observer, or a defect of ours
            self._error = error
        is_earlier = min(self._timers.values(), default=inf) < due
        is_awaited = is_earlier or self._code is not None or self._error is not None
        self._protocol_lock.put(None)
        if is_awaited:
            self._mailbox.put(None)

    def _watch(self) -> None:
        """The watch thread: post what the stream says, and open the stream again after it has
        broken off."""
        backoff = Backoff(self.min_watch_pause_s, self.max_watch_pause_s, self._watch_chance)
        while not self._closing:
            lost = has_finished = False
            retry_after_s = 0.0
            try:
                for message in self._client.watch():
                    # After the end of the session a stream ends, too, and nothing is lost with it.
                    has_finished = message.state == pb.FINISHED
                    lost = not has_finished
                    backoff.reset()
                    self._watch_credit.get()
                    self._mailbox.put(_posted(message, lambda: self._watch_credit.put(None)))
                if has_finished:
                    # A coordinator that is not in serve mode ends the stream with the session.
                    retry_after_s = NO_WATCH_PAUSE_S
            except Refused as refused:
                if self._closing:
                    return  # we have hung up ourselves
                self._log.debug("watch_ended", round=self._protocol.round, reason=str(refused))
                retry_after_s = refused.retry_after_s
                lost = lost or (
                    has_finished and self._serve
                )  # the coordinator stops, or opens its next session
                if refused.status is grpc.StatusCode.UNIMPLEMENTED:
                    # A XAIN coordinator has no stream; a proxy says the same while it finds none.
                    self._log.debug("no_watch", reason="heartbeats tell the state meanwhile")
                    retry_after_s = retry_after_s or NO_WATCH_PAUSE_S
            if lost:
                # Thousands may have lost theirs. The protocol says when to connect;
                # a stream that went ahead would do so at once.
                self._mailbox.put(_Posted(e.ConnectionLost()))
                self._is_back.get()
            pause_s = backoff.next_s()
            if retry_after_s:
                pause_s = jittered(self._watch_chance, retry_after_s)
            with suppress(Empty):
                self._hung_up.get(timeout=pause_s)

    def _close(self) -> None:
        """End all threads and calls; waits for the threads, unless the participant's own code
        runs."""
        self._closing = True
        self._protocol_lock.put(None)
        if self._answering is not None:
            self._answering.close()
        if self._upkeep is not None:
            self._upkeep.close()
        self._hung_up.put(None)
        self._is_back.put(None)
        self._client.close()
        self._watch_credit.put(None)
        self._jobs.put(None)
        self._work.abandon()
        self._participant.end_attempt()
        deadline = self._runtime.now() + (0.0 if self._work.in_participant else JOIN_TIMEOUT_S)
        for task in self._tasks:
            task.join(max(0.0, deadline - self._runtime.now()))

    # --- telling ---

    def _note(self, event: e.Event) -> None:
        """Log and show what happens, before the protocol decides what follows."""
        if not isinstance(event, e.RefusedBy | e.TimerFired | e.ConnectionLost):
            self._refusals.clear()
            self._cause = ""
        if isinstance(event, e.Advertised):
            self._note_findings(event)
        match event:
            case e.Joined(session_id, interval_s):
                self._info("joined", session=session_id, heartbeat_interval_s=interval_s)
                self._tell("joined")
                self._begin_answering()
            case e.AskedToWait(retry_after_s, why):
                if why and why != self._kept_out:
                    self._log.warning("not_let_in_yet", reason=why, retry_after_s=retry_after_s)
                elif not why:
                    self._info("asked_to_wait", retry_after_s=retry_after_s)
                self._kept_out = why
                self._tell("waiting", "the coordinator asks us to come again later")
            case e.Trained(round_):
                result = self._work.result
                assert result is not None, "the worker keeps what it has trained"
                evaluation = result.evaluation
                if result.is_evaluation and evaluation is not None:
                    self._log_measured(
                        "evaluated", round_, evaluation.num_samples, evaluation.metrics
                    )
                    self._tell("evaluated", round_=round_)
                else:
                    self._log_measured("trained", round_, result.num_samples, result.metrics)
                    self._tell("trained", round_=round_)
            case e.TrainingFailed(round_, message) if self._serve:  # else it is the last line
                self._log.error("training_failed", round=round_, reason=message)
            case e.HandedIn(round_):
                self._info("handed_in", round_=round_)
                self._tell("handed_in", round_=round_)
                self._begin_answering()
            case e.Advertised(state=State.FINISHED, session_id=session_id, cause=cause) if (
                self._serve and session_id != self._finished_session
            ):
                self._finished_session = session_id
                self._info("session_finished", session=session_id, cause=cause)
                self._tell("waiting", "the session is finished; waiting for the next one")
            case e.Advertised(warning=warning) if warning != self._warning:
                self._warning = warning
                if warning:
                    self._log.warning("warned", round=self._protocol.round, message=warning)
                    self._tell("warned", warning)
            case e.RefusedBy():
                self._note_refusal(event)
            case e.ConnectionLost():
                self._is_away = True
                self._info("connection_lost")

    def _note_findings(self, told: e.Advertised) -> None:
        """Log what the coordinator's checks have found in the data, each finding once."""
        self._known_findings = told.findings_digest or self._known_findings
        for finding in told.findings:
            if finding in self._findings:
                continue
            self._findings.add(finding)
            tell = self._log.info if finding.startswith("note: ") else self._log.warning
            tell("data_finding", round=self._protocol.round, message=finding)
            self._tell("data_finding", finding)

    def _note_transfer(self) -> pb.Transfer | None:
        """Log with each heartbeat the progress of a transfer that lasts longer than the interval,
        and return it: one that is short would be over long before the next heartbeat says so."""
        transfer = self._client.transfer
        noted = self._noted_transfer() if self._noted_transfer is not None else None
        self._noted_transfer = weakref.ref(transfer) if transfer is not None else None
        if transfer is None or transfer is not noted:
            return None
        is_upload, percent = isinstance(transfer, Upload), round(100 * transfer.share)
        self._info(
            "uploading" if is_upload else "downloading",
            percent=percent,
            mib=transfer.size_bytes >> 20,
        )
        direction = pb.Transfer.UPLOAD if is_upload else pb.Transfer.DOWNLOAD
        return pb.Transfer(direction=direction, percent=percent)

    def _log_measured(
        self, event: str, round_: int, num_samples: int, metrics: Mapping[str, float]
    ) -> None:
        """Log what was measured in a training or an evaluation."""
        fields = {"metrics": dict(metrics)} if metrics else {}
        self._info(event, round_=round_, **fields, num_samples=num_samples)

    def _note_saving(self, round_: int) -> None:
        """Have the protocol know that a result is being written to disk. Called by the worker."""
        self._deliver(_Posted(e.Saving(round_)))

    def _note_refusal(self, refused: e.RefusedBy) -> None:
        """Log a refused call: the first of its kind as a warning, later ones for debugging. If the
        coordinator is away, a thread of its own finds the cause."""
        # A coordinator that is away is worth a line a call, not one for every attempt of a weekend.
        # Messages are not compared: each names another address.
        kind = (refused.reason, refused.status)
        again = self._refusals.get(refused.call) == kind
        self._refusals[refused.call] = kind
        log = self._log.debug if again else self._log.warning
        fields = {"round": self._protocol.round, "call": refused.call.name.lower()}
        if not refused.reason and refused.status in AWAY:

            def note(cause: str) -> None:
                """Log that the coordinator is away, and why, as a warning if that is news."""
                is_news = not again or cause not in ("", self._cause)
                self._cause = cause or self._cause
                (self._log.warning if is_news else self._log.debug)(
                    "coordinator_away",
                    **fields,
                    coordinator=self._target,
                    message=refused.message,
                    cause=cause,
                    hint="tried again until a coordinator answers there",
                )

            # The cause may change: a coordinator that was away comes back with certificates.
            if again and self._runtime.now() < self._looked_at + self.look_again_s:
                note("")
            else:
                self._looked_at = self._runtime.now()
                # In a thread that nothing waits for, also not at the end: it may take seconds.
                self._runtime.spawn(f"look-{self.participant_id}", lambda: self._note_cause(note))
        else:
            log(
                "refused",
                **fields,
                reason=refused.reason,
                status=refused.status,
                message=refused.message,
            )
        if not again:
            self._tell("refused", refused.message or refused.reason or refused.status)

    def _note_cause(self, note: Callable[[str], None]) -> None:
        """Log why the coordinator is away, unless the agent has ended."""
        cause = self._client.why_away()
        if not self._closing:
            note(cause)

    def _note_failed_offer(self, failed: OfferFailed) -> None:
        """Log that weights go through the coordinator, since a direct transfer has failed; once for
        each host. Called by the worker."""
        # A host that a firewall forbids is worth one line, not one for every attempt of a week.
        log = self._log.debug if failed.again else self._log.warning
        log(
            "offer_failed",
            round=self._protocol.round,
            method=failed.method,
            host=failed.host,
            reason=failed.reason,
        )

    def _info(self, event: str, *, round_: int | None = None, **fields: object) -> None:
        """Write a line of the log. round_: by default the last that was begun."""
        if not self._log.is_on(logging.INFO):
            return  # a line that nobody reads would take as long as the protocol does
        number = self._protocol.round if round_ is None else round_
        self._log.info(event, round=number, **fields)

    def _tell(self, step: str, reason: str = "", round_: int | None = None) -> None:
        """Tell the observer a step. round_: by default the last that was begun."""
        if self._observer is not None:
            self._observer(step, self._protocol.round if round_ is None else round_, reason)


def _posted(message: pb.WatchResponse, handled: Callable[[], None] = lambda: None) -> _Posted:
    """A message of the Watch stream as an event, with the work in it."""
    work = message.work if message.HasField("work") else None
    return _Posted(advertised(message), handled, work)


def joined(response: pb.RendezvousResponse) -> e.Joined | e.AskedToWait:
    """Convert an answer to a rendezvous to its event."""
    if response.reply == pb.LATER:
        return e.AskedToWait(response.retry_after_ms / 1000, response.why)
    return e.Joined(
        response.session_id,
        response.heartbeat_interval_ms / 1000,
        response.reconnect_spread_ms / 1000,
        response.stays,
    )


def advertised(message: pb.HeartbeatResponse | pb.WatchResponse) -> e.Advertised:
    """Convert an answer to a heartbeat, or a message of a Watch stream, to its event."""
    spread_s = None
    if isinstance(message, pb.HeartbeatResponse):
        spread_s = message.reconnect_spread_ms / 1000
    return e.Advertised(
        _STATES.get(message.state, State.STANDBY),
        message.round,
        message.update_accepted,
        message.session_id,
        message.cause,
        spread_s,
        update_damaged=message.update_damaged,
        warning=message.warning,
        attempt=message.attempt,
        rounds_contributed=(
            message.rounds_contributed if message.HasField("rounds_contributed") else None
        ),
        no_better=message.no_better,
        findings=tuple(message.findings),
        findings_digest=message.findings_digest,
    )
