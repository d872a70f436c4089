"""An operation of a group: the parts that go between its members until it is over."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_foundation.net.errors import MessagingError
from xain_messaging.collectives.members import Members, Step
from xain_messaging.collectives.registry import Arrived, Registry
from xain_messaging.endpoint import Endpoint
from xain_messaging.errors import CollectiveFailed, OutboxFull
from xain_messaging.format.codec import Parts, encode, snapshot
from xain_messaging.format.messages import Message
from xain_messaging.links import COLLECTIVE

# How long the word that an operation has failed waits for room on its way to another member; never
# beyond the operation's own time.
ABORT_S = 1.0

# A member that waits for room looks so often whether the operation has failed meanwhile; one that
# waits for a part asks after so long whether the groups are the same.
LOOK_S = 0.25

# A member may give its part and leave. The word of that goes another way than the part, and may be
# so much faster.
ON_ITS_WAY_S = 0.5

T = TypeVar("T")

Array: TypeAlias = NDArray[Any]


class Operation:
    """The messages of one operation. begin() makes one.

    rank: our own; size: how many members there are.
    """

    def __init__(
        self, group: Members, endpoint: Endpoint, registry: Registry, kind: str, timeout_s: float
    ) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._endpoint = endpoint
        self._registry = registry
        self._kind = kind
        self._deadline = time.monotonic() + timeout_s

    def given(self, array: ArrayLike) -> Array:
        """Return the caller's array in native byte order; all members need its dtype and shape."""
        plain = native(array)
        self._kind = f"{self._kind} {plain.dtype.str} {plain.shape}"
        return plain

    def send(self, rank: int, step: int, part: Array | None) -> None:
        """Send a part to the member of this rank, and look meanwhile whether the operation has
        failed. Raises CollectiveFailed, also where the member has gone."""
        flat = None if part is None else part if part.ndim < 2 else np.ascontiguousarray(part)
        body = {"kind": self._kind, "step": step, "part": flat}
        message = self._make_message(rank, self._group.next, body)
        frames = snapshot(encode(message))
        name = self._group.members[rank]

        def check() -> bool:
            self._arrived()
            if self._group.has_gone(name):
                raise self._failure_for([name])
            return True

        while True:
            now = time.monotonic()
            self._endpoint.wait_for(check, now)
            try:
                return self._post(message, frames, min(self._deadline, now + LOOK_S))
            except OutboxFull as full:
                # It may be full because the operation has failed, here or there: look again.
                if now >= self._deadline:
                    why = f"{self._kind} has failed: {full}"
                    raise CollectiveFailed(why, (name,)) from full

    def receive(self, rank: int, step: int) -> Array:
        """Wait for the part that the member `rank` sends in a step. Raises CollectiveFailed."""
        name = self._group.members[rank]

        def take() -> list[Array] | None:
            entry = self._arrived().parts.pop((name, step), None)
            if entry is None:
                return None
            message, delivery = entry
            self._endpoint.take(delivery)
            return [message.body["part"]]

        def take_or_give_up() -> list[Array] | None:
            return take() or ([] if self._group.has_gone(name) else None)

        asks_at = min(self._deadline, time.monotonic() + LOOK_S)
        taken = self._endpoint.wait_for(take_or_give_up, asks_at)
        if taken is None:
            self._ask(rank)
            taken = self._endpoint.wait_for(take_or_give_up, self._deadline)
        if taken is None:
            why = f"{self._kind} has failed: {name!r} has not sent its part in time"
            raise CollectiveFailed(why, (name,))
        if not taken:
            taken = self._endpoint.wait_for(
                take, min(self._deadline, time.monotonic() + ON_ITS_WAY_S)
            )
        if not taken:
            raise self._failure_for([name])
        return taken[0]

    # --- its beginning and its end, for begin() ---

    def register(self, is_one_way: bool) -> None:
        """Register the group for messages. Raises CollectiveFailed if a member has gone."""
        with self._endpoint.lock:
            gone = self._group.gone
            if gone and not (is_one_way and self._registry.has(self._group)):
                raise self._failure_for(gone)
            self._registry.keep(self._group)

    def tell(self, why: str, missing: Sequence[str]) -> None:
        """Tell the others, also those whose part is missing, that the operation has failed."""
        deadline = min(self._deadline, time.monotonic() + ABORT_S)
        for rank, name in enumerate(self._group.members):
            if rank != self.rank and not self._group.has_gone(name):
                body = {"failure": why, "missing": list(missing)}
                self._try_to_post(rank, self._group.next, body, deadline)

    def failure_of(self, error: MessagingError) -> CollectiveFailed:
        return CollectiveFailed(f"{self._kind} has failed: {error}")

    def end(self) -> None:
        with self._endpoint.lock:
            self._registry.forget(self._group.next)
            self._group.number += 1

    # --- between members ---

    def _make_message(self, rank: int, operation: Step, body: dict[str, Any]) -> Message:
        group_id, number = operation
        name = self._group.members[rank]
        where = {"group": group_id, "number": number, "to": self._group.incarnations[name]}
        return Message("collective", self._endpoint.name, name, {**where, **body})

    def _post(self, message: Message, frames: Parts, deadline: float) -> None:
        self._endpoint.post(message, COLLECTIVE, frames, deadline)

    def _try_to_post(
        self, rank: int, operation: Step, body: dict[str, Any], deadline: float = 0.0
    ) -> None:
        """Post a message whose loss costs time only."""
        message = self._make_message(rank, operation, body)
        with suppress(MessagingError):
            self._post(message, encode(message), deadline)

    def _ask(self, rank: int) -> None:
        with self._endpoint.lock:
            body = self._registry.word(self._group)
        self._try_to_post(rank, self._group.next, body)

    def _arrived(self) -> Arrived:
        """The parts of this step that have come so far. Raises CollectiveFailed if another member
        says that the operation has failed, or calls another one, or is in another group."""
        self._registry.check(self._group)
        arrived = self._registry.arrived(self._group.next)
        if others := arrived.kinds - {self._kind}:
            raise CollectiveFailed(
                f"{self._kind!r} is called here, and {min(others)!r} at another member"
            )
        return arrived

    def _failure_for(self, gone: Sequence[str]) -> CollectiveFailed:
        return CollectiveFailed(
            f"{self._kind} has failed: not there any more, or another process by now: "
            f"{', '.join(gone)}; make the group anew",
            gone,
        )


@contextmanager
def begin(
    group: Members,
    endpoint: Endpoint,
    registry: Registry,
    kind: str,
    timeout_s: float,
    *,
    is_one_way: bool,
) -> Iterator[Operation]:
    """Begin the next operation of a group, for a `with` block; tell the others if it fails. kind:
    which, and with what; it has to be that of the others.

    is_one_way: who has given its part is done, and may leave before others have begun. In all other
    operations nobody is done before all have begun.
    """
    operation = Operation(group, endpoint, registry, kind, timeout_s)
    if not group.busy.acquire(blocking=False):
        raise CollectiveFailed(
            f"another thread has an operation of the group {group.name!r} under way; this call "
            "has done nothing and does not count: use a group from one thread at a time"
        )
    try:
        operation.register(is_one_way)
        yield operation
    except CollectiveFailed as failed:
        operation.tell(str(failed), failed.missing)
        raise
    except MessagingError as error:
        operation.tell(str(error), ())
        raise operation.failure_of(error) from error
    except BaseException as error:  # wrong arguments, an interrupt: the others must not wait
        operation.tell(f"{type(error).__name__} at {endpoint.name!r}: {error}", ())
        raise
    finally:
        operation.end()
        group.busy.release()


def native(array: ArrayLike) -> Array:
    """Convert to the machine's byte order, as arrays of the others come out: so that all members
    have the same bits."""
    plain: Array = np.asarray(array)
    return plain.astype(plain.dtype.newbyteorder("="), copy=False)
