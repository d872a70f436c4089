"""That the stages of a session come in their order, at the one who asks and the one who answers.

A session is known by its id and the other peer: a broadcast has one id for all, and who forwards a
request asks in the session in which it was asked. What has come to its end is forgotten, and so is
what is oldest of too many.
"""

from typing import NamedTuple, TypeAlias

from xain_messaging.errors import SessionError
from xain_messaging.messages import SessionMessage, SessionStage, SessionType

MAX_SESSIONS = 65_536  # that are open, of those who ask and of those who answer

_Key: TypeAlias = tuple[str, str]  # session id, the other peer


class Sessions:
    """Those of one proxy. Not for several threads.

    num_refused: messages that have come, but not at their stage.
    """

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._asked: dict[_Key, _Last] = {}
        self._to_answer: dict[_Key, _Last] = {}
        self.num_refused = 0

    def send(self, message: SessionMessage) -> None:
        """It goes out. Raises SessionError if it must not; nothing has changed then."""
        key = (message.session_id, message.destination)
        if message.is_request:
            self._keep(self._asked, key, message)
            return
        last = self._to_answer.get(key)
        if last is None:
            raise SessionError(
                f"there is nothing to answer in session {message.session_id} of "
                f"{message.destination!r}: it has had its last answer, or has never asked"
            )
        if not _follows(last, message):
            raise SessionError(f"{message.session_stage} does not follow on {last.stage}")
        if message.is_final:
            del self._to_answer[key]
        else:
            self._keep(self._to_answer, key, message)

    def received(self, message: SessionMessage) -> bool:
        """Whether it comes at its stage. What does not is to be dropped: a second answer, or one
        that nobody has asked for."""
        key = (message.session_id, message.source)
        if message.is_request:
            self._keep(self._to_answer, key, message)
            return True
        last = self._asked.get(key)
        if last is None or not _follows(last, message):
            self.num_refused += 1
            return False
        if message.is_final:
            del self._asked[key]
        else:
            self._keep(self._asked, key, message)
        return True

    def _keep(self, sessions: dict[_Key, "_Last"], key: _Key, message: SessionMessage) -> None:
        sessions.pop(key, None)  # the newest is at the end
        assert message.session_stage is not None, "set by now"
        sessions[key] = _Last(message.session_type, message.session_stage, message.place)
        if len(sessions) > self._max_sessions:
            del sessions[next(iter(sessions))]


class _Last(NamedTuple):
    """What a session has come to."""

    type: SessionType
    stage: SessionStage
    place: int


def _follows(last: _Last, message: SessionMessage) -> bool:
    return message.session_type is last.type and message.place > last.place
