"""Frames over ZeroMQ: every peer has one socket that all others push to.

The connection to a peer is made for the first packet: in a group of hundreds few peers talk to all.
ZeroMQ connects again by itself and does not tell what was lost with a connection; links.py finds
the gap. The memory of large frames is handed over, not copied. There is no encryption, and no peer
has to prove its name: ZeroMQ is for trusted networks. For others the gRPC driver has TLS.
"""

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import zmq

from xain_foundation.settings.fields import require_private
from xain_foundation.waits import LONGEST_S
from xain_membership.errors import Closed
from xain_messaging.drivers.addresses import told_host
from xain_messaging.errors import PeersMissing
from xain_messaging.format.codec import Frame, Frames
from xain_messaging.ports import OnPacket, ignore

# Smaller frames are copied: that costs less than to hand them over.
HAND_OVER_BYTES: Final = 64 << 10

# A peer whose machine is gone, without a word of the network, is noticed after that.
PING_MS: Final = 10_000
SILENCE_MS: Final = 30_000

# Packets that wait in ZeroMQ for run(), of each peer. Beyond it their senders wait.
MAX_WAITING: Final = 64
# pyzmq's enums cost more than the call that they are for, and so does its send() in Python.
_RCVMORE: Final = int(zmq.RCVMORE)
_SNDMORE: Final = int(zmq.SNDMORE)
_NOBLOCK: Final = int(zmq.NOBLOCK)
_send: Final[Callable[..., Any]] = zmq.backend.Socket.send

# An empty packet from here, which lets run() return.
WAKE: Final = "inproc://wake"

# Goes before a packet of several frames: to ask ZeroMQ whether more follow takes longer than to
# receive, and nearly all packets are one frame.
SEVERAL: Final = b"+"

# One for each peer that is sent to. A socket that is not made costs nothing.
MAX_SOCKETS: Final = 65_536

# Milliseconds between two attempts to reach a peer.
RETRY_MS: Final = 100
MAX_RETRY_MS: Final = 2000


class ZmqDriver:
    """See ports.Driver. It listens on its host at a port that is free.

    host: the interface to listen on, and the address that others are told, unless `advertise` is
        another. One that stands for all interfaces, such as "*", needs that.
    insecure: also on a host that other machines reach, where everything goes in the clear.
    Raises ValueError for such a host without it.
    """

    is_polled = True

    def __init__(
        self, host: str = "127.0.0.1", *, advertise: str = "", insecure: bool = False
    ) -> None:
        host_told = told_host(host, advertise)  # before anything is open
        require_private(
            host,
            is_encrypted=False,
            insecure=insecure,
            remedy="use GrpcDriver, or pass insecure=True",
        )
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._running = threading.Lock()  # of the thread in run(), which close() waits for
        self._addresses: dict[str, str] = {}  # by peer
        self._sockets: dict[str, zmq.Socket[bytes]] = {}  # of the peers that have been sent to
        self._is_closed = False
        self._on_packet: OnPacket = ignore
        self._pull = self._open(zmq.PULL, {zmq.RCVHWM: MAX_WAITING})
        self.address = f"tcp://{host_told}:{self._pull.bind_to_random_port(f'tcp://{host}')}"
        self._timeout_ms = -1  # of self._pull
        self._pull.bind(WAKE)
        self._waker = self._open(zmq.PUSH, {zmq.SNDHWM: 1})
        self._waker.connect(WAKE)
        self._waking = threading.RLock()  # a signal handler may wake while its thread does

    def _open(self, kind: int, options: dict[zmq.SocketOption, int]) -> "zmq.Socket[bytes]":
        opened = self._context.socket(kind)
        options = {
            zmq.HEARTBEAT_IVL: PING_MS,
            zmq.HEARTBEAT_TIMEOUT: SILENCE_MS,
            zmq.LINGER: 0,
            zmq.IPV6: 1,
            **options,
        }
        for option, value in options.items():
            opened.setsockopt(option, value)
        return opened

    # --- out ---

    def connect(self, peer: str, address: str) -> None:
        self._check_open()
        self.disconnect(peer)
        self._addresses[peer] = address

    def _connect_socket(self, peer: str) -> "zmq.Socket[bytes]":
        """Open a socket that pushes to a peer. Raises PeersMissing if it is not connected."""
        address = self._addresses.get(peer)
        if address is None or self._is_closed:
            self._check_open()
            raise PeersMissing(f"{peer!r} is not connected", [peer])
        options = {
            zmq.SNDHWM: 0,  # the sender's links bound what waits
            zmq.RECONNECT_IVL: RETRY_MS,
            zmq.RECONNECT_IVL_MAX: MAX_RETRY_MS,
        }
        push = self._open(zmq.PUSH, options)
        try:
            push.connect(address)
            self._sockets[peer] = push
        except BaseException:  # a malformed address, say; an open socket would never let us end
            push.close(linger=0)
            raise
        return push

    def disconnect(self, peer: str) -> None:
        self._addresses.pop(peer, None)
        push = self._sockets.pop(peer, None)
        if push is not None:
            push.close(linger=0)

    def send(self, peer: str, frames: Frames) -> None:
        push = self._sockets.get(peer)
        if push is None:
            push = self._connect_socket(peer)
        left = len(frames)
        if left > 1:
            _send(push, SEVERAL, _SNDMORE, True)
        for frame in frames:
            left -= 1
            size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
            _send(push, frame, _SNDMORE if left else 0, size < HAND_OVER_BYTES)

    # --- in ---

    def serve(self, on_packet: OnPacket, on_lost: Callable[[str], None]) -> None:
        self._on_packet = on_packet

    def run(self, timeout_s: float) -> None:
        """Receive a packet and hand it over; return when none comes in timeout_s."""
        with self._running:
            if self._is_closed:
                return
            timeout_ms = math.ceil(1000 * min(timeout_s, LONGEST_S))
            pull = self._pull
            if timeout_ms != self._timeout_ms:
                pull.setsockopt(zmq.RCVTIMEO, timeout_ms)
                self._timeout_ms = timeout_ms
            try:
                # Copied: pyzmq looks for signals when it frees a frame, and drops the interrupt.
                frames: list[Frame] = [pull.recv()]
                if frames[0] == SEVERAL and pull.getsockopt(_RCVMORE):
                    frames = [pull.recv()]
                    while pull.getsockopt(_RCVMORE):
                        # Frames after the first are arrays, and stay in the memory they came in.
                        frames.append(pull.recv(copy=False).buffer)
            except zmq.Again:
                return
            if frames[0] or len(frames) > 1:
                self._on_packet(frames)

    def wake(self) -> None:
        with self._waking, suppress(zmq.Again):  # Again: others wake it already
            if not self._waker.closed:
                self._waker.send(b"", _NOBLOCK)

    # --- the end ---

    def close(self, linger_s: float) -> None:
        """Close all sockets; queued packets may still go for linger_s."""
        self._is_closed = True
        self.wake()
        with self._running:
            if self._pull.closed:
                return
            for push in self._sockets.values():
                push.close(linger=round(1000 * min(linger_s, LONGEST_S)))
            self._sockets.clear()
            self._pull.close(linger=0)
            with self._waking:
                self._waker.close(linger=0)
            self._context.term()  # it waits for the packets that linger

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the driver has been closed")
