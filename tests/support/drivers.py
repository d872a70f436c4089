"""Helpers for tests of drivers."""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from support.messaging import PATIENCE_S
from xain_messaging.format.codec import Frames
from xain_messaging.ports import Driver


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """A packet that a peer has sent, under the name in its certificate if there is one."""

    frames: Frames
    sender: str | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to this peer has broken."""

    peer: str


Event: TypeAlias = Arrived | Lost


class Receiving:
    """A driver whose packets and losses wait until a test asks for them."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self._events: deque[Event] = deque()
        driver.serve(self._on_packet, lambda peer: self._events.append(Lost(peer)))

    def _on_packet(self, frames: Frames, sender: str | None = None, /) -> None:
        self._events.append(Arrived(frames, sender))
        self.driver.wake()

    def receive(self, timeout_s: float | None) -> Event | None:
        """The next event; None after timeout_s, or when woken."""
        if not self._events:
            self.driver.run(math.inf if timeout_s is None else timeout_s)
        return self._events.popleft() if self._events else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)


@contextmanager
def closing_all(*drivers: Driver | Receiving) -> Iterator[None]:
    try:
        yield
    finally:
        for driver in drivers:
            driver.close(0.0)


def next_event(driver: Receiving) -> Event:
    """The next; None comes of being woken."""
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at:
        event = driver.receive(0.1)
        if event is not None:
            return event
    raise AssertionError(f"nothing has come for {PATIENCE_S:g} s")


def received(driver: Receiving) -> list[bytes]:
    """The frames of the next packet."""
    event = next_event(driver)
    assert isinstance(event, Arrived), event
    return [bytes(frame) for frame in event.frames]
