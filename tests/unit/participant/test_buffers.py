"""Memory that is used again, and never while somebody can reach it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from xain_participant.buffers import Buffers

SIZE = 1 << 16


def address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


def test_what_nobody_holds_is_used_again() -> None:
    buffers = Buffers()
    first = address(buffers.take(SIZE))
    for _ in range(3):
        array = buffers.take(SIZE)
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
        lambda array: np.frombuffer(array, np.int32),
        lambda array: [array[1:]],
        lambda array: array.base,
        lambda array: np.asarray(array.base),
        lambda array: np.asarray(array[128:].base)[1:],
    ],
)
def test_what_somebody_holds_is_not_used_again(view: Callable[[NDArray[Any]], Any]) -> None:
    """Whatever they hold of it, and for as long as they do."""
    buffers = Buffers()
    array = buffers.take(SIZE)
    array[:] = 7
    first, held = address(array), view(array)
    before = np.asarray(held).tobytes()
    del array
    for _ in range(3):
        other = buffers.take(SIZE)
        assert address(other) != first
        other[:] = 1
        del other
    assert np.asarray(held).tobytes() == before


def test_one_buffer_is_kept_of_the_latest_size() -> None:
    """A model of another size leaves none of the first, and many at once leave one."""
    buffers = Buffers()
    arrays = [buffers.take(SIZE) for _ in range(3)]
    arrays.clear()
    assert len(buffers._free) == 1
    buffers.take(2 * SIZE)
    assert [len(memory) for memory in buffers._free] == [2 * SIZE]
    assert len(buffers.take(0)) == 0


def test_a_copy_is_one() -> None:
    buffers = Buffers()
    array = np.arange(10, dtype=np.float32)
    copied = buffers.copy(array)
    array[:] = 0
    assert copied.dtype == np.float32
    assert copied.tolist() == list(range(10))
