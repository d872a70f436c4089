"""Who has a stream to a gRPC driver, and for how long."""

import threading
import time
from collections.abc import Iterator
from functools import partial

import grpc
import numpy as np
import pytest

from support.drivers import (
    Arrived,
    Lost,
    Receiving,
    closing_all,
    has_come_or_goes_again,
    next_event,
    received,
)
from support.logs import capture_logs
from support.messaging import PATIENCE_S, until
from xain_messaging.drivers.grpc_framing import to_chunks
from xain_messaging.drivers.grpc_lines import METHOD
from xain_messaging.drivers.grpc_streams import GrpcDriver


def test_so_many_peers_are_served_at_a_time() -> None:
    """One more tries again until another has gone."""
    there = Receiving(GrpcDriver(max_peers=2))
    drivers = [Receiving(GrpcDriver()) for _ in range(3)]
    with closing_all(there, *drivers):
        for driver in drivers[:2]:
            driver.connect("there", there.address)
            driver.send("there", [b"x"])
            assert received(there) == [b"x"]
        drivers[2].connect("there", there.address)
        drivers[2].send("there", [b"third"])
        assert next_event(drivers[2]) == Lost("there")
        drivers[0].close(0.0)
        drivers[2].send("there", [b"third"])
        give_up_at = time.monotonic() + PATIENCE_S
        while (event := there.receive(0.05)) is None:
            assert time.monotonic() < give_up_at, "the third has not been let in"
            if isinstance(drivers[2].receive(0.05), Lost):
                drivers[2].send("there", [b"third"])
        assert isinstance(event, Arrived)
        assert bytes(event.frames[0]) == b"third"


def test_who_sends_nothing_takes_no_place() -> None:
    """However many peers know each other: a stream is for those who talk."""
    there = Receiving(GrpcDriver(max_peers=1))
    drivers = [Receiving(GrpcDriver()) for _ in range(3)]
    with closing_all(there, *drivers):
        for driver in drivers:
            driver.connect("there", there.address)
        drivers[2].send("there", [b"x"])
        assert received(there) == [b"x"]


def test_who_has_been_idle_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """For others; what it sends later comes, as if its line had always been there. Those that find
    no place say so, once and not at each attempt."""
    monkeypatch.setattr("xain_messaging.drivers.grpc_lines.IDLE_S", 0.5)
    # It ends by itself, however long that takes.
    monkeypatch.setattr("xain_messaging.drivers.grpc_streams.MAX_IDLE_TIMES", 1000)
    there = Receiving(GrpcDriver(max_peers=1))
    first, second = Receiving(GrpcDriver()), Receiving(GrpcDriver())
    with closing_all(there, first, second), capture_logs() as logs:
        for driver in (first, second):
            driver.connect("there", there.address)
        first.send("there", [b"1"])
        assert received(there) == [b"1"]
        second.send("there", [b"2"])
        num_lost = 0
        give_up_at = time.monotonic() + PATIENCE_S
        while (event := there.receive(0.05)) is None:
            assert time.monotonic() < give_up_at, "the second has not been let in"
            if second.receive(0.0) == Lost("there"):
                num_lost += 1
                second.send("there", [b"2"])
        assert isinstance(event, Arrived)
        assert bytes(event.frames[0]) == b"2"
        assert first.receive(0.0) is None, "to be idle is no loss"
        warned = [line for line in logs if line["event"] == "peer_has_no_room"]
        assert len(warned) == num_lost
        levels = [line["log_level"] for line in warned]
        assert levels == ["warning", *["debug"] * num_lost][:num_lost]
        assert all("max_peers" in line["why"] for line in warned)
        second.close(0.0)
        first.send("there", [b"3"])
        until(partial(has_come_or_goes_again, first, there, b"3"), "the third")


@pytest.mark.parametrize("idle_s", [0.0, 0.001, 0.01])
def test_nothing_is_lost_to_a_stream_that_ends(
    monkeypatch: pytest.MonkeyPatch, idle_s: float
) -> None:
    """Because it was idle: all that is sent just then comes, in its order, also when its sender is
    closed."""
    monkeypatch.setattr("xain_messaging.drivers.grpc_lines.IDLE_S", idle_s)
    rng = np.random.default_rng(0)
    here, there = Receiving(GrpcDriver()), Receiving(GrpcDriver())
    with closing_all(here, there):
        here.connect("there", there.address)
        for i in range(300):
            here.send("there", [b"%d" % i])
            time.sleep(rng.choice([0.0, 0.0, idle_s, 2 * idle_s]))  # so that some meet an end
        assert here.receive(0.0) is None
        here.close(PATIENCE_S)
        assert [received(there)[0] for _ in range(300)] == [b"%d" % i for i in range(300)]


def test_a_silent_stream_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its place is needed. What it brings later is lost with a word to its sender."""
    monkeypatch.setattr("xain_messaging.drivers.grpc_lines.IDLE_S", 0.2)
    there, here = Receiving(GrpcDriver(max_peers=1)), Receiving(GrpcDriver())
    with closing_all(there, here), grpc.insecure_channel(there.address) as channel:
        goes_on = threading.Event()

        def chunks() -> Iterator[bytes]:
            goes_on.wait(PATIENCE_S)
            yield from to_chunks([b"late"])

        silent = channel.stream_unary(METHOD).future(chunks())
        assert silent.code() is grpc.StatusCode.CANCELLED
        goes_on.set()
        here.connect("there", there.address)
        here.send("there", [b"x"])
        until(partial(has_come_or_goes_again, here, there, b"x"), "the one that talks")


def test_a_silent_stream_stays_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody needs its place."""
    monkeypatch.setattr("xain_messaging.drivers.grpc_lines.IDLE_S", 0.2)
    there = Receiving(GrpcDriver(max_peers=2))
    looked: list[None] = []
    end_silent = there._threads._look
    there._threads._look = lambda: (looked.append(None), end_silent())[1]
    with closing_all(there), grpc.insecure_channel(there.address) as channel:
        goes_on = threading.Event()

        def chunks() -> Iterator[bytes]:
            goes_on.wait(PATIENCE_S)
            yield from to_chunks([b"late"])

        silent = channel.stream_unary(METHOD).future(chunks())
        until(lambda: bool(there._streams), "the stream")
        until(lambda: len(looked) > 10, "some looks")
        goes_on.set()
        assert received(there) == [b"late"]
        assert silent.result(PATIENCE_S) == b""


def test_a_stream_that_is_none_of_ours_is_ended() -> None:
    """Its peer hears why; what has come before is received, and the others are served."""
    there, friend = Receiving(GrpcDriver(max_message_bytes=1000)), Receiving(GrpcDriver())
    with closing_all(there, friend), grpc.insecure_channel(there.address) as channel:
        friend.connect("there", there.address)
        friend.send("there", [b"before"])
        assert received(there) == [b"before"]
        deliver = channel.stream_unary(METHOD)
        too_large = next(to_chunks([bytes(1_000_000)]))
        for i, chunk in enumerate([b"?", too_large, b"".join(to_chunks([b"x"])) + b"y"]):
            chunks = iter([b"".join(to_chunks([b"good"])), chunk])
            with pytest.raises(grpc.RpcError) as caught:
                deliver(chunks, timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert there.num_refused == i + 1
            assert received(there) == [b"good"]
        friend.send("there", [b"after"])
        assert received(there) == [b"after"]
