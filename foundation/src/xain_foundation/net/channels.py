"""Channels of gRPC, and why a call reaches nobody."""

import os
import re
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from xain_foundation.net.proxies import Proxy, proxy_for
from xain_foundation.security import handshakes
from xain_foundation.security.handshakes import ANSWERS, Cause, Fault
from xain_foundation.settings.fields import REMEDY, join_host_port, require_private

if TYPE_CHECKING:
    import grpc

    from xain_foundation.security.tls import Certificates

LOOK_S: Final = 2.0
_ADDRESS: Final = re.compile(r"(\[[^\]/]+\]|[^\[\]/:]+):([0-9]{1,5})")
# Not of "dns:50051", where it is a host.
_SCHEME: Final = re.compile(r"^(dns|ipv4|ipv6):(//[^/]*/)?(?=.*:)")
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


def open_async_channel(address: str, options: Iterable[tuple[str, Any]] = ()) -> "grpc.aio.Channel":
    """Open a channel in the clear, as open_channel() does, for the event loop of this thread."""
    import grpc

    return grpc.aio.insecure_channel(
        target_of(address), options=(*options, *_proxy_options(address))
    )


def require_private_way(
    address: str, tls: "Certificates | None", *, insecure: bool, remedy: str = REMEDY
) -> None:
    """Refuse to call another machine in the clear; see require_private(). Raises ValueError."""
    if address.startswith("unix:"):
        return
    at = _split(_SCHEME.sub("", address))
    host = address if at is None else at[0]
    require_private(
        host, is_encrypted=tls is not None, insecure=insecure, connects=True, remedy=remedy
    )


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


def why_unreachable(
    address: str,
    *,
    tls: "Certificates | None" = None,
    node: str = "",
    timeout_s: float = LOOK_S,
) -> str:
    """Say why calls to an address reach no gRPC server; "" if one answers. See find_cause()."""
    return find_cause(address, tls=tls, node=node, timeout_s=timeout_s).text


def find_cause(
    address: str,
    *,
    tls: "Certificates | None" = None,
    node: str = "",
    timeout_s: float = LOOK_S,
) -> Cause:
    """Look why calls to "HOST:PORT" reach no gRPC server. Returns a cause without text if a server
    answers.

    tls: the certificates of the calls; None: they go in the clear. node: see CurrentChannel.
    timeout_s: for each step: the name, the connection, an answer.
    """
    # Not by gRPC's own words: they change, and name neither the proxy nor what listens there.
    at = _split(address)
    if at is None:
        return ANSWERS
    proxy = proxy_for(*at)
    if proxy is not None and not proxy.host:
        return Cause(f"the proxy of {proxy}")
    host = at[0] if proxy is None else proxy.host
    way = _Way(at, proxy, timeout_s)
    try:
        way.connect().close()
    except _ProxyRefuses as refuses:
        return Cause(f"the proxy {proxy} {refuses}")
    except (OSError, UnicodeError) as error:  # the latter for an impossible name
        subject = "" if proxy is None else f"the proxy {proxy} cannot be reached: "
        return Cause(f"{subject}{_why_not_connected(error, host, timeout_s)}")
    try:
        cause = _why_no_call(way, tls, node)
    except OSError as error:
        return Cause(_why_not_connected(error, host, timeout_s))
    if proxy is None or not cause:
        return cause
    return Cause(f"behind the proxy {proxy}: {cause.text}", cause.fault)


def connect(address: str, timeout_s: float) -> socket.socket:
    """A connection to "HOST:PORT" as gRPC makes it, through the proxy of the environment or not.

    timeout_s: for each step, and of the socket. Raises OSError, and UnicodeError.
    """
    at = _split(address)
    if at is None:
        raise OSError(f"{address} is no HOST:PORT")
    proxy = proxy_for(*at)
    if proxy is not None and not proxy.host:
        raise OSError(f"the proxy of {proxy}")
    return _Way(at, proxy, timeout_s).connect()


class _ProxyRefuses(OSError):
    """A proxy does not connect; the message says what it does instead."""


@dataclass(slots=True)
class _Way:
    """Connections to a host, through a proxy or not. timeout_s: for each step."""

    to: tuple[str, int]
    proxy: Proxy | None
    timeout_s: float
    addresses: "list[Any] | None" = None

    def connect(self) -> socket.socket:
        """Open a connection, through the proxy if there is one. Raises OSError, _ProxyRefuses among
        them, and UnicodeError."""
        proxy = self.proxy
        if self.addresses is None:
            host, port = self.to if proxy is None else (proxy.host, proxy.port)
            self.addresses = _addresses(host, port, self.timeout_s)
        connection = _connect(self.addresses, self.timeout_s)
        if proxy is not None and (why := _connect_through(connection, proxy, *self.to)):
            connection.close()
            raise _ProxyRefuses(why)
        return connection


def _addresses(host: str, port: int, timeout_s: float) -> list[Any]:
    """Addresses of a host, as getaddrinfo() returns them. Raises OSError, and UnicodeError."""
    answers: SimpleQueue[list[Any] | Exception] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:  # raised again
            answers.put(error)

    # getaddrinfo() has no limit and cannot be cancelled. No process waits for a daemon.
    threading.Thread(target=ask, name="resolve", daemon=True).start()
    try:
        found = answers.get(timeout=timeout_s)
    except Empty:
        raise OSError(
            f"the name service has not answered for {host} within {timeout_s:g} s"
        ) from None
    if isinstance(found, Exception):
        raise found
    return found


def _connect(addresses: Iterable[Any], timeout_s: float) -> socket.socket:
    """Connect to the first address that takes the connection. Raises the OSError of the last.

    timeout_s: for all addresses together.
    """
    deadline = time.monotonic() + timeout_s
    failed: OSError = TimeoutError()
    for family, kind, protocol, _, address in addresses:
        try:
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                connection.connect(address)
                connection.settimeout(timeout_s)
            except BaseException:  # no other code has the socket
                connection.close()
                raise
            return connection
        except OSError as error:
            failed = error
    raise failed


def _connect_through(connection: socket.socket, proxy: Proxy, host: str, port: int) -> str:
    """Ask a proxy for a connection. Returns what it does instead; empty if it connects."""
    to = join_host_port(host, port)
    headers = "".join(f"{name}: {value}\r\n" for name, value in proxy.headers.items())
    head = b""
    try:
        connection.sendall(f"CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n{headers}\r\n".encode())
        # A byte at a time: what follows is of the host behind it.
        while not head.endswith(b"\r\n\r\n") and len(head) < _MAX_LINE:
            byte = connection.recv(1)
            if not byte:
                return "closes the connection"
            head += byte
    except TimeoutError:
        return f"does not answer whether it reaches {to}"
    except OSError:
        return "closes the connection"
    status = head.split(b"\r\n", 1)[0].decode("latin-1")
    found = re.fullmatch(r"HTTP/1\.[01] ([0-9]{3})( .*)?", status)
    if found is None:
        return "is no HTTP proxy"
    text = "".join(letter for letter in status.partition(" ")[2] if letter.isprintable())
    match found[1][0]:
        case "2":
            return ""
        case "5":  # of what is behind it
            return f"does not reach {to}: {text}"
        case _:
            return f"refuses: {text}"


def _why_no_call(way: _Way, tls: "Certificates | None", node: str) -> Cause:
    """Say what answers at the end of a way instead of a gRPC server that takes our calls."""
    if tls is not None:
        return handshakes.why_refused(way.connect, way.to[0], tls, node)
    try:
        with way.connect() as connection:
            connection.sendall(handshakes.HELLO)
            answer = connection.recv(64)
    except TimeoutError:
        return Cause("it takes the connection and says nothing")
    except OSError:
        answer = b""
    if handshakes.is_http2(answer):
        return ANSWERS
    if answer.startswith((b"HTTP/", b"<")):
        return Cause("it speaks HTTP and no gRPC: is it another port?")
    if answer.startswith(b"\x15\x03") or (not answer and handshakes.speaks_tls(way.connect)):
        return Cause("it speaks TLS, and we do not", Fault.NEEDS_TLS)
    return Cause("it speaks no gRPC" if answer else "it closes the connection: it speaks no gRPC")


def _why_not_connected(error: Exception, host: str, timeout_s: float) -> str:
    """Say why a socket could not connect, from its OSError or UnicodeError."""
    match error:
        case socket.gaierror(errno=socket.EAI_AGAIN):
            return f"the name service cannot answer for {host} now"
        case socket.gaierror() | UnicodeError():
            return f"the name {host} is not known"
        case ConnectionRefusedError():
            return "connection refused"
        case TimeoutError():
            return f"no connection within {timeout_s:g} s"
        case OSError(errno=int() as number):
            return os.strerror(number)
        case OSError(args=(str(text),)):
            return text
        case _:
            return type(error).__name__
