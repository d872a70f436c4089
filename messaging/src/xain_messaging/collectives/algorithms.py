"""The ways of the parts of an operation from member to member. Each step has its number.

Along a binomial tree there are the fewest steps; around a ring every connection carries as little
as possible (Thakur, Rabenseifner and Gropp 2005, Optimization of Collective Communication
Operations in MPICH).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from xain_messaging.collectives.operation import Array, Operation, native

# Bytes of a piece of a large broadcast: small beside the array, so that all members are at work
# for nearly all of the time, and large beside what a message costs.
PIECE_BYTES: Final = 1 << 20


def tree_reduce(
    operation: Operation, array: Array, combine: Callable[..., Any], root: int
) -> Array | None:
    """Combine all members' arrays on a binomial tree. Returns the whole at root, else None."""
    rank, size = operation.rank, operation.size
    slot = (rank - root) % size
    total = array.copy()
    distance = 1
    while distance < size:
        if slot & distance:
            operation.send((rank - distance) % size, -1, _final(total))
            return None
        if slot + distance < size:
            part = operation.receive((rank + distance) % size, -1)
            combine(total, part.reshape(total.shape), out=total)
        distance *= 2
    return total


def tree_broadcast(operation: Operation, array: Array | None, root: int) -> Array:
    """Send an array from root down a binomial tree. Returns it. array: at root."""
    found = _down_tree(operation, array, root)
    assert found is not None
    return found


def _down_tree(operation: Operation, part: Array | None, root: int) -> Array | None:
    """Send the part of root, an array or None, to all members. Returns that part."""
    rank, size = operation.rank, operation.size
    slot = (rank - root) % size
    distance = 1
    while distance < size and not slot & distance:
        distance *= 2
    if slot:
        part = operation.receive((rank - distance) % size, -2)
    while distance > 1:
        distance //= 2
        if slot + distance < size:
            operation.send((rank + distance) % size, -2, part)
    return part


def broadcast(operation: Operation, array: Array | None, root: int, large_bytes: int) -> Array:
    """Send an array, whose size root alone knows, to all members. array: at root.

    A small array goes down a binomial tree. For a large one None goes down the tree, and then the
    array from member to member.
    """
    is_large = array is not None and array.nbytes >= large_bytes
    found = _down_tree(operation, None if is_large else array, root)
    if found is None:
        return _chain(operation, array, root)
    return found if array is None else array.copy()


def _chain(operation: Operation, array: Array | None, root: int) -> Array:
    """Send an array from root to the member on its right, and so on, in pieces: each connection
    carries it once, and a member passes a piece on while the next one comes. array: at root."""
    rank, size = operation.rank, operation.size
    right, left = (rank + 1) % size, (rank - 1) % size
    if array is not None:
        if right != root:
            flat = array.reshape(-1)
            length = max(1, PIECE_BYTES // flat.itemsize)
            operation.send(right, 0, np.array(array.shape, np.int64))
            for step, begin in enumerate(range(0, max(1, flat.size), length), 1):
                operation.send(right, step, flat[begin : begin + length])
        return array.copy()

    def passed_on(step: int) -> Array:
        part = operation.receive(left, step)
        if right != root:
            operation.send(right, step, _final(part))
        return part

    shape = tuple(passed_on(0).tolist())
    first = passed_on(1)
    found = np.empty(shape, first.dtype)
    flat = found.reshape(-1)
    flat[: first.size] = first
    filled, step = first.size, 1
    while filled < flat.size:
        step += 1
        part = passed_on(step)
        flat[filled : filled + part.size] = part
        filled += part.size
    return found


def tree_gather(operation: Operation, array: Array, root: int) -> list[Array] | None:
    """Gather arrays on a binomial tree. Returns the arrays by rank at root, else None."""
    rank, size = operation.rank, operation.size
    slot = (rank - root) % size
    found = [array]  # of those at `slot` and after it
    distance = 1
    while distance < size:
        if slot & distance:
            operation.send((rank - distance) % size, -3, _final(np.stack(found)))
            return None
        if slot + distance < size:
            found += list(operation.receive((rank + distance) % size, -3))
        distance *= 2
    return [found[(of - root) % size] for of in range(size)]


def direct_gather(operation: Operation, array: Array, root: int) -> list[Array] | None:
    """Each member sends its array to root. Returns the arrays by rank there, None elsewhere."""
    if operation.rank != root:
        operation.send(root, -4, array)
        return None
    ranks = range(operation.size)
    return [array if rank == root else operation.receive(rank, -4) for rank in ranks]


def direct_scatter(
    operation: Operation, arrays: Sequence[Array] | Array | None, root: int
) -> Array:
    """Send each member its array from root. arrays: at root, by rank. Returns our own."""
    if arrays is None:
        return operation.receive(root, 0)
    for rank, array in enumerate(arrays):
        if rank != root:
            operation.send(rank, 0, native(array))
    return native(arrays[root]).copy()


def ring_reduce(operation: Operation, parts: Sequence[Array], combine: Callable[..., Any]) -> Array:
    """Combine parts around the ring; each ends at the member of its number. Returns this one's."""
    rank, size = operation.rank, operation.size
    right, left = (rank + 1) % size, (rank - 1) % size
    part = parts[(rank - 1) % size]
    if size == 1:
        return part.copy()
    for i in range(size - 1):
        operation.send(right, i, part)
        part = operation.receive(left, i)
        combine(part, parts[(rank - 2 - i) % size], out=part)
        if i < size - 2:
            part = _final(part)
    return part


def ring_gather(operation: Operation, array: Array) -> list[Array]:
    """Send each member's array, of one axis, around the ring. Returns them by rank."""
    rank, size = operation.rank, operation.size
    right, left = (rank + 1) % size, (rank - 1) % size
    found = [array] * size
    for i in range(size - 1):
        operation.send(right, size + i, found[(rank - i) % size])
        part = operation.receive(left, size + i)
        found[(rank - i - 1) % size] = _final(part)
    return found


def pairwise(operation: Operation, arrays: Sequence[Array]) -> list[Array]:
    """Send each member its array; they are by rank. Returns what each member had for this one."""
    rank, size = operation.rank, operation.size
    found = [native(arrays[rank]).copy()] * size
    # Each to another one in every step, so that nobody is told everything at once.
    for i in range(1, size):
        to, source = (rank + i) % size, (rank - i) % size
        operation.send(to, i, native(arrays[to]))
        found[source] = operation.receive(source, i)
    return found


def disseminate(operation: Operation) -> None:
    """Wait until each member has begun (Hensgen, Finkel and Manber 1988, Two Algorithms for Barrier
    Synchronization): after step k each has heard of 2^k others."""
    rank, size = operation.rank, operation.size
    for i in range(math.ceil(math.log2(size))):
        operation.send((rank + 2**i) % size, i, None)
        operation.receive((rank - 2**i) % size, i)


def _final(array: Array) -> Array:
    """Mark an array that will not change any more, so that it is sent without a copy."""
    array.setflags(write=False)
    return array
