"""TLS on a socket by way of memory."""

import io
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from support.certificates import make_authority, write_folder
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import CERTIFICATE, Certificates
from xain_foundation.security.tls_socket import TlsSocket

DATA = Random(3).randbytes(3 << 20)
PATIENCE_S = 60.0
Pair = tuple[TlsSocket, TlsSocket]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    authority = make_authority()
    return (
        write_folder(tmp_path / "server", authority, Role.COORDINATOR, "coordinator"),
        write_folder(tmp_path / "client", authority, Role.PARTICIPANT, "a"),
    )


@pytest.fixture
def pair(folders: tuple[Path, Path]) -> Iterator[Pair]:
    """A server's socket and a client's, with small buffers, after their handshake."""
    accepts, connects = Certificates(folders[0]).accepts, Certificates(folders[1]).connects
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        raw = socket.create_connection(listener.getsockname(), timeout=PATIENCE_S)
        accepted, _ = listener.accept()
        for each in (raw, accepted):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        accepted.settimeout(PATIENCE_S)
        server = opened.enter_context(TlsSocket(accepted, accepts))
        client = opened.enter_context(TlsSocket(raw, connects, "localhost"))
        shaking = threading.Thread(target=server.handshake)
        shaking.start()
        client.handshake()
        shaking.join()
        yield server, client


def receive(sock: TlsSocket, num_bytes: int) -> bytes:
    """Receive by a file of the socket, as http.client does."""
    with sock.makefile("rb") as file:
        return file.read(num_bytes)


def test_both_sides_see_the_other_s_certificate(pair, folders):
    server, client = pair
    assert server.certificate() == (folders[1] / CERTIFICATE).read_bytes()
    assert client.certificate() == (folders[0] / CERTIFICATE).read_bytes()


def test_send_that_would_wait_is_repeated(pair):
    """The peer gets each byte once, also those that were encrypted and did not fit."""
    server, client = pair
    server.setblocking(False)
    received = []
    at, waited = 0, 0
    receiving = threading.Thread(target=lambda: received.append(receive(client, len(DATA))))
    while at < len(DATA):
        try:
            at += server.send(memoryview(DATA)[at:])
            assert not server.owed
        except BlockingIOError:
            assert server.owed
            assert 0 <= server.num_passed < server.owed
            waited += 1
            if waited == 1:
                receiving.start()
            server.setblocking(True)
            server.settimeout(0.001)  # a poll: the send is repeated until it has ended
        except TimeoutError:
            pass
    receiving.join()
    assert received == [DATA]
    assert waited


def test_bytes_looked_at_are_received_later(pair):
    server, client = pair
    server.sendall(b"HTTP/")
    threading.Timer(0.01, server.sendall, [b"1.1 100 and more"]).start()
    assert client.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 100"
    assert client.recv(4) == b"HTTP"
    assert receive(client, 17) == b"/1.1 100 and more"
    server.shutdown(socket.SHUT_WR)
    assert client.recv(12, socket.MSG_PEEK) == b""
    assert client.recv(1) == b""


def test_peer_that_hangs_up_without_a_word_has_ended(pair):
    server, client = pair
    server.sendall(b"x")
    server.close()
    assert client.recv(1) == b"x"
    assert client.recv(1) == b""


def test_bytes_never_pass_by_the_encryption(pair):
    for call in (
        lambda: pair[0].sendmsg([b"x"]),
        lambda: pair[0].sendto(b"x", ("127.0.0.1", 1)),
        lambda: pair[0].sendfile(io.BytesIO(b"x")),
        lambda: pair[0].recvmsg(1),
        pair[0].dup,
    ):
        with pytest.raises(NotImplementedError):
            call()
