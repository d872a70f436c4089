"""Operations that all members of a group take part in, each with an array of its own.

    group = proxy.group("worker")                   # all of the role who are here, by rank
    group = proxy.group("layer 2", ["gpu-1", "gpu-7"])
    total = group.all_reduce(gradient)              # the same bits at every member

Every member calls the same operations of a group in the same order, with arrays of the same shape
and dtype. What comes out is numpy, and the caller's own. Sums and products are of the dtype that
came in, in the machine's byte order: small integers overflow as they do in numpy. A call with wrong
arguments counts: it fails at all members, and the next one works.

A group is of processes, not of names: when one has gone, or has come back as another, it is of no
more use, and those who are there make a new one. One that leaves when it has its result does no
harm to the operation that the result is of. An operation ends at every member, with its result or
with CollectiveFailed, within its time: whoever waits for a member that is gone, or has no more
time, tells the others. Some may have their result by then.

For a moment some may know of one that has come or gone, and others not yet, so that their groups of
one name have other members. Whoever waits for a part for more than LOOK_S asks its member. If that
one is at work in a group of that name with other members, both operations fail; or only that of the
group in which somebody is known to have gone. So two groups of one name that share two members are
not for use at the same time.

A group is for one thread at a time. A second one that calls an operation meanwhile is refused, and
that call does not count: if those of the other members do, they are one ahead from then on.

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_messaging.codec import Frame, encode, snapshot
from xain_messaging.endpoint import Endpoint
from xain_messaging.errors import CollectiveFailed, MessagingError, OutboxFull, PeersMissing
from xain_messaging.links import COLLECTIVE, Delivery
from xain_messaging.messages import Message

ID_LENGTH = 16  # of a group

# From here on the time of the bytes counts for more than that of the steps.
RING_BYTES = 256 << 10

# Of one peer, with members who are all there. What comes before an operation has begun here is
# bounded as all that a peer sends and nobody takes, see links.py.
MAX_GROUPS = 1024

TOLD = "another member says: "

# Of what others say: why an operation has failed, and who is missing.
MAX_WHY = 1000
MAX_NAME = 128  # which is the length of the longest
MAX_NAMES = 100
MAX_ASKED = 1000  # members of the group of one who asks
MAX_SHARED = 100  # groups of one name, of which is told how far they are

# Groups that are no more, by which what still comes for them is known.
MAX_DROPPED = 1024

# Operations that have failed at others before they have begun here. Who does not know it any more
# waits for its own time.
MAX_FAILED = 1024

# How long the word that an operation has failed waits for room on its way to another member; never
# beyond the operation's own time.
ABORT_S = 1.0

# Who waits for room looks so often whether the operation has failed meanwhile; and who waits for a
# part asks after so long whether the groups are the same.
LOOK_S = 0.25

# A member may give its part and leave. The word of that goes another way than the part, and may be
# so much faster.
ON_ITS_WAY_S = 0.5

Operator: TypeAlias = Literal["sum", "product", "min", "max"]
_OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}

T = TypeVar("T")

_Array: TypeAlias = NDArray[Any]
_Place: TypeAlias = tuple[str, int]  # the group's id, the operation's number
_Failure: TypeAlias = tuple[str, tuple[str, ...]]  # why, and who is missing


@dataclass(slots=True)
class _Arrived:
    """What has come of one operation. parts: by sender and step."""

    parts: dict[tuple[str, int], tuple[Message, Delivery]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)


class _Question(NamedTuple):
    """A member waits in this operation of a group of this name, for a part of ours.

    members: names and incarnations. numbers: of the operations that it comes to next in the groups
        of this name that we share. incarnation: its own.
    """

    place: _Place
    name: str
    members: list[tuple[str, int]]
    numbers: dict[str, int]
    incarnation: int


class _Differs(CollectiveFailed):
    """A member is in another group of the same name, and waits there.

    is_over: that other group is no more, so that only that member has to be told.
    """

    def __init__(self, why: str, member: str, place: _Place, *, is_over: bool) -> None:
        super().__init__(why)
        self.member = member
        self.place = place
        self.is_over = is_over


class Collectives:
    """What has come for the groups of one endpoint, also for those that it has not made yet."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._incarnation = endpoint.member.incarnation
        self._roster = endpoint.roster  # that what is over was looked for in
        self._groups: dict[str, Group] = {}
        self._dropped: OrderedDict[str, Group] = OrderedDict()
        self._arrived: dict[_Place, _Arrived] = {}
        self._failed: OrderedDict[_Place, _Failure] = OrderedDict()
        self._questions: dict[str, _Question] = {}  # the last of each member
        endpoint.hear_collectives(self._on_message)

    def group(self, name: str, members: Sequence[str], timeout_s: float) -> "Group":
        """The one of these processes; the same for the same. Raises MessagingError for too many."""
        group = Group(self, name, members, timeout_s)
        with self.endpoint.lock:
            self._drop_what_is_over()
            group = self._groups.get(group.id) or self._dropped.get(group.id) or group
            if not self.has(group) and len(self._groups) >= MAX_GROUPS:
                raise MessagingError(
                    f"there are {MAX_GROUPS} groups of members who are all there, and {name!r} "
                    "would be one more; use their names again"
                )
            self.keep(group)
            return group

    def has(self, group: "Group") -> bool:
        """It has not been dropped. Under the lock, as all below."""
        return group.id in self._groups

    def keep(self, group: "Group") -> None:
        """Also one that was dropped, when its members are there again as who they were."""
        self._dropped.pop(group.id, None)
        self._groups[group.id] = group

    def _drop_what_is_over(self) -> None:
        """Nobody takes part in it any more: what has come for it, and what comes, is taken, or it
        would be kept by its sender for ever."""
        before, roster = self._roster, self.endpoint.roster
        if roster is before and len(self._groups) < MAX_GROUPS:
            return
        self._roster = roster
        for group in [group for group in self._groups.values() if group.gone]:
            if group.is_under_way:
                continue  # who has gone may have done its part
            del self._groups[group.id]
            for place in [place for place in self._arrived if place[0] == group.id]:
                self.forget(place)
            self._dropped[group.id] = group
            if len(self._dropped) > MAX_DROPPED:
                self._dropped.popitem(last=False)
        # What the dead have sent for groups that were never made here, and never can be.
        for place, arrived in list(self._arrived.items()):
            if place[0] in self._groups:
                continue
            for key, (_, delivery) in list(arrived.parts.items()):
                sender = roster.get(delivery.peer, before.get(delivery.peer))
                has_gone = delivery.peer in before and delivery.peer not in roster
                if has_gone or (sender and sender.incarnation > delivery.incarnation):
                    del arrived.parts[key]
                    self.endpoint.take(delivery)
            if not arrived.parts:
                del self._arrived[place]
        for name in self._questions.keys() - roster.keys():
            del self._questions[name]

    def arrived(self, place: _Place) -> _Arrived:
        """Raises CollectiveFailed if another member says that the operation has failed."""
        if place in self._failed:
            why, missing = self._failed[place]
            raise CollectiveFailed(why if why.startswith(TOLD) else f"{TOLD}{why}", missing)
        return self._arrived.setdefault(place, _Arrived())

    def forget(self, place: _Place) -> None:
        """The operation is over; what comes of it later is nobody's."""
        self._failed.pop(place, None)
        arrived = self._arrived.pop(place, None)
        for _, delivery in arrived.parts.values() if arrived else ():
            self.endpoint.take(delivery)

    def check(self, group: "Group") -> None:
        """Raises CollectiveFailed if a member of the group waits for our part in another one of the
        same name; once for each time that it asks. _Differs if it has to be told."""
        for name, question in list(self._questions.items()):
            group_id, number = question.place
            if question.name != group.name or group_id == group.id:
                continue
            if group.incarnations.get(name) != question.incarnation:
                continue  # of another process, or none of this group
            if question.numbers.get(group.id, 0) > group.number:
                continue  # it has done this operation, and is only ahead
            other = self._groups.get(group_id) or self._dropped.get(group_id)
            del self._questions[name]
            if other and (other.number > number or other.is_under_way):
                continue  # it has our part, or gets it
            why = _difference(group, name, question)
            if gone := group.gone:  # it knows, and has made the next one
                raise CollectiveFailed(why, gone)
            raise _Differs(why, name, question.place, is_over=group_id in self._dropped)

    def _on_message(self, message: Message, delivery: Delivery) -> None:
        """Whatever it says: it comes from outside."""
        match message.body:
            case {"group": str(group_id), "number": int(number), "to": to, **rest} if (
                to == self._incarnation  # not the process that was here before under our name
                and len(group_id) == ID_LENGTH
            ):
                pass
            case _:
                self.endpoint.take(delivery)
                return
        group = self._groups.get(group_id)
        place = (group_id, number)
        match rest:
            case {"asks": str(name), "members": list(members), "numbers": list(numbers)}:
                self.endpoint.take(delivery)
                sender = self.endpoint.roster.get(delivery.peer)
                if sender is None or sender.incarnation != delivery.incarnation:
                    return  # none of a group of ours; and there may be any number of such names
                self._questions[delivery.peer] = _Question(
                    place,
                    name[:MAX_WHY],
                    _pairs(members[:MAX_ASKED]),
                    dict(_pairs(numbers[:MAX_SHARED])),
                    delivery.incarnation,
                )
                return
        if (
            group_id in self._dropped
            or (group is not None and number < group.number)  # it is over here
            or place in self._failed
        ):
            self.endpoint.take(delivery)
            return
        match rest:
            case {"failure": str(why), "missing": list(missing)}:
                self.endpoint.take(delivery)
                self.forget(place)
                names = tuple(str(name)[:MAX_NAME] for name in missing[:MAX_NAMES])
                self._failed[place] = (why[:MAX_WHY], names)
                question = self._questions.get(message.source)
                if question is not None and question.place == place:
                    del self._questions[message.source]  # it does not wait any more
                if len(self._failed) > MAX_FAILED:
                    self._failed.popitem(last=False)
            case {"kind": str(kind), "step": int(step), "part": _}:
                arrived = self._arrived.setdefault(place, _Arrived())
                if (message.source, step) in arrived.parts:
                    self.endpoint.take(delivery)
                    return
                arrived.kinds.add(kind)
                arrived.parts[message.source, step] = (message, delivery)
            case _:
                self.endpoint.take(delivery)

    def numbers(self, name: str, member: str) -> list[tuple[str, int]]:
        """Of what comes next in the newest groups of this name that this member is in."""
        groups = [*self._dropped.values(), *self._groups.values()]
        shared = [g for g in groups if g.name == name and member in g.incarnations]
        return [(group.id, group.number) for group in shared[-MAX_SHARED:]]


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
        self.incarnations = {member: roster[member].incarnation for member in members}
        self._incarnations = [*self.incarnations.values()]  # by rank
        self._timeout_s = timeout_s
        self._under_way = threading.Lock()
        self._kind = ""
        self._deadline = 0.0
        text = repr((name, self.members, self._incarnations))
        self.id = hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]

    @property
    def gone(self) -> list[str]:
        """The members that are not there any more, or are other processes by now."""
        return [name for rank, name in enumerate(self.members) if self._has_gone(rank)]

    @property
    def is_under_way(self) -> bool:
        """An operation is."""
        return self._under_way.locked()

    # --- operations ---

    def reduce(
        self, array: _Array, op: Operator = "sum", root: int = 0, timeout_s: float | None = None
    ) -> _Array | None:
        """All arrays combined, element by element, at `root`; None at the others."""
        with self._operation(f"reduce {op} {root}", timeout_s, is_one_way=True):
            array, combine = self._given(array), _operator(op)
            self._check_rank(root)
            if array.nbytes < RING_BYTES:
                return self._tree_reduce(array, combine, root)
            mine = self._ring_reduce(_parts(array, self.size), combine)
            parts = self._direct_gather(mine, root)
            return None if parts is None else np.concatenate(parts).reshape(array.shape)

    def all_reduce(
        self, array: _Array, op: Operator = "sum", timeout_s: float | None = None
    ) -> _Array:
        """All arrays combined, element by element, at every member: the same bits."""
        with self._operation(f"all_reduce {op}", timeout_s):
            array, combine = self._given(array), _operator(op)
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
        with self._operation(f"reduce_scatter {op}", timeout_s):
            array, combine = self._given(array), _operator(op)
            if not array.ndim:
                raise ValueError("a single number has no axis to be cut along")
            parts: list[_Array] = np.array_split(array, self.size)
            shape = parts[self.rank].shape
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
        with self._operation(f"gather {root}", timeout_s, is_one_way=True):
            array = self._given(array)
            self._check_rank(root)
            small = array.nbytes < RING_BYTES
            gather = self._tree_gather if small else self._direct_gather
            parts = gather(array.reshape(-1), root)
            return None if parts is None else np.stack(parts).reshape(self.size, *array.shape)

    def all_gather(self, array: _Array, timeout_s: float | None = None) -> _Array:
        """All arrays at every member, by rank along a new first axis."""
        with self._operation("all_gather", timeout_s):
            array = self._given(array)
            shape = (self.size, *array.shape)
            if array.nbytes >= RING_BYTES:
                return np.stack(self._ring_gather(array.reshape(-1))).reshape(shape)
            parts = self._tree_gather(array.reshape(-1), 0)
            whole = None if parts is None else np.stack(parts)
            return self._tree_broadcast(whole, 0).reshape(shape)

    def all_to_all(self, arrays: Sequence[_Array], timeout_s: float | None = None) -> list[_Array]:
        """One array for each member, by rank, ourselves among them. Returns what each member had
        for us. The arrays may be of any shapes and dtypes."""
        with self._operation("all_to_all", timeout_s):
            if len(arrays) != self.size:
                raise ValueError(f"{len(arrays)} arrays for {self.size} members")
            found = [_native(arrays[self.rank]).copy()] * self.size
            # Each to another one in every step, so that nobody is told everything at once.
            for i in range(1, self.size):
                to, source = (self.rank + i) % self.size, (self.rank - i) % self.size
                self._send(to, i, _native(arrays[to]))
                found[source] = self._receive(source, i)
            return found

    def barrier(self, timeout_s: float | None = None) -> None:
        """Returns when every member has called it."""
        with self._operation("barrier", timeout_s):
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
        self, kind: str, timeout_s: float | None, *, is_one_way: bool = False
    ) -> Iterator[None]:
        """is_one_way: who has given its part is done, and may leave before others have begun. In
        all other operations nobody is done before all have begun."""
        if not self._under_way.acquire(blocking=False):
            raise CollectiveFailed(
                f"another thread has an operation of the group {self.name!r} under way; this call "
                "has done nothing and does not count: use a group from one thread at a time"
            )
        try:
            self._kind = kind
            self._deadline = time.monotonic() + (
                self._timeout_s if timeout_s is None else timeout_s
            )
            with self._endpoint.lock:
                gone = self.gone
                if gone and not (is_one_way and self._collectives.has(self)):
                    raise self._failure_for(gone)
                self._collectives.keep(self)
            yield
        except CollectiveFailed as failed:
            self._tell(str(failed), failed.missing)
            if isinstance(failed, _Differs):
                self._answer(failed)
            raise
        except MessagingError as error:
            self._tell(str(error), ())
            raise CollectiveFailed(f"{self._kind} has failed: {error}") from error
        except Exception as error:  # wrong arguments, a part that is none: the others must not wait
            self._tell(f"{type(error).__name__} at {self._endpoint.name!r}: {error}", ())
            raise
        finally:
            with self._endpoint.lock:
                self._collectives.forget((self.id, self.number))
                self.number += 1
            self._under_way.release()

    def _given(self, array: ArrayLike) -> _Array:
        """What the caller has given. Its dtype and shape have to be those of the others."""
        plain = _native(array)
        self._kind = f"{self._kind} {plain.dtype.str} {plain.shape}"
        return plain

    def _check_rank(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(f"the root {root} is none of the ranks 0 to {self.size - 1}")

    def _send(self, rank: int, step: int, part: _Array | None) -> None:
        flat = None if part is None else part if part.ndim < 2 else np.ascontiguousarray(part)
        message = self._message(
            rank, (self.id, self.number), {"kind": self._kind, "step": step, "part": flat}
        )
        frames = snapshot(encode(message))

        def look() -> bool:
            self._arrived()
            if self._has_gone(rank):
                raise self._failure_for([self.members[rank]])
            return True

        while True:
            now = time.monotonic()
            self._wait_for(look, now)
            try:
                return self._post(message, frames, min(self._deadline, now + LOOK_S))
            except OutboxFull as full:
                # It may be full because the operation has failed, here or there: look again.
                if now >= self._deadline:
                    why = f"{self._kind} has failed: {full}"
                    raise CollectiveFailed(why, (self.members[rank],)) from full

    def _message(self, rank: int, place: _Place, body: dict[str, Any]) -> Message:
        group_id, number = place
        where = {"group": group_id, "number": number, "to": self._incarnations[rank]}
        return Message("collective", self._endpoint.name, self.members[rank], {**where, **body})

    def _post(self, message: Message, frames: list[Frame], deadline: float) -> None:
        self._endpoint.post(message, COLLECTIVE, frames, deadline)

    def _try_to_post(
        self, rank: int, place: _Place, body: dict[str, Any], deadline: float = 0.0
    ) -> None:
        """What is only to be quicker than time."""
        message = self._message(rank, place, body)
        with suppress(MessagingError):
            self._post(message, encode(message), deadline)

    def _receive(self, rank: int, step: int) -> _Array:
        """The part that this member sends in this step."""
        name = self.members[rank]

        def take() -> list[_Array] | None:
            entry = self._arrived().parts.pop((name, step), None)
            if entry is None:
                return None
            message, delivery = entry
            self._endpoint.take(delivery)
            return [message.body["part"]]

        def take_or_give_up() -> list[_Array] | None:
            return take() or ([] if self._has_gone(rank) else None)

        asks_at = min(self._deadline, time.monotonic() + LOOK_S)
        taken = self._wait_for(take_or_give_up, asks_at)
        if taken is None:
            self._ask(rank)
            taken = self._wait_for(take_or_give_up, self._deadline)
        if taken is None:
            why = f"{self._kind} has failed: {name!r} has not sent its part in time"
            raise CollectiveFailed(why, (name,))
        if not taken:
            taken = self._wait_for(take, min(self._deadline, time.monotonic() + ON_ITS_WAY_S))
        if not taken:
            raise self._failure_for([name])
        return taken[0]

    def _ask(self, rank: int) -> None:
        with self._endpoint.lock:
            numbers = self._collectives.numbers(self.name, self.members[rank])
        members = list(self.incarnations.items())
        body = {"asks": self.name, "members": members, "numbers": numbers}
        self._try_to_post(rank, (self.id, self.number), body)

    def _wait_for(self, attempt: Callable[[], T | None], deadline: float) -> T | None:
        """As that of the endpoint. Who waits in a group that is over is told so, and no more."""
        while True:
            try:
                return self._endpoint.wait_for(attempt, deadline)
            except _Differs as differs:
                if not differs.is_over:
                    raise
                self._answer(differs)

    def _answer(self, differs: _Differs) -> None:
        rank = self.members.index(differs.member)
        self._try_to_post(rank, differs.place, {"failure": str(differs), "missing": []})

    def _arrived(self) -> _Arrived:
        """Raises CollectiveFailed if another member says that the operation has failed, or calls
        another one, or is in another group."""
        self._collectives.check(self)
        arrived = self._collectives.arrived((self.id, self.number))
        if others := arrived.kinds - {self._kind}:
            raise CollectiveFailed(
                f"{self._kind!r} is called here, and {min(others)!r} at another member"
            )
        return arrived

    def _has_gone(self, rank: int) -> bool:
        """This member is not there any more, or is another process by now. The others do not
        matter to who waits for this one: they may have done their part."""
        member = self._endpoint.roster.get(self.members[rank])
        return member is None or member.incarnation != self._incarnations[rank]

    def _failure_for(self, gone: Sequence[str]) -> CollectiveFailed:
        return CollectiveFailed(
            f"{self._kind} has failed: not there any more, or another process by now: "
            f"{', '.join(gone)}; make the group anew",
            gone,
        )

    def _tell(self, why: str, missing: Sequence[str]) -> None:
        """The others, those whose part is missing too, since they may only be late; as far as they
        can be told."""
        deadline = min(self._deadline, time.monotonic() + ABORT_S)
        for rank in range(self.size):
            if rank != self.rank and not self._has_gone(rank):
                body = {"failure": why, "missing": list(missing)}
                self._try_to_post(rank, (self.id, self.number), body, deadline)


def _pairs(items: list[object]) -> list[tuple[str, int]]:
    """Those that are a name and a number."""
    pairs = []
    for item in items:
        match item:
            case [str(name), int(number)]:
                pairs.append((name[:MAX_NAME], number))
    return pairs


def _difference(group: Group, other: str, question: _Question) -> str:
    """As text for both sides."""
    ours, theirs = set(group.incarnations.items()), set(question.members)
    own = group.members[group.rank]
    parts = [
        f"only in that of {whose!r}: {_names(members)}"
        for whose, members in ((own, ours - theirs), (other, theirs - ours))
        if members
    ] or ["they are in another order"]
    return (
        f"{own!r} and {other!r} do not agree on who is in the group {group.name!r}; "
        f"{', and '.join(parts)}. Make it anew; name its members, or expect all of them when the "
        "proxy is made, to begin with the same"
    )


def _names(members: set[tuple[str, int]]) -> str:
    names = sorted(f"{name!r}" for name, _ in members)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _operator(op: str) -> Callable[..., Any]:
    if op not in _OPERATORS:
        raise ValueError(f"no operator {op!r}; there are {', '.join(_OPERATORS)}")
    return _OPERATORS[op]


def _native(array: ArrayLike) -> _Array:
    """In the machine's byte order, as what the others send comes out: so that all members have the
    same bits."""
    plain: _Array = np.asarray(array)
    return plain.astype(plain.dtype.newbyteorder("="), copy=False)


def _parts(array: _Array, number: int) -> list[_Array]:
    """Of all elements in their order."""
    return np.array_split(array.reshape(-1), number)


def _final(array: _Array) -> _Array:
    """It is ours and will not change any more: so it need not be copied to be sent."""
    array.setflags(write=False)
    return array
