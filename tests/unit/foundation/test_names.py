"""Names that may be the last part of a key, and travel as gRPC metadata."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xain_foundation.names import MAX_BYTES, why_not


@pytest.mark.parametrize(
    "name",
    ["a", "Global", "x" * MAX_BYTES, "ward 7", ".hidden", "ipv6:%5B::1%5D:50051", "unix:"],
)
def test_ordinary_names_and_peer_addresses(name: str) -> None:
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
def test_wrong_name_is_told_why(name: str, why: str) -> None:
    told = why_not(name)
    assert told is not None
    assert why in told


@given(st.text(string.ascii_letters + string.digits + "-_:.", min_size=1, max_size=MAX_BYTES))
def test_only_dots_matter_in_plain_names(name: str) -> None:
    assert (why_not(name) is None) == (".." not in name and name not in (".", "global"))
