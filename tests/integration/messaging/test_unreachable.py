"""Peers that cannot be connected to or sent to, and a system that has no room for it."""

import errno

from support.lossy import LossyDriver, tags
from support.messaging import PATIENCE_S, until
from support.waiting import beside
from xain_membership.in_process import InProcessDiscovery
from xain_messaging.drivers.in_process import InProcessDriver, Switchboard
from xain_messaging.drivers.zeromq import ZmqDriver
from xain_messaging.format.codec import Frames
from xain_messaging.format.messages import Message
from xain_messaging.proxy import Proxy


def test_unreachable_peer_does_not_keep_others_away():
    """Messages to a peer with another driver's address are kept; others are connected."""
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
        for to in ("odd", "b"):
            a.isend(Message("x", "a", to))
        assert tags(b, 1) == ["x"]
        assert a.endpoint._links["odd"].num_kept == 1


class Full(LossyDriver):
    """The system has no room for another connection or thread, for the next so many attempts."""

    num_refused = 0
    num_unsent = 0

    def send(self, peer: str, frames: Frames) -> None:
        if self.num_unsent:
            self.num_unsent -= 1
            raise RuntimeError("can't start new thread")
        super().send(peer, frames)

    def connect(self, peer: str, address: str) -> None:
        if self.num_refused:
            self.num_refused -= 1
            raise OSError(errno.EMFILE, "too many open files")
        super().connect(peer, address)


def test_failed_connection_is_tried_again():
    """A waiting thread tries again, though no peer comes or goes; the kept messages go out then."""
    discovery, switchboard = InProcessDiscovery(), Switchboard()
    full = Full(switchboard)
    options = {"discovery": discovery, "timeout_s": PATIENCE_S}
    with Proxy("g", "peer", name="a", driver=full, **options) as a, beside(a.receive_once):
        until(lambda: bool(a.endpoint._waiters), "it to wait")
        full.num_refused = 3
        driver = InProcessDriver(switchboard)
        with Proxy("g", "peer", name="b", driver=driver, **options) as b:
            a.isend(Message("kept", "a", "b"))
            assert tags(b, 1) == ["kept"]
            assert full.num_refused == 0
            b.isend(Message("end", "b", "a"))


def test_message_that_could_not_be_sent_goes_out_later():
    """The message is kept, so that its sender need not know, and all that follow stay behind it."""
    discovery, switchboard = InProcessDiscovery(), Switchboard()
    full = Full(switchboard)
    options = {"discovery": discovery, "timeout_s": PATIENCE_S}
    with (
        Proxy("g", "peer", name="a", driver=full, **options) as a,
        Proxy("g", "peer", name="b", driver=InProcessDriver(switchboard), **options) as b,
    ):
        a.isend(Message("0", "a", "b"))
        full.num_unsent = 3
        for tag in "12":
            a.isend(Message(tag, "a", "b"))
        found = []

        def all_has_come() -> bool:
            a.receive_by_id("none", 0.02)
            found.extend(message.tag for message in b.receive(0.02))
            return len(found) >= 3

        until(all_has_come, "all")
        assert found == ["0", "1", "2"]
        assert full.num_unsent == 0
        a.isend(Message("3", "a", "b"))
        assert tags(b, 1) == ["3"]
