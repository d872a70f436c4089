"""Pickles that are made to do harm: each works on Python's own unpickler, and none on ours."""

import io
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unit.coordinator.xain06.recorded import EMPTY, VECTORS
from unit.coordinator.xain06.strict import StrictReader
from xain_coordinator.xain06.codec import find_array
from xain_workloads.errors import InvalidContent

MARKER = "marker"
COMMAND = f"echo > {MARKER}"
PYTHON = f"open({MARKER!r}, 'w').close()"


class Call:
    """Pickled, it is a call of `function`."""

    def __init__(self, function: object, *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._call

    def __call__(self) -> None:
        """For pickle, which calls only what can be called."""


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def name(module: str, what: str) -> bytes:
    return f"c{module}\n{what}\n".encode()


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


START = b"\x80\x03"
SYSTEM = name(os.system.__module__, "system")

# Each makes a file when it is unpickled.
EXPLOITS = {
    **{f"system, protocol {p}": pickle.dumps(Call(os.system, COMMAND), p) for p in range(6)},
    "eval": pickle.dumps(Call(eval, PYTHON)),
    "exec": pickle.dumps(Call(exec, PYTHON)),
    "getattr": pickle.dumps(Call(Call(getattr, Call(__import__, "os"), "system"), COMMAND)),
    "dotted name": b"\x80\x04"
    + call(text("os") + text("path.os.system") + b"\x93", text(COMMAND))
    + b".",
    "INST": START + b"(" + text(COMMAND) + b"i" + SYSTEM[1:] + b".",
    "OBJ": START + b"(" + SYSTEM + text(COMMAND) + b"o.",
    # bytes() takes what map() has to give, which is what system() returns.
    "NEWOBJ": START
    + name("builtins", "bytes")
    + (name("builtins", "map") + b"(" + SYSTEM + b"(" + text(COMMAND) + b"tt\x81\x85")
    + b"\x81.",
    "BUILD": START
    + (name("argparse", "Namespace") + b")\x81}" + text("__setstate__") + SYSTEM + b"sb")
    + (text(COMMAND) + b"b."),
    "numpy.memmap": START
    + call(name("numpy", "memmap"), text(MARKER), text("u1"), text("w+"), b"K\x00", b"K\x01")
    + b".",
    "numpy's runstring": START
    + call(name("numpy.testing._private.utils", "runstring"), text(PYTHON), b"}")
    + b".",
    # A whole array, and the harm behind it or beside it.
    "array, then more": pickle.dumps(np.float32([1]), 3)[:-1] + call(SYSTEM, text(COMMAND)) + b"0.",
    "array inside": pickle.dumps(Call(exec, PYTHON, {"array": np.float32([1])})),
    "array of objects": pickle.dumps(np.array([Call(os.system, COMMAND)])),
    "dtype with metadata": pickle.dumps(
        np.zeros(2, np.dtype("f4", metadata={"key": Call(os.system, COMMAND)}))
    ),
}


def refuse(data: bytes) -> str:
    """Our reason for refusing, which must not have taken memory."""
    reader = StrictReader(data)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidContent) as caught:
            list(find_array(reader).pieces())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert len(str(caught.value)) < 1000  # it travels in the headers of an answer
    return str(caught.value)


@pytest.mark.parametrize("exploit", EXPLOITS)
def test_exploits_do_nothing(exploit, tmp_path, monkeypatch):
    """A pickle that runs code when Python unpickles it is refused here before it has any effect."""
    data = EXPLOITS[exploit]
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    unpickle = "import pickle, sys; pickle.load(sys.stdin.buffer)"
    # It may also end with an error, after the harm is done.
    subprocess.run(
        [sys.executable, "-c", unpickle],
        input=data,
        cwd=theirs,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (theirs / MARKER).exists(), "this is no exploit"
    monkeypatch.chdir(ours)
    refuse(data)
    assert not any(ours.iterdir())


LIMITED = """
import pickle, resource, sys
import numpy
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
try:
    pickle.load(sys.stdin.buffer)
except MemoryError:
    sys.exit(42)
"""
MEMORY_EXPLOITS = {
    "memo index": START + b"Nr\xff\xff\xff\x7f.",
    "shape": START
    + call(
        name("numpy.core.multiarray", "_reconstruct"),
        name("numpy", "ndarray"),
        b"\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85",
        text("f8"),
    )
    + b".",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"N.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"N.",
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
@pytest.mark.parametrize("exploit", MEMORY_EXPLOITS)
def test_exploits_take_no_memory(exploit):
    """A few bytes that make Python's unpickler take terabytes are refused here for nothing."""
    data = MEMORY_EXPLOITS[exploit]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], input=data, capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 42, f"this is no exploit: {done.stderr.decode()}"
    refuse(data)


VECTOR = pickle.dumps(np.float32([1, 2]), 3)


def filled(dtype: bytes, shape: bytes = b"K\x02\x85", data: bytes = b"C\x08" + bytes(8)) -> bytes:
    """The pickle of an array, some of which is given."""
    return (
        START
        + (name("numpy.core.multiarray", "_reconstruct") + name("numpy", "ndarray"))
        + (b"K\x00\x85C\x01b\x87R(K\x01" + shape + dtype + b"\x89" + data + b"tb.")
    )


def dtype(code: str = "f4", order: str = "<", state: bytes = b"") -> bytes:
    state = state or b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00"
    return (
        (name("numpy", "dtype") + text(code) + b"\x89\x88\x87R")
        + (b"(K\x03" + text(order) + state + b"tb")
    )  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"anything",
        b"\x80\x06" + VECTOR[2:],
        START + b".",
        START + b"N" + VECTOR[2:],
        START + b"L" + b"9" * 1_000_000 + b"L\n.",
        START + b")" + b"\x85" * 100_000 + b".",
        VECTOR + b"\x00",
        VECTOR[:-1] + b"N.",
        VECTOR[:-1] + b"q\x00" * 1000 + b".",
        VECTOR.replace(b"K\x00\x85", b"K\x09\x85"),
        VECTOR.replace(b"\x89C", b"NC"),
        filled(dtype("O")),
        filled(dtype("__import__('os')")),
        filled(dtype("f4,f4")),
        filled(dtype("f4", "=")),
        filled(dtype("f4", "|")),
        filled(dtype("u1", "<")),
        filled(dtype("f4", state=b"}NNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00")),
        filled(dtype("f4", state=b"NNNK\x04K\x04K\x3f")),
        filled(name("numpy", "dtype") + text("f4") + b"\x89\x88\x87R"),
        filled(b"N"),
        filled(dtype(), shape=b"K\x02"),
        filled(dtype(), shape=b"K\x03\x85"),
        filled(dtype(), shape=b"J\xff\xff\xff\xff\x85"),
        filled(dtype(), shape=b"\x88\x85"),
        filled(dtype(), shape=b"(" + b"K\x01" * 40 + b"t"),
        filled(dtype(), shape=b"\x8a\x08" + b"\xff" * 7 + b"\x7f\x85"),
        filled(dtype(), data=b"N"),
        filled(dtype(), data=text("a" * 8)),
        filled(dtype(), data=b"B" + struct.pack("<I", 1 << 31)),
    ],
)
def test_pickle_that_numpy_would_not_write_is_refused(data):
    """A pickle that differs from that of a vector in one opcode, name or value is refused."""
    refuse(data)


def test_the_pickle_that_the_others_are_made_of_is_an_array():
    """The hostile pickles would otherwise be refused for another reason."""
    found = find_array(StrictReader(filled(dtype())))
    np.testing.assert_array_equal(
        np.frombuffer(b"".join(found.pieces()), found.dtype), np.zeros(2, "<f4")
    )


VALID = [*VECTORS.values(), *EMPTY.values()] + [
    pickle.dumps(np.arange(100, dtype="<f4"), protocol) for protocol in range(3, 6)
]


def test_opcodes_that_are_passed_over_are_matched_in_one_way():
    """A refusal of 1 KB would otherwise take minutes, and hold up the coordinator."""
    data = filled(dtype(), data=b"N")
    for module, what in (
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
    ):
        by_texts = text(module) + text(what) + b"\x93" + b"\x94" * 250
        assert data.count(name(module, what)) == 1
        data = data.replace(name(module, what), by_texts)
    refuse(data)


@pytest.mark.parametrize("data", VALID)
def test_a_part_is_refused(data):
    """Wherever the upload was cut."""
    for end in range(len(data)):
        refuse(data[:end])


def array_or_refusal(data: bytes) -> None:
    """Anything else than these two is an error; an array is not larger than what it came in."""
    try:
        found = find_array(StrictReader(data))
        assert sum(map(len, found.pieces())) <= len(data)
    except InvalidContent:
        pass


@given(st.data())
def test_changed_pickles_are_arrays_or_refused(drawn):
    """Bytes replaced, left out and repeated: never another exception than the refusal."""
    data = bytearray(drawn.draw(st.sampled_from(VALID)))
    for _ in range(drawn.draw(st.integers(1, 4))):
        start = drawn.draw(st.integers(0, len(data)))
        end = drawn.draw(st.integers(start, min(len(data), start + 9)))
        data[start:end] = drawn.draw(st.binary(max_size=9))
    array_or_refusal(bytes(data))


def opcodes_of(data: bytes) -> list[bytes]:
    positions = [position for *_, position in pickletools.genops(io.BytesIO(data))]
    return [data[start:end] for start, end in pairwise([*positions, len(data)])]


PARTS = sorted(
    {part for data in VALID for part in opcodes_of(data)[1:]}
    | {opcode.code.encode("latin-1") for opcode in pickletools.opcodes}
)


@given(st.sampled_from([3, 4, 5]), st.lists(st.sampled_from(PARTS), max_size=80))
def test_any_opcodes_are_arrays_or_refused(protocol, parts):
    """Whole opcodes in an order that no pickler writes."""
    array_or_refusal(bytes([0x80, protocol]) + b"".join(parts) + b".")


@given(st.data())
def test_changed_orders_of_opcodes_are_arrays_or_refused(drawn):
    """The opcodes of an array, some of them elsewhere or others."""
    parts = opcodes_of(drawn.draw(st.sampled_from(VALID)))
    for _ in range(drawn.draw(st.integers(1, 3))):
        start = drawn.draw(st.integers(1, len(parts)))
        end = drawn.draw(st.integers(start, min(len(parts), start + 3)))
        parts[start:end] = drawn.draw(st.lists(st.sampled_from(PARTS), max_size=3))
    array_or_refusal(b"".join(parts))
