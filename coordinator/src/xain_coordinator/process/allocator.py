"""Settings of the C library's allocator."""

import contextlib
import ctypes
import sys

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_MMAP_BYTES = 4 << 20  # above all that is allocated again and again
_TRIM_BYTES = 16 << 20  # above what the threads of an aggregation allocate together


def configure_allocator() -> None:
    """Let all threads take memory from one heap, which keeps some of what is freed. To be called
    before there are threads. Without glibc this does nothing.

    By itself glibc gives up to eight heaps for each processor. A chunk of weights is taken in one
    thread and freed in another, and each heap keeps the room of the most that it ever held: with 16
    uploads at a time the coordinator grew by 70 MB for nothing, and with two heaps still by twice
    what it does with one.

    The arrays of 512 KiB that a rule allocates for some columns went back to the system each time.
    The kernel spent two fifths of a round of 4 x 100 MB on giving them again, page by page.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # not glibc
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_ARENA_MAX, 1)
            libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
            libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
