"""Messages between peers.

A message has a tag, by which it is told from others, and a body, which is data: None, truth values,
numbers, text, bytes, lists, maps and numpy arrays. It belongs to a session, which is what a reply
answers.

A SessionMessage has a position in its session too. A task is requested, may be acknowledged, and is
completed; a notification is requested and acknowledged:

    task            REQUEST -> RECEIVE -> COMPLETE
                    REQUEST ------------> COMPLETE
    notification    REQUEST -> RECEIVE

That the stages come in this order is held by sessions.py.
"""

from enum import Enum, StrEnum
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec

from xain_foundation.names import why_not
from xain_messaging.errors import InvalidMessage
from xain_messaging.format.ids import new_id

MAX_TAG_BYTES = 256
# Tags with names, and names, that are known to be right. A program has few of them.
MAX_KNOWN = 4096

# Of these: None, bool, int, float, str, bytes, list, tuple, dict, numpy.ndarray, numpy scalars.
Body: TypeAlias = Any


class _Same(Enum):
    SAME = "as it was"


SAME: Final = _Same.SAME
"""Marks a tag or body of a reply or a forwarded message that stays as it was."""


# Enum's own hash() is written in Python, and each message looks up several tables by these.
class SessionType(StrEnum):
    __hash__ = str.__hash__

    TASK = "task"
    NOTIFICATION = "notification"


class TaskSessionStage(StrEnum):
    __hash__ = str.__hash__

    REQUEST = "task_request"
    RECEIVE = "task_receive"
    COMPLETE = "task_complete"


class NotificationSessionStage(StrEnum):
    __hash__ = str.__hash__

    REQUEST = "notification_request"
    RECEIVE = "notification_receive"


SessionStage: TypeAlias = TaskSessionStage | NotificationSessionStage

STAGES: Final[dict[SessionType, tuple[SessionStage, ...]]] = {
    SessionType.TASK: tuple(TaskSessionStage),
    SessionType.NOTIFICATION: tuple(NotificationSessionStage),
}


POSITIONS: Final[dict[SessionStage | None, int]] = {
    stage: position for stages in STAGES.values() for position, stage in enumerate(stages)
}
LAST: Final = frozenset(stages[-1] for stages in STAGES.values())


class _Ids(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    session_id: str = msgspec.field(default_factory=new_id)
    message_id: str = msgspec.field(default_factory=new_id)


class Message(_Ids, frozen=True, eq=False):
    """A message from one peer to another. Two are equal only if they are the same object, since
    arrays have no single answer to that.

    tag: text or a member of an Enum, whose value counts; without ":", as it stands in conditional
        events.
    session_id, message_id: made anew unless given.
    Raises ValueError for a tag or a name that cannot be one.
    """

    tag: str
    source: str
    destination: str
    body: Body = None

    def __post_init__(self) -> None:
        if type(self.tag) is not str:
            msgspec.structs.force_setattr(self, "tag", tag_of(self.tag))
        _check(self.tag, self.source, self.destination)

    @property
    def is_final(self) -> bool:
        """Whether it is the last of its session; a message without stages always counts as that."""
        return True

    @property
    def is_request(self) -> bool:
        """Whether it is the first stage of its session."""
        return False

    def reply(self, tag: str | _Same = SAME, body: Body = SAME, *, ack: bool = False) -> "Message":
        """The answer to this one: back to its source, in its session. Tag and body stay as they are
        unless they are given; a body of None is none. ack: see SessionMessage."""
        return self._copy_for(self.destination, self.source, tag, body)

    def forward(self, destination: str, tag: str | _Same = SAME, body: Body = SAME) -> "Message":
        """Pass a message on to another peer, in its session, from the peer that it had come to."""
        return self._copy_for(self.destination, destination, tag, body)

    def _copy_for(self, source: str, destination: str, tag: str | _Same, body: Body) -> "Message":
        """Copy the message for another peer, in the same session."""
        # Not by msgspec.structs.replace(), which takes four times as long.
        return Message(
            self.tag if tag is SAME else tag,
            source,
            destination,
            self.body if body is SAME else body,
            session_id=self.session_id,
        )


class SessionMessage(Message, frozen=True, eq=False):
    """A message with its position in a session: see above.

    session_stage: by default the first of its type.
    Raises InvalidMessage for a stage of another type.
    """

    session_type: SessionType = SessionType.TASK
    session_stage: SessionStage | None = None

    def __post_init__(self) -> None:
        if type(self.tag) is not str:
            msgspec.structs.force_setattr(self, "tag", tag_of(self.tag))
        _check(self.tag, self.source, self.destination)
        stages = STAGES[self.session_type]
        if self.session_stage is None:
            msgspec.structs.force_setattr(self, "session_stage", stages[0])
        elif self.session_stage not in stages:
            raise InvalidMessage(f"{self.session_stage} is no stage of a {self.session_type}")

    @property
    def position(self) -> int:
        """Position of the message's stage in the session, from 0 on."""
        return POSITIONS[self.session_stage]

    @property
    def is_final(self) -> bool:
        """Whether it is the last of its session."""
        return self.session_stage in LAST

    @property
    def is_request(self) -> bool:
        """Whether it is the first of its session."""
        return not POSITIONS[self.session_stage]

    def reply(
        self, tag: str | _Same = SAME, body: Body = SAME, *, ack: bool = False
    ) -> "SessionMessage":
        """Answer at the next stage: the last one of the session, or, with `ack`, only
        the word that it has come. An ack has no body unless one is given.

        Raises InvalidMessage if nothing follows on this one.
        """
        if self.position:
            raise InvalidMessage(
                f"{self.session_stage} is an answer itself: only requests have one"
            )
        stage = STAGES[self.session_type][1 if ack else -1]
        if ack and body is SAME:
            body = None
        return self._copy_for(self.destination, self.source, tag, body, stage)

    def _copy_for(
        self,
        source: str,
        destination: str,
        tag: str | _Same,
        body: Body,
        stage: SessionStage | None = None,
    ) -> "SessionMessage":
        """Copy the message for another peer, in the same session, at `stage` if one is given."""
        return SessionMessage(
            self.tag if tag is SAME else tag,
            source,
            destination,
            self.body if body is SAME else body,
            self.session_type,
            stage or self.session_stage,
            session_id=self.session_id,
        )


def tag_of(tag: str) -> str:
    """Return the text of a tag. Raises ValueError if it cannot be one."""
    text = tag.value if isinstance(tag, Enum) else tag
    if not isinstance(text, str):
        raise ValueError(f"a tag must be text, not {type(text).__name__}")
    return _checked_tag(text)


# The cache holds valid tags and names only: invalid ones have no bound.
@lru_cache(MAX_KNOWN)
def _check(tag: str, source: str, destination: str) -> None:
    _checked_tag(tag)
    check_names(source, destination)


def _checked_tag(text: str) -> str:
    if not text or text == "*" or ":" in text or text != text.strip():
        raise ValueError(
            f"{text!r} cannot be a tag: it must not be empty or '*', contain ':', or begin or end "
            "with a blank"
        )
    if len(text.encode()) > MAX_TAG_BYTES:
        raise ValueError(f"a tag has at most {MAX_TAG_BYTES} bytes: {text[:40]!r}...")
    return text


@lru_cache(MAX_KNOWN)
def check_names(source: str, destination: str) -> None:
    """Raises ValueError if one of these cannot be the name of a peer."""
    for role, name in (("source", source), ("destination", destination)):
        if reason := why_not(name):
            raise ValueError(f"{role} {name!r} cannot be the name of a peer: {reason}")
