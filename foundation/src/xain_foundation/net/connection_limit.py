"""A bound on the connections of a gRPC server's port that have had no accepted call.

gRPC accepts the connections of a server itself. It refuses new ones beyond a number, whatever the
old ones do, and has no way to end one. But their sockets are descriptors of this process, and a
socket that is shut down is to gRPC one whose peer has gone.
"""

import contextlib
import os
import resource
import socket
import stat
import sys
import threading
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog

log = get_logger(__name__)

MAX_UNREGISTERED: Final = 500  # 14 to 34 KB each, 45 KB with TLS
# Connections that may come until the oldest are ended, which takes MIN_AGE_S and a look.
BURST: Final = 1500
LOOK_S: Final = 0.1
# A new connection has the time for a health check, whatever comes after it.
MIN_AGE_S: Final = 0.3
FULL_LOOK_S: Final = 10.0


def max_connections(num_known: int) -> int:
    """The number for grpc.max_allowed_incoming_connections where so many connections may have an
    accepted call. It leaves descriptors for files."""
    return min(num_known + MAX_UNREGISTERED + BURST, _max_open() * 3 // 4)


def _max_open() -> int:
    """Number of descriptors that this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _descriptors() -> list[int]:
    # A Path for each of thousands takes ten times as long.
    return list(map(int, os.listdir("/dev/fd")))  # noqa: PTH208


@dataclass(frozen=True, slots=True)
class _Seen:
    """A socket of the process. peer: as gRPC names it, if it is a connection of the port."""

    peer: str
    since: float


class ConnectionLimit:
    """Ends the oldest connections of a port while more than max_unregistered have had no accepted
    call. keep() is told of the others.

    max_owners, per_owner: connections that are kept: the latest few of each of the latest owners.
    num_newcomers: owners who may come at once, and again at once when all connections have broken.
        Until a call is accepted they are unregistered, and so many may be, if that is more than
        max_unregistered. To end one of them would cost its owner and this process another TLS
        handshake.
    """

    def __init__(
        self,
        port: int,
        *,
        max_owners: int,
        per_owner: int,
        num_newcomers: int = 0,
        max_unregistered: int = MAX_UNREGISTERED,
    ) -> None:
        self._port = port
        self._max_owners = max_owners
        self._per_owner = per_owner
        self._bound = max(max_unregistered, num_newcomers)
        self._lock = threading.Lock()
        self._kept: dict[Hashable, dict[str, None]] = {}
        self._seen: dict[int, _Seen] = {}  # by inode, the oldest first
        self._num_others = 0  # descriptors at the last full look but those of unregistered clients
        self._is_stopped = threading.Event()
        self._ended = RateLimitedLog(log.warning, "connections_ended")
        self._thread = threading.Thread(target=self._run, name="connection-limit", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End no more connections."""
        self._is_stopped.set()
        self._thread.join()

    def keep(self, peer: str, owner: Hashable) -> None:
        """Note that a connection has had an accepted call.

        peer: as ServicerContext.peer() names it. owner: who called.
        """
        with self._lock:
            peers = self._kept.pop(owner, {})
            peers.pop(peer, None)
            peers[peer] = None
            if len(peers) > self._per_owner:
                del peers[next(iter(peers))]
            self._kept[owner] = peers
            if len(self._kept) > self._max_owners:
                del self._kept[next(iter(self._kept))]

    def _run(self) -> None:
        looked_at = -FULL_LOOK_S
        while not self._is_stopped.wait(LOOK_S):
            with contextlib.suppress(OSError):  # no descriptor is left to look with
                # Sockets are looked at where it may be necessary: for a fleet of thousands that
                # takes milliseconds.
                num_open = len(_descriptors())
                is_due = time.monotonic() > looked_at + FULL_LOOK_S
                if is_due or num_open > self._num_others + self._max_unregistered:
                    self._end_surplus()
                    looked_at = time.monotonic()

    @property
    def _max_unregistered(self) -> int:
        return min(self._bound, _max_open() // 4)

    def _end_surplus(self) -> None:
        with self._lock:
            kept = {peer for peers in self._kept.values() for peer in peers}
        descriptors = _descriptors()
        open_now = {inode: descriptor for descriptor, inode in self._sockets(descriptors)}
        for inode in self._seen.keys() - open_now.keys():
            del self._seen[inode]
        unregistered = [i for i, seen in self._seen.items() if seen.peer and seen.peer not in kept]
        surplus = unregistered[: max(0, len(unregistered) - self._max_unregistered)]
        young = time.monotonic() - MIN_AGE_S
        surplus = [inode for inode in surplus if self._seen[inode].since < young]
        for inode in surplus:
            with _held(open_now[inode]) as held:
                if held is not None and os.fstat(held.fileno()).st_ino == inode:
                    with contextlib.suppress(OSError):  # the peer has gone
                        held.shutdown(socket.SHUT_RDWR)
        if surplus:
            self._ended(number=len(surplus), limit=self._max_unregistered)
        self._num_others = len(descriptors) - len(unregistered)

    def _sockets(self, descriptors: list[int]) -> Iterator[tuple[int, int]]:
        """Yield descriptors of sockets, with their inodes. New ones are added to `_seen`."""
        for descriptor in descriptors:
            try:
                status = os.fstat(descriptor)
            except OSError:  # closed meanwhile
                continue
            if not stat.S_ISSOCK(status.st_mode):
                continue
            if status.st_ino not in self._seen:
                with _held(descriptor) as held:
                    if held is None:
                        continue
                    status = os.fstat(held.fileno())
                    self._seen[status.st_ino] = _Seen(self._peer_of(held), time.monotonic())
            yield descriptor, status.st_ino

    def _peer_of(self, connection: socket.socket) -> str:
        """The peer as gRPC names it; "" if this is no connection of the port."""
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return ""
        try:
            if connection.getsockname()[1] != self._port:
                return ""
            host, port, *_ = connection.getpeername()
        except OSError:  # it listens, or is connected no longer
            return ""
        host = host.removeprefix("::ffff:")
        return (
            f"ipv6:{quote(f'[{host}]', safe=':')}:{port}" if ":" in host else f"ipv4:{host}:{port}"
        )


@contextlib.contextmanager
def _held(descriptor: int) -> Iterator[socket.socket | None]:
    """Lend a duplicate of a socket, which may be closed at any moment; None: it is no socket."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        yield None
        return
    try:
        held = socket.socket(fileno=copy)
    except OSError:  # a file that was opened meanwhile
        os.close(copy)
        yield None
        return
    with held:
        yield held
