"""Pushes and pulls of the parameter server, beside the same bytes over bare transports.

    python benchmarks/parameter_server.py [--repeats 30] [--seconds 5] [--only sparse checkpoint]

A scheduler and 1 or 2 servers are processes as `xain-parameter-server` starts them, without
replicas and log. The client is one worker in this process. With 1 and with 2 servers:

Dense: an array of 4 and of 100 MB is pushed, added up at the servers, and pulled. Beside it, in the
same run and alternating with it, the same work over TCP sockets, pyzmq (REQ and REP) and grpcio
(streams of 2 MiB chunks): as many server processes, each with its part of the array, the same
addition, and a pull that begins when all servers have added the push. One thread asks all servers,
which is faster than a thread for each. A repeat is three exchanges in a row. Median of all of them.
"tcp" has the congestion control that a socket gets by default, as pyzmq and grpcio have; "tcp_reno"
has Reno, which the parameter server chooses within a host. Where the default is BBR the two differ:
it spaces packets in time.

Sparse: batches of sorted keys, pushed and pulled, of tables with a bound and with open keys. New:
the first pushes, which make the rows.

Small: 1,000 of 100,000 open keys, of one float each, one request after the other, with 1 server.
Each request has the keys of the one before ("same"), or each pull has other keys and the push after
it the same ("other"). In the same repeats, of a few requests each: a table, a `KVWorker`, "raw"
exchanges, in which this process sends as many bytes through a plain blocking socket to another
process, and that answers with as many, and "least": what a push or pull needs in Python at least,
with messages of the same form over such sockets, a server with one array, no range, lock, log or
memory of pushes, and a list of keys that it always knows. Processor time is that of this process
and of the group, of a push and a pull together.

Latency: a second process pulls 4 KiB while the client pushes and pulls 4 MB and sparse batches.

Beside it, the same of a TCP socket between two other processes.

Jobs: 24 workers of one job, in a second process, push 4 MB each without pause, to an array that
Adam updates. The client is the only worker of another job, and pushes 4 MB likewise, and 1,000 rows
of one float. With 1 server.

And with 2 servers:

Replication: pushes and pulls with a backup of each range, and without.

Checkpoint: bulk synchronous clocks, each a push and a pull of 4 MB and of a sparse batch, before
and while a checkpoint of all tables is written.

Recovery: kill -9 of a server, which is started again at once, with a backup of each range or with
a log. All seconds are from the kill. Detected: the scheduler has taken the server for dead, or has
its successor. Restarted: the new process is a member. Reloaded: each range has all its servers
again. Paused: the longest that a push and pull of all ranges took.

Prints tables; writes bench-results/parameter_server.json, with --only those that are named.
"""

import itertools
import multiprocessing as mp
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any

import flags
import numpy as np
import results
from bare_arrays import BARE, GIVE, Array, Bare, receive, served, tune
from parameter_group import Group, connected, group_of
from processes import PATIENCE_S

from xain_parameters.client.connecting import connect_sync
from xain_parameters.client.kv import KVWorker
from xain_parameters.client.sync import Server
from xain_parameters.keys import is_ascending
from xain_parameters.messages import Done, Message, Pull, Push, Rows
from xain_parameters.tables.rules import Adagrad, Adam, Add
from xain_parameters.transport.frames import Receiver, pieces_of

SMALL = 1024  # values in 4 KiB
EXCHANGES = 3
DIM = 16
TABLES = ("dense", "sparse", "small", "latency", "jobs", "replication", "checkpoint", "recovery")


class Ours:
    def __init__(self, server: Server, size: int) -> None:
        self._dense = server.dense(f"dense {size}", (size,))

    def exchange(self, pushed: Array, out: Array) -> None:
        self._dense.push(pushed)
        self._dense.pull(out=out)


def dense(server: Server, size: int, repeats: int) -> dict[str, Any]:
    """GB pushed and pulled a second, by the median of the repeats."""
    pushed, out = np.ones(size, np.float32), np.empty(size, np.float32)
    num_servers = len(server.servers)
    with ExitStack() as stack:
        connections: dict[str, Ours | Bare] = {"parameter_server": Ours(server, size)}
        for name, (serve, connect) in BARE.items():
            ports = stack.enter_context(served(serve, num_servers, size // num_servers))
            connections[name] = Bare([connect(port) for port in ports], size)
        taken: dict[str, list[float]] = {name: [] for name in connections}
        for repeat in range(repeats + 1):
            for name, connection in connections.items():
                for number in range(EXCHANGES):
                    begin = time.perf_counter()
                    connection.exchange(pushed, out)
                    if repeat:  # the first one warms up
                        taken[name].append(time.perf_counter() - begin)
                    assert out[0] == out[-1] == EXCHANGES * repeat + number + 1, name
    speed = {
        name: 2 * pushed.nbytes / statistics.median(seconds) / 1e9
        for name, seconds in taken.items()
    }
    own = speed.pop("parameter_server")
    return {
        "servers": num_servers,
        "mb": round(pushed.nbytes / 1e6, 1),
        "gb_per_s": round(own, 2),
        **{f"{name}_gb_per_s": round(each, 2) for name, each in speed.items()},
        **{
            f"ratio_to_{name}": round(own / speed[name], 2)
            for name in ("tcp", "tcp_reno", "grpcio")
        },
    }


def keys_of(rows: int, *, is_open: bool) -> Array:
    keys = np.arange(rows, dtype=np.uint64)
    # An odd factor is a bijection of 64-bit numbers.
    return np.sort(keys * np.uint64(0x9E3779B97F4A7C15)) if is_open else keys


def sparse(
    server: Server, dim: int, rows: int, batch: int, repeats: int, *, is_open: bool
) -> dict[str, Any]:
    """Million keys a second, by the median of the repeats."""
    update = Adagrad(0.05) if dim == 64 else Add()
    keys_are = "open" if is_open else "bounded"
    table = server.table(
        f"{keys_are} {dim} {rows}", dim, update=update, bound=None if is_open else rows
    )
    chance = np.random.default_rng(5)
    every = keys_of(rows, is_open=is_open)
    values = np.ones((batch, dim), np.float32)
    taken: dict[str, list[float]] = {"push": [], "pull": []}
    begin = time.perf_counter()
    for start in range(0, rows, batch):
        keys = every[start : start + batch]
        table.push(keys, values[: len(keys)])
    new_s = time.perf_counter() - begin
    for _ in range(repeats):
        keys = np.sort(chance.choice(every, batch, replace=False, shuffle=False))
        begin = time.perf_counter()
        table.push(keys, values)
        middle = time.perf_counter()
        table.pull(keys)
        end = time.perf_counter()
        taken["push"].append(middle - begin)
        taken["pull"].append(end - middle)
    push, pull = (statistics.median(seconds) for seconds in taken.values())
    return {
        "servers": len(server.servers),
        "dim": dim,
        "keys": keys_are,
        "update": update.name,
        "rows": rows,
        "new_mkeys_per_s": round(rows / new_s / 1e6, 2),
        "push_mkeys_per_s": round(batch / push / 1e6, 2),
        "pull_mkeys_per_s": round(batch / pull / 1e6, 2),
        "both_mkeys_per_s": round(2 * batch / (push + pull) / 1e6, 2),
    }


# --- small requests ---

NUM_KEYS = 1_000
IN_A_ROW = 20  # requests of one kind in a row
HEAD_BYTES = 128  # of a message, about


def serve_exchange(pipe: Pipe, index: int, request_bytes: int, answer_bytes: int) -> None:
    """Answer each request of so many bytes with so many."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    tune(connection, b"reno")
    request, answer = np.empty(request_bytes, np.uint8), bytes(answer_bytes)
    while receive(connection, request):
        connection.sendall(answer)


class Exchange:
    """Raw exchanges of as many bytes as a push or a pull has."""

    def __init__(self, port: int, request_bytes: int, answer_bytes: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        tune(self._socket, b"reno")
        self._request = bytes(request_bytes)
        self._answer = np.empty(answer_bytes, np.uint8)

    def __call__(self) -> None:
        self._socket.sendall(self._request)
        receive(self._socket, self._answer)


def serve_least(pipe: Pipe, index: int, rows: int) -> None:
    """Answer pulls and pushes of one array of `rows` rows of one float."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    tune(connection, b"reno")
    receiver, values = Receiver(connection), np.zeros(rows, np.float32)
    known: dict[bytes, Array] = {}
    while True:
        try:
            message = receiver.receive()
        except EOFError:
            return
        assert isinstance(message.head, Pull | Push)
        assert message.keys is not None
        some = known.get(message.keys.tobytes())
        if some is None:
            some = known[message.keys.tobytes()] = np.arange(0, rows, rows // NUM_KEYS)[:NUM_KEYS]
        if message.values is None:
            answer = Message(Rows(message.head.request), None, values.take(some))
        else:
            pushed = message.values.view(np.float32)
            assert np.isfinite(np.vdot(pushed, pushed))
            values[some] += pushed
            answer = Message(Done(message.head.request))
        connection.sendmsg(pieces_of(answer))


class Least:
    """Pushes and pulls of the same keys at serve_least."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        tune(self._socket, b"reno")
        self._receiver = Receiver(self._socket)
        self._requests = itertools.count(1)

    def pull(self, keys: Array) -> Array:
        head = Pull(next(self._requests), (1, 1), 1, 1, 0)
        rows = self._ask(Message(head, keys)).values
        assert rows is not None
        return rows.view(np.float32)

    def push(self, keys: Array, values: Array) -> None:
        assert np.isfinite(np.vdot(values, values))
        number = next(self._requests)
        self._ask(Message(Push(number, (1, 1), 1, 1, 0, -1, number, False), keys, values))

    def _ask(self, message: Message) -> Message:
        assert message.keys is not None
        assert is_ascending(message.keys)
        self._socket.sendmsg(pieces_of(message))
        return self._receiver.receive()


class KeyLists:
    """Lists of keys of a table of `rows` rows: one again and again, or another one each time."""

    def __init__(self, rows: int, *, is_same: bool) -> None:
        chance = np.random.default_rng(6)
        every = keys_of(rows, is_open=True)
        num_lists = 1 if is_same else 500
        lists = [np.sort(chance.choice(every, NUM_KEYS, replace=False)) for _ in range(num_lists)]
        self._lists = itertools.cycle(lists)
        self.now = next(self._lists)

    def go_on(self) -> Array:
        self.now = next(self._lists)
        return self.now


def small(
    group: Group, server: Server, rows: int, repeats: int, *, is_same: bool
) -> dict[str, Any]:
    """Medians of pushes and pulls in ms, and their ratios to raw exchanges between them."""
    table = server.table(f"small {is_same}", 1)
    keys, values = KeyLists(rows, is_same=is_same), np.ones((NUM_KEYS, 1), np.float32)
    flat = values.reshape(-1)
    every = keys_of(rows, is_open=True)
    table.push(every, np.ones((rows, 1), np.float32))
    up, down = HEAD_BYTES + 8 * NUM_KEYS, HEAD_BYTES // 4
    taken: dict[str, list[float]] = {}
    processor_s: dict[str, float] = {}
    with KVWorker(server) as kv, ExitStack() as stack:
        kv.wait(kv.push(every, np.ones(rows, np.float32)))
        raw = {}
        for name, sent, got in (("push", up + flat.nbytes, down), ("pull", up, down + flat.nbytes)):
            [port] = stack.enter_context(served(serve_exchange, 1, sent, got))
            raw[name] = Exchange(port, sent, got)
        [port] = stack.enter_context(served(serve_least, 1, rows))
        least, same = Least(port), keys.now
        # A pull chooses the keys, and the push after it has the same.
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "raw": (raw["pull"], raw["push"]),
            "least": (lambda: least.pull(same), lambda: least.push(same, flat)),
            "table": (lambda: table.pull(keys.go_on()), lambda: table.push(keys.now, values)),
            "kv": (
                lambda: kv.wait(kv.pull(keys.go_on())),
                lambda: kv.wait(kv.push(keys.now, flat)),
            ),
        }
        for repeat in range(repeats + 1):
            for kind, (pull, push) in pairs.items():
                began_s = processor_seconds(group)
                for _ in range(IN_A_ROW):
                    begin = time.perf_counter()
                    pull()
                    middle = time.perf_counter()
                    push()
                    end = time.perf_counter()
                    if repeat:  # the first one warms up
                        taken.setdefault(f"{kind} pull", []).append(middle - begin)
                        taken.setdefault(f"{kind} push", []).append(end - middle)
                if repeat:
                    used_s = processor_seconds(group) - began_s
                    processor_s[kind] = processor_s.get(kind, 0.0) + used_s
    ms = {name: 1000 * statistics.median(seconds) for name, seconds in taken.items()}
    return {
        "lists": "same" if is_same else "other",
        **{
            f"{request}_{what}": round(value, digits)
            for request in ("push", "pull")
            for what, value, digits in (
                ("raw_ms", ms[f"raw {request}"], 3),
                ("least_ms", ms[f"least {request}"], 3),
                ("ms", ms[f"table {request}"], 3),
                ("ratio_to_raw", ms[f"table {request}"] / ms[f"raw {request}"], 2),
                ("ratio_to_least", ms[f"table {request}"] / ms[f"least {request}"], 2),
                ("kv_ratio_to_table", ms[f"kv {request}"] / ms[f"table {request}"], 2),
            )
        },
        "both_processor_ms": round(1000 * processor_s["table"] / (repeats * IN_A_ROW), 3),
        "kv_both_processor_ms": round(1000 * processor_s["kv"] / (repeats * IN_A_ROW), 3),
    }


def processor_seconds(group: Group) -> float:
    """Processor time of this process and of the group so far."""
    return time.process_time() + group.processor_seconds()


def pull_small(pipe: Pipe, index: int, target: str, seconds: float) -> None:
    with connect_sync(target, worker="small") as server:
        small = server.dense("small", (SMALL,))
        out = np.empty(SMALL, np.float32)
        small.pull(out=out)
        pipe.send(0)
        taken = []
        deadline = time.perf_counter() + seconds
        while (begin := time.perf_counter()) < deadline:
            small.pull(out=out)
            taken.append(time.perf_counter() - begin)
            time.sleep(0.001)  # between two requests, not measured
        pipe.send(np.percentile(taken, [50, 99]).tolist())
        threading.Event().wait()


def serve_bytes(pipe: Pipe, index: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    values = np.ones(SMALL, np.float32)
    while connection.recv(1):
        connection.sendall(values)


def ask_bytes(pipe: Pipe, index: int, port: int, seconds: float) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        out = np.empty(SMALL, np.float32)
        pipe.send(0)
        taken = []
        deadline = time.perf_counter() + seconds
        while (begin := time.perf_counter()) < deadline:
            connection.sendall(GIVE)
            receive(connection, out)
            taken.append(time.perf_counter() - begin)
            time.sleep(0.001)  # between two requests, not measured
        pipe.send(np.percentile(taken, [50, 99]).tolist())
        threading.Event().wait()


class Load:
    """Pushes and pulls of a dense array and of a batch of an open table."""

    def __init__(self, server: Server, size: int, batch: int) -> None:
        self._dense, self._table = server.dense(f"dense {size}", (size,)), server.table("t", DIM)
        self._pushed, self._out = np.ones(size, np.float32), np.empty(size, np.float32)
        self._keys, self._values = keys_of(batch, is_open=True), np.ones((batch, DIM), np.float32)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows in both tables, and of the keys."""
        return self._pushed.nbytes + self._keys.nbytes + self._values.nbytes

    def push(self) -> None:
        self._dense.push(self._pushed)
        self._table.push(self._keys, self._values)

    def pull(self) -> None:
        self._dense.pull(out=self._out)
        self._table.pull(self._keys)


def asked_under(load: Load, ask: Callable[..., None], *arguments: Any) -> list[float]:
    """Median and 99th percentile, in ms, that a process tells which asks while there is load."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=ask, args=(there, 0, *arguments), daemon=True)
    process.start()
    try:
        here.recv()
        while not here.poll():
            load.push()
            load.pull()
        return [round(1000 * each, 2) for each in here.recv()]
    finally:
        process.kill()
        process.join()


def latency(group: Group, server: Server, size: int, batch: int, seconds: float) -> dict[str, Any]:
    """Pulls of 4 KiB by another process, while this one pushes and pulls."""
    load = Load(server, size, batch)
    with served(serve_bytes, 1) as [port]:
        tcp = asked_under(load, ask_bytes, port, seconds)
    ours = asked_under(load, pull_small, group.target, seconds)
    return {
        "servers": len(server.servers),
        "pull_4_kib_p50_ms": ours[0],
        "pull_4_kib_p99_ms": ours[1],
        "tcp_p50_ms": tcp[0],
        "tcp_p99_ms": tcp[1],
    }


NUM_FLOODING = 24  # workers


def push_without_pause(pipe: Pipe, index: int, target: str, size: int) -> None:
    values = np.ones(size, np.float32)

    def push(number: int) -> None:
        with connect_sync(target, worker=f"flooding {number}", job="flooding") as server:
            array = server.dense("w", (size,), update=Adam())
            while True:
                array.push(values)

    for number in range(NUM_FLOODING):
        threading.Thread(target=push, args=(number,), daemon=True).start()
    pipe.send(0)
    threading.Event().wait()


def jobs(group: Group, size: int, seconds: float) -> list[dict[str, Any]]:
    """Pushes of a job's only worker, alone and beside another job."""
    ms: dict[str, dict[str, list[float]]] = {"small": {}, "large": {}}
    with connect_sync(group.target, worker="only", job="only", timeout_s=PATIENCE_S) as server:
        pushes = {
            "small": partial(
                server.dense("small", (NUM_KEYS,)).push, np.ones(NUM_KEYS, np.float32)
            ),
            "large": partial(
                server.dense("large", (size,), update=Adam()).push, np.ones(size, np.float32)
            ),
        }

        def measure(beside: str) -> None:
            for name, push in pushes.items():
                taken = []
                deadline = time.perf_counter() + seconds
                while (begin := time.perf_counter()) < deadline:
                    push()
                    taken.append(1000 * (time.perf_counter() - begin))
                ms[name][beside] = np.percentile(taken, [50, 99]).round(2).tolist()

        measure("alone")
        with served(push_without_pause, 1, group.target, size):
            group.wait(lambda: "flooding" in group.status().jobs)
            measure("beside")
    return [
        {
            "push": name,
            "alone_p50_ms": each["alone"][0],
            "alone_p99_ms": each["alone"][1],
            "beside_p50_ms": each["beside"][0],
            "beside_p99_ms": each["beside"][1],
            "p50_ratio_to_alone": round(each["beside"][0] / each["alone"][0], 2),
        }
        for name, each in ms.items()
    ]


def replication(
    server: Server, num_replicas: int, size: int, batch: int, repeats: int
) -> dict[str, Any]:
    load = Load(server, size, batch)
    load.push()
    push_s = median_s(load.push, repeats)
    return {
        "replicas": num_replicas,
        "mb": round(load.num_bytes / 1e6, 1),
        "push_ms": round(1000 * push_s, 2),
        "pull_ms": round(1000 * median_s(load.pull, repeats), 2),
    }


def median_s(work: Callable[[], None], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def checkpoint(
    group: Group, server: Server, size: int, batch: int, rows: int, seconds: float, num: int
) -> dict[str, Any]:
    """num: of checkpoints, each after so many seconds of training."""
    load = Load(server, size, batch)
    model = server.table("model", DIM, bound=rows)
    for start in range(0, rows, batch):
        keys = np.arange(start, min(rows, start + batch), dtype=np.uint64)
        model.push(keys, np.ones((len(keys), DIM), np.float32))
    cuts: list[tuple[float, float]] = []  # begin and end

    def make() -> None:
        for _ in range(num):
            time.sleep(seconds)  # between two checkpoints
            begin = time.perf_counter()
            group.checkpoint()
            cuts.append((begin, time.perf_counter()))

    maker = threading.Thread(target=make, daemon=True)
    maker.start()
    clocks = []  # begin and end
    for _ in server.clocks(staleness=0):
        begin = time.perf_counter()
        load.push()
        load.pull()
        clocks.append((begin, time.perf_counter()))
        if not maker.is_alive():
            break
    taken: dict[bool, list[float]] = {True: [], False: []}
    for (begin, _), (end, _) in itertools.pairwise(clocks):
        taken[any(begin < cut[1] and cut[0] < end for cut in cuts)].append(end - begin)
    # Means: a clock that waits for all of a checkpoint has to count.
    meanwhile_s, before_s = (statistics.mean(taken[each]) for each in (True, False))
    cut_s = statistics.median(end - begin for begin, end in cuts)
    return {
        "state_mb": round((load.num_bytes + 4 * rows * DIM) / 1e6, 1),
        "checkpoint_s": round(cut_s, 3),
        "clock_ms": round(1000 * before_s, 1),
        "clock_meanwhile_ms": round(1000 * meanwhile_s, 1),
        "slower_meanwhile_share": round(meanwhile_s / before_s - 1, 3),
        "cost_of_one_a_minute_share": round(cut_s / 60 * (1 - before_s / meanwhile_s), 4),
    }


def recovery(group: Group, kept_by: str, size: int, kills: int) -> dict[str, Any]:
    """kept_by: "replicas" or "log"."""
    num_servers = 2 if kept_by == "replicas" else 1
    found = [killed(group, f"s{number % 2}", num_servers, size) for number in range(kills)]
    return {
        "kept_by": kept_by,
        "mb": round(4 * size / 1e6, 1),
        "kills": kills,
        **{
            key: round(statistics.median(each[key] for each in found), 2)
            for key in ("detected_s", "restarted_s", "reloaded_s", "paused_s")
        },
        "paused_s_max": round(max(each["paused_s"] for each in found), 2),
    }


def killed(group: Group, name: str, num_servers: int, size: int) -> dict[str, float]:
    """The phases of a recovery. num_servers: of each range, when all is well."""

    def is_whole() -> bool:
        return all(len(each.servers) == num_servers for each in group.status().ranges)

    taken: list[float] = []
    has_ended = threading.Event()

    def train() -> None:
        with connected(group, f"trainer of {name}") as server:
            w = server.dense("recovered", (size,))
            values, out = np.ones(size, np.float32), np.empty(size, np.float32)
            while not has_ended.is_set():
                begin = time.perf_counter()
                w.push(values)
                w.pull(out=out)
                taken.append(time.perf_counter() - begin)

    trainer = threading.Thread(target=train, daemon=True)
    trainer.start()
    phases = {}
    group.wait(lambda: len(taken) > 5 and is_whole())
    address = group.status().addresses[name]
    num_before = len(taken)
    began = time.perf_counter()
    group.kill(name)
    group.start_servers(name)
    group.wait(lambda: group.status().addresses.get(name) != address)
    phases["detected_s"] = time.perf_counter() - began
    group.wait_serving(name)
    phases["restarted_s"] = time.perf_counter() - began
    group.wait(is_whole)
    phases["reloaded_s"] = time.perf_counter() - began
    num_now = len(taken)
    group.wait(lambda: len(taken) > num_now + 1)
    has_ended.set()
    trainer.join()
    phases["paused_s"] = max(taken[num_before:])
    return phases


def main() -> None:
    parser = flags.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the latency under load")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES, help="tables to make")
    given = parser.parse_args()
    results.begin(quick=given.quick, any_load=given.any_load)
    sizes, batch, kills = [1 << 20, 25_000_000], 1_000_000, 4
    rows = {1: 50_000_000, DIM: 10_000_000, 64: 1_000_000}
    model_rows, small_rows, repeats = 2_000_000, 100_000, given.repeats
    counts: tuple[int, ...] = (1, 2)
    if given.quick:
        given.repeats, given.seconds, kills = 3, 0.3, 1
        sizes, batch, counts = [10_000], 1_000, (2,)
        rows = {1: 4_000, DIM: 2_000, 64: 1_000}
        model_rows, small_rows, repeats = 2_000, 2_000, 3
    some, few = batch // 10, max(3, given.repeats // 3)
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES if name in given.only}
    for num_servers in (
        counts
        if {"dense", "sparse", "small", "latency", "jobs", "replication"} & {*figures}
        else ()
    ):
        with group_of(num_servers) as group, connected(group) as server:
            if "dense" in figures:
                figures["dense"] += [
                    dense(server, size, few if size > 1 << 22 else given.repeats) for size in sizes
                ]
            if "sparse" in figures:
                figures["sparse"] += [
                    sparse(server, dim, rows[dim], batch, few, is_open=is_open)
                    for dim in rows
                    for is_open in (False, True)
                ]
            if "small" in figures and num_servers == counts[0]:
                figures["small"] += [
                    small(group, server, small_rows, repeats, is_same=is_same)
                    for is_same in (True, False)
                ]
            if "jobs" in figures and num_servers == counts[0]:
                figures["jobs"] += jobs(group, sizes[0], given.seconds)
            if "latency" in figures:
                latencies = latency(group, server, sizes[0], some, given.seconds)
                figures["latency"].append(latencies)
            if "replication" in figures and num_servers == 2:
                figures["replication"].append(replication(server, 0, sizes[0], some, given.repeats))
    if {"replication", "checkpoint", "recovery"} & {*figures}:
        with results.scratch() as folder:
            flags_of = ("--replicas", "1", "--checkpoints", str(folder))
            with group_of(2, *flags_of) as group, connected(group) as server:
                if "replication" in figures:
                    figures["replication"].append(
                        replication(server, 1, sizes[0], some, given.repeats)
                    )
                if "checkpoint" in figures:
                    figures["checkpoint"].append(
                        checkpoint(group, server, sizes[0], some, model_rows, given.seconds, kills)
                    )
                if "recovery" in figures:
                    figures["recovery"].append(recovery(group, "replicas", sizes[-1], kills))
    if "recovery" in figures:
        with group_of(2, "--log") as group:
            figures["recovery"].append(recovery(group, "log", sizes[-1], kills))
    results.report("parameter_server", {"repeats": given.repeats, "batch": batch, **figures})


if __name__ == "__main__":
    main()
