"""The ways of the parts of an operation from member to member. Each step has its number.

Along a binomial tree there are the fewest steps; around a ring every connection carries as little
as possible (Thakur, Rabenseifner and Gropp 2005, Optimization of Collective Communication
Operations in MPICH).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xain_messaging.collectives.operation import Array, Operation, native


def tree_reduce(
    operation: Operation, array: Array, combine: Callable[..., Any], root: int
) -> Array | None:
    """Binomial: at root the whole, None at the others."""
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
    """Binomial; array: at root."""
    rank, size = operation.rank, operation.size
    slot = (rank - root) % size
    distance = 1
    while distance < size and not slot & distance:
        distance *= 2
    if slot:
        array = operation.receive((rank - distance) % size, -2)
    assert array is not None
    while distance > 1:
        distance //= 2
        if slot + distance < size:
            operation.send((rank + distance) % size, -2, array)
    return array


def tree_gather(operation: Operation, array: Array, root: int) -> list[Array] | None:
    """Binomial: at root the arrays by rank, None at the others."""
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


def ring_reduce(operation: Operation, parts: Sequence[Array], combine: Callable[..., Any]) -> Array:
    """Each part goes once around, and what a member has of it is added; it ends at the member of
    its number. Returns that one."""
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
    """Each array, of one axis, goes once around. Returns them by rank."""
    rank, size = operation.rank, operation.size
    right, left = (rank + 1) % size, (rank - 1) % size
    found = [array] * size
    for i in range(size - 1):
        operation.send(right, size + i, found[(rank - i) % size])
        part = operation.receive(left, size + i)
        found[(rank - i - 1) % size] = _final(part)
    return found


def pairwise(operation: Operation, arrays: Sequence[Array]) -> list[Array]:
    """Each of the arrays, which are by rank, to its member. Returns what each had for us."""
    rank, size = operation.rank, operation.size
    found = [native(arrays[rank]).copy()] * size
    # Each to another one in every step, so that nobody is told everything at once.
    for i in range(1, size):
        to, source = (rank + i) % size, (rank - i) % size
        operation.send(to, i, native(arrays[to]))
        found[source] = operation.receive(source, i)
    return found


def disseminate(operation: Operation) -> None:
    """Returns when each has begun (Hensgen, Finkel and Manber 1988, Two Algorithms for Barrier
    Synchronization): after step k each has heard of 2^k others."""
    rank, size = operation.rank, operation.size
    for i in range(math.ceil(math.log2(size))):
        operation.send((rank + 2**i) % size, i, None)
        operation.receive((rank - 2**i) % size, i)


def _final(array: Array) -> Array:
    """Mark an array that will not change any more, so that it is sent without a copy."""
    array.setflags(write=False)
    return array
