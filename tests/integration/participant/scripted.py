"""A small coordinator that does what the test says: real gRPC, one session, one participant.

Whatever it must not forget when it is "killed" lies in a Ledger, which the next one gets.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import numpy as np
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from support.wire import digest, npy
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.coordinator_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server
from xain_wire.np import proto_to_ndarray
from xain_wire.np.ndarray_pb2 import NDArray

# No test waits for it to pass: it turns a hang into a failure.
PATIENCE_S = 60.0

Context = Any
Fault = Callable[[Context], None]


def refuse(
    context: Context,
    code: str,
    status: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION,
    message: str = "because",
    domain: str = "xain.coordinator",
) -> NoReturn:
    """Refuse as the coordinator does: the reason travels in the rich status."""
    rich = Status(code=status.value[0], message=message)
    rich.details.add().Pack(ErrorInfo(reason=code, domain=domain))
    context.set_trailing_metadata((("grpc-status-details-bin", rich.SerializeToString()),))
    context.abort(status, message)
    raise AssertionError("abort raises")


def refusal(code: str, status: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION) -> Fault:
    return lambda context: refuse(context, code, status)


def failure(status: grpc.StatusCode) -> Fault:
    return lambda context: context.abort(status, "as the test wants")


@dataclass
class Ledger:
    """accepted: (number of samples, vector, metrics JSON) by round."""

    rounds: int = 2
    session_id: str = "s1"
    model: np.ndarray = field(default_factory=lambda: np.zeros(4, dtype=np.float32))
    metadata: dict[str, str] = field(default_factory=dict)
    round: int = 0
    paused: bool = False
    cause: str = ""  # why the session is finished
    tasks: dict[int, "pb.Task.ValueType"] = field(default_factory=dict)  # by round; else TRAIN
    train_config: str = ""
    members: set[str] = field(default_factory=set)
    accepted: dict[int, tuple[int, np.ndarray, str]] = field(default_factory=dict)

    @property
    def state(self) -> "pb.State.ValueType":
        if self.round == self.rounds:
            return pb.FINISHED
        return pb.STANDBY if self.paused else pb.ROUND


class ScriptedCoordinator(CoordinatorServicer):
    """before, after: per method, what to do at its next calls, before it does anything or when all
    is done but the answer. calls: how often each method was called. kept_out: why the next
    rendezvous are not let in yet."""

    def __init__(self, ledger: Ledger | None = None, port: int = 0) -> None:
        self.ledger = ledger or Ledger()
        self.before: dict[str, deque[Fault]] = defaultdict(deque)
        self.after: dict[str, deque[Fault]] = defaultdict(deque)
        self.calls: dict[str, int] = defaultdict(int)
        self.kept_out: deque[str] = deque()
        self.heartbeats: list[tuple[int, int]] = []  # state, round
        self.transfers: list[tuple[int, int]] = []  # direction, percent; of heartbeats with one
        self.profiles: list[pb.DataProfile | None] = []
        self.identities: set[str] = set()
        self.ended: list[pb.EndTrainingRoundRequest] = []
        self.uploads: dict[str, bytes] = {}
        self.upload_chunks: list[int] = []
        self.parts: dict[str, bytes] = {}  # of uploads, by participant
        self.download_offsets: list[int] = []
        self.heartbeat_interval_ms = 50
        self.tells_accepted = True
        self.stored: bytes | None = None  # instead of the model
        self.answer_uploads_with: pb.WeightsRef | None = None
        self.chunk_bytes = 1 << 20
        # Path to URL: where weights are offered. What lies there is in store_objects, by path.
        self.store_url: Callable[[str], str] | None = None
        self.store_objects: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._server = grpc.server(
            # As the coordinator, it takes pings that come more often than every five minutes.
            ThreadPoolExecutor(16),
            options=[("grpc.http2.min_ping_interval_without_data_ms", 10)],
        )
        add_CoordinatorServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Stop as abruptly as gRPC can: open calls are aborted."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._server.stop(None).wait(PATIENCE_S)

    def change(self, **fields: Any) -> None:
        """Change the ledger, and tell the watchers."""
        with self._changed:
            for name, value in fields.items():
                setattr(self.ledger, name, value)
            self._changed.notify_all()

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait until a call has brought about this state."""
        with self._changed:
            assert self._changed.wait_for(reached, PATIENCE_S), "it never happened"

    # --- the service ---

    def Rendezvous(self, request: pb.RendezvousRequest, context: Context) -> pb.RendezvousResponse:
        name = self._enter("Rendezvous", context)
        if self.kept_out:
            return pb.RendezvousResponse(reply=pb.LATER, why=self.kept_out.popleft())
        with self._changed:
            self.profiles.append(request.profile if request.HasField("profile") else None)
            self.ledger.members.add(name)
        return pb.RendezvousResponse(
            heartbeat_interval_ms=self.heartbeat_interval_ms, session_id=self.ledger.session_id
        )

    def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        with self._changed:
            self.heartbeats.append((request.state, request.round))
            if request.HasField("transfer"):
                self.transfers.append((request.transfer.direction, request.transfer.percent))
            self._changed.notify_all()
        name = self._enter("Heartbeat", context)
        if self.ledger.state != pb.FINISHED:
            self._require_member(name, context)
        if request.state == pb.FINISHED:
            self.ledger.members.discard(name)
            return pb.HeartbeatResponse()
        return self._advertise(pb.HeartbeatResponse)

    def Watch(self, request: pb.WatchRequest, context: Context) -> Iterator[pb.WatchResponse]:
        self._enter("Watch", context)
        context.add_callback(self.change)  # wakes the wait below when the caller has gone
        said = None
        while context.is_active() and not self._stopped:
            message = self._advertise(pb.WatchResponse)
            if message != said:
                said = message
                yield message
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._stopped
                        or not context.is_active()
                        or self._advertise(pb.WatchResponse) != said  # noqa: B023  # used at once
                    )
                )

    def StartTrainingRound(
        self, request: pb.StartTrainingRoundRequest, context: Context
    ) -> pb.StartTrainingRoundResponse:
        name = self._enter("StartTrainingRound", context)
        self._require_member(name, context)
        ledger = self.ledger
        if ledger.state != pb.ROUND:
            refuse(context, "NOT_IN_ROUND")
        data = npy(ledger.model)
        model = pb.WeightsRef(
            key=f"{ledger.round}/global", size_bytes=len(data), digest=digest(data)
        )
        upload = None
        if self.store_url is not None:
            self.store_objects[f"/{model.key}"] = data
            model.url = self.store_url(f"/{model.key}")
            key = f"incoming/{ledger.round}/{name}"
            upload = pb.WeightsRef(key=key, url=self.store_url(f"/{key}"))
        return pb.StartTrainingRoundResponse(
            round=ledger.round,
            epochs=1,
            epoch_base=ledger.round,
            model=model,
            upload=upload,
            layout=[pb.Tensor(name="w", shape=ledger.model.shape, dtype=ledger.model.dtype.name)],
            metadata=ledger.metadata,
            update_accepted=self.tells_accepted and ledger.round in ledger.accepted,
            task=ledger.tasks.get(ledger.round, pb.TRAIN),
            train_config=ledger.train_config,
        )

    def GetWeights(
        self, request: pb.GetWeightsRequest, context: Context
    ) -> Iterator[pb.GetWeightsResponse]:
        self._enter("GetWeights", context)
        self.download_offsets.append(request.offset)
        data = npy(self.ledger.model) if self.stored is None else self.stored
        ref = pb.WeightsRef(key=request.key, size_bytes=len(data), digest=digest(data))
        for offset in range(request.offset, len(data), self.chunk_bytes):
            yield pb.GetWeightsResponse(
                data=data[offset : offset + self.chunk_bytes],
                ref=ref if offset == request.offset else None,
            )
            if self.after["GetWeights"]:
                self.after["GetWeights"].popleft()(context)

    def FindUpload(self, request: pb.FindUploadRequest, context: Context) -> pb.FindUploadResponse:
        """Nothing of an upload that broke off is here."""
        return pb.FindUploadResponse()

    def PutWeights(
        self, request_iterator: Iterator[pb.PutWeightsRequest], context: Context
    ) -> pb.PutWeightsResponse:
        name = self._enter("PutWeights", context)
        first = next(request_iterator)
        self._require_open(first.header.round, name, context)
        if self.answer_uploads_with is not None:
            return pb.PutWeightsResponse(ref=self.answer_uploads_with)
        chunks = [first.data, *(request.data for request in request_iterator)]
        data = self.parts.pop(name, b"")[: first.header.offset] + b"".join(chunks)
        self.upload_chunks = [*self.upload_chunks, *(len(chunk) for chunk in chunks)]
        if first.header.is_part:
            self.parts[name] = data
            self.calls["PutWeights"] -= 1  # uploads are counted
            return pb.PutWeightsResponse(offset=len(data))
        if self.after["PutWeights"]:
            self.after["PutWeights"].popleft()(context)
        assert first.header.size_bytes == len(data)
        assert first.header.digest == digest(data)
        key = f"{first.header.round}/{name}"
        self.uploads[key] = data
        return pb.PutWeightsResponse(
            ref=pb.WeightsRef(key=key, size_bytes=len(data), digest=digest(data))
        )

    def EndTrainingRound(
        self, request: pb.EndTrainingRoundRequest, context: Context
    ) -> pb.EndTrainingRoundResponse:
        name = self._enter("EndTrainingRound", context)
        assert request.participant_id == name, "the upload's name is the last part of its key"
        with self._changed:
            self.ended.append(request)
        if self.ledger.tasks.get(request.round) == pb.EVALUATE:
            self._require_open(request.round, name, context)
            self.change(round=request.round + 1)
            return pb.EndTrainingRoundResponse()
        if request.update.key.startswith("incoming/"):
            data = self._put_directly(request.update, context)
        else:
            data = request.update.data or self.uploads[f"{request.round}/{name}"]
            assert request.update.digest == digest(data)
        vector = np.asarray(proto_to_ndarray(NDArray(ndarray=data)))
        ledger = self.ledger
        known = ledger.accepted.get(request.round)
        if known is None or known[1].tobytes() != vector.tobytes():
            self._require_open(request.round, name, context)
            with self._changed:
                ledger.accepted[request.round] = (request.number_samples, vector, request.metrics)
                self._changed.notify_all()
        if self.after["EndTrainingRound"]:
            self.after["EndTrainingRound"].popleft()(context)
        if ledger.round == request.round:
            self.change(round=ledger.round + 1, model=vector)
        return pb.EndTrainingRoundResponse()

    def _put_directly(self, update: pb.WeightsRef, context: Context) -> bytes:
        data = self.store_objects.get(f"/{update.key}")
        if data is None:
            refuse(context, "UPLOAD_MISSING")
        if (update.size_bytes, update.digest) != (len(data), digest(data)):
            refuse(context, "INVALID_UPDATE", grpc.StatusCode.INVALID_ARGUMENT)
        return data

    # --- what they share ---

    def _enter(self, method: str, context: Context) -> str:
        name = str(dict(context.invocation_metadata())["xain-participant-id"])
        with self._changed:
            self.calls[method] += 1
            self.identities.add(name)
            self._changed.notify_all()
        if self.before[method]:
            self.before[method].popleft()(context)
        return name

    def _advertise(self, kind: Any) -> Any:
        ledger = self.ledger
        return kind(
            state=ledger.state,
            round=min(ledger.round, ledger.rounds - 1),
            update_accepted=self.tells_accepted and ledger.round in ledger.accepted,
            session_id=ledger.session_id,
            cause=ledger.cause,
        )

    def _require_member(self, name: str, context: Context) -> None:
        if name not in self.ledger.members:
            refuse(context, "NOT_A_MEMBER", grpc.StatusCode.PERMISSION_DENIED)

    def _require_open(self, round_: int, name: str, context: Context) -> None:
        self._require_member(name, context)
        if round_ != self.ledger.round:
            refuse(context, "STALE_ROUND")
        if self.ledger.state != pb.ROUND:
            refuse(context, "NOT_IN_ROUND")
