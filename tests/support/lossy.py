"""Peers in one process, over connections that lose what they are told to lose."""

from collections.abc import Callable

from support.messaging import PATIENCE_S, until
from xain_messaging.drivers.in_process import InProcessDriver, Switchboard
from xain_messaging.format.codec import Frames
from xain_messaging.proxy import Proxy

JoinLossy = Callable[..., tuple[Proxy, "LossyDriver"]]


class LossyDriver(InProcessDriver):
    """Loses what is sent to some, until their connections are mended."""

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


def two(lossy: JoinLossy) -> tuple[Proxy, Proxy, LossyDriver]:
    """Two peers that know each other, and the driver of the second."""
    (a, _), (b, driver) = lossy("a"), lossy("b")
    until(lambda: a.peers["peer"] == ["b"] and b.peers["peer"] == ["a"], "each other")
    return a, b, driver


def tags(proxy: Proxy, number: int) -> list[str]:
    messages = proxy.receive(PATIENCE_S)
    return [message.tag for _, message in zip(range(number), messages, strict=False)]
