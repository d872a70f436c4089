"""Barriers and batches of the workers of a job."""

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from xain_parameters import Invalid, LocalGroup, RowNumbers, Unavailable, connect, connect_sync
from xain_parameters.client.sync import Server
from xain_parameters.scheduler.journal import Journal
from xain_parameters.scheduler.service import SchedulerServer
from xain_parameters.scheduler.state import Settings

LONG_S = 120.0


# --- barriers ---


def test_barrier_opens_when_all_workers_wait():
    with LocalGroup(1) as group, ThreadPoolExecutor() as pool:
        with group.connect("a", job="j", workers=2) as a:
            with pytest.raises(Unavailable, match=r"waited 0\.5 s at the barrier for 2 workers"):
                a.barrier(timeout_s=0.5)
            with group.connect("b", job="j", workers=2) as b:
                for _ in range(3):
                    waits = pool.submit(a.barrier, timeout_s=LONG_S)
                    b.barrier(timeout_s=LONG_S)
                    waits.result(LONG_S)
        with group.connect("reader", job="j") as reader, pytest.raises(Invalid, match="no rank"):
            reader.barrier()


def test_barrier_of_all_waits_for_servers_too():
    with (
        LocalGroup(2) as group,
        ThreadPoolExecutor() as pool,
        group.connect("a", job="j", workers=1) as a,
    ):
        first, second = group.servers
        waits = [
            pool.submit(a.barrier, "all", LONG_S),
            pool.submit(first.barrier, "all", job="j", timeout_s=LONG_S),
            pool.submit(first.barrier, timeout_s=LONG_S),
        ]
        second.barrier("all", job="j", timeout_s=LONG_S)
        second.barrier(timeout_s=LONG_S)
        for each in waits:
            each.result(LONG_S)
        with pytest.raises(Invalid, match="there is no job 'k'; there are: j"):
            first.barrier("all", job="k")
        with pytest.raises(Invalid, match="no place at a barrier of 'workers'"):
            first.barrier("workers")


def test_worker_that_is_gone_is_not_waited_for_at_a_barrier(tmp_path):
    times = {"lease_s": 10.0, "grace_s": 0.2, "worker_lease_s": 10.5}
    scheduler = SchedulerServer(Journal(tmp_path / "journal"), Settings(), **times)

    def connected(name: str) -> Server:
        return connect_sync(scheduler.target, worker=name, job="j", workers=2)

    with scheduler, connected("a") as a, ThreadPoolExecutor() as pool:
        with connected("b"):
            waits = pool.submit(a.barrier, timeout_s=LONG_S)
        waits.result(LONG_S)
        a.barrier(timeout_s=LONG_S)


# --- batches ---


def read(
    server: Server, num_rows: int, epochs: int, staleness: int | None = 0
) -> list[tuple[int, int]]:
    """Epoch and number of the rows that a worker reads, which are counted at the servers."""
    seen = server.table("seen", 1)
    rows = []
    batches = server.batches(RowNumbers(num_rows, 3), epochs, staleness)
    for batch in batches:
        numbers = np.arange(batch.data.start, batch.data.stop)
        seen.push(batch.epoch * num_rows + numbers, np.ones((len(numbers), 1), np.float32))
        rows += [(batch.epoch, int(number)) for number in numbers]
    reading = batches.reading()
    assert reading.rows == [num_rows] * epochs
    assert reading.is_whole
    assert (seen.pull(np.arange(epochs * num_rows)) == 1).all()
    return rows


@pytest.mark.parametrize("staleness", [0, 2, None])
@pytest.mark.parametrize("num_rows", [1, 20, 100])
def test_workers_read_each_row_once_in_an_epoch(num_rows, staleness):
    """Also where there are more workers than rows."""
    with LocalGroup(2) as group, ThreadPoolExecutor() as pool:

        def work(name: str) -> list[tuple[int, int]]:
            with group.connect(name, job="j", workers=3) as server:
                return read(server, num_rows, 3, staleness)

        counted = Counter(row for rows in pool.map(work, "abc") for row in rows)
    assert counted == Counter((epoch, row) for epoch in range(3) for row in range(num_rows))


def test_worker_of_no_group_reads_all_rows_alone_and_nothing_again():
    with LocalGroup(1) as group, group.connect("a") as server:
        with pytest.raises(Invalid, match="declare a table before"):
            server.batches(RowNumbers(10), 1)
        assert len(read(server, 10, 2)) == 20
        assert read(server, 10, 2) == []
        assert [epoch for epoch, _ in read(server, 10, 3)] == [2] * 10
        with pytest.raises(Invalid, match="data of size 11, and the workers before it data of"):
            read(server, 11, 3)
        with group.connect("b", job="other") as b:
            assert len(read(b, 11, 1)) == 11


def test_asynchronous_workers_read_each_row_once():
    async def work(group: LocalGroup, name: str) -> list[slice]:
        async with connect(group.target, worker=name, job="j", workers=2) as server:
            w = await server.dense("w", 3)
            slices = []
            batches = server.batches(RowNumbers(10, 3), 1)
            async for batch in batches:
                await w.push(np.ones(3, np.float32))
                slices.append(batch.data)
            assert (await batches.reading()).rows == [10]
            return slices

    async def both(group: LocalGroup) -> list[list[slice]]:
        return await asyncio.gather(work(group, "a"), work(group, "b"))

    with LocalGroup(1) as group:
        slices = [each for found in asyncio.run(both(group)) for each in found]
    assert sorted((each.start, each.stop) for each in slices) == [(0, 3), (3, 5), (5, 8), (8, 10)]
