"""The scheduler over gRPC, and as a process that is killed."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from support.logs import capture_logs
from xain_foundation.net.sockets import free_ports
from xain_parameters.errors import Closed, Evicted, Invalid, TableConflict, Unavailable
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler.client import SchedulerCalls, SchedulerMember
from xain_parameters.scheduler.journal import Journal, JournalError
from xain_parameters.scheduler.manifests import read_manifest
from xain_parameters.scheduler.server_client import ServerScheduler
from xain_parameters.scheduler.service import SchedulerServer, SchedulerService
from xain_parameters.scheduler.state import Job, Settings
from xain_parameters.scheduler.worker_client import WorkerScheduler
from xain_parameters.specs import Plugin, TableSpec, View
from xain_wire.parameters import scheduler_pb2 as pb

TABLE = TableSpec(0, "w", 100, 4, True, "float32", Plugin("add"), Plugin("zeros"), (100, 4))
TIMES = {"lease_s": 1.0, "grace_s": 0.5, "worker_lease_s": 2.0}
LONG_S = 30.0


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


class Group:
    def __init__(self, folder: Path, stack: ExitStack, **settings: object) -> None:
        journal = Journal(folder / "scheduler.db")
        chosen = Settings(num_ranges=4, **settings)  # type: ignore[arg-type]  # fields by name
        self.server = stack.enter_context(SchedulerServer(journal, chosen, **TIMES))
        self.stack = stack

    @property
    def target(self) -> str:
        return self.server.target

    def node(self, name: str) -> Node:
        node = Node(self.target, name)
        self.stack.callback(node.close)
        return node

    def worker(self, name: str) -> WorkerScheduler:
        worker = WorkerScheduler(self.target, name)
        worker.join(LONG_S)
        self.stack.callback(worker.close)
        return worker


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


# --- placement ---


def test_servers_and_workers_see_the_same_view(tmp_path: Path, stack: ExitStack) -> None:
    group = Group(tmp_path, stack, num_replicas=1)
    group.node("a")
    group.node("b")
    worker = group.worker("w1")
    declared = worker.declare(TABLE, LONG_S)
    assert declared.number == 1
    assert worker.declare(TABLE, LONG_S) == declared
    other = TableSpec(**{n: getattr(TABLE, n) for n in TABLE.__struct_fields__} | {"dim": 5})
    with pytest.raises(TableConflict, match="'w' already"):
        worker.declare(other, LONG_S)
    view = view_when(worker, lambda view: all(len(each.servers) == 2 for each in view.ranges))
    assert primaries(view) == ["a", "a", "b", "b"]
    assert view.addresses == {"a": "a:1", "b": "b:1"}


def test_backup_of_a_dead_server_becomes_primary(tmp_path: Path, stack: ExitStack) -> None:
    group = Group(tmp_path, stack, num_replicas=1)
    a = group.node("a")
    group.node("b")
    worker = group.worker("w1")
    worker.declare(TABLE, LONG_S)
    view_when(worker, lambda view: all(len(each.servers) == 2 for each in view.ranges))
    a.close()
    view_when(worker, lambda view: primaries(view) == ["b"] * 4)


def test_leaving_server_waits_until_its_ranges_have_moved(tmp_path: Path, stack: ExitStack) -> None:
    group = Group(tmp_path, stack)
    a = group.node("a")
    group.node("b")
    worker = group.worker("w1")
    worker.declare(TABLE, LONG_S)
    view_when(worker, lambda view: primaries(view) == ["a", "a", "b", "b"])
    assert a.scheduler.leave(LONG_S)
    view = view_when(worker, lambda view: "a" not in view.addresses)
    assert primaries(view) == ["b"] * 4
    with SchedulerCalls(group.target) as calls:
        assert calls.status(LONG_S).num_rollbacks == 0


# --- clocks ---


def test_wait_for_a_clock_is_logged_with_its_reason(tmp_path: Path, stack: ExitStack) -> None:
    """For workers that have not come, for the slowest one, and for a scheduler that is away."""
    logs = stack.enter_context(capture_logs())

    def wait_for(event: str, **fields: object) -> None:
        deadline = time.monotonic() + LONG_S
        while not any({"event": event, **fields}.items() <= line.items() for line in logs):
            assert time.monotonic() < deadline, logs
            time.sleep(0.02)  # a poll: it ends with the line

    group = Group(tmp_path, stack)
    w1, w2 = group.worker("w1"), group.worker("w2")
    w1.wait_s = w1.say_s = 0.1
    is_over = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(w1.begin, 0, 2)
        wait_for("waiting_for_workers", worker="w1", there="1 of 2")
        w2.begin(0, 2)
        progress = first.result(LONG_S)
        waiting = pool.submit(w1.tick, 0, progress.generation, is_over.is_set)
        wait_for("waiting_for_workers", worker="w1", clock=1, slowest="w2", slowest_clock=0)
        group.server.stop()
        wait_for("scheduler_away")
        is_over.set()
        with pytest.raises((Closed, Evicted)):
            waiting.result(LONG_S)


def test_double_ticks_count_once_and_the_barrier_opens_for_all(
    tmp_path: Path, stack: ExitStack
) -> None:
    group = Group(tmp_path, stack)
    w1, w2 = group.worker("w1"), group.worker("w2")
    with ThreadPoolExecutor(4) as pool:
        begun = [pool.submit(worker.begin, 0, 2) for worker in (w1, w2)]
        first = [each.result(LONG_S) for each in begun]
        assert [each.clock for each in first] == [0, 0]
        generation = first[0].generation
        twice = [pool.submit(w1.tick, 0, generation) for _ in range(2)]
        assert w2.tick(0, generation).clock == 1
        assert [each.result(LONG_S).clock for each in twice] == [1, 1]
        assert w2.wait_opened(1, generation, lambda: False) == (generation, 1)


def test_answer_about_opened_clocks_comes_with_the_view_to_act_on(
    tmp_path: Path, stack: ExitStack
) -> None:
    """The view has the workers that ended before the clock opened."""
    group = Group(tmp_path, stack)
    reader, other = group.worker("reader"), group.worker("other")
    may_hear = threading.Event()
    stack.callback(may_hear.set)
    reader._on_view = lambda view: may_hear.wait(LONG_S) and None
    other.declare(TABLE, LONG_S)  # the reader hears of it, and of nothing more
    view_when(reader, lambda view: len(view.tables) == 1)
    other.declare(replace(TABLE, name="later"), LONG_S)
    with pytest.raises(Unavailable, match="does not tell its view"):
        reader.opened_now(0.5)
    may_hear.set()
    reader.opened_now(LONG_S)
    assert reader.view.version >= other.view.version


def test_worker_waits_after_a_rollback_for_those_behind_it(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Worker b was a clock ahead when it passed the mark of the checkpoint."""
    group = Group(tmp_path, stack, checkpoints=tmp_path.as_uri())
    node = Node(group.target, "s0", {"a": 0, "b": 1})
    stack.callback(node.close)
    a, b = group.worker("a"), group.worker("b")
    a.declare(TABLE, LONG_S)
    with ThreadPoolExecutor(3) as pool:
        begun = [pool.submit(worker.begin, 0, 2) for worker in (a, b)]
        before = [each.result(LONG_S) for each in begun].pop().generation
        ahead = pool.submit(b.tick, 0, before)
        with SchedulerCalls(group.target) as calls:
            while calls.status(LONG_S).clocks != {"a": 0, "b": 1}:
                time.sleep(0.01)  # a poll: it ends when both clocks are as wanted
            assert calls.checkpoint(LONG_S) == 1
        node.close()
        group.node("s1")
        after = view_when(a, lambda view: view.generation > before).generation
        again = a.tick(0, before)
        assert (again.clock, again.generation) == (0, after)
        a.tick(0, after)
        assert ahead.result(LONG_S)[:2] == (1, 1)  # clock, opened


async def test_workers_that_wait_look_again_only_when_a_clock_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each of many workers would look again at the tick of each."""
    num_workers, num_clocks = 100, 3
    looked: list[str] = []
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


def test_killed_worker_opens_the_barrier_of_the_others(tmp_path: Path, stack: ExitStack) -> None:
    group = Group(tmp_path, stack)
    w1 = group.worker("w1")
    process = start_worker(group.target, "w2")
    stack.callback(end, process)
    with ThreadPoolExecutor(1) as pool:
        begun = w1.begin(0, 2)
        ticked = pool.submit(w1.tick, begun.clock, begun.generation)
        end(process)
        assert ticked.result(LONG_S).clock == begun.clock + 1
    view_when(w1, lambda view: view.ended == {"w2": 0})


def test_process_under_the_name_of_a_killed_worker_goes_on_where_it_was(
    tmp_path: Path, stack: ExitStack
) -> None:
    group = Group(tmp_path, stack)
    former = start_worker(group.target, "w1", num_ticks=3)
    assert former.stdout is not None
    assert [former.stdout.readline() for _ in range(4)][-1] == "3\n"
    end(former)
    assert group.worker("w1").begin(0).clock == 3


def test_former_process_of_a_worker_is_evicted(tmp_path: Path, stack: ExitStack) -> None:
    group = Group(tmp_path, stack)
    former = group.worker("w1")
    begun = former.begin(0)
    former._membership.leave()  # as though it was silent for a lease
    later = group.worker("w1")
    later.begin(0)
    with pytest.raises(Evicted):
        former.tick(0, begun.generation)


def test_closed_client_ends_a_tick_that_waits(tmp_path: Path, stack: ExitStack) -> None:
    group = Group(tmp_path, stack)
    w1, w2 = group.worker("w1"), group.worker("w2")
    with ThreadPoolExecutor(2) as pool:
        begun = [pool.submit(worker.begin, 0, 2) for worker in (w1, w2)]
        generation = [each.result(LONG_S) for each in begun].pop().generation
        is_over = threading.Event()
        waiting = pool.submit(w1.tick, 0, generation, is_over.is_set)
        is_over.set()
        with pytest.raises(Exception, match="closed"):
            waiting.result(LONG_S)


def test_negative_staleness_is_refused(tmp_path: Path, stack: ExitStack) -> None:
    with pytest.raises(Invalid, match="must not be negative, got -1"):
        Group(tmp_path, stack).worker("w1").begin(-1)


# --- loss and checkpoints ---


def test_lost_range_rolls_back_to_the_checkpoint_and_ticks_tell_it(
    tmp_path: Path, stack: ExitStack
) -> None:
    group = Group(tmp_path, stack, checkpoints=f"file://{tmp_path}/cuts")
    a = group.node("a")
    worker = group.worker("w1")
    worker.declare(TABLE, LONG_S)
    begun = worker.begin(0)
    generation = begun.generation
    assert worker.tick(0, generation).clock == 1
    number = worker.checkpoint(LONG_S)
    cut = read_manifest(f"{tmp_path}/cuts", f"cut-{generation}-{number}")
    assert (cut.number, cut.clock, len(cut.ranges)) == (number, 1, 4)
    assert worker.tick(1, generation).clock == 2
    a.close()
    group.node("b")
    view = view_when(worker, lambda view: primaries(view) == ["b"] * 4)
    assert (view.generation, view.rolled_back_to) == (generation + 1, number)
    assert view.load_from == cut.folder
    back = worker.tick(2, generation)
    assert (back.clock, back.generation) == (1, generation + 1)


def test_only_the_last_two_checkpoints_are_kept(tmp_path: Path, stack: ExitStack) -> None:
    group = Group(tmp_path, stack, checkpoints=f"{tmp_path}/cuts")
    group.node("a")
    worker = group.worker("w1")
    worker.declare(TABLE, LONG_S)
    view_when(worker, lambda view: len(primaries(view)) == 4)
    numbers = [worker.checkpoint(LONG_S) for _ in range(4)]
    assert numbers == [1, 2, 3, 4]
    generation = worker.view.generation
    kept = {f"cut-{generation}-3", f"cut-{generation}-4"}
    deadline = time.monotonic() + LONG_S
    while {path.name for path in (tmp_path / "cuts").iterdir()} != kept:
        assert time.monotonic() < deadline
        time.sleep(0.02)  # a poll: it ends when the others are removed


def test_checkpoint_without_a_folder_is_refused(tmp_path: Path, stack: ExitStack) -> None:
    worker = Group(tmp_path, stack).worker("w1")
    with pytest.raises(Unavailable, match="without --checkpoints"):
        worker.checkpoint(LONG_S)


# --- the journal, and a scheduler that is killed ---


def test_second_scheduler_on_a_journal_is_refused(tmp_path: Path) -> None:
    first = Journal(tmp_path / "scheduler.db")
    with pytest.raises(JournalError, match="another scheduler has"):
        Journal(tmp_path / "scheduler.db")
    first.close()
    Journal(tmp_path / "scheduler.db").close()


def test_foreign_file_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.db"
    path.write_bytes(b"no database, but long enough to be looked at" * 100)
    with pytest.raises(JournalError, match="cannot be used"):
        Journal(path)


def test_nothing_is_lost_when_the_scheduler_is_killed(tmp_path: Path, stack: ExitStack) -> None:
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    process = start_scheduler(tmp_path, listen)
    stack.callback(end, process)
    node = Node(listen, "a")
    stack.callback(node.close)
    w1, w2 = WorkerScheduler(listen, "w1"), WorkerScheduler(listen, "w2")
    for worker in (w1, w2):
        worker.join(LONG_S)
        stack.callback(worker.close)
    w1.declare(TABLE, LONG_S)
    with ThreadPoolExecutor(2) as pool:
        begun = [pool.submit(worker.begin, 0, 2) for worker in (w1, w2)]
        generation = [each.result(LONG_S) for each in begun].pop().generation
        for clock in range(5):
            ticked = pool.submit(w1.tick, clock, generation)
            assert w2.tick(clock, generation).clock == clock + 1
            assert ticked.result(LONG_S).clock == clock + 1
        before = w1.view
        waiting = pool.submit(w1.tick, 5, generation)  # in the barrier when the scheduler dies
        with SchedulerCalls(listen) as calls:
            deadline = time.monotonic() + LONG_S
            while calls.status(LONG_S).clocks["w1"] < 6:
                assert time.monotonic() < deadline
        end(process)
        stack.callback(end, start_scheduler(tmp_path, listen))
        assert w2.tick(5, generation).clock == 6
        assert waiting.result(LONG_S).clock == 6
        after = view_when(w1, lambda view: view.number >> 32 > before.number >> 32)
    assert (after.generation, after.tables, after.ended) == (generation, before.tables, {})
    assert [each.servers for each in after.ranges] == [each.servers for each in before.ranges]


def test_server_that_died_while_the_scheduler_was_away_is_noticed(
    tmp_path: Path, stack: ExitStack
) -> None:
    with ExitStack() as first:
        group = Group(tmp_path, first, num_replicas=1)
        group.node("a")
        group.node("b")
        worker = group.worker("w1")
        worker.declare(TABLE, LONG_S)
        view_when(worker, lambda view: all(len(each.servers) == 2 for each in view.ranges))
    group = Group(tmp_path, stack, num_replicas=1)
    group.node("b")
    worker = group.worker("w1")
    view = view_when(worker, lambda view: set(view.addresses) == {"b"})
    assert len(view.ranges) == 4


# --- processes ---

_WORKER = """
import sys, time
from xain_parameters.scheduler.worker_client import WorkerScheduler
worker = WorkerScheduler(sys.argv[1], sys.argv[2])
worker.join(30)
progress = worker.begin(0)
for clock in range(int(sys.argv[3])):
    print(progress.clock, flush=True)
    progress = worker.tick(clock, progress.generation)
print(progress.clock, flush=True)
time.sleep(600)  # until it is killed
"""

_SCHEDULER = """
import sys, time
from pathlib import Path
from xain_parameters.scheduler.journal import Journal
from xain_parameters.scheduler.service import SchedulerServer, SchedulerService
from xain_parameters.scheduler.state import Job, Settings
journal = Journal(Path(sys.argv[1]) / "scheduler.db")
with SchedulerServer(journal, Settings(), sys.argv[2]):
    print("serving", flush=True)
    time.sleep(600)  # until it is killed
"""


def start_worker(target: str, name: str, num_ticks: int = 0) -> "subprocess.Popen[str]":
    return _start(_WORKER, target, name, str(num_ticks))


def start_scheduler(folder: Path, listen: str) -> "subprocess.Popen[str]":
    process = _start(_SCHEDULER, str(folder), listen)
    assert process.stdout is not None
    assert process.stdout.readline() == "serving\n"
    return process


def _start(code: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def end(process: "subprocess.Popen[str]") -> None:
    """Kill it with -9."""
    process.kill()
    process.wait(LONG_S)
    assert process.stdout is not None
    process.stdout.close()
