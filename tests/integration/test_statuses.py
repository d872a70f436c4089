"""Every status of the protocol, through a real channel, read after the exception was caught."""

import time
import traceback

import grpc
import numpy as np
import pytest

from support.logs import capture_logs
from support.wire import Code, assert_refused, digest, npy, refused
from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.server.calls.interceptor import MAX_FAILED_LINES
from xain_coordinator.server.statuses import STATUSES
from xain_foundation.logs.rate_limited_log import EVERY_S
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.refusals_pb2 import RefusalReason
from xain_wire.refusal import CaughtRefusal

TWO = {"min_participants": 2, "rounds": 2}


def test_the_table_is_complete():
    """Every reason of the protocol has a status, and no reason has two classes."""
    assert sorted(STATUSES) == sorted(RefusalReason.values()[1:])
    codes = [kind.code for kind in CaughtRefusal.__subclasses__()]
    assert len({*codes}) == len(codes)


async def test_unregistered_client_is_told_to_rendezvous(start, join):
    """PERMISSION_DENIED for every call that needs membership, with XAIN's words."""
    coordinator = await start(rounds=TWO)
    unregistered = join(coordinator, "unregistered")
    calls = [
        unregistered.heartbeat(),
        unregistered.start(),
        unregistered.upload([1.0]),
        unregistered.end(round_=0),
        unregistered.until(pb.ROUND, 0),
    ]
    for call in calls:
        await assert_refused(call, Code.PERMISSION_DENIED, "NOT_A_MEMBER", "unregistered")


async def test_an_end_without_an_upload_is_refused(in_round):
    """EndTrainingRound counts only weights that are in the store, and only those meant."""
    _, a, _ = await in_round("a", "b", rounds=TWO)
    await assert_refused(a.end(), Code.FAILED_PRECONDITION, "UPLOAD_MISSING")
    ref = await a.upload([1.0, 2.0])
    other = pb.WeightsRef(key=ref.key, size_bytes=ref.size_bytes, digest=digest(b"other"))
    await assert_refused(a.end(other), Code.FAILED_PRECONDITION, "UPLOAD_MISSING")
    await a.end(ref)


async def test_update_of_an_earlier_process_must_have_its_digest(in_round, start, join):
    """The key alone does not count: what lies there must have the digest that the sender names."""
    coordinator, a, _ = await in_round("a", "b", rounds=TWO)
    ref = await a.upload([1.0, 2.0])
    await coordinator.stop()
    a = join(await start(rounds=TWO), "a")
    other = pb.WeightsRef(key=ref.key, size_bytes=ref.size_bytes, digest=digest(b"other"))
    await assert_refused(a.end(other), Code.FAILED_PRECONDITION, "UPLOAD_MISSING")
    await a.end(ref)


@pytest.mark.parametrize(
    ("vector", "num_samples", "message"),
    [
        ([1.0, np.nan], 1, "not finite, first at index 1"),
        ([-np.inf, 1.0], 1, "not finite, first at index 0"),
        ([1.0, 2.0], -1, "the number of samples must not be negative, got -1"),
        ([[1.0, 2.0]], 1, "flat vector"),
        (np.float32([1, 2, 3]), 1, "the weights have shape (3,), the global model (2,)"),
        (np.float32([1, 2]), 1, "the weights are float32, the global model is float64"),
    ],
)
async def test_bad_updates_are_refused_and_good_ones_taken_after(
    in_round, vector, num_samples, message
):
    """INVALID_ARGUMENT says what is wrong, changes nothing, and the sender may send a good one,
    also in later rounds, where the global model says what is expected (X13)."""
    _, a, b = await in_round("a", "b", rounds=TWO)
    round_ = 0
    if "global model" in message:
        await a.hand_in([0.0, 0.0])
        await b.hand_in([0.0, 0.0])
        await a.until(pb.ROUND, 1)
        round_ = 1
    ref = await a.upload(vector, round_)
    await assert_refused(
        a.end(ref, num_samples, round_), Code.INVALID_ARGUMENT, "INVALID_UPDATE", message
    )
    await a.hand_in([1.0, 2.0], 1, round_)


@pytest.mark.parametrize(
    ("data", "announced", "size", "message"),
    [
        (b"not an npy file at all", None, None, "not an .npy file"),
        (npy([1.0, 2.0])[:-1], None, None, "its header promises"),
        (npy([1.0, 2.0]) + b"x", None, None, "its header promises"),
        (npy([1, 2]), None, None, "must be floats"),
        (npy([1.0]), b"0" * 16, None, "digest"),
        (npy([1.0]), None, 5, "longer than the 5 bytes announced"),
    ],
)
async def test_upload_that_is_no_vector_is_refused_while_it_comes(
    in_round, data, announced, size, message
):
    """A broken upload is INVALID_ARGUMENT, and nothing of it stays in the store."""
    _, a, _ = await in_round("a", "b", rounds=TWO)
    await assert_refused(
        a.upload_bytes(data, announced=announced, size=size),
        Code.INVALID_ARGUMENT,
        "INVALID_UPDATE",
        message,
    )
    await assert_refused(a.end(), Code.FAILED_PRECONDITION, "UPLOAD_MISSING")


async def test_too_large_is_resource_exhausted(in_round):
    """An upload above the bound is refused before its bytes come."""
    _, a = await in_round("a", server={"max_update_bytes": 1000})
    await assert_refused(
        a.upload(np.zeros(1000)), Code.RESOURCE_EXHAUSTED, "TOO_LARGE", "8128 bytes; at most 1000"
    )
    data = npy(np.zeros(1000))
    await assert_refused(
        a.end(pb.WeightsRef(data=data, digest=digest(data))), Code.RESOURCE_EXHAUSTED, "TOO_LARGE"
    )


async def test_a_message_above_the_limit_is_resource_exhausted(start, join):
    """gRPC itself refuses a single message above 4 MiB."""
    coordinator = await start(rounds=TWO)
    a = join(coordinator, "a")
    await assert_refused(a.end(metrics="x" * (5 << 20)), Code.RESOURCE_EXHAUSTED)


async def test_a_model_that_is_not_there_is_not_found(in_round):
    """Only published global models can be read; no participant reads another's update."""
    _, a, _ = await in_round("a", "b", rounds=TWO)
    await a.upload([1.0])
    for key in ("1/global", "0/a", "../0/global", ""):
        await assert_refused(a.download(key), Code.NOT_FOUND, "UNKNOWN_MODEL")


async def test_a_store_that_is_away_is_unavailable(in_round, monkeypatch):
    """UNAVAILABLE tells the participant to come again; the path of the store is not told."""
    coordinator, a = await in_round("a")

    def away(self: object, key: str, *_: object, **__: object) -> None:
        raise StoreUnavailable(f"/secret/path/{key}: disk full")

    with monkeypatch.context() as patch:
        patch.setattr(type(coordinator.store), "upload", away)
        code, why, message = await refused(a.upload([1.0]))
    assert (code, why) == (Code.UNAVAILABLE, "UNAVAILABLE")
    assert "secret" not in message
    await a.hand_in([1.0])


async def test_a_stopping_coordinator_is_unavailable(enter, start):
    """A watch ends with UNAVAILABLE when the coordinator stops, so that its watcher reconnects."""
    coordinator = await start(rounds=TWO)
    [a] = await enter(coordinator, "a")
    call = a.watch()
    assert (await call.read()).state == pb.STANDBY
    await coordinator.stop()
    await assert_refused(call.read(), Code.UNAVAILABLE)


async def test_a_defect_is_internal_and_tells_nothing(in_round, monkeypatch):
    """An unforeseen error is INTERNAL without details on the wire; the log has the traceback, a few
    times, however often it is caused."""
    _, a, _ = await in_round("a", "b", rounds=TWO)

    def broken(*_: object) -> None:
        raise RuntimeError("secret invariant")

    monkeypatch.setattr("xain_coordinator.server.calls.coordinator_service.layout_of", broken)
    began = time.monotonic()
    with capture_logs() as entries:
        for _ in range(MAX_FAILED_LINES + 1):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await a.end()
    assert caught.value.code() is Code.INTERNAL
    assert "secret" not in (caught.value.details() or "")
    found = [entry for entry in entries if entry["event"] == "call_failed"]
    num_windows = 1 + (time.monotonic() - began) // EVERY_S
    assert 0 < len(found) <= num_windows * MAX_FAILED_LINES
    entry = found[0]
    assert (entry["log_level"], entry["method"]) == (
        "error",
        "/xain_proto.fl.Coordinator/EndTrainingRound",
    )
    assert str(entry["exc_info"]) == "secret invariant"
    assert traceback.extract_tb(entry["exc_info"].__traceback__)[-1].name == "broken"


async def test_refusals_are_counted(in_round):
    """An operator sees how often what was refused."""
    _, a, _ = await in_round("a", "b", rounds=TWO)
    await refused(a.end())
    await refused(a.end(name=""))
    status = await a.status()
    assert status.counters["UPLOAD_MISSING"] == 1
    assert status.counters["INVALID_NAME"] == 1
