"""Packets in a stream of gRPC, as they should be and as they should not."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xain_messaging.drivers.grpc_framing import CHUNK_BYTES, packets, to_chunks
from xain_messaging.errors import MalformedMessage
from xain_messaging.format.codec import MAX_FRAMES

MAX_BYTES = 1000


class Memory:
    """Sizes that packets have reserved memory for, and those that hold it still."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.held: list[int] = []

    @contextmanager
    def reserved(self, size_bytes: int) -> Iterator[None]:
        self.asked.append(size_bytes)
        self.held.append(size_bytes)
        try:
            yield
        finally:
            self.held.remove(size_bytes)


def packets_of(chunks: list[bytes], max_packet_bytes: int = MAX_BYTES) -> list[list[bytes]]:
    memory = Memory()
    try:
        found = packets(iter(chunks), max_packet_bytes, memory.reserved)
        return [[bytes(frame) for frame in frames] for frames in found]
    finally:
        assert not memory.held


def prelude(*sizes: int) -> bytes:
    return struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)


@given(st.lists(st.lists(st.binary(max_size=50), max_size=5)))
@settings(deadline=None)
def test_packets_come_out_as_they_went_in(sent):
    """Empty ones and empty frames too."""
    assert packets_of(list(chain.from_iterable(map(to_chunks, sent)))) == sent


@pytest.mark.parametrize("size", [CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_large_ones_come_in_pieces(size):
    """No chunk is larger than gRPC may take, and a frame is in as many as it needs."""
    packet = [b"head", bytes(size), b"", b"x" * 100]
    chunks = list(to_chunks(packet))
    assert max(map(len, chunks)) <= CHUNK_BYTES + len(prelude(*map(len, packet)))
    assert packets_of([*chunks, *to_chunks([b"next"])], 1 << 30) == [packet, [b"next"]]


def test_packet_of_several_messages_holds_memory_until_it_is_handled():
    """A packet that is whole in one message reserves none, with or without arrays."""
    memory, size = Memory(), CHUNK_BYTES + 1
    sent = [[b"head"], [b"head", b"x" * 100], [bytes(size)], [b"next"]]
    chunks = chain.from_iterable(map(to_chunks, sent))
    held = [memory.held[:] for _ in packets(chunks, 1 << 30, memory.reserved)]
    assert held == [[], [], [size], []]
    assert memory.asked == [size]


def test_frames_after_the_first_can_be_written_to():
    """Each is a buffer of its own, in packets of one message and of several."""
    for size in (10, 2 << 20, 3 << 20):
        chunks = to_chunks([b"head", bytes(size), bytes(size)])
        ((_, first, second),) = packets(chunks, 1 << 30, Memory().reserved)
        memoryview(first)[:2] = b"xy"
        assert bytes(memoryview(second)[:2]) == b"\0\0"


def test_prelude_may_come_in_a_message_of_its_own():
    """The frames follow in others, whatever their sizes."""
    assert packets_of([prelude(3, 2), b"a", b"bcde"]) == [[b"abc", b"de"]]


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ([b""], "prelude"),
        ([b"\x01\0\0"], "prelude"),
        ([prelude(1, 2)[:-1]], "prelude"),
        ([struct.pack("<I", MAX_FRAMES + 1)], "frames"),
        ([prelude(MAX_BYTES + 1)], "bytes"),
        ([prelude(2**63, 2**63)], "bytes"),
        ([prelude(MAX_BYTES)], "ends within"),
        ([prelude(3), b"ab"], "ends within"),
        ([prelude(3), b"ab", b"", b"c"], "ends within"),
        ([prelude(3) + b"abcd"], "1 bytes more"),
        ([prelude(3) + b"ab", b"cd"], "1 bytes more"),
        ([prelude() + b"x"], "1 bytes more"),
    ],
)
def test_chunks_that_are_no_packet_are_malformed(chunks, why):
    with pytest.raises(MalformedMessage, match=why):
        packets_of(chunks)


@given(st.lists(st.binary(max_size=40)))
@settings(deadline=None)
def test_any_bytes_are_packets_or_malformed(chunks):
    with suppress(MalformedMessage):
        packets_of(chunks)


@given(st.data())
@settings(deadline=None)
def test_packets_with_other_bytes_are_packets_or_malformed(data):
    chunks = [*to_chunks([b"head", b"x" * 30, b""]), *to_chunks([b"next"])]
    i = data.draw(st.integers(0, len(chunks) - 1))
    changed = bytearray(chunks[i])
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(MalformedMessage):
        packets_of([*chunks[:i], bytes(changed), *chunks[i + 1 :]])
