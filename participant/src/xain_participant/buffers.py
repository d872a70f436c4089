"""Memory for models, used again from round to round: of new memory the kernel clears every page.

Whoever is given an array may keep it, or any view of it, for as long as it likes. Each array has an
owner of its own, which all views keep alive and which tells us when it goes, so what is given out
again is what nobody can reach any more. That holds for what is made of an array and of its `base`,
but not for an address, such as that of `array.ctypes`.
"""

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray


class _Owner:
    """What numpy makes an array of that keeps this object, and is of no use but for that.

    Not a memoryview: whatever is made of one keeps the memory below, and not that memoryview. Nor
    an array: numpy would make the memory the owner of all views.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory = memory


class Buffers:
    """For models of one size at a time. No more than one is kept that nobody uses.

    Safe to use from several threads. What is given back may be so in any of them, at any moment.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        self._free: list[NDArray[np.uint8]] = []

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Writable, and not cleared."""
        if num_bytes != self._num_bytes:
            self._num_bytes = num_bytes
            self._free.clear()
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(num_bytes, np.uint8)
        if len(memory) != num_bytes or not num_bytes:
            return np.empty(num_bytes, np.uint8)
        owner = _Owner(memory)
        array = np.asarray(owner)
        base: object = array.base
        assert base is owner
        weakref.finalize(owner, self._give_back, memory).atexit = False
        return array

    def copy(self, array: NDArray[Any]) -> NDArray[Any]:
        """array: (d,)."""
        copied = self.take(array.nbytes).view(array.dtype)
        copied[:] = array
        return copied

    def _give_back(self, memory: NDArray[np.uint8]) -> None:
        if len(memory) == self._num_bytes and not self._free:
            self._free.append(memory)
