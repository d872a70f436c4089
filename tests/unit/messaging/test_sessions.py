"""Sessions that are open, and one too many."""

from xain_messaging.format.messages import SessionMessage, SessionType
from xain_messaging.sessions import MAX_SESSIONS, Sessions


def has_come(sessions: Sessions, message: SessionMessage) -> bool:
    """Note a message that has come, if it is at its stage. Returns whether it is."""
    if not sessions.is_due(message):
        return False
    sessions.received(message)
    return True


def test_oldest_of_too_many_open_sessions_is_forgotten() -> None:
    sessions = Sessions({**MAX_SESSIONS, SessionType.TASK: 3})
    tasks = [SessionMessage("t", "a", peer) for peer in "bcbc"]
    for task in tasks:
        sessions.send(task)
    assert [has_come(sessions, task.reply()) for task in tasks] == [False, True, True, True]


def test_sessions_of_a_forgotten_peer_are_forgotten() -> None:
    sessions = Sessions()
    tasks = [SessionMessage("t", "a", peer) for peer in "bc"]
    for task in tasks:
        sessions.send(task)
    sessions.forget("b")
    assert [has_come(sessions, task.reply()) for task in tasks] == [False, True]
