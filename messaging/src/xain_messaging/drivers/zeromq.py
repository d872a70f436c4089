"""Frames over ZeroMQ: every peer has one socket that all others push to.

ZeroMQ connects again by itself, and does not tell what was lost with a connection: links.py finds
the gap. The memory of large frames is handed over, not copied. There is no encryption, and no peer
is asked who it is: this is for trusted networks. Over others the gRPC driver goes with TLS.
"""

import math
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

import zmq

from xain_messaging.codec import Frame, Frames, num_bytes
from xain_messaging.drivers.addresses import split_limit, told_host, with_limit
from xain_messaging.errors import BodyError, Closed, UnknownPeer
from xain_messaging.links import MAX_HEAD_BYTES
from xain_messaging.waits import LONGEST_S

# What is smaller is copied: that costs less than to hand it over.
HAND_OVER_BYTES: Final = 64 << 10

# A peer whose machine is gone, without a word of the network, is noticed after that.
PING_MS: Final = 10_000
SILENCE_MS: Final = 30_000

# Packets that wait in ZeroMQ for run(), of each peer. Beyond it their senders wait.
MAX_WAITING: Final = 64
# Packets that are handled before run() returns.
MAX_AT_ONCE: Final = 64

# pyzmq's enums cost more than the call that they are for.
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)

# Two to each peer. A socket that is not made costs nothing.
MAX_SOCKETS: Final = 65_536

# ZeroMQ counts milliseconds in 32 bits.
LONGEST_LINGER_S: Final = (2**31 - 1) // 1000
WITHOUT_END_MS: Final = -1

# Between two attempts to reach a peer.
RETRY_MS: Final = 100
MAX_RETRY_MS: Final = 2000


@dataclass(slots=True, eq=False)
class _Line:
    """To one peer. max_frame_bytes: that it takes."""

    address: str
    max_frame_bytes: int | None
    push: "zmq.Socket[bytes]"


class ZmqDriver:
    """See ports.Driver. It listens on its host at a port that is free.

    host: the interface to listen on, and the address that others are told, unless `advertise` is
        another. One that stands for all interfaces, such as "*", needs that.
    max_frame_bytes: a message with a larger frame, see codec.py, is refused where it is sent, here
        and at the others: the address tells them. A peer that sends one all the same is hung up on.
        The default takes all.
    """

    def __init__(
        self, host: str = "127.0.0.1", *, advertise: str = "", max_frame_bytes: int = -1
    ) -> None:
        host_told = told_host(host, advertise)  # before anything is open
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._running = threading.Lock()  # of the thread in run(), which close() waits for
        self._lines: dict[str, _Line] = {}
        self._lost: deque[str] = deque()
        self._max_frame_bytes = max_frame_bytes
        self._is_closed = False
        self._has_ended = False
        self._on_packet: Callable[[Frames], None] = lambda frames: None
        self._on_lost: Callable[[str], None] = lambda peer: None
        # Both ends of it are sockets of the system, so that a signal handler may wake.
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._pull = self._context.socket(zmq.PULL)
        most = -1 if max_frame_bytes < 0 else max_frame_bytes + MAX_HEAD_BYTES
        self._set(self._pull, {zmq.RCVHWM: MAX_WAITING, zmq.MAXMSGSIZE: most})
        port = self._pull.bind_to_random_port(f"tcp://{host}")
        limit = None if max_frame_bytes < 0 else max_frame_bytes
        self._address = with_limit(f"tcp://{host_told}:{port}", limit)
        self._polled: list[Any] = [(self._pull, _POLLIN), (self._woken.fileno(), _POLLIN)]

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

    # --- out ---

    def connect(self, peer: str, address: str) -> None:
        self._check_open()
        self.disconnect(peer)
        plain, limit = split_limit(address)
        self._lines[peer] = _Line(plain, limit, self._open(plain))

    def _open(self, address: str) -> "zmq.Socket[bytes]":
        push = self._context.socket(zmq.PUSH)
        options = {
            zmq.SNDHWM: 0,  # bounded by who sends
            zmq.RECONNECT_IVL: RETRY_MS,
            zmq.RECONNECT_IVL_MAX: MAX_RETRY_MS,
        }
        try:
            self._set(push, options)
            push.connect(address)
        except BaseException:  # no address of ours, say; what is left open would never let us end
            push.close(linger=0)
            raise
        return push

    def disconnect(self, peer: str) -> None:
        line = self._lines.pop(peer, None)
        if line is not None:
            line.push.close(linger=0)

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
        self._check_open()
        line = self._lines.get(peer)
        if line is None:
            raise UnknownPeer(f"{peer!r} is not connected")
        push, last = line.push, len(frames) - 1
        try:
            for i, frame in enumerate(frames):
                size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
                push.send(frame, zmq.SNDMORE if i < last else 0, copy=size < HAND_OVER_BYTES)
        except BaseException:
            # An interrupt, say. The next packet would be taken for the rest of this one.
            self._lost.append(peer)
            push.close(linger=0)
            line.push = self._open(line.address)
            self.wake()
            raise

    # --- in ---

    def serve(self, on_packet: Callable[[Frames], None], on_lost: Callable[[str], None]) -> None:
        self._on_packet, self._on_lost = on_packet, on_lost

    def run(self, timeout_s: float) -> None:
        with self._running:
            if self._is_closed:
                return
            ready = zmq.zmq_poll(self._polled, math.ceil(1000 * min(timeout_s, LONGEST_S)))
            if len(ready) > 1 or (ready and ready[0][0] is not self._pull):
                self._drain_woken()
            for _ in range(MAX_AT_ONCE):
                if not int(self._pull.getsockopt(_EVENTS)) & _POLLIN:
                    break
                frame = self._pull.recv(copy=False)
                frames: list[Frame] = [frame.bytes]
                while frame.more:
                    # Frames after the first are arrays, and stay in the memory they came in.
                    frame = self._pull.recv(copy=False)
                    frames.append(frame.buffer)
                self._on_packet(frames)
            while self._lost:
                self._on_lost(self._lost.popleft())

    def _drain_woken(self) -> None:
        with suppress(BlockingIOError):
            while len(self._woken.recv(4096)) == 4096:
                pass

    def wake(self) -> None:
        # Full: then it wakes anyway. Closed: nobody is there to be woken.
        with suppress(BlockingIOError, OSError):
            self._waker.send(b"w")

    # --- the end ---

    def close(self, linger_s: float) -> None:
        self._is_closed = True
        self.wake()
        with ExitStack() as last, self._running:
            if self._has_ended:
                return
            self._has_ended = True
            last.callback(self._context.term)  # it waits for what lingers
            linger_ms = WITHOUT_END_MS if linger_s > LONGEST_LINGER_S else round(1000 * linger_s)
            with ExitStack() as rest:  # all of it, whatever one of them raises; the last one first
                rest.callback(self._waker.close)
                rest.callback(self._woken.close)
                rest.callback(self._pull.close, linger=0)
                rest.callback(self._lines.clear)
                for line in self._lines.values():
                    rest.callback(line.push.close, linger=linger_ms)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the driver has been closed")
