"""Messages as bytes."""

import datetime
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from xain_messaging.errors import InvalidMessage, MalformedMessage
from xain_messaging.format import codec
from xain_messaging.format.codec import (
    MAX_FRAMES,
    SMALL_ARRAY_BYTES,
    Frame,
    decode,
    encode,
    num_bytes,
    parts,
    snapshot,
)
from xain_messaging.format.messages import Message, SessionMessage, SessionType, TaskSessionStage

numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
dtypes = (
    npst.boolean_dtypes()
    | npst.integer_dtypes(endianness="?")
    | npst.unsigned_integer_dtypes(endianness="?")
    | npst.floating_dtypes(endianness="?", sizes=(16, 32, 64))
    | npst.complex_number_dtypes(endianness="?", sizes=(64, 128))
)
arrays = npst.arrays(dtypes, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=20))
plain = st.none() | st.booleans() | numbers | st.text() | st.binary()
bodies = st.recursive(
    plain | arrays,
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9), inner),
    max_leaves=12,
)


def travelled(message: Message) -> Message:
    """The message as it comes out at the other end, where each frame is a buffer of its own."""
    frames: list[Frame] = [bytearray(frame) for frame in encode(message)]
    return decode(frames, message.source, message.destination)


def assert_same(found: Any, sent: Any) -> None:
    if isinstance(sent, np.ndarray):
        np.testing.assert_array_equal(found, sent)
        assert found.shape == sent.shape
        assert found.dtype == sent.dtype.newbyteorder("=")
        assert found.flags.writeable
    elif isinstance(sent, list):
        assert isinstance(found, list)
        assert len(found) == len(sent)
        for one, other in zip(found, sent, strict=True):
            assert_same(one, other)
    elif isinstance(sent, dict):
        assert found.keys() == sent.keys()
        for key in sent:
            assert_same(found[key], sent[key])
    else:
        assert type(found) is type(sent)
        assert found == sent


@given(bodies)
@settings(deadline=None)
def test_bodies_come_out_as_they_went_in(body):
    """Bodies may hold all supported types, at any depth."""
    assert_same(travelled(Message("t", "a", "b", body)).body, body)


def test_the_rest_comes_out_too():
    """Ids, type and stage; source and destination are those of the connection."""
    sent = SessionMessage("t", "a", "b", 1).reply(ack=True)
    found = decode(encode(sent), "x", "y")
    assert isinstance(found, SessionMessage)
    assert found.session_type is SessionType.TASK
    assert found.session_stage is TaskSessionStage.RECEIVE
    assert (found.tag, found.session_id, found.message_id) == (
        sent.tag,
        sent.session_id,
        sent.message_id,
    )
    assert (found.source, found.destination) == ("x", "y")
    assert type(travelled(Message("t", "a", "b"))) is Message


def test_types_that_change_on_their_way():
    """Tuples, numpy scalars, bytearrays, views, Fortran order."""
    body = {
        "tuple": (1, (2,)),
        "scalar": [np.float64(0.5), np.int8(3), np.bool_(True)],
        "enum": [SessionType.TASK, HTTPStatus.OK],
        "map": OrderedDict(x=1),
        "bytes": [bytearray(b"x"), memoryview(b"y")],
        "fortran": np.asfortranarray(np.arange(600.0).reshape(20, 30)),
        "strided": np.arange(1000)[::3],
    }
    found = travelled(Message("t", "a", "b", body)).body
    assert found["tuple"] == [1, [2]]
    assert found["scalar"] == [0.5, 3, True]
    assert found["enum"] == ["task", 200]
    assert found["map"] == {"x": 1}
    assert found["bytes"] == [b"x", b"y"]
    np.testing.assert_array_equal(found["fortran"], body["fortran"])
    np.testing.assert_array_equal(found["strided"], body["strided"])


@pytest.mark.parametrize("other", [[], (), [(1,)]], ids=repr)
def test_tuple_beside_it_does_not_refuse_a_value(other):
    """The search for a tuple, which can be no key, makes nothing else a fault."""
    body = {
        "text": np.str_("x"),
        "bytes": np.bytes_(b"y"),
        "keys": {np.int64(1): 1, np.bool_(False): 2, memoryview(b"z"): 3, np.float32(0.5): 4},
        "other": other,
    }
    found = travelled(Message("t", "a", "b", body)).body
    assert (found["text"], found["bytes"]) == ("x", b"y")
    assert found["keys"] == {1: 1, False: 2, b"z": 3, 0.5: 4}


def test_an_array_in_a_file_is_an_array(tmp_path):
    """A memmap is another type of numpy's, but holds nothing more."""
    mapped = np.memmap(tmp_path / "array", np.int32, "w+", shape=(400,))
    mapped[:] = np.arange(400)
    found = travelled(Message("t", "a", "b", mapped)).body
    np.testing.assert_array_equal(found, np.arange(400))


def test_an_envelope_has_its_bound(monkeypatch):
    """An envelope has to go into a head as one piece, so it is refused before it is kept."""
    monkeypatch.setattr(codec, "MAX_ENVELOPE_BYTES", 1000)
    assert encode(Message("t", "a", "b", [b"x" * 500, np.zeros(1000)]))
    with pytest.raises(InvalidMessage, match="at most 1000"):
        encode(Message("t", "a", "b", b"x" * 1001))


def test_a_large_array_is_a_frame_and_not_copied():
    """The sender's frame is a view on the array, and the receiver's array one on the frame."""
    array = np.arange(SMALL_ARRAY_BYTES, dtype=np.uint8)
    larger = np.arange(SMALL_ARRAY_BYTES + 1, dtype=np.uint16)
    frames = encode(Message("t", "a", "b", [array, larger]))
    assert len(frames) == 2
    assert np.shares_memory(np.frombuffer(frames[1], np.uint16), larger)
    found = decode(frames, "a", "b").body[1]
    assert np.shares_memory(found, larger)
    assert len(frames[0]) < SMALL_ARRAY_BYTES + 300
    assert num_bytes(frames) == len(frames[0]) + larger.nbytes


def test_snapshot_copies_mutable_values():
    """A read-only array is taken at its word."""
    changing, fixed = np.zeros(1000), np.zeros(1000)
    fixed.setflags(write=False)
    frames = snapshot(encode(Message("t", "a", "b", [changing, fixed])))
    changing += 1
    first, second = decode([frames[0], *map(bytearray, frames[1:])], "a", "b").body
    assert not first.any()
    assert not second.any()
    assert np.shares_memory(np.frombuffer(frames[2]), fixed)
    assert not np.shares_memory(np.frombuffer(frames[1]), changing)


def deep(depth: int) -> Any:
    body: Any = 1
    for _ in range(depth):
        body = [body]
    return body


@pytest.mark.parametrize(
    ("body", "position"),
    [
        ({1, 2}, "body cannot be sent: set"),
        ({"a": [0, object()]}, r"body\['a'\]\[1\] cannot be sent: object"),
        ([datetime.date(2026, 1, 1)], r"body\[0\].*date"),
        ([2**64], r"body\[0\].*64 bits"),
        ({"x": -(2**63) - 1}, r"body\['x'\].*64 bits"),
        ({"x": {(1, 2): 0}}, r"body\['x'\].*key.*\(1, 2\)"),
        ({frozenset(): 0}, "key"),
        ("\ud800", "Unicode"),
        ([np.array([{}], dtype=object)], r"body\[0\].*dtype object"),
        (np.array(["x"]), "dtype <U1"),
        (np.datetime64("2026"), "datetime64"),
        (np.complex64(1), "complex64"),
        ([np.longdouble(1)], r"body\[0\].*scalar"),
        ({"x": np.zeros((1,) * 33)}, r"body\['x'\].*33 axes"),
        ([np.ma.masked_array([1.0], mask=[True])], r"body\[0\].*MaskedArray"),
        ([memoryview(b"abcdef")[::2]], r"body\[0\].*contiguous"),
        ({"x": {np.longdouble(1): 0}}, r"body\['x'\].*key"),
        (np.zeros(2, [("a", "f4")]), "dtype"),
        (deep(2000), "deep"),
        (print, "builtin_function"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_error_says_where_the_wrong_value_is(body, position):
    """The error says why, too, and nothing is pickled instead."""
    with pytest.raises(InvalidMessage, match=position):
        encode(Message("t", "a", "b", body))


@pytest.mark.parametrize("beside", [0, [0.1] * 1000, np.zeros(3)], ids=["", "long", "array"])
@pytest.mark.parametrize(
    ("body", "position"),
    [
        (msgpack.ExtType(1, b""), r"body\[0\] cannot"),
        ({"a": [0, msgpack.Timestamp(1)]}, r"body\[0\]\['a'\]\[1\] cannot"),
        ([{"a": 1}, {"b": OrderedDict(x=((1, msgpack.ExtType(5, b"")),))}], r"\['x'\]\[0\]\[1\]"),
        ({"a": {msgpack.Timestamp(1): 0}}, r"body\[0\]\['a'\].*key"),
        (msgpack.ExtType(2, b"x" * 70_000), r"body\[0\] cannot"),
    ],
    ids=["extension", "time", "deep", "key", "large"],
)
def test_the_types_of_msgpack_itself_are_refused(body, position, beside):
    """The receiver would drop the message, or give out something else."""
    with pytest.raises(InvalidMessage, match=position):
        encode(Message("t", "a", "b", [body, beside]))


def test_so_many_arrays_travel_as_they_lie():
    """Arrays beyond the number that the drivers take are in the envelope, and come all the same."""
    arrays = [np.full(SMALL_ARRAY_BYTES + 1, i % 256, np.uint8) for i in range(MAX_FRAMES + 1)]
    frames = encode(Message("t", "a", "b", arrays))
    assert len(frames) == MAX_FRAMES == 4096
    found = decode(frames, "a", "b").body
    assert [array[0] for array in found] == [i % 256 for i in range(MAX_FRAMES + 1)]


def envelope(**changes: Any) -> bytes:
    fields = {"version": 1, "tag": "t", "session": "s", "message": "m", "stage": None, "body": 1}
    packed: bytes = msgpack.packb([*{**fields, **changes}.values()])
    return packed


def array_body(*fields: Any) -> msgpack.ExtType:
    return msgpack.ExtType(1, msgpack.packb([*fields]))


def malformed() -> Iterator[list[bytes]]:
    yield []
    yield [b""]
    yield [b"\xc1"]
    yield [msgpack.packb(1)]
    yield [envelope()[:-1]]
    yield [envelope() + b"x"]
    yield [envelope(version=2)]
    yield [envelope(tag="a:b")]
    yield [envelope(tag=1)]
    yield [envelope(session=1)]
    yield [envelope(message="x" * 1000)]
    yield [envelope(stage=5)]
    yield [envelope(stage=-1)]
    yield [envelope(stage=["task", 0])]
    yield [envelope(stage="0")]
    yield [envelope(body=msgpack.ExtType(2, b""))]
    yield [envelope(body=array_body(0, "|O", [1], b"x" * 8))]
    yield [envelope(body=array_body(0, "<f4", [1], b"xxx"))]
    yield [envelope(body=array_body(0, "<f4", [-1], b""))]
    yield [envelope(body=array_body(0, "<f4", [2**40, 2**40], b""))]
    yield [envelope(body=array_body(0, "<f4", [True], b"xxxx"))]
    yield [envelope(body=array_body(0, "<f4", [1] * 33, b"xxxx"))]
    yield [envelope(body=array_body(0, "f4,f4", [1], b"x" * 8))]
    yield [envelope(body=array_body(0, "<M8[s]", [1], b"x" * 8))]
    yield [envelope(body=array_body(1, "<f4", [1], None))]
    yield [envelope(body=array_body(0, "<f4", [1], None)), b"xxxx"]
    yield [envelope(body=array_body(-1, "<f4", [1], None)), b"xxxx"]
    yield [envelope(body=array_body(1, "<f4", [2], None)), b"xxxx"]
    yield [b"\x91" * 5000]


@pytest.mark.parametrize("frames", list(malformed()))
def test_frames_that_are_no_message_are_malformed(frames):
    with pytest.raises(MalformedMessage):
        decode(frames, "a", "b")


@given(st.binary(max_size=200), st.lists(st.binary(max_size=50), max_size=3))
@settings(deadline=None)
def test_any_bytes_are_a_message_or_malformed(head, frames):
    with suppress(MalformedMessage):
        decode([head, *frames], "a", "b")


@given(st.data())
@settings(deadline=None)
def test_a_message_with_other_bytes_is_a_message_or_malformed(data):
    frames = encode(SessionMessage("t", "a", "b", {"x": [np.arange(9), np.arange(999.0), "y"]}))
    head = bytearray(frames[0])
    for _ in range(data.draw(st.integers(1, 5))):
        head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    with suppress(MalformedMessage):
        decode([head, *frames[1:]], "a", "b")


@pytest.mark.parametrize("own_id", ["\ud800", object()], ids=["surrogate", "object"])
@pytest.mark.parametrize("field", ["session_id", "message_id"])
def test_an_id_that_cannot_be_sent_is_refused_before_the_message_is_kept(field, own_id):
    with pytest.raises(InvalidMessage):
        parts(Message("tag", "a", "b", b"small", **{field: own_id}))


def test_a_long_id_counts_among_the_bytes_of_a_message():
    assert num_bytes(parts(Message("tag", "a", "b", b"small", session_id="x" * 5000))) > 5000
