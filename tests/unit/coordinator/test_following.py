"""Followers of a session, which tell a tracker of its rounds, and what they note."""

import threading
from pathlib import Path

import pytest

from support.logs import capture_logs
from xain_coordinator.telemetry.following import Follower, TrackedEnd, TrackedRound
from xain_coordinator.telemetry.trackers import End, Position, Round, figures_of

SESSION = "s1"
PATIENCE_S = 60.0


class Memory:
    """Tracker that remembers its calls, and refuses so many of the first ones."""

    def __init__(self, num_refused: int = 0) -> None:
        self.calls: list[int | str] = []
        self.has_refused = threading.Event()
        self.has_taken = threading.Event()
        self._num_refused = num_refused

    def on_round(self, record: Round) -> None:
        self._take(record.round)

    def on_end(self, result: End) -> None:
        self._take(result.cause)

    def _take(self, call: int | str) -> None:
        if self._num_refused:
            self._num_refused -= 1
            self.has_refused.set()
            raise OSError("no route to host")
        self.calls.append(call)
        self.has_taken.set()


def a_round(number: int) -> TrackedRound:
    return TrackedRound(SESSION, number, number + 1, 10, 2, 0.5)


def follow(tracker: Memory, path: Path, last: int, *, ends: bool = False) -> None:
    """One process, which tells of all rounds up to the last one."""
    follower = Follower("memory", tracker, Position(path), SESSION)
    follower.close_timeout_s = PATIENCE_S
    for number in range(last + 1):
        follower.tell(a_round(number))
    if ends:
        follower.tell(TrackedEnd(SESSION, last + 1, "completed"))
    follower.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.tracked-memory.json"


def test_next_process_tells_what_was_not_taken_alone(path):
    first, second, third = Memory(), Memory(), Memory()
    follow(first, path, 1)
    follow(second, path, 3, ends=True)
    follow(third, path, 3, ends=True)
    assert first.calls == [0, 1]
    assert second.calls == [2, 3, "completed"]
    assert third.calls == []


def test_call_that_fails_is_made_again_before_the_next_one(path):
    """One warning tells of it, however often it fails."""
    tracker = Memory(num_refused=3)
    follower = Follower("memory", tracker, Position(path), SESSION)
    follower.first_wait_s, follower.close_timeout_s = 0.001, PATIENCE_S
    with capture_logs() as logs:
        follower.tell(a_round(0))
        assert tracker.has_taken.wait(PATIENCE_S)
        follower.tell(a_round(1))
        follower.close()
    assert tracker.calls == [0, 1]
    assert [(one["event"], one["round"]) for one in logs] == [("tracker_failed", 0)]


def test_rounds_behind_one_that_fails_at_the_end_are_left_to_the_next_process(path):
    refusing, later = Memory(num_refused=1), Memory()
    follower = Follower("memory", refusing, Position(path), SESSION)
    follower.first_wait_s = PATIENCE_S
    follower.tell(a_round(0))
    assert refusing.has_refused.wait(PATIENCE_S)
    follower.tell(a_round(1))
    follower.close()
    follow(later, path, 1)
    assert refusing.calls == []
    assert later.calls == [0, 1]


def test_position_is_that_of_one_session(path):
    position = Position(path)
    position.take(SESSION, 3, is_end=True)
    assert (position.taken(SESSION), position.has_ended(SESSION)) == (3, True)
    assert (position.taken("s2"), position.has_ended("s2")) == (-1, False)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"session": "s1", "round": "x", "ended": 0}'])
def test_position_that_cannot_be_read_is_before_the_first_round(path, text):
    path.write_text(text)
    assert Position(path).taken(SESSION) == -1


def test_position_that_cannot_be_written_costs_no_round(tmp_path):
    (tmp_path / "file").touch()
    tracker = Memory()
    with capture_logs() as logs:
        follow(tracker, tmp_path / "file" / "position.json", 1)
    assert tracker.calls == [0, 1]
    assert {one["event"] for one in logs} == {"tracker_failed"}


def test_figures_are_finite_and_named_by_what_they_measure():
    record = TrackedRound(
        SESSION, 4, 5, 10, 2, 0.5, {"loss": 0.25, "ratio": float("nan")}, {"coordinator/r2": 0.9}
    )
    assert figures_of(record) == {
        "loss": 0.25,
        "evaluation/coordinator/r2": 0.9,
        "samples": 10.0,
        "updates": 2.0,
        "seconds": 0.5,
    }


def test_round_that_only_measures_has_figures_of_its_evaluation_alone():
    record = TrackedRound(SESSION, 5, 5, 0, 0, 0.1, {}, {"accuracy": 0.8})
    assert figures_of(record) == {"evaluation/accuracy": 0.8}
