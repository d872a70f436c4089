"""Items written in groups by a thread."""

import threading
from collections.abc import Iterator

import pytest

from xain_foundation.logs.group_commit import GroupCommit

PATIENCE_S = 60.0


class Disk:
    """Takes groups; the first one only when `may_write` is set."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.is_writing = threading.Event()
        self.may_write = threading.Event()

    def write(self, group: list[int]) -> int:
        self.groups.append(group)
        self.is_writing.set()
        assert self.may_write.wait(PATIENCE_S)
        if -1 in group:
            raise ValueError("a defect")
        return group.count(-2)


@pytest.fixture
def disk() -> Iterator[Disk]:
    one = Disk()
    yield one
    one.may_write.set()


def busy(disk: Disk, **bounds: float) -> GroupCommit[int]:
    """A queue whose first group, of the item 0, is being written."""
    queue = GroupCommit(disk.write, name="test", **bounds)
    queue.put(0)
    assert disk.is_writing.wait(PATIENCE_S)
    return queue


@pytest.mark.parametrize(
    ("bounds", "items", "groups", "num_lost"),
    [
        ({}, range(1, 100), [list(range(1, 100))], 0),
        # One item is always written, however large.
        ({"max_group": 10}, (4, 6, 1, 50, 2), [[4, 6], [1], [50], [2]], 0),
        ({"max_waiting": 10}, (4, 6, 5, 50), [[50]], 3),
    ],
    ids=["one group of all that come during a write", "bounded groups", "the newest is kept"],
)
def test_items_that_come_during_a_write_are_groups_within_bounds(
    disk, bounds, items, groups, num_lost
):
    queue = busy(disk, **bounds)
    for n in items:
        queue.put(n, size=n)
    assert queue.num_lost == num_lost
    disk.may_write.set()
    assert queue.close(PATIENCE_S)
    assert (disk.groups, queue.num_lost) == ([[0], *groups], num_lost)


def test_defect_of_the_writer_costs_one_group(disk):
    queue = busy(disk, max_group=2)
    for n in (-1, 1, -2, 1):
        queue.put(n)
    disk.may_write.set()
    assert queue.close(PATIENCE_S)
    assert disk.groups == [[0], [-1, 1], [-2, 1]]
    assert queue.num_lost == 3


def test_patient_queue_waits_for_room_while_items_are_taken(disk):
    """Nothing is lost, however much more is put than the queue has room for."""
    disk.may_write.set()
    queue = GroupCommit(disk.write, name="test", max_group=2, max_waiting=10, patience_s=PATIENCE_S)
    for n in range(1000):
        queue.put(n)
    assert queue.close(PATIENCE_S)
    assert [n for group in disk.groups for n in group] == list(range(1000))
    assert queue.num_lost == 0


def test_patient_queue_waits_once_for_a_writer_that_hangs(disk):
    queue = busy(disk, max_waiting=10, patience_s=0.01)
    waits = []
    wait_for = queue._changed.wait_for

    def noted(predicate, timeout=None):
        if threading.current_thread() is not queue._thread and not predicate():
            waits.append(timeout)
        return wait_for(predicate, timeout)

    queue._changed.wait_for = noted  # type: ignore[method-assign]  # a probe
    for _ in range(20):
        queue.put(1)
    assert (waits, queue.num_lost) == ([0.01], 10)
    disk.may_write.set()
    assert queue.close(PATIENCE_S)
    assert queue.num_lost == 10


def test_lost_items_are_counted_once(disk):
    """Items are lost by the writer, by an end that does not wait, or because they come after it."""
    queue = busy(disk)
    for n in (-2, -2, 3):
        queue.put(n)
    assert not queue.close(0.0)
    assert queue.num_lost == 4
    queue.put(1)
    assert queue.num_lost == 5
    disk.may_write.set()
    assert queue.close(PATIENCE_S)
    assert queue.num_lost == 5
    assert disk.groups == [[0]]
