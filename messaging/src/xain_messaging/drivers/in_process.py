"""Peers in one process, for tests and simulations: frames go from queue to queue."""

import itertools
import threading
from dataclasses import dataclass, field

from xain_messaging.codec import Frames
from xain_messaging.drivers.event_queue import EventQueue
from xain_messaging.errors import Closed, UnknownPeer
from xain_messaging.ports import Arrived, DriverEvent, Lost
from xain_messaging.waits import LONGEST_S


@dataclass
class Switchboard:
    """Where the drivers of one process find each other."""

    _drivers: "dict[str, InProcessDriver]" = field(default_factory=dict)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, driver: "InProcessDriver") -> str:
        """Returns its address."""
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

    def __init__(self, switchboard: Switchboard) -> None:
        self._switchboard = switchboard
        self._events: EventQueue[DriverEvent] = EventQueue()
        self._addresses: dict[str, str] = {}
        self._is_closed = False
        self._address = switchboard.add(self)

    @property
    def address(self) -> str:
        return self._address

    def connect(self, peer: str, address: str) -> None:
        self._check_open()
        self._addresses[peer] = address

    def disconnect(self, peer: str) -> None:
        self._addresses.pop(peer, None)

    def check(self, peer: str, frames: Frames) -> None:
        pass  # memory is all that it takes

    def send(self, peer: str, frames: Frames) -> None:
        self._check_open()
        try:
            other = self._switchboard.find(self._addresses[peer])
        except KeyError:
            raise UnknownPeer(f"{peer!r} is not connected") from None
        if other is not None:
            # As if over a wire: nothing is shared, and what comes can be written to.
            other._events.put(Arrived([bytearray(frame) for frame in frames]))

    def receive(self, timeout_s: float | None) -> DriverEvent | None:
        return self._events.get(None if timeout_s is None else min(timeout_s, LONGEST_S))

    def wake(self) -> None:
        self._events.wake()

    def break_connection(self, peer: str) -> None:
        """For tests: what a broken line does."""
        self._events.put(Lost(peer))

    def close(self, linger_s: float) -> None:
        self._is_closed = True
        self._switchboard.remove(self._address)
        self._events.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the driver has been closed")
