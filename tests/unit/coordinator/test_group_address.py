"""The address at which a participant would listen as rank 0, as the others are told it."""

import pytest

from xain_coordinator.server.calls.translate import group_address


@pytest.mark.parametrize(
    ("address", "peer", "told"),
    [
        (":4000", "ipv4:10.0.0.7:41232", "10.0.0.7:4000"),
        (":4000", "ipv6:%5B::1%5D:41232", "[::1]:4000"),
        (":4000", "unix:", "localhost:4000"),
        ("ward-7:4000", "ipv4:10.0.0.7:41232", "ward-7:4000"),
        ("", "ipv4:10.0.0.7:41232", ""),
    ],
)
def test_host_is_that_of_the_call_unless_it_is_named(address, peer, told):
    assert group_address(address, peer) == told
