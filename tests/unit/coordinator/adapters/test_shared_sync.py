"""One sync of a directory for all who wait for one."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from xain_coordinator.stores import shared_sync


class Disk:
    """Syncs that last until they are let go, one after the other."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.count = 0
        self.error: OSError | None = None

    def sync(self, directory: Path) -> None:
        self.count += 1
        self.begun.release()
        assert self.may_end.acquire(timeout=30)
        if self.error is not None:
            raise self.error


class CountedLock:
    """A lock that tells how often it was left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.left = threading.Semaphore(0)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self.left.release()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(shared_sync, "sync_directory", disk.sync)
    return disk


def test_calls_during_a_sync_share_the_next(disk: Disk, tmp_path: Path) -> None:
    """It may have begun before their names were changed, so it is not theirs; one more is, for
    all of them."""
    shared = shared_sync.SharedSync()
    shared._lock = lock = CountedLock()
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(shared, tmp_path)
        assert disk.begun.acquire(timeout=30)
        others = [pool.submit(shared, tmp_path) for _ in range(6)]
        for _ in range(2 + len(others)):  # twice the first, then each of the others has its turn
            assert lock.left.acquire(timeout=30)
        disk.may_end.release()
        first.result(30)
        assert disk.begun.acquire(timeout=30)
        assert not any(other.done() for other in others)
        disk.may_end.release()
        done, _ = wait(others, 30)
        assert all(other.exception() is None for other in done)
        assert len(done) == len(others)
    assert disk.count == 2


def test_an_error_reaches_everybody_it_concerns(disk: Disk, tmp_path: Path) -> None:
    """Nobody takes a sync that failed for one that succeeded; the next one is a new one."""
    shared = shared_sync.SharedSync()
    disk.error = OSError("disk on fire")
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(shared, tmp_path)
        disk.may_end.release()
        with pytest.raises(OSError, match="on fire"):
            failing.result(30)
    disk.error = None
    disk.may_end.release()
    shared(tmp_path)
    assert disk.count == 2


def test_directories_do_not_wait_for_each_other(disk: Disk, tmp_path: Path) -> None:
    """A sync of one says nothing about another."""
    shared = shared_sync.SharedSync()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(shared, tmp_path / name) for name in "ab"]
        assert disk.begun.acquire(timeout=30)
        assert disk.begun.acquire(timeout=30)
        disk.may_end.release(2)
        for one in both:
            one.result(30)
    assert disk.count == 2
