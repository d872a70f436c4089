"""Sessions: the stages of a session come in their order, at the one who asks and at the one who
answers.

A session is known by its id, its type and the other peer: a broadcast has one id for all peers, and
a peer that forwards a request asks in the session in which it was asked. A session that has come to
its end is forgotten; of more than MAX_SESSIONS that are open the oldest is.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeAlias

from xain_messaging.errors import InvalidMessage
from xain_messaging.format.messages import LAST, POSITIONS, STAGES, SessionMessage, SessionType

# Open sessions of one type, in each direction. No peer need answer a notification.
MAX_SESSIONS = {SessionType.TASK: 1 << 20, SessionType.NOTIFICATION: 1 << 16}

# The position of the last stage, by peer and session.
_Table: TypeAlias = OrderedDict[tuple[str, str], int]


class Sessions:
    """The sessions of one proxy. Not for several threads."""

    def __init__(self, max_sessions: Mapping[SessionType, int] = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._asked: dict[SessionType, _Table] = {kind: OrderedDict() for kind in SessionType}
        self._to_answer: dict[SessionType, _Table] = {kind: OrderedDict() for kind in SessionType}

    def send(self, message: SessionMessage) -> None:
        """Note a message that goes out. Raises InvalidMessage, changing nothing, if it must not."""
        peer, session_id = message.destination, message.session_id
        position = POSITIONS[message.session_stage]
        if not position:
            self._note(self._asked, message, peer)
            return
        last = self._to_answer[message.session_type].get((peer, session_id))
        if last is None:
            raise InvalidMessage(
                f"there is nothing to answer in session {session_id} of {peer!r}: it has had its "
                "last answer, or has never asked, or has asked too much since"
            )
        if position <= last:
            stage = STAGES[message.session_type][last]
            raise InvalidMessage(f"{message.session_stage} does not follow on {stage}")
        self._note(self._to_answer, message, peer)

    def is_due(self, message: SessionMessage) -> bool:
        """Whether a message that has come is at its stage; a second answer, or one that was not
        asked for, is not and is to be dropped."""
        position = POSITIONS[message.session_stage]
        if not position:
            return True
        last = self._asked[message.session_type].get((message.source, message.session_id))
        return last is not None and position > last

    def received(self, message: SessionMessage) -> None:
        """Note a message that has come at its stage. Twice does no harm."""
        tables = self._asked if POSITIONS[message.session_stage] else self._to_answer
        self._note(tables, message, message.source)

    def forget(self, peer: str) -> None:
        """Forget the sessions of a peer that will not be back."""
        for tables in (self._asked, self._to_answer):
            for table in tables.values():
                for key in [key for key in table if key[0] == peer]:
                    del table[key]

    def _note(self, tables: dict[SessionType, _Table], message: SessionMessage, peer: str) -> None:
        """Note the stage of a session, or forget the session after its last stage."""
        table, key = tables[message.session_type], (peer, message.session_id)
        if message.session_stage in LAST:
            table.pop(key, None)
            return
        table[key] = POSITIONS[message.session_stage]
        if len(table) > self._max_sessions[message.session_type]:
            table.popitem(last=False)
