"""Packets in a stream of gRPC, as they should be and as they should not."""

import struct
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xain_messaging.codec import MAX_FRAMES, Frame
from xain_messaging.drivers.grpc_framing import (
    CHUNK_BYTES,
    Malformed,
    Reader,
    to_chunks,
)

MAX_BYTES = 1000


def packets_of(chunks: list[bytes], max_packet_bytes: int = MAX_BYTES) -> list[list[bytes]]:
    reader = Reader(max_packet_bytes)
    packets = [packet for chunk in chunks if (packet := reader.feed(chunk)) is not None]
    reader.end()
    return [[bytes(frame) for frame in frames] for frames in packets]


def prelude(*sizes: int) -> bytes:
    return struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)


@given(st.lists(st.lists(st.binary(max_size=50), max_size=5)))
@settings(deadline=None)
def test_packets_come_out_as_they_went_in(packets: list[list[Frame]]) -> None:
    """Empty ones and empty frames too."""
    chunks = [chunk for packet in packets for chunk in to_chunks(packet)]
    assert packets_of(chunks) == packets


@pytest.mark.parametrize("size", [CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_large_ones_come_in_pieces(size: int) -> None:
    """None of them larger than gRPC may take, and a frame is in as many as it needs."""
    packet: list[Frame] = [b"head", bytes(size), b"", b"x" * 100]
    chunks = list(to_chunks(packet))
    assert max(map(len, chunks)) <= CHUNK_BYTES + len(prelude(*map(len, packet)))
    assert packets_of([*chunks, *to_chunks([b"next"])], 1 << 30) == [packet, [b"next"]]


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
def test_what_is_no_packet_is_malformed(chunks: list[bytes], why: str) -> None:
    with pytest.raises(Malformed, match=why):
        packets_of(chunks)


@given(st.lists(st.binary(max_size=40)))
@settings(deadline=None)
def test_any_bytes_are_packets_or_malformed(chunks: list[bytes]) -> None:
    """Nothing else comes of them."""
    with suppress(Malformed):
        packets_of(chunks)


@given(st.data())
@settings(deadline=None)
def test_packets_with_other_bytes_are_packets_or_malformed(data: st.DataObject) -> None:
    """Those that were right before some of their bytes changed."""
    chunks = [*to_chunks([b"head", b"x" * 30, b""]), *to_chunks([b"next"])]
    i = data.draw(st.integers(0, len(chunks) - 1))
    changed = bytearray(chunks[i])
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(Malformed):
        packets_of([*chunks[:i], bytes(changed), *chunks[i + 1 :]])
