"""The weights port: models down and updates up over HTTP/1.1, past gRPC and its event loop.

An event loop in a thread of its own accepts connections, reads heads and checks capability URLs.
A few threads move the bodies; see updates/bodies.py. The coordinator's event loop hears twice of an
upload: before its first byte and after its last one. A connection carries one request.

With certificates a URL works for the participant that it was made for, and for nobody else.

Whoever is refused here, or finds the port full, takes GetWeights and PutWeights.
"""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from xain_coordinator.access.errors import Unauthenticated
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary.values import WeightsRef
from xain_coordinator.ports import JournalError, KeyNotFound, StoreError
from xain_coordinator.server.identity import peer_at
from xain_coordinator.server.statuses import message_of
from xain_coordinator.server.weights.capabilities import Capabilities, Capability, Method
from xain_coordinator.server.weights.http_messages import (
    CONTENT_RANGE,
    SIZE,
    Answer,
    Request,
    digest_of,
    encode_head,
    port_full,
    range_of,
    send_answer,
)
from xain_coordinator.stores.files import FileReader
from xain_coordinator.updates.bodies import Incoming, Outgoing, Stalled, StallTimer, Transfer
from xain_coordinator.updates.measured_upload import Announced, Header, MeasuredUpload
from xain_coordinator.updates.uploads import Source
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog
from xain_foundation.net.sockets import leave_unpaced
from xain_foundation.security.callers import Caller
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import Certificates
from xain_foundation.security.tls_socket import TlsSocket
from xain_foundation.settings.fields import join_host_port
from xain_foundation.threads import num_processors, wait_to_end
from xain_wire.refusal import Refusal
from xain_wire.weights_port import KEY_HEADER, OFFSET_HEADER, PATH

T = TypeVar("T")

log = get_logger(__name__)

# Niceness of these threads above the process's, so that calls go first where processors are few. On
# two, the 99th percentile of heartbeats in benchmarks/fleet.py while models came up was 30 to
# 140 ms with it and 130 to 920 ms without; a round of benchmarks/large_model.py took as long.
NICENESS = 10
MAX_HEAD_BYTES = 16 << 10
BACKLOG = 256

# HTTP statuses of the coordinator's refusals; any other refusal is a 409.
_STATUSES: dict[str, int] = {
    "INVALID_REQUEST": 400,
    "INVALID_UPDATE": 400,
    "TOO_LARGE": 413,
    "UPLOAD_MISSING": 416,
    "NOT_A_MEMBER": 403,
    "UNAVAILABLE": 503,
}


@dataclass(frozen=True, slots=True)
class Closed:
    """Certificates of a port that serves nobody without one.

    identify: says whose certificate, in PEM, a connection shows; in the port's thread. Raises
        Unauthenticated, also when the certificate is revoked.
    note_refused: told, on the coordinator's event loop, the address of a caller that was refused,
        and why.
    """

    certificates: Certificates
    identify: Callable[[bytes], Caller]
    note_refused: Callable[[str, str], None]


class Body:
    """The body of a PUT, for the coordinator's event loop to take."""

    def __init__(
        self, port: "WeightsPort", header: Header, incoming: Incoming, *, wants_continue: bool
    ) -> None:
        """wants_continue: the sender waits for "100 Continue" before it sends the body."""
        self._header = header
        self._port = port
        self._incoming = incoming
        self._wants_continue = wants_continue

    async def header(self) -> Header:
        return self._header

    async def into(self, upload: MeasuredUpload) -> None:
        """Receive all that comes, in the port's threads, and write it to an upload. A connection
        that breaks ends it without an error. Raises Unavailable, and what MeasuredUpload.write
        raises."""
        self._incoming.begin(upload)
        receiving = asyncio.wrap_future(
            self._port.run(
                self._port.receive_body(self._incoming, wants_continue=self._wants_continue)
            )
        )
        try:
            await asyncio.shield(receiving)
        except asyncio.CancelledError:
            self._incoming.end()
            with contextlib.suppress(Exception):  # its outcome: no caller waits for it
                await wait_to_end(receiving)
            raise
        except OSError:
            pass  # the connection broke; the caller sees what is missing


Receive = Callable[[str, Source], Coroutine[Any, Any, WeightsRef | int]]
Find = Callable[[str, Announced], Coroutine[Any, Any, int]]


class WeightsPort:
    """One session's weights port.

    address: host and port to listen on; port 0 picks a free one. preferred: a port to try first in
    that case. advertised: "host:port" for participants; empty: they use the host under which they
    reach gRPC.
    capabilities: makes and checks URLs. open_model: opens a file of the session's store.
    closed: None: nothing is encrypted, and whoever has a URL may use it.
    Raises CommandFailed.
    """

    head_s = 10.0  # for a whole head
    stalled_s = StallTimer.stalled_s
    # Threads that move bodies, each with a buffer of 1 MiB.
    num_threads = 4
    # A TLS record gives the interpreter's lock back: with 4 threads on 2 processors a GB took 5 to
    # 15 % more processor time than with 2. In the clear a round takes a tenth longer with 2.
    num_tls_threads = min(max(num_processors(), 2), num_threads)
    # When there are so many, a new one ends the idle one that has taken longest: its peer has shown
    # no capability yet, or has its answer and reads it still. If none is idle, it is refused.
    max_connections = 500
    max_per_participant = 4
    # A closed port answers so late that a participant has too many connections: one that connects
    # again at once would keep the port busy with handshakes.
    full_s = 1.0
    linger_s = 1.0  # for a peer to read an answer that came before the end of its request

    def __init__(
        self,
        address: tuple[str, int],
        capabilities: Capabilities,
        open_model: Callable[[str], FileReader],
        *,
        preferred: int = 0,
        advertised: str = "",
        closed: Closed | None = None,
    ) -> None:
        """Take the port; nothing is served before start(). Raises CommandFailed."""
        self._capabilities = capabilities
        self._open_model = open_model
        self._listener = _listen(address, preferred)
        self.port: int = self._listener.getsockname()[1]
        self._closed = closed
        scheme = "http" if closed is None else "https"
        self._base = f"{scheme}://{advertised or f':{self.port}'}"
        self._receive: Receive
        self._find: Find
        self._core: asyncio.AbstractEventLoop
        self._loop = asyncio.new_event_loop()
        if closed is not None:
            self.num_threads = self.num_tls_threads
        self._pool = ThreadPoolExecutor(self.num_threads, "weights", _yield_to_calls)
        self._thread = threading.Thread(target=self._serve, name="weights-port", daemon=True)
        self._is_stopped = False
        self._num_moving = 0  # pieces of work that have a thread or wait for one
        # The oldest first; see max_connections.
        self._idle: dict[asyncio.Task[None], None] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._by_participant: Counter[str] = Counter()
        self._callers: dict[asyncio.Task[None], Caller] = {}
        self._crashed = RateLimitedLog(log.error, "weights_port_crashed")

    # --- the coordinator's side ---

    def url(
        self, method: Method, participant_id: str, round_: int, key: str, size_bytes: int
    ) -> str:
        """A URL that allows a participant one request, until it expires."""
        path = self._capabilities.path(method, participant_id, round_, key, size_bytes)
        return self._base + path

    def start(self, receive: Receive, find: Find) -> None:
        """Serve. receive: take an upload. find: bytes that are there of one that broke off. Both
        run on the event loop of the caller."""
        self._receive, self._find = receive, find
        self._core = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, drain_s: float) -> None:
        """Take no more connections; those that there are may finish within drain_s. Harmless when
        repeated."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._thread.ident is None:
            self._listener.close()
            self._loop.close()
        elif self._thread.is_alive():
            await asyncio.wrap_future(self.run(self._drain(drain_s)))
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join)
        self._pool.shutdown()

    def end(self, holds: Callable[[Caller], bool], refusal: Refusal) -> None:
        """End the connections of the callers for whom `holds` is true, without an answer. From any
        thread."""
        with contextlib.suppress(RuntimeError):  # the port has stopped meanwhile
            self._loop.call_soon_threadsafe(self._end, holds)

    def run(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Run a coroutine on the port's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # --- the port's event loop ---

    def _serve(self) -> None:
        """The port's thread: accept connections until stop()."""
        self._accepting = self._loop.create_task(self._accept())
        try:
            self._loop.run_forever()
        finally:
            self._listener.close()
            self._loop.close()

    async def _drain(self, drain_s: float) -> None:
        """Accept no more, end idle connections, and cancel the others after drain_s."""
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listener.close()
        for task in list(self._idle):
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=drain_s)
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _accept(self) -> None:
        """Accept connections, each with a task of its own. When the port is full and none is idle,
        a new one is refused with 503, or closed under TLS."""
        self._listener.setblocking(False)
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._listener)
            except Exception as error:  # no descriptor is left, or the peer has gone already
                self._crashed(error=str(error))
                await asyncio.sleep(0.1)  # no busy loop while no descriptor is free
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            leave_unpaced(sock)
            if not await self._make_room():
                with contextlib.suppress(OSError):
                    if self._closed is None:  # an answer over TLS would take a handshake
                        sock.send(port_full().encode())
                sock.close()
                continue
            if self._closed is not None:
                # The handshake comes with the head, and within the same time.
                sock = TlsSocket(sock, self._closed.certificates.accepts)
            task = self._loop.create_task(self._connection(sock))
            self._connections.add(task)
            self._idle[task] = None
            task.add_done_callback(partial(self._forget, sock))

    async def _make_room(self) -> bool:
        """Whether one more connection may be held; if need be the oldest idle one is ended for
        it."""
        if len(self._connections) < self.max_connections:
            return True
        if not self._idle:
            return False
        ended = next(iter(self._idle))
        del self._idle[ended]
        ended.cancel()
        await asyncio.wait([ended])
        return True

    def _forget(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        """Close the socket of a connection whose task has ended, and count it no more."""
        sock.close()  # a task that is cancelled before it begins never does
        self._connections.discard(task)
        self._idle.pop(task, None)
        self._callers.pop(task, None)

    def _end(self, holds: Callable[[Caller], bool]) -> None:
        """Cancel the connections of these callers."""
        for task, caller in self._callers.items():
            if holds(caller):
                task.cancel()

    async def _connection(self, sock: socket.socket) -> None:
        """Read the one request of a connection and answer it."""
        request: Request | None = None
        task = asyncio.current_task()
        assert task is not None
        try:
            request = await self._request(sock)
            await self._answer(sock, request, task)
        except Answer as answer:
            is_head = request is not None and request.method == "HEAD"
            said = answer.encode(is_head=is_head)
        except OSError:
            return  # the peer has gone
        except Exception as error:  # a defect of ours ends one connection
            self._crashed(error=type(error).__name__, exc_info=error)
            said = Answer(500, "internal error").encode()
        else:
            return  # the answer was a model
        self._idle[task] = None
        await send_answer(self._loop, sock, self.linger_s, said)

    async def _request(self, sock: socket.socket) -> Request:
        """Read the head of a request, within head_s. Raises Answer, and ConnectionError if the peer
        has gone."""
        import h11  # no connection comes before the first round

        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        try:
            async with asyncio.timeout(self.head_s):
                while True:
                    event = parser.next_event()
                    if event is h11.NEED_DATA:
                        data = await self._loop.sock_recv(sock, MAX_HEAD_BYTES)
                        if not data:
                            raise ConnectionError("the peer has gone")
                        parser.receive_data(data)
                    elif isinstance(event, h11.Request):
                        break
                    else:
                        raise ConnectionError("the peer has gone")
        except TimeoutError:
            raise Answer(
                408, f"the head of the request did not come within {self.head_s:g} s"
            ) from None
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                raise Answer(431, f"the head has more than {MAX_HEAD_BYTES} bytes") from None
            raise Answer(error.error_status_hint, "this is no HTTP/1.1 request") from None
        rest, _ = parser.trailing_data
        target = event.target.decode("ascii")
        return Request(event.method.decode("ascii"), target, dict(event.headers), rest)

    async def _answer(
        self, sock: socket.socket, request: Request, task: asyncio.Task[None]
    ) -> None:
        """Carry out a request. Raises Answer. task: of the connection."""
        if request.method not in ("GET", "PUT", "HEAD"):
            raise Answer(405, "only GET, PUT and HEAD are answered", (("Allow", "GET, PUT, HEAD"),))
        if not request.path.startswith(PATH):
            raise Answer(404, "there is nothing here")
        # HEAD asks how much is there of an upload.
        method: Method = "GET" if request.method == "GET" else "PUT"
        allowed = self._capabilities.check(method, request.path)
        if self._closed is not None:
            self._admit(self._closed, sock, allowed, task)
        self._idle.pop(task, None)
        name = allowed.participant_id
        if self._by_participant[name] >= self.max_per_participant:
            if self._closed is not None:
                self._idle[task] = None
                await asyncio.sleep(self.full_s)  # the rate of the refusals
            raise port_full()
        self._by_participant[name] += 1
        try:
            if request.method == "GET":
                await self._send_model(sock, request, allowed)
            elif request.method == "PUT":
                await self._take_update(sock, request, allowed)
            else:
                await self._say_offset(request, allowed)
        finally:
            self._by_participant[name] -= 1
            if not self._by_participant[name]:
                del self._by_participant[name]

    def _admit(
        self, closed: Closed, sock: socket.socket, allowed: Capability, task: asyncio.Task[None]
    ) -> None:
        """Check that the connection's certificate is that of the participant for whom the URL was
        made, and keep its holder. Raises Answer."""
        assert isinstance(sock, TlsSocket), "a closed port accepts no other"
        try:
            caller = closed.identify(sock.certificate())
            who = caller.identity
            if (who.role, who.name) != (Role.PARTICIPANT, allowed.participant_id):
                raise Unauthenticated(f"the certificate is that of {who}, and the URL another's")
        except Unauthenticated as refusal:
            with contextlib.suppress(OSError):  # the peer may have gone
                peer = peer_at(*sock.getpeername()[:2])
                self._core.call_soon_threadsafe(closed.note_refused, peer, str(refusal))
            raise Answer(403, message_of(refusal)) from None
        # No await since identify(): a certificate that is revoked meanwhile is found here.
        self._callers[task] = caller

    # --- down ---

    async def _send_model(self, sock: socket.socket, request: Request, allowed: Capability) -> None:
        """Send a model, or the range of it that a request asks for. Raises Answer before the first
        byte, ConnectionError after it."""
        try:
            reader = await self._in_thread(self._open_model, allowed.key)
        except KeyNotFound:
            raise Answer(404, "the model is not in the store") from None
        except StoreError:
            raise Answer(503, "the store cannot be read") from None
        with reader:
            if reader.size != allowed.size_bytes:
                raise Answer(404, "the model in the store is another one")
            start, end = range_of(request.headers.get(b"range"), reader.size)
            headers: tuple[tuple[str, str], ...] = (
                ("Content-Type", "application/octet-stream"),
                ("Accept-Ranges", "bytes"),
            )
            is_whole = end - start == reader.size
            if not is_whole:
                headers += (("Content-Range", f"bytes {start}-{end - 1}/{reader.size}"),)
            head = encode_head(200 if is_whole else 206, end - start, headers)
            outgoing = Outgoing(sock, head, reader, reader.fileno(), start, end)
            try:
                await self._move(outgoing)
            except (Stalled, StoreError) as error:
                raise ConnectionError(str(error)) from None  # the answer has begun

    # --- up ---

    async def _take_update(
        self, sock: socket.socket, request: Request, allowed: Capability
    ) -> None:
        """Check the headers of a PUT and have the coordinator receive its body. Raises Answer in
        any case: 200 names the key of the stored update."""
        headers = request.headers
        if b"transfer-encoding" in headers or b"content-length" not in headers:
            raise Answer(411, "a Content-Length is needed, without a Transfer-Encoding")
        length = int(headers[b"content-length"])
        offset, size_bytes = 0, length
        content_range = headers.get(b"content-range")
        if content_range is not None:
            said = CONTENT_RANGE.fullmatch(content_range)
            if said is None:
                raise Answer(400, "Content-Range must be: bytes FIRST-LAST/SIZE")
            offset, last, size_bytes = (int(number) for number in said.groups())
            if last != size_bytes - 1 or last - offset + 1 != length:
                raise Answer(400, "Content-Range must reach to the end and fit Content-Length")
        if size_bytes > allowed.size_bytes:
            raise Answer(413, f"at most {allowed.size_bytes} bytes are taken here")
        announced = Announced(allowed.round, size_bytes, digest_of(headers))
        wants_continue = headers.get(b"expect", b"").lower() == b"100-continue" and not request.rest
        incoming = Incoming(sock, request.rest, length)
        body = Body(self, Header(announced, offset), incoming, wants_continue=wants_continue)
        ref = await self._ask_core(self._receive(allowed.participant_id, body))
        assert isinstance(ref, WeightsRef), "a body is no part"
        raise Answer(200, "the update is stored", ((KEY_HEADER, ref.key),))

    async def receive_body(self, incoming: Incoming, *, wants_continue: bool) -> None:
        """Receive the body of a PUT; runs on the port's event loop.

        wants_continue: the sender waits for "100 Continue" before it sends the body. Raises
            Stalled, OSError, and what Transfer.move raises.
        """
        if wants_continue:
            await self._loop.sock_sendall(incoming.sock, b"HTTP/1.1 100 Continue\r\n\r\n")
        await self._move(incoming)

    async def _say_offset(self, request: Request, allowed: Capability) -> None:
        """Say how many bytes of an upload are there, by raising an Answer."""
        size = SIZE.fullmatch(request.headers.get(b"content-range", b""))
        if size is None:
            raise Answer(400, "Content-Range must be: bytes */SIZE")
        announced = Announced(allowed.round, int(size[1]), digest_of(request.headers))
        offset = await self._ask_core(self._find(allowed.participant_id, announced))
        raise Answer(200, "", ((OFFSET_HEADER, str(offset)),))

    async def _ask_core(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the coordinator's event loop, to its end even if we are cancelled.
        Raises Answer."""
        tasks: list[asyncio.Task[T]] = []

        async def run() -> None:
            tasks.append(asyncio.ensure_future(work))
            await asyncio.wait(tasks)

        running = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._core))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self._core.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            await wait_to_end(running)
            raise
        try:
            return tasks[0].result()
        except errors.Refusal as refusal:
            status = 408 if isinstance(refusal, Stalled) else _STATUSES.get(refusal.code, 409)
            raise Answer(status, message_of(refusal)) from None
        except (StoreError, JournalError):
            raise Answer(503, "the store cannot be used now") from None
        except asyncio.CancelledError:
            raise Answer(503, "the coordinator is stopping") from None

    # --- bytes ---

    async def _move(self, transfer: Transfer) -> None:
        """Move all bytes of a transfer, in a thread while its socket takes or has some. Raises
        Stalled, OSError, and what Transfer.move raises."""
        # Through a proxy acknowledgements come in steps as large as what is asked for in stalled_s.
        transfer.stall_timer.stalled_s = self.stalled_s * (2 if transfer.is_sending else 1)
        while True:
            moving = asyncio.ensure_future(
                self._in_thread(transfer.move, lambda: self._num_moving > self.num_threads)
            )
            try:
                is_done = await asyncio.shield(moving)
            except asyncio.CancelledError:
                transfer.end()
                with contextlib.suppress(Exception):  # its outcome: no caller waits for it
                    await wait_to_end(moving)
                raise
            if is_done:
                return
            await self._ready(transfer)

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Run work in one of the threads that move bodies. The number of pieces of work is
        counted."""
        self._num_moving += 1
        try:
            return await self._loop.run_in_executor(self._pool, partial(work, *args))
        finally:
            self._num_moving -= 1

    async def _ready(self, transfer: Transfer) -> None:
        """Wait until the socket takes or has bytes. Raises Stalled."""
        ready = self._loop.create_future()
        sending, fd = transfer.is_sending, transfer.sock.fileno()
        add = self._loop.add_writer if sending else self._loop.add_reader
        remove = self._loop.remove_writer if sending else self._loop.remove_reader

        def note() -> None:
            if not ready.done():
                ready.set_result(None)

        timer = transfer.stall_timer
        add(fd, note)
        try:
            while not ready.done():
                if not timer.left_s:
                    raise timer.error()
                with timer.waiting():
                    await asyncio.wait([ready], timeout=timer.left_s)
                transfer.look()
        finally:
            remove(fd)


def _yield_to_calls() -> None:
    """Lower the priority of this thread. On other systems than Linux it would be the process's."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a container may forbid it
            os.nice(NICENESS)


def _listen(address: tuple[str, int], preferred: int) -> socket.socket:
    """A listening socket at a port, or where that is 0 at the preferred one or any. Raises
    CommandFailed."""
    host, port = address
    dualstack = host == "::" and socket.has_dualstack_ipv6()
    for number in dict.fromkeys((port or preferred, port)):
        try:
            family = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server(
                (host, number), family=family, backlog=BACKLOG, dualstack_ipv6=dualstack
            )
        except OSError as error:
            if number == port:
                raise CommandFailed(
                    f"cannot listen on {join_host_port(host, port)} for weights: {error.strerror}"
                ) from None
    raise AssertionError("the last number is the port")
