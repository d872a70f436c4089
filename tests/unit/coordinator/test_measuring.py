"""Measuring an upload gives the same answer however its bytes are cut into pieces."""

import io
import struct
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from xain_coordinator.core.vocabulary.errors import InvalidUpdate
from xain_coordinator.core.vocabulary.values import StoredWeights, WeightsRef
from xain_coordinator.stores.memory import MemoryReader, MemoryStore
from xain_coordinator.stores.reading import CHUNK_BYTES, READ_BYTES
from xain_coordinator.updates.measuring import Inspector, measure

KEY = "3/a"


def npy(array: NDArray[Any], version: tuple[int, int] = (1, 0)) -> bytes:
    buffer = io.BytesIO()
    npy_format.write_array(buffer, array, version=version, allow_pickle=False)
    return buffer.getvalue()


def with_header(text: str, data: bytes = b"") -> bytes:
    """An .npy file of version 1.0 with any header."""
    header = text.encode("latin-1").ljust(117) + b"\n"
    return npy_format.MAGIC_PREFIX + b"\x01\x00" + struct.pack("<H", len(header)) + header + data


def inspect(pieces: Iterable[bytes]) -> StoredWeights:
    inspector = Inspector()
    for piece in pieces:
        inspector.feed(piece)
    return inspector.result(KEY)


def refusal(data: bytes) -> str:
    """Why it is refused: the same whether it comes at once or byte by byte."""
    with pytest.raises(InvalidUpdate) as whole:
        inspect([data])
    with pytest.raises(InvalidUpdate) as cut:
        inspect(data[i : i + 1] for i in range(len(data)))
    assert str(cut.value) == str(whole.value)
    return str(whole.value)


def expected(array: NDArray[Any], data: bytes) -> StoredWeights:
    finite = np.isfinite(array)
    ref = WeightsRef(KEY, len(data), xxhash.xxh3_128(data).hexdigest())
    first_bad = None if finite.all() else int(np.flatnonzero(~finite)[0])
    return StoredWeights(ref, array.dtype.name, array.shape, first_bad)


vectors = st.sampled_from(["<f2", "<f4", "<f8"]).flatmap(
    lambda dtype: arrays(np.dtype(dtype), st.integers(0, 40))
)


@given(vectors, st.lists(st.integers(0, 600)))
def test_pieces_do_not_matter(vector, cuts):
    """Header, elements and digest come out the same wherever the stream was cut."""
    data = npy(vector)
    at = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:stop] for start, stop in pairwise(at)]
    assert inspect(pieces) == expected(vector, data)


def test_the_index_of_a_nan_counts_over_chunks():
    """The first one is named, by its place in the vector and not in its chunk."""
    vector = np.zeros(READ_BYTES // 2, np.float32)  # two chunks and a header
    vector[[READ_BYTES // 4 + 7, -1]] = np.nan, np.inf
    store = MemoryStore()
    upload = store.upload(KEY)
    upload.write(npy(vector))
    upload.commit(overwrite=False)
    assert measure(store, KEY).first_bad == READ_BYTES // 4 + 7


@pytest.mark.parametrize(("num_parallel", "read_bytes"), [(1, CHUNK_BYTES), (8, READ_BYTES)])
def test_a_store_on_this_machine_is_read_in_small_pieces(num_parallel, read_bytes, monkeypatch):
    """There may be many updates that are read; only a store far away is faster with large ones."""
    store = MemoryStore()
    store.put({KEY: npy(np.zeros(READ_BYTES // 2, np.float32))})
    monkeypatch.setattr(store, "num_parallel", num_parallel, raising=False)
    read_into = MemoryReader.read_into
    sizes = set()

    def noted(self, offset, buffer):
        sizes.add(len(buffer))
        return read_into(self, offset, buffer)

    monkeypatch.setattr(MemoryReader, "read_into", noted)
    measure(store, KEY)
    assert sizes == {read_bytes}


def test_a_nan_whose_bytes_lie_in_two_pieces():
    """The halves of an element are put together."""
    data = npy(np.array([1, np.nan, 2, np.nan], np.float64))
    assert inspect([data[:-21], data[-21:]]).first_bad == 1


THREE = npy(np.ones(3, np.float32))


def of_shape(shape: str) -> bytes:
    """A header of any shape, and 8 bytes."""
    return with_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}", bytes(8))


# Uploads that are no vector of floats, and what is told of each.
REFUSED = {
    **{
        dtype: (npy(np.arange(3, dtype=dtype)), f"they are '{dtype}'; save them as '<{dtype[1:]}'")
        for dtype in (">f2", ">f4", ">f8")
    },
    **{
        dtype: (npy(np.zeros(3, dtype)), "must be floats") for dtype in ("<i4", "<c8", "|b1", "|i1")
    },
    "fortran": (npy(np.asfortranarray(np.ones((2, 3), np.float32))), "Fortran order"),
    "version 2": (npy(np.ones(3, np.float32), (2, 0)), "version 2.0"),
    **{f"cut at {length}": (THREE[:length], f"{length} bytes") for length in (0, 5, 9, 60, 127)},
    **{
        f"{num} short": (THREE[:-num], f"has {140 - num} bytes, its header promises 140")
        for num in (1, 5, 12)
    },
    **{
        f"{num} more": (THREE + bytes(num), f"has {140 + num} bytes, its header promises 140")
        for num in (1, 4)
    },
    # A product of these does not wrap around to 0, and nothing is allocated for it.
    "huge": (of_shape("(9223372036854775807,)"), "its header promises"),
    "huge square": (of_shape("(4294967296, 4294967296)"), "its header promises"),
    # A number of thousands of digits would take long to read.
    "many digits": (of_shape(f"({'9' * 60},)"), "9223372036854775807 elements"),
    "two negatives": (of_shape("(-1, -2)"), "cannot be read"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_upload_that_is_no_vector_of_floats_is_refused(what):
    data, told = REFUSED[what]
    assert told in refusal(data)


def test_native_is_little_endian_here():
    """A header may say "=": the order of the machine that reads it."""
    data = with_header(
        "{'descr': '=f4', 'fortran_order': False, 'shape': (2,)}", np.zeros(2, "=f4").tobytes()
    )
    if np.little_endian:
        assert inspect([data]).dtype == "float32"
    else:
        assert "little-endian" in refusal(data)


def test_bytes_that_are_no_npy_file_are_refused_at_once():
    """From its first byte, before a header's worth has come."""
    with pytest.raises(InvalidUpdate, match=r"not an \.npy file"):
        Inspector().feed(b"P")
