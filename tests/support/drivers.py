"""What tests of drivers do with one."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import grpc

from support.messaging import PATIENCE_S
from xain_messaging.drivers.grpc_lines import METHOD
from xain_messaging.drivers.grpc_streams import GrpcDriver
from xain_messaging.ports import Arrived, Driver, DriverEvent, Lost


@contextmanager
def closing_all(*drivers: Driver) -> Iterator[None]:
    try:
        yield
    finally:
        for driver in drivers:
            driver.close(0.0)


def next_event(driver: Driver) -> DriverEvent:
    """The next; None comes of being woken."""
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at:
        event = driver.receive(0.1)
        if event is not None:
            return event
    raise AssertionError(f"nothing has come for {PATIENCE_S:g} s")


def received(driver: Driver) -> list[bytes]:
    """The frames of the next packet."""
    event = next_event(driver)
    assert isinstance(event, Arrived), event
    return [bytes(frame) for frame in event.frames]


def has_come_or_goes_again(here: Driver, there: Driver, frame: bytes) -> bool:
    if here.receive(0.0) == Lost("there"):
        here.send("there", [frame])
    event = there.receive(0.05)
    return isinstance(event, Arrived) and bytes(event.frames[0]) == frame


def flood(there: GrpcDriver, packets: Iterable[bytes]) -> "grpc.Future[bytes]":
    """From a peer that waits for no ack. The future ends when all has been read."""
    channel = grpc.insecure_channel(there.address)
    future = channel.stream_unary(METHOD).future(iter(packets), timeout=PATIENCE_S)
    future.add_done_callback(lambda _: channel.close())
    return future


def has_waiting(driver: GrpcDriver, num_packets: int) -> bool:
    return driver._waiting.num_packets == num_packets
