"""Names of S3 objects: readable, reversible, and nothing that a folder could not be called."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xain_coordinator.stores.s3.s3_names import key_to_name, name_to_key

parts = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), min_size=1)
keys = st.lists(parts.filter(lambda part: part not in (".", "..")), min_size=1, max_size=3)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("3/global", "3/global"),
        ("5e55104/3/ipv4:127.0.0.1:6087", "5e55104/3/ipv4:127.0.0.1:6087"),
        ("3/Zürich (1)", "3/Zürich (1)"),
        ("3/100%", "3/100%25"),
        ("3/.hidden", "3/%2ehidden"),
        ("3/dot.", "3/dot%2e"),
        ("3/ ", "3/%20"),
        ("3/a\\b\n", "3/a%5cb%0a"),
        ("3/" + "x" * 201, "3/" + "x" * 200 + "%/x"),
    ],
)
def test_names(key, name):
    """For ever: what was stored under another name would be lost."""
    assert key_to_name(key) == name
    assert name_to_key(name) == key


@given(keys)
@example(["%2e"])
@example(["x" * 199 + "%"])
@example(["." * 300])
def test_every_key_comes_back(parts):
    """Every file system takes the parts of its name."""
    key = "/".join(parts)
    if len(key.encode()) > 1024:
        return
    name = key_to_name(key)
    assert name_to_key(name) == key
    for part in name.split("/"):
        assert 0 < len(part.encode()) <= 255
        assert part[0] not in ". "
        assert part[-1] not in ". "
        assert not any(character < " " or character in "\x7f\\" for character in part)


@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("%2e/. "), max_size=12))
@example("3/%2E")
@example("3/%41")
@example("3//x")
@example("3/global/")
@example(".claims/3/global/x")
def test_a_name_is_no_keys_or_of_one(name):
    """Objects that we have not named are not listed, and no two names stand for one key."""
    key = name_to_key(name)
    assert key is None or key_to_name(key) == name
