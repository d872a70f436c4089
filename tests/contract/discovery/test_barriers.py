"""Barriers of the members of a group."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from support.discovery import MemberCalls, Peer
from support.messaging import PATIENCE_S, discovery_of, until
from xain_messaging.discovery.redis import RedisDiscovery, RedisMembership
from xain_messaging.discovery.registry import MAX_BARRIERS
from xain_messaging.discovery.server import MembershipServer
from xain_messaging.errors import Closed, DiscoveryUnavailable, MessagingError, TimedOut
from xain_messaging.ports import Discovery
from xain_wire.messaging import membership_pb2 as pb


def test_a_barrier_opens_when_all_are_there(discovery: Discovery) -> None:
    """No member goes on before the last has come, and the barrier can be used again."""
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


def test_a_barrier_waits_without_end(
    discovery: Discovery, arrivals: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait lasts as long as the barrier is closed, which may be longer than any one wait."""
    monkeypatch.setattr("xain_messaging.waits.LONGEST_S", 0.2)
    anna, ben = Peer(discovery, "anna"), Peer(discovery, "ben")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(anna.membership.barrier, "epoch", 2, math.inf)
        until(lambda: ("anna", 1) in arrivals or waiting.done(), "anna to have come")
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        ben.membership.barrier("epoch", 2, math.inf)
        waiting.result(PATIENCE_S)


def test_cancelled_wait_is_not_counted_at_a_barrier(discovery: Discovery) -> None:
    """Two who wait one after the other do not open it."""
    first, second = Peer(discovery, "anna"), Peer(discovery, "ben")
    for peer in (first, second):
        with pytest.raises(TimedOut):
            peer.membership.barrier("epoch", 2, 0.2)
    first.leave()
    second.leave()


def test_member_that_has_left_is_at_no_barrier(discovery: Discovery) -> None:
    """A member that has left waits no more and is not counted; nor is another process under its
    name that came for something else."""
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


def test_a_newer_call_at_a_barrier_ends_the_older(
    discovery: Discovery, arrivals: list[tuple[str, int]]
) -> None:
    """A member waits there once, and is counted as long as the newer call waits."""
    anna, ben = Peer(discovery, "anna"), Peer(discovery, "ben")
    with ThreadPoolExecutor() as pool:
        older = pool.submit(anna.membership.barrier, "epoch", 2, 2 * PATIENCE_S)
        until(lambda: len(arrivals) > 0, "the older to have come")
        newer = pool.submit(anna.membership.barrier, "epoch", 2, 2 * PATIENCE_S)
        error = older.exception(PATIENCE_S)
        assert isinstance(error, MessagingError)
        assert "a newer call waits at the barrier 'epoch'" in str(error)
        # A Redis may not have written the first change; the second is of a call that is there.
        seen = 1 if isinstance(discovery, RedisDiscovery) else 0
        until(lambda: arrivals.count(("anna", 2)) > seen, "the newer to have come")
        ben.membership.barrier("epoch", 2, PATIENCE_S)
        newer.result(PATIENCE_S)
    anna.leave()
    ben.leave()


class Broken(grpc.RpcError):
    """The error of a call whose connection breaks."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "the line has broken"


def lose_the_first_answer(membership: Any) -> list[str]:
    """Lose the answer that a barrier has opened. Returns what has been lost so far."""
    lost: list[str] = []
    if isinstance(membership, RedisMembership):
        decide = membership._decide

        def note(change: Any, *timeout_s: float) -> Any:
            answer = decide(change, *timeout_s)
            if change.__name__ == "arrive" and answer and not lost:
                lost.append("redis")
                raise DiscoveryUnavailable("the connection has broken")
            return answer

        membership._decide = note  # type: ignore[method-assign]  # of this one alone
    else:
        pass_on = membership._channel._now.stub.Barrier

        def barrier(request: pb.BarrierRequest, **options: Any) -> pb.BarrierResponse:
            response: pb.BarrierResponse = pass_on(request, **options)
            if not lost:
                lost.append("coordinator")
                raise Broken
            return response

        membership._channel._now.stub.Barrier = barrier
    return lost


@pytest.mark.parametrize("kind", ["coordinator", "redis"])
def test_a_call_whose_answer_is_lost_does_not_wait_for_the_next_opening(kind: str) -> None:
    """The call is not counted there either."""
    with discovery_of(kind) as discovery:
        anna, ben = Peer(discovery, "anna"), Peer(discovery, "ben")
        lost = lose_the_first_answer(anna.membership)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(anna.membership.barrier, "epoch", 2, 2 * PATIENCE_S)
            ben.membership.barrier("epoch", 2, PATIENCE_S)
            waiting.result(PATIENCE_S)
        assert lost == [kind]
        with pytest.raises(TimedOut):
            ben.membership.barrier("epoch", 2, 0.5)
        anna.leave()
        ben.leave()


@pytest.mark.parametrize(("name", "number"), [("", 1), ("a/b", 1), ("epoch", 0), ("epoch", -1)])
def test_barrier_needs_a_name_and_a_number_of_members(
    discovery: Discovery, name: str, number: int
) -> None:
    """All else is the caller's mistake."""
    peer = Peer(discovery, "anna")
    with pytest.raises(ValueError, match="barrier"):
        peer.membership.barrier(name, number, PATIENCE_S)
    peer.leave()


def test_the_end_of_an_older_call_at_a_barrier_leaves_the_newer_there(
    arrivals: list[tuple[str, int]],
) -> None:
    """The line of the older was dead, which is noticed when the newer waits already."""
    with (
        MembershipServer(settle_s=0.0) as server,
        MemberCalls(server.target, "anna").join() as anna,
        MemberCalls(server.target, "ben").join() as ben,
    ):
        older = anna.barrier("epoch", 2)
        until(lambda: len(arrivals) >= 1, "the older")
        newer = anna.barrier("epoch", 2)
        until(lambda: len(arrivals) >= 2, "the newer")
        older.cancel()
        # A call of anna's that is answered after the service has heard of that.
        anna.stub.Renew(pb.RenewRequest(**anna.who), timeout=PATIENCE_S)
        ben.barrier("epoch", 2).result()
        newer.result()


def test_barriers_of_a_member_are_bounded(arrivals: list[tuple[str, int]]) -> None:
    """Each takes up a call of the service; there is room again when one is over."""
    with (
        MembershipServer(settle_s=0.0) as server,
        MemberCalls(server.target, "anna").join() as anna,
        MemberCalls(server.target, "ben").join() as ben,
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
    with (
        MembershipServer(settle_s=0.0) as server,
        MemberCalls(server.target, "anna").join() as anna,
    ):

        def says_so() -> bool:
            call = anna.barrier("epoch", 2, timeout_s=1.0)
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return "'epoch' has not opened" in call.details()

        until(says_so, "an answer that is faster than a tenth of a second")
