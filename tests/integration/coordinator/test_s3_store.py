"""The S3 store beyond what every store does: large objects, signed URLs, buckets, claims."""

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import urllib3

from support.descriptors import open_files
from support.s3_servers import S3Server
from support.stores import S3_SERVERS, get, put
from support.waiting import wait_until
from xain_coordinator.config.sections.storage import StorageSettings
from xain_coordinator.ports import (
    KeyClaimed,
    KeyExists,
    KeyNotFound,
    StoreError,
    StoreUnavailable,
)
from xain_coordinator.stores.prefixed import PrefixedAccess, PrefixedStore
from xain_coordinator.stores.s3.s3 import S3Store, open_s3
from xain_coordinator.stores.s3.s3_requests import NUM_THREADS, Sizes

MIB = 1 << 20

Open = Callable[..., S3Store]


@pytest.fixture(params=S3_SERVERS)
def server(request: pytest.FixtureRequest) -> S3Server:
    return request.getfixturevalue(request.param)


@pytest.fixture
def bucket(server: S3Server) -> str:
    return server.new_bucket()


@pytest.fixture
def client(server: S3Server) -> Iterator[Any]:
    """A client for changes behind the store's back."""
    with contextlib.closing(server.client()) as client:
        yield client


@pytest.fixture
def connect(server: S3Server, bucket: str, tmp_path: Path) -> Iterator[Open]:
    """Open stores on the bucket; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def open_one(**others: object) -> S3Store:
            settings = server.settings(bucket, path=tmp_path / "spool", **others)
            store = open_s3(StorageSettings.model_validate(settings))
            stack.callback(store.close)
            return store

        yield open_one


@pytest.fixture
def store(connect: Open) -> S3Store:
    return connect()


def count_gets(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The offset and length of every GET from now on."""
    gets = []
    get_one = store.bucket.get_into

    def count_and_get(*args: Any) -> tuple[int, str, int]:
        _, _, offset, buffer, _ = args
        gets.append((offset, len(buffer)))
        return get_one(*args)

    monkeypatch.setattr(store.bucket, "get_into", count_and_get)
    return gets


def names(client: Any, bucket: str) -> list[str]:
    found = client.list_objects_v2(Bucket=bucket)
    return [each["Key"] for each in found.get("Contents", ())]


def uploads(client: Any, bucket: str) -> list[str]:
    found = client.list_multipart_uploads(Bucket=bucket)
    return [each["Key"] for each in found.get("Uploads", ())]


# --- names ---


def test_a_listing_of_many(store):
    """Page after page."""
    store.bucket.max_listed = 7
    keys = [f"3/participant-{number:03}" for number in range(40)]
    store.put(dict.fromkeys(keys, b"x"))
    assert sorted(store.keys("3/")) == keys


# --- large objects ---


def test_an_upload_in_parts(store, client, bucket, tmp_path):
    """An object of any size is read back in ranges that come at the same time; its parts are in no
    folder afterwards."""
    store.requests.sizes = Sizes(part=5 * MIB, range=2 * MIB)  # the least that S3 takes
    data = os.urandom(5 * MIB) * 3 + b"the rest"
    upload = store.upload("1/global")
    for start in range(0, len(data), 3 * MIB):
        upload.write(data[start : start + 3 * MIB])
        assert list(store.keys()) == []
    assert open_files(tmp_path / "spool")
    upload.commit(overwrite=False)
    assert names(client, bucket) == ["1/global"]
    assert uploads(client, bucket) == []
    assert open_files(tmp_path / "spool") == []
    with store.open("1/global") as reader:
        assert reader.size == len(data)
        assert reader.read(0, len(data)) == data
        assert reader.read(MIB + 1, 9 * MIB) == data[MIB + 1 : 10 * MIB + 1]
        assert reader.read(len(data) - 5, 10) == b" rest"[-5:]
    put(store, "1/global", data[::-1], overwrite=True)
    assert get(store, "1/global") == data[::-1]


def test_first_range_comes_with_the_opening(store, monkeypatch):
    """From anywhere in a large object: one request, of no more than what is wanted."""
    data = os.urandom(3 * MIB)
    put(store, "1/a", data)
    gets = count_gets(store, monkeypatch)
    with PrefixedStore(store, "1").open("a", MIB, 1000) as reader:
        assert reader.read(MIB, 10) == data[MIB : MIB + 10]
        assert reader.read(MIB + 10, 990) == data[MIB + 10 : MIB + 1000]
        assert gets == [(MIB, 1000)]
        assert reader.read(MIB + 1000, 5) == data[MIB + 1000 : MIB + 1005]
        assert reader.read(0, 5) == data[:5]
    assert gets[1:] == [(MIB + 1000, 5), (0, 5)]


def test_one_request_does_not_bring_everything(store, monkeypatch):
    """However much is announced: large reads are cut into ranges, the first one too."""
    store.requests.sizes = Sizes(range=MIB)
    data = os.urandom(3 * MIB + 5)
    put(store, "1/a", data)
    gets = count_gets(store, monkeypatch)
    with store.open("1/a", 0, len(data)) as reader:
        assert reader.read(0, len(data)) == data
    assert sorted(gets) == [(0, MIB), (MIB, MIB), (2 * MIB, MIB), (3 * MIB, 5)]


def test_open_readers_hold_nothing_that_has_been_read(store):
    """A thousand updates are open at the same time."""
    import tracemalloc

    put(store, "1/a", b"x" * MIB)
    gc.collect()
    tracemalloc.start()
    try:
        with contextlib.ExitStack() as stack:
            readers = [stack.enter_context(store.open("1/a")) for _ in range(40)]
            for reader in readers:
                reader.read(0, 100)
            before, _ = tracemalloc.get_traced_memory()
            for reader in readers:
                reader.read(100, Sizes().head - 100)
            after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert before > 40 * Sizes().head
    assert after < 10 * Sizes().head


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_aborted_upload_in_parts_leaves_nothing(store, client, bucket, overwrite):
    """The writer gives the upload up, or the key was taken meanwhile."""
    store.requests.sizes = Sizes(part=5 * MIB)
    given_up = store.upload("1/a")
    given_up.write(b"x" * 16 * MIB)
    given_up.abort()
    late = store.upload("1/global")
    late.write(b"late" * 3 * MIB)
    put(store, "1/global", b"first")
    if not overwrite:
        with pytest.raises(KeyExists):
            late.commit(overwrite=False)
    else:
        late.abort()
    assert get(store, "1/global") == b"first"
    assert names(client, bucket) == ["1/global"]
    assert uploads(client, bucket) == []


def test_waiting_parts_are_on_the_disk(store, tmp_path):
    """However many participants upload at once: memory does not hold what they have sent."""
    import tracemalloc

    gc.collect()
    tracemalloc.start()
    try:
        waiting = [store.upload(f"1/{number}") for number in range(20)]
        for upload in waiting:
            for _ in range(4):
                upload.write(b"x" * MIB)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for upload in waiting:
        upload.abort()
    assert peak < 20 * MIB


def test_a_full_disk(store, tmp_path):
    """The upload fails, and says why; the store lives."""
    (tmp_path / "spool").rmdir()
    upload = store.upload("1/a")
    with pytest.raises(StoreError, match=r"part of an upload .*: No such file"):
        upload.write(b"x" * MIB)
    put(store, "1/b", b"small")


def test_a_reader_of_a_large_object_that_changes(store):
    """The reader never gets a mixture, and the error says what happened."""
    put(store, "1/a", b"o" * MIB)
    with store.open("1/a") as reader:
        put(store, "1/a", b"n" * MIB, overwrite=True)
        with pytest.raises(StoreUnavailable) as caught:
            reader.read(0, MIB)
    assert "'1/a' were replaced" in str(caught.value)


# --- claims ---


def test_one_of_concurrent_creates_in_parts_wins(store):
    """SeaweedFS takes If-None-Match for an upload in parts and lets several through."""
    store.requests.sizes = Sizes(part=5 * MIB)
    gate = threading.Barrier(4, timeout=60)
    winners = []

    def create(number: int) -> None:
        upload = store.upload("1/global")
        upload.write(bytes([number]) * 6 * MIB)
        gate.wait()
        with contextlib.suppress(KeyExists, KeyClaimed):
            upload.commit(overwrite=False)
            winners.append(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(create, range(4)))
    assert len(winners) <= 1
    if winners:
        assert get(store, "1/global") == bytes(winners) * 6 * MIB
    else:
        assert list(store.keys()) == []


# --- direct access ---


def http(method: str, url: str, body: bytes | None = None) -> urllib3.BaseHTTPResponse:
    with urllib3.PoolManager(retries=False, timeout=30) as pool:
        return pool.request(method, url, body=body)


def test_signed_urls(store):
    """A plain HTTP client without credentials reads and writes the very object, and no other."""
    answer = http("PUT", store.upload_url("incoming/1/Zürich & co"), b"weights" * 100_000)
    assert answer.status == 200
    assert get(store, "incoming/1/Zürich & co") == b"weights" * 100_000
    url = store.download_url("incoming/1/Zürich & co")
    assert http("GET", url).data == b"weights" * 100_000
    assert http("PUT", url, b"x").status == 403
    assert http("GET", url.replace("incoming/1", "incoming/2")).status == 403
    assert http("GET", url.partition("?")[0]).status == 403
    assert http("GET", store.download_url("none")).status == 404


def test_signed_urls_are_for_the_public_address(connect, server):
    """Which participants reach, and the coordinator perhaps not."""
    public = f"http://localhost:{server.port}"
    store = connect(public_endpoint=public, url_lifetime_s=77)
    put(store, "1/global", b"x")
    url = store.download_url("1/global")
    assert url.startswith(public)
    assert "X-Amz-Expires=77" in urlsplit(url).query
    assert http("GET", url).data == b"x"


def test_signed_urls_expire(connect):
    """The lifetime may be short; the server looks at its own clock."""
    store = connect()
    put(store, "1/global", b"x")
    store.bucket._url_lifetime_s = 1  # less than may be configured
    url = store.download_url("1/global")
    wait_until(lambda: http("GET", url).status == 403)


@pytest.mark.parametrize("part", [5 * MIB, 128 * MIB], ids=["in-parts", "whole"])
def test_copy(store, part):
    """In the place of what was there, whatever its size; an object without a source is none."""
    store.requests.sizes = Sizes(copy_part=part)
    for data in (b"", b"small", os.urandom(11 * MIB)):
        put(store, "incoming/1/a b%", data, overwrite=True)
        store.copy("incoming/1/a b%", "1/a b%", len(data))
        assert get(store, "1/a b%") == data
    with pytest.raises(KeyNotFound, match="under 'none'"):
        store.copy("none", "1/b", 1)
    assert sorted(store.keys()) == ["1/a b%", "incoming/1/a b%"]


@pytest.mark.parametrize("size", [0, 999, 1001])
def test_object_of_another_size_is_not_copied(store, size):
    """The holder of the URL may write any amount. The object that was there before stays."""
    put(store, "incoming/1/a", b"x" * 1000)
    put(store, "1/a", b"before")
    assert PrefixedAccess(store, "incoming").copy("1/a", "1/b", size) == 1000
    assert get(store, "1/a") == b"before"
    assert sorted(store.keys()) == ["1/a", "incoming/1/a"]


@pytest.mark.parametrize("part", [5 * MIB, 128 * MIB], ids=["in-parts", "whole"])
def test_a_source_that_changes_is_not_copied(store, client, bucket, monkeypatch, part):
    """The holder of the URL may write at any time: a copy is of one object, or there is none."""
    store.requests.sizes = Sizes(copy_part=part)
    put(store, "incoming/1/a", b"old" * 2 * MIB)
    head = S3Store._head

    def head_and_change(self: S3Store, *args: Any) -> Any:
        found = head(self, *args)
        client.put_object(Bucket=bucket, Key="incoming/1/a", Body=b"new" * 2 * MIB)
        return found

    monkeypatch.setattr(S3Store, "_head", head_and_change)
    with pytest.raises(StoreUnavailable, match="'incoming/1/a' were"):
        store.copy("incoming/1/a", "1/a", 6 * MIB)
    assert list(store.keys("1/")) == []
    assert uploads(client, bucket) == []


# --- the end ---


def test_close_fails_requests_that_have_not_begun(store, client, bucket, monkeypatch):
    """Requests that are under way come to their end."""
    gate = threading.Event()
    begun = threading.Semaphore(0)
    put_one = store.bucket.put
    outcome = []

    def put_slowly(*args: Any) -> None:
        begun.release()
        assert gate.wait(60)
        put_one(*args)

    def put_all() -> None:
        try:
            store.put({f"1/{number}": b"x" for number in range(5 * NUM_THREADS)})
        except Exception as error:  # whatever it is, the test looks at it
            outcome.append(error)

    monkeypatch.setattr(store.bucket, "put", put_slowly)
    caller = threading.Thread(target=put_all, daemon=True)
    caller.start()
    for _ in range(NUM_THREADS):  # all threads have work now, and the rest waits
        assert begun.acquire(timeout=60)
    closer = threading.Thread(target=store.close, daemon=True)
    closer.start()
    wait_until(lambda: store.requests._closed)
    gate.set()
    for thread in (caller, closer):
        thread.join(60)
        assert not thread.is_alive()
    assert [type(error) for error in outcome] == [StoreUnavailable]
    assert "is being closed" in str(outcome[0])
    assert len(names(client, bucket)) == NUM_THREADS


def test_an_upload_meets_a_store_that_has_closed(store, tmp_path):
    """The next part of the upload is not sent, and no file stays open."""
    store.requests.sizes = Sizes(part=5 * MIB)
    upload = store.upload("1/a")
    upload.write(b"x" * 6 * MIB)
    store.close()
    with pytest.raises(StoreUnavailable, match="being closed"):
        upload.write(b"x" * 5 * MIB)
    upload.abort()
    assert open_files(tmp_path / "spool") == []
