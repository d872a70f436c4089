"""Bounds of the audit log's lines about refused identities."""

import pytest

from xain_coordinator.access.refusals import EVERY_S, MAX_LINES, Refusals, Told, host_of


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:5000", "10.0.0.1"),
        ("ipv6:[::1]:5000", "::1"),
        ("ipv6:%5B2001:db8::1%5D:5000", "2001:db8::1"),
        ("ipv4:10.0.0.1", "10.0.0.1"),
        ("ipv6:%5B::1%5D", "::1"),
        ("unix:", "unix:"),
        ("10.0.0.1", "10.0.0.1"),
        ("", ""),
    ],
)
def test_host_of_a_peer_has_no_port(peer, host):
    assert host_of(peer) == host


def test_host_has_one_line_a_minute():
    """The next line says how many there were meanwhile."""
    refusals = Refusals()
    assert refusals.count("a", 0.0) == Told(1, 0)
    assert refusals.count("a", 1.0) is None
    assert refusals.count("a", EVERY_S - 1) is None
    assert refusals.count("b", EVERY_S - 1) == Told(1, 0)
    assert refusals.count("a", EVERY_S) == Told(3, 0)
    assert refusals.count("a", EVERY_S + 1) is None


def test_many_hosts_share_some_lines():
    """An attacker with many addresses fills neither disk nor memory, and is counted."""
    refusals = Refusals()
    lines = [refusals.count(f"host-{number}", number / 1000) for number in range(1000)]
    assert lines == [Told(1, 0)] * MAX_LINES + [None] * (1000 - MAX_LINES)
    assert refusals.count("later", EVERY_S) == Told(1, 1000 - MAX_LINES)
    assert len(refusals._hosts) <= MAX_LINES
