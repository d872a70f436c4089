"""Weights straight from and to a store, against a real HTTP server."""

import logging
import ssl
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from integration.participant.scripted import PATIENCE_S
from integration.participant.store import (
    SECRET,
    ScriptedStore,
    break_off,
    hang,
    hang_after,
    object_of,
    send,
    status,
)
from support.certificates import certified, make_authority, needs_openssl, write_folder
from support.waiting import beside
from support.wire import digest, npy
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import Certificates
from xain_foundation.security.tls_socket import PIECE_BYTES
from xain_participant.wire.direct import LEAST_BYTES, PAUSE_S, DirectTransfer, OfferFailed
from xain_participant.wire.download import Download
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.weights_port import PATH

MODEL = npy(np.arange(100_000, dtype=np.float32))
PART = len(MODEL) // 3
assert PART > LEAST_BYTES

MIB = 1 << 20


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def direct(clock: Clock) -> Iterator[DirectTransfer]:
    direct = _direct(clock=clock)
    yield direct
    direct.close()


def _direct(**changes: object) -> DirectTransfer:
    """Patient, so that only a test that wants it meets a time limit."""
    settings = {
        "connect_timeout_s": PATIENCE_S,
        "chunk_timeout_s": PATIENCE_S,
        "answer_timeout_s": PATIENCE_S,
    }
    return DirectTransfer(**{**settings, **changes})


def download_of(data: bytes = MODEL) -> Download:
    return Download(pb.WeightsRef(key="0/global", size_bytes=len(data), digest=digest(data)))


def fetch(direct: DirectTransfer, store: ScriptedStore) -> Download:
    """The download, after a success."""
    store.objects["/m"] = MODEL
    download = download_of()
    assert direct.fetch(store.url("/m"), download)
    assert npy(download.vector()) == MODEL
    return download


def failure(call: Callable[[], object]) -> OfferFailed:
    with pytest.raises(OfferFailed) as caught:
        call()
    return caught.value


def unfetched(direct: DirectTransfer, url: str) -> OfferFailed:
    return failure(lambda: direct.fetch(url, download_of()))


def use(method: str, direct: DirectTransfer, url: str) -> bool:
    if method == "GET":
        return direct.fetch(url, download_of())
    return direct.put(url, parts()) is not None


def parts(data: bytes = MODEL) -> tuple[memoryview, memoryview]:
    return memoryview(data)[:128], memoryview(data)[128:]


# --- down ---


def test_a_model_is_fetched(direct, store):
    fetch(direct, store)
    assert store.calls == [("GET", "/m", "")]
    assert store.headers[0]["Accept-Encoding"] == "identity"


def test_a_fetch_goes_on_where_it_broke_off(direct, store):
    store.faults.extend([break_off(PART), break_off(PART)])
    fetch(direct, store)
    assert [asked for _, _, asked in store.calls] == ["", f"bytes={PART}-", f"bytes={2 * PART}-"]


def test_server_without_ranges_is_left(direct, store):
    """Another way goes on where it broke off."""
    store.objects["/m"] = MODEL
    store.knows_ranges = False
    store.faults.append(break_off(PART))
    download = download_of()
    failed = failure(lambda: direct.fetch(store.url("/m"), download))
    assert failed.reason == "status 200"
    assert download.received == PART


def test_a_fetch_that_brings_nothing_more_ends(direct, store):
    """Attempts of a few bytes each count as nothing too: they would go on without end."""
    store.objects["/m"] = MODEL
    store.faults.extend([break_off(PART), break_off(LEAST_BYTES // 2)])
    download = download_of()
    failed = failure(lambda: direct.fetch(store.url("/m"), download))
    assert failed.reason == "the connection was closed early"
    assert len(store.calls) == 2
    assert download.received == PART + LEAST_BYTES // 2, "another way can go on from here"


CHUNKED = "HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (status(403), "status 403"),
        (status(404), "status 404"),
        (status(500), "status 500"),
        (status(206), "status 206"),
        (status(302, Location="/m"), "status 302"),
        (object_of(MODEL[:-4] + b"1234"), "another digest than promised"),
        (object_of(MODEL[:-4]), f"an object of {len(MODEL) - 4} bytes instead of {len(MODEL)}"),
        (object_of(MODEL + b"1"), f"an object of {len(MODEL) + 1} bytes instead of {len(MODEL)}"),
        (send("HTTP/1.1 200 OK\n\n", MODEL + MODEL), "an object of unknown size"),
        (send(CHUNKED, b"zz\r\n"), "an object of unknown size"),
        (
            send("HTTP/1.1 200 OK\nContent-Encoding: gzip\n\n", MODEL),
            "an encoding that was not asked for",
        ),
        (send("220 mail.example.org\n"), "the connection failed (BadStatusLine)"),
        (send("HTTP/1.1 200 OK\nA: " + 70_000 * "b"), "the connection failed (LineTooLong)"),
        (send("HTTP/1.1 200 OK\n" + 200 * "a: b\n"), "the connection failed (HTTPException)"),
        (break_off(0), "the connection was closed early"),
    ],
)
def test_a_fetch_that_fails_says_why(direct, store, fault, reason):
    store.objects["/m"] = MODEL
    store.faults.append(fault)
    failed = unfetched(direct, store.url("/m"))
    assert (failed.method, failed.host, failed.reason) == ("GET", store.host, reason)
    assert len(store.calls) == 1, "there is another way, so it is not tried again"


@pytest.mark.parametrize(
    "said",
    [
        "",
        "nonsense",
        f"bytes 0-{len(MODEL) - 1}/{len(MODEL)}",
        f"bytes {PART}-{len(MODEL)}/{len(MODEL) + 1}",
    ],
)
def test_another_range_than_asked_for_is_not_taken(direct, store, said):
    store.objects["/m"] = MODEL
    length = len(MODEL) - PART
    head = f"HTTP/1.1 206 Partial Content\nContent-Length: {length}\nContent-Range: {said}\n\n"
    store.faults.extend([break_off(PART), send(head, MODEL[PART:])])
    failed = unfetched(direct, store.url("/m"))
    assert failed.reason == "another range than asked for"


def test_damaged_download_is_dropped(direct, store):
    """The download through the coordinator begins anew."""
    store.faults.append(object_of(bytes(len(MODEL))))
    download = download_of()
    failure(lambda: direct.fetch(store.url("/m"), download))
    assert download.received == 0
    download.add(MODEL)
    assert npy(download.vector()) == MODEL


@pytest.mark.parametrize("fault", [hang, hang_after(PART)])
def test_a_server_that_hangs_is_left(store, fault):
    store.objects["/m"] = MODEL
    store.faults.append(fault)
    direct = _direct(chunk_timeout_s=0.2)
    failed = unfetched(direct, store.url("/m"))
    assert failed.reason == "timed out"
    assert len(store.calls) == 1


def test_a_server_that_drips_is_left(store):
    """Byte by byte, each in time, it would hold us for hours."""

    def drip(handler: object) -> None:
        send(f"HTTP/1.1 200 OK\nContent-Length: {len(MODEL)}\n\n")(handler)
        for byte in MODEL:
            if store.closing.wait(0.02):
                return
            handler.wfile.write(bytes([byte]))

    store.faults.append(drip)
    direct = _direct(chunk_timeout_s=0.5)
    failed = unfetched(direct, store.url("/m"))
    assert failed.reason == "timed out"


# --- up ---


def test_an_update_is_put(direct, store):
    assert direct.put(store.url("/incoming/0/ward-7"), parts()) is not None
    assert store.objects["/incoming/0/ward-7"] == MODEL
    (headers,) = store.headers
    assert headers["Content-Length"] == str(len(MODEL))
    assert "Content-Type" not in headers, "the signature might have to cover it"


def test_a_put_that_breaks_off_begins_again(direct, store):
    store.faults.append(break_off(PART))
    assert direct.put(store.url("/u"), parts()) is not None
    assert store.objects == {"/u": MODEL}
    assert len(store.calls) == 2


@pytest.mark.parametrize("code", [302, 307, 403, 411, 500, 503])
def test_a_put_that_is_refused_says_why(direct, store, code):
    """A redirect is not followed: it would carry the update elsewhere."""

    def refuse(handler: object) -> None:
        break_off(len(MODEL))(handler)
        status(code, Location="/elsewhere")(handler)

    store.faults.append(refuse)
    failed = failure(lambda: direct.put(store.url("/u"), parts()))
    assert (failed.method, failed.host, failed.reason) == ("PUT", store.host, f"status {code}")
    assert len(store.calls) == 1


def test_an_answer_in_mid_upload_counts(direct, store):
    """A store that refuses may stop reading; why, it has said before it hung up."""

    store.faults.append(status(403))
    large = memoryview(bytes(64 * MIB))  # more than the kernel takes at once
    failed = failure(lambda: direct.put(store.url("/u"), (large,)))
    assert failed.reason == "status 403"
    assert len(store.calls) == 1


@pytest.mark.parametrize("fault", [hang, hang_after(10)])
def test_a_put_that_is_not_answered_is_left(store, fault):
    store.faults.append(fault)
    direct = _direct(answer_timeout_s=0.2)
    failed = failure(lambda: direct.put(store.url("/u"), (memoryview(b"0123456789"),)))
    assert failed.reason == "timed out"
    assert len(store.calls) == 1


def test_a_put_that_is_not_read_is_left(store):
    store.faults.append(hang)
    direct = _direct(chunk_timeout_s=0.2)
    large = memoryview(bytes(64 * MIB))
    failed = failure(lambda: direct.put(store.url("/u"), (large,)))
    assert failed.reason == "timed out"


# --- which offers are taken ---


@pytest.mark.parametrize(
    "url",
    [
        "",
        "file:///etc/passwd?a",
        "ftp://host/x",
        "http:///x",
        "http://[::1/x",
        "http://user:{}@host/x",
        "http://host:99999999/x",
        "http://host/x y",
        "http://host/\r\nHost: other",
        "http://höst/x",
        "host/x",
    ],
)
def test_only_a_plain_http_url_is_an_offer(direct, url):
    failed = unfetched(direct, url.format(SECRET))
    assert "URL" in failed.reason
    assert failed.host == ""


def test_server_that_is_away_is_a_failure(direct, store):
    store.stop()
    failed = unfetched(direct, store.url("/m"))
    assert failed.reason == "connection refused"


def test_a_host_that_failed_is_left_alone_for_a_while(direct, store, clock):
    """No storm of retries, and no host is given up for ever."""
    store.faults.append(status(403))
    assert not unfetched(direct, store.url("/m")).again
    clock.now = PAUSE_S - 1
    assert not direct.fetch(store.url("/other"), download_of())
    assert len(store.calls) == 1
    assert direct.put(store.url("/u"), parts()) is not None, (
        "putting fails for other reasons than fetching"
    )
    clock.now = PAUSE_S
    store.faults.append(status(403))
    assert unfetched(direct, store.url("/m")).again
    clock.now *= 2
    store.faults.append(status(500))
    assert not unfetched(direct, store.url("/m")).again
    clock.now *= 2
    fetch(direct, store)
    store.faults.append(status(500))
    assert not unfetched(direct, store.url("/m")).again


# --- the end ---


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_closing_ends_a_transfer_at_once(direct, store, method):
    """A participant that stops does not wait for the time limits of a connection that hangs."""
    store.objects["/m"] = MODEL
    store.faults.append(hang_after(PART))
    ended = []

    def transfer() -> None:
        ended.append(failure(lambda: use(method, direct, store.url("/m"))))

    with beside(transfer):
        store.wait_until(lambda: store.methods == [method])
        direct.close()
    assert len(ended) == 1
    assert len(store.calls) == 1


def test_closed_transfer_begins_nothing(direct, store):
    direct.close()
    failed = unfetched(direct, store.url("/m"))
    assert failed.reason == "the client is closed"
    assert store.calls == []


# --- secrets ---


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize(
    "fault",
    [
        status(403),
        status(500),
        status(302, Location=f"/x?{SECRET}"),
        break_off(0),
        break_off(PART),
        hang,
        send(f"HTTP/1.1 {SECRET}\n"),
        send("HTTP/1.1 403 No\nno header at all\n\n"),
        send(f"HTTP/1.1 403 {SECRET}\n: {SECRET}\n\n"),
    ],
)
def test_no_url_gets_out(store, caplog, method, fault):
    """No error, traceback, cause or log has the URL."""
    caplog.set_level(logging.DEBUG)
    store.objects["/m"] = MODEL
    store.faults.extend([fault, fault, status(500)])
    direct = _direct(chunk_timeout_s=0.2, answer_timeout_s=0.2)
    url = store.url("/m")
    failed = failure(lambda: use(method, direct, url))
    assert failed.__context__ is None
    assert failed.__cause__ is None
    shown = "".join(traceback.format_exception(failed)) + repr(failed) + repr(vars(failed))
    assert SECRET not in shown + caplog.text


# --- proxies and TLS ---


def test_proxy_sees_no_url_of_a_weights_port(direct, store, monkeypatch):
    """The URL is a capability, and a proxy may note it: the proxy is asked to connect only."""
    monkeypatch.setenv("http_proxy", f"http://user:p%40ss@{store.host}")
    store.faults.append(status(403))
    failed = unfetched(direct, f"http://port.invalid:41000{PATH}{SECRET}")
    assert "proxy" in failed.reason
    assert store.calls == [("CONNECT", "port.invalid:41000", "")]
    assert store.headers[0]["Proxy-Authorization"] == "Basic dXNlcjpwQHNz"


@pytest.fixture
def tls_store(tmp_path: Path, store: ScriptedStore) -> Iterator[ScriptedStore]:
    folder = certified(tmp_path / "tls")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    tls_store = ScriptedStore(context)
    yield tls_store
    tls_store.stop()


@needs_openssl
def test_a_certificate_without_a_known_authority_is_not_accepted(direct, tls_store):
    failed = failure(lambda: direct.put(tls_store.url("/u"), parts()))
    assert failed.reason.startswith("its certificate is not accepted: ")
    assert tls_store.calls == []


def test_store_by_the_authority_of_the_coordinator_is_trusted(tmp_path):
    """A store whose certificate the session's authority has signed needs no setting."""
    authority = make_authority()
    own = Certificates(write_folder(tmp_path / "own", authority, Role.PARTICIPANT, "a"))
    folder = write_folder(tmp_path / "store", authority, Role.NODE, "store")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    store, direct = ScriptedStore(context), _direct(certificates=own)
    try:
        fetch(direct, store)
    finally:
        direct.close()
        store.stop()


@needs_openssl
def test_transfers_are_encrypted(direct, tls_store, tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "tls" / "ca.crt"))
    tls_store.faults.append(break_off(PART))
    fetch(direct, tls_store)
    told = []
    update = npy(np.arange(PIECE_BYTES, dtype=np.float32))
    assert direct.put(tls_store.url("/u"), parts(update), told.append) is not None
    assert tls_store.objects["/u"] == update
    assert len(told) > len(update) / PIECE_BYTES > 1
