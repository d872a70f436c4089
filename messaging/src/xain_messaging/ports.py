"""Port of the drivers, which carry packets. One suite of tests runs on all adapters in drivers/."""

from collections.abc import Callable
from typing import Protocol

from xain_messaging.format.codec import Frames


class OnPacket(Protocol):
    """Takes the frames of a packet that a peer has sent. sender: the name that its certificate
    says; None without certificates. Raises NoIdentity for a packet in another name."""

    def __call__(self, frames: Frames, sender: str | None = None, /) -> None: ...


def ignore(frames: Frames, sender: str | None = None, /) -> None:
    """Drop a packet."""


class Driver(Protocol):
    """Carries packets of frames to named peers, in order for as long as a connection lives.

    A driver keeps every packet until it is sent or its connection is lost, and bounds nothing: its
    user does, see links.py. Its user calls one method at a time, except for run() and wake().
    """

    is_polled: bool  # packets come from run() only, whose caller may change from call to call

    @property
    def address(self) -> str:
        """Under which others connect to this driver. It listens from its construction on."""
        ...

    def serve(self, on_packet: OnPacket, on_lost: Callable[[str], None]) -> None:
        """Hand over what comes, from now on; from run(), or from threads of the driver's own.

        on_packet: called with each packet that a peer has sent. The frames are the
            receiver's own. All but the first can be written to: arrays lie in them.
        on_lost: called from run(), with the name of a peer whose connection has broken, where the
            driver hears of that: packets that were sent on it may not have arrived. Packets go over
            a new connection from then on, which the driver makes by itself, again and again, until
            disconnect().
        """
        ...

    def run(self, timeout_s: float) -> None:
        """Let packets come and go until something has come, or for timeout_s, or until woken. One
        thread at a time calls this, again and again."""
        ...

    def wake(self) -> None:
        """Let run() return now, or at its next call."""
        ...

    def connect(self, peer: str, address: str) -> None:
        """Reach `peer` at this address from now on; packets that wait for a former address are
        dropped. Returns at once, whether anybody is there or not."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer, and the packets that wait for it. An unknown peer is ignored."""
        ...

    def send(self, peer: str, frames: Frames) -> None:
        """Send a packet from the memory that it is in: no frame may change until it has arrived.
        Does not block. Raises PeersMissing for a peer that is not connected."""
        ...

    def close(self, linger_s: float) -> None:
        """Send what waits, for as long as linger_s; then end everything. run() returns at once from
        then on. May be called again."""
        ...
