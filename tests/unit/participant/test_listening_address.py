"""The address at which a participant would listen as rank 0 of a process group."""

import socket

import pytest

from xain_participant.sdk.participant import GroupBroken
from xain_participant.stages.process_groups import ListeningAddress, Member, _listener, open_group


def test_named_port_is_taken_as_it_is():
    assert ListeningAddress("ward-7:4000").text == "ward-7:4000"


@pytest.mark.parametrize("host", ["", "ward-7", "[::1]"])
def test_free_port_is_reserved_and_closed(host):
    address = ListeningAddress(host)
    assert address.text.startswith(f"{host}:")
    port = int(address.text.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))


def test_rank_0_listens_at_the_host_that_the_others_are_told():
    """Other addresses of the machine, 127.0.0.2 here, do not reach it. The second member is
    missing, which ends the group and not the listener."""
    address = ListeningAddress("127.0.0.1")
    port = int(address.text.rpartition(":")[2])
    member = Member("attempt", 0, 2, address.text, 0.5, wants_gpu=False)
    with pytest.raises(GroupBroken), open_group(member):
        pass
    socket.create_connection(("127.0.0.1", port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5)


def test_host_of_another_machine_is_listened_for_at_every_address():
    """The others may reach this machine through a router, by an address that is not its own."""
    port = int(ListeningAddress("").text.rpartition(":")[2])
    descriptor = _listener("192.0.2.1", port)
    with socket.socket(fileno=descriptor):
        socket.create_connection(("127.0.0.2", port), 5).close()


def test_host_whose_own_machine_takes_its_name_for_a_loopback_address_is_reached(monkeypatch):
    """Debian's hosts file has 127.0.1.1 for the name of the machine; the others have its real
    address."""
    port = int(ListeningAddress("").text.rpartition(":")[2])
    own = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: own)
    descriptor = _listener("ward-7", port)
    monkeypatch.undo()
    with socket.socket(fileno=descriptor):
        socket.create_connection(("127.0.0.2", port), 5).close()


def test_port_that_is_taken_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        host, port = other.getsockname()
        with pytest.raises(GroupBroken, match=f"rank 0 cannot listen at {host}:{port}: "):
            _listener(host, port)
