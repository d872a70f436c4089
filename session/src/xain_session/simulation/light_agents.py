"""Participants without a thread and a connection each: all of a worker share one event loop and a
few channels of gRPC.

    LightAgents (channels, memory) ── LightAgent ── Protocol

A LightAgent is to the Protocol what agent.Agent is: it carries out the actions and posts what comes
of them as events. What a thread of an Agent does, a task of the event loop does here: the calls,
the timers and the Watch stream. Training, and the transfer of weights that travel past the calls,
are jobs for the one thread of the worker that trains; see worker.py.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from xain_foundation.exit_statuses import EXIT_OK
from xain_foundation.logs.logger import get_logger
from xain_foundation.net.backoff import Backoff
from xain_foundation.net.channels import open_async_channel
from xain_foundation.spare import Spare
from xain_participant.agent.agent import (
    AWAY,
    LEAVE_TIMEOUT_S,
    NO_WATCH_PAUSE_S,
    Agent,
    advertised,
    joined,
)
from xain_participant.agent.protocol import Protocol, jittered
from xain_participant.agent.work import Work
from xain_participant.sdk import actions as a
from xain_participant.sdk import events as e
from xain_participant.sdk.failures import Failure
from xain_participant.sdk.participant import Participant
from xain_participant.sdk.values import Call, Timer
from xain_participant.wire.client import (
    CALL_TIMEOUT_S,
    Connections,
    CoordinatorClient,
    KeptMetadata,
    Refused,
    channel_options,
    refused_by,
)
from xain_participant.wire.direct import DirectTransfer, OfferFailed
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.coordinator_pb2_grpc import CoordinatorStub
from xain_wire.metadata import TIMEOUT_KEY

# A coordinator takes 250 calls at a time on a connection. A participant has at most three: its
# Watch stream, a sign of life, and a piece of work.
PARTICIPANTS_PER_CHANNEL = 80
# More of a worker's calls at a time make no round faster.
CALLS_AT_ONCE = 32
# A worker that is started again in the place of a lost one takes over at once: the coordinator
# takes it for the same process. Two simulations with the same names have no place beside each
# other anyway.
INSTANCE_ID = "simulated"

_TOLD_TIMEOUT = (TIMEOUT_KEY, str(round(1000 * CALL_TIMEOUT_S)))


@dataclass(slots=True)
class LightAgents:
    """Resources that all participants of a worker share. Made in the thread of the event loop.

    target: HOST:PORT of the coordinator. num_participants: that will use it.
    train: called with an agent and a round to be trained; the outcome is to be posted.
    upload: called with an agent and a round whose result is to be uploaded; LightAgent.hand_in()
        is to follow.
    over: called with an agent that has ended, which has its exit status, and the reason.
    fail: called with the exception of a task, which is a defect.
    """

    target: str
    num_participants: int
    train: "Callable[[LightAgent, int], None]"
    upload: "Callable[[LightAgent, int], None]"
    over: "Callable[[LightAgent, str], None]"
    fail: Callable[[BaseException], None]
    chance: Random = field(default_factory=Random)
    spare: Spare = field(default_factory=lambda: Spare(max_arrays=2))  # of a model and an update
    model_metadata: KeptMetadata = field(default_factory=KeptMetadata)
    direct: DirectTransfer = field(default_factory=DirectTransfer)
    is_away: bool = False  # the coordinator, as last logged
    # For calls but heartbeats: each takes some 20 KB while it is under way.
    few: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CALLS_AT_ONCE))
    _connections: Connections = field(init=False)  # for weights in chunks
    _channels: "list[grpc.aio.Channel]" = field(init=False)
    _stubs: list[Any] = field(init=False)  # the types of CoordinatorStub are of blocking calls

    def __post_init__(self) -> None:
        self._connections = Connections(self.target)
        num_channels = -(-self.num_participants // PARTICIPANTS_PER_CHANNEL)
        options = channel_options()
        self._channels = [open_async_channel(self.target, options) for _ in range(num_channels)]
        self._stubs = [CoordinatorStub(channel) for channel in self._channels]

    def stub(self, index: int) -> Any:
        """The stub for the participant of this number."""
        return self._stubs[index // PARTICIPANTS_PER_CHANNEL]

    def new_client(self, participant_id: str) -> CoordinatorClient:
        """Make a client for a participant's blocking calls, by which its weights travel; it shares
        the connections."""
        return CoordinatorClient(
            self.target,
            participant_id,
            instance_id=INSTANCE_ID,
            direct=self.direct,
            on_offer_failed=_note_failed_offer,
            spare=self.spare,
            connections=self._connections,
            model_metadata=self.model_metadata,
        )

    async def close(self) -> None:
        """End all calls."""
        self.direct.close()
        self._connections.close()
        for channel in self._channels:
            await channel.close()


def _note_failed_offer(failed: OfferFailed) -> None:
    """Log that the weights of all participants go on their way through the coordinator."""
    if not failed.again:
        get_logger(__name__).warning(
            "offer_failed", method=failed.method, host=failed.host, reason=failed.reason
        )


class LightAgent:
    """One participant. All methods are of the event loop's thread.

    index: from 0, below num_participants of `lights`.
    """

    __slots__ = (
        "_client",
        "_events",
        "_has_left",
        "_is_back",
        "_known_findings",
        "_leaves",
        "_light_agents",
        "_participant",
        "_protocol",
        "_sequel",
        "_stub",
        "_tasks",
        "_timers",
        "_watch_task",
        "exit_status",
        "last_s",
        "name",
        "work",
    )

    def __init__(
        self, lights: LightAgents, index: int, participant_id: str, participant: Participant
    ) -> None:
        self.name = participant_id
        self._light_agents = lights
        self._stub = lights.stub(index)
        self._client = lights.new_client(participant_id)
        self._participant = participant
        # Used by this thread while no job is under way, else by the thread that trains.
        self.work = Work(participant, self._client, participant_id, spare=lights.spare)
        self._protocol = Protocol(lights.chance)
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._events: deque[tuple[e.Event, pb.StartTrainingRoundResponse | None]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch_task: asyncio.Task[None] | None = None
        self._sequel: asyncio.Task[None] | None = None  # the last of the calls that come in order
        self._is_back: asyncio.Event | None = (
            None  # set: no call was answered since the stream broke
        )
        self._known_findings = b""
        self._leaves = False  # the session, once the result is handed in or dropped
        self._has_left = False
        self.exit_status: int | None = None  # None: it takes part in the session
        # Seconds of the last training; before the first a participant may take longest.
        self.last_s = float("inf")

    def start(self) -> None:
        """Join the coordinator's session."""
        self.post(e.Started())

    def close(self) -> None:
        """End without a goodbye."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for task in self._tasks:
            task.cancel()

    # --- events and actions ---

    def post(self, event: e.Event, work: pb.StartTrainingRoundResponse | None = None) -> None:
        """Handle an event, and those that its actions post meanwhile, one after another.

        work: that an advertisement brought with it.
        """
        if self._events is not None:
            self._events.append((event, work))
            return
        self._events = deque([(event, work)])
        try:
            while self._events:
                event, work = self._events.popleft()
                for action in self._protocol.handle(event):
                    self._do(action, work)
        except Exception as error:  # a defect, which the caller is told of
            self._light_agents.fail(error)
        finally:
            self._events = None

    def on_trained(self, outcome: e.Event, *, leaves: bool) -> None:
        """Handle the outcome of a training. leaves: whether it was the last one, by which the
        participant leaves the session."""
        self._leaves = leaves
        self.post(outcome)

    def hand_in(self, round_: int, request: pb.EndTrainingRoundRequest | None) -> None:
        """Hand in a result whose weights are where the request says."""
        self._spawn(self._post_answer(Call.HAND_IN, self._hand_in(round_, request)))

    def _do(self, action: a.Action, announced: pb.StartTrainingRoundResponse | None) -> None:
        """Carry out an action of the protocol. announced: the work that came with the event."""
        match action:
            case a.SetTimer(timer, after_s):
                if (before := self._timers.get(timer)) is not None:
                    before.cancel()
                self._timers[timer] = asyncio.get_running_loop().call_later(
                    after_s, self.post, e.TimerFired(timer)
                )
            case a.Rendezvous():
                self._spawn(self._post_answer(Call.RENDEZVOUS, self._rendezvous()))
            case a.SendHeartbeat(training, round_):
                self._spawn(self._post_answer(Call.HEARTBEAT, self._heartbeat(training, round_)))
            case a.StartWatch():
                self._watch_task = self._spawn(self._watch())
            case a.BeginRound(round_, ask):
                if announced is not None and announced.round == round_ and not ask:
                    self.post(self.work.assign(announced))
                else:
                    self._spawn(self._post_answer(Call.BEGIN_ROUND, self._begin_round()))
            case a.Train() if self._has_left:
                pass  # a newer round has opened before its goodbye
            case a.Train(round_):
                self.work.session_id = self._protocol.session_id
                self._light_agents.train(self, round_)
            case a.HandIn(round_):
                self._begin_hand_in(round_)
            case a.Drop(_, _, _, accepted):
                self.work.drop(is_kept=accepted)
                self._leave_if_wanted()
            case a.ReportFailure(round_, failure):
                self._in_order(self._report_failure(round_, failure))
            case a.Leave():
                self._in_order(self._leave())
            case a.Exit(code, message):
                self._in_order(self._exit(code, message))
            case a.ReportGroupBroken() | a.EndAttempt():
                raise AssertionError("a simulated participant is in no process group")

    def _leave_if_wanted(self) -> None:
        """Leave the session, if the last training was to be the last."""
        if self._leaves:
            self._leaves, self._has_left = False, True
            self.post(e.StopRequested(EXIT_OK))

    def _begin_hand_in(self, round_: int) -> None:
        """Have a large result uploaded first, and hand in a small one at once."""
        result = self.work.result
        # A vector near the limit may be above it with its header.
        if result is not None and 2 * result.vector.nbytes > self._client.max_inline_bytes:
            self._light_agents.upload(self, round_)
        else:
            self.hand_in(round_, self.work.end_request(round_))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task, which close() cancels."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        """Forget a task that has ended; its error is a defect, which the caller is told of."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._light_agents.fail(error)

    def _in_order(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a call when the one before has been answered."""

        async def after(before: "asyncio.Task[None] | None") -> None:
            if before is not None:
                await before
            await work

        self._sequel = self._spawn(after(self._sequel))

    # --- calls ---

    async def _post_answer(self, call: Call, asking: Awaitable[e.Event]) -> None:
        """Wait for a call's answer, and post it or its refusal as an event; after a hand-in also
        the news that came with it. asking: the call, few of which run at a time, except
        heartbeats."""
        event: e.Event
        try:
            if call is Call.HEARTBEAT:
                event = await asking
            else:
                async with self._light_agents.few:
                    event = await asking
        except grpc.aio.AioRpcError as error:
            refused = refused_by(error)
            if call is Call.HAND_IN:
                self.work.on_hand_in_refused(refused)
            self._note(refused, call)
            event = refused.event(call)
        else:
            self._light_agents.is_away = False
            if self._is_back is not None and call in (Call.RENDEZVOUS, Call.HEARTBEAT):
                self._is_back.set()
        if isinstance(event, e.HandedIn):
            self.work.forget_assignment()
        self.post(event)
        if isinstance(event, e.HandedIn):
            self._leave_if_wanted()
            news, self.work.next_round = self.work.next_round, None
            if news is not None:
                self._tell(news)

    def _note(self, refused: Refused, call: Call) -> None:
        """Log a refusal; one line for all participants if the coordinator is away."""
        log = get_logger(__name__).bind(participant=self.name)
        fields: dict[str, Any] = {"round": self._protocol.round, "call": call.name.lower()}
        if refused.reason or refused.status.name not in AWAY:
            log.warning("refused", **fields, reason=refused.reason, message=refused.message)
        elif not self._light_agents.is_away:
            self._light_agents.is_away = True
            log.warning(
                "coordinator_away",
                **fields,
                coordinator=self._light_agents.target,
                message=refused.message,
                hint="all participants of the worker try again until a coordinator answers there",
            )

    async def _rendezvous(self) -> e.Event:
        """Ask to join. Returns the answer as an event."""
        request = pb.RendezvousRequest(
            can_evaluate=self._participant.can_evaluate,
            cannot_initialise=not self._participant.can_initialise,
        )
        return joined(await self._contact(self._stub.Rendezvous, request))

    async def _heartbeat(self, training: bool, round_: int) -> e.Event:
        """Send a heartbeat. Returns the answer as an event."""
        request = pb.HeartbeatRequest(
            state=pb.TRAINING if training else pb.READY,
            round=round_,
            known_findings=self._known_findings,
        )
        answer: pb.HeartbeatResponse = await self._contact(self._stub.Heartbeat, request)
        self._known_findings = answer.findings_digest or self._known_findings
        return advertised(answer)

    async def _contact(
        self, method: Any, request: object, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """Make a call that is a sign of life, which tells its time limit."""
        metadata = (*self._client.metadata, _TOLD_TIMEOUT)
        return await method(request, metadata=metadata, timeout=timeout_s)

    async def _begin_round(self) -> e.Event:
        """Ask for an assignment. Returns it as an event."""
        request = self._client.start_request(self.work.damaged_digest)
        call, timeout_s = self._stub.StartTrainingRound, self._client.work_timeout_s
        work = await call(request, metadata=self._client.metadata, timeout=timeout_s)
        if not self._client.model_metadata.complete(work):
            request.ClearField("known_metadata")
            work = await call(request, metadata=self._client.metadata, timeout=timeout_s)
        return self.work.take(work)

    async def _hand_in(self, round_: int, request: pb.EndTrainingRoundRequest | None) -> e.Event:
        """End the round with this request, and keep the news of the next one that the answer
        brings. Without a request there is nothing to send."""
        if request is not None:
            answer = await self._stub.EndTrainingRound(
                request,
                metadata=self._client.metadata,
                timeout=self._client.end_timeout_s(request),
            )
            if answer.HasField("next_round"):
                self.work.next_round = self._client.complete(answer.next_round)
        return e.HandedIn(round_)

    async def _report_failure(self, round_: int, failure: Failure) -> None:
        """Tell the coordinator that main() has failed; not repeated if it refuses."""
        request = pb.ReportFailureRequest(
            round=round_,
            kind=failure.kind,
            message=failure.message,
            traceback=failure.traceback,
        )
        with suppress(grpc.aio.AioRpcError):  # main()'s failure is told by the worker, too
            await self._stub.ReportFailure(
                request, metadata=self._client.metadata, timeout=LEAVE_TIMEOUT_S
            )

    async def _leave(self) -> None:
        """Tell the coordinator that this participant leaves; not repeated if it refuses."""
        request = pb.HeartbeatRequest(state=pb.FINISHED, round=self._protocol.round)
        with suppress(grpc.aio.AioRpcError):  # a lost goodbye ends by the coordinator's lease
            await self._contact(self._stub.Heartbeat, request, LEAVE_TIMEOUT_S)

    async def _exit(self, code: int, message: str) -> None:
        """End contact and Watch stream, and tell the worker of the exit status."""
        for timer in self._timers.values():
            timer.cancel()
        if self._watch_task is not None:
            self._watch_task.cancel()
        self.exit_status = code
        self._light_agents.over(self, message)

    # --- the Watch stream ---

    def _tell(self, message: pb.WatchResponse) -> None:
        """Post what a message of the Watch stream says."""
        self.post(advertised(message), message.work if message.HasField("work") else None)

    async def _watch(self) -> None:
        """Post the stream's messages as events; open a broken stream again, after a pause."""
        backoff = Backoff(
            Agent.min_watch_pause_s, Agent.max_watch_pause_s, self._light_agents.chance
        )
        while True:
            is_lost, has_finished, retry_after_s = False, False, 0.0
            call = self._stub.Watch(
                pb.WatchRequest(keeps_metadata=True), metadata=self._client.metadata
            )
            try:
                # read() holds 1 KB less for each participant than an iteration.
                while (message := await call.read()) is not grpc.aio.EOF:
                    has_finished = message.state == pb.FINISHED
                    is_lost = not has_finished
                    backoff.reset()
                    self._tell(self._client.complete(message))
                    del message  # it may hold a model until the next one comes
                if has_finished:
                    retry_after_s = NO_WATCH_PAUSE_S
            except grpc.aio.AioRpcError as error:
                refused = refused_by(error)
                retry_after_s = refused.retry_after_s
                if refused.status is grpc.StatusCode.UNIMPLEMENTED:
                    retry_after_s = retry_after_s or NO_WATCH_PAUSE_S
            if is_lost:
                self._is_back = asyncio.Event()
                self.post(e.ConnectionLost())
                await self._is_back.wait()
                self._is_back = None
            pause_s = backoff.next_s()
            if retry_after_s:
                pause_s = jittered(self._light_agents.chance, retry_after_s)
            await asyncio.sleep(pause_s)  # as long as the back-off says
