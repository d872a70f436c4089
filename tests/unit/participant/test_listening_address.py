"""The address at which a participant would listen as rank 0 of a process group."""

import socket

import pytest

from xain_participant.process_groups import ListeningAddress


def test_named_port_is_taken_as_it_is() -> None:
    assert ListeningAddress("ward-7:4000").text == "ward-7:4000"


@pytest.mark.parametrize("host", ["", "ward-7", "[::1]"])
def test_free_port_is_reserved_and_closed(host: str) -> None:
    address = ListeningAddress(host)
    assert address.text.startswith(f"{host}:")
    port = int(address.text.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
