"""Whole servers with a real scheduler and the real client, in one process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from msgspec.structs import replace

from support.parameter_servers import LONG_S, TIMES, Servers
from support.waiting import beside, wait_until
from xain_foundation.net.sockets import free_ports
from xain_parameters.client.sync import Server
from xain_parameters.errors import Closed, Invalid, ParameterError, Unavailable
from xain_parameters.export import export, read_table
from xain_parameters.messages import Command, Pull, Refused, Rows, Said
from xain_parameters.node import server as server_module
from xain_parameters.node.server import ParameterServer
from xain_parameters.scheduler.journal import Journal
from xain_parameters.scheduler.service import SchedulerServer
from xain_parameters.scheduler.state import Settings
from xain_parameters.specs import cut_folder
from xain_parameters.tables.initialisers import Normal
from xain_parameters.tables.rules import Adagrad, Adam
from xain_parameters.transport.channel import Channel, hello
from xain_parameters.transport.connection import Connection

SHAPE = (100, 3)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Callable[..., Servers]]:
    with ExitStack() as stack:
        yield lambda **settings: Servers(tmp_path, stack, **settings)


def train(worker: Server, num_clocks: int, at: Callable[[int], None] = lambda clock: None) -> None:
    w = worker.dense("w", SHAPE)
    for clock in worker.clocks(staleness=0):
        if clock == num_clocks:
            break
        at(clock)
        assert (w.pull() == clock).all()
        w.push(np.ones(SHAPE, np.float32))


def test_two_servers_never_write_to_one_log(group, tmp_path):
    made = group(has_log=True)
    made.start("s0")
    with pytest.raises(ParameterError, match="another server has its log in"):
        ParameterServer(made.target, "s1", folder=tmp_path / "s0")


def test_backup_of_many_tables_is_brought_up_again_after_a_cut_connection(group):
    made = group(num_replicas=1)
    servers = [made.start("s0"), made.start("s1")]
    worker = made.worker("w0")
    tables = [worker.dense(f"{i:0200d}", 4, update=Adam(), init=Normal(0.1)) for i in range(300)]
    for server in servers:
        for _, channel in list(server._channels.values()):
            channel.close()
    before = tables[-1].pull()
    tables[-1].push(np.ones(4, np.float32))
    assert (tables[-1].pull() != before).all()


def test_worker_that_connects_after_training_sees_the_last_clock(group):
    made = group()
    made.start("s0")
    first = made.worker("w0")
    w = first.dense("w", SHAPE)
    for _ in first.clocks(staleness=0, stop=3):
        w.push(np.ones(SHAPE, np.float32))
    first.close()
    assert (made.worker("w1").dense("w", SHAPE).pull() == 3).all()


def test_reader_that_connected_before_training_sees_the_last_clock(group):
    """The last clock counts as soon as the last worker has ended its loop."""
    made = group()
    made.start("s0")
    made.start("s1")
    reader = made.worker("reader").dense("w", SHAPE)
    train(made.worker("w0"), 4)
    assert (reader.pull() == 4).all()


def test_messages_before_the_server_has_joined_are_handled_afterwards(tmp_path):
    """A primary may hear of a new server before that one has its first view, and probes it once."""
    at, here = (f"127.0.0.1:{port}" for port in free_ports(2))
    servers = []
    thread = threading.Thread(target=lambda: servers.append(ParameterServer(at, "s0", here)))
    thread.start()
    with ExitStack() as stack:
        connection = None
        deadline = time.monotonic() + LONG_S
        while connection is None:
            assert time.monotonic() < deadline
            with suppress(Unavailable):
                connection = Connection(here, hello("w0", "worker", 1), timeout_s=LONG_S)
        stack.callback(connection.close)
        answer = connection.ask(Command(0, 7, "early"))
        journal = Journal(tmp_path / "scheduler.db")
        stack.enter_context(SchedulerServer(journal, Settings(), at, **TIMES))
        thread.join(LONG_S)
        stack.callback(servers[0].close)
        said = answer.result(LONG_S).head
    assert isinstance(said, Said)
    assert said.text == ""


def test_export_has_all_rows_and_the_pushes_of_the_last_clock(group, tmp_path):
    made = group(checkpoints=str(tmp_path / "cuts"))
    made.start("s0")
    worker = made.worker("w0")
    w = worker.dense("w", SHAPE, update=Adagrad(0.1))
    rows = worker.table("rows", 2)
    ids = np.array([9, 1 << 40, 5, 7], np.uint64)
    for _ in worker.clocks(staleness=0, stop=3):
        w.push(np.ones(SHAPE, np.float32))
        rows.push(ids, np.ones((4, 2), np.float32))
    worker.checkpoint()
    (cut,) = (tmp_path / "cuts").iterdir()
    dense = read_table(str(cut), "w")
    np.testing.assert_array_equal(dense["values"], w.pull())
    assert len(dense) == 2
    table = read_table(str(cut), "rows")
    np.testing.assert_array_equal(table["keys"], np.sort(ids))
    assert (table["values"] == 3).all()
    with pytest.raises(Invalid, match="'nothing'; it has 'w', 'rows'"):
        read_table(str(cut), "nothing")
    assert export(cut.as_uri(), "rows", tmp_path / "rows.npz") == 8
    with np.load(tmp_path / "rows.npz") as arrays:
        assert set(arrays) == {"keys", "values"}
    assert export(str(cut), "rows", tmp_path / "rows.parquet") == 8
    columns = pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pydict()
    assert columns == {"keys": sorted(ids.tolist()), "values": [[3.0, 3.0]] * 4}
    export(str(cut), "w", tmp_path / "w.parquet")
    columns = pyarrow.parquet.read_table(tmp_path / "w.parquet").to_pydict()
    assert set(columns) == set(dense)
    for name, rows_of in columns.items():
        np.testing.assert_array_equal(np.array(rows_of, dense[name].dtype), dense[name])


def test_checkpoint_whose_part_cannot_be_written_fails_and_the_next_is_made(group, tmp_path):
    made = group(checkpoints=str(tmp_path / "cuts"))
    made.start("s0")
    worker = made.worker("w0")
    w = worker.dense("w", SHAPE)
    w.push(np.ones(SHAPE, np.float32))
    assert worker.checkpoint() == 1
    whole, broken = (cut_folder(made.view.generation, number, 0) for number in (1, 2))
    folder = tmp_path / "cuts" / broken
    in_the_way = folder / "range-2.cut"
    in_the_way.mkdir(parents=True)
    w.push(np.ones(SHAPE, np.float32))
    with pytest.raises(Unavailable, match=r"checkpoint 2 .*range 2 at 's0': .*Is a dir"):
        worker.checkpoint()
    assert (read_table(str(tmp_path / "cuts" / whole), "w")["values"] == 1).all()
    wait_until(lambda: not folder.exists())
    folder.mkdir(exist_ok=True)
    (folder / "range-1.cut").touch()  # of a server that was still writing
    assert worker.checkpoint() == 3
    wait_until(lambda: not folder.exists())
    made.servers["s0"].close()
    made.start("s1")
    assert (w.pull() == 2).all()


def test_parts_of_a_checkpoint_that_a_lost_server_broke_are_removed_after_the_next(group, tmp_path):
    cuts = tmp_path / "cuts"
    made = group(checkpoints=str(cuts), num_replicas=1)
    made.start("s0")
    made.start("s1")
    worker, other = made.worker("w0"), made.worker("w1")
    w = worker.dense("w", SHAPE)
    made.wait_for_servers(2)
    foreign = cuts / "cut-7-1"  # of another group that has the same folder
    foreign.mkdir(parents=True)
    clocks, waited_for = worker.clocks(staleness=0, workers=2), other.clocks(staleness=0, workers=2)
    with beside(partial(next, clocks)):
        next(waited_for)
    failed = []

    def checkpoint() -> None:
        try:
            made.worker("operator").checkpoint()
        except Unavailable as error:
            failed.append(error)

    # The ranges wait for the marks of both workers, which they send with their next clock.
    with beside(checkpoint):
        wait_until(lambda: worker._core.scheduler.view.cut is not None)
        folder = cuts / worker._core.scheduler.view.cut_folder
        folder.mkdir(exist_ok=True)
        (folder / "range-1.cut").touch()
        made.servers.pop("s0").close()
    assert "a server was lost" in str(failed[0])
    assert folder.exists()
    clocks.close()
    waited_for.close()
    w.push(np.ones(SHAPE, np.float32))
    assert worker.checkpoint() == 2
    wait_until(lambda: not folder.exists())
    assert foreign.exists()


def test_server_writes_a_checkpoint_at_full_speed_while_no_worker_asks(group, tmp_path):
    """With this share a pause would last for years."""
    made = group(checkpoints=str(tmp_path / "cuts"))
    server = made.start("s0")
    server.save_share, server.idle_s = 1e-12, 0.0
    worker = made.worker("w0")
    worker.dense("w", SHAPE).push(np.ones(SHAPE, np.float32))
    assert worker.checkpoint() == 1


def test_server_that_pauses_a_checkpoint_serves_and_closes(group, tmp_path):
    made = group(checkpoints=str(tmp_path / "cuts"))
    server = made.start("s0")
    server.save_share, server.idle_s = 1e-12, 3600.0
    worker = made.worker("w0")
    w = worker.dense("w", SHAPE)
    w.push(np.ones(SHAPE, np.float32))

    def checkpoint() -> None:
        with suppress(Closed, Unavailable):
            worker.checkpoint()

    with beside(checkpoint):
        wait_until(lambda: server._num_saving > 0)
        w.push(np.ones(SHAPE, np.float32))
        assert (w.pull() == 2).all()
        server.close()
        assert server._num_saving == 0
        worker.close()


def test_wrong_table_is_refused_and_the_next_one_works(group):
    made = group()
    made.start("s0")
    worker = made.worker("w0")
    with pytest.raises(Invalid, match="'huge'"):
        worker.table("huge", 64, bound=1 << 60)
    train(worker, 2)


def test_server_that_cannot_take_a_view_gives_its_ranges_up(group, monkeypatch):
    """The server's lease ends, and the backup goes on."""
    made = group(num_replicas=1)
    for name in ("s0", "s1"):
        made.start(name)
    broken = made.servers["s0"]

    def take_view(view: object, now: float) -> None:
        raise RuntimeError("a defect")

    def fail(clock: int) -> None:
        if clock == 2:
            made.wait_for_servers(2)
            monkeypatch.setattr(broken._node, "take_view", take_view)
            made.worker("w1").table("another", 1)

    train(made.worker("w0"), 4, fail)
    with pytest.raises(RuntimeError, match="a defect"):
        broken.wait(LONG_S)


@pytest.mark.parametrize("num_replicas", [0, 1])
def test_entries_are_kept_only_where_another_server_may_lack_them(group, num_replicas):
    """A server that has a range alone drops each push once it is applied."""
    made = group(num_replicas=num_replicas)
    servers = [made.start(f"s{index}") for index in range(1 + num_replicas)]
    worker = made.worker("w")
    w = worker.dense("w", SHAPE)
    made.wait_for_servers(1 + num_replicas)
    for _ in range(3):
        w.push(np.ones(SHAPE, np.float32))
    for each in made.view.ranges:
        [primary] = [server for server in servers if server.name == each.servers[0]]
        hosted = primary._node._hosted[each.number]
        assert len(hosted.role.copy.tail._entries) == 3 * num_replicas


def test_long_operation_on_one_range_does_not_end_the_lease_of_the_others(group):
    made = group()
    server = made.start("s0")
    w = made.worker("w0").dense("w", SHAPE)
    w.pull()
    hosted = [each for _, each in sorted(server._node._hosted.items())]
    first, last = hosted[0], hosted[-1]
    until = server._scheduler.alive_until
    with last.lock:
        wait_until(lambda: time.monotonic() > until + 0.2)
        low, high = first.view.range.indices(SHAPE[0])
        assert low < high
        head = Pull(1, made.view.version, first.view.number, 1, 0, low, high)
        connection = Connection(server.address, hello("w1", "worker", 1), timeout_s=LONG_S)
        deadline = time.monotonic() + LONG_S
        with closing(connection):
            answer = None
            # On a busy machine the lease may be over for a moment.
            while answer is None or (isinstance(answer, Refused) and answer.why == "busy"):
                assert time.monotonic() < deadline
                answer = connection.ask(head, num_bytes=12 * (high - low)).result(LONG_S).head
            assert isinstance(answer, Rows)


def test_connection_made_while_the_server_closes_is_closed(group, monkeypatch):
    made = group(num_replicas=1)
    made.start("s0")
    made.worker("w0").dense("w", SHAPE)
    real, channels, may_connect = server_module.connect, [], threading.Event()

    def connect(*arguments: object, **options: object) -> Channel:
        channel = real(*arguments, **options)
        channels.append(channel)
        may_connect.wait(LONG_S)
        return channel

    monkeypatch.setattr(server_module, "connect", connect)
    made.start("s1")
    wait_until(lambda: bool(channels))
    made.servers[channels[0].peer.name].close()  # the Hello has the name of the sender
    may_connect.set()
    wait_until(lambda: channels[0].is_closed)
    assert channels[0].join(LONG_S)


def test_connection_to_a_server_that_has_another_address_is_closed(group):
    """The host that it had may be gone without a word."""
    made = group(num_replicas=1)
    for name in ("s0", "s1"):
        made.start(name)
    w = made.worker("w0").dense("w", SHAPE)
    made.wait_for_servers(2)
    w.push(np.ones(SHAPE, np.float32))
    # Connections go from the first server of a range to its replica.
    first, other = made.view.ranges[0].servers
    server = made.servers[first]
    wait_until(lambda: other in server._channels)
    _, channel = server._channels[other]
    view = server._scheduler.view
    server._close_moved(replace(view, addresses=view.addresses | {other: "127.0.0.1:1"}))
    wait_until(lambda: channel.is_closed)
    w.push(np.ones(SHAPE, np.float32))
    assert (w.pull() == 2).all()
