"""The Membership service: a registry behind gRPC, for a grpc.aio server."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import suppress
from typing import Any, Final, NoReturn, Self

import grpc

from xain_foundation.logs.logger import get_logger
from xain_foundation.names import shortened
from xain_foundation.net.errors import MessagingError
from xain_membership.errors import DiscoveryUnavailable, MembershipLost, NameTaken
from xain_membership.ports import Member, Roster
from xain_membership.registry import (
    GRACE_S,
    LEASE_S,
    SETTLE_S,
    WORD_S,
    Registry,
)
from xain_wire.messaging import membership_pb2 as pb
from xain_wire.messaging.membership_pb2_grpc import (
    MembershipServicer,
    add_MembershipServicer_to_server,
)

log = get_logger(__name__)

MAX_MEMBERS = 1_000  # of all groups
# Groups in which the holder of a certificate is a member. A process is in one or two.
MAX_GROUPS = 16
# What a member says of itself when it comes back, it may say wrongly, or by another clock.
MAX_AHEAD_NS = 24 * 3600 * 10**9

# A member that hears of a change hears of the next one so long later, or for large groups as much
# later for each member as a roster costs: when many come at once, each hears of many at once.
GATHER_S = 0.02
GATHER_FOR_EACH_S = 0.002

# Leases that end while the event loop stands still, of a process that is suspended, say, end though
# heartbeats wait in it. If it is so late nobody goes for half a lease, in which each living member
# sends another one; then all is judged as ever, for a lease at least.
LATE_S = 0.1

# Options of the server that has the service. Streams stand for as long as their members are there:
# a connection that has ended without a word is noticed, and members may ping too.
KEEPALIVE: Final = {
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.min_ping_interval_without_data_ms": 5_000,
}

Context = grpc.aio.ServicerContext[Any, Any]

_REFUSED: Final[dict[type[Exception], grpc.StatusCode]] = {  # of Join
    MessagingError: grpc.StatusCode.INVALID_ARGUMENT,
    NameTaken: grpc.StatusCode.ALREADY_EXISTS,
    MembershipLost: grpc.StatusCode.ABORTED,
    DiscoveryUnavailable: grpc.StatusCode.UNAVAILABLE,
}


class _WatchStream:
    """A Watch stream of a member. It is made in the task of the call.

    changed: set when there is something to tell. is_writing: since the last was told.
    """

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()
        self.is_writing = False

    def finish(self) -> None:
        """Let the stream send what is pending, and end."""
        self.ended.set()
        self.changed.set()

    def end(self) -> None:
        """End the stream at once: its member has left, or has opened another stream. A write may
        wait for ever for the member to read."""
        self.finish()
        if self.is_writing:
            assert self._task is not None
            self._task.cancel()


class MembershipService(MembershipServicer):
    """Add it to a server with add_to(). One event loop has it.

    lease_s: for how long a member lives without a sign of life.
    settle_s: how long newcomers wait for the members of a service that was here before.
    grace_s: how long a member without a Watch stream is still taken for alive.
    on_change: called with the name of a group whose members have changed.
    name_of: the name of a caller that may speak for itself alone, as its certificate says; None for
        one that may speak for any, as everybody may without certificates.
    on_accepted: told the peer, and the member's group and name, of calls of members.
    """

    def __init__(
        self,
        lease_s: float = LEASE_S,
        settle_s: float = SETTLE_S,
        grace_s: float = GRACE_S,
        on_change: Callable[[str], None] | None = None,
        name_of: "Callable[[Context], str | None]" = lambda context: None,
    ) -> None:
        self._on_change = on_change
        self._name_of = name_of
        self.on_accepted: Callable[[str, Hashable], None] = lambda peer, member: None
        self._last_incarnation = 0
        self._streams: dict[tuple[str, str, int], _WatchStream] = {}  # the newest of each member
        self._told: dict[str, pb.WatchResponse] = {}  # what all streams of a group are told
        self._barriers: dict[asyncio.Event, str] = {}  # of each call that waits, with its group
        self._has_ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = math.inf  # of the timer
        self._judge_at = -math.inf  # nobody goes before
        self._registry = Registry(
            time.monotonic(),
            self._new_incarnation,
            self._report_change,
            lease_s,
            settle_s,
            grace_s,
            on_barrier=self._wake_barriers,
        )

    @property
    def membership(self) -> Self:
        """Itself, as of any service that has one."""
        return self

    def add_to(self, server: grpc.aio.Server) -> None:
        add_MembershipServicer_to_server(self, server)

    def _new_incarnation(self) -> int:
        # The time of day, so that the process after this one goes on above it, as this one does
        # above those that come back to it.
        self._last_incarnation = max(self._last_incarnation + 1, time.time_ns())
        return self._last_incarnation

    @property
    def settled_at(self) -> float:
        """Monotonic time from which a member of before that is not in the roster is gone."""
        return self._registry.settled_at

    def roster(self, group: str) -> Roster:
        """The members of a group, by name."""
        return self._registry.roster(group)

    def renew(self, group: str, name: str, incarnation: int) -> float:
        """Take another call of a member for a heartbeat. Returns its lease in seconds; 0 for one
        that is no member."""
        is_member = self._registry.renew(group, name, incarnation, time.monotonic())
        return self._registry.lease_s if is_member else 0.0

    def _watch_response(self, group: str) -> pb.WatchResponse:
        """Message of a group's members to their streams: the same object until a change."""
        settling = self._registry.settled_at > time.monotonic()
        told = self._told.get(group)
        if told is None or told.settling != settling:
            roster = self._registry.roster(group)
            members = [to_message(roster[name]) for name in sorted(roster)]
            told = self._told[group] = pb.WatchResponse(members=members, settling=settling)
        return told

    def _report_change(self, group: str) -> None:
        """Wake the streams of a group's members, and end those of members that have gone."""
        self._told.pop(group, None)
        if self._on_change is not None:
            self._on_change(group)
        for member, stream in list(self._streams.items()):
            if member[0] != group:
                continue
            if self._registry.is_member(*member):
                stream.changed.set()
            else:
                stream.end()

    def _wake_barriers(self, group: str) -> None:
        for changed, its_group in self._barriers.items():
            if its_group == group:
                changed.set()

    def _expire(self) -> None:
        """Remove members whose lease is over, and set a timer for the next one. When this process
        was late, members get half a lease more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now, lease_s = time.monotonic(), self._registry.lease_s
        if now - self._due_at >= LATE_S and now - self._judge_at >= lease_s:
            log.warning("membership_late", late_s=round(now - self._due_at, 1))
            self._judge_at = now + lease_s / 2
        due = self._registry.expire(now) if now >= self._judge_at else self._judge_at
        self._due_at = math.inf if due is None else due
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(due - now, self._expire)

    def end(self) -> None:
        """End the service: finish all streams and wake the calls at barriers."""
        self._has_ended = True
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._streams.values():
            stream.finish()
        for changed in self._barriers:
            changed.set()

    def member_of(self, request: Any, own: str | None) -> tuple[str, str] | None:
        """The member that a request comes from, by its group and name; None if it is none.

        own: the only name that the caller may speak for; None if it may speak for any."""
        if isinstance(request, pb.JoinRequest) or own not in (None, request.name):
            return None
        member = (request.group, request.name, request.incarnation)
        return member[:2] if self._registry.is_member(*member) else None

    async def _require_own_name(self, context: Context, name: str) -> None:
        """Refuse a call in a name that is not that of the caller's certificate."""
        own = self._name_of(context)
        if own is not None and own != name:
            why = f"the certificate is that of {own!r}, and the call is in the name of {name!r}"
            await _refuse(context, grpc.StatusCode.UNAUTHENTICATED, shortened(why))

    # --- the calls ---

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        """Let a member into a group, or back into it."""
        await self._require_own_name(context, request.name)
        if why := self._why_full(request, has_own_name=self._name_of(context) is not None):
            await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        former = from_message(request.former) if request.HasField("former") else None
        try:
            if former is None:
                self._expire()
            else:
                self._raise_incarnation(former, request.heard)
            member = self._registry.join(
                request.group,
                request.role,
                request.name,
                request.address,
                time.monotonic(),
                former,
            )
        except MessagingError as error:
            await _refuse(context, _REFUSED[type(error)], str(error))
        self._expire()
        log.info("member_joined", group=request.group, peer=member.name, role=member.role)
        return pb.JoinResponse(
            member=to_message(member), lease_ms=round(1000 * self._registry.lease_s)
        )

    def _why_full(self, request: pb.JoinRequest, *, has_own_name: bool) -> str:
        """Say which limit keeps a process from joining; "" if none does."""
        registry, group, name = self._registry, request.group, request.name
        if registry.num_members >= MAX_MEMBERS and name not in registry.roster(group):
            return f"there are {MAX_MEMBERS} members already"
        if has_own_name and registry.num_other_groups(name, group) >= MAX_GROUPS:
            return f"{shortened(name)!r} is a member of {MAX_GROUPS} groups already; leave one"
        return ""

    def _raise_incarnation(self, former: Member, heard: int) -> None:
        """Go on above the incarnations that a returning member knows. Raises MessagingError for
        ranks and incarnations that nobody was told."""
        highest = max(former.incarnation, heard)
        is_possible = 0 <= former.rank < MAX_MEMBERS and former.incarnation > 0
        if not is_possible or highest > time.time_ns() + MAX_AHEAD_NS:
            raise MessagingError(
                f"nobody was told to be of rank {former.rank} and incarnation "
                f"{former.incarnation}, or of incarnation {heard}"
            )
        self._last_incarnation = max(self._last_incarnation, highest)

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        """Renew the lease of a member."""
        await self._require_own_name(context, request.name)
        if not self._registry.renew(
            request.group, request.name, request.incarnation, time.monotonic()
        ):
            await _refuse_unknown(context, request.group, request.name)
        self.on_accepted(context.peer(), (request.group, request.name))
        return pb.RenewResponse()

    async def Watch(
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncIterator[pb.WatchResponse]:
        """Tell a member who is in its group now, and again after each change."""
        await self._require_own_name(context, request.name)
        registry = self._registry
        member = (request.group, request.name, request.incarnation)
        older, stream = self._streams.get(member), _WatchStream()
        if not registry.stream_begun(*member, time.monotonic(), stream):
            await _refuse_unknown(context, request.group, request.name)
        self.on_accepted(context.peer(), member[:2])
        self._streams[member] = stream
        if older is not None:
            older.end()
        last, next_at = None, 0.0
        try:
            while not stream.ended.is_set() and not self._has_ended:
                stream.changed.clear()
                told = self._watch_response(request.group)
                if told is not last:
                    last = told
                    next_at = time.monotonic() + GATHER_FOR_EACH_S * len(told.members)
                    stream.is_writing = True
                    yield told
                    stream.is_writing = False
                left_s = registry.settled_at - time.monotonic() if told.settling else None
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await stream.changed.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(GATHER_S, next_at - time.monotonic())):
                        await stream.ended.wait()
        finally:
            if self._streams.get(member) is stream:
                del self._streams[member]
            registry.stream_ended(*member, time.monotonic(), stream)
            self._expire()
        await self._refuse_ended(context, *member)
        await _refuse(
            context, grpc.StatusCode.ABORTED, f"{request.name!r} watches on a newer stream"
        )

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        """Take a member out of its group."""
        await self._require_own_name(context, request.name)
        self._registry.leave(request.group, request.name, request.incarnation)
        return pb.LeaveResponse()

    async def Barrier(self, request: pb.BarrierRequest, context: Context) -> pb.BarrierResponse:
        """Answer when as many members as wanted wait at the barrier."""
        await self._require_own_name(context, request.name)
        registry = self._registry
        member = (request.group, request.name, request.incarnation)
        if not registry.is_member(*member):
            await _refuse_unknown(context, request.group, request.name)
        changed = asyncio.Event()
        where = (request.group, request.barrier, request.name)
        call = request.call or time.time_ns()
        self._barriers[changed] = request.group
        left_s = context.time_remaining()
        try:
            async with asyncio.timeout(left_s and left_s - min(WORD_S, left_s / 10)) as time_limit:
                while registry.is_member(*member) and not self._has_ended:
                    changed.clear()
                    if registry.arrive(*where, request.num_members, call, 0.0, math.inf):
                        return pb.BarrierResponse()
                    await changed.wait()
        except TimeoutError:
            pass
        except ValueError as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except DiscoveryUnavailable as error:
            await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except MessagingError as error:  # a newer call waits there
            await _refuse(context, grpc.StatusCode.ABORTED, str(error))
        finally:
            del self._barriers[changed]
            has_opened = registry.give_up(*where, call)
        if not has_opened:
            await self._refuse_ended(context, *member)
            if time_limit.expired():
                why_not = f"{request.barrier!r} has not opened"
                await _refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, why_not)
        return pb.BarrierResponse()

    async def _refuse_ended(
        self, context: Context, group: str, name: str, incarnation: int
    ) -> None:
        """Refuse a call if the service is being stopped or the caller is no member any more."""
        if self._has_ended:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, "the service is being stopped")
        if not self._registry.is_member(group, name, incarnation):
            await _refuse_unknown(context, group, name)


def to_message(member: Member) -> pb.Member:
    return pb.Member(
        name=member.name,
        role=member.role,
        rank=member.rank,
        address=member.address,
        incarnation=member.incarnation,
    )


def from_message(message: pb.Member) -> Member:
    return Member(message.name, message.role, message.rank, message.address, message.incarnation)


async def _refuse_unknown(context: Context, group: str, name: str) -> NoReturn:
    await _refuse(
        context,
        grpc.StatusCode.NOT_FOUND,
        f"{shortened(name)!r} is no member of {shortened(group)!r}, or not any more",
    )


async def _refuse(context: Context, code: grpc.StatusCode, why: str) -> NoReturn:
    await context.abort(code, why)
    raise AssertionError("abort() raises")
