"""Flood of connections at the coordinator's gRPC port: which other clients are served meanwhile?

For each kind of connection it opens --connections at once, opens another one for each that is
ended (with --hold it does not), and prints how long a new participant takes to join, which health
checks and questions for the status failed, those over the Unix socket among them (`alive`, which
liveness probes ask), the longest gap between heartbeats of a participant that was there before, and
the peak memory of the coordinator.
"""

import argparse
import asyncio
import multiprocessing
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import processes
from grpc_health.v1 import health_pb2, health_pb2_grpc

from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import coordinator_pb2_grpc, inspection_pb2, inspection_pb2_grpc
from xain_wire.metadata import PARTICIPANT_ID_KEY

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PROBE_S = 1.0  # limit of a health check, Kubernetes's default
STATUS_S = 5.0
JOIN_S = 30.0


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )


def call(path: str) -> bytes:
    """A call with an empty message, without a participant's id."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "a",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in headers.items()
    )
    return frame(1, 4, 1, block) + frame(0, 1, 1, bytes(5))


SETTINGS = PREFACE + frame(4, 0, 0, b"")
KINDS = {
    "nothing": b"",
    "half a preface": PREFACE[:12],
    "settings": SETTINGS,
    "a refused call": SETTINGS + call("/xain_proto.fl.Coordinator/StartTrainingRound"),
    "a health check": SETTINGS + call("/grpc.health.v1.Health/Check"),
}


def flood(port: int, greeting: bytes, num_connections: int, reopens: bool) -> None:
    """Hold connections until this process is terminated."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def hold() -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(greeting)
                while await reader.read(4096):
                    pass
                writer.close()
            except OSError:
                await asyncio.sleep(0.05)  # before it connects again
            if not reopens:
                return

    async def hold_all() -> None:
        await asyncio.gather(*(hold() for _ in range(num_connections)))
        await asyncio.Event().wait()

    asyncio.run(hold_all())


class Seen:
    """Honest clients, and what they have seen. Times in seconds."""

    def __init__(self, port: int, folder: Path) -> None:
        self.joins: list[float] = []
        self.results: Counter[str] = Counter()
        self.gap_s = 0.0
        self._target = f"127.0.0.1:{port}"
        self._socket = folder / "journal.sock"
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=work) for work in (self._beat, self._join, self._probe)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _channel(self, target: str) -> grpc.Channel:
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        return grpc.insecure_channel(target, options=options)

    def _beat(self) -> None:
        with self._channel(self._target) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            metadata = ((PARTICIPANT_ID_KEY, "honest"),)
            stub.Rendezvous(pb.RendezvousRequest(), metadata=metadata, timeout=30)
            last = time.monotonic()
            while not self._ended.wait(0.2):
                try:
                    stub.Heartbeat(pb.HeartbeatRequest(), metadata=metadata, timeout=5)
                    last = time.monotonic()
                except grpc.RpcError as error:
                    self.results[f"heartbeat {error.code().name}"] += 1
                self.gap_s = max(self.gap_s, time.monotonic() - last)

    def _join(self) -> None:
        number = 0
        while not self._ended.wait(0.5):
            number += 1
            began = time.monotonic()
            with self._channel(self._target) as channel:
                stub = coordinator_pb2_grpc.CoordinatorStub(channel)
                metadata = ((PARTICIPANT_ID_KEY, f"new{number}"),)
                while time.monotonic() - began < JOIN_S and not self._ended.is_set():
                    try:
                        stub.Rendezvous(pb.RendezvousRequest(), metadata=metadata, timeout=5)
                        break
                    except grpc.RpcError as error:
                        self.results[f"join {error.code().name}: {error.details()[:40]}"] += 1
                        time.sleep(0.2)  # between two attempts to join
                self.joins.append(time.monotonic() - began)

    def _probe(self) -> None:
        def check(channel: grpc.Channel) -> None:
            health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=PROBE_S
            )

        def status(channel: grpc.Channel) -> None:
            inspection_pb2_grpc.InspectionStub(channel).GetStatus(
                inspection_pb2.GetStatusRequest(), timeout=STATUS_S
            )

        asked: dict[str, tuple[str, Callable[[grpc.Channel], None]]] = {
            "alive": (f"unix:{self._socket}", check),
            "check": (self._target, check),
            "status": (self._target, status),
        }
        while not self._ended.wait(0.3):
            for name, (target, ask) in asked.items():
                with self._channel(target) as channel:
                    try:
                        ask(channel)
                        self.results[f"{name} OK"] += 1
                    except grpc.RpcError as error:
                        self.results[f"{name} {error.code().name}"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--participants", type=int, default=100, help="that the session waits for")
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    given = parser.parse_args()
    for kind in given.kinds:
        settings = dict.fromkeys(
            ("rounds.min_participants", "rounds.max_participants"), given.participants
        )
        settings |= dict(pair.split("=", 1) for pair in given.set)
        with tempfile.TemporaryDirectory() as folder:
            coordinator = processes.CoordinatorProcess(Path(folder), settings)
            coordinator.start()
            seen = Seen(coordinator.port, Path(folder))
            time.sleep(1)  # the honest clients come before the flood
            flooding = multiprocessing.get_context("spawn").Process(
                target=flood,
                args=(coordinator.port, KINDS[kind], given.connections, not given.hold),
            )
            flooding.start()
            time.sleep(2)  # the process of the flood has to start
            time.sleep(given.seconds)  # for so long the flood goes on
            seen.end()
            flooding.terminate()
            flooding.join()
            memory = coordinator.peak_memory_mb
            used = coordinator.processor_time
            coordinator.stop()
        longest = max(seen.joins, default=JOIN_S)
        print(
            f"{kind}: {len(seen.joins)} joined, longest {longest:.1f} s, gap {seen.gap_s:.1f} s,",
            end=" ",
        )
        print(f"peak {memory:.0f} MB, {used}, {dict(seen.results)}", flush=True)


if __name__ == "__main__":
    main()
