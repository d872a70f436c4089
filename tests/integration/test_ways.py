"""The way to a gRPC server: hosts of any name, proxies of the environment, and why none answers."""

import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from support import grpc_servers
from support.certificates import make_authority, write_folder
from support.connect_proxy import ConnectProxy
from support.waiting import beside
from xain_foundation.net.channels import open_channel, proxy_to, why_unreachable
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import Certificates
from xain_participant.wire.direct import DirectTransfer, OfferFailed
from xain_participant.wire.download import Download
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.weights_port import PATH

PATIENCE_S = 60.0
pytestmark = pytest.mark.usefixtures("without_proxies")


def serving(**options: Any) -> AbstractContextManager[int]:
    """A gRPC server with health checks; its port."""
    server = grpc.server(ThreadPoolExecutor(4))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    return grpc_servers.serving(server, **options)


def is_served(address: str) -> bool:
    """Whether a call arrives."""
    with open_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="x")
        call = stub.Check.future(request, timeout=PATIENCE_S)
        return call.code() is grpc.StatusCode.NOT_FOUND  # the server's own answer


@pytest.mark.parametrize("host", ["dns", "unix", "ipv4", "ipv6", "xds", "fleet.invalid"])
def test_host_of_any_name_is_reached(monkeypatch, host):
    """gRPC takes some names before a colon for the scheme of a target."""
    with serving() as port, ConnectProxy() as proxy:
        monkeypatch.setenv("https_proxy", f"http://{proxy.address}")
        assert is_served(f"{host}:{port}")
        assert proxy.asked == [f"{host}:{port}"]


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_address_of_ipv6_is_reached():
    with serving(host="[::1]") as port:
        assert is_served(f"[::1]:{port}")


def test_target_with_a_scheme_is_left_as_it_is():
    with serving() as port:
        for scheme in ("dns:///", "dns:", "ipv4:"):
            assert is_served(f"{scheme}127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("environ", "is_asked"),
    [
        ({"http_proxy": "PROXY"}, True),
        ({"HTTP_PROXY": "PROXY"}, True),
        ({"https_proxy": "PROXY", "http_proxy": "http://127.0.0.1:1"}, True),
        ({"HTTPS_PROXY": "PROXY"}, True),
        ({"http_proxy": "PROXY", "no_proxy": "*"}, False),
        ({"http_proxy": "PROXY", "NO_PROXY": "invalid"}, False),
        ({"http_proxy": "PROXY", "no_proxy": ".invalid"}, False),
        ({"http_proxy": "PROXY", "no_proxy": "other.example"}, True),
    ],
)
def test_calls_and_weights_take_the_same_way(monkeypatch, environ, *, is_asked):
    with serving() as port, ConnectProxy() as proxy:
        for name, value in environ.items():
            monkeypatch.setenv(name, value.replace("PROXY", f"http://{proxy.address}"))
        assert is_served(f"fleet.invalid:{port}") == is_asked
        assert (proxy_to(f"fleet.invalid:{port}") != "none") == is_asked
        of_calls = set(proxy.asked)
        proxy.asked.clear()
        download = Download(pb.WeightsRef(key="0/global", size_bytes=1))
        with pytest.raises(OfferFailed):
            DirectTransfer().fetch(f"http://fleet.invalid:{port}{PATH}", download)
        assert of_calls == set(proxy.asked) == ({f"fleet.invalid:{port}"} if is_asked else set())


# --- why nobody answers ---


@contextmanager
def accepting(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """A server that handles each connection with a function; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            try:
                while True:
                    connection = listening.accept()[0]
                    open_.append(connection)
                    answer(connection)
            except OSError:
                pass

        open_ = []
        with beside(accept):
            yield listening.getsockname()[1]
            listening.shutdown(socket.SHUT_RDWR)
        for connection in open_:
            connection.close()


@contextmanager
def http_server() -> Iterator[int]:
    with (
        http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler
        ) as server,
        beside(server.serve_forever),
    ):
        yield server.server_address[1]
        server.shutdown()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_server_that_answers_has_no_reason():
    with serving() as port:
        assert why_unreachable(f"127.0.0.1:{port}") == ""


def test_closed_port_refuses():
    assert why_unreachable(f"127.0.0.1:{closed_port()}") == "connection refused"


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (socket.EAI_NONAME, "the name fleet.invalid is not known"),
        (socket.EAI_AGAIN, "the name service cannot answer for fleet.invalid now"),
    ],
)
def test_unknown_name_is_told_from_a_name_service_that_is_away(monkeypatch, number, why):
    def getaddrinfo(*_: object, **__: object) -> None:
        raise socket.gaierror(number, "as the name service says")  # not that of this machine

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert why_unreachable("fleet.invalid:1") == why


def test_impossible_name_is_not_known():
    assert "is not known" in why_unreachable(f"{'a' * 100}:1")


def test_http_server_is_no_grpc():
    with http_server() as port:
        assert "speaks HTTP" in why_unreachable(f"127.0.0.1:{port}")


def test_silent_server_is_said_to_be_silent():
    with accepting(lambda connection: None) as port:
        assert "says nothing" in why_unreachable(f"127.0.0.1:{port}", timeout_s=0.2)


def test_server_that_hangs_up_is_said_to():
    with accepting(lambda connection: connection.shutdown(socket.SHUT_RDWR)) as port:
        assert "closes the connection" in why_unreachable(f"127.0.0.1:{port}")


def test_tls_and_none_do_not_meet(tmp_path):
    authority = make_authority()
    own = Certificates(write_folder(tmp_path / "own", authority, Role.NODE, "n"))
    other = Certificates(write_folder(tmp_path / "other", make_authority(), Role.NODE, "n"))
    with serving(credentials=own.of_server()) as port:
        assert "TLS" in why_unreachable(f"127.0.0.1:{port}")
        assert why_unreachable(f"127.0.0.1:{port}", tls=own) == ""
        assert "another key" in why_unreachable(f"127.0.0.1:{port}", tls=other)
    hosts = ["c.example.org"]
    elsewhere = write_folder(tmp_path / "c", authority, Role.COORDINATOR, "c", hosts=hosts)
    with serving(credentials=Certificates(elsewhere).of_server()) as port:
        why = why_unreachable(f"127.0.0.1:{port}", tls=own)
        assert "is for c.example.org, and not for 127.0.0.1" in why
    with serving() as port:
        assert "TLS" in why_unreachable(f"127.0.0.1:{port}", tls=own)


def test_dead_proxy_is_named(monkeypatch):
    dead = f"http://127.0.0.1:{closed_port()}"
    monkeypatch.setenv("HTTP_PROXY", dead.replace("//", "//user:secret@"))
    assert why_unreachable("fleet.invalid:1") == (
        f"the proxy {dead} (HTTP_PROXY) cannot be reached: connection refused"
    )


def test_proxy_that_refuses_is_named(monkeypatch):
    with ConnectProxy(status="403 Forbidden") as proxy:
        monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
        assert why_unreachable("fleet.invalid:1") == (
            f"the proxy http://{proxy.address} (http_proxy) refuses: 403 Forbidden"
        )


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("HTTP/1.1 502 Bad Gateway", "does not reach fleet.invalid:1: 502 Bad Gateway"),
        ("HTTP/1.1 503 Service Unavailable", "does not reach fleet.invalid:1: 503 Serv"),
        ("HTTP/1.1 407 Proxy Authentication Required", "refuses: 407 Proxy Authentication Re"),
        ("SSH-2.0-OpenSSH_9.2", "is no HTTP proxy"),
        ("", "does not answer whether it reaches fleet.invalid:1"),
    ],
)
def test_proxy_that_is_reached_is_not_said_to_be_away(monkeypatch, answer, why):
    """A proxy that refuses is told from one that does not reach the host behind it."""
    said = f"{answer}\r\n\r\n".encode() if answer else b""
    with accepting(lambda connection: connection.sendall(said)) as port:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        found = why_unreachable("fleet.invalid:1", timeout_s=PATIENCE_S if answer else 1.0)
    assert found.startswith(f"the proxy http://127.0.0.1:{port} (http_proxy) {why}")


def test_server_that_hangs_up_behind_a_proxy_is_told_from_the_proxy(monkeypatch):
    with ConnectProxy() as proxy:
        monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
        assert why_unreachable(f"fleet.invalid:{closed_port()}", timeout_s=PATIENCE_S).startswith(
            f"behind the proxy http://{proxy.address} (http_proxy): it closes the connection"
        )


def test_name_service_that_never_answers_is_waited_for_no_longer_than_asked(monkeypatch):
    """getaddrinfo() itself knows no limit, and cannot be cancelled."""
    answers = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers.wait(PATIENCE_S) and [])
    try:
        why = why_unreachable("fleet.invalid:1", timeout_s=0.2)
        assert not answers.is_set()
    finally:
        answers.set()
    assert why == "the name service has not answered for fleet.invalid within 0.2 s"


def test_server_behind_a_proxy_has_no_reason(monkeypatch):
    with serving() as port, ConnectProxy() as proxy:
        monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
        assert why_unreachable(f"fleet.invalid:{port}") == ""


def test_proxy_that_is_no_http_proxy_is_not_gone_around(monkeypatch):
    monkeypatch.setenv("https_proxy", "socks5://127.0.0.1:1")
    assert "https_proxy is not an http:// one" in why_unreachable("fleet.invalid:1")
    assert not is_served("fleet.invalid:1")
