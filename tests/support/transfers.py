"""Large updates on their way between a real coordinator and members or participants."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from support.fault_proxy import FaultProxy
from support.waiting import until
from support.wire import Member, digest, npy
from xain_participant.wire.client import CoordinatorClient
from xain_wire.fl import coordinator_pb2 as pb

MIB = 1 << 20
PATIENCE_S = 60.0

# 6 MiB and a little, so that the last chunk and the last tile are not whole.
VECTOR = np.random.default_rng(5).standard_normal(6 * MIB // 4 + 1000, dtype=np.float32)
DATA = npy(VECTOR)
HEADER_BYTES = len(DATA) - VECTOR.nbytes

LARGE = np.random.default_rng(6).standard_normal(24 * MIB // 4, dtype=np.float32)


async def join_round(member: Member, round_: int = 0) -> None:
    await member.rendezvous()
    await member.until(pb.ROUND, round_)


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


def parts(folder: Path) -> list[Path]:
    """Files of uploads that may go on; parts of models have no label before their number."""
    return list(folder.glob("weights/.incoming/*.*.part"))


async def written(folder: Path, num_bytes: int) -> None:
    """Wait until an upload has so many bytes on the disk."""
    await until(lambda: any(part.stat().st_size >= num_bytes for part in parts(folder)))


async def connected(proxy: FaultProxy, coordinator: Any) -> CoordinatorClient:
    """A participant that has come to this coordinator through the proxy."""
    proxy.upstream = coordinator.port
    client = CoordinatorClient(f"127.0.0.1:{proxy.port}", "a")
    await asyncio.to_thread(client.rendezvous)
    return client


async def with_model(start: Any, join: Any, vector: np.ndarray[Any, Any]) -> tuple[Any, Member]:
    """A coordinator in round 1, whose model is this one, and a."""
    coordinator = await start(rounds={"rounds": 2})
    a = join(coordinator, "a")
    await join_round(a)
    await a.hand_in(vector)
    await a.until(pb.ROUND, 1)
    return coordinator, a
