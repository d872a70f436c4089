"""Memory for arrays that go out and come in, used again when nobody has them any more.

Memory that is fresh from the system is zeroed first, and a virtual machine may have to ask its host
for it: both can take longer than to write to it.
"""

import weakref
from collections import deque
from contextlib import suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

# What is smaller costs less than to look for it.
MIN_BYTES = 1 << 20
# Of one process.
MAX_BYTES = 256 << 20

_Array = NDArray[np.uint8]


class Spare:
    """Safe for several threads: it has no locks, since memory comes back whenever the last of those
    who have it lets go, in whatever thread.

    max_bytes: that wait to be used again; what came back first goes first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._unused: deque[_Array] = deque()

    @property
    def num_bytes(self) -> int:
        """That wait."""
        return sum(array.nbytes for array in list(self._unused))

    def copy(self, data: memoryview) -> memoryview:
        """data: of bytes."""
        lent = self.lend(data.nbytes)
        # By numpy, which lets other threads go on meanwhile.
        np.copyto(np.frombuffer(lent, np.uint8), np.frombuffer(data, np.uint8))
        return lent

    def lend(self, size_bytes: int) -> memoryview:
        """Somebody's own for as long as it is there, or a part of it. What is in it is anything."""
        if size_bytes < MIN_BYTES:
            return np.empty(size_bytes, np.uint8).data
        array = self._take(size_bytes)
        # It lives for as long as a memoryview of it does.
        lent = array[:]
        weakref.finalize(lent, self._give_back, array).atexit = False
        return lent.data

    def _take(self, size_bytes: int) -> _Array:
        for _ in range(len(self._unused)):
            try:
                array = self._unused.popleft()
            except IndexError:  # another thread was faster
                break
            if array.nbytes == size_bytes:
                return array
            self._unused.append(array)
        return np.empty(size_bytes, np.uint8)

    def _give_back(self, array: _Array) -> None:
        self._unused.append(array)
        while self.num_bytes > self._max_bytes:
            with suppress(IndexError):  # another thread was faster
                self._unused.popleft()


spare: Final = Spare(MAX_BYTES)
