"""Transfer of weights by the URLs that the coordinator offers: of its weights port, or of the
object store.

Any failure of an offer is an OfferFailed, and the weights travel through the coordinator at once.

A URL works for everybody who has it, so it must not get into logs, errors or tracebacks.
That is why this is http.client: it writes no log, while urllib3 writes the whole URL into its own,
for every request and, as a warning, whenever a header is malformed. Exceptions that may contain a
URL end here, too: an OfferFailed has neither cause nor context.

- Redirects are not followed. A signed URL has no reason for one, and it would carry an update
  elsewhere.
- The weights port has a certificate of the coordinator's authority, and is shown ours. Stores'
  certificates are checked against the system's, and that authority; SSL_CERT_FILE names others.
- A proxy of the environment is used as for gRPC (xain_foundation/net/proxies.py): a network with
  one often has no other way out. It is asked to CONNECT and sees no URL, which it might log.
"""

import os
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPS_PORT, HTTPConnection, HTTPException, HTTPResponse
from typing import Literal, Self, TypeVar
from urllib.parse import urlsplit

from xain_foundation.net.proxies import Proxy, proxy_for
from xain_foundation.net.sockets import leave_unpaced, unacknowledged_bytes
from xain_foundation.security.tls import Certificates
from xain_foundation.security.tls_socket import TlsSocket
from xain_foundation.settings.fields import join_host_port
from xain_participant.sdk.sealed import Damaged
from xain_participant.wire.download import Download
from xain_wire.limits import LEAST_BYTES, SLOWEST_LINE_BYTES_PER_S, STALLED_S
from xain_wire.weights_port import DIGEST_HEADER, KEY_HEADER, OFFSET_HEADER, PATH

CHUNK_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5.0
# Time limit of LEAST_BYTES, so that a slow transfer may go on while bytes flow. Through a proxy
# they come in large steps; what is slower than STALLED_S allows the weights port ends before.
CHUNK_TIMEOUT_S = 2 * STALLED_S
# Time that the store has to make a whole upload durable, 60 s, and that the slowest line takes for
# 256 KiB: a proxy on the way may hold so much when its system has acknowledged the last byte.
ANSWER_TIMEOUT_S = 60.0 + (256 << 10) / SLOWEST_LINE_BYTES_PER_S
LOOK_S = 1.0  # between two looks at what the peer has acknowledged
# An upload that breaks off twice takes the other way.
NUM_PUTS = 2
# Time that the weights port has to say whether it wants an upload.
CONTINUE_TIMEOUT_S = 5.0
PEEK_S = 0.01  # between two looks at a word that has come in part

# A host that has failed is not tried again for this time, GET and PUT apart: they fail for
# different reasons, such as a URL to put to that expired during a long training. Behind a firewall
# that drops what it forbids an attempt costs CONNECT_TIMEOUT_S, and this keeps it below 2 % of the
# time; a firewall that is opened is noticed without a restart.
PAUSE_S = 300.0
# A weights port that refuses or breaks costs hardly any time, and is back with its coordinator.
PORT_PAUSE_S = 5.0
MAX_FAILURES_KEPT = 16

Method = Literal["GET", "PUT"]
_T = TypeVar("_T")

_TIMED_OUT = "timed out"
_CONTINUE = b"HTTP/1.1 100"
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-[0-9]{1,19}/([0-9]{1,19}|\*)")


class OfferFailed(Exception):
    """The store could not be used directly.

    host: with its port. reason: an HTTP status or words of our own, never a part of the URL.
    again: the same has happened to this host the last time.
    """

    def __init__(self, method: Method, host: str, reason: str, *, again: bool = False) -> None:
        super().__init__(f"{method} at {host or 'an unknown host'}: {reason}")
        self.method = method
        self.host = host
        self.reason = reason
        self.again = again


class DirectTransfer:
    """GETs and PUTs for one participant, in one thread; close() from any.

    certificates: for the weights port; None for a coordinator without.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        certificates: Certificates | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        chunk_timeout_s: float = CHUNK_TIMEOUT_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        continue_timeout_s: float = CONTINUE_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._certificates = certificates
        self._connect_timeout_s = connect_timeout_s
        self._chunk_timeout_s = chunk_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._continue_timeout_s = continue_timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        # The last failure of each method and host: why, and the time before which there is no other
        # attempt. The latest comes last.
        self._failures: dict[tuple[Method, str], tuple[str, float]] = {}
        self._socket: socket.socket | None = None  # of the transfer under way
        # For stores, with the authority that is trusted beside the system's.
        self._of_system: tuple[str, ssl.SSLContext] | None = None
        self.is_closed = False

    def close(self) -> None:
        """End the transfers under way; later ones fail at once. An attempt to connect ends by
        itself, after CONNECT_TIMEOUT_S at most for each of the host's addresses."""
        with self._lock:
            self.is_closed = True
            if self._socket is not None:
                with suppress(OSError):  # the other side may have been faster
                    # TlsSocket's own shutdown would encrypt an alert beside another thread.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def fetch(self, url: str, download: Download) -> bool:
        """GET an object, going on where `download` stands. Returns False, having done nothing, if
        the host has failed lately; True if the download is whole and checked.

        Raises OfferFailed; the download can then go on in another way.
        """
        return self._try("GET", url, lambda target: self._fetch(target, download)) is not None

    def put(
        self,
        url: str,
        parts: Sequence[memoryview],
        on_sent: Callable[[int], None] = lambda num_bytes: None,
        *,
        digest: bytes = b"",
    ) -> str | None:
        """PUT an object, the parts one after another. Returns its key, empty if the server names
        none; None, having done nothing, if the host has failed lately.

        on_sent: told, after each chunk, how many bytes of the object the peer has acknowledged.
        digest: of the object; a weights port asks for it.
        Raises OfferFailed.
        """
        return self._try("PUT", url, lambda target: self._put(_Put(target, parts, on_sent, digest)))

    def note_failed(self, method: Method, url: str, reason: str) -> OfferFailed:
        """Remember a failure that showed only after a transfer, like those of fetch() and put()."""
        try:
            host = _Target.of(url).host
        except _Failed:
            host = ""
        return self._remember(method, host, reason)

    # --- which offers are taken ---

    def _try(self, method: Method, url: str, transfer: "Callable[[_Target], _T]") -> _T | None:
        """Do a transfer, unless it has failed at this host lately; None then. A failure is
        remembered. Raises OfferFailed."""
        host, pause_s, target = "", PAUSE_S, None
        try:
            target = _Target.of(url)
            host = target.host
            _, until = self._failures.get((method, host), ("", 0.0))
            if self._clock() < until:
                return None
            result = transfer(target)
        except _Failed as failed:
            reason = str(failed)
            if target is not None and target.is_port and reason != _TIMED_OUT:
                pause_s = PORT_PAUSE_S
        else:
            self._failures.pop((method, host), None)
            return result
        # Outside of the handler, so that no context is attached.
        raise self._remember(method, host, reason, pause_s)

    def _remember(
        self, method: Method, host: str, reason: str, pause_s: float = PAUSE_S
    ) -> OfferFailed:
        """Remember a failure, before whose pause is over there is no other attempt. Returns it as
        an exception."""
        last, _ = self._failures.pop((method, host), ("", 0.0))
        self._failures[method, host] = reason, self._clock() + pause_s
        if len(self._failures) > MAX_FAILURES_KEPT:
            del self._failures[next(iter(self._failures))]
        return OfferFailed(method, host, reason, again=last == reason)

    # --- down ---

    def _fetch(self, target: "_Target", download: Download) -> bool:
        """Download the rest of an object, and connect again while chunks arrive. Returns True.
        Raises _Failed."""
        while not download.is_whole:
            resumed_at = download.received
            try:
                with self._connected(target) as connection:
                    self._receive(connection, target, download)
            except _Failed as failed:
                # Each attempt must receive a chunk, so the number of attempts is bounded.
                if not failed.is_broken or download.received - resumed_at < LEAST_BYTES:
                    raise
        try:
            download.check()
        except Damaged as damaged:
            download.restart()
            raise _Failed(str(damaged)) from None
        return True

    def _receive(self, connection: HTTPConnection, target: "_Target", download: Download) -> None:
        """Request an object from where the download stands, and add all that comes. Raises
        _Failed."""
        start = download.received
        headers = {"Range": f"bytes={start}-"} if start else {}
        connection.request("GET", target.path, headers=headers)
        with connection.getresponse() as response:
            _check_object(response, start, download.size_bytes)
            stall_timer = _StallTimer(self._chunk_timeout_s)
            while not download.is_whole:
                # At most one read of the socket, into the model's own memory.
                count = response.fp.readinto1(download.room(CHUNK_BYTES))
                if not count:
                    raise _Failed("the connection was closed early", is_broken=True)
                stall_timer.note_moved(count)
                download.take(count)

    # --- up ---

    def _put(self, put: "_Put") -> str:
        """Send an update; after a broken connection send what is missing.

        Returns the key of the stored object; empty if the server names none.
        """
        offset = 0
        for attempts_left in reversed(range(NUM_PUTS)):
            try:
                with self._connected(put.target) as connection:
                    return self._send(connection, put, offset)
            except _Failed as failed:
                if not failed.is_broken or attempts_left == 0:
                    raise
                offset = self._find(put) if put.target.is_port else 0
        raise AssertionError("the last attempt returns or raises")

    def _find(self, put: "_Put") -> int:
        """Ask the weights port how many bytes of a broken upload it has. Raises _Failed."""
        with self._connected(put.target) as connection:
            headers = {**put.headers, "Content-Range": f"bytes */{put.size_bytes}"}
            connection.request("HEAD", put.target.path, headers=headers)
            connection.sock.settimeout(self._answer_timeout_s)
            with connection.getresponse() as response:
                offset = response.headers.get(OFFSET_HEADER, "")
                if response.status != 200 or not offset.isdecimal():
                    raise _Failed(f"status {response.status} when asked what is there")
                return min(int(offset), put.size_bytes)

    def _send(self, connection: HTTPConnection, put: "_Put", offset: int) -> str:
        """Send the object from byte `offset` on. Returns its key, as _put() does."""
        target = put.target
        connection.putrequest("PUT", target.path)
        connection.putheader("Content-Length", str(put.size_bytes - offset))
        for name, value in put.headers.items():
            connection.putheader(name, value)
        if offset:
            last = put.size_bytes - 1
            connection.putheader("Content-Range", f"bytes {offset}-{last}/{put.size_bytes}")
        if target.is_port:
            connection.putheader("Expect", "100-continue")
        try:
            connection.endheaders()
            if target.is_port and not self._may_continue(connection):
                return self._read_answer(target, connection)
            progress = _Progress(connection.sock, put, offset, self._chunk_timeout_s)
            sent = 0
            for part in put.parts:
                skipped = min(max(0, offset - sent), len(part))
                sent += skipped
                part = part[skipped:]
                while part:
                    count = progress.send(part)
                    part = part[count:]
                    sent += count
            progress.finish()
        except TimeoutError:
            raise
        except OSError:
            # A server that refuses may answer and hang up without having read it all.
            with suppress(OSError, HTTPException):
                return self._read_answer(target, connection)
            raise
        return self._read_answer(target, connection)

    def _may_continue(self, connection: HTTPConnection) -> bool:
        """Wait for the port's "100 Continue": False if a final answer has come, which is still to
        be read."""
        sock = connection.sock
        end = time.monotonic() + self._continue_timeout_s
        while not self.is_closed:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(left_s)
            start = sock.recv(len(_CONTINUE), socket.MSG_PEEK)
            if not start:
                raise ConnectionError("closed early")
            if not _CONTINUE.startswith(start):
                return False
            if len(start) == len(_CONTINUE):
                return True
            time.sleep(PEEK_S)  # a socket cannot wait for its peer and for close()
        raise ConnectionError("the client is closed")

    def _read_answer(self, target: "_Target", connection: HTTPConnection) -> str:
        """Read the answer to a PUT: the key of the stored object. Raises _Failed for a refusal."""
        connection.sock.settimeout(self._answer_timeout_s)
        with connection.getresponse() as response:
            if not 200 <= response.status < 300:
                raise _Failed(f"status {response.status}")
            key = str(response.headers.get(KEY_HEADER, ""))
            if target.is_port and not key:
                raise _Failed("an answer without the key of the update")
            return key

    # --- the connection ---

    @contextmanager
    def _connected(self, target: "_Target") -> Iterator[HTTPConnection]:
        """Connect for one exchange. A kept connection would time out during the next training.
        Raises _Failed if there is none, or if it ends within."""
        if self.is_closed:
            raise _Failed("the client is closed")
        connection = self._connection(target)
        connected = False
        try:
            connection.connect()
            with self._lock:
                if self.is_closed:
                    raise _Failed("the client is closed")
                self._socket = connection.sock
            connection.sock.settimeout(self._chunk_timeout_s)
            leave_unpaced(connection.sock)
            connected = True
            yield connection
        except (OSError, HTTPException, UnicodeError) as error:  # the last for an impossible name
            is_broken = connected and not isinstance(error, TimeoutError)
            raise _Failed(_why(error), is_broken=is_broken) from None
        finally:
            with self._lock:
                self._socket = None
            connection.close()

    def _connection(self, target: "_Target") -> HTTPConnection:
        """A connection to a target, through its proxy if there is one; not connected yet."""
        proxy = target.proxy
        host, port = (proxy.host, proxy.port) if proxy is not None else (target.name, target.port)
        if target.scheme == "http":
            connection = HTTPConnection(host, port, timeout=self._connect_timeout_s)
        else:
            connection = _TlsConnection(
                host, port, self._connect_timeout_s, self._context(target), target.name
            )
        if proxy is not None:
            connection.set_tunnel(target.name, target.port, proxy.headers)
        return connection

    def _context(self, target: "_Target") -> ssl.SSLContext:
        """TLS for a target: by the participant's certificates for a weights port; for a store by
        the authorities of the system, and the coordinator's."""
        if target.is_port and self._certificates is not None:
            return self._certificates.connects
        authority = "" if self._certificates is None else self._certificates.authority.decode()
        if self._of_system is None or self._of_system[0] != authority:
            context = ssl.create_default_context()
            if authority:
                context.load_verify_locations(cadata=authority)
            self._of_system = authority, context
        return self._of_system[1]


class _TlsConnection(HTTPConnection):
    """Connection over HTTPS like http.client's, with a TlsSocket.

    name: in the certificate of the server, where `host` is a proxy's.
    """

    default_port = HTTPS_PORT

    def __init__(
        self, host: str, port: int, timeout_s: float, context: ssl.SSLContext, name: str
    ) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._context, self._name = context, name

    def connect(self) -> None:
        super().connect()
        self.sock = TlsSocket(self.sock, self._context, self._name)
        self.sock.handshake()


class _Failed(Exception):
    """A transfer has failed. The text is the reason for the log. is_broken: an established
    connection was lost."""

    def __init__(self, reason: str, *, is_broken: bool = False) -> None:
        super().__init__(reason)
        self.is_broken = is_broken


class _StallTimer:
    """End a transfer that moves less than LEAST_BYTES in `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._begin()

    def _begin(self) -> None:
        """Begin a new time limit."""
        self._bytes = 0
        self._deadline = time.monotonic() + self._timeout_s

    def note_moved(self, num_bytes: int) -> None:
        """Count bytes that have moved. Raises _Failed if they were too few in the time."""
        self._bytes += num_bytes
        if self._bytes >= LEAST_BYTES:
            self._begin()
        elif time.monotonic() > self._deadline:
            raise _Failed(_TIMED_OUT)


class _Progress:
    """Sending of an upload's body. What counts is what the peer has acknowledged, not what this
    system has taken: on a slow line it takes megabytes at once.

    Raises _Failed when the peer acknowledges less than LEAST_BYTES in `timeout_s`.
    """

    def __init__(self, sock: socket.socket, put: "_Put", offset: int, timeout_s: float) -> None:
        self._sock = sock
        self._on_sent = put.on_sent
        self._sent = self._acknowledged = offset
        self._stall_timer = _StallTimer(timeout_s)
        sock.settimeout(min(LOOK_S, timeout_s))

    def send(self, data: memoryview) -> int:
        """Send some of the data; returns how many bytes the system has taken, which may be 0."""
        try:
            count = self._sock.send(data[:CHUNK_BYTES])
        except TimeoutError:
            count = 0
        self._sent += count
        self._look()
        return count

    def finish(self) -> None:
        """Wait until the peer has acknowledged all, or answers."""
        while self._acknowledged < self._sent and not _is_readable(self._sock, LOOK_S):
            self._look()

    def _look(self) -> None:
        """Ask the system how many bytes the peer has acknowledged, and tell on_sent. Raises _Failed
        if too few move."""
        sent = self._sent
        if isinstance(self._sock, TlsSocket):
            sent += self._sock.num_passed
        acknowledged = max(self._acknowledged, sent - unacknowledged_bytes(self._sock))
        self._stall_timer.note_moved(acknowledged - self._acknowledged)
        self._acknowledged = acknowledged
        self._on_sent(acknowledged)


def _is_readable(sock: socket.socket, wait_s: float) -> bool:
    """Whether a socket has bytes to read, after waiting up to wait_s."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))


@dataclass(frozen=True, slots=True)
class _Put:
    """An upload; see DirectTransfer.put()."""

    target: "_Target"
    parts: Sequence[memoryview]
    on_sent: Callable[[int], None]
    digest: bytes

    @property
    def size_bytes(self) -> int:
        """Size of the object."""
        return sum(map(len, self.parts))

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the request: the digest, which a weights port asks for."""
        return {DIGEST_HEADER: self.digest.hex()} if self.target.is_port else {}


@dataclass(frozen=True, slots=True)
class _Target:
    """The host, port and path of a URL. Parts that may contain a secret are left out of the repr.

    path: with the query, as the request line takes it.
    """

    scheme: str
    name: str
    port: int
    path: str = field(repr=False)
    proxy: Proxy | None = None

    @property
    def host(self) -> str:
        """HOST:PORT, for the log and as a key."""
        return join_host_port(self.name, self.port)

    @property
    def is_port(self) -> bool:
        """Whether this is a weights port, and no object store."""
        return self.path.startswith(PATH)

    @classmethod
    def of(cls, url: str) -> Self:
        """The target of a URL, with the proxy for it. Raises _Failed if it is not the URL of an
        object, or the proxy is no URL."""
        # Checked here, because http.client quotes a URL that it refuses.
        if not url.isascii() or any(char <= " " or char == "\x7f" for char in url):
            raise _Failed("the URL has characters that no URL has")
        scheme, name, port, path, userinfo = _split(url)
        if scheme not in ("http", "https") or not name or userinfo:
            raise _Failed("not the http(s) URL of an object")
        port = port or (443 if scheme == "https" else 80)
        proxy = proxy_for(name, port)
        if proxy is not None and not proxy.host:
            raise _Failed(f"the proxy of {proxy}")
        return cls(scheme, name, port, path, proxy)


def _split(url: str) -> tuple[str, str, int | None, str, str]:
    """Scheme, host, port, path with query, and user with password. Raises _Failed."""
    try:
        parts = urlsplit(url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        userinfo = parts.netloc.rpartition("@")[0]
        return parts.scheme, parts.hostname or "", parts.port, path, userinfo
    except ValueError:
        raise _Failed("not a URL") from None


def with_host(url: str, grpc_target: str) -> str:
    """The URL, with the host of a gRPC target if it has none of its own."""
    start, separator, rest = url.partition("://:")
    if not separator:
        return url
    # HOST:PORT, or SCHEME:[//AUTHORITY/]HOST:PORT of a name or an address.
    host = re.sub(r"^(dns|ipv4|ipv6):(//[^/]*/)?", "", grpc_target).rpartition(":")[0]
    return f"{start}://{host}:{rest}"


def _check_object(response: HTTPResponse, start: int, size_bytes: int) -> None:
    """Check that the answer has the object from byte `start` on. Raises _Failed."""
    if response.status != (206 if start else 200):
        raise _Failed(f"status {response.status}")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise _Failed("an encoding that was not asked for")
    if start:
        said = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if said is None or int(said[1]) != start or said[2] not in ("*", str(size_bytes)):
            raise _Failed("another range than asked for")
    if response.length is None:
        raise _Failed("an object of unknown size")
    if response.length != size_bytes - start:
        raise _Failed(f"an object of {response.length} bytes instead of {size_bytes - start}")


def _why(error: Exception) -> str:
    """Why a transfer has failed, in words without the URL."""
    match error:
        case ssl.SSLCertVerificationError():
            return f"its certificate is not accepted: {error.verify_message}"
        case socket.gaierror() | UnicodeError():
            return "its name is not known"
        case TimeoutError():
            return _TIMED_OUT
        case ConnectionRefusedError():
            return "connection refused"
        case ssl.SSLError(reason=str() as reason):
            return f"TLS failed ({reason})"
        case ssl.SSLError() | ConnectionError() | HTTPException():
            return f"the connection failed ({type(error).__name__})"
        case OSError(errno=int() as number):
            return os.strerror(number)
        case _:
            return "the proxy does not let us through"  # http.client's for an answer to CONNECT
