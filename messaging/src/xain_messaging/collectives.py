"""Operations that all members of a group take part in, each with an array of its own.

    group = proxy.group("worker")                   # all of the role who are here, by rank
    group = proxy.group("layer 2", ["gpu-1", "gpu-7"])
    total = group.all_reduce(gradient)              # the same bits at every member

Every member calls the same operations of a group in the same order, with arrays of the same shape
and dtype. What comes out is numpy, and the caller's own. Sums and products are of the dtype that
came in: small integers overflow as they do in numpy.

A group is of processes, not of names: when one has gone, or has come back as another, it is of no
more use, and those who are there make a new one. An operation ends at every member, with its result
or with CollectiveFailed, within its time: whoever finds that a member is missing, or has no more
time, tells the others. Some may have their result by then.

Small arrays go along a binomial tree, which takes the fewest steps; large ones around a ring, in as
many parts as there are members, so that every line carries as little as possible (Thakur,
Rabenseifner and Gropp 2005, Optimization of Collective Communication Operations in MPICH). In both
the order of a reduction depends on the ranks alone.
"""

import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xain_messaging.codec import encode, snapshot
from xain_messaging.endpoint import Endpoint
from xain_messaging.errors import CollectiveFailed, MessagingError, OutboxFull, PeersMissing
from xain_messaging.links import COLLECTIVE, Delivery
from xain_messaging.messages import Message

# From here on the time of the bytes counts for more than that of the steps.
RING_BYTES = 256 << 10

# Operations that others have begun and we have not.
MAX_EARLY = 1024

# How long the word that an operation has failed waits for room on its way to another member.
ABORT_S = 1.0

# Who waits for room looks so often whether the operation has failed meanwhile.
LOOK_S = 0.25

Operator: TypeAlias = Literal["sum", "product", "min", "max"]
_OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}

_Array: TypeAlias = NDArray[Any]
_Place: TypeAlias = tuple[str, int]  # the group's id, the operation's number


@dataclass(slots=True)
class _Arrived:
    """What has come of one operation. parts: by rank and step."""

    parts: dict[tuple[int, int], tuple[Message, Delivery]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    failure: tuple[str, tuple[str, ...]] | None = None


class Collectives:
    """What has come for the groups of one endpoint, also for those that it has not made yet."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._groups: dict[str, Group] = {}
        self._arrived: dict[_Place, _Arrived] = {}
        self._dropped: OrderedDict[str, None] = OrderedDict()  # ids of groups that are no more
        endpoint.hear_collectives(self._on_message)

    def group(self, name: str, members: Sequence[str], timeout_s: float) -> "Group":
        """The one of these processes; the same for the same."""
        group = Group(self, name, members, timeout_s)
        with self.endpoint.lock:
            for old in [old for old in self._groups.values() if old.gone]:
                self._drop(old.id)
            return self._groups.setdefault(group.id, group)

    def _drop(self, group_id: str) -> None:
        """Nobody takes part in it any more: what has come for it, and what comes, is taken, or it
        would be kept by its sender for ever."""
        del self._groups[group_id]
        for place in [place for place in self._arrived if place[0] == group_id]:
            self.forget(place)
        self._dropped[group_id] = None
        if len(self._dropped) > MAX_EARLY:
            self._dropped.popitem(last=False)

    def of(self, place: _Place) -> _Arrived:
        """Under the lock."""
        if place not in self._arrived and len(self._arrived) >= MAX_EARLY:
            # Some are for processes that were here before us, under our name.
            for other in [other for other in self._arrived if other[0] not in self._groups]:
                self.forget(other)
        return self._arrived.setdefault(place, _Arrived())

    def forget(self, place: _Place) -> None:
        """The operation is over; what comes of it later is nobody's. Under the lock."""
        arrived = self._arrived.pop(place, None)
        for _, delivery in arrived.parts.values() if arrived else ():
            self.endpoint.take(delivery)

    def _on_message(self, message: Message, delivery: Delivery) -> None:
        """Whatever it says: it comes from outside."""
        match message.body:
            case {"group": str(group_id), "number": int(number), "rank": int(rank), **rest}:
                pass
            case _:
                self.endpoint.take(delivery)
                return
        group = self._groups.get(group_id)
        if group_id in self._dropped or (group is not None and number < group.number):
            self.endpoint.take(delivery)  # of an operation that is over here
            return
        arrived = self.of((group_id, number))
        match rest:
            case {"failure": str(why), "missing": list(missing)}:
                self.endpoint.take(delivery)
                arrived.failure = arrived.failure or (why, tuple(map(str, missing)))
            case {"kind": str(kind), "step": int(step), "part": _}:
                arrived.kinds.add(kind)
                arrived.parts[rank, step] = (message, delivery)
            case _:
                self.endpoint.take(delivery)


class Group:
    """See Proxy.group.

    rank: our own, from 0 on, in the order of the members; size: how many there are.
    """

    def __init__(
        self, collectives: Collectives, name: str, members: Sequence[str], timeout_s: float
    ) -> None:
        endpoint = collectives.endpoint
        roster = endpoint.roster
        if missing := [member for member in members if member not in roster]:
            raise PeersMissing(f"of the group {name!r}, not here: {', '.join(missing)}", missing)
        if endpoint.name not in members or len(set(members)) != len(members):
            raise ValueError(
                f"the group {name!r} must name {endpoint.name!r} and nobody twice: {list(members)}"
            )
        self.name = name
        self.members = tuple(members)
        self.rank = self.members.index(endpoint.name)
        self.size = len(self.members)
        self.number = 0  # of the operation that is under way or comes next
        self._collectives = collectives
        self._endpoint = endpoint
        self._incarnations = [roster[member].incarnation for member in members]
        self._timeout_s = timeout_s
        self._under_way = threading.Lock()
        self._kind = ""
        self._deadline = 0.0
        text = repr((name, self.members, self._incarnations))
        self.id = hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def gone(self) -> list[str]:
        """The members that are not there any more, or are other processes by now."""
        roster = self._endpoint.roster
        return [
            name
            for name, incarnation in zip(self.members, self._incarnations, strict=True)
            if name not in roster or roster[name].incarnation != incarnation
        ]

    # --- operations ---

    def reduce(
        self, array: _Array, op: Operator = "sum", root: int = 0, timeout_s: float | None = None
    ) -> _Array | None:
        """All arrays combined, element by element, at `root`; None at the others."""
        array, combine = np.asarray(array), _OPERATORS[op]
        with self._operation(f"reduce {op} {root}", array, timeout_s):
            if array.nbytes < RING_BYTES:
                return self._tree_reduce(array, combine, root)
            mine = self._ring_reduce(_parts(array, self.size), combine)
            parts = self._direct_gather(mine, root)
            return None if parts is None else np.concatenate(parts).reshape(array.shape)

    def all_reduce(
        self, array: _Array, op: Operator = "sum", timeout_s: float | None = None
    ) -> _Array:
        """All arrays combined, element by element, at every member: the same bits."""
        array, combine = np.asarray(array), _OPERATORS[op]
        with self._operation(f"all_reduce {op}", array, timeout_s):
            if array.nbytes < RING_BYTES:
                reduced = self._tree_reduce(array, combine, 0)
                return self._tree_broadcast(reduced, 0).reshape(array.shape)
            mine = self._ring_reduce(_parts(array, self.size), combine)
            return np.concatenate(self._ring_gather(mine)).reshape(array.shape)

    def reduce_scatter(
        self, array: _Array, op: Operator = "sum", timeout_s: float | None = None
    ) -> _Array:
        """All arrays combined, element by element; each member gets its part of the first axis, cut
        as by np.array_split. array: of at least one axis."""
        array, combine = np.asarray(array), _OPERATORS[op]
        parts: list[_Array] = np.array_split(array, self.size)
        shape = parts[self.rank].shape
        with self._operation(f"reduce_scatter {op}", array, timeout_s):
            if array.nbytes >= RING_BYTES:
                part = self._ring_reduce([part.reshape(-1) for part in parts], combine)
                return part.reshape(shape)
            reduced = self._tree_reduce(array, combine, 0)
            if reduced is None:
                part = self._receive(0, 0)
                return part.reshape(shape)
            for rank, part in enumerate(np.array_split(reduced, self.size)):
                if rank:
                    self._send(rank, 0, part)
            return reduced[: shape[0]].copy()

    def gather(self, array: _Array, root: int = 0, timeout_s: float | None = None) -> _Array | None:
        """All arrays at `root`, by rank along a new first axis; None at the others."""
        array = np.asarray(array)
        with self._operation(f"gather {root}", array, timeout_s):
            small = array.nbytes < RING_BYTES
            gather = self._tree_gather if small else self._direct_gather
            parts = gather(array.reshape(-1), root)
            return None if parts is None else np.stack(parts).reshape(self.size, *array.shape)

    def all_gather(self, array: _Array, timeout_s: float | None = None) -> _Array:
        """All arrays at every member, by rank along a new first axis."""
        array = np.asarray(array)
        shape = (self.size, *array.shape)
        with self._operation("all_gather", array, timeout_s):
            if array.nbytes >= RING_BYTES:
                return np.stack(self._ring_gather(array.reshape(-1))).reshape(shape)
            parts = self._tree_gather(array.reshape(-1), 0)
            whole = None if parts is None else np.stack(parts)
            return self._tree_broadcast(whole, 0).reshape(shape)

    def all_to_all(self, arrays: Sequence[_Array], timeout_s: float | None = None) -> list[_Array]:
        """One array for each member, by rank, ourselves among them. Returns what each member had
        for us. The arrays may be of any shapes and dtypes."""
        if len(arrays) != self.size:
            raise ValueError(f"{len(arrays)} arrays for {self.size} members")
        with self._operation("all_to_all", None, timeout_s):
            found = [np.array(arrays[self.rank])] * self.size
            # Each to another one in every step, so that nobody is told everything at once.
            for i in range(1, self.size):
                to, source = (self.rank + i) % self.size, (self.rank - i) % self.size
                self._send(to, i, np.asarray(arrays[to]))
                found[source] = self._receive(source, i)
            return found

    def barrier(self, timeout_s: float | None = None) -> None:
        """Returns when every member has called it."""
        with self._operation("barrier", None, timeout_s):
            # Dissemination (Hensgen, Finkel and Manber 1988, Two Algorithms for Barrier
            # Synchronization): after step k each has heard of 2^k others.
            for i in range(math.ceil(math.log2(self.size))):
                self._send((self.rank + 2**i) % self.size, i, None)
                self._receive((self.rank - 2**i) % self.size, i)

    # --- algorithms: each step of an operation has its number ---

    def _tree_reduce(self, array: _Array, combine: Callable[..., Any], root: int) -> _Array | None:
        """Binomial: at root the whole, None at the others."""
        place = (self.rank - root) % self.size
        total = array.copy()
        distance = 1
        while distance < self.size:
            if place & distance:
                self._send((self.rank - distance) % self.size, -1, _final(total))
                return None
            if place + distance < self.size:
                part = self._receive((self.rank + distance) % self.size, -1)
                combine(total, part.reshape(total.shape), out=total)
            distance *= 2
        return total

    def _tree_broadcast(self, array: _Array | None, root: int) -> _Array:
        """Binomial; array: at root."""
        place = (self.rank - root) % self.size
        distance = 1
        while distance < self.size and not place & distance:
            distance *= 2
        if place:
            array = self._receive((self.rank - distance) % self.size, -2)
        assert array is not None
        while distance > 1:
            distance //= 2
            if place + distance < self.size:
                self._send((self.rank + distance) % self.size, -2, array)
        return array

    def _tree_gather(self, array: _Array, root: int) -> list[_Array] | None:
        """Binomial: at root the arrays by rank, None at the others."""
        place = (self.rank - root) % self.size
        found = [array]  # of those at `place` and after it
        distance = 1
        while distance < self.size:
            if place & distance:
                self._send((self.rank - distance) % self.size, -3, _final(np.stack(found)))
                return None
            if place + distance < self.size:
                found += list(self._receive((self.rank + distance) % self.size, -3))
            distance *= 2
        return [found[(rank - root) % self.size] for rank in range(self.size)]

    def _direct_gather(self, array: _Array, root: int) -> list[_Array] | None:
        if self.rank != root:
            self._send(root, -4, array)
            return None
        return [array if rank == root else self._receive(rank, -4) for rank in range(self.size)]

    def _ring_reduce(self, parts: Sequence[_Array], combine: Callable[..., Any]) -> _Array:
        """Each part goes once around, and what a member has of it is added; it ends at the member
        of its number. Returns that one."""
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        part = parts[(self.rank - 1) % self.size]
        if self.size == 1:
            return part.copy()
        for i in range(self.size - 1):
            self._send(right, i, part)
            part = self._receive(left, i)
            combine(part, parts[(self.rank - 2 - i) % self.size], out=part)
            if i < self.size - 2:
                part = _final(part)
        return part

    def _ring_gather(self, array: _Array) -> list[_Array]:
        """Each array goes once around. Returns them by rank. Of one axis, as all below."""
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        found = [array] * self.size
        for i in range(self.size - 1):
            self._send(right, self.size + i, found[(self.rank - i) % self.size])
            part = self._receive(left, self.size + i)
            found[(self.rank - i - 1) % self.size] = _final(part)
        return found

    # --- between members ---

    @contextmanager
    def _operation(
        self, kind: str, array: _Array | None, timeout_s: float | None
    ) -> Iterator[None]:
        if array is not None:
            kind = f"{kind} {array.dtype.str} {array.shape}"
        if not self._under_way.acquire(blocking=False):
            raise CollectiveFailed(f"another operation of the group {self.name!r} is under way")
        try:
            self._kind = kind
            self._deadline = time.monotonic() + (
                self._timeout_s if timeout_s is None else timeout_s
            )
            yield
        except CollectiveFailed as failed:
            self._tell(str(failed), failed.missing)
            raise
        except MessagingError as error:
            self._tell(str(error), ())
            raise CollectiveFailed(f"{kind} has failed: {error}") from error
        except Exception as error:  # a part that is none, say: the others are not to wait
            self._tell(f"{type(error).__name__} at {self._endpoint.name!r}", ())
            raise
        finally:
            with self._endpoint.lock:
                self._collectives.forget((self.id, self.number))
                self.number += 1
            self._under_way.release()

    def _send(self, rank: int, step: int, part: _Array | None) -> None:
        flat = None if part is None else part if part.ndim < 2 else np.ascontiguousarray(part)
        body = {"kind": self._kind, "step": step, "part": flat}
        while True:
            now = time.monotonic()
            try:
                return self._post(rank, body, min(self._deadline, now + LOOK_S))
            except OutboxFull as full:
                # It may be full because the operation has failed, here or there.
                with self._endpoint.lock:
                    self._check_others(self._collectives.of((self.id, self.number)))
                    self._check_members()
                if now >= self._deadline:
                    why = f"{self._kind} has failed: {full}"
                    raise CollectiveFailed(why, (self.members[rank],)) from full

    def _post(self, rank: int, body: dict[str, Any], deadline: float) -> None:
        message = Message(
            "collective",
            self._endpoint.name,
            self.members[rank],
            {"group": self.id, "number": self.number, "rank": self.rank, **body},
        )
        self._endpoint.post(message, COLLECTIVE, snapshot(encode(message)), deadline)

    def _receive(self, rank: int, step: int) -> _Array:
        """The part that this member sends in this step."""

        def take() -> tuple[_Array] | None:
            arrived = self._collectives.of((self.id, self.number))
            self._check_others(arrived)
            if (rank, step) in arrived.parts:
                # Even if its sender has gone since.
                message, delivery = arrived.parts.pop((rank, step))
                self._endpoint.take(delivery)
                return (message.body["part"],)
            self._check_members()
            return None

        taken = self._endpoint.wait_for(take, self._deadline)
        if taken is None:
            raise CollectiveFailed(
                f"{self._kind} has failed: {self.members[rank]!r} has not sent its part in time",
                (self.members[rank],),
            )
        return taken[0]

    def _check_others(self, arrived: _Arrived) -> None:
        """Raises CollectiveFailed if another member says that the operation has failed, or calls
        another one."""
        if arrived.failure is not None:
            why, missing = arrived.failure
            raise CollectiveFailed(f"another member says: {why}", missing)
        if others := arrived.kinds - {self._kind}:
            raise CollectiveFailed(
                f"{self._kind!r} is called here, and {min(others)!r} at another member"
            )

    def _check_members(self) -> None:
        """Raises CollectiveFailed if one of them is gone."""
        if gone := self.gone:
            raise CollectiveFailed(
                f"{self._kind} has failed: not there any more, or another process by now: "
                f"{', '.join(gone)}; make the group anew",
                gone,
            )

    def _tell(self, why: str, missing: Sequence[str]) -> None:
        """The others; as far as they can be told."""
        deadline = time.monotonic() + ABORT_S
        for rank in range(self.size):
            if rank == self.rank or self.members[rank] in missing:
                continue
            try:
                self._post(rank, {"failure": why, "missing": list(missing)}, deadline)
            except MessagingError:
                continue  # it has its own time


def _parts(array: _Array, number: int) -> list[_Array]:
    """Of all elements in their order."""
    return np.array_split(array.reshape(-1), number)


def _final(array: _Array) -> _Array:
    """It is ours and will not change any more: so it need not be copied to be sent."""
    array.setflags(write=False)
    return array
