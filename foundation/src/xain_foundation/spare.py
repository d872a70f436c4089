"""Memory for large arrays, used again when nobody has them any more.

Memory that is fresh from the system is cleared first, and a virtual machine may have to ask its
host for it: both can take longer than to write to it.

Whoever is given an array may keep it, or any view of it, for as long as it likes. Each has an owner
of its own, which all views keep alive and which tells us when it goes, so what is given out again
is what nobody can reach any more. That holds for what is made of an array and of its `base`, but
not for an address, such as that of `array.ctypes`.
"""

import math
import weakref
from collections import deque
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# Smaller arrays are cheaper to allocate than to find.
MIN_BYTES = 1 << 20
# Bound on the unused memory of a process.
MAX_BYTES = 256 << 20

_Memory = NDArray[np.uint8]


class _Owner:
    """An object of which numpy makes an array that keeps it alive.

    Not a memoryview: whatever is made of one keeps the memory below, and not that memoryview. Nor
    an array: numpy would make the memory the owner of all views.
    """

    def __init__(self, memory: _Memory) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory = memory


class Spare:
    """Safe for several threads: it has no locks, since memory comes back whenever the last of those
    who have it lets go, in whatever thread.

    max_bytes, max_arrays: that wait to be used again; what came back first goes first.
    """

    def __init__(self, *, max_bytes: float = math.inf, max_arrays: float = math.inf) -> None:
        self._max_bytes = max_bytes
        self._max_arrays = max_arrays
        self._unused: deque[_Memory] = deque()

    @property
    def num_bytes(self) -> int:
        """The bytes that wait to be used again."""
        return sum(memory.nbytes for memory in list(self._unused))

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return an array to write to, from unused memory if it fits; its content is undefined."""
        if num_bytes < MIN_BYTES:
            return np.empty(num_bytes, np.uint8)
        memory = self._find(num_bytes)
        owner = _Owner(memory)
        array = np.asarray(owner)
        base: object = array.base
        assert base is owner
        weakref.finalize(owner, self._give_back, memory).atexit = False
        return array

    def copy(self, array: NDArray[Any]) -> NDArray[Any]:
        """Copy an array, (d,), by numpy, which lets other threads go on meanwhile."""
        copied = self.take(array.nbytes).view(array.dtype)
        copied[:] = array
        return copied

    def _find(self, num_bytes: int) -> _Memory:
        """Take unused memory of this size, or allocate it."""
        for _ in range(len(self._unused)):
            try:
                memory = self._unused.popleft()
            except IndexError:  # another thread was faster
                break
            if memory.nbytes == num_bytes:
                return memory
            self._unused.append(memory)
        self._make_room(num_arrays=1)  # it is to wait here later
        return np.empty(num_bytes, np.uint8)

    def _give_back(self, memory: _Memory) -> None:
        self._unused.append(memory)
        self._make_room()

    def _make_room(self, num_arrays: int = 0) -> None:
        """Forget unused memory, the oldest first, until `num_arrays` more are within limits."""
        while len(self._unused) + num_arrays > self._max_arrays or self.num_bytes > self._max_bytes:
            try:
                self._unused.popleft()
            except IndexError:  # none, or another thread was faster
                return


spare: Final = Spare(max_bytes=MAX_BYTES)
