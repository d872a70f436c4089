"""Uploads that break off, and go on from what the coordinator has written."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from integration.conftest import InRound
from support.transfers import (
    DATA,
    HEADER_BYTES,
    MIB,
    PATIENCE_S,
    found,
    header,
    join_round,
    parts,
    put,
    written,
)
from support.waiting import until
from support.wire import Code, Member, assert_refused, digest, inside, refused
from xain_coordinator.core.vocabulary.keys import attempt_key
from xain_coordinator.core.vocabulary.replies import Ticket
from xain_coordinator.core.vocabulary.values import StoredWeights
from xain_coordinator.updates.measured_upload import Announced, Header, MeasuredUpload
from xain_coordinator.updates.upload_stream import UploadStream
from xain_wire.fl import coordinator_pb2 as pb


async def broken_off(member: Member, folder: Path, end: int) -> None:
    """An upload whose connection is lost when all that was sent of it has been written."""
    call = await put(member, 0, end)
    await written(folder, end)
    call.cancel()


async def test_an_upload_that_broke_off_goes_on(in_round, tmp_path):
    """Only what had not been written is sent again, and the object is the same to the bit."""
    coordinator, a = await in_round("a")
    await broken_off(a, tmp_path, 3 * MIB)
    offset = await found(a)
    assert offset == 3 * MIB
    ref = (await (await put(a, offset))).ref
    assert (ref.size_bytes, ref.digest) == (len(DATA), digest(DATA))
    await a.end(ref)
    with coordinator.store.open(ref.key) as reader:
        assert reader.read(0, reader.size) == DATA
    assert parts(tmp_path) == []


@pytest.mark.parametrize("offset", [1, 3 * MIB - 1, 3 * MIB + 1, len(DATA), 1 << 60])
async def test_an_upload_goes_on_nowhere_else(in_round, tmp_path, offset):
    """An offset that was not given out is refused, and does not hurt what is there."""
    _, a, b = await in_round("a", "b")
    await broken_off(a, tmp_path, 3 * MIB)
    assert await found(a) == 3 * MIB
    for member in (a, b):  # b has not sent anything
        await assert_refused(
            await put(member, offset, offset + 1), Code.FAILED_PRECONDITION, "UPLOAD_MISSING"
        )
    assert await found(b) == 0
    assert await found(a, size_bytes=len(DATA) + 4) == 0
    assert await found(a) == 3 * MIB


OTHER = bytes(16)  # the digest of an update that is as large as DATA


async def other_goes_on(member: Member, offset: int) -> tuple[Code, str]:
    """Why the other update cannot go on at this offset."""

    async def requests() -> AsyncIterator[pb.PutWeightsRequest]:
        yield pb.PutWeightsRequest(header=header(offset=offset, digest=OTHER))

    code, why, _ = await refused(member.stub.PutWeights(requests(), metadata=member.metadata))
    return code, why


async def test_an_upload_does_not_go_on_as_another_update(in_round, start, join, tmp_path):
    """The bytes of one update are no part of another one of the same size, before a restart of the
    coordinator and after it. The sender begins again, and nothing counts against it."""
    coordinator, a = await in_round("a")
    await broken_off(a, tmp_path, 3 * MIB)
    assert await found(a) == 3 * MIB
    assert await other_goes_on(a, 3 * MIB) == (Code.FAILED_PRECONDITION, "UPLOAD_MISSING")
    assert await found(a, digest=OTHER) == 0
    await coordinator.stop()
    coordinator = await start()
    a = join(coordinator, "a")
    await a.heartbeat()
    assert await found(a, digest=OTHER) == 0
    offset = await found(a)
    assert offset == 2 * MIB + HEADER_BYTES, "to the last whole chunk"
    assert await other_goes_on(a, offset) == (Code.FAILED_PRECONDITION, "UPLOAD_MISSING")
    assert coordinator.driver.session.selection.faults == {}
    await a.end((await (await put(a, await found(a)))).ref)


async def test_upload_continued_with_other_bytes_is_refused(start, join, tmp_path):
    """The digest is that of the whole object, whichever process has sent which part."""
    a = join(await start(), "a")
    await join_round(a)

    async def requests() -> AsyncIterator[pb.PutWeightsRequest]:
        yield pb.PutWeightsRequest(header=header(offset=3 * MIB))
        yield pb.PutWeightsRequest(data=bytes(len(DATA) - 3 * MIB))

    await broken_off(a, tmp_path, 3 * MIB)
    await found(a)
    await assert_refused(
        a.stub.PutWeights(requests(), metadata=a.metadata),
        Code.INVALID_ARGUMENT,
        "INVALID_UPDATE",
        "digest",
    )
    assert parts(tmp_path) == []
    assert await found(a) == 0


async def test_only_the_latest_broken_upload_of_each_is_kept(in_round, tmp_path):
    """Parts are kept of a bounded number of participants, and of no other anything in memory."""
    coordinator, a, b = await in_round("a", "b")
    coordinator._server.slots.max_broken = 1
    await broken_off(a, tmp_path, 2 * MIB)
    assert await found(a) == 2 * MIB
    await broken_off(b, tmp_path, 3 * MIB)
    assert await found(b) == 3 * MIB
    assert len(parts(tmp_path)) == 1
    assert list(coordinator._server.slots.by_name) == ["b"]
    assert await found(a) == 0


async def begun_again(
    in_round: InRound, start: Any, join: Any, tmp_path: Path
) -> tuple[Any, Member]:
    """A coordinator whose predecessor has received 3 MiB of an upload of a, and a."""
    coordinator, a = await in_round("a")
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


def held(monkeypatch: pytest.MonkeyPatch, method: str) -> Gate:
    """A gate before this method of every MeasuredUpload."""
    gate, original = Gate(), getattr(MeasuredUpload, method)

    def gated(self: MeasuredUpload, *args: Any) -> Any:
        gate.enter()
        return original(self, *args)

    monkeypatch.setattr(MeasuredUpload, method, gated)
    return gate


async def test_no_message_is_read_while_a_part_is_read_again(
    in_round, start, join, tmp_path, monkeypatch
):
    """The part may be of gigabytes, and a message would be held in memory meanwhile."""
    coordinator, a = await begun_again(in_round, start, join, tmp_path)
    gate = held(monkeypatch, "pick_up")
    asked = asyncio.ensure_future(found(a))
    await gate.entered()
    read = []
    read_header = UploadStream.header

    async def noted(self: UploadStream) -> Header:
        read.append(self)
        return await read_header(self)

    monkeypatch.setattr(UploadStream, "header", noted)

    async def requests() -> AsyncIterator[pb.PutWeightsRequest]:
        for at in range(0, len(DATA), MIB):
            head = None if at else header()
            yield pb.PutWeightsRequest(header=head, data=DATA[at : at + MIB])

    uploading = a.stub.PutWeights(requests(), metadata=a.metadata)
    slot = coordinator._server.slots.by_name["a"]
    await until(lambda: slot.upload is not None)
    for _ in range(5):
        await a.heartbeat()
        assert read == []
    gate.open()
    await asked
    assert (await uploading).ref.digest == digest(DATA)
    assert len(read) == 1


async def test_commit_outlives_its_connection(in_round, monkeypatch):
    """An upload that was whole when the connection broke is not sent again."""
    coordinator, a = await in_round("a")
    gate, complete = Gate(), MeasuredUpload.complete
    completed = []

    def gated(self: MeasuredUpload) -> StoredWeights:
        completed.append(complete(self))
        gate.enter()
        return completed[-1]

    monkeypatch.setattr(MeasuredUpload, "complete", gated)
    call = await put(a)
    await gate.entered()
    coordinator._server.slots.by_name["a"].upload.cancel()
    gate.open()
    await refused(call)
    assert await found(a) == len(DATA)
    ref = (await (await put(a, len(DATA)))).ref
    assert [measured.ref.key for measured in completed] == [ref.key]
    await a.end(ref)


async def test_a_damaged_part_is_not_the_senders_fault(in_round, start, join, tmp_path):
    """A part that the disk has damaged is asked for again, from the beginning."""
    coordinator, a = await in_round("a")
    await broken_off(a, tmp_path, 3 * MIB)
    await coordinator.stop()
    with parts(tmp_path)[0].open("r+b") as part:
        part.seek(MIB)
        part.write(bytes(4096))
    a = join(await start(), "a")
    await a.heartbeat()
    await assert_refused(await put(a, await found(a)), Code.FAILED_PRECONDITION, "UPLOAD_MISSING")
    assert parts(tmp_path) == []
    await a.end((await (await put(a))).ref)


async def hand_in_inside(member: Member, round_: int) -> None:
    ref = inside(np.ones(10, dtype=np.float32), f"{round_}/{member.participant_id}")
    await member.end(ref, round_=round_)


async def kept_of_a_round_that_is_over(a: Member, folder: Path) -> None:
    await join_round(a)
    await broken_off(a, folder, 3 * MIB)
    assert await found(a) == 3 * MIB
    await hand_in_inside(a, 0)
    await a.until(pb.ROUND, 1)
    assert len(parts(folder)) == 1


async def test_broken_upload_is_dropped_with_its_round(start, join, tmp_path):
    """The part is dropped at the next upload, and at the end of the process."""
    coordinator = await start(rounds={"rounds": 3})
    a = join(coordinator, "a")
    await kept_of_a_round_that_is_over(a, tmp_path)
    await hand_in_inside(a, 1)
    await until(lambda: parts(tmp_path) == [])


async def test_part_of_an_earlier_process_is_removed_when_its_round_is_over(
    in_round, start, join, tmp_path
):
    """The part is not asked for any more. Newer parts are left alone."""
    _, a = await begun_again(in_round, start, join, tmp_path)
    assert len(parts(tmp_path)) == 1
    await hand_in_inside(a, 0)
    await a.until(pb.ROUND, 1)
    assert len(parts(tmp_path)) == 1
    await hand_in_inside(a, 1)
    await until(lambda: parts(tmp_path) == [])


async def test_a_commit_leaves_a_newer_upload_alone(in_round, tmp_path, monkeypatch):
    """One that has begun while it went on, and has broken off already."""
    coordinator, a = await in_round("a")
    gate = held(monkeypatch, "complete")
    first = await put(a)
    await gate.entered()
    newer = Announced(0, len(DATA), "ab" * 16)
    ticket = Ticket(attempt_key("0/a", "c" * 32), None, 1, is_slice=False)
    upload = coordinator._server.uploads._begin("a", ticket, newer)
    upload.write(DATA[:MIB])
    slots = coordinator._server.slots
    await slots.keep_broken(slots.by_name["a"], "a", upload)
    gate.open()
    await first
    assert await found(a, digest=bytes.fromhex(newer.digest)) == MIB


# --- the participant's side ---


async def silence() -> AsyncIterator[pb.PutWeightsRequest]:
    """No message, for ever."""
    await asyncio.Event().wait()
    yield pb.PutWeightsRequest()


async def test_uploads_at_a_time_are_bounded(in_round, tmp_path):
    """One more is refused, until another one has ended."""
    coordinator, a, b = await in_round("a", "b")
    coordinator._server.uploads.max_uploads = 1
    call = await put(a, 0, 3 * MIB)
    await written(tmp_path, 3 * MIB)
    # b sends nothing: gRPC's client takes a write to a call that is refused for an INTERNAL.
    silent = b.stub.PutWeights(silence(), metadata=b.metadata)
    await assert_refused(silent, Code.UNAVAILABLE, "UNAVAILABLE", "1 uploads are under way")
    call.cancel()
    assert await found(a) == 3 * MIB
    assert (await (await put(b))).ref.digest == digest(DATA)
