"""Messages that have come and that nobody has taken: in their order, and by their session."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias

from xain_messaging.links import Delivery
from xain_messaging.messages import Message, SessionMessage

Entry: TypeAlias = tuple[Message, Delivery]


@dataclass(slots=True)
class Inbox:
    """Its size is bounded by those who send: see links.py."""

    _entries: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    _by_session: dict[str, OrderedDict[int, None]] = field(default_factory=dict)
    _num_added: int = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, message: Message, delivery: Delivery) -> None:
        """The newest."""
        self._num_added += 1
        self._entries[self._num_added] = (message, delivery)
        self._by_session.setdefault(message.session_id, OrderedDict())[self._num_added] = None

    def pop_oldest(self) -> Entry | None:
        """Of all; None if there is none."""
        for number in self._entries:
            return self._pop(number)
        return None

    def pop_answer(self, session_id: str) -> Entry | None:
        """The oldest of a session that is no request, acks included; None if there is none."""
        for number in self._by_session.get(session_id, ()):
            message, _ = self._entries[number]
            if not (isinstance(message, SessionMessage) and message.is_request):
                return self._pop(number)
        return None

    def _pop(self, number: int) -> Entry:
        entry = self._entries.pop(number)
        session = self._by_session[entry[0].session_id]
        del session[number]
        if not session:
            del self._by_session[entry[0].session_id]
        return entry
