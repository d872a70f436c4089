"""Admission control: bounds on the open calls of members, and of unregistered clients apart.

A call is admitted when its headers have come and before its first message has, since a client that
never sends the message would hold the call open for ever. Each call takes a slot of one pool:

- the holder of a certificate has a pool of its own, whatever its connections;
- a member of the session has a pool of its own, and so has a member of the Membership service,
  which is known by its first message;
- unregistered clients share one pool for health checks, one for streams that last (Health/Watch
  and reflection), and one for all other calls.

So unregistered clients take no slot from members, however many calls they open. A call that finds
its pool full ends the oldest call in it that is only waiting for its client; if there is none, the
new call is refused and told when to come again. So is a call of a holder that has called more than
calls_per_s. Calls whose first message does not come within
first_message_s are ended, and so are streams of unregistered clients after stream_s.

The answers to refused calls of one holder are held back: a client that calls again at once would
else keep the event loop busy with refusals, as many at a time as its connections have streams.

While a message comes, gRPC holds what is there of it, which may be 4 MiB. So
messages of unregistered clients are read UNREGISTERED_READS at a time. Small ones come with their
headers; a call whose message takes longer is ended when others wait to be read.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from xain_coordinator.config.fields import CALLS_PER_S
from xain_coordinator.core.vocabulary.errors import Reason, Refusal, Unavailable
from xain_coordinator.server.identity import CALLER, THIS_MACHINE, participant_of
from xain_coordinator.server.rate_limit import RateLimit
from xain_coordinator.server.statuses import status_of
from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog
from xain_foundation.security.callers import Caller
from xain_foundation.security.identity import Identity, Role

log = get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

RETRY_AFTER_S = 1.0  # of a call that finds too many
UNREGISTERED_READS = 8
# A read is slow when it has been looked at SLOW_LOOKS times, LOOK_S apart. The number counts when
# the event loop is late: a message that has come is taken up in fewer of its iterations.
LOOK_S, SLOW_LOOKS = 0.07, 3

# Streams of Watch and Predict, a heartbeat, a transfer and the question about it; as much again on
# each of two connections that have gone unnoticed so far, and one to spare.
CALLS_PER_MEMBER = 16
# Calls that a holder may make at once after some calm, in seconds of its rate.
BURST_S = 10
# How long the end of a call waits for a message that is being sent.
LAST_MESSAGE_S = 1.0
# A silent call takes 20 KB.
UNREGISTERED_CALLS = 1000

_UNREGISTERED, _CHECKS, _STREAMS = "calls of unregistered clients", "health checks", "streams"
_INSPECTION = "/xain_proto.fl.Inspection/"
_POOLS: Mapping[str, str] = {
    "/grpc.health.v1.Health/Check": _CHECKS,
    "/grpc.health.v1.Health/Watch": _STREAMS,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _STREAMS,
}

Pool = dict["Call", None]  # the oldest first


@dataclass(slots=True, eq=False)
class Call:
    """An open call.

    caller: who has shown a certificate; None on an open coordinator.
    timer: of its end. look: at its read. waits: only for its client, so that ending it loses no
    work. is_heard: its first message has come. sending: held while a message of a stream is sent.
    """

    context: Context
    pool: Hashable
    opened_at: float
    task: asyncio.Task[Any]
    caller: Caller | None
    timer: asyncio.TimerHandle = field(init=False)
    look: asyncio.TimerHandle | None = None
    waits: bool = True
    is_heard: bool = False
    is_ended: bool = False
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)


class AdmissionControl:
    """The open calls of a server. Used from one event loop.

    is_member: whether a participant is a member of the session.
    member_of: the member of another service that a request comes from, and None from an
    unregistered client.
    num_unregistered: calls of unregistered clients that may be open.
    calls_per_s: of each holder of a certificate.
    capacities: calls that may be open, by pool.
    on_accepted: told the peer, and the participant, of each call of a member of the session.
    """

    # The statistics of a rendezvous, 512 KiB at most, take 240 s on the slowest line. Silent
    # calls that are in the way of others are ended before.
    first_message_s = 300.0
    stream_s = 3600.0
    # A call that is younger is not ended for another one: its message is probably on its way.
    min_silence_s = 1.0
    # Refused calls of one holder that are answered in a second.
    refusals_per_s = 100.0
    # Refusals of all holders that may wait, 33 KB each; further ones are sent at once.
    max_held_back = 5000

    def __init__(
        self,
        is_member: Callable[[str], bool],
        member_of: Callable[[str, Any], Hashable | None] = lambda method, request: None,
        num_unregistered: int = UNREGISTERED_CALLS,
        calls_per_s: int = CALLS_PER_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_member = is_member
        self._member_of = member_of
        self._now = now
        self.capacities: dict[Hashable, int] = {
            _UNREGISTERED: num_unregistered,
            _CHECKS: 500,
            _STREAMS: 100,
            (str(THIS_MACHINE.identity.role), THIS_MACHINE.identity.name): 100,
        }
        self._pools: dict[Hashable, Pool] = {}
        self._calls_per_s = calls_per_s
        self._rates: dict[Hashable, RateLimit] = {}  # by pool; who has no certificate has none
        self._held_back: Counter[Identity | None] = Counter()
        self._floods = RateLimitedLog(log.warning, "refusals_held_back")
        self.on_accepted: Callable[[str, Hashable], None] = lambda peer, member: None
        self.reading = asyncio.Semaphore(UNREGISTERED_READS)
        self._num_waiting = 0  # to be read
        self._ends: set[asyncio.Task[None]] = set()

    @property
    def num_calls(self) -> int:
        """Number of open calls."""
        return sum(map(len, self._pools.values()))

    @property
    def num_held_back(self) -> int:
        """Number of refused calls whose answers are held back."""
        return self._held_back.total()

    def admit(self, method: str, context: Context) -> Call:
        """Give a call a slot until it is answered: in the pool of its certificate's holder, of its
        participant, or of unregistered clients. Called in the task of the call, before its first
        message. Raises TOO_MANY_CALLS."""
        pool: Hashable = _POOLS.get(method)
        caller, is_member = CALLER.get(), False
        if caller is not None:
            # All connections of one certificate's holder share a pool.
            identity = caller.identity
            is_site = identity.role is Role.PARTICIPANT
            pool = (identity.name,) if is_site else (str(identity.role), identity.name)
            is_member = True
            if caller is not THIS_MACHINE:
                self._require_rate(pool)
        elif pool is None:
            participant_id = participant_of(context)
            # Inspection is for operators, and its answers are large.
            is_member = not method.startswith(_INSPECTION) and self._is_member(participant_id)
            pool = (participant_id,) if is_member else _UNREGISTERED
        task = asyncio.current_task()
        assert task is not None, "a call has a task"
        call = Call(context, pool, self._now(), task, caller)
        self._enter(call, pool)
        if is_member:
            self.on_accepted(context.peer(), pool)
        # Not by the context, which would hold itself in a cycle with its callbacks.
        call.task.add_done_callback(partial(self._leave, call))
        call.timer = asyncio.get_running_loop().call_later(
            self.first_message_s, self._end_silent, call
        )
        return call

    def note_first_message(self, method: str, call: Call, request: Any) -> None:
        """Note that the first message of a call has come: its time limit ends, and that of a stream
        begins. A message that names a member of another service moves the call to that member's
        pool.

        Raises TOO_MANY_CALLS if that member has too many calls.
        """
        if call.is_heard:
            return
        call.is_heard = True
        call.timer.cancel()
        if call.pool == _STREAMS:
            refusal = Unavailable(f"a stream ends after {self.stream_s:g} s; open another one")
            loop = asyncio.get_running_loop()
            call.timer = loop.call_later(self.stream_s, self._end, call, refusal)
            return
        call.waits = False
        member = self._member_of(method, request)
        if member is not None:
            self._remove(call)
            self._enter(call, member)

    def note_answered(self, method: str, call: Call) -> None:
        """Note that a call was carried out: if it has made its sender a member, the sender's
        connection counts as a member's."""
        if call.pool == _UNREGISTERED and not method.startswith(_INSPECTION):
            participant_id = participant_of(call.context)
            if self._is_member(participant_id):
                self.on_accepted(call.context.peer(), (participant_id,))

    def end_calls(self, holds: Callable[[Caller], bool], refusal: Refusal) -> None:
        """End the open calls of the callers for whom this holds."""
        for call in [call for pool in self._pools.values() for call in pool]:
            if call.caller is not None and holds(call.caller):
                self._end(call, refusal)

    def requests(self, method: str, call: Call) -> AsyncIterator[Any]:
        """The messages of a call's stream of requests, each read and noted as read() and heard()
        do."""
        return _Requests(self, method, call)

    async def hold_back(self, caller: Caller | None) -> None:
        """Wait until a refusal may be sent: refusals_per_s to one caller, however many calls it has
        open. When max_held_back refusals wait, the next is sent at once.

        caller: None for all callers without a valid certificate.
        """
        if self.num_held_back >= self.max_held_back:
            return
        identity = None if caller is None else caller.identity
        self._held_back[identity] = number = self._held_back[identity] + 1
        if number > CALLS_PER_MEMBER:
            self._floods(caller=str(identity or "without a valid certificate"), calls=number)
        try:
            await asyncio.sleep(number / self.refusals_per_s)  # the rate of the refusals
        finally:
            self._held_back[identity] -= 1
            if not self._held_back[identity]:
                del self._held_back[identity]

    def _require_rate(self, pool: Hashable) -> None:
        """Count a call of a pool in its rate. Raises TOO_MANY_CALLS above calls_per_s."""
        rate = self._rates.get(pool)
        if rate is None:
            burst = BURST_S * self._calls_per_s
            rate = self._rates[pool] = RateLimit(self._calls_per_s, burst, max_waiting=0)
        if rate.wait_s("", self._now()):
            raise Refusal(
                Reason.TOO_MANY_CALLS,
                f"more than {self._calls_per_s} calls a second come from this member",
                retry_after_s=RETRY_AFTER_S,
            )

    def _enter(self, call: Call, name: Hashable) -> None:
        """Put a call into a pool. In a full one it ends the oldest call that waits only for its
        client. Raises TOO_MANY_CALLS if there is none."""
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = {}
        capacity = self.capacities.get(name, CALLS_PER_MEMBER)
        if len(pool) >= capacity:
            # A health check must always be answered, however many silent ones come in a second.
            old = self._oldest_waiting(pool, 0.0 if name == _CHECKS else self.min_silence_s)
            # Calls that are being ended are in the pool for as long as their clients take to let
            # go of them.
            if old is None or len(pool) >= 2 * capacity:
                owners = name if isinstance(name, str) else "calls of this member"
                raise Refusal(
                    Reason.TOO_MANY_CALLS,
                    f"{len(pool)} {owners} are open already, the limit is {capacity}",
                    retry_after_s=RETRY_AFTER_S,
                )
            why = "a newer call takes the slot of this one, which waited"
            self._end(old, Refusal(Reason.TOO_MANY_CALLS, why, retry_after_s=RETRY_AFTER_S))
        call.pool = name
        pool[call] = None

    def _oldest_waiting(self, pool: Pool, min_silence_s: float) -> Call | None:
        """The oldest call of a pool that waits only for its client and is at least so old; None if
        there is none."""
        latest = self._now() - min_silence_s
        for call in pool:
            if call.opened_at > latest:
                return None
            if call.waits and not call.is_ended:
                return call
        return None

    def _leave(self, call: Call, _: asyncio.Task[Any]) -> None:
        """Give up the slot of a call whose task is done."""
        self._remove(call)
        call.timer.cancel()

    def _remove(self, call: Call) -> None:
        """Take a call out of its pool; an empty pool is dropped."""
        pool = self._pools.get(call.pool)
        if pool is not None:
            pool.pop(call, None)
            if not pool:
                del self._pools[call.pool]

    def _end_silent(self, call: Call) -> None:
        """End a call whose first message has not come in first_message_s."""
        self._end(
            call,
            Refusal(Reason.REQUEST_MISSING, f"no message has come in {self.first_message_s:g} s"),
        )

    async def read(self, call: Call) -> Any:
        """The next message of a call, or grpc.aio.EOF. Unregistered clients share
        UNREGISTERED_READS reads at a time; a slow one ends when others wait."""
        if call.pool not in self.capacities:
            return await call.context.read()
        self._num_waiting += 1
        try:
            await self.reading.acquire()
        finally:
            self._num_waiting -= 1
        self._look_later(call, SLOW_LOOKS)
        try:
            return await call.context.read()
        finally:
            assert call.look is not None
            call.look.cancel()
            self.reading.release()

    def _look_later(self, call: Call, looks: int) -> None:
        """Set the timer of the next look at a read that is under way. looks: times that are
        left."""
        call.look = asyncio.get_running_loop().call_later(LOOK_S, self._look, call, looks - 1)

    def _look(self, call: Call, looks: int) -> None:
        """End a call whose read is slow if others wait to be read; else look again later. looks:
        times that are left before it may be ended."""
        if looks > 0 or not self._num_waiting:
            self._look_later(call, looks)
        else:
            refusal = Unavailable("the request takes long to come, and others wait; send it again")
            self._end(call, refusal)

    def _end(self, call: Call, refusal: Refusal) -> None:
        """Answer a call with this refusal and cancel its task. Does nothing when repeated."""
        if call.is_ended:
            return
        call.is_ended = True
        task = asyncio.get_running_loop().create_task(_abort(call, refusal))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)


# No generator: it would keep each message until the next one has come.
@dataclass(frozen=True, slots=True)
class _Requests(AsyncIterator[Any]):
    admission: AdmissionControl
    method: str
    call: Call

    async def __anext__(self) -> Any:
        """The next message of a call, which admission control reads and notes."""
        message = await self.admission.read(self.call)
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        self.admission.note_first_message(self.method, self.call, message)
        return message


async def _abort(call: Call, refusal: Refusal) -> None:
    """Answer a call with the status of a refusal, then cancel its task. A read that waits for the
    client ends by itself with the status, so that no operation of gRPC is cancelled."""
    with suppress(TimeoutError):  # the client does not read
        # A status is lost that is sent while a message is on its way.
        async with asyncio.timeout(LAST_MESSAGE_S):
            await call.sending.acquire()
    try:
        await call.context.abort(*status_of(refusal))
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = None  # gRPC keeps it with the call, which this frame holds
    except (grpc.aio.UsageError, grpc.aio.InternalError):
        pass  # it was being answered at the same time, or the client has gone
    call.task.cancel()
