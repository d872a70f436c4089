"""The whole parameter server in one process: scheduler, servers, workers."""

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import xain_parameters as parameters
from support.logs import capture_logs
from xain_membership.coordinator import CoordinatorMembership
from xain_membership.ports import Member
from xain_parameters import Invalid, LocalGroup
from xain_parameters.scheduler.worker_client import WorkerScheduler


def test_group_that_is_closed_warns_of_nothing(caplog):
    """The servers of a closed group did not die, and nothing that a worker waits for is lost."""
    with parameters.local_sync(shards=2) as server:
        server.dense("w", shape=(3,)).push(np.ones(3, np.float32))
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("replicas", [0, 1])
async def test_asynchronous_worker_trains_with_a_server_of_its_own(replicas):
    async with parameters.local(shards=2, replicas=replicas) as server:
        w = await server.dense("w", shape=(785, 10), update=parameters.SGD(0.5))
        emb = await server.table("user", dim=4, init=parameters.Uniform(0.05, seed=1))
        ids = np.array([7, 2**40, 7])
        before = await emb.pull(ids)
        async for clock in server.clocks(stop=5):
            assert (await w.pull() == -0.5 * clock).all()
            g = np.ones((785, 10), np.float32)
            await asyncio.gather(w.push(g), emb.push(ids, np.ones((3, 4), np.float32)))
        after = await emb.pull(ids)
        np.testing.assert_allclose(after, before + 5 * np.array([[2], [1], [2]]), rtol=1e-5)
        assert await server.checkpoint() >= 1


def test_keys_of_an_array_that_has_changed_since_are_not_those_of_before():
    """A key list that comes again in another array is that list, whatever the first one holds."""
    with LocalGroup(1) as group, group.connect() as server:
        table = server.table("t", 1, bound=100)
        first, second = (np.arange(10, dtype=np.uint64) for _ in range(2))
        table.pull(first)
        first += 50
        table.push(second, np.ones((10, 1), np.float32))
        assert table.pull(np.arange(10, dtype=np.uint64)).sum() == 10
        assert table.pull(first.copy()).sum() == 0


async def test_end_of_a_loop_that_was_left_is_told_before_the_client_is_closed(monkeypatch):
    """The call to the scheduler is slow, and the client is closed at once."""
    end = WorkerScheduler.end

    def slow_end(scheduler: WorkerScheduler) -> None:
        scheduler._ended.wait(0.5)  # set when the connection to the scheduler is closed
        end(scheduler)

    monkeypatch.setattr(WorkerScheduler, "end", slow_end)
    with LocalGroup(1) as group, group.connect("reader") as reader:
        async with parameters.connect(group.target, worker="w0") as server:
            async for _ in server.clocks():
                break
        assert not reader._core.scheduler.status(10.0).clocks


async def test_push_of_a_clock_that_was_left_says_why_it_is_refused():
    """The scheduler has told the servers of the end of the loop before the push comes."""
    async with parameters.local(shards=1) as server:
        w = await server.dense("w", shape=(4,))
        core = server._server._core
        async for _ in server.clocks():
            ticket = core.push_ticket(w.spec)
            break
        async for _ in server.clocks(stop=0):
            raise AssertionError
        scheduler = core.scheduler
        while "w0" not in (view := scheduler.view).ended:
            scheduler.newer_view(view.version, 10.0)
        with pytest.raises(parameters.Evicted, match="'w0' has left its loop"):
            core.push_rows(w.spec, ticket, np.ones(4, np.float32))


async def test_cancelled_connect_leaves_no_member():
    """Cancelled while it joins, and when it has joined and the caller has not been told."""
    with LocalGroup(1) as group:
        for delay_s in (0.0, 0.002, 0.01, 0.05, 0.2):
            connecting = asyncio.create_task(
                parameters.connect(group.target, worker="w0").__aenter__()
            )
            await asyncio.sleep(delay_s)  # whatever step of connecting it is at then
            if connecting.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await connecting
            else:
                await (await connecting).close()
        async with parameters.connect(group.target, worker="w0", timeout_s=10) as server:
            assert server.worker == "w0"


def test_process_ends_after_a_cancelled_connect():
    """The scheduler is not there, and the timeout is long."""
    program = """
import asyncio, xain_parameters
async def main():
    async with asyncio.timeout(0.5):
        async with xain_parameters.connect("127.0.0.1:1", worker="w0", timeout_s=600):
            pass
try:
    asyncio.run(main())
except TimeoutError:
    print("cancelled")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["cancelled"]


def test_taken_name_is_told_as_evicted(monkeypatch):
    """The first attempt is answered; the time of the others is over before they begin."""
    ask_to_join = CoordinatorMembership._ask_to_join
    limits_s = iter([60.0])

    def ask(membership: CoordinatorMembership, timeout_s: float) -> Member:
        return ask_to_join(membership, next(limits_s, -1.0))

    with LocalGroup(1) as group, group.connect("w0"):
        monkeypatch.setattr(CoordinatorMembership, "_ask_to_join", ask)
        with pytest.raises(parameters.Evicted, match="w0"):
            group.connect("w0", timeout_s=1.0)


def test_asynchronous_table_beside_a_bulk_synchronous_loop_counts_pushes_at_once():
    with LocalGroup(2) as group, group.connect() as server:
        w = server.dense("w", (4,))
        counts = server.table("counts", 1, staleness=None)
        for clock in server.clocks(staleness=0, stop=5):
            w.push(np.ones(4, np.float32))
            counts.push([1, 2], np.ones(2, np.float32))
            assert (w.pull() == clock).all()
            assert (counts.pull([1, 2]) == clock + 1).all()
        assert (w.pull() == 5).all()


@pytest.mark.parametrize("staleness", [1, None])
def test_bulk_synchronous_table_beside_a_staler_loop_shows_exactly_the_clocks_before(staleness):
    num_workers, num_clocks = 3, 12

    def work(number: int) -> None:
        with group.connect(f"w{number}") as server:
            w = server.dense("w", (4,), staleness=0)
            rows = server.table("rows", 2)
            clocks = server.clocks(staleness, workers=num_workers, stop=num_clocks)
            for clock in clocks:
                assert (w.pull() == num_workers * clock).all()
                w.push(np.ones(4, np.float32))
                rows.push([7], np.ones((1, 2), np.float32))
                assert (rows.pull([7]) >= clock + 1).all()

    with LocalGroup(2) as group:
        with ThreadPoolExecutor(num_workers) as threads:
            list(threads.map(work, range(num_workers)))
        with group.connect("reader") as reader:
            assert (reader.find("w").pull() == num_workers * num_clocks).all()


def test_table_of_staleness_one_beside_an_asynchronous_loop_shows_all_but_the_last_clock():
    def work(number: int) -> None:
        with group.connect(f"w{number}") as server:
            w = server.dense("w", (4,), staleness=1)
            for clock in server.clocks(None, workers=2, stop=12):
                assert (w.pull() >= clock + max(0, clock - 1)).all()
                w.push(np.ones(4, np.float32))

    with LocalGroup(2) as group, ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))


async def test_pull_that_waits_for_a_table_ends_with_the_loop_that_is_waited_for():
    """One worker is ahead of the other by two clocks when the other leaves."""
    with LocalGroup(1) as group, group.connect("slow", job="j") as slow:
        async with parameters.connect(group.target, worker="fast", job="j") as fast:
            behind = slow.clocks(None, workers=2)
            begin = asyncio.create_task(asyncio.to_thread(next, behind))
            w = await fast.dense("w", (4,), staleness=0)
            async for clock in fast.clocks(None, workers=2):
                await w.push(np.ones(4, np.float32))
                if clock == 2:
                    await begin
                    waiting = asyncio.create_task(w.pull())
                    await asyncio.to_thread(behind.close)
                    assert (await waiting == 2).all()
                    break


async def test_pull_that_waits_for_a_table_ends_when_the_client_is_closed():
    with LocalGroup(1) as group, group.connect("slow", job="j") as slow:
        behind = slow.clocks(None, workers=2)
        begin = asyncio.create_task(asyncio.to_thread(next, behind))
        async with parameters.connect(group.target, worker="fast", job="j") as fast:
            w = await fast.dense("w", (4,), staleness=0)
            clocks = fast.clocks(None, workers=2)
            assert [await anext(clocks) for _ in range(2)] == [0, 1]
            waiting = asyncio.create_task(w.pull())
            await asyncio.sleep(0)  # the pull begins, at clock 1
        with pytest.raises(parameters.Closed):
            await waiting
        await begin
        behind.close()


def test_table_has_one_staleness_which_is_not_negative():
    with LocalGroup(1) as group, group.connect() as server:
        server.dense("w", (4,), staleness=0)
        with pytest.raises(parameters.TableConflict, match="staleness 0"):
            server.dense("w", (4,))
        with pytest.raises(parameters.Invalid, match="must not be negative"):
            server.table("rows", 2, staleness=-1)


def test_connection_outside_of_the_loop_is_asynchronous_beside_a_bulk_synchronous_loop():
    """Pushes outside of the loop are seen at once, between two clocks, and no clock waits for them.
    Pushes of the loop are held until their clock is complete."""
    with (
        LocalGroup(2) as group,
        group.connect("w0", job="j") as loop,
        group.connect("w0-counts", job="j") as free,
    ):
        w = loop.dense("w", (4,))
        counts, seen = free.dense("counts", (4,)), loop.dense("counts", (4,))
        for clock in loop.clocks(staleness=0, workers=1, stop=5):
            w.push(np.ones(4, np.float32))
            counts.push(np.ones(4, np.float32))
            assert (w.pull() == clock).all()
            assert (seen.pull() == clock + 1).all()
        assert (w.pull() == 5).all()


def test_worker_that_would_have_no_clock_is_refused_by_name():
    """A new worker whose loop would be over at its begin must not train nothing in silence; one
    that was started again after its last clock only warns."""
    with LocalGroup(1) as group:
        with group.connect("first") as server:
            w = server.dense("w", (2,))
            for _ in server.clocks(stop=3):
                w.push(np.ones(2, np.float32))
        with group.connect("second") as server:
            server.dense("w", (2,))
            with pytest.raises(Invalid, match=r"'second' would have no clock.* 3, .* at clock 3"):
                next(server.clocks(stop=3))
            assert list(server.clocks(stop=5)) == [3, 4]
        with capture_logs() as logs, group.connect("first") as server:
            server.dense("w", (2,))
            assert list(server.clocks(stop=3)) == []
        (told,) = (line for line in logs if line["event"] == "no_clocks")
        assert (told["log_level"], told["worker"], told["stop"]) == ("warning", "first", 3)
