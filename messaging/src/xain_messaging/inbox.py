"""Messages that have come and that nobody has taken: in their order, and by their session."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from xain_messaging.links import Delivery
from xain_messaging.messages import Message, SessionMessage


class Entry(NamedTuple):
    """number: by which those that have come are counted, from 1 on."""

    number: int
    message: Message
    delivery: Delivery

    def without_frames(self) -> "Entry":
        """For one who keeps it for long: the message has its own memory, or the same."""
        return self._replace(delivery=self.delivery._replace(frames=()))


@dataclass(slots=True)
class Inbox:
    """Its size is bounded by the links: see links.py. They count what travels; here are bodies,
    which take more if they are of many small things.

    An interrupt comes where something is called, and where a loop begins again. Between such places
    what is changed here is whole.

    newest: the number of the message that came last.
    """

    newest: int = 0
    _entries: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    _by_session: dict[str, OrderedDict[int, None]] = field(default_factory=dict)
    _awaited: dict[str, int] = field(default_factory=dict)  # by how many

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, message: Message, delivery: Delivery) -> Entry:
        """The newest."""
        number = self.newest + 1
        entry = Entry(number, message, delivery)
        session = self._by_session.setdefault(message.session_id, OrderedDict())
        self.newest = number
        self._entries[number] = entry
        session[number] = None
        return entry

    def last_added(self) -> Entry | None:
        """Of those that are here."""
        return self._entries[next(reversed(self._entries))] if self._entries else None

    def reserve(self, session_id: str) -> None:
        """Somebody awaits the answers in this session: they are nobody else's until release()."""
        self._awaited[session_id] = self._awaited.get(session_id, 0) + 1

    def release(self, session_ids: list[str]) -> bool:
        """Each as often as it is named, and it is off the list then. Returns whether something has
        come in them that others may take now."""
        is_left = False
        while session_ids:
            session_id = session_ids[-1]
            self._awaited[session_id] -= 1
            if not self._awaited[session_id]:
                del self._awaited[session_id]
                is_left = is_left or session_id in self._by_session
            del session_ids[-1]
        return is_left

    def oldest(self, last: int | None = None) -> Entry | None:
        """Of all that nobody awaits, up to the number `last`; None if there is none."""
        for number, entry in self._entries.items():
            if last is not None and number > last:
                break
            if entry.message.session_id not in self._awaited or _is_request(entry.message):
                return entry
        return None

    def answer(self, session_id: str) -> Entry | None:
        """The oldest of a session that is no request, acks included; None if there is none."""
        for number in self._by_session.get(session_id, ()):
            entry = self._entries[number]
            if not _is_request(entry.message):
                return entry
        return None

    def pop(self, entry: Entry) -> None:
        """It is here no more."""
        number, session_id = entry.number, entry.message.session_id
        session = self._by_session[session_id]
        del self._entries[number]
        del session[number]
        if not session:
            del self._by_session[session_id]

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Those that were popped and that nobody has got: to where they were."""
        session_ids = set()
        for entry in entries:
            session_ids.add(entry.message.session_id)
            self._entries[entry.number] = entry
            self._by_session.setdefault(entry.message.session_id, OrderedDict())
            self._by_session[entry.message.session_id][entry.number] = None
        for session_id in session_ids:
            self._by_session[session_id] = OrderedDict.fromkeys(
                sorted(self._by_session[session_id])
            )
        self._entries = OrderedDict(
            (number, self._entries[number]) for number in sorted(self._entries)
        )


def _is_request(message: Message) -> bool:
    return isinstance(message, SessionMessage) and message.is_request
