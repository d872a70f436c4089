"""Group commit: a thread writes all that has come since its last write, at once."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from xain_foundation.logs.logger import get_logger

log = get_logger(__name__)

T = TypeVar("T")


class GroupCommit(Generic[T]):
    """A bounded queue, and the thread that empties it, which the first item starts. The longer a
    write takes, the larger is the next group.

    write: takes a group, oldest first, in the thread; returns how many of its items are lost. It
        may take its time until `closing` is set. An exception loses the group.
    linger_s: the first item of a group waits this long for others, unless the group is full.
    max_group: size of a group, which has at least one item.
    max_waiting: size of what waits; where there is more, the oldest items are lost.
    patience_s: put() waits so long for room before an item is lost. Once it has waited in vain, it
        waits no more until all that waited is written.
    """

    def __init__(
        self,
        write: Callable[[list[T]], int],
        *,
        name: str,
        linger_s: float = 0.0,
        max_group: float = float("inf"),
        max_waiting: float = float("inf"),
        patience_s: float = 0.0,
    ) -> None:
        self.closing = threading.Event()
        self.num_lost = 0
        self._write = write
        self._name = name
        self._linger_s = linger_s
        self._max_group = max_group
        self._max_waiting = max_waiting
        self._patience_s = patience_s
        self._waits_for_room = patience_s > 0
        self._waiting: deque[tuple[int, T]] = deque()
        self._waiting_size = 0
        self._num_in_hand = 0  # of the group that is being written
        # Reentrant: the garbage collector may run code that puts something while it is held.
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None

    def put(self, item: T, size: int = 1) -> None:
        """Queue an item for the thread, and drop the oldest of too many. From any thread; waits for
        room for patience_s at most. After close() the item counts as lost.

        size: of the item, as max_group and max_waiting count it.
        """
        with self._changed:
            if self._waits_for_room and threading.current_thread() is not self._thread:
                self._waits_for_room = self._changed.wait_for(
                    lambda: self._has_room(size) or self.closing.is_set(), self._patience_s
                )
            if self.closing.is_set():
                self.num_lost += 1
                return
            was_empty = not self._waiting
            self._waiting.append((size, item))
            self._waiting_size += size
            # Never all: the newest is kept, however large.
            while self._waiting_size > self._max_waiting and len(self._waiting) > 1:
                self._pop()
                self.num_lost += 1
            if was_empty or self._waiting_size >= self._max_group:
                self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                # A finaliser that ran meanwhile may have put something, and started one.
                if self._thread is None:
                    thread.start()
                    self._thread = thread

    def close(self, timeout_s: float | None = None) -> bool:
        """Write what waits, for timeout_s at most; the rest is lost. May be called again.

        Returns whether there is no thread any more.
        """
        with self._changed:
            self.closing.set()
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        with self._changed:
            self.num_lost += len(self._waiting) + self._num_in_hand
            self._waiting.clear()
            self._num_in_hand = 0
        return not self._thread.is_alive()

    def _has_room(self, size: int) -> bool:
        return not self._waiting or self._waiting_size + size <= self._max_waiting

    def _pop(self) -> T:
        size, item = self._waiting.popleft()
        self._waiting_size -= size
        return item

    def _run(self) -> None:
        """Write groups until close(), and count the items that are lost."""
        while group := self._next_group():
            try:
                num_lost = self._write(group)
            except Exception:  # a defect: it costs this group, and not all that follow
                log.exception("group_lost", thread=self._name, num=len(group))
                num_lost = len(group)
            with self._changed:
                if self._num_in_hand:  # else close() has counted the group as lost
                    self.num_lost += num_lost
                    self._num_in_hand = 0
            del group  # its memory is free while the next one is awaited

    def _next_group(self) -> list[T]:
        """Wait for items, and take a group from the queue. Empty only after close()."""
        with self._changed:
            if not self._waiting:
                self._waits_for_room = self._patience_s > 0
            self._changed.wait_for(lambda: self._waiting or self.closing.is_set())
            self._changed.wait_for(
                lambda: self.closing.is_set() or self._waiting_size >= self._max_group,
                self._linger_s,
            )
            group: list[T] = []
            room = self._max_group
            while self._waiting and (not group or self._waiting[0][0] <= room):
                room -= self._waiting[0][0]
                group.append(self._pop())
            self._num_in_hand = len(group)
            self._changed.notify_all()  # there is room
            return group
