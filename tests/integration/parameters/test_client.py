"""The client against small servers on real sockets, whose ranges the tests move as they like."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np
import pytest

from support.certificates import make_authority, write_folder
from support.fault_proxy import FaultProxy
from support.parameter_group import PATIENCE_S, Group
from support.waiting import beside
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import Certificates
from xain_parameters.client import asynchronous, requests
from xain_parameters.client.core import PIECE_BYTES, PIECES, Core
from xain_parameters.client.sync import Server
from xain_parameters.errors import Closed, Invalid, RequestFailed, TableConflict, Unavailable
from xain_parameters.messages import VERSION, Mark, Push, Refused
from xain_parameters.scheduler.worker_client import Progress
from xain_parameters.tables.initialisers import Constant, Uniform
from xain_parameters.tables.rules import SGD, Adagrad, Assign
from xain_parameters.transport import channel
from xain_parameters.transport.connection import Connection
from xain_parameters.transport.listener import Listener


def test_rows_come_in_the_order_of_the_ids_with_duplicates(group):
    """Ids of any shape and integer type; duplicate ids of a push are added up."""
    with group.worker() as server:
        for table in (
            server.table("open", dim=2, init=Uniform(1.0, seed=3)),
            server.table("bounded", dim=2, bound=100, init=Uniform(1.0, seed=3)),
        ):
            every = table.pull(np.arange(100))
            ids = np.array([[7, 7, 3], [99, 0, 7]], np.int32)
            np.testing.assert_array_equal(table.pull(ids), every[ids])
            grads = np.ones((2, 3, 2), np.float32)
            table.push(ids, grads)
            expected = every.copy()
            np.add.at(expected, ids, 1)
            np.testing.assert_array_equal(table.pull(np.arange(100)), expected)
            assert table.pull([]).shape == (0, 2)
            assert table.spec.bound or table.pull([7, 2**64 - 1]).shape == (2, 2)
            table.push([], np.empty((0, 2), np.float32))


def test_tables_keep_rules_and_dtypes(group):
    with group.worker() as server:
        w = server.dense("w", (5,), update=SGD(0.5), init=Constant(2.0), dtype=np.float64)
        w.push(np.ones(5))
        np.testing.assert_array_equal(w.pull(), np.full(5, 1.5))
        scalar = server.dense("loss", ())
        scalar.push(np.float32(3))
        assert scalar.pull() == 3
        table = server.table("t", dim=1, update=Assign())
        table.push([5, 3], np.array([1, 2], np.float32))
        np.testing.assert_array_equal(table.pull([3, 5, 4])[:, 0], [2, 1, 0])
        with pytest.raises(Invalid, match="'t': a key is assigned twice"):
            table.push([5, 5], np.array([1, 2], np.float32))


def test_wrong_requests_name_the_table_and_change_nothing(group):
    with group.worker() as server:
        w = server.dense("w", (4, 2))
        table = server.table("t", dim=2, bound=10)
        nan = np.full((4, 2), np.nan, np.float32)
        for wrong, why in (
            (lambda: w.push(np.zeros((2, 4), np.float32)), r"'w'.*\(2, 4\) instead of \(4, 2\)"),
            (lambda: w.push(np.zeros((4, 2))), "'w' has float32, not float64"),
            (lambda: w.push(nan), "'w'"),
            (lambda: w.pull(out=np.zeros((2, 4), np.float32)), r"\(2, 4\)"),
            (lambda: w.pull(out=np.zeros((2, 4), np.float32).T), "C-contiguous"),
            (lambda: table.push([1], np.zeros((1, 3), np.float32)), "'t'"),
            (lambda: table.push([10], np.zeros((1, 2), np.float32)), "'t': key 10"),
            (lambda: table.pull([-1]), "'t': key -1 is negative"),
            (lambda: table.pull([0.5]), "'t': keys are whole numbers, not float64"),
            (lambda: table.pull([2**64]), "'t': keys are 0 to"),
            (lambda: table.pull(["7"]), "'t': keys are whole numbers"),
            (lambda: server.dense("x", (0, 3)), "at least one row"),
            (lambda: server.dense("x", (3,), dtype=np.int32), "int32"),
            (lambda: server.clocks(staleness=-1).__next__(), "negative"),
        ):
            with pytest.raises(Invalid, match=why):
                wrong()
        with pytest.raises(TableConflict):
            server.dense("w", (4, 2), update=Adagrad(0.1))
        assert not w.pull().any()
        assert not table.pull(np.arange(10)).any()


def test_push_with_one_value_that_is_not_finite_changes_no_range(group):
    """The value lies in one of four ranges, or comes about where values of the same key are added
    up."""
    with group.worker() as server:
        w = server.dense("w", (4_000, 2))
        table = server.table("t", dim=1)
        g = np.ones((4_000, 2), np.float32)
        ids = np.arange(4_000)
        for row in (0, 3_999):
            g[row, 1] = np.nan
            with pytest.raises(Invalid, match=r"'w'.*not finite"):
                w.push(g)
            g[row, 1] = 1
            with pytest.raises(Invalid, match=r"'t'.*not finite"):
                table.push(ids, np.where(ids == row, np.float32(np.inf), np.float32(1)))
        assert not w.pull().any()
        assert not table.pull(ids).any()
        with pytest.raises(Invalid, match=r"'t'.*not finite"):
            table.push([*range(100), 0], np.full(101, 3e38, np.float32))
        assert not table.pull(ids).any()


def test_pieces_of_a_push_have_numbers_that_depend_on_its_calls_only(group):
    """A worker that restarts and pushes the same in the same clock changes nothing, wherever the
    ranges are by then."""
    shape = (3 * PIECE_BYTES // 8, 2)

    def push(server: Server) -> list[tuple[int, int]]:
        w = server.dense("w", shape)
        table = server.table("t", dim=1)
        group.heard.clear()
        for clock in server.clocks(stop=1):
            assert clock == 0
            w.push(np.ones(shape, np.float32))
            table.push([9, 4], np.ones(2, np.float32))
            w.push(np.ones(shape, np.float32))
            table.push([9, 4], np.ones(2, np.float32))
            if fails:
                break
        heard = [head for _, _, head in group.heard if isinstance(head, Push)]
        return sorted({(head.table, head.part) for head in heard})

    fails = True
    with group.worker() as server:
        first = push(server)
    group.move(1, ("s1",))
    fails = False
    with group.worker(incarnation=2) as server:
        assert push(server) == first
        assert (server.dense("w", shape).pull() == 2).all()
        assert (server.table("t", dim=1).pull([4, 9]) == 2).all()


def test_range_that_moved_is_asked_at_its_new_server(group):
    with group.worker() as server:
        w = server.dense("w", (1_000, 2))
        w.push(np.ones((1_000, 2), np.float32))
        for number in (1, 2, 3, 4):
            group.move(number, ("s1",))
        w.push(np.ones((1_000, 2), np.float32))
        group.move(2, ())
        timer = threading.Timer(0.2, group.move, (2, ("s0",)))
        timer.start()
        w.push(np.ones((1_000, 2), np.float32))
        timer.join()
        np.testing.assert_array_equal(w.pull(), np.full((1_000, 2), 3))


def test_part_of_a_push_that_is_refused_is_cut_by_the_newest_ranges(group):
    """A new scheduler has cut the keys into other ranges before the push arrives."""
    with group.worker() as server:
        table = server.table("t", dim=1)
        ids = np.arange(1_000)

        def split_first(where: str, head: object) -> Refused | None:
            if isinstance(head, Push):
                group.refuse = lambda where, head: None
                group.split(3)
            return None

        group.refuse = split_first
        table.push(ids, np.ones(1_000, np.float32))
        assert (table.pull(ids) == 1).all()
        ranges = {head.range for _, _, head in group.heard if isinstance(head, Push)}
        assert ranges == {1, 2, 4, 5, 6}


def test_array_over_more_ranges_than_a_message_names_is_pushed_and_pulled():
    """4096 ranges, the most that a group can have, at one server."""
    group = Group(num_servers=1, num_ranges=4096)
    with group.worker(timeout_s=PATIENCE_S) as server:
        w = server.dense("w", (1_000_000,))
        ones = np.ones(1_000_000, np.float32)
        w.push(ones)
        np.testing.assert_array_equal(w.pull(), ones)
        assert len(group.heard) == 2 * 4096  # nothing was asked for again
    group.close()


def test_worker_of_another_version_is_told_so(group, monkeypatch):
    """Rather than after its time limit that no server has the range."""
    monkeypatch.setattr(channel, "VERSION", 99)
    with group.worker() as server:
        w = server.dense("w", (10,))
        text = f"version 99 of the protocol; this server speaks {VERSION}"
        with pytest.raises(Invalid, match=text):
            w.pull()


def test_unavailable_tells_why_a_server_was_not_reached(group, tmp_path):
    """The certificate of the servers is of another authority."""
    ours, theirs = (
        Certificates(write_folder(tmp_path / str(i), make_authority(), role, name))
        for i, (role, name) in enumerate([(Role.PARTICIPANT, "w0"), (Role.NODE, "s0")])
    )
    listener = Listener("127.0.0.1:0", lambda *_: None, lambda channel, why: None, tls=theirs)
    address = f"127.0.0.1:{listener.port}"
    group.change(addresses=dict.fromkeys(group.view.addresses, address))
    with group.worker(timeout_s=2.0) as server:
        server._core._requests._tls = ours
        w = server.dense("w", (10,))
        why = f"{address} does not answer: .*CERTIFICATE_VERIFY_FAILED.*given up after 2 s"
        with pytest.raises(Unavailable, match=f"'w': {why}"):
            w.push(np.ones(10, np.float32))
        with pytest.raises(RequestFailed, match=f"'s0': {why}"):
            server.send("s0", 1, "x")
    listener.close()


def test_busy_server_is_asked_again(group):
    busy = iter([True] * 5)
    group.refuse = lambda where, head: Refused(0, "busy", "") if next(busy, False) else None
    with group.worker() as server:
        w = server.dense("w", (10,))
        w.push(np.ones(10, np.float32))
        assert (w.pull() == 1).all()


def test_unavailable_names_table_and_range(group):
    with group.worker(timeout_s=0.3) as server:
        w = server.dense("w", (10,))
        group.refuse = lambda where, head: Refused(0, "busy", "busy") if head.range == 3 else None
        with pytest.raises(Unavailable, match=r"'w', range 3 .*'s0': busy; .*0\.3 s"):
            w.push(np.ones(10, np.float32))


@pytest.mark.parametrize("seed", range(2))
def test_every_push_counts_once_while_connections_are_cut(seed):
    """A proxy before each of two servers cuts connections at any moment; answers get lost."""
    group = Group(2)
    chance = Random(seed)
    with (
        FaultProxy(group.listeners["s0"].port) as first,
        FaultProxy(group.listeners["s1"].port) as second,
    ):
        group.change(addresses={"s0": f"127.0.0.1:{first.port}", "s1": f"127.0.0.1:{second.port}"})
        is_over = threading.Event()

        def work(number: int) -> None:
            shape = (300_000, 2)
            with group.worker(f"w{number}") as server:
                w = server.dense("w", shape)
                table = server.table("t", dim=1)
                for _ in range(30):
                    w.push(np.ones(shape, np.float32))
                    table.push(np.arange(2_000), np.ones(2_000, np.float32))

        def cut() -> None:
            while not is_over.wait(chance.uniform(0, 0.05)):
                chance.choice((first, second)).cut_one(chance)

        with beside(cut):
            with ThreadPoolExecutor(3) as threads:
                list(threads.map(work, range(3)))
            is_over.set()
        assert first.num_accepted + second.num_accepted > 12
        with group.worker() as server:
            assert (server.dense("w", (300_000, 2)).pull() == 90).all()
            assert (server.table("t", dim=1).pull(np.arange(2_000)) == 90).all()
    group.close()


def test_silent_server_is_left_as_soon_as_its_ranges_have_another(group):
    """The server's connection stays open, as connections to a host that is cut off."""
    with FaultProxy(group.listeners["s0"].port) as proxy:
        addresses = group.view.addresses
        group.change(addresses={**addresses, "s0": f"127.0.0.1:{proxy.port}"})
        with group.worker() as server:
            w = server.dense("w", (1_000,))
            w.push(np.ones(1_000, np.float32))
            proxy.blackhole()
            timer = threading.Timer(0.3, lambda: [group.move(n, ("s1",)) for n in (1, 3)])
            timer.start()
            w.push(np.ones(1_000, np.float32))
            timer.join()
            assert (w.pull() == 2).all()
            proxy.heal()


# --- clocks ---


def test_worker_that_leaves_its_loop_holds_up_nobody(group):
    """A loop that ends by break or by an error counts as left."""
    with group.worker("a") as a, group.worker("b") as b, group.worker("c") as c:
        loops = [server.clocks(workers=3) for server in (a, b, c)]
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(next, loops)) == [0, 0, 0]
        loops[1].close()
        with pytest.raises(ZeroDivisionError):
            loops[2].throw(ZeroDivisionError())
        assert [next(loops[0]) for _ in range(3)] == [1, 2, 3]
        with pytest.raises(Invalid, match="already"):
            next(a.clocks())


def test_failed_push_fails_its_clock(group):
    """A clock is not completed when a push of it has been lost, even if the caller goes on."""
    with group.worker(timeout_s=0.2) as server:
        w = server.dense("w", (10,))
        clocks = server.clocks()
        assert next(clocks) == 0
        group.refuse = lambda where, head: Refused(0, "busy", "")
        with pytest.raises(Unavailable):
            w.push(np.ones(10, np.float32))
        with pytest.raises(Unavailable):
            next(clocks)
        assert group.workers["w0"].ticked == 0


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_clock_of_a_failed_push_that_is_repeated_counts_once(group, staleness):
    """The push has reached three of four ranges. In another loop it has the same numbers."""
    with group.worker(timeout_s=0.2) as server:
        w = server.dense("w", (10,))
        group.refuse = lambda where, head: Refused(0, "busy", "") if head.range == 3 else None
        loop = server.clocks(staleness)
        assert next(loop) == 0
        with pytest.raises(Unavailable):
            w.push(np.ones(10, np.float32))
        loop.close()
        group.refuse = lambda where, head: None
        server._core._requests.timeout_s = PATIENCE_S
        clocks = []
        for clock in server.clocks(staleness, stop=2):
            clocks.append(clock)
            w.push(np.ones(10, np.float32))
        assert clocks == [0, 1]
        assert (w.pull() == 2).all()


def test_failed_push_outside_of_clocks_counts_again_when_it_is_repeated(group):
    with group.worker() as server:
        w = server.dense("w", (4,))
        assert not w.pull().any()  # connects to all servers
        group.refuse = lambda where, head: Refused(0, "busy", "") if head.range == 3 else None
        server._core._requests.timeout_s = 0.2
        with pytest.raises(Unavailable):
            w.push(np.ones(4, np.float32))
        group.refuse = lambda where, head: None
        server._core._requests.timeout_s = PATIENCE_S
        w.push(np.ones(4, np.float32))
        pulled = w.pull()
    # Pieces on their way when the first one failed may count too, also in the third range.
    heard = {(head.range, head.part) for _, _, head in group.heard if isinstance(head, Push)}
    assert {part for _, part in heard} == {0, PIECES}
    assert pulled.tolist() == [sum(each == number for each, _ in heard) for number in (1, 2, 3, 4)]


def test_server_that_accepts_nothing_is_tried_once_for_each_round_of_requests(group, monkeypatch):
    """The connection is made by the kernel, and no Hello is answered. A push of 20 pieces by each
    of 4 threads ends at its timeout, and the other servers are asked meanwhile."""
    tried = []

    class Counted(Connection):
        def __init__(self, address: str, *arguments: Any, **more: Any) -> None:
            tried.append(address)
            super().__init__(address, *arguments, **more)

    monkeypatch.setattr(requests, "Connection", Counted)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        group.change(addresses={**group.view.addresses, "s1": address})
        with group.worker(timeout_s=2.0) as server:
            server._core.dense_piece_bytes = 4096
            server._core._requests.connect_timeout_s = 0.5
            w = server.dense("w", (20, 1024))

            def push(_: int) -> None:
                with pytest.raises(Unavailable):
                    w.push(np.ones((20, 1024), np.float32))

            with ThreadPoolExecutor(4) as threads:
                list(threads.map(push, range(4)))
    # One thread tries at a time, and for 0.5 s; the 40 pieces of that server share an attempt.
    assert 1 <= tried.count(address) <= 12
    assert any(where == "s0" and isinstance(head, Push) for where, _, head in group.heard)


# --- the asynchronous face ---


def connected(group: Group, name: str = "w0") -> asynchronous.Server:
    return asynchronous.Server(lambda is_over, _: Server(Core(group.scheduler(name), 60.0)))


async def test_push_after_a_loop_that_was_left_is_outside_of_clocks(group):
    """The push counts at once. The next loop begins when the scheduler knows of the end of the one
    before."""
    async with connected(group) as server:
        w = await server.dense("w", shape=(4,))
        for number in range(20):
            async for _ in server.clocks(staleness=number % 2):
                break
            await w.push(np.ones(4, np.float32))
            assert (await w.pull() == number + 1).all()


async def test_loop_that_cannot_begin_leaves_the_one_under_way_alone(group):
    async with connected(group) as server:
        async for clock in server.clocks(stop=3):
            for _ in range(5):
                with pytest.raises(Invalid, match="already"):
                    await anext(server.clocks())
            assert group.workers["w0"].is_live, clock


async def test_open_push_of_a_loop_that_was_left_does_not_hold_up_the_next(group):
    async with connected(group) as server:
        w = await server.dense("w", shape=(4,))
        group.refuse = lambda where, head: (
            Refused(0, "busy", "") if isinstance(head, Push) else None
        )
        async for _ in server.clocks():
            pushing = asyncio.create_task(w.push(np.ones(4, np.float32)))
            await asyncio.sleep(0)  # lets the push begin
            break
        assert [clock async for clock in server.clocks(stop=2)] == [0, 1]
    with pytest.raises(Closed):
        await pushing


async def test_cancelled_calls_end_with_the_client(group):
    """A push without an answer, and a clock that is not opened."""
    server = connected(group)
    await server.__aenter__()
    w = await server.dense("w", shape=(10,))
    waiting = asyncio.create_task(anext(server.clocks(workers=2)))
    await asyncio.sleep(0)  # lets the clock be asked for
    group.refuse = lambda where, head: Refused(0, "busy", "")
    pushing = asyncio.create_task(w.push(np.ones(10, np.float32)))
    await asyncio.sleep(0)  # lets the push begin
    waiting.cancel()
    await server.close()
    with pytest.raises(Closed):
        await pushing
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_mark_that_all_ranges_refuse_is_sent_to_each_once_more(group):
    with group.worker() as server:
        refused = []

        def refuse(where: str, head: object) -> Refused | None:
            if isinstance(head, Mark) and len(refused) < len(group.replicas):
                refused.append(head)
                return Refused(0, "busy", "")
            return None

        group.refuse = refuse
        server._core._send_marks(Progress(0, 0, 1, group.view.generation))
    marks = [head.range for _, _, head in group.heard if isinstance(head, Mark)]
    assert sorted(marks) == sorted(group.replicas)
