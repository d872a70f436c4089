"""Requests of workers to workers, which the scheduler passes on: workers have no connections to
each other. The replies come back the same way.

Nothing of them is kept but in memory. A sender asks a scheduler that was started again once more,
and a worker does a request that comes twice once.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from xain_parameters.errors import Unavailable
from xain_parameters.handlers import MAX_WAITING, Key, Reply
from xain_wire.parameters import scheduler_pb2 as pb

MAX_OPEN: Final = 1024  # requests that are not answered by all, of all workers
MAX_OPEN_OF_SENDER: Final = 32
MAX_UNSENT_BYTES: Final = 64 << 20  # of replies that their senders have not taken yet

LOST: Final = Reply(error="it has left the group, or was lost")


@dataclass(slots=True, eq=False)
class Receiver:
    """A worker that gets requests with its views.

    pending: the requests that it has not answered, the oldest first.
    """

    name: str
    incarnation: int
    job: str
    pending: dict[Key, pb.PassedRequest] = field(default_factory=dict)

    def unsent(self, sent: dict[Key, pb.PassedRequest]) -> list[pb.PassedRequest]:
        """The requests that are not in `sent`, where they are put; answered ones go from there."""
        for key in sent.keys() - self.pending.keys():
            del sent[key]
        # A sender that asked again, since the reply was lost, has made another message.
        unsent = {key: each for key, each in self.pending.items() if sent.get(key) is not each}
        sent.update(unsent)
        return list(unsent.values())


@dataclass(slots=True, eq=False)
class _Open:
    """A request that not all have answered.

    unanswered: the names of those. replies: that the sender has not been sent yet.
    """

    unanswered: set[str]
    replies: deque[tuple[str, Reply]] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: bool = False


class Relay:
    """Knows the workers that get requests, and the requests that are not answered.

    wake: called when a receiver has a request that it was not sent yet. One event loop has it.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._receivers: dict[str, Receiver] = {}
        self._open: dict[Key, _Open] = {}
        self._unsent_bytes = 0

    def receiver(self, name: str, incarnation: int, job: str) -> Receiver:
        """Return the receiver of a worker in this job, made anew for another process of it."""
        known = self._receivers.get(name)
        if known is not None and known.incarnation == incarnation:
            known.job = job
            return known
        if known is not None:
            self._drop(known)
        made = self._receivers[name] = Receiver(name, incarnation, job)
        return made

    def knows(self, receiver: Receiver) -> bool:
        """Tell whether a receiver has not been dropped."""
        return self._receivers.get(receiver.name) is receiver

    def keep(self, incarnations: dict[str, int]) -> None:
        """Drop the receivers that are not among the members, and tell their senders.

        incarnations: of the members, by name.
        """
        for receiver in list(self._receivers.values()):
            if incarnations.get(receiver.name) != receiver.incarnation:
                self._drop(receiver)

    def workers(self, job: str) -> list[str]:
        """The names of the workers of a job."""
        return sorted(each.name for each in self._receivers.values() if each.job == job)

    def answered(self, key: Key, name: str, reply: Reply) -> None:
        """Take the reply of a member. One that nobody waits for any more is dropped."""
        receiver = self._receivers.get(name)
        if receiver is not None:
            receiver.pending.pop(key, None)
        request = self._open.get(key)
        if request is None or name not in request.unanswered:
            return
        num_bytes = _size(reply)
        if self._unsent_bytes + num_bytes > MAX_UNSENT_BYTES:
            reply = Reply(error="the scheduler has no room for its answer")
            num_bytes = _size(reply)
        self._unsent_bytes += num_bytes
        request.unanswered.remove(name)
        request.replies.append((name, reply))
        request.changed.set()

    async def send(
        self, key: Key, request: pb.PassedRequest, names: Iterable[str], others: Collection[str]
    ) -> AsyncGenerator[tuple[str, Reply], None]:
        """Pass a request on; yields the reply of each as it comes. The same again takes the place
        of the one before.

        names: the workers that are asked. others: members that answer by `answered` all the same.
        Raises Unavailable if there are too many requests, and when end() is called.
        """
        former = self._open.pop(key, None)
        if former is not None:
            self._end(former)
        num_of_sender = sum(sender == key[0] for sender, *_ in self._open)
        if len(self._open) >= MAX_OPEN or num_of_sender >= MAX_OPEN_OF_SENDER:
            raise Unavailable("too many requests wait for their answers; ask again in a moment")
        made = self._open[key] = _Open({*names, *others})
        try:
            for name in names:
                receiver = self._receivers.get(name)
                if receiver is None:
                    self.answered(key, name, LOST)
                elif len(receiver.pending) >= MAX_WAITING and key not in receiver.pending:
                    text = f"{MAX_WAITING} requests wait for it already"
                    self.answered(key, name, Reply(error=text))
                else:
                    receiver.pending[key] = request
            self._wake()
            while True:
                while made.replies:
                    name, reply = made.replies.popleft()
                    self._unsent_bytes -= _size(reply)
                    yield name, reply
                if made.has_ended:
                    raise Unavailable("the scheduler is being stopped")
                if not made.unanswered:
                    return
                made.changed.clear()
                await made.changed.wait()
        finally:
            self._unsent_bytes -= sum(_size(reply) for _, reply in made.replies)
            made.replies.clear()
            if self._open.get(key) is made:
                del self._open[key]
                for receiver in self._receivers.values():
                    receiver.pending.pop(key, None)

    def end(self) -> None:
        """End all requests: their senders ask the next scheduler."""
        for each in self._open.values():
            self._end(each)

    def _end(self, request: _Open) -> None:
        request.has_ended = True
        request.changed.set()

    def _drop(self, receiver: Receiver) -> None:
        del self._receivers[receiver.name]
        for key in list(receiver.pending):
            self.answered(key, receiver.name, LOST)


def _size(reply: Reply) -> int:
    return len(reply.body) + len(reply.error)
