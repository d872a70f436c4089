"""Members, and the services that they find each other by, for tests of discoveries."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import grpc
import pytest

from support.messaging import PATIENCE_S, RedisServer, until
from xain_foundation.net.errors import MessagingError
from xain_membership.coordinator import CoordinatorDiscovery
from xain_membership.errors import DiscoveryUnavailable, NameTaken
from xain_membership.ports import Discovery, Membership, Roster
from xain_membership.server import MembershipServer
from xain_messaging.discovery.redis import RedisDiscovery
from xain_wire.messaging import membership_pb2 as pb
from xain_wire.messaging.membership_pb2_grpc import MembershipStub


class Peer:
    """A member that joins, and what it is told."""

    made: ClassVar[list["Peer"]] = []

    def __init__(
        self,
        discovery: Discovery,
        name: str,
        role: str = "worker",
        address: str = "here",
        *,
        group: str = "training",
        timeout_s: float = PATIENCE_S,
    ) -> None:
        self.rosters: list[Roster] = []
        self.lost: list[Exception] = []
        self.membership: Membership = discovery.join(
            group,
            role,
            name,
            address,
            timeout_s=timeout_s,
            on_change=self.rosters.append,
            on_lost=self.lost.append,
        )
        self.made.append(self)

    @property
    def sees(self) -> dict[str, str]:
        return {name: member.address for name, member in self.rosters[-1].items()}

    @property
    def rank(self) -> int:
        return self.membership.member.rank

    def leave(self) -> None:
        self.membership.leave()


def is_refused(why: type[MessagingError], text: str, join: Callable[[float], object]) -> None:
    """Require that a join is refused with this text, and does not go on after its time. join: takes
    that time.

    Its last attempt may begin just before that end, and is then told nothing: so more than one may
    be needed, each with more time than the one before.
    """
    times_s = itertools.count(0.5, 0.5)

    def is_told() -> bool:
        with pytest.raises((NameTaken, DiscoveryUnavailable)) as caught:
            join(next(times_s))
        return isinstance(caught.value, why) and text in str(caught.value)

    until(is_told, f"{why.__name__}: {text}")


NETWORKED = ["coordinator", "redis"]


class Service:
    """A MembershipServer or a Redis that is stopped and started again, and then knows no members.

    settle_s: how long newcomers wait after a start from now on.
    """

    def __init__(self, kind: str, lease_s: float) -> None:
        self.settle_s = 0.0
        self._lease_s = lease_s
        self._server: MembershipServer | RedisServer = (
            MembershipServer(lease_s=lease_s) if kind == "coordinator" else RedisServer()
        )

    @property
    def discovery(self) -> Discovery:
        if isinstance(self._server, MembershipServer):
            return CoordinatorDiscovery(self._server.target)
        return RedisDiscovery(self._server.url, self._lease_s, self.settle_s)

    def start(self) -> None:
        if isinstance(self._server, MembershipServer):
            self._server.settle_s = self.settle_s
        self._server.start()

    def stop(self) -> None:
        if isinstance(self._server, MembershipServer):
            self._server.stop()
        else:
            self._server.kill()

    def __enter__(self) -> "Service":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._server, MembershipServer):
            self._server.stop()
        else:
            self._server.__exit__()


def all_are_back(peers: list[Peer]) -> None:
    """Only members pass a barrier."""
    with ThreadPoolExecutor(len(peers)) as pool:
        for passed in [
            pool.submit(peer.membership.barrier, "back", len(peers), PATIENCE_S) for peer in peers
        ]:
            passed.result(PATIENCE_S)


NUMBERS = itertools.count()


class MemberCalls:
    """Calls of one member at a service."""

    def __init__(self, target: str, name: str) -> None:
        self._channel = grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)])
        self.stub: Any = MembershipStub(self._channel)
        self.name = name
        self.who: dict[str, Any] = {"group": "g", "name": name}

    def join(self, address: str = "x") -> "MemberCalls":
        request = pb.JoinRequest(role="r", address=address, **self.who)
        member = self.stub.Join(request, timeout=PATIENCE_S).member
        self.who["incarnation"] = member.incarnation
        return self

    def move(self) -> None:
        former = pb.Member(incarnation=self.who["incarnation"])
        who = {"group": self.who["group"], "name": self.who["name"], "role": "r"}
        address = f"x{next(NUMBERS)}"
        self.stub.Join(pb.JoinRequest(address=address, former=former, **who), timeout=PATIENCE_S)

    def watch(self) -> Any:
        return self.stub.Watch(pb.WatchRequest(**self.who), timeout=10 * PATIENCE_S)

    def barrier(self, name: str, num_members: int, timeout_s: float = PATIENCE_S) -> Any:
        request = pb.BarrierRequest(**self.who, barrier=name, num_members=num_members)
        return self.stub.Barrier.future(request, timeout=timeout_s)

    def __enter__(self) -> "MemberCalls":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
