"""Barriers of the members of a group."""

import math
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from support.discovery import MemberCalls, Peer
from support.messaging import PATIENCE_S, until
from xain_membership.errors import Closed, TimedOut
from xain_membership.registry import MAX_BARRIERS
from xain_membership.server import MembershipServer


def test_a_barrier_opens_when_all_are_there(discovery):
    """No member goes on before the last has come, and the barrier can be used again."""
    peers = [Peer(discovery, f"worker-{i}") for i in range(3)]
    passed = []

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


def test_a_barrier_waits_without_end(discovery, arrivals, monkeypatch):
    """The wait lasts as long as the barrier is closed, which may be longer than any one wait."""
    monkeypatch.setattr("xain_foundation.waits.LONGEST_S", 0.2)
    anna, ben = Peer(discovery, "anna"), Peer(discovery, "ben")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(anna.membership.barrier, "epoch", 2, math.inf)
        until(lambda: ("anna", 1) in arrivals or waiting.done(), "anna to have come")
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        ben.membership.barrier("epoch", 2, math.inf)
        waiting.result(PATIENCE_S)


def test_member_that_has_left_is_at_no_barrier(discovery):
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


@pytest.mark.parametrize(("name", "number"), [("", 1), ("a/b", 1), ("epoch", 0), ("epoch", -1)])
def test_barrier_needs_a_name_and_a_number_of_members(discovery, name, number):
    """All else is the caller's mistake."""
    peer = Peer(discovery, "anna")
    with pytest.raises(ValueError, match="barrier"):
        peer.membership.barrier(name, number, PATIENCE_S)
    peer.leave()


def test_barriers_of_a_member_are_bounded(arrivals):
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
