"""Messages that have come and that nobody has taken: in their order, and by their session."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from xain_messaging.links import Delivery
from xain_messaging.messages import Message, SessionMessage

Entry: TypeAlias = tuple[Message, Delivery]


@dataclass(slots=True)
class Inbox:
    """Its size is bounded by the links: see links.py. They count what travels; here are bodies,
    which take more if they are of many small things.

    newest: the number of the message that came last; they are counted from 1 on.
    """

    newest: int = 0
    _entries: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    _by_session: dict[str, OrderedDict[int, None]] = field(default_factory=dict)
    _awaited: dict[str, int] = field(default_factory=dict)  # by how many

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, message: Message, delivery: Delivery) -> None:
        """The newest."""
        self.newest += 1
        self._entries[self.newest] = (message, delivery)
        self._by_session.setdefault(message.session_id, OrderedDict())[self.newest] = None

    def reserve(self, session_id: str) -> None:
        """Somebody awaits the answers in this session: they are nobody else's until release()."""
        self._awaited[session_id] = self._awaited.get(session_id, 0) + 1

    def release(self, session_ids: Iterable[str]) -> bool:
        """Each as often as it is named. Returns whether something has come in them that others may
        take now."""
        is_left = False
        for session_id in session_ids:
            self._awaited[session_id] -= 1
            if not self._awaited[session_id]:
                del self._awaited[session_id]
                is_left = is_left or session_id in self._by_session
        return is_left

    def pop_oldest(self, last: int | None = None) -> Entry | None:
        """Of all that nobody awaits, up to the number `last`; None if there is none."""
        for number, (message, _) in self._entries.items():
            if last is not None and number > last:
                break
            if message.session_id not in self._awaited or _is_request(message):
                return self._pop(number)
        return None

    def pop_answer(self, session_id: str) -> Entry | None:
        """The oldest of a session that is no request, acks included; None if there is none."""
        for number in self._by_session.get(session_id, ()):
            if not _is_request(self._entries[number][0]):
                return self._pop(number)
        return None

    def _pop(self, number: int) -> Entry:
        entry = self._entries.pop(number)
        session = self._by_session[entry[0].session_id]
        del session[number]
        if not session:
            del self._by_session[entry[0].session_id]
        return entry


def _is_request(message: Message) -> bool:
    return isinstance(message, SessionMessage) and message.is_request
