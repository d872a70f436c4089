"""Memory for copies."""

import numpy as np

from xain_messaging.spare import MIN_BYTES, Spare


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def ones(size: int) -> memoryview:
    return np.ones(size, np.uint8).data


def test_a_copy_is_a_copy() -> None:
    """It stays as it was when its original changes."""
    for size in (100, MIN_BYTES):
        original = np.ones(size, np.uint8)
        copy = Spare(0).copy(original.data)
        original[:] = 0
        assert bytes(copy) == b"\1" * size


def test_memory_that_nobody_has_is_lent_again() -> None:
    """For as many bytes; a part of it is enough to have it."""
    spare = Spare(10 * MIN_BYTES)
    first = spare.copy(ones(MIN_BYTES))
    place = address(first)
    part = first[50:60]
    del first
    second = spare.lend(MIN_BYTES)
    assert address(second) != place
    second[:] = bytes(MIN_BYTES)
    assert bytes(part) == b"\1" * 10
    del part
    assert address(spare.lend(MIN_BYTES + 1)) != place
    assert address(spare.lend(MIN_BYTES)) == place


def test_what_waits_has_a_bound() -> None:
    """What came back first goes first; what is larger than all does not wait, nor what is small."""
    spare = Spare(5 * MIN_BYTES // 2)
    sizes = (10, MIN_BYTES, MIN_BYTES + 1, MIN_BYTES + 2, 3 * MIN_BYTES)
    lent = [spare.lend(size) for size in sizes]
    for num_bytes in (0, MIN_BYTES, 2 * MIN_BYTES + 1, 2 * MIN_BYTES + 3, 0):
        del lent[0]
        assert spare.num_bytes == num_bytes
