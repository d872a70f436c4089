"""Updates of rounds that are over go; what may still be needed stays."""

import threading

import pytest

from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.retention import LOOK_BACK, Retention
from xain_coordinator.stores.memory import MemoryStore


class Store(MemoryStore):
    """num_deletions: so many succeed, the next one does not."""

    num_deletions = 1_000_000

    def delete(self, key: str) -> None:
        self.num_deletions -= 1
        if self.num_deletions < 0:
            raise StoreUnavailable("it is away")
        super().delete(key)


def store_of(rounds: int) -> Store:
    store = Store()
    for round_ in range(rounds):
        updates = [f"{round_}/a.0", f"{round_}/b.1"]
        others = [f"{round_}/global", f"optimizer/{round_}/momentum", f"incoming/{round_}/a"]
        store.put(dict.fromkeys([*updates, *others], b"x"))
    return store


def rounds_of(store: MemoryStore) -> list[int]:
    """Those of which all updates are there. Of no round only some are."""
    found = [int(key.split("/")[0]) for key in sorted(store.keys()) if key.endswith((".0", ".1"))]
    assert all(found.count(round_) == 2 for round_ in found)
    return sorted(set(found))


@pytest.mark.parametrize(
    ("keep", "left"), [(0, [9, 10, 11]), (1, [8, 9, 10, 11]), (20, range(12)), (None, range(12))]
)
def test_the_latest_stay(keep, left):
    """And all models, whatever is kept of the updates; round 1 is not taken for 10."""
    store = store_of(12)
    Retention(store, keep, threading.Event()).drop(9)
    assert rounds_of(store) == list(left)
    others = [key for key in sorted(store.keys()) if not key.endswith((".0", ".1"))]
    assert len(others) == 12 * 3


def test_it_goes_on_after_an_error():
    """Where it has ended, and nothing is looked at again."""
    store = store_of(6)
    retention = Retention(store, 0, threading.Event())
    store.num_deletions = 5  # one of round 2
    with pytest.raises(StoreUnavailable):
        retention.drop(4)
    store.num_deletions = 3  # the other one, and those of round 3
    retention.drop(4)
    assert rounds_of(store) == [4, 5]
    store.put({"0/late.0": b"x"})
    retention.drop(4)
    assert "0/late.0" in set(store.keys())


def test_what_an_earlier_process_left_goes():
    """Of the last rounds: nobody looks through thousands at each start."""
    store = store_of(LOOK_BACK + 5)
    Retention(store, 1, threading.Event()).drop(LOOK_BACK + 3)
    assert rounds_of(store) == [0, 1, LOOK_BACK + 2, LOOK_BACK + 3, LOOK_BACK + 4]


def test_it_stops_when_it_is_told_to():
    """Between two objects."""
    store = store_of(3)
    stop = threading.Event()
    stop.set()
    Retention(store, 0, stop).drop(3)
    assert rounds_of(store) == [0, 1, 2]
