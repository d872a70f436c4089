"""Connections to peers that come later, go, or send what is no packet."""

import queue
import time
import weakref

import grpc
import numpy as np
import pytest

from support.drivers import Arrived, Lost, Receiving, closing_all, next_event, received
from support.fault_proxy import FaultProxy
from support.messaging import PATIENCE_S, until
from xain_messaging.drivers.grpc_framing import CHUNK_BYTES, to_chunks
from xain_messaging.drivers.grpc_streams import METHOD, GrpcDriver


def test_a_peer_may_come_later(make_networked):
    """A packet that is sent before the peer listens arrives later, or its sender is told that it
    was lost; then the packets of a resend arrive."""
    here, there = make_networked(), make_networked()
    host, _, port = there.address.rpartition(":")
    with FaultProxy(int(port)) as proxy:
        proxy.refuse()
        here.connect("there", f"{host}:{proxy.port}")
        here.send("there", [b"1"])
        num_sent = 1
        give_up_at = time.monotonic() + PATIENCE_S
        event = here.receive(0.2)
        proxy.heal()
        while (arrived := there.receive(0.05)) is None:
            assert time.monotonic() < give_up_at, "neither has it come nor is it said to be lost"
            if event == Lost("there"):
                num_sent += 1
                here.send("there", [b"%d" % num_sent])
            event = here.receive(0.05)
        assert isinstance(arrived, Arrived)
        assert 1 <= int(bytes(arrived.frames[0])) <= num_sent


def test_a_broken_connection_is_told_and_made_again():
    """When the peer dies its senders over gRPC hear of it; what they send from then on reaches
    whoever comes to the same address."""
    here, there, other = (Receiving(GrpcDriver()) for _ in range(3))
    with closing_all(here, there, other):
        here.connect("there", there.address)
        here.send("there", [b"1"])
        assert received(there) == [b"1"]
        there.close(0.0)
        assert next_event(here) == Lost("there")
        here.send("there", [b"2"])  # waits, or is lost with a word: either is right
        here.connect("there", other.address)
        here.send("there", [b"3"])
        until(lambda: received(other) == [b"3"], "the third")


def test_a_large_message_is_let_go(make_networked):
    """When the peer has it, its sender's memory is free; and when that has dropped it, its own:
    though nothing follows on the connection."""
    here, there = make_networked(), make_networked()
    here.connect("there", there.address)
    array = np.zeros(3 << 20, np.uint8)
    sent = weakref.ref(array)
    here.send("there", [b"head", b"envelope", array.data])
    del array
    event = next_event(there)
    assert isinstance(event, Arrived)
    assert isinstance(event.frames[2], memoryview)
    came = weakref.ref(event.frames[2])
    until(lambda: sent() is None, "the sender to let it go")
    del event
    until(lambda: came() is None, "the receiver to let it go")


def test_a_stream_that_carries_no_packets_is_ended():
    """The sender hears why; packets before it are received, and the other peers are served."""
    there, friend = Receiving(GrpcDriver()), Receiving(GrpcDriver())
    there.driver.max_message_bytes = 1000
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


def test_packets_that_are_put_together_have_a_bound():
    """A stream with one more is not read until there is room; small packets come meanwhile."""
    first, second = ([name, bytes(2 * CHUNK_BYTES)] for name in (b"first", b"second"))
    there = Receiving(GrpcDriver())
    there._small.max_bytes = 3 * CHUNK_BYTES
    with closing_all(there), grpc.insecure_channel(there.address) as channel:
        deliver = channel.stream_unary(METHOD)
        chunks = queue.SimpleQueue()
        parts = to_chunks(first)
        chunks.put(next(parts))
        calls = [deliver.future(iter(chunks.get, None))]
        until(lambda: there._small.coming_bytes > 2 * CHUNK_BYTES, "the first")
        calls.append(deliver.future(to_chunks(second)))
        until(lambda: len(there._small._has_changed._waiters) == 1, "the second to wait")
        deliver(to_chunks([b"small"]), timeout=PATIENCE_S)
        assert received(there) == [b"small"]
        for part in [*parts, None]:
            chunks.put(part)
        assert [received(there), received(there)] == [first, second]
        for call in calls:
            call.result(PATIENCE_S)
        assert there._small.coming_bytes == 0


def test_stalled_large_packet_holds_up_no_small_one():
    """A stream announces more than all the memory for large packets, and brings no more of it;
    another large packet waits, and packets of other peers below small_bytes come."""
    small, large = [bytes(2 * CHUNK_BYTES)], [bytes(4 * CHUNK_BYTES)]
    there, friend = Receiving(GrpcDriver()), Receiving(GrpcDriver())
    there.driver.small_bytes = there._large.max_bytes = 3 * CHUNK_BYTES
    with closing_all(there, friend), grpc.insecure_channel(there.address) as channel:
        deliver = channel.stream_unary(METHOD)
        chunks = queue.SimpleQueue()
        parts = to_chunks(large)
        chunks.put(next(parts)[:1000])
        stalled = deliver.future(iter(chunks.get, None))
        until(lambda: there._large.coming_bytes > 0, "the stalled one")
        waiting = deliver.future(to_chunks(large))
        until(lambda: len(there._large._has_changed._waiters) == 1, "another large one to wait")
        friend.connect("there", there.address)
        friend.send("there", small)
        assert received(there) == small
        assert not waiting.done()
        chunks.put(None)  # ends within its packet
        assert received(there) == large
        waiting.result(PATIENCE_S)
        assert stalled.exception(PATIENCE_S).code() is grpc.StatusCode.INVALID_ARGUMENT
        assert there._large.coming_bytes == there._small.coming_bytes == 0
