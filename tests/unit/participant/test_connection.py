"""When a connection is taken for dead, on a clock that the test turns."""

import heapq
from collections.abc import Callable
from itertools import count, pairwise
from queue import Empty
from typing import Any

import grpc
import pytest

from xain_participant import connection
from xain_participant.client import CALL_TIMEOUT_S
from xain_participant.connection import Connections

INTERVAL_S = 10.0
LEASE_S = 15.0


class Clock:
    """A Runtime without threads: waiting is what lets the time pass."""

    def __init__(self) -> None:
        self._now = 0.0
        self._numbers = count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def now(self) -> float:
        return self._now

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time_s, next(self._numbers), do))

    def advance(self, until_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        while not is_over() and self._due and self._due[0][0] <= until_s:
            self._now, _, do = heapq.heappop(self._due)
            do()
        if not is_over():
            self._now = max(self._now, until_s)

    def queue(self) -> "Mailbox":
        return Mailbox(self)

    def spawn(self, name: str, target: Callable[[], None]) -> Any:
        raise AssertionError("there are no threads")


class Mailbox:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, *, timeout: float | None = None) -> Any:
        # What is asked ends by its own time limit.
        wait_s = 60.0 if timeout is None else timeout
        self._clock.advance(self._clock.now() + wait_s, lambda: bool(self._items))
        if not self._items:
            assert timeout is not None, "it waits for ever"
            raise Empty
        return self._items.pop(0)


class Failed(grpc.RpcError):
    pass


class Question:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._code: grpc.StatusCode | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self.answered_at = 0.0

    def end(self, code: grpc.StatusCode) -> None:
        if self._code is None:
            self._code = code
            self.answered_at = self._clock.now()
            for callback in self._callbacks:
                callback(self)

    def done(self) -> bool:
        return self._code is not None

    def code(self) -> grpc.StatusCode:
        assert self._code is not None
        return self._code

    def result(self) -> "Question":
        assert self._code is not None
        if self._code is not grpc.StatusCode.OK:
            raise Failed(self._code)
        return self

    def cancel(self) -> None:
        self.end(grpc.StatusCode.CANCELLED)

    def add_done_callback(self, fn: Callable[[Any], None], /) -> None:
        self._callbacks.append(fn)


class Line(grpc.Channel):
    """answer_s: how long an answer takes; None: nothing comes through. status: which it is."""

    def __init__(self, clock: Clock, answer_s: float | None) -> None:
        self._clock = clock
        self.answer_s = answer_s
        self.status = grpc.StatusCode.OK
        self.asked_at: list[float] = []  # and heard by the coordinator
        self.num_asked = 0
        self.is_closed = False

    def ask(self, timeout_s: float) -> Question:
        assert not self.is_closed
        now, question = self._clock.now(), Question(self._clock)
        self.num_asked += 1
        if self.answer_s is not None:
            self.asked_at.append(now)
            status = self.status
            self._clock.at(now + self.answer_s, lambda: question.end(status))
        overdue = grpc.StatusCode.DEADLINE_EXCEEDED
        self._clock.at(now + timeout_s, lambda: question.end(overdue))
        return question

    def unary_unary(self, *_: Any, **__: Any) -> Any:
        return self.ask

    def unary_stream(self, *_: Any, **__: Any) -> Any:
        return None

    def stream_unary(self, *_: Any, **__: Any) -> Any:
        return None

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        return None

    def subscribe(self, *_: Any, **__: Any) -> None: ...

    def unsubscribe(self, *_: Any, **__: Any) -> None: ...

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...


class Coordinator:
    """Lines to it, and what a participant hears."""

    def __init__(self, answer_s: float | None = 0.1) -> None:
        self.clock = Clock()
        self.answer_s = answer_s
        self.lines: list[Line] = []
        self.connections = Connections(self._open, self.clock)
        self.statuses: list[grpc.StatusCode] = []

    def _open(self) -> Line:
        self.lines.append(Line(self.clock, self.answer_s))
        return self.lines[-1]

    def beat(self) -> grpc.StatusCode:
        """A heartbeat; the next one is due when INTERVAL_S is over, at once after a failure."""
        began = self.clock.now()
        status = grpc.StatusCode.OK
        try:
            self.connections.contact(lambda stub, seconds: stub.Heartbeat(seconds), CALL_TIMEOUT_S)
            self.clock.advance(began + INTERVAL_S)
        except Failed as failed:
            status = failed.args[0]
        assert self.clock.now() - began <= max(CALL_TIMEOUT_S, INTERVAL_S)
        self.statuses.append(status)
        return status

    def change(self, answer_s: float | None) -> None:
        """Of all lines, and those to come."""
        self.answer_s = answer_s
        for line in self.lines:
            line.answer_s = answer_s

    @property
    def open_lines(self) -> list[Line]:
        return [line for line in self.lines if not line.is_closed]

    @property
    def num_asked(self) -> int:
        return sum(line.num_asked for line in self.lines)


@pytest.mark.parametrize("answer_s", [0.1, 1.9, 2.5, 3.9, 4.9])
def test_slow_connection_is_kept(answer_s: float) -> None:
    """Everything is answered, and next to nothing is asked twice."""
    coordinator = Coordinator(answer_s)
    for _ in range(360):
        assert coordinator.beat() is grpc.StatusCode.OK
    assert coordinator.open_lines == coordinator.lines[:1]
    assert coordinator.num_asked == 360 + (len(coordinator.lines) - 1)
    if answer_s < Connections.silence_s:
        assert len(coordinator.lines) == 1
    assert len(coordinator.lines) <= 1 + 4 + 3600 / connection.MAX_PAUSE_S


def test_connection_that_was_slow_once_is_asked_as_before() -> None:
    """The pauses begin anew."""
    coordinator = Coordinator(2.5)
    for _ in range(60):
        coordinator.beat()
    coordinator.change(0.1)
    coordinator.clock.advance(coordinator.clock.now() + connection.MAX_PAUSE_S)
    coordinator.beat()
    before = len(coordinator.lines)
    coordinator.change(2.5)
    coordinator.beat()
    coordinator.beat()
    coordinator.beat()
    assert len(coordinator.lines) == before + 2, "after 0 s and twice the shortest pause"


@pytest.mark.parametrize("dies_at_beat", [1, 7])
def test_a_half_open_line_is_replaced_within_the_lease(dies_at_beat: int) -> None:
    coordinator = Coordinator()
    for number in range(20):
        if number == dies_at_beat:
            coordinator.lines[0].answer_s = None
        assert coordinator.beat() is grpc.StatusCode.OK
    heard = sorted(time_s for line in coordinator.lines for time_s in line.asked_at)
    assert max(b - a for a, b in pairwise(heard)) < LEASE_S
    assert coordinator.open_lines == coordinator.lines[1:], "one, and only one, was needed"


def test_lines_may_die_one_after_the_other() -> None:
    coordinator = Coordinator()
    for _ in range(10):
        coordinator.open_lines[0].answer_s = None
        assert coordinator.beat() is grpc.StatusCode.OK
    assert len(coordinator.lines) == 11
    assert len(coordinator.open_lines) == 1


def test_a_slow_line_is_replaced_only_by_one_that_is_not() -> None:
    """It has had as long as a sign of life may take."""
    coordinator = Coordinator()
    coordinator.lines[0].answer_s = 4.9
    assert coordinator.beat() is grpc.StatusCode.OK
    assert coordinator.open_lines == coordinator.lines[:1]
    coordinator.clock.advance(coordinator.clock.now() + connection.MAX_PAUSE_S)
    coordinator.lines[0].answer_s = 5.1
    assert coordinator.beat() is grpc.StatusCode.OK
    assert coordinator.open_lines == coordinator.lines[2:]


@pytest.mark.parametrize("answer_s", [None, 5.5])
def test_while_nobody_answers_in_time_little_more_is_asked(answer_s: float | None) -> None:
    """Somebody who has too much to do needs no second fleet."""
    coordinator = Coordinator(answer_s)
    for _ in range(720):
        assert coordinator.beat() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert coordinator.open_lines == coordinator.lines[:1]
    assert len(coordinator.lines) <= 1 + 5 + 3600 / connection.MAX_PAUSE_S
    coordinator.change(0.1)
    assert coordinator.beat() is grpc.StatusCode.OK


def test_one_that_is_refused_elsewhere_waits_for_its_answer() -> None:
    """The fresh connection could not be made, which says nothing about the old one."""
    coordinator = Coordinator()
    coordinator.lines[0].answer_s = 4.0
    opened = coordinator._open

    def refused() -> Line:
        line = opened()
        line.status = grpc.StatusCode.UNAVAILABLE
        return line

    coordinator.connections._open = refused
    assert coordinator.beat() is grpc.StatusCode.OK
    assert coordinator.open_lines == coordinator.lines[:1]


def test_an_answer_that_is_a_refusal_is_one() -> None:
    """It comes from the coordinator."""
    coordinator = Coordinator()
    coordinator.lines[0].answer_s = None
    opened = coordinator._open

    def unknown() -> Line:
        line = opened()
        line.status = grpc.StatusCode.PERMISSION_DENIED
        return line

    coordinator.connections._open = unknown
    assert coordinator.beat() is grpc.StatusCode.PERMISSION_DENIED
    assert coordinator.open_lines == coordinator.lines[1:]
