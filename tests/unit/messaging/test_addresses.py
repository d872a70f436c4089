"""What a driver tells the others of itself."""

import pytest

from xain_messaging.drivers.addresses import split_limit, told_host, with_limit


@pytest.mark.parametrize("limit", [None, 0, 1000, 2**63])
@pytest.mark.parametrize("address", ["10.1.2.3:4", "[::1]:4", "tcp://host:4"])
def test_a_limit_comes_out_as_it_went_in(address: str, limit: int | None) -> None:
    """And the address too; one without a limit is as it always was."""
    assert split_limit(with_limit(address, limit)) == (address, limit)
    assert (with_limit(address, limit) == address) is (limit is None)


@pytest.mark.parametrize("limit", ["", "-1", "1.5", "many", "1?max=2", "\u0661"])
def test_a_limit_that_is_none_is_refused(limit: str) -> None:
    """Rather than to send to one that takes who knows how much."""
    with pytest.raises(ValueError, match="no number"):
        split_limit(f"10.1.2.3:4?max={limit}")


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "[::]", "[0:0:0::0]"])
def test_a_wildcard_needs_another_host_to_be_told(host: str) -> None:
    """Nobody reaches anybody there."""
    with pytest.raises(ValueError, match="advertise"):
        told_host(host, "")
    assert told_host(host, "10.1.2.3") == "10.1.2.3"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "10.1.2.3"])
def test_any_other_host_is_told(host: str) -> None:
    """Unless another one is given."""
    assert told_host(host, "") == host
    assert told_host(host, "elsewhere") == "elsewhere"
