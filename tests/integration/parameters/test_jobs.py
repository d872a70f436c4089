"""Several trainings on one group: each has the model of a group of its own."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from support.waiting import wait_until
from xain_parameters import Invalid, KVWorker, connect
from xain_parameters.client.local import LocalGroup
from xain_parameters.client.sync import Server
from xain_parameters.errors import Unavailable
from xain_parameters.scheduler.client import SchedulerCalls
from xain_parameters.scheduler.reports import Status
from xain_parameters.scheduler.server_client import ServerScheduler
from xain_parameters.scheduler.service import NEW_TABLES_AT_ONCE, NEW_TABLES_PER_S
from xain_parameters.scheduler.worker_client import WorkerScheduler
from xain_parameters.specs import View, encoded
from xain_parameters.tables.rules import SGD
from xain_wire.parameters import scheduler_pb2 as pb
from xain_wire.parameters.scheduler_pb2_grpc import SchedulerStub

NUM_CLOCKS = 10
LONG_S = 30.0


def descend(server: Server, table: str, to: float, num_clocks: int = NUM_CLOCKS) -> int:
    """Gradient descent towards a number; returns how many clocks the loop had."""
    w = server.dense(table, (3,), update=SGD(0.5))
    num_done = 0
    for _ in server.clocks(stop=num_clocks):
        w.push(w.pull() - np.float32(to))
        num_done += 1
    return num_done


def model(server: Server, table: str) -> bytes:
    return server.dense(table, (3,), update=SGD(0.5)).pull().tobytes()


def alone(to: float) -> bytes:
    with LocalGroup(1) as group, group.connect() as server:
        descend(server, "w", to)
        return model(server, "w")


def test_connections_that_declare_other_tables_train_side_by_side():
    """Workers that name no job: two begin at the same time, and a third when they are at an end."""
    together = threading.Barrier(2)
    with LocalGroup(2) as group, ThreadPoolExecutor() as pool:

        def train(worker: str, table: str, to: float) -> tuple[int, bytes]:
            with group.connect(worker) as server:
                together.wait(LONG_S)
                return descend(server, table, to), model(server, table)

        a = pool.submit(train, "a", "w", 1.0)
        b = pool.submit(train, "b", "v", -2.0)
        assert a.result() == (NUM_CLOCKS, alone(1.0))
        assert b.result() == (NUM_CLOCKS, alone(-2.0))
        with group.connect("c") as server:
            assert descend(server, "u", 5.0) == NUM_CLOCKS
            assert model(server, "u") == alone(5.0)


def test_worker_reaches_a_table_of_another_job_by_a_second_connection():
    """Pulls see what counts there, pushes count at once, and no clock of that job is waited for."""
    with (
        LocalGroup(2) as group,
        group.connect("a", job="one") as one,
        group.connect("b", job="two") as two,
    ):
        w = one.dense("w", (3,))
        loop = one.clocks()
        next(loop)
        w.push(np.ones(3, np.float32))  # counts when this clock is over
        descend(two, "v", 2.0)
        with group.connect("b-one", job="one") as of_one:
            theirs = of_one.find("w")
            assert theirs.pull().tolist() == [0.0, 0.0, 0.0]
            theirs.push(np.full(3, 5, np.float32))
            assert theirs.pull().tolist() == [5.0, 5.0, 5.0]
        next(loop)
        assert w.pull().tolist() == [6.0, 6.0, 6.0]
        assert model(two, "v") == alone(2.0)


def test_connection_without_a_name_finds_the_job_of_a_table():
    with LocalGroup(1) as group:
        with group.connect("a") as server, group.connect("b") as other:
            descend(server, "w", 1.0)
            server.dense("bias", (1,))
            other.dense("v", (3,))
            with pytest.raises(Invalid, match=r"'bias' belongs to the job 'table:w'.*'table:v'"):
                other.dense("bias", (1,))
        with group.connect("reader") as reader:
            with pytest.raises(Invalid, match="there is no table 'u'"):
                reader.find("u")
            assert reader.find("bias").pull().tolist() == [0.0]
            assert reader.find("w").pull().tobytes() == alone(1.0)


def test_workers_as_in_ps_lite_share_tables_whichever_is_first():
    with LocalGroup(1) as group, group.connect("a") as a, group.connect("b") as b:
        one, other = KVWorker(a), KVWorker(b)
        one.wait(one.push([1], np.ones(1, np.float32)))
        other.wait(other.push([2], np.ones(2, np.float32), lens=[2]))
        assert one.wait(one.pull([2], lens=2)).tolist() == [1.0, 1.0]
        one.close()
        other.close()


def test_connection_that_finds_a_table_takes_part_in_its_job():
    """Also in the job without a name, whose view a worker has from the beginning."""
    with LocalGroup(1) as group, group.connect("a") as a, group.connect("b") as b:
        kv = KVWorker(a)
        kv.wait(kv.push([1], np.ones(1, np.float32)))
        (name,) = (table.name for table in a._core.scheduler.view.tables)
        descend(b, "w", 1.0)
        with group.connect("c") as c:
            c.find(name)
            with pytest.raises(Invalid, match=r"'w' belongs to the job 'table:w'"):
                c.dense("w", (3,), update=SGD(0.5))
        kv.close()


class Moved(WorkerScheduler):
    """A worker that enters another job when its stream of views is about to begin."""

    def _wanted(self) -> pb.ViewsRequest:
        wanted = super()._wanted()
        self.job = "two"
        return wanted


def test_job_that_changes_while_the_stream_of_views_begins_is_heard_of():
    with LocalGroup(1) as group, group.connect("a", job="two") as server:
        server.dense("w", (3,))
        worker = Moved(group.target, "b", job=None)
        worker.join(LONG_S)
        assert [table.name for table in worker.view.tables] == ["w"]
        worker.close()


def begin(stub: SchedulerStub, worker: WorkerScheduler, job: str) -> str:
    """Begin a loop in a job and end it; returns the status of the call that begins it."""
    request = pb.TickRequest(
        name=worker.name, incarnation=worker.incarnation, job=job, begins=True, num_workers=1
    )
    try:
        stub.Tick(request, timeout=LONG_S)
    except grpc.RpcError as error:
        return str(error.code().name)
    stub.End(pb.EndRequest(name=worker.name, incarnation=worker.incarnation, job=job))
    return "OK"


def test_jobs_without_tables_leave_room_and_take_tokens():
    """Loops of one worker that begin in many jobs keep no other training out."""
    with LocalGroup(1) as group, grpc.insecure_channel(group.target) as channel:
        stub = SchedulerStub(channel)
        worker = WorkerScheduler(group.target, "a")
        worker.join(LONG_S)
        began = time.monotonic()
        codes = Counter(begin(stub, worker, f"j{n}") for n in range(4 * NEW_TABLES_AT_ONCE))
        most = NEW_TABLES_AT_ONCE + NEW_TABLES_PER_S * (time.monotonic() - began)
        assert NEW_TABLES_AT_ONCE - 1 <= codes["OK"] <= most
        assert codes.keys() <= {"OK", "RESOURCE_EXHAUSTED"}
        assert begin(stub, worker, "a job") == "INVALID_ARGUMENT"
        worker.close()
        with group.connect("b", job="ctr") as server:
            assert descend(server, "w", 1.0) == NUM_CLOCKS


def test_table_that_a_job_does_not_have_is_not_found():
    """A job named after a table may have none, when a worker began its loop in it."""
    with LocalGroup(1) as group, grpc.insecure_channel(group.target) as channel:
        stub = SchedulerStub(channel)
        worker = WorkerScheduler(group.target, "a", job="table:w")
        worker.join(LONG_S)
        worker.begin(0)
        for job in (None, "table:w"):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Declare(pb.DeclareRequest(find="w", job=job), timeout=LONG_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == "there is no table 'w'; there are: none"
        worker.close()


def test_checkpoint_and_status_are_of_one_job():
    with (
        LocalGroup(1) as group,
        group.connect("a", job="one") as one,
        group.connect("b", job="two") as two,
        group.connect("c") as reader,
        SchedulerCalls(group.target) as calls,
    ):
        descend(one, "w", 1.0)
        descend(two, "w", 1.0, 4)
        assert (one.checkpoint(), one.checkpoint(), two.checkpoint()) == (1, 2, 1)
        with pytest.raises(Unavailable, match="name a job; there are one, two"):
            reader.checkpoint()
        status = calls.status(LONG_S)
        assert {name: job.opened for name, job in status.jobs.items()} == {"one": 10, "two": 4}
        assert [job.cuts for job in status.jobs.values()] == [(1, 2), (1,)]
        assert len(status.ranges) == 2 * len(status.jobs["one"].view.ranges)


def test_keys_and_bytes_are_counted_for_the_job_that_has_them():
    """Whole small requests, the sections of large ones, rows by number, and rows by key."""
    with (
        LocalGroup(2) as group,
        group.connect("a", job="a") as a,
        group.connect("b", job="b") as b,
        SchedulerCalls(group.target) as calls,
    ):
        large, table = a.dense("w", (1 << 20,)), b.table("t", 2)
        for _ in range(2):
            large.push(np.ones(1 << 20, np.float32))
        large.pull()
        table.push(range(100), np.ones((100, 2), np.float32))
        table.pull(range(50))
        table.pull(range(50))
        jobs = {name: job.view.job for name, job in calls.status(LONG_S).jobs.items()}
        pushed = sum((server._pushed for server in group.servers), Counter())
        pulled = sum((server._pulled for server in group.servers), Counter())
        assert pushed == {jobs["a"]: 2 << 20, jobs["b"]: 100}
        assert pulled == {jobs["a"]: 1 << 20, jobs["b"]: 100}

        def has_reported() -> bool:
            status = calls.status(LONG_S)
            num_bytes = {name: job.load.bytes for name, job in status.jobs.items()}
            in_all = sum(load.bytes for load in status.loads.values())
            return (
                num_bytes["a"] == 4 << 20
                and num_bytes["b"] >= 100 * 2 * 4
                and in_all == sum(num_bytes.values())
            )

        wait_until(has_reported)


class Heard(ServerScheduler):
    """A server that never joins, and hears what a test says."""

    def __init__(self) -> None:
        self.told: list[object] = []
        super().__init__(
            "localhost:1", "s0", "-", lambda view: self.told.append(view.job), on_jobs=self._see
        )

    def _see(self, jobs: Collection[int]) -> None:
        self.told.append(set(jobs))


def test_job_whose_view_comes_before_the_server_has_begun_is_kept():
    """The list of jobs from before its view is older than that view."""
    heard = Heard()
    for response in (
        pb.ViewsResponse(view=encoded(View(1, 1, (), (), {}, job=0))),
        pb.ViewsResponse(jobs=[0]),
        pb.ViewsResponse(view=encoded(View(1, 2, (), (), {}, job=1))),
    ):
        heard._on_response(response, "")
    heard.told.clear()
    heard.tell_again()
    heard.close()
    assert heard.told == [0, 1, {0, 1}]


@pytest.mark.parametrize("job", ["ctr", None])
def test_workers_have_ranks_and_the_first_clock_waits_for_all_of_them(job):
    """Also those of a job that is found by its first table."""
    begun = []
    with LocalGroup(1) as group, ThreadPoolExecutor() as pool:

        def train(name: str) -> int | None:
            with group.connect(name, job=job, workers=3) as server:
                w = server.dense("w", (3,), update=SGD(0.5))
                for _ in server.clocks(stop=2):
                    begun.append(name)
                    w.pull()
                assert server.num_workers == 3
                return server.rank

        first = [pool.submit(train, name) for name in ("a", "b")]
        _until(lambda status: len(status.clocks) == 2, group.target)
        had_begun = bool(begun)
        with group.connect("reader", job=job) as reader:
            reader.find("w").pull()
            has_rank = reader.rank is not None
        ranks = [each.result() for each in (*first, pool.submit(train, "c"))]
    assert not had_begun
    assert not has_rank
    assert sorted(ranks[:2]) == [0, 1]
    assert ranks[2] == 2
    assert sorted(begun) == [*"aabbcc"]


def test_asynchronous_workers_have_ranks():
    async def work(group: LocalGroup, name: str) -> tuple[int | None, int]:
        async with connect(group.target, worker=name, job="ctr", workers=2) as server:
            w = await server.dense("w", (3,), update=SGD(0.5))
            async for _ in server.clocks(stop=2):
                await w.pull()
            return server.rank, server.num_workers

    async def both(group: LocalGroup) -> list[tuple[int | None, int]]:
        return await asyncio.gather(work(group, "a"), work(group, "b"))

    with LocalGroup(1) as group:
        assert sorted(asyncio.run(both(group))) == [(0, 2), (1, 2)]


def _until(condition: Callable[[Status], bool], where: str | Server) -> None:
    target = where if isinstance(where, str) else where._core.scheduler.target
    with SchedulerCalls(target) as calls:
        wait_until(lambda: condition(calls.status(LONG_S)))
