"""Peak memory of a whole coordinator, with few and with many large transfers at a time.

Uploads are those of participants, over fast lines and with the small messages of slow ones.
"""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from support.process import PATIENCE_S, CoordinatorProcess, Keep
from support.wire import Member, npy
from xain_participant.wire.client import CoordinatorClient
from xain_wire.fl import coordinator_pb2 as pb

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a peak is read from /proc")

MIB = 1 << 20
VECTOR = np.ones(32 * MIB // 4, dtype=np.float32)
DATA = npy(VECTOR)
FEW, MANY = 2, 12
# What 10 more uploads, or downloads, may add: a message each, a copy of it, and what gRPC lets come
# ahead, 256 KiB each.
MARGIN_MIB = 24


async def download(member: Member) -> None:
    """Download the model without keeping it."""
    request = pb.GetWeightsRequest(key="1/global")
    size = 0
    async for message in member.stub.GetWeights(request, metadata=member.metadata):
        size += len(message.data)
    assert size == len(DATA)


async def upload(coordinator: CoordinatorProcess, member: Member) -> pb.WeightsRef:
    assert member.participant_id is not None
    client = CoordinatorClient(f"127.0.0.1:{coordinator.port}", member.participant_id)
    try:
        return await asyncio.to_thread(client.put_weights, 0, VECTOR)
    finally:
        await asyncio.to_thread(client.close)


async def peaks(keep: Keep, folder: Path, number: int) -> tuple[int, int]:
    """Peaks in MiB, after so many uploads at a time, and after as many downloads."""
    settings = {
        "rounds.rounds": 2,
        "rounds.min_participants": MANY,
        "server.heartbeat_timeout_s": 2 * PATIENCE_S,  # they send none
    }
    coordinator = keep(CoordinatorProcess(folder, settings))
    await coordinator.start()
    async with asyncio.timeout(2 * PATIENCE_S):
        uploads = await after_uploads(coordinator, number)
        await coordinator.kill()
        await coordinator.start()  # a peak of its own
        members = [Member(coordinator.port, f"p{i}") for i in range(MANY)]
        for first in range(0, MANY, number):
            await asyncio.gather(*map(download, members[first : first + number]))
        downloads = coordinator.peak_mib()
        await asyncio.gather(*(member.close() for member in members))
        return uploads, downloads


async def after_uploads(coordinator: CoordinatorProcess, number: int) -> int:
    members = [Member(coordinator.port, f"p{i}") for i in range(MANY)]
    await asyncio.gather(*(member.rendezvous() for member in members))
    await members[0].until(pb.ROUND, 0)
    refs = []
    for first in range(0, MANY, number):
        some = members[first : first + number]
        refs += await asyncio.gather(*(upload(coordinator, one) for one in some))
    peak = coordinator.peak_mib()
    for member, ref in zip(members, refs, strict=True):
        await member.end(ref)
    await members[0].until(pb.ROUND, 1)
    await asyncio.gather(*(member.close() for member in members))
    return peak


async def test_many_transfers_take_hardly_more_than_few(keep, tmp_path):
    """The same bytes, twelve at a time or two."""
    few = await peaks(keep, tmp_path / "few", FEW)
    many = await peaks(keep, tmp_path / "many", MANY)
    assert many[0] - few[0] < MARGIN_MIB, f"uploads: {few[0]} and {many[0]} MiB"
    assert many[1] - few[1] < MARGIN_MIB, f"downloads: {few[1]} and {many[1]} MiB"
