"""The weights port with certificates, over real sockets."""

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from support.certificates import issued, make_authority, write_folder
from support.closed_port import ClosedPort
from support.transfers import DATA, PATIENCE_S, VECTOR, until
from support.wire import digest, npy
from xain_foundation.security import tls
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import Certificates
from xain_foundation.security.tls_socket import TlsSocket
from xain_participant.wire.direct import DirectTransfer, OfferFailed
from xain_participant.wire.download import Download
from xain_wire.fl import coordinator_pb2 as pb

UPDATE = npy(VECTOR + 1)


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[ClosedPort]:
    port = ClosedPort(tmp_path, DATA)
    # Bytes of a model: more than fit into the buffers of the systems at once.
    port.port._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    port.start()
    yield port
    await port.stop()


def download() -> Download:
    return Download(pb.WeightsRef(key="0/global", size_bytes=len(DATA), digest=digest(DATA)))


async def fetched(transfer: DirectTransfer, url: str) -> bytes:
    one = download()
    assert await asyncio.to_thread(transfer.fetch, url, one)
    return npy(one.vector())


async def put(transfer: DirectTransfer, url: str) -> str | None:
    return await asyncio.to_thread(transfer.put, url, [memoryview(UPDATE)], digest=digest(UPDATE))


def connected(port: ClosedPort, holder: Certificates) -> TlsSocket:
    raw = socket.socket()
    raw.settimeout(PATIENCE_S)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    raw.connect(("127.0.0.1", port.port.port))
    sock = TlsSocket(raw, holder.connects, "127.0.0.1")
    sock.handshake()
    return sock


def asked(port: ClosedPort, method: str, name: str, **headers: str) -> bytes:
    path = port.url(method, name).partition("127.0.0.1")[2].partition("/")[2]
    lines = [f"{method} /{path} HTTP/1.1", "Host: x", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def answer(sock: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):
        while data := sock.recv(1 << 20):
            received += data
    return received


async def test_weights_go_down_and_up(port):
    """Bit for bit, and with the certificate of the participant that the URL is for."""
    with closing(DirectTransfer(certificates=port.holder("a"))) as transfer:
        url = port.url("GET", "a")
        assert url.startswith("https://")
        assert await fetched(transfer, url) == DATA
        key = await put(transfer, port.url("PUT", "a"))
        with port.store.open(key) as reader:
            assert reader.read(0, len(UPDATE)) == UPDATE
    assert not port.refused


async def test_every_byte_is_received_whatever_the_pieces(port):
    """Records that come in parts, and a body whose beginning comes with the head."""

    sock = await asyncio.to_thread(connected, port, port.holder("b"))
    with sock:
        vector = npy(VECTOR[:1000])
        head = asked(
            port,
            "PUT",
            "b",
            **{"Content-Length": str(len(vector)), "Xain-Digest": digest(vector).hex()},
        )
        sock.sendall(head + vector[:7])
        for at in range(7, len(vector), 991):
            sock.sendall(vector[at : at + 991])
        said = await asyncio.to_thread(answer, sock)
    assert said.startswith(b"HTTP/1.1 200"), said


async def test_participant_with_too_many_connections_is_refused_late(port):
    """Others are served meanwhile."""
    port.port.full_s = 1e6
    port.port._by_participant["b"] = port.port.max_per_participant
    with await asyncio.to_thread(connected, port, port.holder("b")) as sock:
        sock.sendall(asked(port, "GET", "b"))
        callers, idle = port.port._callers, port.port._idle
        await until(lambda: bool(callers) and not callers.keys() - idle)
        with closing(DirectTransfer(certificates=port.holder("a"))) as transfer:
            assert await fetched(transfer, port.url("GET", "a")) == DATA
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)


async def refusal(port: ClosedPort, holder: Certificates, name: str) -> str:
    with closing(DirectTransfer(certificates=holder)) as transfer:
        with pytest.raises(OfferFailed) as caught:
            await fetched(transfer, port.url("GET", name))
        with pytest.raises(OfferFailed):
            await put(transfer, port.url("PUT", name))
    assert not port.uploads
    return caught.value.reason


async def test_url_of_another_participant_is_refused(port):
    """A URL that has leaked is of no use to those who have a certificate."""
    assert await refusal(port, port.holder("b"), "a") == "status 403"
    assert await refusal(port, port.holder("a", Role.OBSERVER), "a") == "status 403"
    await until(lambda: len(port.refused) == 4)
    peer, reason = port.refused[0]
    assert peer.startswith("ipv4:127.0.0.1:")
    assert "participant 'b'" in reason


async def test_revoked_certificate_is_refused(port):
    holder = port.holder("a")
    port.revoke(holder.own.serial)
    assert await refusal(port, holder, "a") == "status 403"


async def test_certificate_of_another_authority_ends_in_the_handshake(port, tmp_path):
    folder = write_folder(tmp_path / "stranger", make_authority(), Role.PARTICIPANT, "a")
    assert "certificate" in await refusal(port, Certificates(folder), "a"), "the server's is ours"
    (folder / tls.AUTHORITY).write_bytes(port.authority.certificate)
    context = ssl.create_default_context(cafile=folder / tls.AUTHORITY)
    for is_shown in (True, False):
        if is_shown:
            context.load_cert_chain(folder / tls.CERTIFICATE, folder / tls.KEY)
        else:
            context = ssl.create_default_context(cafile=folder / tls.AUTHORITY)
        with pytest.raises(OSError):  # noqa: PT011  # an alert, or a reset that was faster
            await asyncio.to_thread(_exchange, port, context)
    assert not port.uploads


def _exchange(port: ClosedPort, context: ssl.SSLContext) -> None:
    raw = socket.create_connection(("127.0.0.1", port.port.port), timeout=PATIENCE_S)
    with TlsSocket(raw, context, "127.0.0.1") as sock:
        sock.handshake()
        sock.sendall(asked(port, "GET", "a"))
        if not sock.recv(1):
            raise ConnectionError("closed")


async def test_plaintext_and_old_tls_get_no_answer(port):
    def plain() -> bytes:
        with socket.create_connection(("127.0.0.1", port.port.port), PATIENCE_S) as sock:
            sock.sendall(asked(port, "GET", "a"))
            return answer(sock)

    assert b"HTTP" not in await asyncio.to_thread(plain)
    context = ssl.create_default_context(cafile=port.certificates.folder / tls.AUTHORITY)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        await asyncio.to_thread(_exchange, port, context)


@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_revocation_ends_a_transfer(port, method):
    holder, other = port.holder("a"), port.holder("b")
    sock = await asyncio.to_thread(connected, port, holder)
    with sock:
        headers = {"Content-Length": str(len(DATA)), "Xain-Digest": digest(DATA).hex()}
        sock.sendall(asked(port, method, "a", **(headers if method == "PUT" else {})))
        if method == "PUT":
            sock.sendall(DATA[: 1 << 20])
            await until(lambda: port.uploads and port.uploads[0].offset)
        else:
            await asyncio.to_thread(sock.recv, 1000)
        (running,) = port.port._connections
        port.revoke(other.own.serial)
        port.revoke(holder.own.serial)
        await until(running.done)
        await asyncio.to_thread(answer, sock)
    if method == "PUT":
        await until(lambda: port.ended)
    assert running.cancelled()
    assert not port.port._callers


async def test_changed_certificates_count_for_the_next_connection(port, tmp_path):
    """A transfer under way goes on under the old ones."""
    holder = port.holder("a")
    sock = await asyncio.to_thread(connected, port, holder)
    with sock:
        sock.sendall(asked(port, "GET", "a"))
        first = await asyncio.to_thread(sock.recv, 1000)
        new = write_folder(tmp_path / "new", port.authority, Role.COORDINATOR, "coordinator")
        for name in tls.FILES:
            shutil.copy(new / name, port.certificates.folder / name)
        assert port.certificates.refresh()
        with closing(DirectTransfer(certificates=holder)) as transfer:
            assert await fetched(transfer, port.url("GET", "a")) == DATA
        other = await asyncio.to_thread(connected, port, holder)
        with other:
            assert other.certificate() == (new / tls.CERTIFICATE).read_bytes()
        rest = await asyncio.to_thread(answer, sock)
        assert (first + rest).partition(b"\r\n\r\n")[2] == DATA


async def test_silent_handshakes_end_with_the_time_of_a_head(port, monkeypatch):
    monkeypatch.setattr(port.port, "head_s", 0.2)
    with socket.create_connection(("127.0.0.1", port.port.port), PATIENCE_S) as sock:
        assert await asyncio.to_thread(answer, sock) is not None
    await until(lambda: not port.port._connections)


async def test_files_that_change_under_load_fail_no_transfer(port, tmp_path, monkeypatch):
    """Whole new certificates, half of one, junk, and a second authority beside the first."""
    monkeypatch.setattr(port.certificates, "look_s", 0.0)
    folder = port.certificates.folder
    second = make_authority()
    certificate, key = (folder / tls.CERTIFICATE).read_bytes(), (folder / tls.KEY).read_bytes()

    def exchange(number: int) -> None:
        match number % 4:
            case 0:
                new = issued(port.authority, Role.COORDINATOR, "coordinator")
                (folder / tls.CERTIFICATE).write_bytes(new[0])
                (folder / tls.KEY).write_bytes(new[1])
            case 1:
                (folder / tls.CERTIFICATE).write_bytes(certificate[:200])
            case 2:
                (folder / tls.KEY).write_bytes(b"junk")
            case 3:
                (folder / tls.AUTHORITY).write_bytes(
                    port.authority.certificate + second.certificate
                )
                (folder / tls.CERTIFICATE).write_bytes(certificate)
                (folder / tls.KEY).write_bytes(key)

    is_over = asyncio.Event()
    ended: list[str] = []

    async def load(name: str) -> None:
        with closing(DirectTransfer(certificates=port.holder(name))) as transfer:
            while not is_over.is_set():
                assert await fetched(transfer, port.url("GET", name)) == DATA
                ended.append(name)

    loads = [asyncio.create_task(load(name)) for name in ("a", "b")]
    for number in range(24):
        await asyncio.to_thread(exchange, number)
        # One of three has begun after the change.
        enough = len(ended) + 3
        await until(lambda: len(ended) >= enough or any(one.done() for one in loads))  # noqa: B023
    is_over.set()
    await asyncio.gather(*loads)
    assert {*ended} == {"a", "b"}
    assert port.certificates.refresh() or port.certificates.version
    assert (await asyncio.to_thread(shown, port)) == certificate


def shown(port: ClosedPort) -> bytes:
    with connected(port, port.holder("c")) as sock:
        return sock.certificate()
