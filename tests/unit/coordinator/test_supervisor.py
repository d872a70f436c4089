"""The supervisor of a launch, on programs and a clock of the test's own."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from xain_coordinator.cli.launch.logs import LogView
from xain_coordinator.cli.launch.plan import JOIN_TIMEOUT_S, KILLED, Program
from xain_coordinator.cli.launch.supervisor import STEADY_S, Launcher, Rank, Supervisor
from xain_foundation.exit_statuses import CommandFailed


class Running:
    """A program that runs until the test gives it a status."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number  # of the start
        self.code: int | None = None
        self.is_told_to_end = self.is_removed = False
        self.lines: list[str] = []

    def status(self) -> int | None:
        return self.code

    def new_lines(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    def terminate(self) -> None:
        self.is_told_to_end = True

    def remove(self, timeout_s: float) -> None:
        self.is_removed = True


class Fleet:
    """A supervisor, its programs in the order in which they were started, and what it says."""

    def __init__(self, folder: Path, max_restarts: int = 5) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.started: list[str] = []
        self.latest: dict[str, Running] = {}
        launcher = Launcher(
            cast(Any, self),
            LogView(["x"], colors=False, is_quiet=True),
            self.said.append,
            self.pause,
            lambda: self.now,
            max_restarts,
        )
        self.supervisor = Supervisor(launcher, folder)
        self.supervisor.is_ready = True

    def add(self, name: str, rank: Rank = Rank.WORKER) -> None:
        def make() -> Program:
            self.started.append(name)
            return Program(name, [])

        self.supervisor.start(make, rank)

    def look_for(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.supervisor.look()

    def kill(self, name: str, status: int = KILLED) -> None:
        self.latest[name].code = status
        self.supervisor.look()

    # --- as a backend and as the process of the launch ---

    def start(self, program: Program) -> Running:
        self.latest[program.name] = Running(program.name, len(self.started))
        return self.latest[program.name]

    def close(self) -> None:
        pass

    def pause(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Fleet]:
    return lambda **values: Fleet(tmp_path, **values)


@pytest.fixture
def fleet(make: Callable[..., Fleet]) -> Fleet:
    return make()


def test_killed_worker_is_started_again_as_itself(fleet):
    """The first time at once; the dead one is removed, and the other workers are left alone."""
    fleet.add("a")
    fleet.add("b")
    dead = fleet.latest["a"]
    fleet.kill("a")
    assert fleet.started == ["a", "b", "a"]
    assert dead.is_removed
    assert fleet.latest["a"] is not dead
    assert fleet.said == ["a was killed; it is started again"]
    assert not fleet.supervisor.end_statuses(Rank.WORKER)
    assert fleet.supervisor.deaths == {"a": 1}


def test_restarts_wait_longer_each_time_up_to_a_limit(make):
    """Then the worker is away for good, and the others go on."""
    fleet = make(max_restarts=3)
    fleet.add("a")
    fleet.add("b")
    fleet.kill("a")
    for wait_s in (1, 2):
        fleet.kill("a")
        assert fleet.said[-1].endswith(f"it is started again in {wait_s} s")
        num_started = len(fleet.started)
        fleet.look_for(wait_s - 0.3)
        assert fleet.supervisor.awaiting_restart == ["a"]
        assert len(fleet.started) == num_started
        fleet.look_for(0.5)
        assert len(fleet.started) == num_started + 1
    fleet.kill("a")
    assert fleet.said[-1] == "a was killed 4 times; the others go on"
    fleet.look_for(120)
    assert fleet.supervisor.end_statuses(Rank.WORKER) == {"a": KILLED}
    assert not fleet.supervisor.have_ended(Rank.WORKER)
    assert len(fleet.started) == 5
    assert len(fleet.said) == 4


def test_worker_that_ran_for_long_is_started_again_at_once(make):
    """Deaths are counted and waited for anew, so that a service of weeks has no limit."""
    fleet = make(max_restarts=1)
    fleet.add("a")
    for _ in range(3):
        fleet.now += STEADY_S
        fleet.kill("a")
        assert fleet.said[-1] == "a was killed; it is started again"
    fleet.kill("a")
    assert fleet.supervisor.have_ended(Rank.WORKER)


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (1, "a ended with status 1; the others go on"),
        (128 + signal.SIGTERM, "a ended with status 143; the others go on"),
        (4, "a has trained a model that is no better than the baseline (status 4); the others"),
        (0, None),
    ],
)
def test_worker_that_ends_by_itself_or_is_told_to_stop_stays_away(status, told, fleet):
    fleet.add("a")
    fleet.add("b")
    fleet.kill("a", status)
    fleet.look_for(60)
    assert len(fleet.started) == 2
    assert fleet.supervisor.end_statuses(Rank.WORKER) == {"a": status}
    if told is None:
        assert fleet.said == []
    else:
        (said,) = fleet.said
        assert said.startswith(told)


def test_crash_is_answered_as_a_kill(fleet):
    fleet.add("a")
    fleet.kill("a", 128 + signal.SIGSEGV)
    assert fleet.said == ["a ended with status 139; it is started again"]
    assert fleet.started == ["a", "a"]


@pytest.mark.parametrize("rank", [Rank.HEAD, Rank.SERVER])
def test_launch_cannot_go_on_without_its_coordinator(rank, fleet):
    """A killed coordinator is started again; one that ends by itself ends the launch."""
    fleet.add("coordinator", rank)
    fleet.kill("coordinator")
    assert fleet.said == ["the coordinator was killed; it is started again"]
    with pytest.raises(CommandFailed, match="the coordinator ended with status 2"):
        fleet.kill("coordinator", 2)


def test_wait_for_programs_looks_after_them_and_has_an_end(fleet):
    fleet.add("a")
    fleet.kill("a")
    fleet.supervisor.until(lambda: [] if fleet.now > 5 else ["a"])
    with pytest.raises(CommandFailed, match="after 600 s still not there: a, b"):
        fleet.supervisor.until(lambda: ["b", "a"])
    assert fleet.now > JOIN_TIMEOUT_S


def test_programs_are_stopped_by_their_ranks(fleet):
    """Tools and workers first, servers last; lines of the end are still told."""
    for name, rank in (("c", Rank.HEAD), ("s", Rank.SERVER), ("w", Rank.WORKER)):
        fleet.add(name, rank)
    order = []
    for one in fleet.latest.values():
        one.terminate = lambda name=one.name: order.append(name)  # type: ignore[method-assign]
        one.lines = ["bye"]
    told = []
    fleet.supervisor.on_lines = lambda name, lines: told.extend([name] * len(lines))
    fleet.supervisor.stop()
    assert order == ["w", "c", "s"]
    assert sorted(told) == ["c", "s", "w"]
    assert all(one.is_removed for one in fleet.latest.values())
