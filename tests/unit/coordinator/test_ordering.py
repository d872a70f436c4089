"""Locks that threads take in the order of their numbers."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from xain_coordinator.aggregation.ordering import Cancelled, OrderedLock


def test_turns_come_in_the_order_of_numbers() -> None:
    """Whichever thread asks first, and never two at once."""
    lock, all_there = OrderedLock(), threading.Barrier(8, timeout=60)
    seen: list[tuple[str, int]] = []

    def take(number: int) -> None:
        all_there.wait()
        with lock.turn(number):
            seen.append(("begins", number))
            seen.append(("ends", number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(take, (5, 0, 7, 3, 1, 6, 2, 4)))
    assert seen == [(what, number) for number in range(8) for what in ("begins", "ends")]


def test_cancelled_lock_gives_no_turn() -> None:
    """Threads that wait hear of it, and so do threads that ask later."""
    lock, asked = OrderedLock(), threading.Event()

    def wait() -> None:
        asked.set()
        with lock.turn(1):
            pytest.fail("number 0 has not had its turn")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert asked.wait(60)
        lock.cancel()
        with pytest.raises(Cancelled):
            waiting.result(60)
    with pytest.raises(Cancelled), lock.turn(0):
        pytest.fail("the lock was cancelled")
