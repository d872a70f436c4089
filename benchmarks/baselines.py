"""Raw limits of the machine: loopback TCP, bare gRPC streams, memory, disk.

    python benchmarks/baselines.py [--participants 4] [--size 25000000]

The raw limits that the other benchmarks measure themselves against, each in its own run: no round
can be faster than the same bytes over bare streams between as many processes, and no aggregation
faster than the memory. Prints a table; writes bench-results/baselines.json.
"""

import asyncio
import functools
import multiprocessing as mp
import os
import socket
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import flags
import grpc
import numpy as np
import results
from numpy.typing import NDArray

from xain_coordinator.stores.reading import CHUNK_BYTES

PATIENCE_S = 300.0
REPEATS = 3
# A slice, its product and its sum: 1.25 MiB. With shorter ones a call into numpy takes less time
# than the hand-over of the interpreter's lock between two threads.
BLOCK = 1 << 16
ELEMENTS = 1 << 26  # of a vector that no cache holds

GET = "/bench.Bare/Get"
PUT = "/bench.Bare/Put"

Array = NDArray[Any]


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def median_of(measure: Callable[[], float], repeats: int = REPEATS) -> float:
    return statistics.median(measure() for _ in range(repeats))


# --- between processes ---


@contextmanager
def _processes(targets: Iterable[Callable[[], None]]) -> Iterator[None]:
    """Run each target in a new process; at the end all processes are stopped."""
    context = mp.get_context("spawn")
    processes = [context.Process(target=target, daemon=True) for target in targets]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def timed(
    clients: int, server: Callable[..., None], client: Callable[..., None], repeats: int
) -> list[float]:
    """Seconds of each repeat, from the moment at which all clients begin to that at which the last
    has ended. server, client: take the port's pipe or the port, and the barrier between repeats."""
    context = mp.get_context("spawn")
    barrier = context.Barrier(clients + 1)
    here, there = context.Pipe()
    with _processes([functools.partial(server, there)]):
        if not here.poll(PATIENCE_S):
            raise SystemExit("a bare server did not begin")
        port = here.recv()
        one = functools.partial(client, port, barrier, repeats)
        with _processes([one] * clients):
            barrier.wait(PATIENCE_S)  # all are connected, and have gone once as a warm-up
            taken = []
            for _ in range(repeats):
                barrier.wait(PATIENCE_S)
                taken.append(seconds(lambda: barrier.wait(PATIENCE_S)))
            return taken


def repeated(barrier: Barrier, repeats: int, once: Callable[[], None]) -> None:
    once()
    barrier.wait(PATIENCE_S)
    for _ in range(repeats):
        barrier.wait(PATIENCE_S)
        once()
        barrier.wait(PATIENCE_S)


def tcp_round(clients: int, num_bytes: int, repeats: int = REPEATS) -> list[float]:
    """Seconds in which each client gets num_bytes over loopback, and sends as many."""
    client = functools.partial(_tcp_client, num_bytes)
    return timed(clients, functools.partial(_tcp_server, num_bytes), client, repeats)


def _tcp_server(num_bytes: int, pipe: Any) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        pipe.send(listener.getsockname()[1])
        while True:
            connection, _ = listener.accept()
            serve = functools.partial(_serve_tcp, connection, num_bytes)
            threading.Thread(target=serve, daemon=True).start()


def _serve_tcp(connection: socket.socket, num_bytes: int) -> None:
    with connection:
        while connection.recv(1):
            _send(connection, num_bytes)
            _receive(connection, num_bytes)
            connection.sendall(b"x")


def _tcp_client(num_bytes: int, port: int, barrier: Barrier, repeats: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:

        def once() -> None:
            connection.sendall(b"x")
            _receive(connection, num_bytes)
            _send(connection, num_bytes)
            connection.recv(1)

        repeated(barrier, repeats, once)


def _send(connection: socket.socket, num_bytes: int) -> None:
    chunk = memoryview(bytes(CHUNK_BYTES))
    while num_bytes > 0:
        connection.sendall(chunk[:num_bytes])
        num_bytes -= CHUNK_BYTES


def _receive(connection: socket.socket, num_bytes: int) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while num_bytes > 0:
        count = connection.recv_into(buffer[:num_bytes])
        if not count:
            raise ConnectionError("the other side has hung up")
        num_bytes -= count


def grpc_round(clients: int, num_bytes: int, repeats: int = REPEATS) -> list[float]:
    """Seconds in which each client gets num_bytes over a bare stream of a grpc.aio server, and then
    streams as many to it; nothing is done with them."""
    client = functools.partial(_grpc_client, num_bytes)
    return timed(clients, functools.partial(_grpc_server, num_bytes), client, repeats)


def _chunks(num_bytes: int) -> Iterator[bytes]:
    chunk = bytes(CHUNK_BYTES)
    for _ in range(num_bytes // CHUNK_BYTES):
        yield chunk
    if rest := num_bytes % CHUNK_BYTES:
        yield chunk[:rest]


def _grpc_server(num_bytes: int, pipe: Any) -> None:
    asyncio.run(_serve_grpc(num_bytes, pipe))


async def _serve_grpc(num_bytes: int, pipe: Any) -> None:
    async def get(request: bytes, context: object) -> AsyncIterator[bytes]:
        for chunk in _chunks(num_bytes):
            yield chunk

    async def put(requests: AsyncIterator[bytes], context: object) -> bytes:
        size = 0
        async for chunk in requests:
            size += len(chunk)
        return str(size).encode()

    server = grpc.aio.server()
    methods: dict[str, Any] = {
        "Get": grpc.unary_stream_rpc_method_handler(get),
        "Put": grpc.stream_unary_rpc_method_handler(put),
    }
    handlers = grpc.method_handlers_generic_handler("bench.Bare", methods)
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(port)
    await server.wait_for_termination()


def _grpc_client(num_bytes: int, port: int, barrier: Barrier, repeats: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        get: Callable[..., Iterator[bytes]] = channel.unary_stream(GET)
        put: Callable[..., bytes] = channel.stream_unary(PUT)

        def once() -> None:
            size = sum(map(len, get(b"", wait_for_ready=True)))
            assert size == num_bytes
            assert int(put(_chunks(num_bytes))) == num_bytes

        repeated(barrier, repeats, once)


# --- memory ---


def cores() -> int:
    """Number of cores that this process may use."""
    with suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # not Linux


def _spread(work: Callable[[slice], None], length: int, threads: int) -> float:
    """Seconds in which the threads do the work on slices of a vector, of which each has its own."""
    edges = [length * i // threads for i in range(threads + 1)]
    parts = [slice(*pair) for pair in pairwise(edges)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, parts))  # a warm-up: the pages are there, and so are the threads
        return median_of(lambda: seconds(lambda: list(pool.map(work, parts))))


def copy_gb_per_s(threads: int = 1, elements: int = ELEMENTS) -> float:
    """numpy copying float32: GB read a second; as many are written."""
    source = np.ones(elements, np.float32)
    target = np.empty_like(source)

    def copy(part: slice) -> None:
        np.copyto(target[part], source[part])

    return source.nbytes / _spread(copy, elements, threads) / 1e9


def read_gb_per_s(threads: int = 1, elements: int = ELEMENTS) -> float:
    """numpy adding up float32: GB read a second; nothing is written."""
    source = np.ones(elements, np.float32)

    def add_up(part: slice) -> None:
        source[part].sum()

    return source.nbytes / _spread(add_up, elements, threads) / 1e9


def accumulate_gb_per_s(updates: Array, threads: int = 1) -> float:
    """Speed of a weighted sum of vectors in memory, in float64, in blocks that stay in the cache.

    Returns GB of updates read a second.

    updates: (k, d) float32.
    """
    k, d = updates.shape
    total = np.empty(d, np.float64)
    weights = np.arange(1.0, k + 1.0) / k

    def accumulate(part: slice) -> None:
        scaled = np.empty(BLOCK, np.float64)
        for start in range(part.start, part.stop, BLOCK):
            stop = min(start + BLOCK, part.stop)
            block, product = total[start:stop], scaled[: stop - start]
            block[:] = 0
            for row, weight in zip(updates, weights, strict=True):
                np.multiply(row[start:stop], weight, out=product, dtype=np.float64)
                np.add(block, product, out=block)

    return updates.nbytes / _spread(accumulate, d, threads) / 1e9


def random_updates(k: int, d: int) -> Array:
    """(k, d) float32, each row another one."""
    chance = np.random.default_rng(5)
    updates = np.empty((k, d), np.float32)
    for row in updates:
        chance.standard_normal(out=row, dtype=np.float32)
    return updates


# --- disk ---


def disk_seconds(folder: Path, num_files: int, num_bytes: int, repeats: int = REPEATS) -> float:
    """Seconds to write files one after another, each in chunks and with an fsync at its end."""
    chunk = os.urandom(CHUNK_BYTES)

    def write() -> None:
        for i in range(num_files):
            with (folder / f"disk-{i}").open("wb", buffering=0) as file:
                for start in range(0, num_bytes, CHUNK_BYTES):
                    file.write(chunk[: num_bytes - start])
                os.fsync(file.fileno())

    try:
        return median_of(lambda: seconds(write), repeats)
    finally:
        for i in range(num_files):
            (folder / f"disk-{i}").unlink(missing_ok=True)


def transport(participants: int, num_bytes: int, repeats: int = REPEATS) -> dict[str, float]:
    """Seconds in which every participant gets num_bytes and sends as many."""
    return {
        "tcp_s": statistics.median(tcp_round(participants, num_bytes, repeats)),
        "bare_grpc_s": statistics.median(grpc_round(participants, num_bytes, repeats)),
    }


def memory(elements: int = ELEMENTS, rows: int = 8) -> list[dict[str, float]]:
    """Speed of memory with one thread, and with one thread a core."""
    updates = random_updates(rows, elements // rows)
    return [
        {
            "threads": threads,
            "read_gb_per_s": read_gb_per_s(threads, elements),
            "copy_gb_per_s": copy_gb_per_s(threads, elements),
            "float64_accumulation_gb_per_s": accumulate_gb_per_s(updates, threads),
        }
        for threads in sorted({1, cores()})
    ]


def main() -> None:
    parser = flags.parser(__doc__)
    parser.add_argument("--participants", type=int, default=4, help="processes beside the server")
    parser.add_argument("--size", type=int, default=25_000_000, help="of the model, in float32")
    given = parser.parse_args()
    results.begin(quick=given.quick, any_load=given.any_load)
    if given.quick:
        given.participants, given.size = 2, 100_000
    num_bytes = 4 * given.size
    elements = given.size if given.quick else ELEMENTS
    moved_mb = 2 * given.participants * num_bytes / 1e6
    found = transport(given.participants, num_bytes)
    with results.scratch() as folder:
        written = disk_seconds(folder, given.participants, num_bytes)
    results.report(
        "baselines",
        {
            "participants": given.participants,
            "model_mb": num_bytes / 1e6,
            **found,
            "tcp_mb_per_s": moved_mb / found["tcp_s"],
            "bare_grpc_mb_per_s": moved_mb / found["bare_grpc_s"],
            "disk_mb_per_s": moved_mb / 2 / written,
            "memory": memory(elements),
        },
    )


if __name__ == "__main__":
    main()
