"""Ports to listen on, and options of TCP connections."""

import contextlib
import socket

import pytest

from xain_foundation.net.sockets import free_ports, leave_unpaced


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="Linux")
def test_loopback_connection_uses_reno_without_pacing():
    """BBR, the default of many hosts, makes both sides wait for timers."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
    ):
        with contextlib.suppress(OSError):  # most kernels have it
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        leave_unpaced(connection)
        name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert name.rstrip(b"\0") == b"reno"


def test_connection_that_has_ended_keeps_its_options():
    with socket.socket() as unconnected:
        leave_unpaced(unconnected)


def test_free_ports_are_distinct_and_no_outgoing_connection_takes_them():
    ports = free_ports(200)
    assert len(set(ports)) == 200
    with contextlib.ExitStack() as opened:
        for port in ports:
            listener = opened.enter_context(socket.socket())
            listener.bind(("127.0.0.1", port))
    assert max(ports) < 32_768
