"""The Membership service: a registry behind gRPC, for a grpc.aio server."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
import structlog

from xain_messaging.discovery.registry import LEASE_S, SETTLE_S, Registry, check_barrier
from xain_messaging.errors import DiscoveryUnavailable, MembershipLost, NameTaken
from xain_messaging.names import why_not
from xain_messaging.ports import Member
from xain_proto.messaging import membership_pb2 as pb
from xain_proto.messaging.membership_pb2_grpc import MembershipServicer

log = structlog.get_logger(__name__)

MAX_MEMBERS = 1_000  # of all groups
MAX_ADDRESS_BYTES = 256
MAX_LINES = 4  # streams of one member: one stands, and others may not have been noticed to be gone
RPCS_PER_MEMBER = MAX_LINES + 2  # a heartbeat and a barrier at the same time
# What a member says of itself when it comes back, it may say wrongly, or by another clock.
MAX_AHEAD_NS = 24 * 3600 * 10**9

GATHER_S = 0.02

Context = grpc.aio.ServicerContext[Any, Any]


class MembershipService(MembershipServicer):
    """Add it to a server with add_MembershipServicer_to_server. One event loop has it.

    lease_s: for how long a member lives without a sign of life.
    settle_s: how long newcomers wait for the members of a service that was here before.
    """

    def __init__(self, lease_s: float = LEASE_S, settle_s: float = SETTLE_S) -> None:
        self._last_incarnation = 0
        self._changes: dict[str, asyncio.Event] = {}
        self._has_ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._registry = Registry(
            time.monotonic(), self._new_incarnation, self._has_changed, lease_s, settle_s
        )

    def _new_incarnation(self) -> int:
        # The time of day, so that the process after this one goes on above it, as this one does
        # above those that come back to it.
        self._last_incarnation = max(self._last_incarnation + 1, time.time_ns())
        return self._last_incarnation

    def _has_changed(self, group: str) -> None:
        changed = self._changes.pop(group, None)
        if changed is not None:
            changed.set()

    async def _change(self, group: str, timeout_s: float | None) -> None:
        """Until the group is another than now."""
        changed = self._changes.setdefault(group, asyncio.Event())
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            pass

    def _expire(self) -> None:
        """Whose lease is over has gone; comes again when the next one will be."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        due = self._registry.expire(now)
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(due - now, self._expire)

    def end(self) -> None:
        """The server is about to stop: nobody waits any more. The members find the next one."""
        self._has_ended = True
        if self._timer is not None:
            self._timer.cancel()
        for group in list(self._changes):
            self._has_changed(group)

    # --- the calls ---

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        for what in ("group", "role", "name"):
            if reason := why_not(getattr(request, what)):
                await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"{what}: {reason}")
        if not 0 < len(request.address) <= MAX_ADDRESS_BYTES:
            await _refuse(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                f"an address has 1 to {MAX_ADDRESS_BYTES} bytes, not {len(request.address)}",
            )
        if self._registry.num_members >= MAX_MEMBERS and request.name not in self._registry.roster(
            request.group
        ):
            await _refuse(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"there are {MAX_MEMBERS} members already",
            )
        former = from_message(request.former) if request.HasField("former") else None
        if former is not None:
            if not (
                0 <= former.rank < MAX_MEMBERS
                and 0 < former.incarnation <= time.time_ns() + MAX_AHEAD_NS
            ):
                await _refuse(
                    context,
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"nobody was told to be of rank {former.rank} and incarnation "
                    f"{former.incarnation}",
                )
            self._last_incarnation = max(self._last_incarnation, former.incarnation)
        try:
            member = self._registry.join(
                request.group,
                request.role,
                request.name,
                request.address,
                time.monotonic(),
                former,
            )
        except NameTaken as error:
            await _refuse(context, grpc.StatusCode.ALREADY_EXISTS, str(error))
        except MembershipLost as error:
            await _refuse(context, grpc.StatusCode.ABORTED, str(error))
        except DiscoveryUnavailable as error:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, str(error))
        self._expire()
        log.info("member_joined", group=request.group, peer=member.name, role=member.role)
        return pb.JoinResponse(
            member=to_message(member), lease_ms=round(1000 * self._registry.lease_s)
        )

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        if not self._registry.renew(
            request.group, request.name, request.incarnation, time.monotonic()
        ):
            await _refuse_stranger(context, request.group, request.name)
        return pb.RenewResponse()

    async def Watch(
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncIterator[pb.WatchResponse]:
        registry = self._registry
        member = (request.group, request.name, request.incarnation)
        if registry.num_lines(*member) >= MAX_LINES:
            await _refuse(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{request.name!r} watches {MAX_LINES} times already",
            )
        if not registry.line_stands(*member, time.monotonic()):
            await _refuse_stranger(context, request.group, request.name)
        last: pb.WatchResponse | None = None
        try:
            while registry.is_member(*member) and not self._has_ended:
                left_s = registry.settled_at - time.monotonic()
                roster = registry.roster(request.group)
                told = pb.WatchResponse(
                    members=[to_message(roster[name]) for name in sorted(roster)],
                    settling=left_s > 0,
                )
                if told != last:
                    last = told
                    yield told
                    continue  # it may have changed while that went out
                await self._change(request.group, left_s if left_s > 0 else None)
                await asyncio.sleep(GATHER_S)  # when many come at once, each hears of many at once
        finally:
            registry.line_has_ended(*member, time.monotonic())
            self._expire()
        await self._refuse_waiting(context, request.group, request.name)

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        self._registry.leave(request.group, request.name, request.incarnation)
        return pb.LeaveResponse()

    async def Barrier(self, request: pb.BarrierRequest, context: Context) -> pb.BarrierResponse:
        registry = self._registry
        member = (request.group, request.name, request.incarnation)
        if not registry.is_member(*member):
            await _refuse_stranger(context, request.group, request.name)
        try:
            check_barrier(request.barrier, request.num_members)
        except ValueError as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        place = (request.group, request.barrier)
        waiting = registry.arrive(*place, request.name, request.num_members)
        try:
            while not waiting.is_open:
                if self._has_ended or not registry.is_member(*member):
                    await self._refuse_waiting(context, request.group, request.name)
                await self._change(request.group, None)
        except asyncio.CancelledError:
            registry.give_up(*place, request.name)
            raise
        return pb.BarrierResponse()

    async def _refuse_waiting(self, context: Context, group: str, name: str) -> NoReturn:
        if self._has_ended:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, "the service is being stopped")
        await _refuse_stranger(context, group, name)


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


async def _refuse_stranger(context: Context, group: str, name: str) -> NoReturn:
    await _refuse(
        context, grpc.StatusCode.NOT_FOUND, f"{name!r} is no member of {group!r}, or not any more"
    )


async def _refuse(context: Context, code: grpc.StatusCode, why: str) -> NoReturn:
    await context.abort(code, why)
    raise AssertionError("abort() raises")
