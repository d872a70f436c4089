"""Messages that have come and that the program has not received: in their order, and by session."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from xain_messaging.links import Delivery
from xain_messaging.messages import Message, SessionMessage


class Entry(NamedTuple):
    """A message in the queue. number: the place in the order of arrival, from 1 on."""

    number: int
    message: Message
    delivery: Delivery

    def without_frames(self) -> "Entry":
        """For a call that keeps it for long: the message has its own memory, or the same."""
        return self._replace(delivery=self.delivery._replace(frames=()))


@dataclass(slots=True, eq=False)
class Awaited:
    """Answers that one call awaits.

    sessions: answers in these are for this call alone.
    entries: the answers that it has got so far, by number. If the call is interrupted,
        Inbox.release() puts them back.
    """

    sessions: set[str] = field(default_factory=set)
    entries: dict[int, Entry] = field(default_factory=dict)


@dataclass(slots=True)
class Inbox:
    """A queue whose size the links bound: they count what travels; here are Python objects, which
    take more if they are of many small things.

    newest: the number of the message that came last.
    """

    newest: int = 0
    _entries: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    _by_session: dict[str, OrderedDict[int, None]] = field(default_factory=dict)
    _awaited: dict[int, Awaited] = field(default_factory=dict)  # by its id

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, message: Message, delivery: Delivery) -> Entry:
        """Put a message at the end of the queue."""
        number = self.newest + 1
        entry = Entry(number, message, delivery)
        session = self._by_session.get(message.session_id)
        if session is None:
            session = self._by_session[message.session_id] = OrderedDict()
        self.newest = number
        self._entries[number] = entry
        session[number] = None
        return entry

    def reserve(self, awaited: Awaited) -> None:
        """Keep the answers in its sessions for this call, until release()."""
        self._awaited[id(awaited)] = awaited

    def release(self, awaited: Awaited) -> bool:
        """End what reserve() began. Returns whether other calls may take something now."""
        self._awaited.pop(id(awaited), None)
        self.put_back(awaited.entries.values())
        return not awaited.sessions.isdisjoint(self._by_session)

    def oldest(self, last: int | None = None) -> Entry | None:
        """The first message that no call awaits, up to the number `last`; None if there is none."""
        for number, entry in self._entries.items():
            if last is not None and number > last:
                break
            if not self._awaited or not self._is_awaited(entry.message):
                return entry
        return None

    def _is_awaited(self, message: Message) -> bool:
        is_open = any(message.session_id in one.sessions for one in self._awaited.values())
        return is_open and not _is_request(message)

    def answer(self, session_id: str) -> Entry | None:
        """The first message of a session that is no request, acks included; None if there is
        none."""
        for number in self._by_session.get(session_id, ()):
            entry = self._entries[number]
            if not _is_request(entry.message):
                return entry
        return None

    def pop(self, entry: Entry) -> None:
        """Remove a message from the queue."""
        number, session_id = entry.number, entry.message.session_id
        session = self._by_session[session_id]
        del self._entries[number]
        del session[number]
        if not session:
            del self._by_session[session_id]

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Put messages that were popped, and that no call has returned, back to the front."""
        for entry in sorted(entries, key=lambda entry: -entry.number):
            number = entry.number
            session = self._by_session.setdefault(entry.message.session_id, OrderedDict())
            self._entries[number] = entry
            self._entries.move_to_end(number, last=False)
            session[number] = None
            session.move_to_end(number, last=False)


def _is_request(message: Message) -> bool:
    return isinstance(message, SessionMessage) and message.is_request
