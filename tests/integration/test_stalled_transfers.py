"""Transfers whose peer takes or sends nothing: they end, and go on where they stopped."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from support.transfers import DATA, LARGE, MIB, found, header, in_round, put, with_model, written
from support.wire import digest, npy, refused
from xain_coordinator.server.weights.downloads import Downloads
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.coordinator_pb2_grpc import CoordinatorStub

Code = grpc.StatusCode


async def test_upload_of_a_silent_sender_ends_and_goes_on_later(start, join, tmp_path, monkeypatch):
    """Nothing that was written is lost."""
    coordinator = await start()
    a = join(coordinator, "a")
    await in_round(a)
    uploads = coordinator._server.uploads
    streams, receive = [], uploads.receive

    def noted(name, stream):
        streams.append(stream)
        return receive(name, stream)

    monkeypatch.setattr(uploads, "receive", noted)

    async def requests() -> AsyncIterator[pb.PutWeightsRequest]:
        yield pb.PutWeightsRequest(header=header())
        for at in range(0, 3 * MIB, MIB):
            yield pb.PutWeightsRequest(data=DATA[at : at + MIB])
        await written(tmp_path, 3 * MIB)
        streams[0].stall_timer.stalled_s = 0.01
        yield pb.PutWeightsRequest()  # the next read has the new time limit
        await asyncio.Event().wait()

    call = a.stub.PutWeights(requests(), metadata=a.metadata)
    code, why, details = await refused(call)
    assert (code, why) == (Code.UNAVAILABLE, "UNAVAILABLE")
    assert "FindUpload" in details
    assert await found(a) == 3 * MIB
    ref = (await (await put(a, 3 * MIB))).ref
    assert (ref.size_bytes, ref.digest) == (len(DATA), digest(DATA))


async def test_download_whose_receiver_takes_nothing_ends_and_goes_on(start, join, monkeypatch):
    """The bytes that were sent before arrive, and a second download begins behind them."""
    coordinator, a = await with_model(start, join, LARGE)
    # What a client takes ahead of its reader, however fast its connection is.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 << 10)]
    options.append(("grpc.use_local_subchannel_pool", 1))
    data = npy(LARGE)
    received = bytearray()
    ended = asyncio.Event()
    downloads = coordinator._server.service._downloads
    send = Downloads.send

    async def noted(*args):
        try:
            await send(*args)
        except BaseException:  # on cancellation, too
            ended.set()
            raise

    monkeypatch.setattr(Downloads, "send", noted)
    downloads.stalled_s = 0.2
    address = f"127.0.0.1:{coordinator.port}"
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call = CoordinatorStub(channel).GetWeights(
            pb.GetWeightsRequest(key="1/global"), metadata=a.metadata
        )
        received.extend((await call.read()).data)
        await ended.wait()

        async def rest() -> None:
            while True:
                received.extend((await call.read()).data)

        code, why, details = await refused(rest())
    assert (code, why) == (Code.UNAVAILABLE, "UNAVAILABLE")
    assert "next offset" in details
    downloads.stalled_s = 60.0
    assert 0 < len(received) < len(data)
    assert received + await a.download("1/global", len(received)) == data
