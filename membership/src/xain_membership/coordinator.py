"""Finding each other at a coordinator, or wherever else the Membership service runs.

The members talk to each other without it: while it is away nobody can join, and who dies is not
noticed; all else goes on. When it is back they tell it who they are, and are that again.
"""

import threading
import time
from contextlib import suppress
from typing import Any

import grpc

from xain_foundation import waits
from xain_foundation.logs.logger import get_logger
from xain_foundation.net.channels import require_private_way, why_unreachable
from xain_foundation.net.current_channel import CurrentChannel
from xain_foundation.net.errors import MessagingError
from xain_foundation.net.grpc_calls import Cancellable, details_of
from xain_foundation.security.tls import Certificates
from xain_membership.errors import DiscoveryUnavailable, MembershipLost, NameTaken
from xain_membership.ports import Member
from xain_membership.registry import replaced
from xain_membership.remote import (
    CALL_TIMEOUT_S,
    RETRY_S,
    Joining,
    RemoteDiscovery,
    RemoteMembership,
    left_s,
)
from xain_membership.service import from_message, to_message
from xain_wire.messaging import membership_pb2 as pb
from xain_wire.messaging.membership_pb2_grpc import MembershipStub

log = get_logger(__name__)

_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    # Peers of one process do not share a connection, which has a limit of streams.
    ("grpc.use_local_subchannel_pool", 1),
)
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})


class CoordinatorDiscovery(RemoteDiscovery):
    """See ports.Discovery.

    target: "HOST:PORT".
    tls: None: all goes in the clear. With certificates a member has the name in its own. insecure:
        without `tls` also to another machine.
    node: the node that serves Membership, see CurrentChannel; "" for a coordinator.
    Raises ValueError for another machine with neither tls nor insecure.
    """

    def __init__(
        self,
        target: str,
        tls: Certificates | None = None,
        *,
        insecure: bool = False,
        node: str = "",
    ) -> None:
        require_private_way(target, tls, insecure=insecure)
        self._target = target
        self._tls = tls
        self._node = node

    def _membership(self, joining: Joining) -> "CoordinatorMembership":
        """Make a membership with a channel to the service. It has not joined the group yet."""
        channel = CurrentChannel[Any](
            self._target, _OPTIONS, self._tls, MembershipStub, node=self._node
        )
        return CoordinatorMembership(channel, self._target, joining)

    def _why_unreachable(self) -> str:
        why = why_unreachable(self._target, tls=self._tls, node=self._node)
        return f"{self._target} does not answer: {why}" if why else ""


class CoordinatorMembership(RemoteMembership):
    """See ports.Membership."""

    def __init__(self, channel: CurrentChannel[Any], target: str, joining: Joining) -> None:
        super().__init__(joining)
        self._channel = channel
        self._target = target
        self._lease_s = CALL_TIMEOUT_S
        self._told = threading.Event()
        self._refused_with: grpc.StatusCode | None = None
        self._stream: Cancellable | None = None

    def _ask_to_join(self, timeout_s: float) -> Member:
        """Call Join once, as the former member if there was one. Returns the member."""
        own = self._joining_as
        request = pb.JoinRequest(group=own.group, role=own.role, name=own.name, address=own.address)
        if self._member is not None:
            request.former.CopyFrom(to_message(self._member))
            request.heard = self._heard
        try:
            with self._channel.stub() as stub:
                answer = stub.Join(request, timeout=min(timeout_s, CALL_TIMEOUT_S))
        except grpc.RpcError as error:
            raise self._translate_error(error) from None
        self._lease_s = answer.lease_ms / 1000
        return from_message(answer.member)

    def _begin(self, deadline: float) -> None:
        """Start to watch the group and to renew the lease. Waits for the first list of members."""
        self._start(self._watch)
        self._start(self._renew)
        while not self._told.wait(left_s(deadline)):
            if time.monotonic() >= deadline:
                raise DiscoveryUnavailable(f"{self._target} does not say who is in the group")

    def _translate_error(self, error: Any) -> MessagingError:
        """Translate a failed gRPC call into an error of this package, by its status."""
        code, details = error.code(), details_of(error)
        if code is grpc.StatusCode.ALREADY_EXISTS:
            return NameTaken(details)
        if code is grpc.StatusCode.ABORTED:
            return MembershipLost(details)
        if code in _AWAY:
            return DiscoveryUnavailable(f"{self._target} does not answer: {details}")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return DiscoveryUnavailable(f"{self._target} takes no more: {details}")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return MessagingError(f"{self._target} has no Membership service")
        return MessagingError(f"{self._target} refuses: {details} ({code.name})")

    # --- in threads ---

    def _renew(self) -> None:
        """Renew the lease about three times in its length until the membership ends; a member that
        the service does not know joins again."""
        while not self._has_ended.wait(self._chance.uniform(0.25, 0.35) * self._lease_s):
            request = pb.RenewRequest(**self._fields())
            try:
                with self._channel.stub() as stub:
                    stub.Renew(request, timeout=self._lease_s / 3)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
                self._handle(error)

    def _watch(self) -> None:
        """Read lists of members from Watch streams until the membership has ended."""
        while not self._has_ended.is_set():
            try:
                with self._channel.stub() as stub:
                    self._stream = Cancellable(stub.Watch(pb.WatchRequest(**self._fields())))
                    self._listed.clear()
                    for response in self._stream.call:
                        self._note_members(response)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
                self._handle(error)
            self._has_ended.wait(self._chance.uniform(0.1, 2 * RETRY_S))

    def _fields(self) -> dict[str, Any]:
        return dict(zip(("group", "name", "incarnation"), self._who, strict=True))

    def _note_members(self, response: pb.WatchResponse) -> None:
        """Note the members in a response of Watch, and tell the owner of changes."""
        members = {member.name: from_message(member) for member in response.members}
        self._member = members[self._name]
        self._tell(members, is_settling=response.settling)
        self._told.set()

    def _handle(self, error: Any) -> None:
        """Join again if the service of a failed call does not know this member any more; otherwise
        log the failure. Raises MembershipLost if the service refuses the member."""
        if self._has_ended.is_set():
            return
        if isinstance(error, ValueError):
            raise error
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            self._note_failure(error)
            return
        try:
            # The other thread may have come back already; then this changes nothing.
            self._come_back()
        except DiscoveryUnavailable:
            pass  # tried again with the next call
        except MembershipLost:
            raise
        except MessagingError as refusal:
            raise MembershipLost(str(refusal)) from None

    def _note_failure(self, error: Any) -> None:
        """Log a failed call that is tried again: at debug level if the service is away; else as a
        warning, once until the status changes."""
        code, why = error.code(), error.details()
        if code in _AWAY or code is self._refused_with:
            log.debug("discovery_away", target=self._target, error=why)
        else:
            self._refused_with = code
            log.warning("discovery_refuses", target=self._target, code=code.name, error=why)

    # --- for the member ---

    def _wait_at(self, barrier: str, num_members: int, deadline: float, call: int) -> bool:
        """Wait at a barrier until it opens; False if it has not by the deadline."""
        request = pb.BarrierRequest(
            **self._fields(), barrier=barrier, num_members=num_members, call=call
        )
        while True:
            timeout_s = waits.left_s(deadline)  # a call that has centuries is lost
            try:
                with self._channel.stub() as stub:
                    # A channel with certificates may have to be another one until then.
                    waits_for_ready = not self._channel.is_encrypted
                    stub.Barrier(request, timeout=timeout_s, wait_for_ready=waits_for_ready)
                return True
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
                failed: Any = error
            self._check_waits(barrier, call)
            if isinstance(failed, ValueError):
                raise failed
            if failed.code() is grpc.StatusCode.ABORTED:
                raise replaced(barrier)
            if (
                time.monotonic() + RETRY_S > deadline
            ):  # the service says so a moment before it is over
                return False
            if failed.code() not in {*_AWAY, grpc.StatusCode.NOT_FOUND}:
                raise self._translate_error(failed)
            self._has_ended.wait(RETRY_S)  # until the service, or we, are back
            self._check_waits(barrier, call)

    def _end(self, timeout_s: float) -> None:
        """Leave the group at the service, cancel the Watch stream, and close the channel."""
        if self._member is not None:
            # The member expires by itself; another thread that leaves may have closed the channel.
            with suppress(grpc.RpcError, ValueError), self._channel.stub() as stub:
                stub.Leave(pb.LeaveRequest(**self._fields()), timeout=timeout_s)
        if self._stream is not None:
            self._stream.cancel()
        self._channel.close()
