"""Threads that work through the jobs of a tile together."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

Job = Callable[[], object]


class Stopped(Exception):
    """The process is to end; nothing was written."""


class Crew:
    """The calling thread and as many more as are needed.

    num_threads: how many compute. num_readers: how many read: no more than these, so that the files
    that are open have a bound, and perhaps more than compute, where a read is a wait for a store
    far away. Whoever may do both helps out with the other when its own jobs are done.
    stop: once set, no job is begun any more.
    """

    def __init__(self, num_threads: int, num_readers: int, stop: threading.Event) -> None:
        self._num_threads = num_threads
        self._num_readers = num_readers
        self._num_members = max(num_threads, num_readers)
        self._stop = stop
        self._pool = (
            ThreadPoolExecutor(self._num_members - 1, "aggregate")
            if self._num_members > 1
            else None
        )

    def do(self, computing: Iterable[Job], reading: Iterable[Job] = ()) -> None:
        """All of these, in no particular order. None is under way any more on return.

        Raises what a job raised, and Stopped; then some were not begun.
        """
        if self._pool is None:
            for job in (*computing, *reading):
                if self._stop.is_set():
                    break
                job()
            if self._stop.is_set():
                raise Stopped
            return
        compute, read = deque(computing), deque(reading)
        failed = threading.Event()

        def work(member: int) -> None:
            mine = []
            if member < self._num_threads:
                mine.append(compute)
            if member >= self._num_members - self._num_readers:
                # Whoever calls sees to it that the computing begins; the others read first.
                mine.insert(1 if member == 0 else 0, read)
            for jobs in mine:
                self._work_through(jobs, failed)

        wanted = min(self._num_members, len(compute) + len(read))
        # From the end, where those are who read.
        last = self._num_members - 1
        others = [self._pool.submit(work, last - i) for i in range(min(wanted, last))]
        try:
            work(0)
        finally:
            wait(others)
        try:
            for other in others:
                other.result()
        finally:
            # An error holds the frames that it came through, and so must not be held by them: what
            # they hold are tiles.
            others.clear()
        if self._stop.is_set():
            raise Stopped

    def _work_through(self, jobs: deque[Job], failed: threading.Event) -> None:
        while not (self._stop.is_set() or failed.is_set()):
            try:
                job = jobs.popleft()  # safe among threads
            except IndexError:
                return
            try:
                job()
            except BaseException:  # whatever it is, the other threads need not go on
                failed.set()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()
