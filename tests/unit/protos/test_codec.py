"""Arrays on the wire, and what is not one."""

import ast
import io
import pickle

import numpy as np
import pytest

from xain_wire.np import NpyHeader, ndarray_to_proto, npy_header, parse_npy_header, proto_to_ndarray
from xain_wire.np.codec import MAX_HEADER_BYTES
from xain_wire.np.ndarray_pb2 import NDArray


def saved(save, *arguments, **options) -> bytes:
    buffer = io.BytesIO()
    save(buffer, *arguments, **options)
    return buffer.getvalue()


VECTOR = saved(np.save, np.float32([1, 2, 3]))


@pytest.mark.parametrize(
    "array",
    [
        np.float32([1, 2, 3]),
        np.float64(7.5).reshape(()),
        np.empty((0,), np.float32),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    ],
)
def test_arrays_come_back(array):
    """Bit for bit, with dtype and shape."""
    back = proto_to_ndarray(ndarray_to_proto(array))
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)


def test_an_unset_field_is_the_empty_vector():
    """XAIN's model before the first round."""
    assert proto_to_ndarray(NDArray()).shape == (0,)


def test_objects_are_not_encoded():
    """Object arrays would need pickle."""
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        ndarray_to_proto(np.array([object()]))


@pytest.mark.parametrize(
    "data",
    [
        saved(np.savez, a=np.float32([1])),
        saved(np.save, np.array([{}]), allow_pickle=True),
        pickle.dumps(np.float32([1])),
        VECTOR[:-1],
        VECTOR[:20],
        b"\x93NUMPY",
        b"anything",
        VECTOR[:10] + b"(" * (len(VECTOR) - 10),
    ],
    ids=["npz", "objects", "pickle", "cut", "half", "magic", "text", "header"],
)
def test_bytes_that_are_no_npy_file_are_a_value_error(data):
    """A zip of arrays and a pickle among them: never anything else than an array comes back."""
    with pytest.raises(ValueError, match="npy"):
        proto_to_ndarray(NDArray(ndarray=data))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", ["<f4", "<f8", ">i2"])
def test_headers_come_back(dtype, shape):
    """Headers are those of numpy, and tell the size of the whole file."""
    array = np.zeros(shape, dtype)
    whole = saved(np.save, array)
    header = npy_header(array.dtype, shape)
    assert whole == header + array.tobytes()
    assert parse_npy_header(whole) == NpyHeader(array.dtype, shape, len(header))
    assert parse_npy_header(whole).size_bytes == len(whole)


def test_a_header_is_read_again_when_another_thread_parses(monkeypatch):
    """See python/cpython#106905."""
    answers = [
        SystemError("AST constructor recursion depth mismatch"),
        None,
    ]

    def parse(text, parse=ast.literal_eval):
        if error := answers.pop(0):
            raise error
        return parse(text)

    monkeypatch.setattr(ast, "literal_eval", parse)
    assert parse_npy_header(saved(np.save, np.zeros((7, 11)))).shape == (7, 11)
    assert not answers


def test_a_header_may_come_in_pieces():
    """The answer is None until the header is whole; the bytes behind it do not matter."""
    size = len(npy_header(np.dtype("<f4"), (3,)))
    assert [parse_npy_header(VECTOR[:n]) for n in range(size)] == [None] * size
    assert parse_npy_header(VECTOR[:size]) == parse_npy_header(VECTOR + b"more")


def with_header(text: bytes, version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"PK\x03\x04", "not an .npy file"),
        (b"\x93NUMPX\x01\x00", "not an .npy file"),
        (with_header(b"", b"\x02\x00"), "version 2.0"),
        (with_header(b" " * MAX_HEADER_BYTES), "at most 4096"),
        (with_header(b"(" * 100), "a broken .npy header"),
        (with_header(b"{'descr': '<f4'}\n"), "a broken .npy header"),
        (saved(np.save, np.zeros((2, 3), order="F")), "Fortran order"),
        (saved(np.save, np.array([{}]), allow_pickle=True), "an .npy file of object"),
        (saved(np.save, np.array(["text"])), "an .npy file of <U4"),
        (
            with_header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }\n"),
            r"with shape \(-1,\)",
        ),
    ],
)
def test_other_headers_are_value_errors(start, message):
    """A header of no plain array is refused before any of its data comes."""
    with pytest.raises(ValueError, match=message):
        parse_npy_header(start)
