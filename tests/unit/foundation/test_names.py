"""Names that may be the last part of a key, and travel as gRPC metadata."""

import pytest

from xain_foundation.names import MAX_BYTES, why_not


@pytest.mark.parametrize(
    "name", ["a", "Global", "x" * MAX_BYTES, "ward 7", ".hidden", "ipv6:%5B::1%5D:50051", "unix:"]
)
def test_ordinary_names_and_peer_addresses(name):
    assert why_not(name) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"),
        ("global", "reserved"),
        ("a/b", "must not contain"),
        ("a\\b", "must not contain"),
        ("a..b", "must not contain"),
        (".", "must not contain"),
        ("a\nb", "printable ASCII"),
        ("Köln", "printable ASCII"),
        ("\ud800", "printable ASCII"),
        (" a", "blank"),
        ("a ", "blank"),
        ("x" * (MAX_BYTES + 1), "longer than 128 bytes"),
    ],
)
def test_wrong_name_is_told_why(name, why):
    told = why_not(name)
    assert why in told
