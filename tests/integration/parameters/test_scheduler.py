"""The scheduler over gRPC."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from unittest.mock import Mock

import pytest

from support.logs import capture_logs
from support.parameter_servers import LONG_S, Servers
from support.waiting import wait_until
from xain_parameters.errors import Closed, Evicted, Invalid, Unavailable
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler.client import SchedulerMember
from xain_parameters.scheduler.journal import Journal
from xain_parameters.scheduler.server_client import ServerScheduler
from xain_parameters.scheduler.service import SchedulerService
from xain_parameters.scheduler.state import Job, Settings
from xain_parameters.specs import Plugin, TableSpec, View
from xain_wire.parameters import scheduler_pb2 as pb

TABLE = TableSpec(0, "w", 100, 4, True, "float32", Plugin("add"), Plugin("zeros"), (100, 4))


class Node:
    """A server that has all it is given at once, and no numbers."""

    def __init__(self, target: str, name: str, clocks: dict[str, int] | None = None) -> None:
        """clocks: that workers began after the mark of a checkpoint."""
        self.views: list[View] = []
        self._clocks = clocks or {}
        self.scheduler = ServerScheduler(target, name, f"{name}:1", self.see)
        self.scheduler.join(LONG_S)

    def see(self, view: View) -> None:
        self.views.append(view)
        for each in view.ranges:
            for learner in each.learners:
                self.scheduler.report(c.LearnerWhole(each.number, each.epoch, learner))
            if view.cut is not None and each.servers[:1] == (self.scheduler.name,):
                path = f"{each.number}.part"
                self.scheduler.report(
                    c.RangeSaved(view.generation, view.cut.number, each.number, path, self._clocks)
                )

    def close(self) -> None:
        self.scheduler.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def view_when(member: SchedulerMember, is_so: Callable[[View], bool]) -> View:
    """The first view that is so, among the newest ones."""
    deadline = time.monotonic() + LONG_S
    view = member.view
    while not is_so(view):
        assert time.monotonic() < deadline, view
        view = member.newer_view(view.version, 1.0)
    return view


def primaries(view: View) -> list[str]:
    return sorted(each.servers[0] for each in view.ranges if each.servers)


# --- clocks ---


def test_wait_for_a_clock_is_logged_with_its_reason(tmp_path, stack):
    """For workers that have not come, for the slowest one, and for a scheduler that is away."""
    logs = stack.enter_context(capture_logs())

    def wait_for(event: str, **fields: object) -> None:
        told = {"event": event, **fields}.items()
        wait_until(lambda: any(told <= line.items() for line in logs))

    group = Servers(tmp_path, stack)
    w1, w2 = group.join("w1"), group.join("w2")
    w1.wait_s = w1.say_s = 0.1
    is_over = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(w1.begin, 0, 2)
        wait_for("waiting_for_workers", worker="w1", there="1 of 2")
        w2.begin(0, 2)
        progress = first.result(LONG_S)
        waiting = pool.submit(w1.tick, 0, progress.generation, is_over.is_set)
        wait_for("waiting_for_workers", worker="w1", clock=1, slowest="w2", slowest_clock=0)
        group.scheduler.stop()
        wait_for("scheduler_away")
        is_over.set()
        with pytest.raises((Closed, Evicted)):
            waiting.result(LONG_S)


async def test_workers_that_wait_look_again_only_when_a_clock_opens(tmp_path, monkeypatch):
    """Otherwise each of many workers would look again at the tick of each."""
    num_workers, num_clocks = 100, 3
    looked = []
    may_begin = Job.may_begin

    def counted(state: Job, worker: str, num: int = 1, *, all_here: bool = False) -> bool:
        looked.append(worker)
        return may_begin(state, worker, num, all_here=all_here)

    journal = Journal(tmp_path / "scheduler.db")
    service = SchedulerService(journal, Settings())
    names = [f"w{i}" for i in range(num_workers)]
    for name in names:
        service._run(c.WorkerJoined(name, 1, 0))
    generation = service._state.jobs[""].generation
    monkeypatch.setattr(Job, "may_begin", counted)
    for clock in range(num_clocks):
        requests = [
            pb.TickRequest(name=name, incarnation=1, generation=generation, clock=clock)
            for name in names
        ]
        replies = await asyncio.gather(*(service.Tick(each, Mock()) for each in requests))
        assert {reply.clock for reply in replies} == {clock + 1}
    service.end()
    journal.close()
    assert len(looked) <= 2 * num_workers * num_clocks


def test_closed_client_ends_a_tick_that_waits(tmp_path, stack):
    group = Servers(tmp_path, stack)
    w1, w2 = group.join("w1"), group.join("w2")
    with ThreadPoolExecutor(2) as pool:
        begun = [pool.submit(worker.begin, 0, 2) for worker in (w1, w2)]
        generation = [each.result(LONG_S) for each in begun].pop().generation
        is_over = threading.Event()
        waiting = pool.submit(w1.tick, 0, generation, is_over.is_set)
        is_over.set()
        with pytest.raises(Exception, match="closed"):
            waiting.result(LONG_S)


def test_negative_staleness_is_refused(tmp_path, stack):
    with pytest.raises(Invalid, match="must not be negative, got -1"):
        Servers(tmp_path, stack).join("w1").begin(-1)


# --- loss and checkpoints ---


def test_only_the_last_two_checkpoints_are_kept(tmp_path, stack):
    group = Servers(tmp_path, stack, checkpoints=f"{tmp_path}/cuts")
    stack.callback(Node(group.target, "a").close)
    worker = group.join("w1")
    worker.declare(TABLE, LONG_S)
    view_when(worker, lambda view: len(primaries(view)) == 4)
    numbers = [worker.checkpoint(LONG_S) for _ in range(4)]
    assert numbers == [1, 2, 3, 4]
    generation = worker.view.generation
    kept = {f"cut-{generation}-3", f"cut-{generation}-4"}
    wait_until(lambda: {path.name for path in (tmp_path / "cuts").iterdir()} == kept)


def test_checkpoint_without_a_folder_is_refused(tmp_path, stack):
    worker = Servers(tmp_path, stack).join("w1")
    with pytest.raises(Unavailable, match="without --checkpoints"):
        worker.checkpoint(LONG_S)


# --- the journal ---


def test_second_scheduler_on_a_journal_is_refused(tmp_path):
    first = Journal(tmp_path / "scheduler.db")
    with pytest.raises(OSError, match="another scheduler has"):
        Journal(tmp_path / "scheduler.db")
    first.close()
    Journal(tmp_path / "scheduler.db").close()


def test_foreign_file_is_no_journal(tmp_path):
    path = tmp_path / "scheduler.db"
    path.write_bytes(b"no database, but long enough to be looked at" * 100)
    with pytest.raises(OSError, match="cannot be used"):
        Journal(path)
