"""Memory for models, used again from round to round: of new memory the kernel clears every page.

Whoever is given an array may keep it, or any view of it, for as long as it likes. Each array has an
owner of its own, which all views keep alive and which tells us when it goes, so what is given out
again is what nobody can reach any more.
"""

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
        # A memoryview stands between: of an array numpy would make the views' owner the memory.
        array = np.frombuffer(memory.data, np.uint8)
        assert isinstance(array.base, memoryview)
        weakref.finalize(array.base, self._give_back, memory).atexit = False
        return array

    def copy(self, array: NDArray[Any]) -> NDArray[Any]:
        """array: (d,)."""
        copied = self.take(array.nbytes).view(array.dtype)
        copied[:] = array
        return copied

    def _give_back(self, memory: NDArray[np.uint8]) -> None:
        if len(memory) == self._num_bytes and not self._free:
            self._free.append(memory)
