"""Servers that take InfluxDB's writes: a real time-series database, and a strict one of our own
that can be told to misbehave."""

import contextlib
import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, quote, urlsplit

import pytest

from support.s3_servers import find_program
from xain_foundation.net.sockets import free_ports

READY_S = 60.0  # for what takes a moment, on a machine that has other things to do

Value = int | float | str | bool


# --- line protocol --------------------------------------------------------------------------------


class Malformed(ValueError):
    """This is no line protocol."""


@dataclass(frozen=True)
class Line:
    """A point as it was sent; the types of its values are those that the line gives them."""

    measurement: str
    tags: dict[str, str]
    fields: dict[str, Value]
    at_ns: int


def parse_line(text: str) -> Line:
    """Strictly: nothing is guessed. Raises Malformed."""
    measurement, rest = _name(text, ", ")
    tags: dict[str, str] = {}
    while rest.startswith(","):
        key, rest = _name(rest[1:], "=")
        value, rest = _name(rest[1:], ", ")
        if key in tags:
            raise Malformed(f"tag {key!r} twice")
        tags[key] = value
    fields: dict[str, Value] = {}
    before = " "
    while rest.startswith(before):
        key, rest = _name(rest[1:], "=")
        if key in fields:
            raise Malformed(f"field {key!r} twice")
        fields[key], rest = _value(rest[1:])
        before = ","
    if re.fullmatch(r" -?\d{1,19}", rest) is None:
        raise Malformed(f"no time: {rest!r}")
    return Line(measurement, tags, fields, int(rest))


def _name(text: str, ends: str) -> tuple[str, str]:
    """Up to one of `ends`; a backslash escapes a comma, an equals sign and a blank."""
    found = re.match(r"(?:\\[,= ]|[^,= \\]|\\(?![,= ]))+", text)
    if found is None or text[found.end() : found.end() + 1] not in tuple(ends):
        raise Malformed(f"no name: {text!r}")
    return re.sub(r"\\([,= ])", r"\1", found[0]), text[found.end() :]


_FORMS: tuple[tuple[str, Callable[[str], Value]], ...] = (
    (r"-?\d+i", lambda text: int(text[:-1])),
    (r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", float),
    (r'"(?:[^"\\\n]|\\["\\])*"', lambda text: re.sub(r'\\(["\\])', r"\1", text[1:-1])),
    (r"true|false", lambda text: text == "true"),
)


def _value(text: str) -> tuple[Value, str]:
    for pattern, read in _FORMS:
        found = re.match(rf"(?:{pattern})(?=[, ])", text)
        if found is not None:
            value = read(found[0])
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise Malformed(f"out of range: {found[0]}")
            return value, text[found.end() :]
    raise Malformed(f"no value: {text!r}")


# --- the strict server ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """Instead of taking what is sent. hangs: until release(). cuts: the connection, without a word.

    raw: the body, instead of InfluxDB's JSON with the message.
    """

    status: int = 204
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    hangs: bool = False
    cuts: bool = False


class StrictInflux:
    """An InfluxDB 2 that takes writes from one token to one bucket.

    lines: what it has taken. statuses: what it has answered, in order; 0 for a cut connection.
    complaints: what no client of ours may ever send, whatever the server was told to answer.
    next: answers to the coming requests. always: to all others; None to take them.
    refuses: lines that it does not take. partial: whether it takes the others of the request then.
    max_lines: of a request; more is too large.
    """

    token = "test-token-Zx81"

    def __init__(self, org: str = "org", bucket: str = "bucket") -> None:
        self.org = org
        self.bucket = bucket
        self.lines: list[Line] = []
        self.statuses: list[int] = []
        self.complaints: list[str] = []
        self.num_open = 0
        self.num_requests = 0
        self.next: deque[Answer] = deque()
        self.always: Answer | None = None
        self.refuses: Callable[[Line], bool] = lambda _: False
        self.partial = False
        self.max_lines: int | None = None
        self.changed = threading.Condition()
        self._types: dict[tuple[str, str], type] = {}
        self._released = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._server = _HttpServer(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def settings(self) -> dict[str, str]:
        """The keys of [metrics]."""
        return {
            "kind": "influxdb",
            "url": self.url,
            "org": self.org,
            "bucket": self.bucket,
            "token": self.token,
        }

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Looks again after every request."""
        with self.changed:
            assert self.changed.wait_for(happened, READY_S), f"got {self.statuses}, {self.lines}"

    def release(self) -> None:
        """Let hanging requests go on; their connections are cut."""
        self._released.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.release()
        self._server.shutdown()
        self._thread.join()
        with self.changed:
            sockets = list(self._sockets)
        for open_socket in sockets:
            with contextlib.suppress(OSError):  # the other side was faster
                open_socket.shutdown(socket.SHUT_RDWR)
        self._server.server_close()  # waits for its threads
        if kind is None:
            assert not self.complaints, self.complaints[0]

    # --- a request ---

    def opened(self) -> None:
        with self.changed:
            self.num_open += 1
            self.num_requests += 1
            self.changed.notify_all()

    def answering(self, status: int) -> None:
        with self.changed:
            self.statuses.append(status)

    def closed(self) -> None:
        with self.changed:
            self.num_open -= 1
            self.changed.notify_all()

    def connected(self, connection: socket.socket) -> None:
        with self.changed:
            self._sockets.add(connection)

    def disconnected(self, connection: socket.socket) -> None:
        with self.changed:
            self._sockets.discard(connection)

    def answer(self, target: str, headers: Any, body: bytes) -> Answer:
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query, strict_parsing=True))
        lines = self._read(parts.path, query, headers, body)
        with self.changed:
            told = self.next.popleft() if self.next else self.always
        if told is not None:
            if told.hangs:
                self._released.wait()  # at the latest when the server stops
            return told
        if headers["Authorization"] != f"Token {self.token}":
            return Answer(401, "unauthorized access")
        if query["org"] != self.org:
            return Answer(404, f'organization name "{query["org"]}" not found')
        if query["bucket"] != self.bucket:
            return Answer(404, f'bucket "{query["bucket"]}" not found')
        if self.max_lines is not None and len(lines) > self.max_lines:
            return Answer(413, "request too large")
        return self._take(lines)

    def _read(self, path: str, query: dict[str, str], headers: Any, body: bytes) -> list[Line]:
        expected = {"org": query.get("org"), "bucket": query.get("bucket"), "precision": "ns"}
        if (path, query) != ("/api/v2/write", expected):
            self._complain(f"wrong address: {path} {query}")
        if not headers["Content-Type"].startswith("text/plain"):
            self._complain(f"wrong type: {headers['Content-Type']}")
        if headers["Content-Encoding"] != "gzip":
            self._complain(f"not compressed: {headers['Content-Encoding']}")
        lines = []
        for text in gzip.decompress(body).decode().split("\n"):
            try:
                lines.append(parse_line(text))
            except Malformed as error:
                self._complain(f"{error} in {text!r}")
        return lines

    def _complain(self, what: str) -> None:
        with self.changed:
            self.complaints.append(what)

    def _take(self, lines: Sequence[Line]) -> Answer:
        with self.changed:
            if not self.partial and any(self.refuses(line) for line in lines):
                return Answer(400, "unable to parse: some line")
            dropped = 0
            for line in lines:
                if self.refuses(line) or self._conflicts(line):
                    dropped += 1
                    continue
                for name, value in line.fields.items():
                    self._types[line.measurement, name] = type(value)
                self.lines.append(line)
        if dropped:
            reason = "partial write: field type conflict: some field is another already"
            return Answer(422, f"failure writing points to database: {reason} dropped={dropped}")
        return Answer()

    def _conflicts(self, line: Line) -> bool:
        return any(
            self._types.get((line.measurement, name), type(value)) is not type(value)
            for name, value in line.fields.items()
        )


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, influx: StrictInflux) -> None:
        self.influx = influx
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that goes away is nothing to print


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # in one packet: the second would wait for the other side's acknowledgement
    server: _HttpServer

    def setup(self) -> None:
        super().setup()
        self.server.influx.connected(self.connection)

    def finish(self) -> None:
        self.server.influx.disconnected(self.connection)
        super().finish()

    def do_POST(self) -> None:
        influx = self.server.influx
        influx.opened()
        try:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = influx.answer(self.path, self.headers, body)
            if answer.hangs or answer.cuts:
                influx.answering(0)
                self.close_connection = True
                return
            influx.answering(answer.status)
            self._send(answer)
        finally:
            influx.closed()

    def _send(self, answer: Answer) -> None:
        raw = answer.raw
        if raw is None:
            raw = json.dumps({"code": "test", "message": answer.message}).encode()
        if answer.status == 204:
            raw = b""
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None:
        pass


# --- the real server ------------------------------------------------------------------------------


_EVERYTHING = quote('{__name__!=""}')


class VictoriaMetrics:
    """A victoria-metrics process with an empty database. It keeps numbers only, of 12 digits,
    in milliseconds, and looks at no token."""

    program = "victoria-metrics"

    def __init__(self) -> None:
        program = find_program(self.program)
        assert program is not None, f"{self.program} is not installed"
        self._folder = Path(tempfile.mkdtemp(prefix="vm-"))
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        flags = [
            f"-storageDataPath={self._folder}",
            f"-httpListenAddr=127.0.0.1:{self.port}",
            "-retentionPeriod=1",
            "-search.latencyOffset=1s",
            "-loggerOutput=stderr",
        ]
        self._process = subprocess.Popen(
            [program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._wait_until_ready()
        except BaseException:  # no process outlives a test that cannot begin
            self.stop()
            raise

    @classmethod
    def missing(cls) -> str | None:
        """The reason why it cannot be started here; None if it can."""
        if find_program(cls.program) is not None:
            return None
        reason = f"{cls.program} is not installed (Debian's package of that name)"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and CI is set", pytrace=False)
        return reason

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            try:
                self._get("/health")
                return
            except OSError:
                assert self._process.poll() is None, f"{self.program} did not start"
                assert time.monotonic() < deadline, f"{self.program} is not ready"
                time.sleep(0.05)  # a poll, not a race: it ends when the server answers

    def series(self) -> dict[tuple[str, str], list[tuple[int, float]]]:
        """Points as (milliseconds since 1970, value), oldest first, by (measurement_field, id); id
        is "" where the series has none. All series must be of one session."""
        self._get("/internal/force_flush")
        # Without an end it leaves out what is newer than the second in which it is asked.
        end = int(time.time()) + 3600
        text = self._get(f"/api/v1/export?match[]={_EVERYTHING}&start=0&end={end}")
        found: dict[tuple[str, str], list[tuple[int, float]]] = {}
        sessions = set()
        for line in text.rstrip("\n").split("\n"):  # a name may have line ends of Unicode
            one = json.loads(line)
            labels = one["metric"]
            key = (labels.pop("__name__"), labels.pop("id", ""))
            sessions.add(labels.pop("session", ""))
            assert not labels, f"other tags: {labels}"
            assert key not in found, f"two series {key}"
            found[key] = sorted(zip(one["timestamps"], one["values"], strict=True))
        assert len(sessions) == 1, f"points of several sessions: {sessions}"
        return found

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=READY_S) as response:
            text: str = response.read().decode()
        return text

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
