"""Finding each other at a coordinator, or wherever else the Membership service runs.

The members talk to each other without it: while it is away nobody can join, and who dies is not
noticed; all else goes on. When it is back they tell it who they are, and are that again.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import grpc
import structlog

from xain_messaging.discovery.service import from_message, to_message
from xain_messaging.errors import (
    Closed,
    DiscoveryUnavailable,
    MembershipLost,
    MessagingError,
    NameTaken,
    TimedOut,
)
from xain_messaging.ports import Member, Roster
from xain_proto.messaging import membership_pb2 as pb
from xain_proto.messaging.membership_pb2_grpc import MembershipStub

log = structlog.get_logger(__name__)

CALL_TIMEOUT_S = 5.0
RETRY_S = 0.25

_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
)
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})


class CoordinatorDiscovery:
    """See ports.Discovery.

    target: "HOST:PORT".
    credentials: of the channel; without them it goes in the clear.
    """

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._target = target
        self._credentials = credentials

    def join(
        self,
        group: str,
        role: str,
        name: str,
        address: str,
        *,
        timeout_s: float,
        on_change: Callable[[Roster], None],
        on_lost: Callable[[Exception], None],
    ) -> "CoordinatorMembership":
        if self._credentials is None:
            channel = grpc.insecure_channel(self._target, _OPTIONS)
        else:
            channel = grpc.secure_channel(self._target, self._credentials, _OPTIONS)
        request = pb.JoinRequest(group=group, role=role, name=name, address=address)
        membership = CoordinatorMembership(channel, self._target, request, on_change, on_lost)
        try:
            membership.join(time.monotonic() + timeout_s)
        except BaseException:  # whatever it is, an interrupt too: no thread and channel stay behind
            membership.leave()
            raise
        return membership


class CoordinatorMembership:
    """See ports.Membership."""

    def __init__(
        self,
        channel: grpc.Channel,
        target: str,
        request: pb.JoinRequest,
        on_change: Callable[[Roster], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        self._channel = channel
        self._target = target
        self._request = request
        self._on_change = on_change
        self._on_lost = on_lost
        self._stub: Any = MembershipStub(channel)
        self._chance = Random()
        self._member: Member | None = None
        self._lease_s = CALL_TIMEOUT_S
        self._roster: Roster = {}
        self._told = threading.Event()
        self._has_ended = threading.Event()
        self._joining = threading.Lock()
        self._stream: Any = None
        self._threads: list[threading.Thread] = []

    @property
    def member(self) -> Member:
        assert self._member is not None, "join() comes first"
        return self._member

    def join(self, deadline: float) -> None:
        """Raises NameTaken and DiscoveryUnavailable at the deadline."""
        while True:
            try:
                self._ask_to_join(max(0.1, deadline - time.monotonic()))
                break
            except (NameTaken, DiscoveryUnavailable):
                if time.monotonic() + RETRY_S > deadline:
                    raise
                time.sleep(RETRY_S)
        for work in (self._watch, self._renew):
            thread = threading.Thread(
                target=self._run, args=(work,), name="membership", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        if not self._told.wait(max(0.1, deadline - time.monotonic())):
            raise DiscoveryUnavailable(f"{self._target} does not say who is in the group")

    def _ask_to_join(self, timeout_s: float) -> None:
        former = None if self._member is None else to_message(self._member)
        request = pb.JoinRequest()
        request.CopyFrom(self._request)
        if former is not None:
            request.former.CopyFrom(former)
        try:
            answer = self._stub.Join(request, timeout=min(timeout_s, CALL_TIMEOUT_S))
        except grpc.RpcError as error:
            raise self._as_ours(error) from None
        self._member = from_message(answer.member)
        self._lease_s = answer.lease_ms / 1000

    def _as_ours(self, error: Any) -> MessagingError:
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.ALREADY_EXISTS:
            return NameTaken(details)
        if code is grpc.StatusCode.ABORTED:
            return MembershipLost(details)
        if code in _AWAY:
            return DiscoveryUnavailable(f"{self._target} does not answer: {details}")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return MessagingError(f"{self._target} has no Membership service")
        return MessagingError(f"{self._target} refuses: {details} ({code.name})")

    # --- in threads ---

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a defect, ours or of who is told: nobody may go on unnoticed
            log.exception("membership_failed", group=self._request.group)
            self._lose(MembershipLost(f"the thread that keeps it has failed: {error!r}"))

    def _lose(self, error: MembershipLost) -> None:
        """Once, and not if we have left."""
        with self._joining:
            has_ended = self._has_ended.is_set()
            self._has_ended.set()
        if not has_ended:
            self._on_lost(error)

    def _renew(self) -> None:
        while not self._has_ended.wait(self._chance.uniform(0.25, 0.35) * self._lease_s):
            request = pb.RenewRequest(**self._who())
            try:
                self._stub.Renew(request, timeout=self._lease_s / 3)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
                self._handle(error)

    def _watch(self) -> None:
        while not self._has_ended.is_set():
            try:
                self._stream = self._stub.Watch(pb.WatchRequest(**self._who()))
                for response in self._stream:
                    self._tell(response)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
                self._handle(error)
            self._has_ended.wait(self._chance.uniform(0.1, 2 * RETRY_S))

    def _who(self) -> dict[str, Any]:
        return {
            "group": self._request.group,
            "name": self._request.name,
            "incarnation": self.member.incarnation,
        }

    def _tell(self, response: pb.WatchResponse) -> None:
        members = {member.name: from_message(member) for member in response.members}
        # A service that has just been started does not know all of us yet.
        roster = {**self._roster, **members} if response.settling else members
        self._member = roster[self._request.name]
        if roster != self._roster:
            self._roster = roster
            self._on_change(roster)
        self._told.set()

    def _handle(self, error: Any) -> None:
        if self._has_ended.is_set():
            return
        if isinstance(error, ValueError):
            raise error
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            log.debug("discovery_away", target=self._target, error=error.details())
            return
        try:
            with self._joining:
                if self._has_ended.is_set():
                    return  # we have left meanwhile, and must not be a member again
                # The other thread may have come back already; then this changes nothing.
                self._ask_to_join(CALL_TIMEOUT_S)
            log.info("came_back", group=self._request.group, peer=self._request.name)
        except DiscoveryUnavailable:
            pass  # tried again with the next call
        except MembershipLost as lost:
            self._lose(lost)
        except MessagingError as refusal:
            self._lose(MembershipLost(str(refusal)))

    # --- for the member ---

    def barrier(self, name: str, num_members: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        request = pb.BarrierRequest(**self._who(), barrier=name, num_members=num_members)
        while True:
            if self._has_ended.is_set():
                raise Closed("this member has left")
            left_s = max(0.0, deadline - time.monotonic())
            try:
                self._stub.Barrier(request, timeout=left_s, wait_for_ready=True)
                return
            except grpc.RpcError as error:
                failed: Any = error
            if time.monotonic() + RETRY_S > deadline:
                raise TimedOut(f"waited {timeout_s:g} s at the barrier {name!r}")
            if failed.code() not in {*_AWAY, grpc.StatusCode.NOT_FOUND}:
                raise self._as_ours(failed)
            time.sleep(RETRY_S)  # until the service, or we, are back

    def leave(self) -> None:
        if self._has_ended.is_set() and not self._threads:
            return
        with self._joining:
            self._has_ended.set()
        if self._member is not None:
            with suppress(grpc.RpcError):  # it expires by itself
                self._stub.Leave(pb.LeaveRequest(**self._who()), timeout=1.0)
        if self._stream is not None:
            self._stream.cancel()
        self._channel.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CALL_TIMEOUT_S)
        self._threads.clear()
