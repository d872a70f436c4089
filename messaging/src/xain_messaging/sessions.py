"""That the stages of a session come in their order, at the one who asks and the one who answers.

A session is known by its id, its type and the other peer: a broadcast has one id for all, and who
forwards a request asks in the session in which it was asked. What has come to its end is forgotten,
and so is, for each that is one too many, one other: the oldest of its own peer if that has more
than its share, else the oldest of the peer that has most. Tasks and notifications have tables of
their own, since nobody need answer a notification; and in each a peer has its share, which no other
one takes.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeAlias

from xain_messaging.errors import SessionError
from xain_messaging.messages import STAGES, SessionMessage, SessionType

# That are open, of those who ask and of those who answer, for all peers together. Each peer may
# have as many as all others leave, and always its share: this divided by the number of peers that
# have any open.
MAX_TASKS = 1 << 20
MAX_NOTIFICATIONS = 1 << 16


class Sessions:
    """Those of one proxy. Not for several threads.

    num_refused: messages that have come, but not at their stage.
    """

    def __init__(
        self, max_tasks: int = MAX_TASKS, max_notifications: int = MAX_NOTIFICATIONS
    ) -> None:
        most = {SessionType.TASK: max_tasks, SessionType.NOTIFICATION: max_notifications}
        self._asked: _Tables = {kind: _Table(number) for kind, number in most.items()}
        self._to_answer: _Tables = {kind: _Table(number) for kind, number in most.items()}
        self.num_refused = 0

    def send(self, message: SessionMessage) -> None:
        """It goes out. Raises SessionError if it must not; nothing has changed then."""
        peer, session_id, place = message.destination, message.session_id, message.place
        if not place:
            self._asked[message.session_type].put(peer, session_id, place)
            return
        table = self._to_answer[message.session_type]
        last = table.get(peer, session_id)
        if last is None:
            raise SessionError(
                f"there is nothing to answer in session {session_id} of {peer!r}: it has had its "
                "last answer, or has never asked, or has asked too much since"
            )
        if place <= last:
            stage = STAGES[message.session_type][last]
            raise SessionError(f"{message.session_stage} does not follow on {stage}")
        table.advance(peer, session_id, message)

    def received(self, message: SessionMessage) -> bool:
        """Whether it comes at its stage. What does not is to be dropped: a second answer, or one
        that nobody has asked for."""
        peer, session_id, place = message.source, message.session_id, message.place
        if not place:
            self._to_answer[message.session_type].put(peer, session_id, place)
            return True
        table = self._asked[message.session_type]
        last = table.get(peer, session_id)
        if last is None or place <= last:
            self.num_refused += 1
            return False
        table.advance(peer, session_id, message)
        return True

    def forget(self, peer: str) -> None:
        """It will not be back."""
        for tables in (self._asked, self._to_answer):
            for table in tables.values():
                table.forget(peer)


class _Table:
    """What sessions of one type have come to: the place of their last stage, by peer and id."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        # Of each peer that has any, the newest at the end.
        self._places: dict[str, OrderedDict[str, int]] = {}
        self._by_size: _BySize | None = None  # when somebody who has most had to be found

    def get(self, peer: str, session_id: str) -> int | None:
        places = self._places.get(peer)
        return None if places is None else places.get(session_id)

    def put(self, peer: str, session_id: str, place: int) -> None:
        places = self._places.get(peer)
        if places is None:
            places = self._places[peer] = OrderedDict()
        if session_id in places:
            places.move_to_end(session_id)
            places[session_id] = place
            return
        places[session_id] = place
        self._resized(peer, len(places) - 1)
        if self._size > self._most:
            self._drop_oldest(peer)

    def advance(self, peer: str, session_id: str, message: SessionMessage) -> None:
        """One that is there, to the stage of this message."""
        if message.is_final:
            del self._places[peer][session_id]
            self._resized(peer, len(self._places[peer]) + 1)
        else:
            self.put(peer, session_id, message.place)

    def forget(self, peer: str) -> None:
        places = self._places.get(peer)
        if places is not None:
            before = len(places)
            places.clear()
            self._resized(peer, before)

    def _resized(self, peer: str, before: int) -> None:
        """It had so many before. Who has none has no share."""
        now = len(self._places[peer])
        self._size += now - before
        if not now:
            del self._places[peer]
        if self._by_size is None:
            return
        self._by_size.move(peer, before, now)
        if 2 * self._size <= self._most:
            self._by_size = None  # as long as there is room, nobody need know

    def _drop_oldest(self, newest: str) -> None:
        """One: of the peer that has just got one more, if it has more than its share; else of the
        one that has most, which is more than its share then."""
        peer = newest
        if len(self._places[newest]) <= self._most // len(self._places):
            if self._by_size is None:
                # Half of all have gone since the last time, and paid for it.
                self._by_size = _BySize({name: len(found) for name, found in self._places.items()})
            peer = self._by_size.largest()
        self._places[peer].popitem(last=False)
        self._resized(peer, len(self._places[peer]) + 1)


class _BySize:
    """Who has most, whose sizes change by one: in constant time, averaged over all changes."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._peers: dict[int, dict[str, None]] = {}  # by size
        self._most = 0  # none is larger
        for peer, size in sizes.items():
            self.move(peer, 0, size)

    def move(self, peer: str, before: int, now: int) -> None:
        """A size of 0: it is not in here."""
        if before:
            peers = self._peers[before]
            del peers[peer]
            if not peers:
                del self._peers[before]
        if now:
            self._peers.setdefault(now, {})[peer] = None
            self._most = max(self._most, now)

    def largest(self) -> str:
        """There has to be one."""
        while self._most not in self._peers:
            self._most -= 1  # as often as it has risen
        return next(iter(self._peers[self._most]))


_Tables: TypeAlias = dict[SessionType, _Table]
