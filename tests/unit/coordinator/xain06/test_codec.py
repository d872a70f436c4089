"""Arrays as pickles: written for every numpy, and found in what every numpy writes."""

import pickle
import warnings
from math import prod

import numpy as np
import pytest

from unit.coordinator.xain06.recorded import VECTORS
from unit.coordinator.xain06.strict import StrictReader
from xain_coordinator.ports import Reader
from xain_coordinator.xain06.codec import find_array, pickle_around
from xain_workloads.errors import InvalidContent

PROTOCOLS = [3, 4, 5]
DTYPES = ["<f2", "<f4", "<f8"]
SIZES = [0, 1, 3, 1000, 300_001]  # from none to more than one piece of elements


def load(data: bytes) -> np.ndarray:
    found = find_array(StrictReader(data))
    return np.frombuffer(b"".join(found.pieces()), found.dtype).reshape(found.shape)


def dump(array: np.ndarray) -> bytes:
    head, tail = pickle_around(array.dtype, array.shape)
    return head + array.tobytes() + tail


def vector_of(dtype: str, size: int) -> np.ndarray:
    return (np.arange(size) % 101 - 2).astype(dtype)


def assert_same(array: np.ndarray, expected: np.ndarray) -> None:
    assert array.dtype == expected.dtype
    assert array.shape == expected.shape
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_vectors_are_found(protocol, dtype, size):
    array = vector_of(dtype, size)
    assert_same(load(pickle.dumps(array, protocol)), array)


@pytest.mark.parametrize("data", VECTORS.values(), ids=VECTORS)
def test_vectors_of_other_versions_are_found(data):
    """The versions go from Python 3.6 with numpy 1.16 to Python 3.13 with numpy 2.3."""
    assert_same(load(data), np.float32([1.5, -2, 3.14159274]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_written_pickles_are_read_by_python(dtype, size):
    """To an array that can be written to, without a warning; and found by ourselves too."""
    array = vector_of(dtype, size)
    with warnings.catch_warnings(action="error"):
        back = pickle.loads(dump(array))
    assert_same(back, array)
    assert back.flags.writeable
    assert_same(load(dump(array)), array)


def test_written_pickles_can_be_read_by_old_versions():
    """These bytes were loaded by Python 3.6 with numpy 1.16, 3.7 with 1.21, 3.8 with 1.18, 3.9 with
    1.26, 3.12 with 2.0 and 3.13 with 2.3, each of which gave this vector. A change of them needs
    that proof anew."""
    written = (
        b"\x80\x04cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
        b"(K\x01(\x8a\x08\x02\x00\x00\x00\x00\x00\x00\x00tcnumpy\ndtype\n\x8c\x02f4\x89\x88\x87R"
        b"(K\x03\x8c\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89\x8e\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00\xc0?\x00\x00\x00\xc0tb."
    )
    assert dump(np.float32([1.5, -2])) == written


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3)),
        np.zeros((2, 3), order="F"),
        np.float32([1]).reshape(()),
        np.zeros(2, ">f4"),
        np.arange(3),
        np.ones(3, bool),
        np.ones(3, complex),
        np.zeros(2, "f4,i4"),
        np.array([{}]),
        np.array(["text"]),
        np.zeros(2, "M8[s]"),
        np.float32(1),
        np.ma.zeros(2),
        [np.zeros(2)],
        None,
        (),
    ],
    ids=str,
)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_other_objects_are_refused(protocol, array):
    """A participant that hands in another object by mistake is told what is taken."""
    with pytest.raises(InvalidContent, match="hand in one flat vector of float16"):
        load(pickle.dumps(array, protocol))


@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_the_oldest_protocols_are_refused(protocol):
    """No Python 3 writes them unless it is told to."""
    with pytest.raises(InvalidContent, match="pickled as Python 3 does by default"):
        load(pickle.dumps(np.float32([1]), protocol))


class Sparse(Reader):
    """The pickle of an array of zeros too large for any memory."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.size_of_elements = 4 * prod(shape)
        self._head, self._tail = pickle_around(np.dtype("<f4"), shape)
        self.size = len(self._head) + self.size_of_elements + len(self._tail)
        self.num_read = 0

    def read(self, offset: int, length: int) -> bytes:
        end = min(offset + length, self.size)
        self.num_read += end - offset
        tail_at = self.size - len(self._tail)
        zeros = max(0, min(end, tail_at) - max(offset, len(self._head)))
        return (
            self._head[offset:end]
            + bytes(zeros)
            + self._tail[max(0, offset - tail_at) :][: max(0, end - tail_at)]
        )

    def close(self) -> None: ...


def test_elements_are_read_when_they_are_asked_for():
    """An array of a terabyte is found by reading its two ends; then come pieces."""
    reader = Sparse((2**38,))
    found = find_array(reader)
    assert (found.dtype, found.shape) == (np.dtype("<f4"), (2**38,))
    assert reader.num_read <= 3 * 4096
    piece = next(found.pieces())
    assert 0 < len(piece) <= 1 << 20
    assert not any(piece)


def test_an_object_that_becomes_shorter_is_refused():
    """A store that gives fewer bytes than it said never gives an array of another length."""
    reader = Sparse((1_000_000,))
    found = find_array(reader)
    reader.size = 2_000_000
    with pytest.raises(InvalidContent, match="ends too early"):
        list(found.pieces())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"B\x90\x01\x00\x00", b"B\x91\x01\x00\x00a"),  # one byte too many
        (b"B\x90\x01\x00\x00a", b"B\x8f\x01\x00\x00"),
    ],
)
def test_a_length_that_cannot_be_is_refused_before_the_elements_are_read(old, new):
    """No element is copied for nothing."""
    data = pickle.dumps(np.frombuffer(b"a" * 400, "<f4"), 3)
    assert old in data
    with pytest.raises(InvalidContent, match="more or fewer elements"):
        find_array(StrictReader(data.replace(old, new)))
