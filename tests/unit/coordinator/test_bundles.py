"""Small updates that an earlier version of the program has written can still be read."""

import pytest

from xain_coordinator.core.keys import (
    attempt_key,
    base_key_of,
    is_journalled,
    journalled_key,
    object_of,
    piece_of,
)
from xain_coordinator.stores.bundles import open_weights
from xain_coordinator.stores.memory import MemoryStore


def bundled_key(place: str, attempt: str, start: int, size: int) -> str:
    """As the earlier version made it."""
    return f"{attempt_key(place, attempt)}/{start}-{size}"


def test_a_piece_is_all_that_a_reader_sees() -> None:
    store = MemoryStore()
    attempt = "0" * 32
    store.put({f"7/bundle.{attempt}": b"0123456789"})
    with open_weights(store, bundled_key("7/a", attempt, 2, 5), 1, 3) as reader:
        assert reader.size == 5
        assert reader.read(0, 100) == b"23456"
        assert reader.read(4, 100) == b"6"
        assert reader.read(5, 1) == reader.read(6, 1) == b""
        buffer = bytearray(b"-" * 8)
        assert reader.read_into(3, memoryview(buffer)) == 2
        assert bytes(buffer) == b"56------"
        assert reader.read_into(6, memoryview(buffer)) == 0
    with pytest.raises(ValueError, match="closed"):
        reader.read(0, 1)
    # What was cut short is shorter, not longer.
    with open_weights(store, bundled_key("7/a", attempt, 8, 5)) as reader:
        assert (reader.size, reader.read(0, 9)) == (2, b"89")
    with open_weights(store, bundled_key("7/a", attempt, 11, 5)) as reader:
        assert (reader.size, reader.read(0, 9)) == (0, b"")


@pytest.mark.parametrize("name", ["a", "bundle", f"a.{'f' * 32}", f"a.{'f' * 32}-1-2", "1-2"])
def test_no_name_makes_a_piece_of_what_is_none(name: str) -> None:
    """Participants choose names; they have no slash."""
    attempt = "0" * 32
    for key in (f"3/{name}", f"3/{name}.{attempt}", "3/global", "optimizer/3/momentum"):
        assert not is_journalled(key)
        assert piece_of(key) is None
        assert object_of(key) == key
    key = bundled_key(f"3/{name}", attempt, 20, 400)
    assert base_key_of(key) == f"3/{name}"
    piece = piece_of(key)
    assert piece is not None
    assert (piece.key, piece.start, piece.size) == (f"3/bundle.{attempt}", 20, 400)
    assert not is_journalled(key)
    journalled = journalled_key(f"3/{name}", attempt)
    assert is_journalled(journalled)
    assert base_key_of(journalled) == f"3/{name}"
    assert piece_of(journalled) is None
