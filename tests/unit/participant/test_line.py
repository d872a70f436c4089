"""Which size the messages of an upload have."""

import pytest

from xain_participant import line
from xain_participant.line import CHUNK_BYTES, FIRST_BYTES, MAX_PAUSE, SMALL_BYTES, Line

LARGE, SMALL = (CHUNK_BYTES, CHUNK_BYTES), (FIRST_BYTES, SMALL_BYTES)


def uploads_until_large(one: Line) -> int:
    """How many have small messages."""
    number = 0
    while one.sizes() == SMALL:
        one.came_through()
        number += 1
    return number


def test_a_line_has_large_messages_until_it_is_told() -> None:
    """However long they take: that can be the coordinator's doing."""
    one = Line()
    for _ in range(3):
        assert one.sizes() == LARGE
        one.came_through()
    assert one.ended_by_coordinator()
    assert one.sizes() == SMALL
    assert not one.ended_by_coordinator(), "they cannot be smaller"


def test_a_line_that_stays_slow_is_tried_less_and_less() -> None:
    """It has small messages for the rest of the upload, and for one or more uploads after it."""
    one, numbers = Line(), list[int]()
    for _ in range(8):
        one.ended_by_coordinator()
        one.came_through()
        numbers.append(uploads_until_large(one))
    assert numbers == [1, 2, 4, 8, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]
    one.came_through()  # with large messages
    one.ended_by_coordinator()
    one.came_through()
    assert uploads_until_large(one) == 1, "it was fast in between"


def test_both_sides_have_one_rule() -> None:
    """They share no code."""
    places = pytest.importorskip("xain_coordinator.server.places")
    assert (line.SMALL_BYTES, line.CHUNK_BYTES) == (places.SMALL_BYTES, places.CHUNK_BYTES)
