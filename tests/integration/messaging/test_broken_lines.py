"""Lines that break, peers that cannot be reached, and memberships that are lost."""

import time
from collections.abc import Callable, Iterator

import pytest

from support.messaging import PATIENCE_S, until
from xain_messaging.codec import Frames
from xain_messaging.discovery.in_process import InProcessDiscovery
from xain_messaging.drivers.in_process import InProcessDriver, Switchboard
from xain_messaging.drivers.zeromq import ZmqDriver
from xain_messaging.errors import MembershipLost
from xain_messaging.links import Bounds
from xain_messaging.messages import Message, SessionMessage
from xain_messaging.ports import Member
from xain_messaging.proxy import Proxy


class LossyDriver(InProcessDriver):
    """Loses what is sent to some, until their lines are mended."""

    def __init__(self, switchboard: Switchboard) -> None:
        super().__init__(switchboard)
        self.lost: set[str] = set()

    def send(self, peer: str, frames: Frames) -> None:
        if peer not in self.lost:
            super().send(peer, frames)

    def mend(self, peer: str) -> None:
        """There is a new connection; who sends is told that it may have lost something."""
        self.lost.discard(peer)
        self.break_connection(peer)


@pytest.fixture
def join() -> Iterator[Callable[..., tuple[Proxy, LossyDriver]]]:
    discovery, switchboard = InProcessDiscovery(), Switchboard()
    made: list[Proxy] = []

    def join_one(name: str, bounds: Bounds | None = None) -> tuple[Proxy, LossyDriver]:
        driver = LossyDriver(switchboard)
        proxy = Proxy(
            "g",
            "peer",
            name=name,
            discovery=discovery,
            driver=driver,
            bounds=bounds,
            timeout_s=PATIENCE_S,
        )
        made.append(proxy)
        return proxy, driver

    yield join_one
    for proxy in made:
        proxy.close(0.0)


def tags(proxy: Proxy, number: int) -> list[str]:
    return [message.tag for _, message in zip(range(number), proxy.receive(), strict=False)]


def test_what_a_line_has_lost_comes_over_the_next(join) -> None:
    """Once and in order, also if the sender never waits for anything."""
    (a, line), (b, _) = join("a"), join("b")
    a.isend(Message("1", "a", "b"))
    line.lost.add("b")
    for tag in ("2", "3"):
        a.isend(Message(tag, "a", "b"))
    assert tags(b, 1) == ["1"]
    line.mend("b")
    for tag in ("4", "5"):
        a.isend(Message(tag, "a", "b"))
    assert tags(b, 4) == ["2", "3", "4", "5"]
    assert b.receive_once(0.05) is None


def test_a_lost_word_of_what_is_taken_is_said_again(join) -> None:
    """Its sender could send nothing any more."""
    (a, _), (b, line) = join("a", Bounds(max_messages=1)), join("b")
    a.isend(Message("1", "a", "b"))
    line.lost.add("a")
    assert tags(b, 1) == ["1"]
    assert b.receive_once(0.05) is None  # it has time to say so, in vain
    line.mend("a")
    assert b.receive_once(0.05) is None
    a.isend(Message("2", "a", "b"))
    assert tags(b, 1) == ["2"]


def test_a_late_answer_that_nobody_takes_holds_up_no_other(join) -> None:
    """It stays where it is, and the line goes on."""
    (a, _), (b, _) = join("a"), join("b", Bounds(max_messages=8))
    late = a.isend(SessionMessage("ask", "a", "b"))
    assert a.receive_by_id(late, 0.05).missing == ("b",)
    asked = b.receive_once()
    assert asked is not None
    b.reply(asked)
    for _ in range(20):
        session = a.isend(SessionMessage("ask", "a", "b"))
        asked = b.receive_once()
        assert asked is not None
        b.reply(asked)
        a.receive_by_id(session).complete()
    assert len(a.receive_by_id(late)) == 1


def test_parts_for_a_group_that_is_no_more_hold_up_nobody(join) -> None:
    """One member is an operation ahead when another goes; the next group works, and what was sent
    for the old one is taken."""
    (a, _), (b, _), (c, _) = join("a"), join("b", Bounds(max_messages=8)), join("c")
    until(lambda: len(a.peers.get("peer", ())) == 2, "all")
    old = [proxy.group("peer") for proxy in (a, b, c)]
    c.close(0.0)
    for _ in range(3):
        with pytest.raises(Exception, match="c"):
            old[1].barrier(0.05)
    groups = [proxy.group("peer") for proxy in (a, b)]
    assert [group.size for group in groups] == [2, 2]
    for proxy in (a, b):  # to take what has come for the old one, and to hear of it
        assert proxy.receive_once(0.1) is None
    assert b.endpoint._links["a"].num_kept == 0


def test_a_packet_for_one_who_was_here_before_is_nobodys(join) -> None:
    """An address may be used again. What is meant for its former owner is not taken for ours."""
    (a, _), (b, _) = join("a"), join("b")
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


def test_who_cannot_be_reached_keeps_nobody_else_away() -> None:
    """An address that is none for this driver: the others are connected all the same."""
    discovery = InProcessDiscovery()
    discovery.join(
        "g",
        "peer",
        "odd",
        "no address of zmq",
        timeout_s=1.0,
        on_change=lambda roster: None,
        on_lost=lambda error: None,
    )
    options = {"discovery": discovery, "timeout_s": PATIENCE_S}
    with (
        Proxy("g", "peer", name="a", driver=ZmqDriver(), **options) as a,
        Proxy("g", "peer", {"peer": 2}, name="b", driver=ZmqDriver(), **options) as b,
    ):
        a.isend(Message("x", "a", "b"))
        assert tags(b, 1) == ["x"]


def test_a_lost_membership_is_told_to_whoever_waits(join) -> None:
    """And to whoever comes after."""
    (a, _), (b, _) = join("a"), join("b")
    discovery = a.endpoint.membership._discovery
    begun_at = time.monotonic()
    discovery.expire("g", "a")
    for _ in range(2):
        with pytest.raises(MembershipLost):
            a.receive_once()
    assert time.monotonic() - begun_at < PATIENCE_S
    until(lambda: "peer" not in b.peers, "it to be gone")
