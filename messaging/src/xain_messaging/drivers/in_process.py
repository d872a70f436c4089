"""Peers in one process, for tests and simulations: packets go from queue to queue."""

import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from xain_foundation.waits import LONGEST_S
from xain_membership.errors import Closed
from xain_messaging.errors import PeersMissing
from xain_messaging.format.codec import Frames
from xain_messaging.ports import OnPacket, ignore


@dataclass
class Switchboard:
    """Where the drivers of one process find each other."""

    _drivers: "dict[str, InProcessDriver]" = field(default_factory=dict)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, driver: "InProcessDriver") -> str:
        """Add a driver. Returns the address by which others find it."""
        with self._lock:
            address = f"in-process:{next(self._numbers)}"
            self._drivers[address] = driver
            return address

    def remove(self, address: str) -> None:
        with self._lock:
            self._drivers.pop(address, None)

    def find(self, address: str) -> "InProcessDriver | None":
        return self._drivers.get(address)


class InProcessDriver:
    """See ports.Driver."""

    is_polled = True

    def __init__(self, switchboard: Switchboard) -> None:
        self._switchboard = switchboard
        # Packets, and names of peers whose connections have broken; None wakes.
        self._events: queue.SimpleQueue[Frames | str | None] = queue.SimpleQueue()
        self._addresses: dict[str, str] = {}
        self._is_closed = False
        self._on_packet: OnPacket = ignore
        self._on_lost: Callable[[str], None] = lambda peer: None
        self._address = switchboard.add(self)

    @property
    def address(self) -> str:
        return self._address

    def connect(self, peer: str, address: str) -> None:
        self._check_open()
        self._addresses[peer] = address

    def disconnect(self, peer: str) -> None:
        self._addresses.pop(peer, None)

    def send(self, peer: str, frames: Frames) -> None:
        self._check_open()
        try:
            other = self._switchboard.find(self._addresses[peer])
        except KeyError:
            raise PeersMissing(f"{peer!r} is not connected", [peer]) from None
        if other is not None:
            # As if over a wire: nothing is shared, and what comes can be written to.
            other._events.put([bytearray(frame) for frame in frames])

    def serve(self, on_packet: OnPacket, on_lost: Callable[[str], None]) -> None:
        self._on_packet, self._on_lost = on_packet, on_lost

    def run(self, timeout_s: float) -> None:
        """Wait for a packet or a lost connection, and report all that have come."""
        try:
            event = None
            if not self._is_closed:
                event = self._events.get(timeout=min(timeout_s, LONGEST_S))
            while event is not None and not self._is_closed:
                if isinstance(event, str):
                    self._on_lost(event)
                else:
                    self._on_packet(event)
                event = self._events.get_nowait()
        except queue.Empty:
            pass

    def wake(self) -> None:
        self._events.put(None)

    def break_connection(self, peer: str) -> None:
        """Report a broken connection, for tests."""
        self._events.put(peer)

    def close(self, linger_s: float) -> None:
        self._is_closed = True
        self._switchboard.remove(self._address)
        self._events.put(None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the driver has been closed")
