"""Messages that have come and that the program has not received, in their order."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from xain_messaging.links import Delivery


@dataclass(slots=True, eq=False)
class Awaited:
    """Answers that one call awaits.

    sessions: how many answers in each session are still to come; they are for this call alone.
    seen: the number of the last message that was looked at.
    entries: the answers that it has got so far. If the call fails, they are put back.
    """

    sessions: dict[str, int] = field(default_factory=dict)
    seen: int = 0
    entries: list[Delivery] = field(default_factory=list)


@dataclass(slots=True)
class Inbox:
    """A queue whose size the links bound.

    newest: the number of the message that came last.
    """

    newest: int = 0
    _entries: OrderedDict[int, Delivery] = field(default_factory=OrderedDict)
    _awaited: list[Awaited] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Delivery) -> None:
        """Put a message at the end of the queue."""
        self.newest = entry.position = self.newest + 1
        self._entries[entry.position] = entry

    def reserve(self, awaited: Awaited) -> None:
        """Keep the answers in its sessions for this call, until release(). Needs no lock."""
        self._awaited.append(awaited)

    def release(self, awaited: Awaited) -> bool:
        """End what reserve() began. Returns whether other calls may take something now."""
        if awaited in self._awaited:
            self._awaited.remove(awaited)
        return bool(awaited.sessions)

    def oldest(self, last: int | None = None) -> Delivery | None:
        """Return the first message that no call awaits, up to the number `last`; None: none."""
        for number, entry in self._entries.items():
            if last is not None and number > last:
                break
            if not self._awaited or not self._is_awaited(entry):
                return entry
        return None

    def _is_awaited(self, entry: Delivery) -> bool:
        message = entry.message
        is_open = any(message.session_id in one.sessions for one in self._awaited)
        return is_open and not message.is_request

    def new_answers(self, awaited: Awaited) -> list[Delivery]:
        """Return the messages in the sessions of a call, acks included, that have come since its
        last look, in their order."""
        found = []
        for number in reversed(self._entries):
            if number <= awaited.seen:
                break
            entry = self._entries[number]
            if entry.message.session_id in awaited.sessions and not entry.message.is_request:
                found.append(entry)
        awaited.seen = self.newest
        return found[::-1]

    def pop(self, entry: Delivery) -> None:
        """Remove a message from the queue."""
        del self._entries[entry.position]

    def put_back(self, entries: Iterable[Delivery]) -> None:
        """Put messages that were popped, and that no call has returned, back to the front."""
        for entry in sorted(entries, key=lambda entry: -entry.position):
            self._entries[entry.position] = entry
            self._entries.move_to_end(entry.position, last=False)
