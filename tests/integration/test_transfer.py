"""Large updates on their way: cut off, gone on with, encoded, and looked at as they come."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from support.fault_proxy import FaultProxy
from support.process import CoordinatorProcess
from support.wire import Member, digest, npy, reason
from xain_coordinator.core.values import Phase, StoredWeights, WeightsRef
from xain_coordinator.ports import StoreUnavailable, WeightsStore
from xain_coordinator.server import downloads, places, streams, uploads
from xain_coordinator.server.reception import Announced, Reception
from xain_coordinator.stores.files import FileUnfinished
from xain_participant import message_sizes
from xain_participant import upload as outgoing
from xain_participant.client import CoordinatorClient, Refused
from xain_participant.download import Download
from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.fl.coordinator_pb2_grpc import CoordinatorStub

MIB = 1 << 20
PATIENCE_S = 60.0
NEVER_S = 1e6
Code = grpc.StatusCode

# 6 MiB and a little, so that the last chunk and the last tile are not whole.
VECTOR = np.random.default_rng(5).standard_normal(6 * MIB // 4 + 1000, dtype=np.float32)
DATA = npy(VECTOR)
HEADER_BYTES = len(DATA) - VECTOR.nbytes


async def in_round(member: Member, round_: int = 0) -> None:
    await member.rendezvous()
    await member.until(pb.ROUND, round_)


async def until(found: Callable[[], Any]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while not (result := found()):  # noqa: ASYNC110  # files have no event to wait for
            await asyncio.sleep(0.01)  # a poll, not a race: it ends when it is so
    return result


def header(**fields: Any) -> pb.PutWeightsRequest.Header:
    return pb.PutWeightsRequest.Header(
        **{"round": 0, "size_bytes": len(DATA), "digest": digest(DATA), **fields}
    )


async def put(member: Member, start: int = 0, end: int | None = None, **fields: Any) -> Any:
    """Upload DATA[start:end]. With an end, the stream breaks off when the coordinator has it."""

    async def requests() -> AsyncIterator[pb.PutWeightsRequest]:
        yield pb.PutWeightsRequest(header=header(offset=start, **fields))
        for at in range(start, len(DATA) if end is None else end, MIB):
            yield pb.PutWeightsRequest(data=DATA[at : min(at + MIB, end or len(DATA))])
        if end is not None:
            await asyncio.Event().wait()

    return member.stub.PutWeights(requests(), metadata=member.metadata)


async def found(member: Member, **fields: Any) -> int:
    request = {"round": 0, "size_bytes": len(DATA), "digest": digest(DATA), **fields}
    answer = await member.stub.FindUpload(pb.FindUploadRequest(**request), metadata=member.metadata)
    return answer.offset


async def refused(call: Any) -> tuple[grpc.StatusCode, str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), reason(caught.value), caught.value.details() or ""


def parts(folder: Path) -> list[Path]:
    """Of uploads that may go on; those of models have no label before their number."""
    return list(folder.glob("weights/.incoming/*.*.part"))


async def broken_off(member: Member, folder: Path, end: int) -> None:
    """An upload whose connection is lost when all that was sent of it has been written."""
    call = await put(member, 0, end)
    await until(lambda: any(p.stat().st_size >= end for p in parts(folder)))
    call.cancel()


async def test_an_upload_that_broke_off_goes_on(start, join, tmp_path):
    """Only what had not been written is sent again, and the object is the same to the bit."""
    coordinator = await start()
    a = join(coordinator, "a")
    await in_round(a)
    await broken_off(a, tmp_path, 3 * MIB)
    offset = await found(a)
    assert offset == 3 * MIB
    ref = (await (await put(a, offset))).ref
    assert (ref.size_bytes, ref.digest) == (len(DATA), digest(DATA))
    await a.end(ref)
    with coordinator.store.open(ref.key) as reader:
        assert reader.read(0, reader.size) == DATA
    assert parts(tmp_path) == []


async def test_a_stranger_takes_no_place_in_memory(start, join):
    """It is refused before it has sent anything, and however many wait for one."""
    coordinator = await start()
    stranger = join(coordinator, "stranger")
    silent = asyncio.Event()

    async def requests() -> AsyncIterator[pb.PutWeightsRequest]:
        await silent.wait()
        yield pb.PutWeightsRequest()

    for _ in range(streams.NUM_BATCHES + 1):
        call = stranger.stub.PutWeights(requests(), metadata=stranger.metadata)
        code, why, _ = await refused(call)
        assert (code, why) == (Code.PERMISSION_DENIED, "NOT_A_MEMBER")


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
    await until(lambda: any(p.stat().st_size >= 3 * MIB for p in parts(tmp_path)))
    monkeypatch.setattr(places, "SLOW_S", 0.0)
    is_written.set()
    code, why, details = await refused(call)
    assert (code, why) == (Code.UNAVAILABLE, "LINE_SLOW")
    assert "slow" in details
    monkeypatch.setattr(places, "SLOW_S", NEVER_S)
    assert await found(a) == 3 * MIB
    ref = (await (await put(a, 3 * MIB))).ref
    assert (ref.size_bytes, ref.digest) == (len(DATA), digest(DATA))


async def test_the_same_upload_is_not_sent_twice(start, join):
    """Whoever has lost the answer hears it again without the bytes."""
    a = join(await start(), "a")
    await in_round(a)
    first = (await (await put(a))).ref
    assert await found(a) == len(DATA)
    assert (await (await put(a, end=MIB))).ref == first
    assert (await (await put(a, len(DATA)))).ref == first
    await a.end(first)
    assert await found(a) == len(DATA)


@pytest.mark.parametrize("offset", [1, 3 * MIB - 1, 3 * MIB + 1, len(DATA), 1 << 60])
async def test_an_upload_goes_on_nowhere_else(start, join, tmp_path, offset):
    """An offset that nobody was told is refused, and does not hurt what is there."""
    coordinator = await start(rounds={"min_participants": 2})
    a, b = join(coordinator, "a"), join(coordinator, "b")
    await asyncio.gather(a.rendezvous(), b.rendezvous())
    await a.until(pb.ROUND, 0)
    await broken_off(a, tmp_path, 3 * MIB)
    assert await found(a) == 3 * MIB
    for member in (a, b):  # b has not sent anything
        code, why, _ = await refused(await put(member, offset, offset + 1))
        assert (code, why) == (Code.FAILED_PRECONDITION, "UPLOAD_MISSING")
    assert await found(b) == 0
    assert await found(a, size_bytes=len(DATA) + 4) == 0
    assert await found(a) == 3 * MIB


async def test_what_goes_on_with_other_bytes_is_refused(start, join, tmp_path):
    """The digest is that of the whole object, whoever has sent which part of it."""
    a = join(await start(), "a")
    await in_round(a)

    async def requests() -> AsyncIterator[pb.PutWeightsRequest]:
        yield pb.PutWeightsRequest(header=header(offset=3 * MIB))
        yield pb.PutWeightsRequest(data=bytes(len(DATA) - 3 * MIB))

    await broken_off(a, tmp_path, 3 * MIB)
    await found(a)
    code, why, details = await refused(a.stub.PutWeights(requests(), metadata=a.metadata))
    assert (code, why) == (Code.INVALID_ARGUMENT, "INVALID_UPDATE")
    assert "digest" in details
    assert parts(tmp_path) == []
    assert await found(a) == 0


async def test_only_the_latest_broken_upload_of_each_is_kept(start, join, tmp_path, monkeypatch):
    """And of no more participants than stated: the disk is not everybody's."""
    monkeypatch.setattr(uploads, "MAX_BROKEN", 1)
    coordinator = await start(rounds={"min_participants": 2})
    a, b = join(coordinator, "a"), join(coordinator, "b")
    await asyncio.gather(a.rendezvous(), b.rendezvous())
    await a.until(pb.ROUND, 0)
    await broken_off(a, tmp_path, 2 * MIB)
    assert await found(a) == 2 * MIB
    await broken_off(b, tmp_path, 3 * MIB)
    assert await found(b) == 3 * MIB
    assert len(parts(tmp_path)) == 1
    assert await found(a) == 0


async def begun_again(start: Any, join: Any, tmp_path: Path) -> tuple[Any, Member]:
    """A coordinator whose predecessor has received 3 MiB of an upload of a, and a."""
    coordinator = await start()
    a = join(coordinator, "a")
    await in_round(a)
    await broken_off(a, tmp_path, 3 * MIB)
    await coordinator.stop()
    coordinator = await start()
    a = join(coordinator, "a")
    await a.heartbeat()
    return coordinator, a


class Gate:
    """Holds a thread that enters until it is opened."""

    def __init__(self) -> None:
        self._is_entered, self._is_open = threading.Event(), threading.Event()

    def enter(self) -> None:
        self._is_entered.set()
        assert self._is_open.wait(PATIENCE_S)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._is_entered.wait, PATIENCE_S)

    def open(self) -> None:
        self._is_open.set()


async def test_what_is_read_again_is_not_lost_with_who_asked(start, join, tmp_path, monkeypatch):
    """A question that is given up leaves its answer to the next one."""
    coordinator, a = await begun_again(start, join, tmp_path)
    gate, pick_up = Gate(), Reception.pick_up

    def gated(self: Reception, *args: Any) -> bool:
        gate.enter()
        return pick_up(self, *args)

    monkeypatch.setattr(Reception, "pick_up", gated)
    announced = Announced(0, len(DATA), digest(DATA).hex())
    uploads = coordinator._server.uploads
    asked = [asyncio.ensure_future(uploads.find_unfinished("a", announced)) for _ in range(2)]
    await gate.entered()
    asked[0].cancel()
    gate.open()
    assert await asked[1] == 3 * MIB - MIB + HEADER_BYTES
    await asyncio.wait(asked[:1])
    offset = await found(a)
    assert offset == 2 * MIB + HEADER_BYTES
    assert (await (await put(a, offset))).ref.digest == digest(DATA)


async def test_no_place_is_held_while_a_part_is_read_again(start, join, tmp_path, monkeypatch):
    """It may be gigabytes, and others have their chunks to send."""
    coordinator, a = await begun_again(start, join, tmp_path)
    gate, pick_up = Gate(), Reception.pick_up

    def gated(self: Reception, *args: Any) -> bool:
        gate.enter()
        return pick_up(self, *args)

    monkeypatch.setattr(Reception, "pick_up", gated)
    asked = asyncio.ensure_future(found(a))
    await gate.entered()

    async def requests() -> AsyncIterator[pb.PutWeightsRequest]:
        for at in range(0, len(DATA), MIB):
            head = None if at else header()
            yield pb.PutWeightsRequest(header=head, data=DATA[at : at + MIB])

    uploading = a.stub.PutWeights(requests(), metadata=a.metadata)
    uploads = coordinator._server.uploads
    await until(lambda: "a" in uploads.receiving)
    num_free: list[int] = []
    for _ in range(5):
        await a.heartbeat()
        num_free.append(uploads._places.fast._num_free)
    gate.open()
    assert set(num_free) == {streams.NUM_BATCHES}
    await asked
    assert (await uploading).ref.digest == digest(DATA)


async def test_what_cannot_be_gone_on_with_is_not_left_open(start, join, tmp_path, monkeypatch):
    _, a = await begun_again(start, join, tmp_path)

    def fail(self: FileUnfinished, size: int) -> None:
        raise StoreUnavailable("no")

    monkeypatch.setattr(FileUnfinished, "go_on", fail)
    code, _, _ = await refused(found(a))
    assert code == Code.UNAVAILABLE
    assert parts(tmp_path) == []
    assert await found(a) == 0


async def test_a_commit_outlives_its_line(start, join, monkeypatch):
    """What was whole when the line broke is not sent again."""
    coordinator = await start()
    a = join(coordinator, "a")
    await in_round(a)
    gate, complete = Gate(), Reception.complete
    completed: list[StoredWeights] = []

    def gated(self: Reception) -> StoredWeights:
        completed.append(complete(self))
        gate.enter()
        return completed[-1]

    monkeypatch.setattr(Reception, "complete", gated)
    call = await put(a)
    await gate.entered()
    coordinator._server.uploads.receiving["a"].cancel()
    gate.open()
    await refused(call)
    assert await found(a) == len(DATA)
    ref = (await (await put(a, len(DATA)))).ref
    assert [measured.ref.key for measured in completed] == [ref.key]
    await a.end(ref)


async def test_a_damaged_part_is_not_the_senders_fault(start, join, tmp_path):
    """What a disk has lost is asked for again, from the beginning."""
    coordinator = await start()
    a = join(coordinator, "a")
    await in_round(a)
    await broken_off(a, tmp_path, 3 * MIB)
    await coordinator.stop()
    with parts(tmp_path)[0].open("r+b") as part:
        part.seek(MIB)
        part.write(bytes(4096))
    a = join(await start(), "a")
    await a.heartbeat()
    code, why, _ = await refused(await put(a, await found(a)))
    assert (code, why) == (Code.FAILED_PRECONDITION, "UPLOAD_MISSING")
    assert parts(tmp_path) == []
    await a.end((await (await put(a))).ref)


async def inside(member: Member, round_: int) -> None:
    """Hand in an update that travels inside its reference."""
    data = npy(np.ones(10, dtype=np.float32))
    key = f"{round_}/{member.participant_id}"
    ref = pb.WeightsRef(key=key, size_bytes=len(data), digest=digest(data), data=data)
    await member.end(ref, round_=round_)


async def test_what_is_kept_goes_with_its_round(start, join, tmp_path):
    """Whatever is uploaded next, and at the end of the process."""
    coordinator = await start(rounds={"rounds": 3})
    a = join(coordinator, "a")
    await in_round(a)
    await broken_off(a, tmp_path, 3 * MIB)
    assert await found(a) == 3 * MIB
    await inside(a, 0)
    await a.until(pb.ROUND, 1)
    assert len(parts(tmp_path)) == 1
    await inside(a, 1)
    await until(lambda: parts(tmp_path) == [])


async def test_what_is_kept_of_a_round_that_is_over_ends_with_the_process(start, join, tmp_path):
    coordinator = await start(rounds={"rounds": 3})
    a = join(coordinator, "a")
    await in_round(a)
    await broken_off(a, tmp_path, 3 * MIB)
    assert await found(a) == 3 * MIB
    await inside(a, 0)
    await a.until(pb.ROUND, 1)
    await coordinator.stop()
    assert parts(tmp_path) == []


async def test_what_a_predecessor_has_received_is_swept_when_its_round_is_over(
    start, join, tmp_path
):
    """Nobody asks for it any more. What came in the meantime is left alone."""
    _, a = await begun_again(start, join, tmp_path)
    assert len(parts(tmp_path)) == 1
    await inside(a, 0)
    await a.until(pb.ROUND, 1)
    assert len(parts(tmp_path)) == 1
    await inside(a, 1)
    await until(lambda: parts(tmp_path) == [])


async def test_a_commit_leaves_a_newer_upload_alone(start, join, tmp_path, monkeypatch):
    """One that has begun while it went on, and has broken off already."""
    coordinator = await start()
    a = join(coordinator, "a")
    await in_round(a)
    gate, complete = Gate(), Reception.complete

    def gated(self: Reception) -> StoredWeights:
        gate.enter()
        return complete(self)

    monkeypatch.setattr(Reception, "complete", gated)
    first = await put(a)
    await gate.entered()
    newer = Announced(0, len(DATA), "ab" * 16)
    uploads = coordinator._server.uploads
    reception = uploads._new_reception("a", "0/a", newer)
    reception.flush([DATA[:MIB]])
    await uploads._keep_broken("a", reception)
    gate.open()
    await first
    assert await found(a, digest=bytes.fromhex(newer.digest)) == MIB


@pytest.mark.e2e
async def test_an_upload_goes_on_after_kill_9(tmp_path):
    """The next coordinator has what the one before has written."""
    process = CoordinatorProcess(tmp_path, {"rounds.rounds": 1})
    await process.start()
    a = Member(process.port, "a")
    try:
        await in_round(a)
        await put(a, 0, 3 * MIB)
        await until(lambda: any(p.stat().st_size >= 3 * MIB for p in parts(tmp_path)))
        await process.kill()
        await process.start()
        await a.close()
        a = Member(process.port, "a")
        await a.heartbeat()
        offset = await found(a)
        assert 2 * MIB <= offset <= 3 * MIB, "to the last whole chunk"
        ref = (await (await put(a, offset))).ref
        await a.end(ref)
        await a.until(pb.FINISHED, 0)
        assert await a.download("1/global") == DATA
        assert parts(tmp_path) == []
    finally:
        await a.close()
        await process.end()


# --- the participant's side ---


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with FaultProxy() as proxy:
        yield proxy


async def connected(proxy: FaultProxy, coordinator: Any) -> CoordinatorClient:
    proxy.upstream = coordinator.port
    client = CoordinatorClient(f"127.0.0.1:{proxy.port}", "a")
    await asyncio.to_thread(client.rendezvous)
    return client


async def connected_again(client: CoordinatorClient) -> None:
    """gRPC waits before it tries once more, and refuses at once until then."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await asyncio.to_thread(client.heartbeat, pb.TRAINING, 0)
            except Refused:
                await asyncio.sleep(0.05)  # a poll, not a race: it ends when it is so
            else:
                return


@pytest.mark.e2e
async def test_a_participant_goes_on_after_kill_9(tmp_path, monkeypatch):
    """Its next attempt begins where the coordinator before had it."""
    process = CoordinatorProcess(tmp_path, {"rounds.rounds": 1})
    await process.start()
    client = CoordinatorClient(f"127.0.0.1:{process.port}", "a")
    loop, chunks = asyncio.get_running_loop(), outgoing.Upload.chunks
    offsets: list[int] = []

    def killing(self: outgoing.Upload, offset: int, size: int) -> Iterator[bytes]:
        offsets.append(offset)
        for number, chunk in enumerate(chunks(self, offset, size)):
            if number == 20 and len(offsets) == 1:
                asyncio.run_coroutine_threadsafe(written_and_killed(), loop).result(PATIENCE_S)
            yield chunk

    async def written_and_killed() -> None:
        await until(lambda: any(p.stat().st_size >= 4 * MIB for p in parts(tmp_path)))
        await process.kill()

    monkeypatch.setattr(outgoing.Upload, "chunks", killing)
    try:
        await asyncio.to_thread(client.rendezvous)
        with pytest.raises(Refused):
            await asyncio.to_thread(client.put_weights, 0, LARGE)
        await process.died()  # the client may hear of it first
        await process.start()
        await connected_again(client)
        ref = await asyncio.to_thread(client.put_weights, 0, LARGE)
        await asyncio.to_thread(client.end_round, 0, ref, 1, "")
        assert len(offsets) == 2
        assert offsets[1] > 2 * MIB
    finally:
        await asyncio.to_thread(client.close)
        await process.end()


async def test_a_failed_question_does_not_begin_an_upload_again(start, proxy, monkeypatch):
    """What the coordinator has is not known then, so the next attempt asks once more."""
    coordinator = await start()
    client = await connected(proxy, coordinator)
    await until(lambda: coordinator.driver.session.phase is Phase.COLLECTING)
    is_away = True
    find_unfinished, chunks = uploads.Uploads.find_unfinished, outgoing.Upload.chunks
    offsets: list[int] = []

    async def failing(self: uploads.Uploads, *args: Any) -> int:
        if is_away:
            raise StoreUnavailable("the disk is away")
        return await find_unfinished(self, *args)

    def cut_once(self: outgoing.Upload, offset: int, size: int) -> Iterator[bytes]:
        offsets.append(offset)
        for number, chunk in enumerate(chunks(self, offset, size)):
            if number == 20 and len(offsets) == 1:
                proxy.cut()
            yield chunk

    monkeypatch.setattr(uploads.Uploads, "find_unfinished", failing)
    monkeypatch.setattr(outgoing.Upload, "chunks", cut_once)
    for _ in range(2):
        with pytest.raises(Refused):
            await asyncio.to_thread(client.put_weights, 0, LARGE)
        await connected_again(client)
    is_away = False
    await asyncio.to_thread(client.put_weights, 0, LARGE)
    await asyncio.to_thread(client.close)
    assert offsets[0] == 0
    assert len(offsets) == 2
    assert offsets[1] > 0


LARGE = np.random.default_rng(6).standard_normal(24 * MIB // 4, dtype=np.float32)


# What a cut costs at most: what gRPC and the kernels have taken, and nobody has written.
LOST_BYTES = 8 * MIB


async def put_again(client: CoordinatorClient, *update: Any) -> pb.WeightsRef:
    """As an agent does: the question where it can go on may still go over the line that dies, and
    is asked again by the next attempt."""
    died = (Code.UNAVAILABLE, Code.CANCELLED, Code.UNKNOWN)
    for _ in range(5):
        try:
            return await asyncio.to_thread(client.put_weights, *update)
        except Refused as refused:
            if refused.reason or refused.status not in died:
                raise
        await connected_again(client)
    raise AssertionError("one cut is no reason to fail so often")


@pytest.mark.parametrize("encoding", ["plain", "int8"])
async def test_a_participant_goes_on_after_a_cut(start, join, proxy, monkeypatch, encoding):
    """A line that is cut near the end costs little more than what was on its way."""
    large = LARGE if encoding == "plain" else np.concatenate([LARGE, LARGE, -LARGE])
    coordinator = await start(server={"update_encoding": encoding}, rounds={"rounds": 2})
    client = await connected(proxy, coordinator)
    a = join(coordinator, "a")
    await a.until(pb.ROUND, 0)
    await a.hand_in(np.zeros_like(large))
    await a.until(pb.ROUND, 1)
    work = await asyncio.to_thread(client.start_round)
    base = await asyncio.to_thread(client.get_weights, work.model)

    chunks = outgoing.Upload.chunks
    cut_at = 20 * MIB if encoding == "plain" else 15 * MIB
    cuts: list[int] = []

    def cut_once(self: outgoing.Upload, offset: int, size: int) -> Iterator[bytes]:
        sent = 0
        for chunk in chunks(self, offset, size):
            if sent >= cut_at and not cuts:
                cuts.append(sent)
                proxy.cut()
            yield chunk
            sent += len(chunk)

    monkeypatch.setattr(outgoing.Upload, "chunks", cut_once)
    before = proxy.num_bytes_up
    ref = await put_again(client, 1, large, None, base, work.encoding)
    await asyncio.to_thread(client.end_round, 1, ref, 1, "")
    await asyncio.to_thread(client.close)
    assert cuts
    size = large.nbytes if encoding == "plain" else large.nbytes // 4
    # From the beginning again it would be cut_at more.
    assert size <= proxy.num_bytes_up - before < size + LOST_BYTES
    with coordinator.store.open(ref.key) as reader:
        stored = reader.read(0, reader.size)
    assert digest(stored) == ref.digest
    if encoding == "plain":
        assert stored == npy(large)
    else:
        decoded = np.frombuffer(stored[-large.nbytes :], dtype=np.float32)
        assert np.abs(decoded - large).max() <= np.abs(large).max() / 254 * 1.001


@pytest.mark.parametrize(("encoding", "ratio"), [("float16", 2), ("int8", 4)])
async def test_an_encoded_update_is_fewer_bytes(start, join, proxy, encoding, ratio):
    """It is stored decoded, and what is small, of another dtype or not finite travels as it is."""
    coordinator = await start(server={"update_encoding": encoding}, rounds={"rounds": 2})
    client = await connected(proxy, coordinator)
    a = join(coordinator, "a")
    await a.until(pb.ROUND, 0)
    await a.hand_in(VECTOR)
    await a.until(pb.ROUND, 1)
    work = await asyncio.to_thread(client.start_round)
    base = await asyncio.to_thread(client.get_weights, work.model)
    before = proxy.num_bytes_up
    update = base * np.float32(1.01)
    ref = await asyncio.to_thread(client.put_weights, 1, update, None, base, work.encoding)
    assert proxy.num_bytes_up - before < update.nbytes / ratio * 1.1
    assert ref.size_bytes == len(DATA)
    assert ref.encoding == work.encoding, "how it has travelled"
    bad = update.copy()
    bad[70_000] = np.nan
    refused_ref = await asyncio.to_thread(client.put_weights, 1, bad, None, base, work.encoding)
    assert refused_ref.digest == digest(npy(bad))
    assert refused_ref.encoding == pb.PLAIN
    with pytest.raises(Refused, match="70000"):
        await asyncio.to_thread(client.end_round, 1, refused_ref, 1, "")
    ref = await asyncio.to_thread(client.put_weights, 1, update, None, base, work.encoding)
    await asyncio.to_thread(client.end_round, 1, ref, 1, "")
    await asyncio.to_thread(client.close)


@pytest.mark.parametrize(("dtype", "encoding"), [(np.float32, pb.INT8), (np.float64, pb.PLAIN)])
async def test_an_encoding_is_asked_for_where_there_is_one(start, join, dtype, encoding):
    """Not of first weights, and only of a model that is float32."""
    coordinator = await start(server={"update_encoding": "int8"}, rounds={"rounds": 2})
    a = join(coordinator, "a")
    await in_round(a)
    assert (await a.start()).encoding == pb.PLAIN
    await a.hand_in(np.zeros(10, dtype))
    await a.until(pb.ROUND, 1)
    assert (await a.start()).encoding == encoding


async def test_what_cannot_be_decoded_is_refused(start, join):
    """Unknown encodings, tiles that are none, and what there is no model for."""
    coordinator = await start(rounds={"rounds": 2})
    a = join(coordinator, "a")
    await in_round(a)
    code, why, _ = await refused(await put(a, end=MIB, encoding=pb.INT8))
    assert (code, why) == (Code.INVALID_ARGUMENT, "INVALID_UPDATE")
    await a.hand_in(VECTOR)
    await a.until(pb.ROUND, 1)
    no_tiles = DATA[:HEADER_BYTES] + b"\xff" * MIB  # a scale that is no number
    too_many = DATA[:HEADER_BYTES] + bytes(2 * MIB)  # of int8
    other = npy(VECTOR.astype(np.float64))[:HEADER_BYTES] + bytes(MIB)

    async def requests(
        encoding: "pb.Encoding.ValueType", data: bytes
    ) -> AsyncIterator[pb.PutWeightsRequest]:
        yield pb.PutWeightsRequest(header=header(round=1, encoding=encoding), data=data)
        await asyncio.Event().wait()  # it is refused without waiting for the rest

    for encoding, data, message in (
        (pb.INT8, no_tiles, "scale"),
        (pb.FLOAT16, no_tiles, "scale"),
        (pb.INT8, too_many, "after its last tile"),
        (pb.INT8, other, "must be float32"),
        (7, DATA[:MIB], "no encoding"),
    ):
        call = a.stub.PutWeights(requests(encoding, data), metadata=a.metadata)
        code, why, details = await refused(call)
        assert (code, why) == (Code.INVALID_ARGUMENT, "INVALID_UPDATE")
        assert message in details


# --- downloads ---


async def test_a_block_is_read_once_for_those_who_begin_one_after_another(start, join, monkeypatch):
    """However far the first of them is by now; and what nobody came to is not read."""
    coordinator, _ = await with_model(start, join, LARGE)
    reads: list[int] = []
    read_chunks = downloads._read_chunks

    def counted(store: WeightsStore, key: str, offset: int, length: int) -> list[bytes]:
        reads.append(offset // downloads.BLOCK_BYTES)
        return read_chunks(store, key, offset, length)

    monkeypatch.setattr(downloads, "_read_chunks", counted)
    monkeypatch.setattr(places, "SLOW_S", NEVER_S)
    sender = downloads.Downloads(coordinator.driver, coordinator.store)

    class Enough(Exception):
        pass

    async def begin() -> bytes:
        chunks: list[bytes] = []

        async def write(_: WeightsRef, chunk: bytes) -> None:
            chunks.append(chunk)
            raise Enough

        with pytest.raises(Enough):
            await sender.send("1/global", 0, write, at_once)
        return chunks[0]

    beginning = await begin()
    assert reads == [0]
    received = []

    async def write(_: WeightsRef, chunk: bytes) -> None:
        received.append(chunk)
        assert await begin() == beginning

    await sender.send("1/global", 0, write, at_once)
    assert b"".join(received) == npy(LARGE)
    assert sorted(reads) == list(range(-(-len(npy(LARGE)) // downloads.BLOCK_BYTES)))


async def at_once(_: int) -> None:
    """A turn that need not be waited for."""


async def with_model(start: Any, join: Any, vector: np.ndarray[Any, Any]) -> tuple[Any, Member]:
    """A coordinator in round 1, whose model is this one, and a."""
    coordinator = await start(rounds={"rounds": 2})
    a = join(coordinator, "a")
    await in_round(a)
    await a.hand_in(vector)
    await a.until(pb.ROUND, 1)
    return coordinator, a


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
def slow_down(monkeypatch) -> Callable[[], Awaitable[None]]:
    """Makes the line of the transfer under way a slow one, where there is no place for those. One
    chunk of 64 KiB shows that a line is fast."""
    monkeypatch.setattr(places, "SLOW_S", NEVER_S)
    monkeypatch.setattr(places, "CHUNK_BYTES", 64 << 10)
    monkeypatch.setattr(downloads, "NUM_SLOW_CHUNKS", 0)
    monkeypatch.setattr(uploads, "NUM_SLOW_BATCHES", 0)
    seen: list[tuple[places.Line, places.Place]] = []
    look_later = places.Line._look_later

    def noted(self: places.Line, place: places.Place | None) -> None:
        if place is not None:
            seen.append((self, place))
        look_later(self, place)

    monkeypatch.setattr(places.Line, "_look_later", noted)

    async def slow_down() -> None:
        # While a chunk passes that has a place.
        await until(lambda: seen and seen[-1][0]._timer is not None)
        line, place = seen[-1]
        assert line._timer is not None
        line._timer.cancel()
        monkeypatch.setattr(places, "SLOW_S", 0.0)
        line._look(place)
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


async def test_participants_with_slow_lines_do_not_wait_for_each_other(start, proxy, monkeypatch):
    """Those for which no slow place is left go on in small messages."""
    monkeypatch.setattr(uploads, "NUM_SLOW_BATCHES", 1)
    names = [f"site-{number}" for number in range(4)]
    coordinator = await start(rounds={"min_participants": len(names)})
    proxy.upstream = coordinator.port
    clients = [CoordinatorClient(f"127.0.0.1:{proxy.port}", name) for name in names]
    threads = ThreadPoolExecutor(len(clients))  # the loop's are few
    loop = asyncio.get_running_loop()
    try:
        for client in clients:
            await loop.run_in_executor(threads, client.rendezvous)
        await until(lambda: coordinator.driver.session.phase is Phase.COLLECTING)
        proxy.throttle(2e6)  # half a second for a large message
        refs = await asyncio.gather(
            *(loop.run_in_executor(threads, client.put_weights, 0, VECTOR) for client in clients)
        )
        assert [ref.digest for ref in refs] == [digest(DATA)] * len(clients)
        assert 1 <= coordinator.counters["LINE_SLOW"] < len(clients)
    finally:
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


# --- bounds ---


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("size", [10, 300_000])
async def test_an_update_that_is_too_far_away_is_refused(start, join, size, dtype):
    """Inside its reference or in a stream, it is told its norm and the limit."""
    coordinator = await start(server={"max_update_norm": 5.0}, rounds={"rounds": 2})
    a = join(coordinator, "a")
    await in_round(a)
    await a.hand_in(np.full(size, 100, dtype))  # nothing to be far away from
    await a.until(pb.ROUND, 1)
    far, near = np.full(size, 100, dtype), np.full(size, 100, dtype)
    far[[0, -1]] += np.array([6, 8], dtype)
    near[[0, -1]] += np.array([3, 4], dtype)

    async def inside(data: bytes) -> Any:
        ref = pb.WeightsRef(key="1/a", size_bytes=len(data), digest=digest(data), data=data)
        return await a.end(ref, round_=1)

    calls = [a.upload(far, 1)] + ([inside(npy(far))] if size == 10 else [])
    for call in calls:
        code, why, details = await refused(call)
        assert (code, why) == (Code.INVALID_ARGUMENT, "INVALID_UPDATE")
        assert "is 10 away" in details
        assert "at most 5 " in details
    await a.hand_in(near, round_=1)


async def test_a_size_that_no_update_has_is_refused_before_its_bytes(start, join):
    coordinator = await start(rounds={"rounds": 2})
    a = join(coordinator, "a")
    await in_round(a)
    await a.hand_in(VECTOR)
    await a.until(pb.ROUND, 1)
    for size in (0, 1000, VECTOR.nbytes, VECTOR.nbytes + 5000, 2 * VECTOR.nbytes):
        call = await put(a, end=MIB, round=1, size_bytes=size)  # it would never end
        code, why, _ = await refused(call)
        assert (code, why) == (Code.INVALID_ARGUMENT, "INVALID_UPDATE")
