"""A small object store that does what the test says: real HTTP, with or without TLS.

Its URLs are like signed ones: whoever finds SECRET anywhere has found a URL that leaked.
"""

import re
import socket
import socketserver
import ssl
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any

from integration.participant.scripted import PATIENCE_S
from support.waiting import beside

SECRET = "c0ffee5ec2e7"

Handler = Any
Fault = Callable[[Handler], None]


class ScriptedStore:
    """objects: by path. faults: what to do at the next requests instead of answering them.
    calls: method, path, and the range that was asked for. As a proxy it connects to
    this machine, whatever host is asked for."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults: deque[Fault] = deque()
        self.calls: list[tuple[str, str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.knows_ranges = True
        self.closing = threading.Event()
        self._tls = tls
        self._changed = threading.Condition()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.store = self
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, path: str, host: str = "") -> str:
        scheme = "https" if self._tls else "http"
        return f"{scheme}://{host or self.host}{path}?X-Amz-Signature={SECRET}&a=b%2Fc"

    def stop(self) -> None:
        """End the server; no client is left hanging."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()  # waits for the requests
        self._thread.join(PATIENCE_S)

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait until a request has brought about this state."""
        with self._changed:
            assert self._changed.wait_for(reached, PATIENCE_S), "it never happened"

    def note(self, method: str, path: str, handler: Handler) -> None:
        with self._changed:
            self.calls.append((method, path, handler.headers.get("Range", "")))
            self.headers.append(dict(handler.headers))
            self._changed.notify_all()

    @property
    def methods(self) -> list[str]:
        return [method for method, _, _ in self.calls]


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = False
    block_on_close = True
    store: ScriptedStore

    def finish_request(self, request: Any, client_address: Any) -> None:
        # Here and not where it is accepted: a handshake that hangs must hold up no other.
        tls = self.store._tls
        if tls is None:
            super().finish_request(request, client_address)
            return
        with tls.wrap_socket(request, server_side=True) as wrapped:
            super().finish_request(wrapped, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE_S
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    @property
    def store(self) -> ScriptedStore:
        return self.server.store

    def _enter(self, method: str) -> str | None:
        """The object's path; None if the request has been dealt with."""
        self.close_connection = True
        path, _, query = self.path.partition("?")
        assert query == f"X-Amz-Signature={SECRET}&a=b%2Fc", "the URL is sent as it is"
        self.store.note(method, path, self)
        if self.store.faults:
            self.store.faults.popleft()(self)
            return None
        return path

    def do_CONNECT(self) -> None:
        """Carry one connection back and forth, as a proxy."""
        self.close_connection = True
        self.store.note("CONNECT", self.path, self)
        if self.store.faults:
            self.store.faults.popleft()(self)
            return
        _, _, port = self.path.rpartition(":")
        with socket.create_connection(("127.0.0.1", int(port)), PATIENCE_S) as far:
            self.send_response(200)
            self.end_headers()
            with beside(partial(_carry, far, self.connection)):
                _carry(self.connection, far)

    def do_GET(self) -> None:
        path = self._enter("GET")
        if path is None:
            return
        data = self.store.objects[path]
        start = self.answer_head(data)
        self.wfile.write(data[start:])

    def answer_head(self, data: bytes) -> int:
        """Send the head; the offset at which the requested bytes begin."""
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked is None or not self.store.knows_ranges:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            return 0
        start = int(asked[1])
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        return start

    def do_PUT(self) -> None:
        path = self._enter("PUT")
        if path is None:
            return
        self.store.objects[path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _carry(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # either side may hang up


# --- faults ---


def status(code: int, **headers: str) -> Fault:
    """An answer with a body that must not be shown."""

    def answer(handler: Handler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        body = f"<Error>{SECRET}</Error>".encode()
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def break_off(num_bytes: int) -> Fault:
    """Hang up after so many bytes of what is asked for, or of what is sent."""

    def answer(handler: Handler) -> None:
        if handler.command == "GET":
            data = next(iter(handler.store.objects.values()))
            start = handler.answer_head(data)
            handler.wfile.write(data[start : start + num_bytes])
        else:
            handler.rfile.read(num_bytes)

    return answer


def hang(handler: Handler) -> None:
    """Say nothing until the test is over."""
    handler.store.closing.wait(PATIENCE_S)


def hang_after(num_bytes: int) -> Fault:
    def answer(handler: Handler) -> None:
        break_off(num_bytes)(handler)
        hang(handler)

    return answer


def send(head: str, body: bytes = b"") -> Fault:
    """Exactly these bytes."""

    def answer(handler: Handler) -> None:
        handler.wfile.write(head.replace("\n", "\r\n").encode() + body)

    return answer


def object_of(data: bytes) -> Fault:
    """Other bytes than those that were put."""

    def answer(handler: Handler) -> None:
        start = handler.answer_head(data)
        handler.wfile.write(data[start:])

    return answer
