"""Transfers over slow lines: they make room for others, and go on in small messages."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from support.transfers import (
    DATA,
    LARGE,
    MIB,
    NEVER_S,
    PATIENCE_S,
    VECTOR,
    at_once,
    connected,
    found,
    header,
    in_round,
    put,
    refused,
    until,
    with_model,
    written,
)
from support.wire import digest, npy
from xain_coordinator.core.values import Phase, WeightsRef
from xain_coordinator.server import downloads, places, uploads
from xain_participant import message_sizes
from xain_participant import upload as outgoing
from xain_participant.client import CoordinatorClient
from xain_participant.download import Download
from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.fl.coordinator_pb2_grpc import CoordinatorStub

Code = grpc.StatusCode


async def test_an_upload_that_is_too_slow_goes_on_later(start, join, tmp_path, monkeypatch):
    """It makes room where many are slow, and loses nothing that was written."""
    monkeypatch.setattr(places, "SLOW_S", NEVER_S)
    monkeypatch.setattr(uploads, "NUM_SLOW_BATCHES", 0)
    a = join(await start(), "a")
    await in_round(a)
    is_written = asyncio.Event()

    async def requests() -> AsyncIterator[pb.PutWeightsRequest]:
        yield pb.PutWeightsRequest(header=header())
        for at in range(0, 3 * MIB, MIB):
            yield pb.PutWeightsRequest(data=DATA[at : at + MIB])
        await is_written.wait()
        yield pb.PutWeightsRequest()  # nothing, after which its line is a slow one
        await asyncio.Event().wait()

    call = a.stub.PutWeights(requests(), metadata=a.metadata)
    await written(tmp_path, 3 * MIB)
    monkeypatch.setattr(places, "SLOW_S", 0.0)
    is_written.set()
    code, why, details = await refused(call)
    assert (code, why) == (Code.UNAVAILABLE, "LINE_SLOW")
    assert "slow" in details
    monkeypatch.setattr(places, "SLOW_S", NEVER_S)
    assert await found(a) == 3 * MIB
    ref = (await (await put(a, 3 * MIB))).ref
    assert (ref.size_bytes, ref.digest) == (len(DATA), digest(DATA))


@pytest.mark.parametrize("vector", [VECTOR, VECTOR[: MIB // 8]])
async def test_a_download_begins_in_small_chunks(start, join, monkeypatch, vector):
    """Until its line has shown that it is fast; one that is slow goes on so, without a place."""
    coordinator, _ = await with_model(start, join, vector)
    data = npy(vector)
    sender = downloads.Downloads(coordinator.driver, coordinator.store)

    async def sent() -> list[bytes]:
        chunks: list[bytes] = []

        async def write(_: WeightsRef, chunk: bytes) -> None:
            chunks.append(chunk)

        await sender.send("1/global", 0, write, at_once)
        return chunks

    monkeypatch.setattr(places, "SLOW_S", NEVER_S)
    chunks = await sent()
    assert b"".join(chunks) == data
    small = downloads.SLOW_CHUNK_BYTES
    number = min(MIB, len(data)) // small
    assert [len(chunk) for chunk in chunks[:number]] == [small] * number
    assert all(len(chunk) == MIB for chunk in chunks[number:-1])
    monkeypatch.setattr(places, "SLOW_S", -1.0)  # whatever it takes
    monkeypatch.setattr(downloads, "NUM_CHUNKS", 0)
    sender = downloads.Downloads(coordinator.driver, coordinator.store)
    chunks = await sent()
    assert b"".join(chunks) == data
    assert max(map(len, chunks)) == small


@pytest.fixture
def slow_down(monkeypatch) -> Callable[..., Awaitable[None]]:
    """Makes the lines of so many transfers under way slow ones, one after the other, where there is
    no place for those. One chunk of 64 KiB shows that a line is fast."""
    monkeypatch.setattr(places, "SLOW_S", NEVER_S)
    monkeypatch.setattr(places, "CHUNK_BYTES", 64 << 10)
    monkeypatch.setattr(downloads, "NUM_SLOW_CHUNKS", 0)
    monkeypatch.setattr(uploads, "NUM_SLOW_BATCHES", 0)
    # That of the latest chunk that has one, by line, the latest at the end.
    seen: dict[places.Line, places.Place] = {}
    look_later = places.Line._look_later

    def noted(self: places.Line, place: places.Place | None) -> None:
        if place is not None:
            seen.pop(self, None)
            seen[self] = place
        look_later(self, place)

    monkeypatch.setattr(places.Line, "_look_later", noted)

    async def slow_down(number: int = 1) -> None:
        def passing() -> list[places.Line]:
            return [line for line in list(seen)[-number:] if line._timer is not None]

        await until(lambda: len(passing()) == number)
        monkeypatch.setattr(places, "SLOW_S", 0.0)
        for line in passing():
            assert line._timer is not None
            line._timer.cancel()
            line._look(seen[line])
        monkeypatch.setattr(places, "SLOW_S", NEVER_S)

    return slow_down


async def test_a_participant_goes_on_in_small_messages(start, proxy, monkeypatch, slow_down):
    """With an upload that the coordinator has ended, at the byte at which it did so. They take no
    place, so that the line stays slow and there is none for slow lines does not matter."""
    coordinator = await start()
    client = await connected(proxy, coordinator)
    await until(lambda: coordinator.driver.session.phase is Phase.COLLECTING)
    chunks = outgoing.Upload.chunks
    is_held, is_ended = threading.Event(), threading.Event()
    streams_: list[tuple[int, list[int]]] = []  # offset, sizes of the messages

    def held(self: outgoing.Upload, offset: int, size: int) -> Iterator[bytes]:
        mine: list[int] = []
        streams_.append((offset, mine))
        if len(streams_) == 2:
            monkeypatch.setattr(places, "SLOW_S", -1.0)  # whatever it takes
        for number, chunk in enumerate(chunks(self, offset, size)):
            if number == 3 and len(streams_) == 1:
                is_held.set()
                assert is_ended.wait(PATIENCE_S)
            mine.append(len(chunk))
            yield chunk

    monkeypatch.setattr(outgoing.Upload, "chunks", held)
    putting = asyncio.create_task(asyncio.to_thread(client.put_weights, 0, LARGE))
    assert await asyncio.to_thread(is_held.wait, PATIENCE_S)
    await slow_down()
    ref = await putting
    is_ended.set()
    assert ref.digest == digest(npy(LARGE))
    await asyncio.to_thread(client.close)
    assert len(streams_) == 2
    offset, sizes = streams_[1]
    assert 0 < offset <= 3 * MIB
    assert set(sizes[:-1]) == {message_sizes.SMALL_BYTES}


async def test_participants_with_slow_lines_do_not_wait_for_each_other(
    start, monkeypatch, slow_down
):
    """Those for which no slow place is left go on in small messages."""
    monkeypatch.setattr(uploads, "NUM_SLOW_BATCHES", 1)
    names = [f"site-{number}" for number in range(4)]
    coordinator = await start(
        rounds={"min_participants": len(names)},
        server={"heartbeat_timeout_s": 2 * PATIENCE_S},  # they send none
    )
    clients = [CoordinatorClient(f"127.0.0.1:{coordinator.port}", name) for name in names]
    threads = ThreadPoolExecutor(len(clients))  # the loop's are few
    loop = asyncio.get_running_loop()
    chunks = outgoing.Upload.chunks
    num_held = threading.Semaphore(0)
    may_go_on = threading.Event()

    def held(self: outgoing.Upload, offset: int, size: int) -> Iterator[bytes]:
        for number, chunk in enumerate(chunks(self, offset, size)):
            if number == 3 and size > message_sizes.SMALL_BYTES:
                num_held.release()
                assert may_go_on.wait(PATIENCE_S)
            yield chunk

    monkeypatch.setattr(outgoing.Upload, "chunks", held)
    try:
        for client in clients:
            await loop.run_in_executor(threads, client.rendezvous)
        await until(lambda: coordinator.driver.session.phase is Phase.COLLECTING)
        putting = {
            loop.run_in_executor(threads, client.put_weights, 0, VECTOR) for client in clients
        }
        for _ in clients:
            assert await asyncio.to_thread(num_held.acquire, timeout=PATIENCE_S)
        await slow_down(len(clients))
        # The one that has the slow place does not move, and the others are through.
        await until(lambda: sum(put.done() for put in putting) == len(clients) - 1)
        assert coordinator.counters["LINE_SLOW"] == len(clients) - 1
        may_go_on.set()
        refs = await asyncio.gather(*putting)
        assert [ref.digest for ref in refs] == [digest(DATA)] * len(clients)
    finally:
        may_go_on.set()
        for client in clients:
            await loop.run_in_executor(threads, client.close)
        threads.shutdown()


async def test_a_download_that_is_too_slow_is_unavailable(start, join, slow_down):
    """What was sent before comes through, and the rest is to be had from there."""
    coordinator, a = await with_model(start, join, LARGE)
    # What a client takes ahead of its reader, however fast its line is.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 << 10)]
    options.append(("grpc.use_local_subchannel_pool", 1))
    address = f"127.0.0.1:{coordinator.port}"
    data = npy(LARGE)
    received = bytearray()

    async def receive(num_bytes: int) -> None:
        while len(received) < num_bytes:
            received.extend((await call.read()).data)

    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call = CoordinatorStub(channel).GetWeights(
            pb.GetWeightsRequest(key="1/global"), metadata=a.metadata
        )
        await receive(3 * MIB)
        await slow_down()
        code, why, details = await refused(receive(len(data)))
    assert (code, why) == (Code.UNAVAILABLE, "LINE_SLOW")
    assert "next offset" in details
    assert len(received) < len(data)
    assert received + await a.download("1/global", len(received)) == data


async def test_a_participant_goes_on_with_a_slow_download(
    start, join, proxy, monkeypatch, slow_down
):
    """At the byte at which the coordinator has ended it."""
    coordinator, _ = await with_model(start, join, LARGE)
    client = await connected(proxy, coordinator)
    offsets: list[int] = []
    stream, add = CoordinatorClient._stream, Download.add
    is_held = threading.Event()

    def noted(self: CoordinatorClient, ref: pb.WeightsRef, offset: int) -> Iterator[bytes]:
        offsets.append(offset)
        return stream(self, ref, offset)

    def held(self: Download, chunk: bytes) -> None:
        add(self, chunk)
        if not is_held.is_set() and self.received > 3 * MIB:
            proxy.blackhole()
            is_held.set()

    monkeypatch.setattr(CoordinatorClient, "_stream", noted)
    monkeypatch.setattr(Download, "add", held)
    work = await asyncio.to_thread(client.start_round)
    getting = asyncio.create_task(asyncio.to_thread(client.get_weights, work.model))
    assert await asyncio.to_thread(is_held.wait, PATIENCE_S)
    await slow_down()
    proxy.heal()
    assert np.array_equal(await getting, LARGE)
    await asyncio.to_thread(client.close)
    assert offsets[0] == 0
    assert offsets[1] > 3 * MIB
