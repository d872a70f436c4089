"""Channels of gRPC, and why a call reaches nobody."""

import os
import re
import socket
import ssl
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from xain_foundation.fields import join_host_port
from xain_foundation.proxies import Proxy, proxy_for

if TYPE_CHECKING:
    import grpc

LOOK_S: Final = 2.0
_ADDRESS: Final = re.compile(r"(\[[^\]/]+\]|[^\[\]/:]+):([0-9]{1,5})")
# Not of "dns:50051", where it is a host.
_SCHEME: Final = re.compile(r"^(dns|ipv4|ipv6):(//[^/]*/)?(?=.*:)")
_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS: Final = 4  # type of the first frame of every HTTP/2 server
_MAX_LINE: Final = 4096


def open_channel(
    address: str,
    options: Iterable[tuple[str, Any]] = (),
    credentials: "grpc.ChannelCredentials | None" = None,
) -> "grpc.Channel":
    """Open a channel, through the proxy of the environment or not as proxies.py says.

    address: "HOST:PORT", or any target of gRPC with a scheme. credentials: without them all goes in
        the clear.
    """
    import grpc

    target, given = target_of(address), (*options, *_proxy_options(address))
    if credentials is None:
        return grpc.insecure_channel(target, given)
    return grpc.secure_channel(target, credentials, given)


def target_of(address: str) -> str:
    """The target for gRPC. Without a scheme a host called `dns`, `unix` or `ipv4` would be one."""
    return f"dns:///{address}" if _split(address) is not None else address


def proxy_to(address: str) -> str:
    """The proxy on the way to "HOST:PORT", for people; "none" without one."""
    return str(_proxy(address) or "none")


def _split(address: str) -> tuple[str, int] | None:
    found = _ADDRESS.fullmatch(address)
    return None if found is None else (found[1].strip("[]"), int(found[2]))


def _proxy(address: str) -> Proxy | None:
    at = _split(_SCHEME.sub("", address))
    return None if at is None else proxy_for(*at)


def _proxy_options(address: str) -> tuple[tuple[str, Any], ...]:
    proxy = _proxy(address)
    return (("grpc.enable_http_proxy", 0),) if proxy is None else (("grpc.http_proxy", proxy.url),)


def why_unreachable(address: str, *, is_encrypted: bool = False, timeout_s: float = LOOK_S) -> str:
    """Look why calls to "HOST:PORT" reach no gRPC server. Returns the end of a sentence; empty if a
    server answers.

    is_encrypted: the calls use TLS.
    """
    # Not by gRPC's own words: they change, and name neither the proxy nor what listens there.
    at = _split(address)
    if at is None:
        return ""
    proxy = proxy_for(*at)
    if proxy is not None and not proxy.host:
        return f"the proxy of {proxy}"
    host, port = at if proxy is None else (proxy.host, proxy.port)
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            if proxy is not None and (refused := _connect_through(connection, proxy, *at)):
                return f"the proxy {proxy} refuses: {refused}"
            return _why_no_call(connection, is_encrypted)
    except (OSError, UnicodeError) as error:  # the latter for an impossible name
        subject = "" if proxy is None else f"the proxy {proxy} cannot be reached: "
        return f"{subject}{_reason(error, host, timeout_s)}"


def _connect_through(connection: socket.socket, proxy: Proxy, host: str, port: int) -> str:
    """Ask a proxy for a connection. Returns its refusal."""
    to = join_host_port(host, port)
    headers = "".join(f"{name}: {value}\r\n" for name, value in proxy.headers.items())
    connection.sendall(f"CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n{headers}\r\n".encode())
    head = b""
    # A byte at a time: what follows is of the host behind it.
    while not head.endswith(b"\r\n\r\n") and len(head) < _MAX_LINE:
        byte = connection.recv(1)
        if not byte:
            return "it closes the connection"
        head += byte
    status = head.split(b"\r\n", 1)[0].decode("latin-1")
    found = re.fullmatch(r"HTTP/1\.[01] ([0-9]{3})( .*)?", status)
    if found is None:
        return "it is no HTTP proxy"
    text = "".join(letter for letter in status.partition(" ")[2] if letter.isprintable())
    return "" if found[1] == "200" else text


def _why_no_call(connection: socket.socket, is_encrypted: bool) -> str:
    """Say what answers on a connection instead of a gRPC server that takes our calls."""
    if is_encrypted:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            context.wrap_socket(connection).close()
        except ssl.SSLError:
            return "it does not speak TLS as we do"
        # Whether it takes our certificate shows only in a call.
        return "it speaks TLS, and either is slow or does not accept a certificate"
    connection.sendall(_HELLO)
    try:
        answer = connection.recv(64)
    except TimeoutError:
        return "it takes the connection and says nothing"
    except ConnectionError:
        answer = b""
    if len(answer) > 3 and answer[3] == _SETTINGS:
        return ""
    if answer.startswith((b"HTTP/", b"<")):
        return "it speaks HTTP and no gRPC: is it another port?"
    if answer.startswith(b"\x15\x03"):
        return "it speaks TLS, and we do not"
    if not answer:
        return "it closes the connection: it speaks TLS, or no gRPC"
    return "it speaks no gRPC"


def _reason(error: Exception, host: str, timeout_s: float) -> str:
    match error:
        case socket.gaierror() | UnicodeError():
            return f"the name {host} is not known"
        case ConnectionRefusedError():
            return "connection refused"
        case TimeoutError():
            return f"no connection within {timeout_s:g} s"
        case OSError(errno=int() as number):
            return os.strerror(number)
        case _:
            return type(error).__name__
