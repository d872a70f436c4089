"""Updates that come inside the call that names them."""

import asyncio
import threading

import grpc
import numpy as np
import pytest

from support.wire import digest, npy
from xain_coordinator.stores.files import FileStore
from xain_proto.fl import coordinator_pb2 as pb

PATIENCE_S = 60.0


def inside(vector: object) -> pb.WeightsRef:
    data = npy(vector)
    return pb.WeightsRef(size_bytes=len(data), digest=digest(data), data=data)


def bundles(coordinator) -> list[str]:
    return [key for key in coordinator.store.keys("0/") if key.startswith("0/bundle.")]


async def test_one_that_is_given_up_is_there_when_it_comes_again(start, join, monkeypatch):
    """However often: it is written once."""
    coordinator = await start(rounds={"min_participants": 2})
    a, b = join(coordinator, "a"), join(coordinator, "b")
    await a.rendezvous()
    await b.rendezvous()
    await a.until(pb.ROUND, 0)
    begun, go, put = threading.Event(), threading.Event(), FileStore.put

    def wait(store, objects):
        begun.set()
        assert go.wait(PATIENCE_S)
        put(store, objects)

    monkeypatch.setattr(FileStore, "put", wait)
    ref = inside([1.0, 2.0])
    given_up = asyncio.ensure_future(a.end(ref))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    again = asyncio.ensure_future(a.end(ref))
    go.set()
    await again
    await b.end(inside([3.0, 4.0]))
    assert len(bundles(coordinator)) == 2


async def test_a_large_one_comes_in_chunks(start, join):
    """64 KiB and a header are what there is room for."""
    coordinator = await start()
    a = join(coordinator, "a")
    await a.rendezvous()
    await a.until(pb.ROUND, 0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await a.end(inside(np.zeros(20_000, np.float32)))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger ones by PutWeights" in refused.value.details()
    assert bundles(coordinator) == []
    await a.end(inside(np.zeros(16_384, np.float32)))
