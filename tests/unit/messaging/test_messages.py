"""Messages, their answers, and the stages of sessions."""

import gc
import weakref
from enum import Enum

import pytest

from xain_messaging.errors import InvalidMessage
from xain_messaging.format.messages import (
    Message,
    NotificationSessionStage,
    SessionMessage,
    SessionType,
    TaskSessionStage,
    tag_of,
)
from xain_messaging.sessions import MAX_SESSIONS, Sessions


class Tags(Enum):
    UPDATE = "update"


class Listing(Message, frozen=True, eq=False):
    """A message of an owner that lists its messages."""

    owner: list[Message] | None = None


class Body(dict[str, object]):
    """A body that weak references may point to."""


def listed(tag: str, source: str, destination: str, body: Body) -> Message:
    owner: list[Message] = []
    owner.append(Listing(tag, source, destination, body, owner=owner))
    return owner[0]


@pytest.mark.parametrize("make", [Message, SessionMessage, listed])
def test_messages_in_reference_cycles_are_freed(make):
    """The garbage collector finds cycles through messages and through subclasses of them."""
    body = Body()
    message = make("t", "a", "b", body)
    if make is not listed:
        body["message"] = message
    freed = weakref.ref(body)
    del body, message
    gc.collect()
    assert freed() is None


def test_every_message_begins_a_session():
    """The ids are its own, unless they are given."""
    one, two = Message("t", "a", "b"), Message("t", "a", "b")
    assert one.body is None
    assert len({one.session_id, one.message_id, two.session_id, two.message_id}) == 4
    assert Message("t", "a", "b", session_id="s", message_id="m").session_id == "s"


def test_a_tag_may_be_of_an_enum():
    assert Message(Tags.UPDATE, "a", "b").tag == "update"  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("tag", ["", "*", "a:b", " a", "a ", 3, None, "x" * 257])
def test_wrong_tag_is_refused(tag):
    """A conditional event could not tell it from its own signs."""
    with pytest.raises(ValueError, match="tag"):
        tag_of(tag)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("name", ["", "a/b", "é", " a", "x" * 129])
def test_wrong_name_is_refused(name):
    with pytest.raises(ValueError, match="destination"):
        Message("t", "a", name)
    with pytest.raises(ValueError, match="source"):
        Message("t", name, "b")


def test_a_reply_goes_back_in_the_session():
    """The reply is a new message; tag and body are kept unless given, and None is given."""
    asked = Message("ask", "a", "b", {"x": 1})
    kept = asked.reply()
    assert (kept.source, kept.destination, kept.tag, kept.body) == ("b", "a", "ask", {"x": 1})
    assert kept.session_id == asked.session_id
    assert kept.message_id != asked.message_id
    given = asked.reply("told", None)
    assert (given.tag, given.body) == ("told", None)
    assert (asked.source, asked.tag) == ("a", "ask")  # is as it was


def test_forwarded_message_comes_from_its_forwarder():
    """In the same session."""
    asked = Message("ask", "a", "b", 7)
    onward = asked.forward("c")
    assert (onward.source, onward.destination, onward.body) == ("b", "c", 7)
    assert onward.session_id == asked.session_id


def test_stages_follow_from_the_type():
    """The first by default; a reply completes, an ack is the stage between."""
    task = SessionMessage("t", "a", "b", 1)
    assert task.session_stage is TaskSessionStage.REQUEST
    assert task.reply().session_stage is TaskSessionStage.COMPLETE
    ack = task.reply(ack=True)
    assert (ack.session_stage, ack.body) == (TaskSessionStage.RECEIVE, None)
    note = SessionMessage("t", "a", "b", session_type=SessionType.NOTIFICATION)
    assert note.session_stage is NotificationSessionStage.REQUEST
    assert note.reply().session_stage is NotificationSessionStage.RECEIVE
    assert note.reply().is_final
    with pytest.raises(InvalidMessage):
        task.reply().reply()
    with pytest.raises(InvalidMessage):
        SessionMessage("t", "a", "b", None, SessionType.TASK, NotificationSessionStage.RECEIVE)


def has_come(sessions: Sessions, message: SessionMessage) -> bool:
    """Note a message that has come, if it is at its stage. Returns whether it is."""
    if not sessions.is_due(message):
        return False
    sessions.received(message)
    return True


def request(session_type: SessionType = SessionType.TASK) -> SessionMessage:
    return SessionMessage("t", "a", "b", session_type=session_type)


@pytest.mark.parametrize("session_type", SessionType)
def test_a_session_from_its_beginning_to_its_end(session_type):
    """Both ends see request, ack of a task, and answer."""
    asker, answerer = Sessions(), Sessions()
    asked = request(session_type)
    asker.send(asked)
    assert has_come(answerer, asked)
    answers = [asked.reply(ack=True), asked.reply()]
    for answer in answers if session_type is SessionType.TASK else answers[1:]:
        answerer.send(answer)
        assert has_come(asker, answer)
    for again in answers:
        with pytest.raises(InvalidMessage, match="last answer"):
            answerer.send(again)
        assert not has_come(asker, again)


def test_stages_do_not_go_back():
    """No second ack, and no ack after the end."""
    asker, answerer = Sessions(), Sessions()
    asked = request()
    asker.send(asked)
    has_come(answerer, asked)
    answerer.send(asked.reply(ack=True))
    with pytest.raises(InvalidMessage, match="does not follow"):
        answerer.send(asked.reply(ack=True))
    assert has_come(asker, asked.reply(ack=True))
    assert not has_come(asker, asked.reply(ack=True))
    assert has_come(asker, asked.reply())


def test_answer_without_a_question_is_refused():
    """The question must be of this peer, session and type."""
    sessions = Sessions()
    asked = request()
    sessions.send(asked)
    with pytest.raises(InvalidMessage):
        sessions.send(request().reply())
    assert not has_come(sessions, request().reply())
    for source, kind, stage in (
        ("b", SessionType.NOTIFICATION, NotificationSessionStage.RECEIVE),
        ("c", SessionType.TASK, TaskSessionStage.COMPLETE),
    ):
        other = SessionMessage("t", source, "a", None, kind, stage, session_id=asked.session_id)
        assert not has_come(sessions, other)
    assert has_come(sessions, asked.reply())


def test_forgotten_peer_has_no_open_sessions():
    """Questions of the peer and questions to it are forgotten, and those to others are not."""
    sessions = Sessions()
    tasks = [SessionMessage("t", "a", peer) for peer in "bc"]
    for task in tasks:
        sessions.send(task)
    has_come(sessions, to_answer := SessionMessage("t", "b", "a"))
    sessions.forget("b")
    assert [has_come(sessions, task.reply()) for task in tasks] == [False, True]
    with pytest.raises(InvalidMessage):
        sessions.send(to_answer.reply())


def test_oldest_of_too_many_open_sessions_is_forgotten():
    sessions = Sessions({**MAX_SESSIONS, SessionType.TASK: 3})
    tasks = [SessionMessage("t", "a", peer) for peer in "bcbc"]
    for task in tasks:
        sessions.send(task)
    assert [has_come(sessions, task.reply()) for task in tasks] == [False, True, True, True]
