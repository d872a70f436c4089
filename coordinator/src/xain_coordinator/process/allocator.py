"""Number of heaps that the C library keeps."""

import contextlib
import ctypes
import sys

_M_ARENA_MAX = -8  # of mallopt(3)


def share_one_heap() -> None:
    """Let all threads take memory from one heap. To be called before there are threads.

    By itself glibc gives up to eight for each processor. A chunk of weights is taken in one thread
    and freed in another, and each heap keeps the room of the most that it ever held: with 16
    uploads at a time the coordinator grew by 70 MB for nothing, and with two heaps still by twice
    what it does with one. Elsewhere this does nothing.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
