"""Which size the messages of an upload have."""

import pytest

from xain_participant import message_sizes
from xain_participant.message_sizes import CHUNK_BYTES, MAX_PAUSE, SMALL_BYTES, MessageSizes


def uploads_until_large(sizes: MessageSizes) -> int:
    """How many have small messages."""
    number = 0
    while sizes.is_small:
        sizes.came_through()
        number += 1
    return number


def test_messages_are_large_until_the_coordinator_says_so() -> None:
    """However long they take: that can be the coordinator's doing."""
    sizes = MessageSizes()
    for _ in range(3):
        assert sizes.num_bytes == CHUNK_BYTES
        sizes.came_through()
    assert sizes.ended_for_slowness()
    assert sizes.num_bytes == SMALL_BYTES
    assert not sizes.ended_for_slowness(), "they cannot be smaller"


def test_a_line_that_stays_slow_is_tried_less_and_less() -> None:
    """It has small messages for the rest of the upload, and for one or more uploads after it."""
    sizes, numbers = MessageSizes(), list[int]()
    for _ in range(8):
        sizes.ended_for_slowness()
        sizes.came_through()
        numbers.append(uploads_until_large(sizes))
    assert numbers == [1, 2, 4, 8, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]
    sizes.came_through()  # with large messages
    sizes.ended_for_slowness()
    sizes.came_through()
    assert uploads_until_large(sizes) == 1, "it was fast in between"


def test_both_sides_have_one_rule() -> None:
    """They share no code."""
    client = pytest.importorskip("xain_participant.client")
    places = pytest.importorskip("xain_coordinator.server.places")
    service = pytest.importorskip("xain_coordinator.server.coordinator_service")
    assert message_sizes.SMALL_BYTES == places.SMALL_BYTES
    assert message_sizes.CHUNK_BYTES == places.CHUNK_BYTES
    assert client.SMALL_MESSAGES_KEY == service.SMALL_MESSAGES_KEY
