"""Fair shares of a server between jobs: the next request is of the job that has used the least."""

import math
import threading
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Waiting items. The next one is of the job that has used the least time, and of one job the
    item that came first.

    A job that comes back has used as much as the last one served: nobody saves time up while idle.
    Source: Goyal, Vin and Cheng 1996, Start-time Fair Queuing; the time of an item is known when it
    has ended only.
    """

    def __init__(self) -> None:
        self._used_s: dict[int, float] = {}  # by job
        self._waiting: dict[int, deque[Item]] = {}  # by job, the first one first
        self._now_s = 0.0  # what the job of the last item taken had used

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, job: int, item: Item) -> None:
        if job not in self._waiting:
            self._waiting[job] = deque()
            self._used_s[job] = max(self._used_s.get(job, 0.0), self._now_s)
        self._waiting[job].append(item)

    def take(self) -> Item | None:
        """Remove and return the next item; None: none waits."""
        if not self._waiting:
            return None
        job = min(self._waiting, key=self._used_s.__getitem__)
        self._now_s = self._used_s[job]
        items = self._waiting[job]
        item = items.popleft()
        if not items:
            del self._waiting[job]
        return item

    def charge(self, job: int, used_s: float) -> None:
        self._used_s[job] = self._used_s.get(job, self._now_s) + used_s

    def forget(self) -> None:
        """Begin anew. Nothing waits."""
        self._used_s.clear()
        self._now_s = 0.0


class FairSlots:
    """Slots for threads that serve requests; those without one wait in a fair queue.

    While all requests are of one job there is nothing to share, and none waits: to wake a thread
    takes as long as a small request.
    """

    alone_s = 0.1  # after the last change from one job to another, there is one job

    def __init__(self, num_slots: int) -> None:
        self._lock = threading.Lock()
        self._num_free = num_slots  # negative: so many more than there are slots are served
        self._last_job = -1
        self._shared_until = -math.inf
        self._queue: FairQueue[threading.Lock] = FairQueue()  # each locked while its thread sleeps

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return len(self._queue)

    def enter(self, job: int, now: float) -> None:
        """Wait for a slot. leave() must follow."""
        with self._lock:
            if job != self._last_job:
                self._last_job, self._shared_until = job, now + self.alone_s
            if self._num_free > 0 or now >= self._shared_until:
                self._num_free -= 1
                return
            asleep = threading.Lock()
            asleep.acquire()
            self._queue.add(job, asleep)
        asleep.acquire()

    def leave(self, job: int, used_s: float, now: float) -> None:
        """Give a slot back, charge its time to the job, and wake threads that get slots now."""
        with self._lock:
            self._num_free += 1
            self._queue.charge(job, used_s)
            is_shared = now < self._shared_until
            while self._num_free > 0 or not is_shared:
                asleep = self._queue.take()
                if asleep is None:
                    break
                self._num_free -= 1
                asleep.release()
            if not is_shared:
                self._queue.forget()  # also jobs that are no more
