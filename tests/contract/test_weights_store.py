"""The contract of every WeightsStore."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.stores import get, put
from xain_coordinator.ports import KeyClaimed, KeyExists, KeyNotFound, Reader, StoreUnavailable
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.prefixed import PrefixedStore
from xain_coordinator.stores.s3.s3 import S3Store

GATE_S = 60.0  # for all threads of a test to come together

HOSTILE = [
    "3/ipv4:127.0.0.1:6087",
    "3/ipv6:[::1]:6087",
    "3/100%",
    "3/%2e%2e",
    "3/Anna",
    "3/anna",
    "3/con",
    "3/NUL.txt",
    "3/lpt1",
    "3/trailing.",
    "3/trailing ",
    "3/.hidden",
    "3/.incoming",
    ".incoming/x",
    "3/back\\slash",
    '3/<>:"|?*',
    "3/zürich-\N{HOSPITAL}",
    "3/u\N{COMBINING DIAERESIS}",
    "3/ü",
    "3/line\nbreak\0",
    "3/" + "\N{HOSPITAL}" * 32,
    "3/" + "x" * 500,
    "3/a%/b",
    "3/ leading",
    "3/\x7f\x85\u2028\ufffe",
    "3/plus+and?query#fragment&amp;~=",
    "a.weights",
    "-",
]
# An S3 server that keeps objects as files cannot hold these beside those below them.
FOLDERS = ["3", "3/3/3", "a.weights/b"]


def test_round_trip(store):
    """Chunks come back as one object, whatever kind of buffer they came in."""
    upload = store.upload("0/global")
    chunks = [b"abc", b"", bytearray(b"de"), memoryview(b"fgh")]
    for chunk in chunks:
        upload.write(chunk)
    upload.commit(overwrite=False)
    assert get(store, "0/global") == b"abcdefgh"


def test_an_empty_object_is_an_object(store):
    put(store, "0/global", b"")
    assert get(store, "0/global") == b""
    assert list(store.keys()) == ["0/global"]


def test_ranges(store):
    """A read is short only at the end of the object."""
    put(store, "k", bytes(range(100)))
    with store.open("k") as reader:
        assert reader.size == 100
        assert reader.read(10, 5) == bytes(range(10, 15))
        assert reader.read(0, 0) == b""
        assert reader.read(95, 50) == bytes(range(95, 100))
        assert reader.read(100, 1) == b""
        assert reader.read(10**6, 1) == b""


def test_ranges_into_a_buffer(store):
    """A read into a buffer fills it, brings less only at the end of the object, and touches nothing
    beyond what it says that it has brought."""
    data = os.urandom(600_000)
    put(store, "k", data)
    with store.open("k", 3, 10) as reader:
        for offset, length in (
            (0, 0),
            (3, 10),
            (0, 20),
            (100_000, 400_000),
            (0, 600_000),
            (599_990, 50),
            (600_000, 5),
            (10**6, 5),
        ):
            buffer = bytearray(b"." * (length + 8))
            count = reader.read_into(offset, memoryview(buffer)[4 : 4 + length])
            expected = data[offset : offset + length]
            assert count == len(expected)
            assert bytes(buffer[4 : 4 + count]) == expected
            assert set(buffer[:4] + buffer[4 + count :]) == set(b".")
    with pytest.raises(ValueError, match="closed"):
        reader.read_into(0, memoryview(bytearray(3)))


@pytest.mark.parametrize(
    ("start", "length"), [(0, 0), (0, 10), (7, 5), (95, 50), (100, 1), (10**6, 10), (3, None)]
)
def test_range_given_at_the_opening_changes_no_result(store, start, length):
    """All of the object can be read, in any order and again, whatever was to be read first."""
    data = bytes(range(100))
    put(store, "k", data)
    put(store, "empty", b"")
    with store.open("k", start, length) as reader:
        assert reader.size == 100
        for offset, num_bytes in ((start, 5), (0, 100), (0, 3), (50, 60), (3, 90), (0, 100)):
            assert reader.read(offset, num_bytes) == data[offset : offset + num_bytes]
    with store.open("empty", start, length) as reader:
        assert (reader.size, reader.read(start, 10)) == (0, b"")
    with pytest.raises(KeyNotFound):
        store.open("none", start, length)


def test_reads_from_several_threads(store):
    """Readers of one object do not move each other's position."""
    data = os.urandom(64 * 1024)
    put(store, "k", data)
    with store.open("k") as reader, ThreadPoolExecutor(8) as pool:
        offsets = [i * 997 % len(data) for i in range(500)]
        parts = pool.map(lambda offset: reader.read(offset, 100), offsets)
        assert list(parts) == [data[offset : offset + 100] for offset in offsets]


def test_a_closed_reader_reads_nothing(store):
    put(store, "k", b"abc")
    reader = store.open("k")
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read(0, 1)


def test_key_not_found(store):
    put(store, "3/global", b"x")
    for key in ("4/global", "3", "3/global/x", "3/glob"):
        with pytest.raises(KeyNotFound) as caught:
            store.open(key)
        assert f"{key}'" in str(caught.value)


def test_key_exists_leaves_the_old_object(store):
    """A conditional create that comes second changes nothing and leaves nothing."""
    put(store, "1/global", b"first")
    upload = store.upload("1/global")
    upload.write(b"second")
    with pytest.raises(KeyExists) as caught:
        upload.commit(overwrite=False)
    upload.abort()
    assert "1/global'" in str(caught.value)
    assert get(store, "1/global") == b"first"
    assert list(store.keys()) == ["1/global"]


def read_on(reader: Reader) -> bytes | None:
    """All of the object that was opened; None if the store says that it is no longer there."""
    try:
        return reader.read(0, reader.size + 10)
    except StoreUnavailable:
        return None


@pytest.mark.parametrize("size", [3, 1_000_000])
def test_overwrite(store, size):
    """A reader of the old object reads on, or hears that it is gone. It gets no mixture."""
    put(store, "1/a", b"o" * size, overwrite=True)
    with store.open("1/a") as reader:
        put(store, "1/a", b"n" * size, overwrite=True)
        assert reader.size == size
        assert read_on(reader) in (b"o" * size, None)
    assert get(store, "1/a") == b"n" * size


@pytest.mark.parametrize("size", [3, 1_000_000])
def test_deleted_under_a_reader(store, size):
    """The same for an object that is removed."""
    put(store, "1/a", b"o" * size)
    with store.open("1/a") as reader:
        store.delete("1/a")
        assert read_on(reader) in (b"o" * size, None)


def test_abort_leaves_nothing(store):
    upload = store.upload("1/a")
    upload.write(b"x")
    upload.abort()
    upload.abort()
    assert list(store.keys()) == []
    with pytest.raises(KeyNotFound):
        store.open("1/a")


def test_abort_after_commit_is_harmless(store):
    upload = store.upload("1/a")
    upload.write(b"x")
    upload.commit(overwrite=False)
    upload.abort()
    assert get(store, "1/a") == b"x"


def test_an_upload_ends_once(store):
    upload = store.upload("1/a")
    upload.commit(overwrite=False)
    with pytest.raises(ValueError, match="over"):
        upload.write(b"x")
    with pytest.raises(ValueError, match="over"):
        upload.commit(overwrite=True)


def test_invisible_before_commit(store):
    upload = store.upload("1/a")
    upload.write(b"x" * 100_000)
    assert list(store.keys()) == []
    with pytest.raises(KeyNotFound):
        store.open("1/a")
    upload.abort()


def test_two_uploads_of_one_key_do_not_mix(store):
    first, second = store.upload("1/a"), store.upload("1/a")
    first.write(b"11")
    second.write(b"2")
    first.write(b"11")
    second.commit(overwrite=True)
    assert get(store, "1/a") == b"2"
    first.commit(overwrite=True)
    assert get(store, "1/a") == b"1111"


def test_one_of_concurrent_conditional_creates_wins(store):
    """The fence: of many who publish a model, one does, and its bytes stay.

    A store without locks promises less: at most one does. If all gave way to each other, whoever
    tries again, alone, does.
    """
    num_threads = 16
    for number in range(3 if isinstance(store, S3Store) else 10):
        key = f"{number}/global"
        gate = threading.Barrier(num_threads, timeout=GATE_S)

        def create(number: int, key: str = key, gate: threading.Barrier = gate) -> int | None:
            upload = store.upload(key)
            upload.write(bytes([number]) * 1000)
            gate.wait()
            try:
                upload.commit(overwrite=False)
            except (KeyExists, KeyClaimed):
                return None
            return number

        with ThreadPoolExecutor(num_threads) as pool:
            results = list(pool.map(create, range(num_threads)))
        winners = [number for number in results if number is not None]
        if isinstance(store, S3Store) and not winners:
            put(store, key, bytes([99]) * 1000)
            winners = [99]
        assert len(winners) == 1
        assert get(store, key) == bytes(winners) * 1000
        with pytest.raises(KeyExists):
            put(store, key, b"late")


def test_the_same_bytes_may_be_published_by_several(store):
    """A coordinator and its successor after a crash make the same model: neither is in the other's
    way, and it is there."""
    gate = threading.Barrier(4, timeout=GATE_S)

    def create(_: int) -> bool:
        upload = store.upload("1/global")
        upload.write(b"same")
        gate.wait()
        try:
            upload.commit(overwrite=False)
        except KeyExists:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert any(pool.map(create, range(4)))
    assert get(store, "1/global") == b"same"
    assert list(store.keys()) == ["1/global"]


def test_keys(store):
    """A prefix is text, not a folder."""
    for key in ("1/a", "1/b", "10/a", "2/global", "top"):
        put(store, key, b"x")
    assert sorted(store.keys()) == ["1/a", "1/b", "10/a", "2/global", "top"]
    assert sorted(store.keys("1")) == ["1/a", "1/b", "10/a"]
    assert sorted(store.keys("1/")) == ["1/a", "1/b"]
    assert sorted(store.keys("2/glo")) == ["2/global"]
    for prefix in ("3/", "..", "../", "/", "2/global/", "top/"):
        assert list(store.keys(prefix)) == []


def test_put_writes_many_at_once(store):
    """Each takes the place of what its key holds; who reads the old one is not disturbed."""
    put(store, "1/a", b"old")
    with store.open("1/a") as reader:
        store.put({"1/a": b"new", "1/b": b"", "2/a": b"x" * 100_000})
        assert read_on(reader) in (b"old", None)
    assert [get(store, key) for key in ("1/a", "1/b", "2/a")] == [b"new", b"", b"x" * 100_000]
    store.put({})
    assert sorted(store.keys()) == ["1/a", "1/b", "2/a"]


def test_settle(store):
    """An object that is there stays as it is; what is not there cannot be made durable."""
    put(store, "1/a", b"x")
    store.settle("1/a")
    assert get(store, "1/a") == b"x"
    with pytest.raises(KeyNotFound):
        store.settle("1/b")


def test_delete(store):
    """The key is free again; deleting nothing is nothing."""
    store.delete("1/a")
    put(store, "1/a", b"x")
    put(store, "1/b", b"x")
    store.delete("1/a")
    store.delete("1/a")
    assert list(store.keys()) == ["1/b"]
    put(store, "1/a", b"y")
    assert get(store, "1/a") == b"y"
    store.delete()
    many = [f"2/{number}" for number in range(20)]
    store.put(dict.fromkeys([*many, "2/x"], b"x"))
    store.delete(*many, "2/none")
    assert sorted(store.keys()) == ["1/a", "1/b", "2/x"]


def test_hostile_keys(store):
    """Names that mean something to a file system are names like all others."""
    keys = HOSTILE if isinstance(store, S3Store) else HOSTILE + FOLDERS
    for number, key in enumerate(keys):
        put(store, key, b"%d" % number)
    assert sorted(store.keys()) == sorted(keys)
    for number, key in enumerate(keys):
        assert get(store, key) == b"%d" % number
        assert key in list(store.keys(key[:-1]))
    for key in keys:
        store.delete(key)
    assert list(store.keys()) == []


@pytest.mark.parametrize(
    "key",
    ["", "/", "/etc/passwd", "..", "../x", "1/../x", "1/..", ".", "1/./a", "1//a", "1/", "a\ud800"],
)
def test_invalid_keys_are_refused(store, key):
    for use in (store.open, store.upload, store.delete):
        with pytest.raises(ValueError, match="cannot be a key"):
            use(key)
    with pytest.raises(ValueError, match="cannot be a key"):
        store.put({key: b""})


def test_a_key_that_is_too_long_is_refused(store):
    with pytest.raises(ValueError, match="1024"):
        store.upload("x" * 1025)


def test_unfinished_uploads_go_on_or_are_gone(store):
    """The part of an upload that a process has left is found by its label, by one finder at a time,
    cut to the wanted size and continued; or no part is left."""
    upload = store.upload("3/a.1", "0123abcd")
    upload.write(b"abcdef")
    assert store.find_unfinished("3/a.2", "0123abcd") is None, "it is still being written"
    upload.suspend()
    upload.abort()
    assert list(store.keys()) == []
    assert store.find_unfinished("3/a.2", "0123") is None
    found = store.find_unfinished("3/a.2", "0123abcd")
    if found is None:
        keeps = isinstance(store, FileStore | PrefixedStore)
        assert not keeps, "files outlive their process"
        return
    assert store.find_unfinished("3/a.3", "0123abcd") is None
    assert (found.size, found.read(1, 3), found.read(4, 10)) == (6, b"bcd", b"ef")
    upload = found.resume(2)
    upload.write(b"XYZ")
    upload.commit(overwrite=True)
    assert get(store, "3/a.2") == b"abXYZ"
    assert store.find_unfinished("3/a.2", "0123abcd") is None


def test_sweeping_leaves_open_uploads(store):
    live, dead = store.upload("3/a", "live"), store.upload("3/b", "dead")
    for upload in (live, dead):
        upload.write(b"x")
    dead.suspend()
    store.sweep()
    assert store.find_unfinished("3/b", "dead") is None
    live.commit(overwrite=True)
    assert list(store.keys()) == ["3/a"]
