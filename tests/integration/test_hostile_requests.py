"""A coordinator process under malformed, oversized and cancelled requests.

Longer than by default: FUZZ_CALLS=10000 (of each method) and another SEED.
"""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from integration.conftest import Enter
from support.hostile import METHODS, Answer, ask, channel, malformed, path
from support.process import PATIENCE_S, CoordinatorProcess, Keep, ended
from support.waiting import until
from support.wire import Member, digest, npy
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_wire.messaging import membership_pb2 as membership

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

MIB = 1 << 20
MAX_RESIDENT_MIB = 200
LARGE = 4 * MIB - 1000  # fits into a message of 4 MiB
FUZZ_CALLS = int(os.environ.get("FUZZ_CALLS", "150"))  # of each method
SEED = int(os.environ.get("SEED", "0"))

BY_NAME = {path(method).rpartition(".")[2]: method for method in METHODS}
MEMBER = (("xain-participant-id", "member"),)
UNREGISTERED = (("xain-participant-id", "unregistered"),)


def assert_unharmed(coordinator: CoordinatorProcess) -> None:
    log = coordinator.log()
    for trace in ("Traceback", "call_failed"):
        assert trace not in log, log[max(0, log.index(trace) - 500) :][:5000]
    assert coordinator.status is None, "the process lives"
    assert len(log) < 100_000, "what anybody can cause is logged at a bounded rate"


@pytest.fixture
async def coordinator(keep: Keep, enter: Enter, tmp_path: Path) -> CoordinatorProcess:
    """One that trains with one member."""
    settings = {"rounds.rounds": 1000, "rounds.min_participants": 1, "rounds.max_participants": 200}
    coordinator = keep(CoordinatorProcess(tmp_path, settings))
    await coordinator.start()
    await enter(coordinator, "member", round_=0)
    return coordinator


UPLOAD = pb.PutWeightsRequest.Header(round=0, size_bytes=MIB, digest=digest(b"x" * MIB))

# (method, how often, the message): each used to stay in memory after its call was refused.
OVERSIZED: Sequence[tuple[str, int, bytes]] = [
    ("Coordinator/FindUpload", 20, pb.FindUploadRequest(digest=b"x" * LARGE).SerializeToString()),
    ("Coordinator/GetWeights", 20, pb.GetWeightsRequest(key="x" * LARGE).SerializeToString()),
    (
        "Coordinator/EndTrainingRound",
        20,
        pb.EndTrainingRoundRequest(participant_id="a", metrics="x" * LARGE).SerializeToString(),
    ),
    (
        "Coordinator/EndTrainingRound",
        150,
        pb.EndTrainingRoundRequest(participant_id="a", metrics="x" * 500_000).SerializeToString(),
    ),
    (
        "Coordinator/Rendezvous",
        20,
        pb.RendezvousRequest(
            profile=pb.DataProfile(num_samples=1, num_features=1, classes=[""] * (LARGE // 2))
        ).SerializeToString(),
    ),
    (
        "Coordinator/Rendezvous",
        100,
        pb.RendezvousRequest(
            profile=pb.DataProfile(num_samples=1, num_features=1, classes=[""] * 150_000)
        ).SerializeToString(),
    ),
    (
        "Coordinator/Rendezvous",
        20,
        pb.RendezvousRequest(tags={"a": "x" * LARGE}).SerializeToString(),
    ),
    (
        "Coordinator/Rendezvous",
        20,
        pb.RendezvousRequest(tags={str(i): "" for i in range(25_000)}).SerializeToString(),
    ),
    (
        "Coordinator/PutWeights",
        150,
        pb.PutWeightsRequest(header=UPLOAD, data=b"x" * MIB).SerializeToString(),
    ),
    (
        "Inspection/ListParticipants",
        20,
        inspection.ListParticipantsRequest(page_token="x" * LARGE).SerializeToString(),
    ),
    ("Membership/Join", 20, membership.JoinRequest(group="x" * LARGE).SerializeToString()),
    ("Membership/Renew", 20, membership.RenewRequest(group="x" * LARGE).SerializeToString()),
    ("Membership/Watch", 20, membership.WatchRequest(group="x" * LARGE).SerializeToString()),
    ("Health/Check", 20, health_pb2.HealthCheckRequest(service="x" * LARGE).SerializeToString()),
]


NEVER = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}  # caused by input


def refusals(port: int, name: str, number: int, request: bytes) -> Counter[grpc.StatusCode]:
    codes = Counter()
    with channel(port) as opened:
        for index in range(number):
            identity = MEMBER if index % 2 else UNREGISTERED
            codes[ask(opened, BY_NAME[name], [request], identity).code] += 1
    return codes


async def test_refused_requests_leave_memory_below_200_mib(coordinator):
    """Each is sent dozens of times, one after the other, by a member and by an unregistered
    client."""
    peaks = {}
    for number, (name, times, request) in enumerate(OVERSIZED):
        codes = await asyncio.to_thread(refusals, coordinator.port, name, times, request)
        assert not codes.keys() & NEVER, (name, codes)
        peaks[f"{number} {name}"] = coordinator.peak_mib()
    assert max(peaks.values()) < MAX_RESIDENT_MIB, peaks
    assert_unharmed(coordinator)


async def test_large_requests_at_a_time_leave_memory_below_200_mib(coordinator):
    """gRPC holds what has come of a message, and unregistered clients may open many calls."""
    unregistered_clients = [Member(coordinator.port, None) for _ in range(4)]
    request = pb.FindUploadRequest(digest=b"x" * LARGE)
    calls = [
        unregistered.stub.FindUpload(request)
        for unregistered in unregistered_clients
        for _ in range(40)
    ]
    codes = {await call.code() for call in calls}
    assert codes <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
    assert coordinator.peak_mib() < MAX_RESIDENT_MIB
    for unregistered in unregistered_clients:
        await unregistered.close()
    assert_unharmed(coordinator)


def fuzz(port: int, seed: int) -> list[tuple[str, Answer]]:
    """Send malformed requests to every method. Returns the answers that no input may cause."""
    chance = Random(seed)
    wrong = []
    with channel(port) as opened:
        for _ in range(FUZZ_CALLS):
            for method in METHODS:
                requests = malformed(method, chance)
                identity = chance.choice((MEMBER, MEMBER, UNREGISTERED, ()))
                answer = ask(opened, method, requests, identity, timeout_s=0.2)
                if answer.code in NEVER:
                    wrong.append((path(method), answer))
    return wrong


async def test_malformed_requests_are_never_internal_or_unknown(coordinator):
    """Random bytes, truncated and damaged messages, and fields at the borders of their types."""
    wrong = await asyncio.to_thread(fuzz, coordinator.port, SEED)
    assert not wrong, f"seed {SEED}: {len(wrong)}, first {wrong[0]}"
    assert coordinator.peak_mib() < MAX_RESIDENT_MIB
    assert_unharmed(coordinator)


NUM_UPLOADS = 1200
STREAMS = 80  # in a connection
VECTOR = npy(np.zeros(25_000, dtype=np.float32))
FIRST = pb.PutWeightsRequest(
    header=pb.PutWeightsRequest.Header(round=0, size_bytes=len(VECTOR), digest=digest(VECTOR)),
    data=VECTOR[:60_000],
)


async def half_open(member: Member, number: int) -> grpc.aio.StreamUnaryCall[Any, Any]:
    """An upload whose sender says nothing more after its first message."""
    metadata = (("xain-participant-id", f"p{number}"),)
    call = member.stub.PutWeights(metadata=metadata)
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it is refused already
        await call.write(FIRST)
    return call


async def test_half_open_uploads_leave_memory_below_200_mib(tmp_path):
    """Each member of a round begins an upload, and pauses in the middle of it."""
    settings = {
        "rounds.rounds": 2,
        "rounds.min_participants": NUM_UPLOADS,
        "server.heartbeat_timeout_s": 2 * PATIENCE_S,  # they send none
    }
    coordinator = CoordinatorProcess(tmp_path, settings)
    await coordinator.start()
    members = [Member(coordinator.port, None) for _ in range(-(-NUM_UPLOADS // STREAMS))]

    async def join(number: int) -> None:
        answer = pb.RendezvousResponse(reply=pb.LATER)
        while answer.reply == pb.LATER:
            await asyncio.sleep(answer.retry_after_ms / 1000)  # as the coordinator asks
            answer = await members[number // STREAMS].stub.Rendezvous(
                pb.RendezvousRequest(), metadata=(("xain-participant-id", f"p{number}"),)
            )

    async def is_collecting() -> bool:
        return (await members[0].status()).phase == "collecting"

    async with ended(coordinator):
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*map(join, range(NUM_UPLOADS)))
            await until(is_collecting)
            begun = [half_open(members[i // STREAMS], i) for i in range(NUM_UPLOADS)]
            calls = await asyncio.gather(*begun)
            assert await is_collecting()
        assert coordinator.peak_mib() < MAX_RESIDENT_MIB
        for call in calls:
            call.cancel()
        for member in members:
            await member.close()
        assert "Traceback" not in coordinator.log()
