"""Connections that break, and messages that were on their way over them."""

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from support.fault_proxy import FaultProxy
from support.lossy import tags
from support.messaging import PATIENCE_S, taken, until
from xain_membership.errors import MembershipLost
from xain_membership.in_process import InProcessDiscovery
from xain_membership.ports import Member, Membership
from xain_messaging.drivers.grpc_streams import GrpcDriver
from xain_messaging.drivers.zeromq import ZmqDriver
from xain_messaging.errors import CollectiveFailed
from xain_messaging.format.messages import Message
from xain_messaging.links import Bounds
from xain_messaging.proxy import Proxy


def test_messages_lost_with_a_connection_come_over_the_next(lossy):
    """Each comes once and in order, also if the sender never waits for anything."""
    (a, driver), (b, _) = lossy("a"), lossy("b")
    a.isend(Message("1", "a", "b"))
    driver.lost.add("b")
    for tag in ("2", "3"):
        a.isend(Message(tag, "a", "b"))
    assert tags(b, 1) == ["1"]
    driver.mend("b")
    for tag in ("4", "5"):
        a.isend(Message(tag, "a", "b"))
    assert tags(b, 4) == ["2", "3", "4", "5"]
    assert b.receive_once(0.05) is None


def test_lost_messages_go_again_while_their_sender_does_something_else(lossy):
    """In order and once, though the sender does not use its proxy again."""
    (a, driver), (b, _) = lossy("a"), lossy("b")
    a.isend(Message("1", "a", "b"))
    driver.lost.add("b")
    for tag in ("2", "3"):
        a.isend(Message(tag, "a", "b"))
    driver.mend("b")
    assert tags(b, 3) == ["1", "2", "3"]
    assert b.receive_once(0.05) is None


def test_a_task_that_is_worked_at_is_not_acknowledged(lossy):
    """The worker has messages kept for others, and does not use its proxy meanwhile."""
    (a, _), (b, _), (c, driver) = lossy("a"), lossy("b"), lossy("c")
    a.isend(Message("task", "a", "c"))
    assert tags(c, 1) == ["task"]
    driver.lost.add("b")
    c.isend(Message("1", "c", "b"))
    driver.mend("b")
    assert tags(b, 1) == ["1"]  # it went again, from another thread
    assert a.receive_once(0.05) is None
    assert a.endpoint._links["c"].num_kept == 1


def test_a_lost_ack_is_sent_again(lossy):
    """The sender could send nothing any more."""
    (a, _), (b, driver) = lossy("a", Bounds(max_messages=1)), lossy("b")
    a.isend(Message("1", "a", "b"))
    driver.lost.add("a")
    assert tags(b, 1) == ["1"]
    assert b.receive_once(0.05) is None  # it has time to say so, in vain
    driver.mend("a")
    assert b.receive_once(0.05) is None
    a.isend(Message("2", "a", "b"))
    assert tags(b, 1) == ["2"]


def test_lost_ack_is_asked_for(lossy):
    """The sender was told that all has come, and could send nothing any more."""
    (a, _), (b, driver) = lossy("a", Bounds(max_messages=1)), lossy("b")
    a.endpoint.max_probe_s = 0.1
    a.isend(Message("1", "a", "b"))
    until(lambda: not a.endpoint._links["b"].has_unheard, "it to be heard")
    driver.lost.add("a")
    assert tags(b, 1) == ["1"]
    assert b.receive_once(0.05) is None
    until(lambda: not b.endpoint._links["a"].owes_ack, "the ack to be sent, in vain")
    driver.lost.discard("a")
    a.isend(Message("2", "a", "b"))
    assert tags(b, 1) == ["2"]


@dataclass
class Detoured:
    """A discovery that tells of each peer an address on whose way something may happen."""

    inner: InProcessDiscovery
    ways: list[FaultProxy]

    def join(self, group: str, role: str, name: str, address: str, **options: Any) -> Membership:
        host, _, port = address.rpartition(":")
        self.ways.append(FaultProxy(int(port)))
        return self.inner.join(group, role, name, f"{host}:{self.ways[-1].port}", **options)


@pytest.mark.parametrize("make_driver", [GrpcDriver, ZmqDriver])
def test_all_comes_once_and_in_order_however_often_connections_break(make_driver):
    """Between two processes that live, in both directions, large and small."""
    number = 1500
    with ExitStack() as stack:
        found = Detoured(InProcessDiscovery(), [])
        options = {"discovery": found, "timeout_s": 4 * PATIENCE_S}
        a, b = [
            stack.enter_context(Proxy("g", "peer", name=name, driver=make_driver(), **options))
            for name in "ab"
        ]
        for way in found.ways:
            stack.callback(way.close)
        until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")
        cuts = iter(range(number // 100, number, number // 6))
        at = next(cuts)
        got = []
        answers = []

        def send() -> None:
            for i in range(number):
                array = np.full(3000 if i % 25 else 600_000, i, np.int32)
                a.isend(Message("t", "a", "b", [i, array]))
            while len(answers) < number:
                message = taken(a)
                answers.append(message.body)

        thread = threading.Thread(target=send)
        thread.start()
        for message in b.receive(4 * PATIENCE_S):
            i, array = message.body
            assert (array == i).all()
            got.append(i)
            b.reply(message, body=i)
            if i == at:
                at = next(cuts, -1)
                for way in found.ways:
                    way.cut(reset=i % 2 == 0)
            if len(got) == number:
                break
        until(lambda: b.receive_by_id("none", 0.05) is None or not thread.is_alive(), "answers")
        thread.join(PATIENCE_S)
        assert got == answers == list(range(number))


def test_parts_for_a_former_group_hold_up_no_call(lossy):
    """One member is an operation ahead when another goes; the next group works, and what was sent
    for the old one is taken."""
    (a, _), (b, _), (c, _) = lossy("a"), lossy("b", Bounds(max_messages=8)), lossy("c")
    until(lambda: len(a.peers.get("peer", ())) == 2, "all")
    old = [proxy.group("peer") for proxy in (a, b, c)]
    c.close(0.0)
    for _ in range(3):
        with pytest.raises(CollectiveFailed) as caught:
            old[1].barrier(0.05)
        assert caught.value.missing == ("c",)
    groups = [proxy.group("peer") for proxy in (a, b)]
    assert [group.size for group in groups] == [2, 2]
    for proxy in (a, b):  # to take what has come for the old one, and to hear of it
        assert proxy.receive_once(0.1) is None
    assert b.endpoint._links["a"].num_kept == 0


def test_a_packet_for_the_former_peer_at_an_address_is_dropped(lossy):
    """An address may be used again. What is meant for its former owner is not taken for ours."""
    (a, _), (b, _) = lossy("a"), lossy("b")
    a.isend(Message("for b", "a", "b"))
    assert tags(b, 1) == ["for b"]
    until(lambda: "peer" in a.peers, "b")
    # As if the discovery had not told yet that somebody else is at the address of c.
    endpoint = a.endpoint
    there = endpoint.roster["b"]
    roster = {**endpoint.roster, "c": Member("c", "peer", 9, there.address, 99)}
    endpoint._on_change(roster)
    a.isend(Message("for c", "a", "c"))
    assert b.receive_once(0.1) is None
    a.isend(Message("for b", "a", "b"))
    assert tags(b, 1) == ["for b"]


def test_lost_membership_fails_waiting_calls(lossy):
    """Later calls fail too."""
    (a, _), (b, _) = lossy("a"), lossy("b")
    discovery = a.endpoint.membership._discovery
    begun_at = time.monotonic()
    discovery.expire("g", "a")
    for _ in range(2):
        with pytest.raises(MembershipLost):
            a.receive_once()
    assert time.monotonic() - begun_at < PATIENCE_S
    until(lambda: "peer" not in b.peers, "it to be gone")
