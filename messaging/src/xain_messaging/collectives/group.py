"""The operations of a group, each with its arguments and its result."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from xain_messaging.collectives.algorithms import (
    broadcast,
    direct_gather,
    direct_scatter,
    disseminate,
    pairwise,
    ring_gather,
    ring_reduce,
    tree_broadcast,
    tree_gather,
    tree_reduce,
)
from xain_messaging.collectives.members import Members
from xain_messaging.collectives.operation import Array, Operation, begin, native
from xain_messaging.collectives.registry import Registry
from xain_messaging.endpoint import Endpoint

Operator: TypeAlias = Literal["sum", "product", "min", "max"]
_OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


class Collectives:
    """The groups of one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.registry = Registry(endpoint)
        self._endpoint = endpoint

    def group(self, name: str, members: Sequence[str], timeout_s: float) -> "Group":
        """Return the one group of these processes. Raises MessagingError for too many groups."""
        group = Group(self._endpoint, self.registry, name, members, timeout_s)
        with self._endpoint.lock:
            known = self.registry.known(group)
        assert isinstance(known, Group)  # nothing else is kept there
        return known


class Group(Members):
    """See Proxy.group, and Members."""

    # From here on the time of the bytes counts for more than that of the steps.
    ring_bytes = 256 << 10

    def __init__(
        self,
        endpoint: Endpoint,
        registry: Registry,
        name: str,
        members: Sequence[str],
        timeout_s: float,
    ) -> None:
        super().__init__(endpoint, name, members)
        self._registry = registry
        self._timeout_s = timeout_s

    def broadcast(
        self, array: Array | None = None, root: int = 0, timeout_s: float | None = None
    ) -> Array:
        """Send the array of `root` to every member. What the others give is ignored, so they need
        not know its shape and dtype."""
        is_root = self.rank == root
        # Members are done one by one; before root has begun none is.
        with self._begin(f"broadcast {root}", timeout_s, is_one_way=not is_root) as operation:
            self._check_rank(root)
            if is_root and array is None:
                raise ValueError(f"the root {root} gives no array to broadcast")
            given = native(array) if is_root and array is not None else None
            return broadcast(operation, given, root, self.ring_bytes)

    def scatter(
        self,
        arrays: Sequence[Array] | Array | None = None,
        root: int = 0,
        timeout_s: float | None = None,
    ) -> Array:
        """Send each member its array from `root`, whose arrays are by rank and may be of any shapes
        and dtypes; or an array, whose first axis they are along. What the others give is ignored.
        Returns the member's own."""
        is_root = self.rank == root
        with self._begin(f"scatter {root}", timeout_s, is_one_way=not is_root) as operation:
            self._check_rank(root)
            given = arrays if is_root else None
            if is_root and (given is None or len(given) != self.size):
                number = "no" if given is None else len(given)
                raise ValueError(f"{number} arrays for {self.size} members")
            return direct_scatter(operation, given, root)

    def reduce(
        self, array: Array, op: Operator = "sum", root: int = 0, timeout_s: float | None = None
    ) -> Array | None:
        """Combine all arrays, element by element. Returns the result at `root`, else None."""
        with self._begin(f"reduce {op} {root}", timeout_s, is_one_way=True) as operation:
            array, combine = operation.given(array), _operator(op)
            self._check_rank(root)
            if array.nbytes < self.ring_bytes:
                return tree_reduce(operation, array, combine, root)
            mine = ring_reduce(operation, _parts(array, self.size), combine)
            parts = direct_gather(operation, mine, root)
            return None if parts is None else np.concatenate(parts).reshape(array.shape)

    def all_reduce(
        self, array: Array, op: Operator = "sum", timeout_s: float | None = None
    ) -> Array:
        """Combine all arrays, element by element. Every member gets the same bits."""
        with self._begin(f"all_reduce {op}", timeout_s) as operation:
            array, combine = operation.given(array), _operator(op)
            if array.nbytes < self.ring_bytes:
                reduced = tree_reduce(operation, array, combine, 0)
                return tree_broadcast(operation, reduced, 0).reshape(array.shape)
            mine = ring_reduce(operation, _parts(array, self.size), combine)
            return np.concatenate(ring_gather(operation, mine)).reshape(array.shape)

    def reduce_scatter(
        self, array: Array, op: Operator = "sum", timeout_s: float | None = None
    ) -> Array:
        """Combine all arrays, element by element. Each member gets its part of the first axis, cut
        as by np.array_split. array: of at least one axis."""
        with self._begin(f"reduce_scatter {op}", timeout_s) as operation:
            array, combine = operation.given(array), _operator(op)
            if not array.ndim:
                raise ValueError("a single number has no axis to be cut along")
            parts: list[Array] = np.array_split(array, self.size)
            shape = parts[self.rank].shape
            if array.nbytes >= self.ring_bytes:
                flat = [part.reshape(-1) for part in parts]
                return ring_reduce(operation, flat, combine).reshape(shape)
            reduced = tree_reduce(operation, array, combine, 0)
            if reduced is None:
                return operation.receive(0, 0).reshape(shape)
            for rank, part in enumerate(np.array_split(reduced, self.size)):
                if rank:
                    operation.send(rank, 0, part)
            return reduced[: shape[0]].copy()

    def gather(self, array: Array, root: int = 0, timeout_s: float | None = None) -> Array | None:
        """Stack all arrays by rank along a new first axis. Returns None except at `root`."""
        with self._begin(f"gather {root}", timeout_s, is_one_way=True) as operation:
            array = operation.given(array)
            self._check_rank(root)
            gather = tree_gather if array.nbytes < self.ring_bytes else direct_gather
            parts = gather(operation, array.reshape(-1), root)
            return None if parts is None else np.stack(parts).reshape(self.size, *array.shape)

    def all_gather(self, array: Array, timeout_s: float | None = None) -> Array:
        """Stack all arrays by rank along a new first axis, at every member."""
        with self._begin("all_gather", timeout_s) as operation:
            array = operation.given(array)
            shape = (self.size, *array.shape)
            if array.nbytes >= self.ring_bytes:
                return np.stack(ring_gather(operation, array.reshape(-1))).reshape(shape)
            parts = tree_gather(operation, array.reshape(-1), 0)
            whole = None if parts is None else np.stack(parts)
            return tree_broadcast(operation, whole, 0).reshape(shape)

    def all_to_all(self, arrays: Sequence[Array], timeout_s: float | None = None) -> list[Array]:
        """Send each member its array; they are by rank, our own among them. Returns what each
        member had for us. The arrays may be of any shapes and dtypes."""
        with self._begin("all_to_all", timeout_s) as operation:
            if len(arrays) != self.size:
                raise ValueError(f"{len(arrays)} arrays for {self.size} members")
            return pairwise(operation, arrays)

    def barrier(self, timeout_s: float | None = None) -> None:
        """Returns when every member has called it."""
        with self._begin("barrier", timeout_s) as operation:
            disseminate(operation)

    def _begin(
        self, kind: str, timeout_s: float | None, *, is_one_way: bool = False
    ) -> AbstractContextManager[Operation]:
        """Begin the next operation of the group, for a `with` block."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return begin(self, self._endpoint, self._registry, kind, timeout_s, is_one_way=is_one_way)

    def _check_rank(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(f"the root {root} is none of the ranks 0 to {self.size - 1}")


def _operator(op: str) -> Callable[..., Any]:
    if op not in _OPERATORS:
        raise ValueError(f"no operator {op!r}; there are {', '.join(_OPERATORS)}")
    return _OPERATORS[op]


def _parts(array: Array, number: int) -> list[Array]:
    """Cut an array into parts, all elements in their order."""
    return np.array_split(array.reshape(-1), number)
