"""Sessions: the stages of a session come in their order, at the peer that asks and at the peer that
answers.

A session is known by its id, its type and the other peer: a broadcast has one id for all peers, and
a peer that forwards a request asks in the session in which it was asked. A message without stages
is answered by any message in its session. A session that has come to its end is forgotten; of too
many that are open the oldest is.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Final, TypeAlias

from xain_messaging.errors import SessionError
from xain_messaging.messages import (
    STAGES,
    Message,
    SessionMessage,
    SessionStage,
    SessionType,
)

# Open sessions of one type, in each direction. No peer need answer a notification, or a message
# without stages (None).
MAX_SESSIONS: Final[Mapping[SessionType | None, int]] = {
    SessionType.TASK: 1 << 20,
    SessionType.NOTIFICATION: 1 << 16,
    None: 1 << 16,
}

# The position of the last stage, by peer and session.
_Table: TypeAlias = OrderedDict[tuple[str, str], int]


class Sessions:
    """The sessions of one proxy. Not for several threads."""

    def __init__(self, max_sessions: Mapping[SessionType | None, int] = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._asked: dict[SessionType | None, _Table] = {kind: OrderedDict() for kind in STAGES}
        self._asked[None] = OrderedDict()
        self._to_answer: dict[SessionType, _Table] = {kind: OrderedDict() for kind in STAGES}

    def send(self, message: Message, *, asks: bool = True) -> None:
        """Note a message that goes out. asks: the message may be answered, if it has no stages.

        Raises SessionError if the message must not go out; nothing has changed then.
        """
        key = (message.destination, message.session_id)
        if not isinstance(message, SessionMessage):
            if asks:
                self._open(self._asked[None], None, key)
            return
        stage = message.session_stage
        kind = stage.session_type
        if not stage.position:
            self._open(self._asked[kind], kind, key)
            return
        table = self._to_answer[kind]
        last = table.get(key)
        if last is None:
            raise SessionError(
                f"there is nothing to answer in session {key[1]} of {key[0]!r}: it has had its "
                "last answer, or has never asked, or has asked too much since"
            )
        if stage.position <= last:
            raise SessionError(f"{stage} does not follow on {STAGES[kind][last]}")
        _move(table, key, stage)

    def is_due(self, message: SessionMessage) -> bool:
        """Whether a message that has come is at its stage: a second answer, or an answer that was
        not asked for, is not and is to be dropped."""
        stage = message.session_stage
        if not stage.position:
            return True
        last = self._asked[stage.session_type].get((message.source, message.session_id))
        return last is not None and stage.position > last

    def received(self, message: Message) -> None:
        """Note a message that has come at its stage. Twice does no harm."""
        key = (message.source, message.session_id)
        if not isinstance(message, SessionMessage):
            self._asked[None].pop(key, None)
            return
        stage = message.session_stage
        if stage.position:
            _move(self._asked[stage.session_type], key, stage)
        else:
            self._open(self._to_answer[stage.session_type], stage.session_type, key)

    def awaits(self, session_id: str, peers: Collection[str]) -> int:
        """Return how many of these peers have been asked in a session and have not answered."""
        tables = self._asked.values()
        return sum((peer, session_id) in table for table in tables for peer in peers)

    def unanswered(self, session_ids: Collection[str]) -> list[tuple[str, str]]:
        """Find the peers that have not answered in these sessions. Returns pairs of peer and
        session. Slow: it looks through all open sessions."""
        return [key for table in self._asked.values() for key in table if key[1] in session_ids]

    def forget(self, peer: str) -> None:
        """Forget the sessions of a peer that will not be back."""
        for table in (*self._asked.values(), *self._to_answer.values()):
            for key in [key for key in table if key[0] == peer]:
                del table[key]

    def _open(self, table: _Table, kind: SessionType | None, key: tuple[str, str]) -> None:
        table[key] = 0
        if len(table) > self._max_sessions[kind]:
            table.popitem(last=False)


def _move(table: _Table, key: tuple[str, str], stage: SessionStage) -> None:
    if stage.is_last:
        table.pop(key, None)
    else:
        table[key] = stage.position
