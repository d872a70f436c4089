"""The weights port with certificates, over real sockets."""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from support.certificates import write_folder
from support.closed_port import ClosedPort
from support.transfers import DATA, PATIENCE_S, VECTOR
from support.waiting import until
from support.wire import digest, npy
from xain_foundation.security import tls
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import Certificates
from xain_foundation.security.tls_socket import TlsSocket
from xain_participant.wire.direct import DirectTransfer
from xain_participant.wire.download import Download
from xain_wire.fl import coordinator_pb2 as pb


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
