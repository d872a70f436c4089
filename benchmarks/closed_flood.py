"""Floods against a coordinator that takes nobody without a certificate: are its sites still served?

    python benchmarks/closed_flood.py [--seconds 30] [--kinds KIND ...]

Two sites train rounds of 0.2 s, a third one heartbeats five times a second and asks on a new
connection whether the coordinator is healthy; so it goes for a while, and then for as long again
under a flood:

no certificate: --per-s connections a second that shake hands without a certificate.
silent: as many that begin a handshake and say no more, which are kept open.
one identity: a member of the session, with --connections connections at a time that are opened
again when they are ended. On each it asks for what a participant may have as often as it gets it:
streams of Watch, heartbeats, uploads that stop half-way; and as many connections to the weights
port with a body that stops half-way.

The flood shares the cores with the coordinator, which it would not do in earnest, so its programs
have the lowest priority. What is shown is the 99th percentile of the heartbeats without the flood
and in it, and how often either question was not answered; the rounds of both; the memory of the
coordinator after the first third of the flood and at its end; what the flood has reached.
Prints a table; writes bench-results/closed_flood.json.
"""

import argparse
import asyncio
import itertools
import json
import logging
import os
import resource
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import flags
import grpc
import numpy as np
import processes
import results
from grpc_health.v1 import health_pb2, health_pb2_grpc
from numpy.typing import NDArray

from xain_foundation.logs.logs import configure
from xain_foundation.security.tls import Certificates
from xain_participant import Participant
from xain_participant.agent.agent import run
from xain_participant.wire.client import CoordinatorClient, Refused
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.coordinator_pb2_grpc import CoordinatorStub
from xain_wire.metadata import PARTICIPANT_ID_KEY
from xain_wire.weights_port import DIGEST_HEADER

KINDS = ("no certificate", "silent", "one identity")
SITES = ("a0", "a1")  # the first by name; two of four close a round
HONEST, HOSTILE = "honest", "hostile"
SIZE = 100_000  # of the model: too large to travel inside a call
OBJECT_BYTES = 4 * SIZE + 128  # with the header of the file
TRAINING_S = 0.2
BEAT_S = 0.2
PROBE_S = 1.0  # limit of a health check, Kubernetes's default
SETTLE_S = 2.0  # until a flood has begun
NICENESS = 19
WATCHES, UPLOADS, BEATS = 80, 80, 80  # at a time on a connection, more than it may have


class Slow(Participant):
    """Training that takes TRAINING_S."""

    def init_weights(self) -> NDArray[np.float32]:
        return np.zeros(SIZE, np.float32)

    def train_round(
        self, weights: NDArray[np.float32], epochs: int, epoch_base: int
    ) -> tuple[NDArray[np.float32], int]:
        time.sleep(TRAINING_S)  # what training is here
        return weights + np.float32(1), 10


# --- honest clients ---


class Honest:
    """A site that counts how it is served. beats: seconds of each heartbeat since forget()."""

    def __init__(self, target: str, certificates: Path) -> None:
        self.beats: list[float] = []
        self.failed: Counter[str] = Counter()
        self._target = target
        self._tls = Certificates(certificates)
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._beat, self._probe)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def forget(self) -> None:
        self.beats, self.failed = [], Counter()

    @property
    def p99_ms(self) -> float:
        seconds = sorted(self.beats)
        return round(1000 * seconds[int(0.99 * (len(seconds) - 1))], 1)

    def _beat(self) -> None:
        with CoordinatorClient(self._target, HONEST, tls=self._tls) as client:
            client.rendezvous()
            while not self._ended.wait(BEAT_S):
                begin = time.monotonic()
                try:
                    client.heartbeat(pb.READY, -1)
                except Refused as refused:
                    self.failed[f"heartbeat: {refused.status.name}"] += 1
                self.beats.append(time.monotonic() - begin)

    def _probe(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        while not self._ended.wait(BEAT_S):
            with grpc.secure_channel(self._target, self._tls.of_channel(), options) as channel:
                try:
                    health_pb2_grpc.HealthStub(channel).Check(
                        health_pb2.HealthCheckRequest(), timeout=PROBE_S
                    )
                except grpc.RpcError as error:
                    self.failed[f"new connection: {error.code().name}"] += 1  # type: ignore[attr-defined]  # as all errors of calls


# --- floods, each in a process of its own ---


async def knock(port: int, per_s: float, reached: Counter[str], *, is_silent: bool) -> None:
    """Connect so often."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    hello = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello).do_handshake()
    begun = hello.read()[:100]

    async def one() -> None:
        try:
            tls = None if is_silent else context
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
            reached["connected"] += 1
            if is_silent:
                writer.write(begun)
            while await reader.read(4096):
                pass
            writer.close()
        except OSError:  # refused, in the handshake too
            reached["refused"] += 1

    await at_rate(per_s, one)


async def at_rate(per_s: float, work: Callable[[], Awaitable[None]]) -> None:
    tasks: set[asyncio.Task[None]] = set()
    begin = time.monotonic()
    for number in itertools.count():
        late_s = begin + number / per_s - time.monotonic()
        await asyncio.sleep(max(0.0, late_s))  # the rate of the flood
        task = asyncio.ensure_future(work())
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def abuse(target: str, folder: Path, connections: int, reached: Counter[str]) -> None:
    """Calls, streams and half-finished uploads of one identity, as many as it gets."""
    certificates = Certificates(folder)
    credentials = certificates.of_channel()
    metadata = ((PARTICIPANT_ID_KEY, HOSTILE),)
    chunk = bytes(1 << 10)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 1000)]
    works: list[pb.StartTrainingRoundResponse] = [pb.StartTrainingRoundResponse()]

    async def half_an_update() -> AsyncIterator[pb.PutWeightsRequest]:
        header = pb.PutWeightsRequest.Header(
            round=works[-1].round, size_bytes=OBJECT_BYTES, digest=bytes(16)
        )
        yield pb.PutWeightsRequest(header=header, data=chunk)
        await asyncio.Event().wait()

    async def for_ever(what: str, call: Callable[[], Awaitable[Any]]) -> None:
        while True:
            try:
                await call()
                reached[what] += 1
            except grpc.aio.AioRpcError as error:
                reached[f"{what} {error.code().name}"] += 1
            except OSError:
                reached[f"{what} refused"] += 1

    async def read(stream: AsyncIterator[Any]) -> None:
        async for _ in stream:
            pass

    async def body() -> None:
        """A PUT that stops half-way."""
        url = urlsplit(works[-1].upload.url)
        if not url.port:
            await asyncio.sleep(1.0)  # until there is a URL
            return
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", url.port, ssl=certificates.connects
        )
        head = f"PUT {url.path} HTTP/1.1\r\nHost: a\r\nContent-Length: {OBJECT_BYTES}\r\n"
        writer.write(f"{head}{DIGEST_HEADER}: {bytes(16).hex()}\r\n\r\n".encode() + chunk)
        while await reader.read(4096):
            pass
        writer.close()

    channels = [grpc.aio.secure_channel(target, credentials, options) for _ in range(connections)]
    stubs: list[Any] = [CoordinatorStub(channel) for channel in channels]  # its types block

    async def follow() -> None:
        async for news in stubs[0].Watch(pb.WatchRequest(), metadata=metadata):
            if news.HasField("work"):
                works[:] = [news.work]

    async def join() -> None:
        await stubs[0].Rendezvous(pb.RendezvousRequest(), metadata=metadata)

    await join()
    loops = [for_ever("news", follow), for_ever("join", join)]
    for stub in stubs:
        loops += [
            for_ever("watch", lambda s=stub: read(s.Watch(pb.WatchRequest(), metadata=metadata)))
            for _ in range(WATCHES)
        ]
        loops += [
            for_ever("upload", lambda s=stub: s.PutWeights(half_an_update(), metadata=metadata))
            for _ in range(UPLOADS)
        ]
        loops += [
            for_ever("beat", lambda s=stub: s.Heartbeat(pb.HeartbeatRequest(), metadata=metadata))
            for _ in range(BEATS)
        ]
        loops.append(for_ever("body", body))
    await asyncio.gather(*loops)


async def flood(given: argparse.Namespace) -> None:
    """Flood until a line of input comes."""
    os.nice(NICENESS)
    # asyncio would log each refused upload whose messages gRPC's client has not taken.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    reached: Counter[str] = Counter()
    target = f"127.0.0.1:{given.port}"
    work = (
        abuse(target, given.certificates, given.connections, reached)
        if given.flood == "one identity"
        else knock(given.port, given.per_s, reached, is_silent=given.flood == "silent")
    )
    flooding = asyncio.ensure_future(work)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    if flooding.done():
        flooding.result()
    print(json.dumps(reached), flush=True)
    os._exit(0)


# --- the measurement ---


class Flood:
    """The program of one kind of flood."""

    def __init__(self, kind: str, port: int, certificates: Path, more: list[str]) -> None:
        command = [sys.executable, __file__, "--flood", kind, f"--port={port}"]
        command += [f"--certificates={certificates}", *more]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def end(self) -> dict[str, int]:
        """End the program; returns how often its calls had which outcome."""
        out, _ = self._process.communicate("end\n", timeout=60)
        reached: dict[str, int] = json.loads(out)
        return reached

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure(kind: str, seconds: float, more: list[str]) -> dict[str, Any]:
    settings = {
        "rounds.rounds": 100_000,
        "rounds.initial_weights": "average",
        "rounds.min_participants": len(SITES),
        "rounds.start_participants": len(SITES) + 2,
        "rounds.fraction_participants": 0.5,
        "rounds.controller": "ordered",
        # All are selected, and the two that train close each round.
        "rounds.over_selection": 1,
    }
    with ExitStack() as stack:
        folder = stack.enter_context(results.scratch())
        coordinator = processes.CoordinatorProcess(folder, settings, is_closed=True)
        stack.callback(coordinator.stop)
        coordinator.start()
        for name in SITES:
            certificates = coordinator.certificates(name)
            command = [sys.executable, __file__, "--site", name, "--port", str(coordinator.port)]
            site = subprocess.Popen([*command, "--certificates", str(certificates)])
            stack.callback(site.wait)
            stack.callback(site.kill)
        own, hostile = coordinator.certificates(HONEST), coordinator.certificates(HOSTILE)
        assert own, "the coordinator is closed"
        assert hostile, "the coordinator is closed"
        honest = Honest(coordinator.target, own)
        stack.callback(honest.end)
        # The fourth member is quiet until it floods.
        tls = Certificates(hostile)
        with CoordinatorClient(coordinator.target, HOSTILE, tls=tls) as member:
            member.rendezvous()

            def has_begun() -> bool:
                member.heartbeat(pb.READY, -1)
                return len(coordinator.rounds()) > 2

            processes.wait_until(has_begun, "the first rounds")

            def during() -> dict[str, Any]:
                honest.forget()
                rounds, memory = len(coordinator.rounds()), []
                for _ in range(3):
                    time.sleep(seconds / 3)  # what is measured
                    with suppress(Refused):  # in its own flood
                        member.heartbeat(pb.READY, -1)
                    memory.append(coordinator.memory_mb)
                return {
                    "p99_ms": honest.p99_ms,
                    "failed": sum(honest.failed.values()),
                    "rounds": len(coordinator.rounds()) - rounds,
                    "memory": (memory[0], memory[-1]),
                    "why": dict(honest.failed),
                }

            calm = during()
            flood = Flood(kind, coordinator.port, hostile, more)
            stack.callback(flood.kill)
            time.sleep(SETTLE_S)  # the program has to start
            cpu = coordinator.processor_time
            flooded = during()
            after = coordinator.processor_time
            reached = flood.end()
        assert cpu, "Linux tells"
        assert after, "Linux tells"
        busy = (after.user_s + after.system_s - cpu.user_s - cpu.system_s) / seconds
        print(json.dumps({kind: reached, "failed": flooded["why"]}), file=sys.stderr)
        return {
            "flood": kind,
            "p99_ms": calm["p99_ms"],
            "flooded_p99_ms": flooded["p99_ms"],
            "unanswered": flooded["failed"],
            "rounds": calm["rounds"],
            "flooded_rounds": flooded["rounds"],
            "memory_mb": flooded["memory"][0],
            "memory_mb_at_end": flooded["memory"][1],
            "busy_cores": round(busy, 2),
            "reached": sum(reached.values()),
        }


def main() -> None:
    parser = flags.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--per-s", type=float, default=1000.0)
    parser.add_argument("--connections", type=int, default=20)
    for hidden in ("--flood", "--site", "--certificates"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.flood:
        asyncio.run(flood(given))
        return
    if given.site:
        configure("error", console=False, third_party=False)
        tls = Certificates(given.certificates)
        sys.exit(run(Slow(), f"127.0.0.1:{given.port}", given.site, tls=tls))
    results.begin(quick=given.quick, any_load=given.any_load)
    if given.quick:
        given.seconds, given.per_s, given.connections = 3.0, 100.0, 2
    more = [f"--per-s={given.per_s}", f"--connections={given.connections}"]
    table = [measure(kind, given.seconds, more) for kind in given.kinds]
    results.report("closed_flood", {"seconds": given.seconds, "floods": table})


if __name__ == "__main__":
    main()
