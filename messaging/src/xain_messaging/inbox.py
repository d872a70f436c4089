"""Messages that have come and that the program has not received, in their order."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from xain_messaging.links import Delivery


@dataclass(slots=True, eq=False)
class Awaited:
    """Answers that one call awaits.

    sessions: how many answers in each session are still to come; they are for this call alone.
    arrived: what has come in these sessions, by position.
    answers: those of them that the call returns; num_seen: of `arrived`, that were looked at.
    """

    sessions: dict[str, int] = field(default_factory=dict)
    arrived: dict[int, Delivery] = field(default_factory=dict)
    answers: list[Delivery] = field(default_factory=list)
    num_seen: int = 0

    def wants(self, entry: Delivery) -> bool:
        """Whether a message is an answer, or an ack, in a session of this call."""
        message = entry.message
        return message.session_id in self.sessions and not message.is_request

    def look(self) -> bool:
        """Look at what has come. Returns whether all answers have."""
        wanted = self.sessions
        if len(self.arrived) > self.num_seen:
            for delivery in islice(self.arrived.values(), self.num_seen, None):
                message = delivery.message
                if message.is_final and (number := wanted.get(message.session_id)):
                    self.answers.append(delivery)
                    if number > 1:
                        wanted[message.session_id] = number - 1
                    else:
                        del wanted[message.session_id]
            self.num_seen = len(self.arrived)
        return not wanted

    def others(self) -> list[Delivery]:
        """Messages that have come beside the answers: acks, and more answers than were awaited."""
        positions = {delivery.position for delivery in self.answers}
        return [entry for position, entry in self.arrived.items() if position not in positions]


@dataclass(slots=True)
class Inbox:
    """A queue whose size the links bound. Not for several threads.

    newest: the number of the message that came last.
    """

    newest: int = 0
    _entries: OrderedDict[int, Delivery] = field(default_factory=OrderedDict)
    _awaited: list[Awaited] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._entries) + sum(len(awaited.arrived) for awaited in self._awaited)

    def add(self, entry: Delivery) -> None:
        """Put a message at the end of the queue, or give it to the call that awaits it. Twice does
        no harm."""
        if not entry.position:
            self.newest = entry.position = self.newest + 1
        for awaited in self._awaited:
            if awaited.wants(entry):
                awaited.arrived[entry.position] = entry
                return
        self._entries[entry.position] = entry

    def reserve(self, awaited: Awaited) -> None:
        """Keep the answers in its sessions for this call, until release(): those that have come,
        and those that come."""
        self._awaited.append(awaited)
        for position, entry in [*self._entries.items()] if awaited.sessions else ():
            if awaited.wants(entry):
                awaited.arrived[position] = entry
                del self._entries[position]

    def release(self, awaited: Awaited) -> None:
        """End what reserve() began. Twice does no harm."""
        if awaited in self._awaited:
            self._awaited.remove(awaited)

    def oldest(self, last: int | None = None) -> Delivery | None:
        """Return the first message that no call awaits, up to the number `last`; None if there is
        none."""
        for position, entry in self._entries.items():
            return entry if last is None or position <= last else None
        return None

    def pop(self, entry: Delivery) -> None:
        """Remove a message from the queue."""
        del self._entries[entry.position]

    def put_back(self, entries: Iterable[Delivery]) -> None:
        """Put messages that no call has returned back where they were."""
        for entry in entries:
            self.add(entry)
        self._entries = OrderedDict(sorted(self._entries.items()))
