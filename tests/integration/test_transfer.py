"""Large updates on their way: encoded, shared, and looked at as they come."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from support.transfers import DATA, HEADER_BYTES, MIB, VECTOR, connected, header, put
from support.wire import Code, assert_refused, digest, inside, npy
from xain_participant.sdk.encoded import quantise
from xain_participant.wire.client import Refused
from xain_wire.fl import coordinator_pb2 as pb


async def test_upload_of_an_unregistered_client_is_refused_before_it_sends_anything(start, join):
    coordinator = await start()
    unregistered = join(coordinator, "unregistered")
    silent = asyncio.Event()

    async def requests() -> AsyncIterator[pb.PutWeightsRequest]:
        await silent.wait()
        yield pb.PutWeightsRequest()

    call = unregistered.stub.PutWeights(requests(), metadata=unregistered.metadata)
    await assert_refused(call, Code.PERMISSION_DENIED, "NOT_A_MEMBER")


# --- encodings ---


async def test_an_encoded_update_is_half_the_bytes(start, join, proxy):
    """The coordinator stores what it stands for, as if it had travelled plain. An update that is
    not finite travels plain, and is refused."""
    coordinator = await start(server={"update_encoding": "float16"}, rounds={"rounds": 2})
    client = await connected(proxy, coordinator)
    a = join(coordinator, "a")
    await a.until(pb.ROUND, 0)
    await a.hand_in(VECTOR)
    await a.until(pb.ROUND, 1)
    work = await asyncio.to_thread(client.start_round)
    base = await asyncio.to_thread(client.get_weights, work.model)
    before = proxy.num_bytes_up
    update = base.copy()
    encoded = quantise(base * np.float32(1.01), update)
    ref = await asyncio.to_thread(client.put_weights, 1, update, None, encoded)
    assert proxy.num_bytes_up - before < update.nbytes / 2 * 1.1
    assert ref.size_bytes == len(DATA)
    assert ref.encoding == work.encoding, "how it has travelled"
    assert ref.digest == digest(npy(update)), "of what is stored"
    bad = update.copy()
    bad[70_000] = np.nan
    assert quantise(bad, base.copy()) is None
    refused_ref = await asyncio.to_thread(client.put_weights, 1, bad)
    assert refused_ref.digest == digest(npy(bad))
    assert refused_ref.encoding == pb.PLAIN
    with pytest.raises(Refused, match="70000"):
        await asyncio.to_thread(client.end_round, client.end_request(1, refused_ref, 1, ""))
    plain = await asyncio.to_thread(client.put_weights, 1, update)  # as after a restart
    assert plain.digest == ref.digest
    await asyncio.to_thread(client.end_round, client.end_request(1, plain, 1, ""))
    await asyncio.to_thread(client.close)


@pytest.mark.parametrize(("dtype", "encoding"), [(np.float32, pb.FLOAT16), (np.float64, pb.PLAIN)])
async def test_an_encoding_is_asked_for_where_there_is_one(in_round, dtype, encoding):
    """Initial weights have none, and only a model of float32 has one."""
    _, a = await in_round("a", server={"update_encoding": "float16"}, rounds={"rounds": 2})
    assert (await a.start()).encoding == pb.PLAIN
    await a.hand_in(np.zeros(10, dtype))
    await a.until(pb.ROUND, 1)
    assert (await a.start()).encoding == encoding


async def test_model_with_a_control_variate_has_no_encoding(in_round):
    """Rounding would move the mean of all control variates away from those at the sites."""
    _, a = await in_round("a", server={"update_encoding": "float16"}, rounds={"rounds": 2})
    request = pb.EndTrainingRoundRequest(
        participant_id="a",
        number_samples=1,
        round=0,
        update=await a.upload(np.zeros(10, np.float32), 0),
        layout=[
            pb.Tensor(name=kind, shape=[5], dtype="float32", kind=kind)
            for kind in ("weight", "control")
        ],
    )
    await a.stub.EndTrainingRound(request, metadata=a.metadata)
    await a.until(pb.ROUND, 1)
    assert (await a.start()).encoding == pb.PLAIN


async def test_upload_that_cannot_be_decoded_is_refused(in_round):
    """Unknown encodings, tiles that are none, and what there is no model for."""
    _, a = await in_round("a", rounds={"rounds": 2})
    await assert_refused(
        await put(a, end=MIB, encoding=pb.FLOAT16), Code.INVALID_ARGUMENT, "INVALID_UPDATE"
    )
    await a.hand_in(VECTOR)
    await a.until(pb.ROUND, 1)
    no_tiles = DATA[:HEADER_BYTES] + b"\xff" * MIB  # a scale that is no number
    too_many = DATA[:HEADER_BYTES] + bytes(VECTOR.nbytes // 2 + 100_000)
    other = npy(VECTOR.astype(np.float64))[:HEADER_BYTES] + bytes(MIB)

    async def requests(
        encoding: "pb.Encoding.ValueType", data: bytes
    ) -> AsyncIterator[pb.PutWeightsRequest]:
        yield pb.PutWeightsRequest(header=header(round=1, encoding=encoding), data=data)
        await asyncio.Event().wait()  # it is refused without waiting for the rest

    for encoding, data, message in (
        (pb.FLOAT16, no_tiles, "scale"),
        (pb.FLOAT16, too_many, "after its last tile"),
        (pb.FLOAT16, other, "must be float32"),
        (2, DATA[:MIB], "no encoding"),  # that of an earlier version
    ):
        call = a.stub.PutWeights(requests(encoding, data), metadata=a.metadata)
        await assert_refused(call, Code.INVALID_ARGUMENT, "INVALID_UPDATE", message)


# --- bounds ---


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("size", [10, 300_000])
async def test_an_update_that_is_too_far_away_is_refused(in_round, size, dtype):
    """Inside its reference or in a stream, it is told its norm and the limit."""
    _, a = await in_round("a", server={"max_update_norm": 5.0}, rounds={"rounds": 2})
    await a.hand_in(np.full(size, 100, dtype))  # nothing to be far away from
    await a.until(pb.ROUND, 1)
    far, near = np.full(size, 100, dtype), np.full(size, 100, dtype)
    far[[0, -1]] += np.array([6, 8], dtype)
    near[[0, -1]] += np.array([3, 4], dtype)
    calls = [a.upload(far, 1)] + ([a.end(inside(far, "1/a"), round_=1)] if size == 10 else [])
    for call in calls:
        await assert_refused(
            call, Code.INVALID_ARGUMENT, "INVALID_UPDATE", "is 10 away", "at most 5 "
        )
    await a.hand_in(near, round_=1)


async def test_a_size_that_no_update_has_is_refused_before_its_bytes(in_round):
    _, a = await in_round("a", rounds={"rounds": 2})
    await a.hand_in(VECTOR)
    await a.until(pb.ROUND, 1)
    for size in (0, 1000, VECTOR.nbytes, VECTOR.nbytes + 5000, 2 * VECTOR.nbytes):
        call = await put(a, end=MIB, round=1, size_bytes=size)  # it would never end
        await assert_refused(call, Code.INVALID_ARGUMENT, "INVALID_UPDATE")
