"""A participant as the wire sees it: every call by hand, over a real channel."""

import io
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import coordinator_pb2_grpc, inspection_pb2, inspection_pb2_grpc
from xain_wire.np import ndarray_to_proto

Code = grpc.StatusCode


def npy(vector: Any) -> bytes:
    """The object that is uploaded for this vector."""
    return ndarray_to_proto(np.asarray(vector)).ndarray


def digest(data: bytes) -> bytes:
    return xxhash.xxh3_128(data).digest()


def inside(vector: Any, key: str = "") -> pb.WeightsRef:
    """An update that travels inside its reference."""
    data = npy(vector)
    return pb.WeightsRef(key=key, size_bytes=len(data), digest=digest(data), data=data)


class Member:
    """One participant. participant_id None: known by its peer address, like a XAIN client, or by
    its certificate."""

    def __init__(
        self,
        port: int,
        participant_id: str | None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.participant_id = participant_id
        # A channel of its own: channels with equal arguments would share one connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        address = f"127.0.0.1:{port}"
        self.channel = (
            grpc.aio.insecure_channel(address, options=options)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options=options)
        )
        self.stub = coordinator_pb2_grpc.CoordinatorStub(self.channel)
        self.inspection = inspection_pb2_grpc.InspectionStub(self.channel)
        self.metadata = (("xain-participant-id", participant_id),) if participant_id else ()

    async def rendezvous(
        self, profile: pb.DataProfile | None = None, tags: Mapping[str, str] | None = None
    ) -> pb.RendezvousResponse:
        return await self.stub.Rendezvous(
            pb.RendezvousRequest(profile=profile, tags=tags or {}), metadata=self.metadata
        )

    async def heartbeat(
        self,
        state: pb.State.ValueType = pb.READY,
        round_: int = -1,
        transfer: pb.Transfer | None = None,
    ) -> pb.HeartbeatResponse:
        return await self.stub.Heartbeat(
            pb.HeartbeatRequest(state=state, round=round_, transfer=transfer),
            metadata=self.metadata,
        )

    async def start(self) -> pb.StartTrainingRoundResponse:
        return await self.stub.StartTrainingRound(
            pb.StartTrainingRoundRequest(), metadata=self.metadata
        )

    async def upload(self, vector: Any, round_: int = 0, chunk: int = 1 << 20) -> pb.WeightsRef:
        return await self.upload_bytes(npy(vector), round_, chunk=chunk)

    async def upload_bytes(
        self,
        data: bytes,
        round_: int = 0,
        *,
        size: int | None = None,
        announced: bytes | None = None,
        chunk: int = 1 << 20,
    ) -> pb.WeightsRef:
        header = pb.PutWeightsRequest.Header(
            round=round_,
            size_bytes=len(data) if size is None else size,
            digest=digest(data) if announced is None else announced,
        )

        async def requests() -> AsyncIterator[pb.PutWeightsRequest]:
            yield pb.PutWeightsRequest(header=header)
            for offset in range(0, len(data), chunk):
                yield pb.PutWeightsRequest(data=data[offset : offset + chunk])

        response = await self.stub.PutWeights(requests(), metadata=self.metadata)
        return response.ref

    async def end(
        self,
        ref: pb.WeightsRef | None = None,
        num_samples: int = 1,
        round_: int | None = 0,
        name: str | None = None,
        metrics: str = "",
    ) -> pb.EndTrainingRoundResponse:
        request = pb.EndTrainingRoundRequest(
            participant_id=self.participant_id if name is None else name,
            number_samples=num_samples,
            metrics=metrics,
            round=round_,
            update=ref,
        )
        return await self.stub.EndTrainingRound(request, metadata=self.metadata)

    async def hand_in(self, vector: Any, num_samples: int = 1, round_: int = 0) -> pb.WeightsRef:
        """Upload and end: a whole round's work."""
        ref = await self.upload(vector, round_)
        await self.end(ref, num_samples, round_)
        return ref

    async def download(self, key: str) -> bytes:
        call = self.stub.GetWeights(pb.GetWeightsRequest(key=key), metadata=self.metadata)
        return b"".join([message.data async for message in call])

    async def model(self, round_: int) -> Any:
        """The vector of a global model."""
        return np.load(io.BytesIO(await self.download(f"{round_}/global")), allow_pickle=False)

    def watch(self) -> grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.WatchResponse]:
        return self.stub.Watch(pb.WatchRequest(), metadata=self.metadata)

    async def until(self, state: pb.State.ValueType, round_: int) -> pb.WatchResponse:
        """Watch until this state of this round is seen."""
        call = self.watch()
        try:
            async for seen in call:
                if (seen.state, seen.round) == (state, round_):
                    return seen
        finally:
            call.cancel()
        raise AssertionError(f"the watch ended before {pb.State.Name(state)} {round_}")

    async def status(self) -> inspection_pb2.GetStatusResponse:
        return await self.inspection.GetStatus(inspection_pb2.GetStatusRequest())

    async def close(self) -> None:
        await self.channel.close()


async def refused(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Status, refusal code and message of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), reason(caught.value), caught.value.details() or ""


async def assert_refused(call: Any, code: Code, why: str = "", *texts: str) -> None:
    """Assert that a call is refused with a status, a refusal code and parts of the message."""
    found = await refused(call)
    is_so = found[0] is code and why in ("", found[1]) and all(text in found[2] for text in texts)
    assert is_so, f"{found} instead of {(code, why, *texts)}"


def reason(error: grpc.aio.AioRpcError) -> str:
    """The refusal's code, out of the rich status; "" if gRPC itself has refused."""
    status = rpc_status.from_call(_SyncView(error))
    if status is None:
        return ""
    info = ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "xain.coordinator"
    return info.reason


class _SyncView:
    """grpc_status reads the synchronous call's methods; an AioRpcError has the same ones."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code
        self.details = error.details
        self.trailing_metadata = error.trailing_metadata
