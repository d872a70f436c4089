"""How much waits in a gRPC driver until it is received."""

import itertools
import threading
from functools import partial

import pytest

from support.drivers import closing_all, flood, has_waiting, received
from support.messaging import PATIENCE_S, until
from xain_messaging.codec import MAX_FRAMES
from xain_messaging.drivers.grpc_framing import to_chunks
from xain_messaging.drivers.grpc_streams import FRAME_BYTES, GrpcDriver
from xain_messaging.links import TOLERANCE, Bounds


@pytest.mark.parametrize(
    ("bounds", "most"),
    [
        (Bounds(max_messages=2), 2 * TOLERANCE),
        (Bounds(max_bytes=5 * (1000 + FRAME_BYTES)), 5 * TOLERANCE),
        (Bounds(max_messages_in_all=3), 3 * TOLERANCE),
        (Bounds(max_bytes_in_all=2 * (1000 + FRAME_BYTES)), 2 * TOLERANCE),
        (Bounds(max_bytes=1), 1),
        (Bounds(max_bytes_in_all=1), 1),
    ],
)
def test_who_sends_too_much_over_grpc_waits(bounds: Bounds, most: int) -> None:
    """No more waits here than may, and one that is larger than that alone; all of it comes, and
    nobody is hung up on."""
    there = GrpcDriver(bounds=bounds)
    with closing_all(there):
        packets = [b"".join(to_chunks([b"%d" % i + bytes(998 + (i < 10))])) for i in range(50)]
        future = flood(there, packets)
        for i in range(50):
            if i + most <= 50:
                until(lambda: there._waiting.num_packets == most, "as much as may wait")
            assert there._waiting.num_packets <= most
            assert received(there)[0].rstrip(b"\0") == b"%d" % i
        assert future.result(PATIENCE_S) == b""
        assert (there._waiting.num_bytes, there.num_refused) == (0, 0)


def test_empty_frames_count() -> None:
    """Each takes some hundred bytes where it waits."""
    there = GrpcDriver(bounds=Bounds(max_bytes=1 << 20))
    with closing_all(there):
        packet = b"".join(to_chunks([b""] * MAX_FRAMES))
        flood(there, [packet] * 5)
        until(lambda: there._waiting.num_packets == 2, "two")
        for _ in range(5):
            with there._lock:  # what comes is counted in two steps
                num_packets, size_bytes = there._waiting.num_packets, there._waiting.num_bytes
            assert size_bytes == num_packets * (2 << 20)
            assert num_packets <= 2
            assert received(there) == [b""] * MAX_FRAMES


def test_a_large_message_has_its_turn() -> None:
    """Among small ones of others, which do not overtake it without end."""
    there = GrpcDriver(bounds=Bounds(max_bytes_in_all=4000))
    with closing_all(there):
        small, large = [b"".join(to_chunks([bytes(size)])) for size in (1000, 20_000)]
        stop = threading.Event()
        flood(there, itertools.takewhile(lambda _: not stop.is_set(), itertools.repeat(small)))
        assert received(there) == [bytes(1000)]
        flood(there, [large])
        until(lambda: received(there) == [bytes(20_000)], "the large one")
        stop.set()
        while there.receive(0.2) is not None:
            pass


def test_a_stream_that_breaks_while_it_waits_leaves_nothing() -> None:
    """Its peer sends all of it again; what waited for room would stay for as long as nobody
    receives, and more with each attempt."""
    there = GrpcDriver(bounds=Bounds(max_messages=1))
    with closing_all(there):
        packet = b"".join(to_chunks([b"x"]))
        for number in (TOLERANCE, 2 * TOLERANCE, 3 * TOLERANCE):
            future = flood(there, itertools.repeat(packet))
            until(partial(has_waiting, there, number), "as much as may wait")
            future.cancel()
        until(lambda: not any(t.name == "messages" for t in threading.enumerate()), "the threads")
        assert has_waiting(there, 3 * TOLERANCE)
