"""Ports to listen on, and options of TCP connections."""

import contextlib
import fcntl
import random
import resource
import socket
import sys
import termios

# Systems give outgoing connections ports from 32,768 (Linux) or 49,152 (macOS) on.
_BELOW_OUTGOING = (12_000, 32_000)
_RANDOM = random.SystemRandom()  # programs that seeded `random` alike must not meet at one port


def free_ports(number: int) -> list[int]:
    """Ports that no program listens on, at random among those that outgoing connections never take.

    A server that starts later, or again after a kill, thus finds its port free.
    """
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < number:
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", _RANDOM.randrange(*_BELOW_OUTGOING)))
                ports.append(probe.getsockname()[1])
        return ports


def leave_unpaced(connection: socket.socket) -> None:
    """Choose Reno as the congestion control of a connection within this host.

    BBR, the default of many hosts, spaces packets in time: within one host the sender only waits
    for timers, for a third of a large message's time. Reno spaces nothing, and every kernel has it.
    """
    if not hasattr(socket, "TCP_CONGESTION"):  # Linux has it
        return
    # The peer may have gone, and an administrator may allow other algorithms only.
    with contextlib.suppress(OSError):
        if connection.getpeername()[0] == connection.getsockname()[0]:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def unacknowledged_bytes(connection: socket.socket) -> int:
    """Bytes that this system has taken to send, and that the peer's system has not acknowledged; 0
    where the system does not tell."""
    if sys.platform != "linux":
        return 0
    try:
        told = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0  # the connection has gone
    return int.from_bytes(told, sys.byteorder)


def raise_file_limit() -> None:
    """Raise the limit of open files. A connection takes a file descriptor, and the default of 1024
    (on macOS 256) would refuse a fleet of that size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # macOS says that there is no limit, and then refuses what is above its own.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
