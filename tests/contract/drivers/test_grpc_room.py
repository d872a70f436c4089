"""How much waits in a gRPC driver until it is received."""

import itertools
import math
import threading
from functools import partial
from typing import Any

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


def test_close_waits_for_room_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the receiver takes longer than any one wait."""
    monkeypatch.setattr("xain_messaging.waits.LONGEST_S", 0.01)
    here, there = GrpcDriver(), GrpcDriver(bounds=Bounds(max_messages=1))
    with closing_all(here, there):
        here.connect("there", there.address)
        for i in range(3 * TOLERANCE):
            here.send("there", [b"%d" % i])
        until(partial(has_waiting, there, TOLERANCE), "as much as may wait")
        closing = threading.Thread(target=here.close, args=(math.inf,), daemon=True)
        closing.start()
        closing.join(0.1)
        for i in range(3 * TOLERANCE):
            assert received(there) == [b"%d" % i]
        closing.join(PATIENCE_S)
        assert not closing.is_alive()


class Interrupting:
    """A lock of a driver, or its queue: whoever has it, or has taken something out of it, is
    interrupted as often as `times` says."""

    def __init__(self, what: Any) -> None:
        self._what = what
        self.times = 0

    def _interrupt(self) -> None:
        if self.times and threading.current_thread() is threading.main_thread():
            self.times -= 1
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self._interrupt()
        self._what.__enter__()

    def __exit__(self, *given: Any) -> None:
        self._what.__exit__(*given)

    def get(self, timeout_s: float | None) -> Any:
        self._what.get(timeout_s)
        self._interrupt()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._what, name)


@pytest.mark.parametrize("where", ["_lock", "_events"])
@pytest.mark.parametrize("max_messages", [1, 1000])
def test_an_interrupt_takes_no_room(where: str, max_messages: int) -> None:
    """It comes when a packet is out of the queue. That one is lost; those after it come, also where
    they have been waiting for room."""
    bounds = Bounds(max_messages=max_messages, max_messages_in_all=1)
    here, there = GrpcDriver(), GrpcDriver(bounds=bounds)
    with closing_all(here, there):
        here.connect("there", there.address)
        interrupting = Interrupting(getattr(there, where))
        for _ in range(3):
            for i in range(2 * TOLERANCE):
                here.send("there", [b"%d" % i])
            until(partial(has_waiting, there, TOLERANCE), "as much as may wait")
            setattr(there, where, interrupting)
            for _ in range(TOLERANCE):
                interrupting.times = 1
                with pytest.raises(KeyboardInterrupt):
                    there.receive(PATIENCE_S)
            setattr(there, where, interrupting._what)
            for i in range(TOLERANCE, 2 * TOLERANCE):
                assert received(there) == [b"%d" % i]
        assert has_waiting(there, 0)
