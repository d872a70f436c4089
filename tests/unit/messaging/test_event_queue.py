"""What has come, between the threads that bring it and the one that receives."""

import pytest

from xain_messaging.drivers.event_queue import EventQueue


@pytest.mark.parametrize("timeout_s", [0.0, 1.0, None])
def test_who_is_woken_is_given_what_lies_behind(timeout_s: float | None) -> None:
    """None would say that there is nothing any more."""
    events: EventQueue[str] = EventQueue()
    events.wake()
    events.put("first")
    events.wake()
    events.put("second")
    assert [events.get(timeout_s) for _ in range(2)] == ["first", "second"]
    assert events.get(0.0) is None


def test_who_waits_is_woken_once() -> None:
    """However often it was asked for; and again when it is asked for again."""
    events: EventQueue[str] = EventQueue()
    for _ in range(2):
        events.wake()
        events.wake()
        assert events.get(None) is None
        assert events.size == 0


def test_a_queue_that_is_closed_gives_nothing() -> None:
    """Whatever is in it."""
    events: EventQueue[str] = EventQueue()
    events.wake()
    events.put("first")
    events.close()
    assert [events.get(timeout_s) for timeout_s in (0.0, None, 1.0)] == [None] * 3
