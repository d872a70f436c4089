"""That the stages of a session come in their order, at the one who asks and the one who answers.

A session is known by its id, its type and the other peer: a broadcast has one id for all, and who
forwards a request asks in the session in which it was asked. What has come to its end is forgotten,
and so is what is oldest of too many. Tasks and notifications have tables of their own, since
nobody need answer a notification; and in each a peer has its share, which no other one takes.
"""

from collections import OrderedDict
from typing import TypeAlias

from xain_messaging.errors import SessionError
from xain_messaging.messages import STAGES, SessionMessage, SessionType

# That are open, of those who ask and of those who answer, for all peers together. Each peer may
# have as many as all others leave, and always its share.
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
        self._places: dict[str, OrderedDict[str, int]] = {}  # of each peer, the newest at the end

    def get(self, peer: str, session_id: str) -> int | None:
        places = self._places.get(peer)
        return None if places is None else places.get(session_id)

    def put(self, peer: str, session_id: str, place: int) -> None:
        places = self._places.get(peer)
        if places is None:
            places = self._places[peer] = OrderedDict()
        if session_id in places:
            places.move_to_end(session_id)
        else:
            self._size += 1
        places[session_id] = place
        if self._size > self._most:
            self._drop_oldest(places)

    def advance(self, peer: str, session_id: str, message: SessionMessage) -> None:
        """One that is there, to the stage of this message."""
        if message.is_final:
            del self._places[peer][session_id]
            self._size -= 1
        else:
            self.put(peer, session_id, message.place)

    def forget(self, peer: str) -> None:
        self._size -= len(self._places.pop(peer, ()))

    def _drop_oldest(self, newest: OrderedDict[str, int]) -> None:
        """Of the peer that has just got one more, if it has more than its share; else of the one
        that has most, down to its share: so there is seldom a need to look for that one."""
        share = self._most // len(self._places)
        if len(newest) > share:
            newest.popitem(last=False)
            self._size -= 1
            return
        largest = max(self._places.values(), key=len)
        while len(largest) > share:
            largest.popitem(last=False)
            self._size -= 1


_Tables: TypeAlias = dict[SessionType, _Table]
