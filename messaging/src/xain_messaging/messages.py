"""What peers say to each other.

A message has a tag, by which it is told from others, and a body, which is data: None, truth values,
numbers, text, bytes, lists, maps and numpy arrays. It belongs to a session, which is what a reply
answers.

A SessionMessage has a place in its session too. A task is requested, may be acknowledged, and is
completed; a notification is requested and acknowledged:

    task            REQUEST -> RECEIVE -> COMPLETE
                    REQUEST ------------> COMPLETE
    notification    REQUEST -> RECEIVE

That the stages come in this order is held by sessions.py.
"""

import uuid
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Any, Final, Self, TypeAlias

from xain_messaging.errors import SessionError
from xain_messaging.names import why_not

MAX_TAG_BYTES = 256

# Of these: None, bool, int, float, str, bytes, list, tuple, dict, numpy.ndarray, numpy scalars.
Body: TypeAlias = Any


class _Same(Enum):
    SAME = "as it was"


SAME: Final = _Same.SAME
"""For a reply or a forwarded message: leave it as it was."""


class SessionType(StrEnum):
    TASK = "task"
    NOTIFICATION = "notification"


class TaskSessionStage(StrEnum):
    REQUEST = "task_request"
    RECEIVE = "task_receive"
    COMPLETE = "task_complete"


class NotificationSessionStage(StrEnum):
    REQUEST = "notification_request"
    RECEIVE = "notification_receive"


SessionStage: TypeAlias = TaskSessionStage | NotificationSessionStage

STAGES: Final[dict[SessionType, tuple[SessionStage, ...]]] = {
    SessionType.TASK: tuple(TaskSessionStage),
    SessionType.NOTIFICATION: tuple(NotificationSessionStage),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ids:
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    message_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True, eq=False)
class Message(_Ids):
    """One message from one peer to another. Two are equal only if they are the same object, since
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
        object.__setattr__(self, "tag", tag_of(self.tag))
        for role, name in (("source", self.source), ("destination", self.destination)):
            if reason := why_not(name):
                raise ValueError(f"{role} {name!r} cannot be the name of a peer: {reason}")

    def reply(self, tag: str | _Same = SAME, body: Body = SAME) -> Self:
        """The answer to this one: back to its source, in its session. Tag and body stay as they are
        unless they are given; a body of None is none."""
        return self._passed_on(self.destination, self.source, tag, body)

    def forward(self, destination: str, tag: str | _Same = SAME, body: Body = SAME) -> Self:
        """The same to somebody else, in the same session, from the peer it had come to."""
        return self._passed_on(self.destination, destination, tag, body)

    def _passed_on(
        self, source: str, destination: str, tag: str | _Same, body: Body, **stage: Any
    ) -> Self:
        return replace(
            self,
            source=source,
            destination=destination,
            tag=self.tag if isinstance(tag, _Same) else tag,
            body=self.body if body is SAME else body,
            message_id=uuid.uuid4().hex,
            **stage,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SessionMessage(Message):
    """A message with its place in a session: see above.

    session_stage: by default the first of its type.
    Raises SessionError for a stage of another type.
    """

    session_type: SessionType = SessionType.TASK
    session_stage: SessionStage | None = None

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is another class than the one that this is written in.
        Message.__post_init__(self)
        stages = STAGES[self.session_type]
        if self.session_stage is None:
            object.__setattr__(self, "session_stage", stages[0])
        elif self.session_stage not in stages:
            raise SessionError(f"{self.session_stage} is no stage of a {self.session_type}")

    @property
    def place(self) -> int:
        """Of its stage, from 0 on."""
        assert self.session_stage is not None, "set by now"
        return STAGES[self.session_type].index(self.session_stage)

    @property
    def is_request(self) -> bool:
        """The first of its session."""
        return self.place == 0

    @property
    def is_final(self) -> bool:
        """The last of its session."""
        return self.place == len(STAGES[self.session_type]) - 1

    def reply(self, tag: str | _Same = SAME, body: Body = SAME, *, ack: bool = False) -> Self:
        """As that of a message, at the next stage: the last of the session, or, with `ack`, only
        the word that it has come. An ack has no body unless one is given.

        Raises SessionError if nothing follows on this one.
        """
        if not self.is_request:
            raise SessionError(f"{self.session_stage} is an answer itself: only requests have one")
        stage = STAGES[self.session_type][1 if ack else -1]
        if ack and body is SAME:
            body = None
        return self._passed_on(self.destination, self.source, tag, body, session_stage=stage)


def tag_of(tag: str) -> str:
    """The text of a tag. Raises ValueError if it cannot be one."""
    text = tag.value if isinstance(tag, Enum) else tag
    if not isinstance(text, str):
        raise ValueError(f"a tag must be text, not {type(text).__name__}")
    if not text or text == "*" or ":" in text or text != text.strip():
        raise ValueError(
            f"{text!r} cannot be a tag: it must not be empty or '*', contain ':', or begin or end "
            "with a blank"
        )
    if len(text.encode()) > MAX_TAG_BYTES:
        raise ValueError(f"a tag has at most {MAX_TAG_BYTES} bytes: {text[:40]!r}...")
    return text
