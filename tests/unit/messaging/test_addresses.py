"""The address that a driver tells to others."""

import pytest

from xain_messaging.drivers.addresses import told_host


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "[::]", "[0:0:0::0]"])
def test_a_wildcard_needs_another_host_to_be_told(host):
    """A wildcard is no address that others could reach."""
    with pytest.raises(ValueError, match="advertise"):
        told_host(host, "")
    assert told_host(host, "10.1.2.3") == "10.1.2.3"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "10.1.2.3"])
def test_any_other_host_is_told(host):
    """A given host replaces it."""
    assert told_host(host, "") == host
    assert told_host(host, "elsewhere") == "elsewhere"
