"""Memory that is used again, and never while somebody can reach it."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from xain_foundation.spare import MIN_BYTES, Spare


def address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


def test_released_array_is_used_again():
    spare = Spare()
    first = address(spare.take(MIN_BYTES))
    for _ in range(3):
        assert address(spare.take(MIN_BYTES + 1)) != first
        array = spare.take(MIN_BYTES)
        assert address(array) == first
        array[:] = 7
        del array


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array,
        lambda array: array[128:],
        lambda array: array[128:].view(np.float32)[::2],
        lambda array: array.reshape(2, -1).T,
        memoryview,
        lambda array: array.data[50:60],
        lambda array: np.frombuffer(array, np.int32),
        lambda array: [array[1:]],
        lambda array: array.base,
        lambda array: np.asarray(array.base),
        lambda array: np.asarray(array[128:].base)[1:],
    ],
)
def test_held_array_is_not_used_again(view):
    """Any view of the array holds it, for as long as the view lives."""
    spare = Spare()
    array = spare.take(MIN_BYTES)
    array[:] = 7
    first, held = address(array), view(array)
    before = np.asarray(held).tobytes()
    del array
    for _ in range(3):
        other = spare.take(MIN_BYTES)
        assert address(other) != first
        other[:] = 1
        del other
    assert np.asarray(held).tobytes() == before


def test_waiting_arrays_are_bounded():
    """The oldest goes first; an array larger than the bound does not wait, nor a small one."""
    spare = Spare(max_bytes=5 * MIN_BYTES // 2)
    sizes = (0, 10, MIN_BYTES, MIN_BYTES + 1, MIN_BYTES + 2, 3 * MIN_BYTES)
    taken = [spare.take(size) for size in sizes]
    for num_bytes in (0, 0, MIN_BYTES, 2 * MIN_BYTES + 1, 2 * MIN_BYTES + 3, 0):
        del taken[0]
        assert spare.num_bytes == num_bytes


def test_single_waiting_array_is_the_latest():
    """One of another size leaves none of the first, and many at once leave one."""
    spare = Spare(max_arrays=1)
    taken = [spare.take(MIN_BYTES) for _ in range(3)]
    taken.clear()
    assert spare.num_bytes == MIN_BYTES
    other = spare.take(2 * MIN_BYTES)
    assert spare.num_bytes == 0
    del other
    assert spare.num_bytes == 2 * MIN_BYTES


@pytest.mark.parametrize("size", [10, MIN_BYTES])
def test_a_copy_is_one(size):
    """A copy stays as it was when its original changes."""
    array = np.arange(size, dtype=np.float32)
    copied = Spare().copy(array)
    array[:] = 0
    assert copied.dtype == np.float32
    assert np.array_equal(copied, np.arange(size, dtype=np.float32))
