"""The messages that a local update travels in."""

import numpy as np
import pytest

from xain_participant.sdk.encoded import quantise
from xain_participant.wire.upload import Upload
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.np import DeltaCodec

LARGE, SMALL = 1 << 20, 64 << 10
CHANCE = np.random.default_rng(0)
BASE = CHANCE.standard_normal(10 * DeltaCodec.tile_elements + 1000, dtype=np.float32)
VECTOR = BASE + np.float32(0.01) * CHANCE.standard_normal(len(BASE), dtype=np.float32)


@pytest.mark.parametrize("num_tiles", [None, 0, 3, 11])
@pytest.mark.parametrize("encoding", [pb.PLAIN, pb.FLOAT16])
def test_the_bytes_are_the_same_in_messages_of_any_size(encoding, num_tiles):
    """From the beginning, after the header, at a tile, and at the end. No message is larger than
    was asked for, and none but the last one is smaller."""
    vector, encoded = VECTOR, None
    if encoding != pb.PLAIN:
        vector = BASE.copy()
        encoded = quantise(VECTOR, vector)
    upload = Upload(vector, encoded)
    assert upload.encoding == encoding
    offset = 0
    if num_tiles is not None:
        offset = len(upload.start) + 4 * DeltaCodec.tile_elements * num_tiles
    offset = min(offset, upload.size_bytes)
    assert upload.can_begin_at(offset)
    large, small = (
        list(upload.chunks(offset, size, upload.part(offset))) for size in (LARGE, SMALL)
    )
    assert b"".join(large) == b"".join(small)
    for chunks, size in ((large, LARGE), (small, SMALL)):
        assert {len(chunk) for chunk in chunks[:-1]} <= {size}
        assert len(chunks[-1]) <= size
    assert len(small) > 1 or offset == upload.size_bytes
    if encoding == pb.PLAIN:
        assert b"".join(small) == (upload.start + upload.data)[offset:]


@pytest.mark.parametrize("encoding", [pb.PLAIN, pb.FLOAT16])
def test_parts_of_any_size_are_together_the_upload(encoding):
    """Each part of an encoded update ends with a tile, where the next one can begin."""
    vector, encoded = VECTOR, None
    if encoding != pb.PLAIN:
        vector = BASE.copy()
        encoded = quantise(VECTOR, vector)
    upload = Upload(vector, encoded)
    whole = b"".join(upload.chunks(0, LARGE, upload.part(0)))
    for most in (4096, 100_000, LARGE):
        offset, sent = 0, b""
        for _ in range(len(whole)):
            num_bytes = upload.part(offset, most)
            part = b"".join(upload.chunks(offset, 10_000, num_bytes))
            assert len(part) == num_bytes
            sent += part
            if upload.is_last(offset, num_bytes):
                break
            # What the coordinator has of the object when it has received the part.
            if encoding == pb.PLAIN:
                offset += num_bytes
            else:
                tiles, odd = divmod(len(sent) - len(upload.start), encoded.tile_bytes)
                assert odd == 0
                offset = len(upload.start) + 4 * DeltaCodec.tile_elements * tiles
            assert upload.can_begin_at(offset)
        assert sent == whole
