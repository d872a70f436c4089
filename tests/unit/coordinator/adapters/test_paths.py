"""Keys as file names."""

import re
from pathlib import PurePosixPath

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from xain_coordinator.stores.paths import folder_to_path, key_to_path, path_to_key

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

parts = st.one_of(
    st.text(min_size=1, max_size=40),
    # What file systems treat in their own ways, more often than chance would bring it.
    st.text("aA.%/ \\:é~$\n\0", min_size=1, max_size=12),
    st.sampled_from([".weights", "x.weights"]),
    st.text("x.é", min_size=150, max_size=450),
).map(lambda part: part.replace("/", "_"))
keys = (
    st.lists(parts.filter(lambda part: part not in (".", "..")), min_size=1, max_size=4)
    .map("/".join)
    .filter(lambda key: len(key.encode()) <= 1024)
)


@unhurried
@given(keys)
@example("x" * 199 + "/" + "x" * 200 + "." + "x")
@example("x" * 200 + "x/" + "x" * 200 + ".")
def test_a_path_gives_its_key_back(key):
    assert path_to_key(key_to_path(key)) == key


@unhurried
@given(keys)
@example("x" * 200 + ".")
def test_a_path_is_harmless_everywhere(key):
    """Nothing is dropped by a file system, or told apart by case only."""
    for part in PurePosixPath(key_to_path(key)).parts:
        assert re.fullmatch(r"[a-z0-9._%-]+", part)
        assert not part.startswith(".")
        assert not part.endswith((".", " "))
        assert len(part) <= 255


@unhurried
@given(keys, keys)
def test_no_two_keys_share_a_path(one, other):
    """No key's file is another one's folder. Paths are lower case, so case is no matter."""
    if one != other:
        first, second = PurePosixPath(key_to_path(one)), PurePosixPath(key_to_path(other))
        assert first != second
        assert first not in second.parents


@unhurried
@given(keys, parts.filter(lambda part: part not in (".", "..")))
def test_folder_of_a_prefix_holds_its_keys(folder, name):
    key = f"{folder}/{name}"
    if len(key.encode()) <= 1024:
        assert PurePosixPath(folder_to_path(folder)) in PurePosixPath(key_to_path(key)).parents


@unhurried
@given(st.text(max_size=30))
@example("%41.weights")
@example("%4A.weights")
@example("a%/b.weights")
@example("%c3.weights")
@example("é.weights")
@example(".weights")
@example("../a.weights")
@example("a.weights~")
def test_a_foreign_file_is_no_key(path):
    """A file that we would have named otherwise is not ours."""
    key = path_to_key(path)
    assert key is None or key_to_path(key) == path


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("3/global", "3/global.weights"),
        ("3/ipv4:127.0.0.1:6087", "3/ipv4%3a127.0.0.1%3a6087.weights"),
        ("3/Anna", "3/%41nna.weights"),
        (".incoming/x.", "%2eincoming/x%2e.weights"),
        ("a.weights/b", "a%2eweights/b.weights"),
    ],
)
def test_paths_never_change(key, path):
    """Stores that exist must be found again by the next version."""
    assert key_to_path(key) == path
