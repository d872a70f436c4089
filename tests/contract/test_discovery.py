"""What every Discovery does."""

import itertools
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import grpc
import pytest
from structlog.testing import capture_logs

from support.fault_proxy import FaultProxy
from support.messaging import (
    DISCOVERIES,
    LEASE_S,
    PATIENCE_S,
    RedisServer,
    discovery_of,
    until,
)
from support.peers import PeerProcess, answer, member
from xain_messaging.discovery.coordinator import CoordinatorDiscovery
from xain_messaging.discovery.redis import _ARRIVE, _GIVE_UP, RedisDiscovery, RedisMembership
from xain_messaging.discovery.registry import MAX_BARRIERS, Registry
from xain_messaging.discovery.server import MembershipServer
from xain_messaging.discovery.service import KEEPALIVE, MAX_MEMBERS, MembershipService
from xain_messaging.errors import (
    Closed,
    DiscoveryUnavailable,
    MembershipLost,
    MessagingError,
    NameTaken,
    TimedOut,
)
from xain_messaging.ports import Discovery, Membership, Roster
from xain_proto.messaging import membership_pb2 as pb
from xain_proto.messaging.membership_pb2_grpc import MembershipStub


@pytest.fixture(params=DISCOVERIES)
def discovery(request: pytest.FixtureRequest) -> Iterator[Discovery]:
    with discovery_of(request.param) as discovery:
        yield discovery


@pytest.fixture(autouse=True)
def everybody_leaves() -> Iterator[None]:
    """Also those of a test that has failed."""
    yield
    while Peer.made:
        Peer.made.pop().leave()


class Peer:
    """Somebody who joins, and what it is told."""

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
        """Addresses by name."""
        return {name: member.address for name, member in self.rosters[-1].items()}

    @property
    def rank(self) -> int:
        return self.membership.member.rank

    def leave(self) -> None:
        self.membership.leave()


def test_a_newcomer_knows_all_and_is_known_to_all(discovery: Discovery) -> None:
    """Whoever joins hears of those who are there before it goes on, and they hear of it."""
    first = Peer(discovery, "anna", address="there")
    second = Peer(discovery, "ben")
    assert second.sees == {"anna": "there", "ben": "here"}
    until(lambda: first.sees == {"anna": "there", "ben": "here"}, "anna to hear of ben")
    second.leave()
    until(lambda: first.sees == {"anna": "there"}, "anna to hear that ben has left")
    first.leave()
    assert not first.lost
    assert not second.lost


def test_groups_do_not_know_each_other(discovery: Discovery) -> None:
    """The same name may be in two groups."""
    one = Peer(discovery, "anna", group="one")
    two = Peer(discovery, "anna", group="two")
    assert one.sees == two.sees == {"anna": "here"}
    one.leave()
    two.leave()


def test_ranks_are_counted_by_role_and_filled_up(discovery: Discovery) -> None:
    """Ranks of a role are 0, 1, 2 and on; one that has become free is given again, and to the name
    that had it if that comes back."""
    workers = [Peer(discovery, f"worker-{i}") for i in range(3)]
    master = Peer(discovery, "master", role="master")
    assert [worker.rank for worker in workers] == [0, 1, 2]
    assert master.rank == 0
    for worker in workers[:2]:
        worker.leave()
    back = Peer(discovery, "worker-1", address="elsewhere")
    assert back.rank == 1
    until(lambda: master.sees.get("worker-1") == "elsewhere", "the new address")
    another = Peer(discovery, "worker-3")
    assert another.rank == 0
    for peer in (*workers, master, back, another):
        peer.leave()


def test_a_later_process_has_a_higher_incarnation(discovery: Discovery) -> None:
    """So that nobody takes what an older one sent for the newer one's."""
    before = Peer(discovery, "anna")
    before.leave()
    after = Peer(discovery, "anna")
    assert after.membership.member.incarnation > before.membership.member.incarnation
    after.leave()


def test_a_name_is_one_processs_for_as_long_as_that_lives(discovery: Discovery) -> None:
    """A second one is refused, and gets the name when the first has left."""
    first = Peer(discovery, "anna")
    with pytest.raises(NameTaken, match="anna"):
        Peer(discovery, "anna", timeout_s=0.5)
    with ThreadPoolExecutor() as pool:
        second = pool.submit(Peer, discovery, "anna", address="elsewhere")
        first.leave()
        assert second.result(PATIENCE_S).sees == {"anna": "elsewhere"}
        second.result().leave()


def test_one_who_has_left_is_no_member_whatever_it_does(discovery: Discovery) -> None:
    """leave() of an old member does not remove the one that has its name now."""
    first = Peer(discovery, "anna")
    first.leave()
    second = Peer(discovery, "anna")
    first.leave()
    third = Peer(discovery, "ben")
    assert third.sees.keys() == {"anna", "ben"}
    second.leave()
    third.leave()


def test_a_barrier_opens_when_all_are_there(discovery: Discovery) -> None:
    """Nobody goes on before the last has come; and it can be used again."""
    peers = [Peer(discovery, f"worker-{i}") for i in range(3)]
    passed: list[int] = []

    def wait(i: int) -> None:
        peers[i].membership.barrier("epoch", 3, PATIENCE_S)
        passed.append(i)

    for _ in range(3):
        passed.clear()
        with ThreadPoolExecutor() as pool:
            early = [pool.submit(wait, i) for i in range(2)]
            with pytest.raises(TimedOut, match="other"):
                peers[2].membership.barrier("other", 2, 0.2)
            assert not passed
            wait(2)
            for future in early:
                future.result(PATIENCE_S)
    for peer in peers:
        peer.leave()


def test_who_gives_up_is_not_counted_at_a_barrier(discovery: Discovery) -> None:
    """Two who wait one after the other do not open it."""
    first, second = Peer(discovery, "anna"), Peer(discovery, "ben")
    for peer in (first, second):
        with pytest.raises(TimedOut):
            peer.membership.barrier("epoch", 2, 0.2)
    first.leave()
    second.leave()


def test_who_has_left_is_at_no_barrier(discovery: Discovery) -> None:
    """It waits no more, and is not counted; nor is who comes under its name, but for something
    else."""
    anna, ben = Peer(discovery, "anna"), Peer(discovery, "ben")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(anna.membership.barrier, "epoch", 2, 2 * PATIENCE_S)
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        anna.leave()
        assert isinstance(waiting.exception(PATIENCE_S), Closed)
    with pytest.raises(Closed, match="anna"):
        anna.membership.barrier("epoch", 1, PATIENCE_S)
    again = Peer(discovery, "anna")
    with pytest.raises(TimedOut):
        ben.membership.barrier("epoch", 2, 0.5)
    again.leave()
    ben.leave()


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of those who come to a barrier, of a registry in this process or of a Redis."""
    names: list[str] = []
    arrive, call = Registry.arrive, RedisMembership._call

    def note_arrival(registry: Registry, group: str, barrier: str, name: str, *rest: Any) -> Any:
        arrival = arrive(registry, group, barrier, name, *rest)
        names.append(name)
        return arrival

    def note_call(membership: RedisMembership, script: str, *rest: Any, **options: Any) -> Any:
        given = call(membership, script, *rest, **options)
        if script is _ARRIVE:
            names.append(membership._name)
        return given

    monkeypatch.setattr(Registry, "arrive", note_arrival)
    monkeypatch.setattr(RedisMembership, "_call", note_call)
    return names


def test_a_newer_call_at_a_barrier_ends_the_older(
    discovery: Discovery, arrivals: list[str]
) -> None:
    """A member waits there once, and is counted as long as the newer call waits."""
    anna, ben = Peer(discovery, "anna"), Peer(discovery, "ben")
    with ThreadPoolExecutor() as pool:
        older = pool.submit(anna.membership.barrier, "epoch", 2, 2 * PATIENCE_S)
        until(lambda: arrivals.count("anna") > 0, "the older to have come")
        newer = pool.submit(anna.membership.barrier, "epoch", 2, 2 * PATIENCE_S)
        error = older.exception(PATIENCE_S)
        assert isinstance(error, MessagingError)
        assert "a newer call waits at the barrier 'epoch'" in str(error)
        ben.membership.barrier("epoch", 2, PATIENCE_S)
        newer.result(PATIENCE_S)
    anna.leave()
    ben.leave()


@pytest.mark.parametrize(("name", "number"), [("", 1), ("a/b", 1), ("epoch", 0), ("epoch", -1)])
def test_a_barrier_has_a_name_and_is_for_somebody(
    discovery: Discovery, name: str, number: int
) -> None:
    """All else is the caller's mistake."""
    peer = Peer(discovery, "anna")
    with pytest.raises(ValueError, match="barrier"):
        peer.membership.barrier(name, number, PATIENCE_S)
    peer.leave()


def test_many_join_at_once(discovery: Discovery) -> None:
    """Each has a rank of its own, and in the end all know all."""
    number = 12
    with ThreadPoolExecutor(number) as pool:
        peers = list(pool.map(lambda i: Peer(discovery, f"worker-{i}"), range(number)))
    assert sorted(peer.rank for peer in peers) == list(range(number))
    until(lambda: all(len(peer.sees) == number for peer in peers), "all to know all")
    with ThreadPoolExecutor(number) as pool:
        list(pool.map(Peer.leave, peers))


# --- those over a network -------------------------------------------------------------------------


class Service:
    """A MembershipServer or a Redis that is stopped and started again, and then knows nobody.

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


NETWORKED = ["coordinator", "redis"]


def all_are_back(peers: list[Peer]) -> None:
    """Only members pass a barrier."""
    with ThreadPoolExecutor(len(peers)) as pool:
        for passed in [
            pool.submit(peer.membership.barrier, "back", len(peers), PATIENCE_S) for peer in peers
        ]:
            passed.result(PATIENCE_S)


@pytest.mark.parametrize("kind", NETWORKED)
def test_a_service_that_was_away_changes_nothing(kind: str) -> None:
    """Killed and started again with nothing, it knows all members as who they were, and none has
    been told meanwhile that another has gone."""
    with Service(kind, LEASE_S) as service:
        peers = [Peer(service.discovery, f"worker-{i}") for i in range(3)]
        until(lambda: all(len(peer.sees) == 3 for peer in peers), "all to know all")
        before = [peer.membership.member for peer in peers]
        told = [len(peer.rosters) for peer in peers]
        service.stop()
        with pytest.raises(DiscoveryUnavailable):
            Peer(service.discovery, "newcomer", timeout_s=0.5)
        service.start()
        newcomer = Peer(service.discovery, "newcomer", role="other")
        until(lambda: all(len(peer.sees) == 4 for peer in peers), "all to know the newcomer")
        until(lambda: len(newcomer.sees) == 4, "the newcomer to know all")
        assert [peer.membership.member for peer in peers] == before
        assert all(
            len(roster) >= 3
            for peer, number in zip(peers, told, strict=True)
            for roster in peer.rosters[number:]
        )
        assert not any(peer.lost for peer in peers)
        for peer in (*peers, newcomer):
            peer.leave()


@pytest.mark.parametrize("kind", NETWORKED)
def test_newcomers_let_those_go_first_who_come_back(kind: str) -> None:
    """One that is faster than they after a restart gets neither the name nor the rank of one of
    them, but is told to come again."""
    with Service(kind, LEASE_S) as service:
        peers = [Peer(service.discovery, f"worker-{i}") for i in range(2)]
        before = [peer.membership.member for peer in peers]
        service.stop()
        service.settle_s = PATIENCE_S
        service.start()
        for name in ("worker-0", "newcomer"):
            with pytest.raises(DiscoveryUnavailable, match="newcomers are let in"):
                Peer(service.discovery, name, timeout_s=2.0)
        all_are_back(peers)
        assert [peer.membership.member for peer in peers] == before
        assert not any(peer.lost for peer in peers)
        for peer in peers:
            peer.leave()


@pytest.mark.parametrize("kind", NETWORKED)
def test_who_leaves_a_service_that_has_just_been_started_has_gone(kind: str) -> None:
    """For the others it is not on its way back: they hear of it at once, not a lease later."""
    with Service(kind, lease_s=3600.0) as service:
        peers = [Peer(service.discovery, f"worker-{i}") for i in range(3)]
        until(lambda: all(len(peer.sees) == 3 for peer in peers), "all to know all")
        for is_restarted in (False, True):
            if is_restarted:
                service.stop()
                service.start()
                all_are_back(peers)
                peers.append(Peer(service.discovery, "newcomer"))
                until(lambda: all(len(peer.sees) == 3 for peer in peers), "all to hear of it")
            peers.pop(1).leave()
            until(lambda: all(len(peer.sees) == 2 for peer in peers), "it to be gone")
        for peer in peers:
            peer.leave()


def test_who_gives_up_at_the_last_moment_is_counted_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a Redis: when the barrier opens before the word comes that one has given up, the others
    have gone on, and so does that one."""
    monkeypatch.setattr("xain_messaging.discovery.redis.LINGER_S", PATIENCE_S)
    with Service("redis", LEASE_S) as service:
        anna, ben = (Peer(service.discovery, name) for name in ("anna", "ben"))
        membership: Any = anna.membership
        call = membership._call

        def call_when_ben_has_come(script: str, *arguments: Any, timeout_s: float) -> Any:
            if script is _GIVE_UP:
                ben.membership.barrier("epoch", 2, PATIENCE_S)
            return call(script, *arguments, timeout_s=PATIENCE_S)

        membership._call = call_when_ben_has_come
        membership.barrier("epoch", 2, 0.0)
        anna.leave()
        ben.leave()


def test_who_gives_up_unheard_is_not_counted_for_long() -> None:
    """In a Redis, which knows until when each waits."""
    with Service("redis", LEASE_S) as service:
        anna, ben = (Peer(service.discovery, name) for name in ("anna", "ben"))
        membership: Any = anna.membership
        call = membership._call

        def call_but_not_to_give_up(script: str, *arguments: Any, timeout_s: float) -> Any:
            if script is _GIVE_UP:
                raise DiscoveryUnavailable("it hangs")
            return call(script, *arguments, timeout_s=PATIENCE_S)

        membership._call = call_but_not_to_give_up
        with pytest.raises(TimedOut):
            membership.barrier("epoch", 2, 0.2)
        del membership._call
        client = membership._client
        (until_ms,) = client.hvals("xain:{training}:waiting:epoch")

        def is_over() -> bool:
            seconds, microseconds = client.time()
            return bool(1000 * seconds + microseconds / 1000 > int(until_ms) + 1)

        until(is_over, "its time to be over")
        with pytest.raises(TimedOut):
            ben.membership.barrier("epoch", 2, 0.5)
        anna.leave()
        ben.leave()


@pytest.mark.parametrize("kind", NETWORKED)
def test_a_clock_that_is_set_back_makes_nobody_older(kind: str) -> None:
    """Of all that those have heard of who come back to a service that was started again, newcomers
    are the later ones: also than one who does not come back."""
    with Service(kind, lease_s=3600.0) as service:
        anna: Any = Peer(service.discovery, "anna").membership
        day = 10**9 * 3600 * 12 if kind == "coordinator" else 10**6 * 3600 * 12
        ahead = anna.member.incarnation + day
        anna._heard = ahead  # of one who came later, by a clock that was ahead
        service.stop()
        service.start()
        anna.barrier("back", 1, PATIENCE_S)
        ben = Peer(service.discovery, "ben")
        assert ben.membership.member.incarnation > ahead
        assert anna.member.incarnation < ahead
        ben.leave()


@contextmanager
def hangs(kind: str) -> Iterator[tuple[Discovery, Callable[[], None]]]:
    """A discovery, and what lets its service hang: it takes what is sent, and does not answer."""
    if kind == "redis":
        with RedisServer() as redis:
            discovery: Discovery = RedisDiscovery(redis.url, LEASE_S, settle_s=0.0)
            try:
                yield discovery, lambda: redis.signal(signal.SIGSTOP)
            finally:
                redis.signal(signal.SIGCONT)
    else:
        with MembershipServer(settle_s=0.0) as server:
            port = int(server.target.rpartition(":")[2])
            with FaultProxy(port) as proxy:
                try:
                    yield CoordinatorDiscovery(f"127.0.0.1:{proxy.port}"), proxy.blackhole
                finally:
                    proxy.heal()


@pytest.mark.parametrize("kind", NETWORKED)
def test_times_hold_whatever_the_service_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that hangs keeps nobody for longer than the time that was given; to leave takes a
    moment."""
    monkeypatch.setattr("xain_messaging.discovery.remote.CALL_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(f"xain_messaging.discovery.{kind}.CALL_TIMEOUT_S", 3600.0)
    with ThreadPoolExecutor() as pool, hangs(kind) as (discovery, hang):
        anna = Peer(discovery, "anna")
        hang()
        barrier = pool.submit(anna.membership.barrier, "epoch", 2, 0.5)
        assert isinstance(barrier.exception(PATIENCE_S), TimedOut)
        joining = pool.submit(Peer, discovery, "ben", timeout_s=0.3)
        assert isinstance(joining.exception(PATIENCE_S), DiscoveryUnavailable)
        waiting = pool.submit(anna.membership.barrier, "epoch", 2, 7200.0)
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        pool.submit(anna.leave).result(PATIENCE_S)
        assert isinstance(waiting.exception(PATIENCE_S), Closed)
        until(lambda: "membership" not in {t.name for t in threading.enumerate()}, "the threads")


# --- the service of a coordinator -----------------------------------------------------------------


def test_what_members_say_of_themselves_is_checked() -> None:
    """Nobody comes back with what no service has told it: the processes that have its name later
    would seem to be older."""
    with (
        MembershipServer(settle_s=0.0) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        stub: Any = MembershipStub(channel)

        def join(former: pb.Member | None = None) -> pb.Member:
            request = pb.JoinRequest(group="g", role="r", name="anna", address="x", former=former)
            answer: pb.JoinResponse = stub.Join(request, timeout=PATIENCE_S)
            return answer.member

        now = time.time_ns()
        for rank, incarnation in ((-7, now), (2**31 - 1, now), (0, 0), (0, 2**64 - 1)):
            with pytest.raises(grpc.RpcError) as caught:
                join(pb.Member(rank=rank, incarnation=incarnation))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        # Another service's clock may have been ahead.
        before = join(pb.Member(rank=3, incarnation=now + 10**12))
        assert (before.rank, before.incarnation) == (3, now + 10**12)
        stub.Leave(pb.LeaveRequest(group="g", name="anna", incarnation=before.incarnation))
        assert join().incarnation > before.incarnation


NUMBERS = itertools.count()


class Line:
    """Calls of one member at a service."""

    def __init__(self, target: str, name: str) -> None:
        self._channel = grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)])
        self.stub: Any = MembershipStub(self._channel)
        self.name = name
        self.who: dict[str, Any] = {"group": "g", "name": name}

    def join(self, address: str = "x") -> "Line":
        request = pb.JoinRequest(role="r", address=address, **self.who)
        member = self.stub.Join(request, timeout=PATIENCE_S).member
        self.who["incarnation"] = member.incarnation
        return self

    def move(self) -> None:
        """To a new address."""
        former = pb.Member(incarnation=self.who["incarnation"])
        who = {"group": self.who["group"], "name": self.who["name"], "role": "r"}
        address = f"x{next(NUMBERS)}"
        self.stub.Join(pb.JoinRequest(address=address, former=former, **who), timeout=PATIENCE_S)

    def watch(self) -> Any:
        return self.stub.Watch(pb.WatchRequest(**self.who), timeout=10 * PATIENCE_S)

    def barrier(self, name: str, num_members: int, timeout_s: float = PATIENCE_S) -> Any:
        request = pb.BarrierRequest(**self.who, barrier=name, num_members=num_members)
        return self.stub.Barrier.future(request, timeout=timeout_s)

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def test_the_end_of_an_older_call_at_a_barrier_leaves_the_newer_there(arrivals: list[str]) -> None:
    """The line of the older was dead, which is noticed when the newer waits already."""
    with (
        MembershipServer(settle_s=0.0) as server,
        Line(server.target, "anna").join() as anna,
        Line(server.target, "ben").join() as ben,
    ):
        older = anna.barrier("epoch", 2)
        until(lambda: len(arrivals) == 1, "the older")
        newer = anna.barrier("epoch", 2)
        until(lambda: len(arrivals) == 2, "the newer")
        older.cancel()
        # A call of anna's that is answered after the service has heard of that.
        anna.stub.Renew(pb.RenewRequest(**anna.who), timeout=PATIENCE_S)
        ben.barrier("epoch", 2).result()
        newer.result()


def test_barriers_of_a_member_are_bounded(arrivals: list[str]) -> None:
    """At a service, where each takes up a call; there is room again when one is over."""
    with (
        MembershipServer(settle_s=0.0) as server,
        Line(server.target, "anna").join() as anna,
        Line(server.target, "ben").join() as ben,
    ):
        waiting = [anna.barrier(f"b{i}", 2) for i in range(MAX_BARRIERS)]
        until(lambda: len(arrivals) == MAX_BARRIERS, "anna to wait at all")
        assert anna.barrier("another", 1).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        ben.barrier("b0", 2).result()
        waiting[0].result()
        anna.barrier("another", 1).result()
        for call in waiting[1:]:
            call.cancel()


def test_the_service_says_in_time_that_a_barrier_has_not_opened() -> None:
    """Before the caller's own time is over: so both know that it was not counted."""
    with MembershipServer(settle_s=0.0) as server, Line(server.target, "anna").join() as anna:

        def says_so() -> bool:
            call = anna.barrier("epoch", 2, timeout_s=1.0)
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return "'epoch' has not opened" in call.details()

        until(says_so, "an answer that is faster than a tenth of a second")


def test_the_newest_stream_of_a_member_ends_the_older_ones() -> None:
    """Their lines may be dead, and nobody has noticed yet; it must not be the newest that hears
    nothing."""
    with (
        MembershipServer(settle_s=0.0) as server,
        Line(server.target, "anna").join() as anna,
        Line(server.target, "ben") as ben,
    ):
        older: list[Any] = []
        for _ in range(10):
            newest = anna.watch()
            assert [member.name for member in next(newest).members] == ["anna"]
            for call in older:
                assert call.code() is grpc.StatusCode.ABORTED
            older = [newest]
        ben.join()
        assert [member.name for member in next(newest).members] == ["anna", "ben"]
        newest.cancel()


def test_a_stream_that_nobody_reads_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a newer one, and when its member leaves: what it is being told never goes out."""
    services: list[MembershipService] = []

    class Service(MembershipService):
        def __init__(self, *rest: Any) -> None:
            super().__init__(*rest)
            services.append(self)

    monkeypatch.setattr("xain_messaging.discovery.server.MembershipService", Service)
    with (
        MembershipServer(settle_s=0.0) as server,
        Line(server.target, "crowd") as crowd,
        ExitStack() as stack,
    ):
        for i in range(MAX_MEMBERS // 2):  # so that a few rosters are more than a line holds
            crowd.who = {"group": "g", "name": f"w{i}"}
            crowd.join("x" * 256)
        (service,) = services
        lines = [stack.enter_context(Line(server.target, "anna")) for _ in range(3)]
        lines[0].join()
        anna = ("g", "anna", lines[0].who["incarnation"])
        told = []

        def is_stuck() -> bool:
            """After one more change, and all those before it."""
            crowd.move()
            stream = service._lines.get(anna)
            told.append(stream is not None and stream not in ended and stream.is_writing)
            return all(told[-10:])

        ended, calls = set(), []
        over = []
        has_ended = service._registry.line_has_ended
        monkeypatch.setattr(
            service._registry,
            "line_has_ended",
            lambda *rest: over.append(rest) or has_ended(*rest),  # type: ignore[func-returns-value]  # it is called
        )
        for line in lines:
            line.who = lines[0].who
            calls.append(line.watch())
            told.append(False)
            until(is_stuck, "the stream to be stuck")
            ended.add(service._lines[anna])
        until(lambda: len(over) == 2, "the older streams to be over")
        crowd.stub.Leave(pb.LeaveRequest(**lines[0].who), timeout=PATIENCE_S)
        until(lambda: not service._lines, "the last one to be over")


def test_a_stream_that_is_refused_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats go on meanwhile, so nobody would notice; and it is tried again and again."""

    async def refuse(service: MembershipService, request: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        yield

    monkeypatch.setattr(MembershipService, "Watch", refuse)
    with (
        capture_logs() as logs,
        MembershipServer(settle_s=0.0) as server,
        pytest.raises(DiscoveryUnavailable, match="does not say who is in the group"),
    ):
        Peer(CoordinatorDiscovery(server.target), "anna", timeout_s=2.0)
    said = [entry for entry in logs if entry["event"] == "discovery_refuses"]
    assert [(entry["log_level"], entry["error"]) for entry in said] == [("warning", "no room")]


def test_a_line_that_ends_without_a_word_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service asks now and then whether somebody is there: long before a lease is over the
    member has gone."""
    monkeypatch.setitem(KEEPALIVE, "grpc.keepalive_time_ms", 200)
    monkeypatch.setitem(KEEPALIVE, "grpc.keepalive_timeout_ms", 200)
    monkeypatch.setitem(KEEPALIVE, "grpc.http2.ping_timeout_ms", 200)  # or it is a minute
    with MembershipServer(lease_s=3600.0, settle_s=0.0) as server:
        port = int(server.target.rpartition(":")[2])
        with FaultProxy(port) as proxy:
            watcher = Peer(CoordinatorDiscovery(server.target), "anna")
            Peer(CoordinatorDiscovery(f"127.0.0.1:{proxy.port}"), "ben")
            until(lambda: watcher.sees.keys() == {"anna", "ben"}, "anna to hear of ben")
            proxy.blackhole()
            until(lambda: watcher.sees.keys() == {"anna"}, "anna to hear that ben is gone")
            proxy.heal()
            until(lambda: watcher.sees.keys() == {"anna", "ben"}, "ben to be back")


def test_members_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is one too many waits for its time, and has the place of one who leaves."""
    monkeypatch.setattr("xain_messaging.discovery.service.MAX_MEMBERS", 2)
    with Service("coordinator", LEASE_S) as service:
        discovery = service.discovery
        first, second = Peer(discovery, "anna"), Peer(discovery, "ben", group="another")
        with pytest.raises(DiscoveryUnavailable, match="2 members already"):
            Peer(discovery, "cleo", timeout_s=0.5)
        with pytest.raises(NameTaken):
            Peer(discovery, "anna", timeout_s=0.5)
        first.leave()
        third = Peer(discovery, "cleo")
        second.leave()
        third.leave()


def test_a_server_whose_port_is_taken() -> None:
    """It says so, leaves nothing behind, and can be stopped as one that has served."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = MembershipServer(f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(OSError, match="cannot listen"):
            server.start()
        assert server._thread is not None
        assert not server._thread.is_alive()
        server.stop()
    with server:
        Peer(CoordinatorDiscovery(server.target), "anna").leave()


# --- processes that die ---------------------------------------------------------------------------


def process(discovery: Discovery, name: str, timeout_s: float = PATIENCE_S) -> PeerProcess:
    options = {"name": name, "join_timeout_s": timeout_s, "timeout_s": PATIENCE_S}
    return PeerProcess("training", "worker", None, discovery, "in-process", options)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", NETWORKED)
def test_the_entry_of_a_killed_process_expires(kind: str) -> None:
    """As long as it lives its name is refused to others, in this process and in another; when it
    has been killed those who watch hear of it, and the name is free, with its rank."""
    with Service(kind, lease_s=3.0) as service:
        watcher = Peer(service.discovery, "anna")
        ben = process(service.discovery, "ben")
        before = ben.do(member)
        until(lambda: watcher.sees.keys() == {"anna", "ben"}, "anna to hear of ben")
        with pytest.raises(NameTaken, match="ben"):
            process(service.discovery, "ben", timeout_s=2.0)
        with pytest.raises(NameTaken, match="ben"):
            Peer(service.discovery, "ben", timeout_s=2.0)
        ben.end()
        until(lambda: watcher.sees.keys() == {"anna"}, "anna to hear that ben has died")
        again = process(service.discovery, "ben")
        after = again.do(member)
        assert after.rank == before.rank == 1
        assert after.incarnation > before.incarnation
        until(lambda: watcher.sees.keys() == {"anna", "ben"}, "anna to hear of the next")
        again.end()
        assert not watcher.lost
        watcher.leave()


@pytest.mark.e2e
@pytest.mark.parametrize("meanwhile", ["nobody", "another", "another that has left"])
@pytest.mark.parametrize("kind", NETWORKED)
def test_one_who_was_taken_for_dead_hears_of_it(kind: str, meanwhile: str) -> None:
    """A process that was held up for longer than its lease is a member again when it goes on, as
    who it was; unless another one has come under its name meanwhile: then it is told so, and the
    other keeps the name. If that has left it is the same, since peers that have heard of it do not
    listen to an older one any more."""
    with Service(kind, lease_s=3.0) as service:
        watcher = Peer(service.discovery, "anna")
        ben = process(service.discovery, "ben")
        try:
            before = ben.do(member)
            until(lambda: "ben" in watcher.sees, "anna to hear of ben")
            ben.suspend()
            until(lambda: "ben" not in watcher.sees, "ben to be taken for dead")
            if meanwhile != "nobody":
                other = Peer(service.discovery, "ben", address="elsewhere")
                if meanwhile == "another that has left":
                    other.leave()
            ben.resume()
            if meanwhile != "nobody":
                with pytest.raises(MembershipLost, match="taken for dead"):
                    ben.do(answer, 1)
                assert not other.lost
                if meanwhile == "another":
                    until(lambda: watcher.sees.get("ben") == "elsewhere", "anna to know it")
                    other.leave()
            else:
                until(lambda: "ben" in watcher.sees, "ben to be back")
                assert watcher.rosters[-1]["ben"] == ben.do(member) == before
        finally:
            ben.end()
            watcher.leave()


@pytest.mark.e2e
@pytest.mark.parametrize("kind", NETWORKED)
def test_one_whose_place_was_taken_does_not_have_it_again(kind: str) -> None:
    """Also where the service was started again with nothing, and that one is back first: those who
    have heard of the later one are not told of the earlier one, which gives way when the later one
    is back."""
    with Service(kind, lease_s=3.0) as service, ExitStack() as stack:
        watcher = Peer(service.discovery, "anna")
        ben = process(service.discovery, "ben")
        stack.callback(ben.end)
        before = ben.do(member)
        until(lambda: "ben" in watcher.sees, "anna to hear of ben")
        ben.suspend()
        stack.callback(ben.resume)
        until(lambda: "ben" not in watcher.sees, "ben to be taken for dead")
        other = Peer(service.discovery, "ben", address="elsewhere")
        until(lambda: watcher.sees.get("ben") == "elsewhere", "anna to hear of the other")
        service.stop()
        may_come_back = threading.Event()
        stack.callback(may_come_back.set)
        ask = other.membership._ask_to_join  # type: ignore[attr-defined]  # of those over a network

        def ask_later(timeout_s: float) -> Any:
            may_come_back.wait(PATIENCE_S)
            return ask(timeout_s)

        other.membership._ask_to_join = ask_later  # type: ignore[attr-defined]  # as above
        service.start()
        ben.resume()
        newcomer = Peer(service.discovery, "carl", role="other")
        until(lambda: newcomer.sees.get("ben") == before.address, "ben to be back")
        Peer(service.discovery, "dora", role="other")
        until(lambda: "dora" in watcher.sees, "anna to hear what the service lists")
        may_come_back.set()
        until(lambda: newcomer.sees.get("ben") == "elsewhere", "the other to be back")
        until(lambda: watcher.sees.get("ben") == "elsewhere", "anna to hear of it")
        told = [roster["ben"].incarnation for roster in watcher.rosters if "ben" in roster]
        assert told == sorted(told)
        assert told[-1] == other.membership.member.incarnation
        assert not other.lost
        assert not watcher.lost
        with pytest.raises(MembershipLost, match="taken for dead"):
            ben.do(answer, 1)


# --- nobody ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["127.0.0.1:1", "redis://127.0.0.1:1"])
def test_nobody_there(target: str) -> None:
    """A discovery that does not answer is named in the error."""
    discovery: Discovery
    discovery = (
        RedisDiscovery(target) if target.startswith("redis") else CoordinatorDiscovery(target)
    )
    with pytest.raises(DiscoveryUnavailable, match=r"127\.0\.0\.1:1\b"):
        Peer(discovery, "anna", timeout_s=0.3)
