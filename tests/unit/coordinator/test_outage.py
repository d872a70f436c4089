"""Log lines about a weights store that is away."""

from collections.abc import Iterator
from typing import Any

import pytest

from support.logs import capture_logs
from xain_coordinator.driver.outage import PAUSE_S, Outage
from xain_coordinator.ports import StoreUnavailable

PUT, GET = "PutWeights", "GetWeights"
FULL = StoreUnavailable("no space left on device")


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as entries:
        yield entries


def test_outage_has_one_warning_and_one_line_at_its_end(logs):
    clock = Clock()
    outage = Outage(clock)
    for _ in range(350):
        outage.note_failure(PUT, FULL, method=PUT)
        clock.now += 0.25
    outage.note_success(PUT)
    outage.note_success(PUT)
    assert logs == [
        {"event": "store_unavailable", "log_level": "warning", "error": str(FULL), "method": PUT},
        {"event": "store_available", "log_level": "info", "duration_s": 87.5, "num_refused": 350},
    ]


def test_reading_from_a_full_disk_does_not_end_its_outage(logs):
    outage = Outage(Clock())
    outage.note_failure(PUT, FULL)
    outage.note_success(GET)
    outage.note_failure(PUT, FULL)
    assert [entry["event"] for entry in logs] == ["store_unavailable"]


def test_store_that_comes_and_goes_is_told_of_now_and_then(logs):
    """A disk that is almost full takes small updates and refuses large ones."""
    clock = Clock()
    outage = Outage(clock)
    for _ in range(1000):
        outage.note_failure(PUT, FULL)
        outage.note_success(PUT)
        clock.now += PAUSE_S / 100
    assert len(logs) == 2 * 10


class Clock:
    """The time, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now
