"""Frames over ZeroMQ: everybody has one socket that all others push to.

The memory of large frames is handed over, not copied. There is no encryption, and nobody is asked
who he is: for networks that are trusted. Over others the gRPC driver goes with TLS.

A send goes out on the sender's thread, and receive() polls on the receiver's: no thread of ours
stands between a program and the wire.
"""

import math
import socket
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Final

import zmq

from xain_foundation.logger import get_logger
from xain_messaging.codec import Frame, Frames, num_bytes
from xain_messaging.drivers.addresses import split_limit, told_host, with_limit
from xain_messaging.errors import BodyError, Closed, UnknownPeer
from xain_messaging.links import DEFAULT_BOUNDS, TOLERANCE, Bounds, max_head_bytes
from xain_messaging.ports import Arrived, DriverEvent, Lost
from xain_messaging.waits import LONGEST_S

log = get_logger(__name__)

# What is smaller is copied: that costs less than to hand it over.
HAND_OVER_BYTES: Final = 64 << 10

# A peer whose machine is gone, without a word of the network, is noticed after that.
PING_MS: Final = 10_000
SILENCE_MS: Final = 30_000

# pyzmq's enums cost more than the call that they are for.
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)

# Three to each peer. A socket that is not made costs nothing.
MAX_SOCKETS: Final = 65_536

# How long a loss may go unnoticed in a driver that packets keep busy.
LOOK_S: Final = 0.05

# ZeroMQ counts milliseconds in 32 bits.
LONGEST_LINGER_S: Final = (2**31 - 1) // 1000
WITHOUT_END_MS: Final = -1

# Between two attempts to reach a peer.
RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 2.0


@dataclass(slots=True)
class _Sockets:
    """push: they send into it. monitor: it tells when the connection breaks."""

    push: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    opened_at: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class _Line:
    """To one peer. sockets: None between two attempts; `waiting` goes out at the next one, which is
    at retry_at."""

    address: str
    max_frame_bytes: int | None  # that the peer takes
    sockets: _Sockets | None
    retry_s: float = RETRY_S
    retry_at: float = 0.0
    waiting: list[Frames] = field(default_factory=list)


class ZmqDriver:
    """See ports.Driver. It listens on its host at a port that is free.

    host: the interface to listen on, and the address that others are told, unless `advertise` is
        another. One that stands for all interfaces, such as "*", needs that.
    max_frame_bytes: a message with a larger frame, see codec.py, is refused where it is sent, here
        and at the others: the address tells them. Who sends one all the same is hung up on. The
        default takes all.
    bounds: those of the peers that send to it. Who has sent more messages than they allow waits,
        until some have been received; of bytes ZeroMQ has no count.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        advertise: str = "",
        max_frame_bytes: int = -1,
        bounds: Bounds = DEFAULT_BOUNDS,
    ) -> None:
        host_told = told_host(host, advertise)  # before anything is open
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._lock = threading.RLock()
        self._receiving = threading.Lock()  # by who is in receive(); it comes before the other
        self._lines: dict[str, _Line] = {}
        self._max_frame_bytes = max_frame_bytes
        self._broken: set[str] = set()  # those between two attempts
        self._untold: deque[Lost] = deque()
        self._ended: list[zmq.Socket[bytes]] = []
        self._poller: zmq.Poller | None = None
        self._looked_at = 0.0
        self._is_closed = False
        self._has_ended = False
        # Both ends of it are sockets of the system, so that a signal handler may wake.
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._woken_fd = self._woken.fileno()
        self._waker.setblocking(False)
        self._pull = self._context.socket(zmq.PULL)
        max_waiting = TOLERANCE * bounds.max_messages
        most = -1 if max_frame_bytes < 0 else max_frame_bytes + max_head_bytes(bounds)
        self._set(self._pull, {zmq.RCVHWM: max_waiting, zmq.MAXMSGSIZE: most})
        port = self._pull.bind_to_random_port(f"tcp://{host}")
        limit = None if max_frame_bytes < 0 else max_frame_bytes
        self._address = with_limit(f"tcp://{host_told}:{port}", limit)

    @staticmethod
    def _set(zmq_socket: "zmq.Socket[bytes]", options: dict[zmq.SocketOption, int]) -> None:
        options = {
            zmq.HEARTBEAT_IVL: PING_MS,
            zmq.HEARTBEAT_TIMEOUT: SILENCE_MS,
            zmq.LINGER: 0,
            zmq.IPV6: 1,
            **options,
        }
        for option, value in options.items():
            zmq_socket.setsockopt(option, value)

    @property
    def address(self) -> str:
        return self._address

    def connect(self, peer: str, address: str) -> None:
        with self._lock:
            self._check_open()
            self.disconnect(peer)
            plain, limit = split_limit(address)
            self._lines[peer] = _Line(plain, limit, self._open(plain))

    def _open(self, address: str) -> _Sockets:
        push = self._context.socket(zmq.PUSH)
        options = {
            zmq.SNDHWM: 0,  # bounded by who sends
            zmq.RECONNECT_IVL: round(1000 * RETRY_S),
            zmq.RECONNECT_IVL_MAX: round(1000 * MAX_RETRY_S),
        }
        try:
            self._set(push, options)
            push.connect(address)
            monitor = push.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        except BaseException:  # no address of ours, say; what is left open would never let us end
            push.close(linger=0)
            raise
        self._poller = None
        self.wake()  # whoever polls does not know of them
        return _Sockets(push, monitor)

    def disconnect(self, peer: str) -> None:
        with self._lock:
            line = self._lines.pop(peer, None)
            self._broken.discard(peer)
            if line is not None:
                self._end(line, 0.0)
                self.wake()

    def _end(self, line: _Line, linger_s: float) -> None:
        """What is on its way may go for so long."""
        linger_ms = WITHOUT_END_MS if linger_s > LONGEST_LINGER_S else round(1000 * linger_s)
        sockets, line.sockets = line.sockets, None
        if sockets is None:
            return
        # A socket must not be closed while another thread polls it.
        self._ended.append(sockets.monitor)
        try:
            sockets.push.disable_monitor()
        finally:
            sockets.push.close(linger=linger_ms)
        self._poller = None
        if not self._receiving.locked():  # who comes now has to wait for `_lock`, which is ours
            self._close_ended()

    def _lose(self, peer: str, line: _Line) -> None:
        """What waits in its socket would go on over the next connection, with a gap. A new socket
        has none. It waits before it tries again, longer each time: somebody may hang up at once."""
        assert line.sockets is not None
        now = time.monotonic()
        lived_s = now - line.sockets.opened_at
        self._end(line, 0.0)
        line.retry_s = RETRY_S if lived_s > 1 else min(2 * line.retry_s, MAX_RETRY_S)
        line.retry_at = now + line.retry_s
        self._broken.add(peer)
        self._untold.append(Lost(peer))

    def _reopen(self, now: float) -> None:
        """Those whose time has come."""
        for peer in [peer for peer in self._broken if self._lines[peer].retry_at <= now]:
            line = self._lines[peer]
            try:
                line.sockets = self._open(line.address)
            except Exception as error:
                # Whatever the system says that has no room for it: the others must not suffer from
                # it, and its time comes again.
                level = log.warning if line.retry_s < MAX_RETRY_S else log.debug
                level("cannot_reopen", peer=peer, error=str(error))
                line.retry_s = min(2 * line.retry_s, MAX_RETRY_S)
                line.retry_at = now + line.retry_s
                continue
            self._broken.discard(peer)
            waiting, line.waiting = line.waiting, []
            with suppress(Exception):  # whatever it is: the line counts as broken, which is told
                for frames in waiting:
                    self._push(peer, line, frames)

    def _close_ended(self) -> None:
        while self._ended:
            self._ended.pop().close(linger=0)

    def check(self, peer: str, frames: Frames) -> None:
        own, line = self._max_frame_bytes, self._lines.get(peer)
        theirs = None if line is None else line.max_frame_bytes
        if own < 0 and theirs is None:
            return
        size = max(num_bytes([frame]) for frame in frames)
        if 0 <= own < size:
            raise BodyError(f"a frame of {size} bytes; this driver carries {own} in one")
        if theirs is not None and size > theirs:
            raise BodyError(f"a frame of {size} bytes; {peer!r} takes {theirs} in one")

    def send(self, peer: str, frames: Frames) -> None:
        with self._lock:
            self._check_open()
            if peer not in self._lines:
                raise UnknownPeer(f"{peer!r} is not connected")
            self._push(peer, self._lines[peer], frames)

    def _push(self, peer: str, line: _Line, frames: Frames) -> None:
        if line.sockets is None:
            line.waiting.append(frames)
            return
        push, last = line.sockets.push, len(frames) - 1
        try:
            for i, frame in enumerate(frames):
                size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
                push.send(frame, zmq.SNDMORE if i < last else 0, copy=size < HAND_OVER_BYTES)
        except BaseException:
            # An interrupt, say. The next message would be taken for the rest of this one.
            self._lose(peer, line)
            self.wake()
            raise

    def receive(self, timeout_s: float | None) -> DriverEvent | None:
        # Not a flag, which an interrupt could keep from being taken back: close() waits for it.
        with self._receiving:
            with self._lock:
                if self._is_closed:
                    return None
                self._close_ended()
                now = time.monotonic()
                self._reopen(now)
                if timeout_s == 0 or self._untold:
                    return self._next(now)
                wait_s = math.inf if timeout_s is None else timeout_s
                wait_s = min([wait_s, *(self._lines[peer].retry_at - now for peer in self._broken)])
                poller = self._poller or self._make_poller()
            ready = poller.poll(
                None if wait_s == math.inf else math.ceil(1000 * min(wait_s, LONGEST_S))
            )
            with self._lock:
                self._close_ended()
                if self._is_closed or not ready:
                    return None  # or it is time for another attempt, which the next call makes
                if any(what == self._woken_fd for what, _ in ready):
                    self._drain_woken()
                return self._next(time.monotonic()) or self._next_loss()

    def _make_poller(self) -> zmq.Poller:
        self._poller = poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        for line in self._lines.values():
            if line.sockets is not None:
                poller.register(line.sockets.monitor, zmq.POLLIN)
        return poller

    def _next(self, now: float) -> DriverEvent | None:
        """What has come already. Each line is looked at only now and then, since there may be
        hundreds."""
        if self._untold or now - self._looked_at > LOOK_S:
            self._looked_at = now
            if (lost := self._next_loss()) is not None:
                return lost
        if not int(self._pull.getsockopt(_EVENTS)) & _POLLIN:
            return None
        frame = self._pull.recv(copy=False)
        frames: list[Frame] = [frame.bytes]
        while frame.more:
            # What comes after the first is arrays, and stays in the memory that it came in.
            frame = self._pull.recv(copy=False)
            frames.append(frame.buffer)
        return Arrived(frames)

    def _next_loss(self) -> Lost | None:
        for peer, line in self._lines.items():
            if line.sockets is not None and line.sockets.monitor.poll(0):
                line.sockets.monitor.recv_multipart()
                self._lose(peer, line)
        return self._untold.popleft() if self._untold else None

    def _drain_woken(self) -> None:
        with suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def wake(self) -> None:
        # Full: then it wakes anyway. Closed: nobody is there to be woken.
        with suppress(BlockingIOError, OSError):
            self._waker.send(b"w")

    def close(self, linger_s: float) -> None:
        with self._lock:
            self._is_closed = True
        self.wake()
        with ExitStack() as last, self._receiving, self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            last.callback(self._context.term)  # without the locks: it waits for what lingers
            with ExitStack() as rest:  # all of it, whatever one of them raises; the last one first
                rest.callback(self._waker.close)
                rest.callback(self._woken.close)
                rest.callback(self._pull.close, linger=0)
                rest.callback(self._close_ended)
                rest.callback(self._lines.clear)
                for line in self._lines.values():
                    rest.callback(self._end, line, linger_s)
                if linger_s > 0:
                    self._reopen(math.inf)  # rather now than too late

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the driver has been closed")
