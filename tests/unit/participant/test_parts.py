"""Size of the parts of a transfer through gRPC."""

import pytest

from xain_participant.stages.parts import PartSize


def test_parts_have_what_the_line_carries_in_eight_seconds():
    """At any speed, and as soon as one part was acknowledged."""
    for bytes_per_s in (3_000, 7_000, 1_000_000):
        parts = PartSize()
        parts.note_acknowledged(parts.num_bytes, parts.num_bytes / bytes_per_s)
        assert parts.num_bytes == pytest.approx(8 * bytes_per_s, rel=0.01)


def test_part_that_brings_nothing_is_followed_by_smaller_ones_and_they_grow_again():
    parts = PartSize()
    sizes = [parts.num_bytes]
    while sizes[-1] > parts.least_bytes:
        parts.note_broken_off(0, 90.0)
        sizes.append(parts.num_bytes)
        assert sizes[-1] < sizes[-2]
    parts.note_broken_off(0, 90.0)
    assert parts.num_bytes == parts.least_bytes
    parts.note_acknowledged(parts.least_bytes, 0.1)
    assert parts.num_bytes == 80 * parts.least_bytes


def test_part_that_breaks_off_late_is_followed_by_one_of_the_line_s_speed():
    parts = PartSize()
    parts.note_acknowledged(parts.num_bytes, 0.01)  # of a line that was fast
    parts.note_broken_off(90 * 3_000, 90.0)
    assert parts.num_bytes == 8 * 3_000


def test_short_last_part_does_not_make_a_line_slow():
    """Most of its time is that of the answer."""
    parts = PartSize()
    parts.note_acknowledged(100, 1.0)
    assert parts.num_bytes == parts.first_bytes


def test_messages_are_a_quarter_of_their_part_within_bounds():
    parts = PartSize()
    assert parts.message_bytes == parts.num_bytes // 4
    parts.note_acknowledged(parts.num_bytes, 0.01)
    assert parts.message_bytes == parts.most_message_bytes
    for _ in range(20):
        parts.note_broken_off(0, 90.0)
    assert parts.message_bytes == parts.least_bytes
