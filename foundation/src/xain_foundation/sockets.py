"""Options of TCP connections."""

import contextlib
import socket


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
