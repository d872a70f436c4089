"""A round of large updates with nothing but sockets, files and numpy: the limit of a coordinator.

    python benchmarks/bulk_round.py [--participants 4] [--size 25000000] [--rounds 5] [--no-sync]

Each participant is a process. In a round it gets the model and sends an update; the server writes
the update over the file of the round before, while it computes the digest and looks for elements
that are not finite, and syncs it. When all updates are there, two threads average them by tiles in
float64 and write and sync the model. No protocol, no journal, no recovery: a coordinator does the
same work on the same bytes, and all that it takes longer is its own.

Prints a table; writes bench-results/bulk_round.json.
"""

import functools
import os
import socket
import statistics
import threading
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import baselines
import flags
import numpy as np
import results
import xxhash

from xain_coordinator.stores.reading import CHUNK_BYTES

AVERAGING_THREADS = 2
SENT_BYTES = 8 << 20
SOCKET_BYTES = 4 << 20
ANSWER = b"x"


def bulk_round(
    folder: Path, participants: int, num_bytes: int, repeats: int, *, sync: bool = True
) -> list[float]:
    """Seconds of each round. num_bytes: of float32, of the model and of each update."""
    server = functools.partial(_server, str(folder), participants, num_bytes, sync)
    client = functools.partial(_client, num_bytes)
    return baselines.timed(participants, server, client, repeats)


def _client(num_bytes: int, port: int, barrier: Barrier, repeats: int) -> None:
    chance = np.random.default_rng(os.getpid())
    update = memoryview(chance.standard_normal(num_bytes // 4, dtype=np.float32)).cast("B")
    model = memoryview(bytearray(num_bytes))
    with socket.create_connection(("127.0.0.1", port)) as connection:

        def once() -> None:
            connection.sendall(ANSWER)
            _receive(connection, model)
            connection.sendall(update)
            assert connection.recv(1) == ANSWER

        baselines.repeated(barrier, repeats, once)


def _receive(connection: socket.socket, target: memoryview) -> None:
    while target:
        count = connection.recv_into(target)
        if not count:
            raise ConnectionError("the other side has hung up")
        target = target[count:]


class _Server:
    """One thread a connection; the last one whose update is there averages all of them."""

    def __init__(self, folder: str, participants: int, num_bytes: int, *, sync: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT
        self._updates = [os.open(f"{folder}/{i}", flags) for i in range(participants)]
        self._models = [os.open(f"{folder}/{name}", flags) for name in ("global", "next")]
        for file in (*self._models, *self._updates):
            os.truncate(file, num_bytes)
        self._num_bytes = num_bytes
        self._sync = sync
        self._arrived = threading.Barrier(participants, self._average)

    def serve(self, connection: socket.socket, number: int) -> None:
        with connection:
            while connection.recv(1):
                sent = 0
                while sent < self._num_bytes:
                    length = min(SENT_BYTES, self._num_bytes - sent)
                    sent += os.sendfile(connection.fileno(), self._models[0], sent, length)
                self._store(connection, self._updates[number])
                self._arrived.wait(baselines.PATIENCE_S)
                connection.sendall(ANSWER)

    def _store(self, connection: socket.socket, file: int) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        digest = xxhash.xxh3_128()
        for at in range(0, self._num_bytes, CHUNK_BYTES):
            piece = buffer[: self._num_bytes - at]
            _receive(connection, piece)
            digest.update(piece)
            assert np.isfinite(np.frombuffer(piece, np.float32)).all()
            os.pwrite(file, piece, at)
        if self._sync:
            os.fdatasync(file)

    def _average(self) -> None:
        part = -(-self._num_bytes // AVERAGING_THREADS // CHUNK_BYTES) * CHUNK_BYTES
        spans = [(start, start + part) for start in range(0, self._num_bytes, part)]
        threads = [threading.Thread(target=self._average_part, args=span) for span in spans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._sync:
            os.fdatasync(self._models[1])
        self._models.reverse()

    def _average_part(self, start: int, end: int) -> None:
        values = np.empty(CHUNK_BYTES // 4, np.float32)
        product, total = np.empty(len(values)), np.empty(len(values))
        for at in range(start, min(end, self._num_bytes), CHUNK_BYTES):
            count = min(CHUNK_BYTES, end - at, self._num_bytes - at) // 4
            total[:count] = 0
            for update in self._updates:
                os.preadv(update, [values[:count].view(np.uint8).data], at)
                np.multiply(
                    values[:count], 1 / len(self._updates), out=product[:count], dtype=np.float64
                )
                total[:count] += product[:count]
            os.pwrite(self._models[1], total[:count].astype(np.float32), at)


def _server(folder: str, participants: int, num_bytes: int, sync: bool, pipe: Any) -> None:
    server = _Server(folder, participants, num_bytes, sync=sync)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            listener.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        pipe.send(listener.getsockname()[1])
        for number in range(participants):
            connection, _ = listener.accept()
            threading.Thread(target=server.serve, args=(connection, number), daemon=True).start()
        threading.Event().wait()  # until the benchmark ends this process


def main() -> None:
    parser = flags.parser(__doc__)
    parser.add_argument("--participants", type=int, default=4)
    parser.add_argument("--size", type=int, default=25_000_000, help="of the model, in float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-sync", action="store_true", help="without fdatasync")
    given = parser.parse_args()
    results.begin(quick=given.quick, any_load=given.any_load)
    if given.quick:
        given.participants, given.size, given.rounds = 2, 50_000, 1
    with results.scratch() as folder:
        taken = bulk_round(
            folder, given.participants, 4 * given.size, given.rounds, sync=not given.no_sync
        )
    results.report(
        "bulk_round",
        {
            "participants": given.participants,
            "model_mb": 4 * given.size / 1e6,
            "round_s_median": statistics.median(taken),
            "round_s_min": min(taken),
            "round_s_max": max(taken),
        },
    )


if __name__ == "__main__":
    main()
