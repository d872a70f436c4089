"""Weights that go past the coordinator: real agents, a real coordinator, a real object store."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from support.agents import ends_of
from support.logs import capture_logs
from support.s3_servers import SeaweedFS
from support.wire import digest, npy
from xain_coordinator.core.vocabulary.values import Phase
from xain_coordinator.server.calls.coordinator_service import CoordinatorService
from xain_foundation.net.sockets import free_ports
from xain_participant import Agent, Participant
from xain_participant.wire.direct import DirectTransfer
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.limits import MAX_INLINE_BYTES

SIZE = MAX_INLINE_BYTES  # float32, so four times what travels inside the calls


class Halves(Participant):
    """Goes half of the way to its number, which binary fractions do exactly."""

    def __init__(self, number: float) -> None:
        self.number = np.float32(number)

    def init_weights(self) -> Any:
        return np.zeros(SIZE, dtype=np.float32)

    def train_round(self, weights: Any, epochs: int, epoch_base: int) -> Any:
        return (weights + self.number) / 2, 1


def full(value: float) -> bytes:
    """A model of this value everywhere. Halves(1) and Halves(3) make 0, 1 and 1.5 of it."""
    return npy(np.full(SIZE, value, np.float32))


@pytest.fixture(scope="module")
def server() -> Iterator[SeaweedFS]:
    if (why := SeaweedFS.missing()) is not None:
        pytest.skip(why)  # says what is not installed
    with SeaweedFS() as server:
        yield server


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of transfers through the coordinator, by method."""
    counter = Counter()
    get, put = CoordinatorService.GetWeights, CoordinatorService.PutWeights

    async def counted_get(self: Any, request: Any, context: Any) -> None:
        counter["GetWeights"] += 1
        await get(self, request, context)

    async def counted_put(self: Any, requests: Any, context: Any) -> Any:
        counter["PutWeights"] += 1
        return await put(self, requests, context)

    monkeypatch.setattr(CoordinatorService, "GetWeights", counted_get)
    monkeypatch.setattr(CoordinatorService, "PutWeights", counted_put)
    return counter


@pytest.fixture
def direct() -> Iterator[DirectTransfer]:
    direct = DirectTransfer()
    yield direct
    direct.close()


async def start_on(server: SeaweedFS, start: Any, rounds: int, **storage: object) -> Any:
    bucket = await asyncio.to_thread(server.new_bucket)
    return await start(
        rounds={"rounds": rounds, "min_participants": 2}, storage=server.settings(bucket, **storage)
    )


async def train(coordinator: Any) -> None:
    """A session of two agents to its end."""
    target = f"127.0.0.1:{coordinator.port}"
    agents = [Agent(Halves(number), target, f"p{number}") for number in (1, 3)]
    assert await ends_of(agents) == [0, 0]
    session = coordinator.driver.session
    assert (session.phase, session.cause) == (Phase.FINISHED, "completed")


async def test_a_session_trains_past_the_coordinator(server, start, join, streams):
    """No weights go through the coordinator, not even the first ones."""
    coordinator = await start_on(server, start, rounds=3)
    await train(coordinator)
    assert streams == {}
    assert await join(coordinator, "reader").download("3/global") == full(1.5)


async def test_a_store_out_of_reach_is_gone_around(server, start, join, streams, caplog):
    """The store is behind a hospital's firewall. No log has the URLs that were offered in vain."""
    caplog.set_level(logging.DEBUG)
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    coordinator = await start_on(server, start, rounds=3, public_endpoint=f"http://{dead}")
    with capture_logs() as logs:
        await train(coordinator)
    assert streams["GetWeights"] >= 4  # in parts
    assert streams["PutWeights"] >= 6
    assert await join(coordinator, "reader").download("3/global") == full(1.5)
    failed = [entry for entry in logs if entry["event"] == "offer_failed"]
    # One of each kind for each of the two; then the host is left alone.
    assert Counter((entry["method"], entry["host"]) for entry in failed) == {
        ("GET", dead): 2,
        ("PUT", dead): 2,
    }
    assert "X-Amz" not in f"{logs}{caplog.text}"


async def put(direct: DirectTransfer, offer: pb.WeightsRef, data: bytes) -> pb.WeightsRef:
    assert await asyncio.to_thread(direct.put, offer.url, (memoryview(data),))
    return pb.WeightsRef(key=offer.key, size_bytes=len(data), digest=digest(data))
