"""The coordinator's methods as blocking calls, and weights by the shortest way.

Small weights travel inside the calls. Others go straight from and to the store if the coordinator
offers it and that works, else in chunks through the coordinator.

Every failure is a Refused. Retrying is not done here, with one exception: a transfer that breaks
off goes on where it stopped. gRPC notices connections that are dead, and connects again.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import grpc
import grpc.experimental
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from numpy.typing import NDArray

from xain_foundation.net import channels
from xain_foundation.net.current_channel import CurrentChannel
from xain_foundation.net.grpc_calls import Cancellable, details_of
from xain_foundation.spare import Spare
from xain_participant.sdk.encoded import Encoded
from xain_participant.sdk.evaluations import evaluation_message
from xain_participant.sdk.events import RefusedBy
from xain_participant.sdk.failures import Failure
from xain_participant.sdk.participant import Evaluation
from xain_participant.sdk.sealed import Damaged
from xain_participant.sdk.values import Call
from xain_participant.stages.parts import PartSize
from xain_participant.tables.advice import advised
from xain_participant.wire.direct import DirectTransfer, OfferFailed, with_host
from xain_participant.wire.download import Download
from xain_participant.wire.upload import Upload
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.coordinator_pb2_grpc import CoordinatorStub
from xain_wire.fl.refusals_pb2 import RefusalReason
from xain_wire.limits import MAX_INLINE_BYTES, SLOWEST_LINE_BYTES_PER_S
from xain_wire.metadata import ERROR_DOMAIN, INSTANCE_ID_KEY, PARTICIPANT_ID_KEY, TIMEOUT_KEY
from xain_workloads.model import Layout
from xain_workloads.tables.division import Division
from xain_workloads.tables.profile import DataProfile

if TYPE_CHECKING:
    from xain_foundation.security.tls import Certificates

CALL_TIMEOUT_S = 5.0
SLOWEST_STORE_BYTES_PER_S = 16 * 1024 * 1024

CHANNEL_OPTIONS = (
    # A coordinator that has restarted is to be found again within seconds, not gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Despite its name the shortest time that one attempt to connect gets, 20 s by default.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # One that has moved is found at its new address as soon as its name says so; by default gRPC
    # does not ask for a name again within 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 5000),
    # Several participants in one process are several peers, each with its own connection.
    ("grpc.use_local_subchannel_pool", 1),
    # The thread that reads a stream waits for its messages itself. By default another thread waits
    # for them and wakes it, which costs each message of Watch as much again.
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
    # No pings that measure a connection while bytes come: the answer to one waits behind what a
    # model of 64 KiB has still on its way, and gRPC would take a slow connection for dead. By these
    # pings it would grow the bytes that may come ahead; so they have a fixed number.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
)


# How long a connection is silent before gRPC sends a ping, and how long the ping, or anything else
# that was sent, may remain unanswered before gRPC takes the connection for dead and makes another.
# Calls: an answer that comes within its time limit costs no connection, however slow the line,
# and both together are shorter than the default lease of 15 s.
CALLS_SILENCE_S = (8.0, CALL_TIMEOUT_S)
# Transfers fill a slow line: a ping waits behind what was sent before, and
# its answer behind what a proxy has taken of a download. With 20 s one at 64 KiB/s came to no end.
TRANSFERS_SILENCE_S = (20.0, 60.0)
# A connection without a call for so long is closed, and made again for the next call. gRPC sends
# no pings there, so that one that died during a long training would hold up the upload after it.
IDLE_S = 30.0


def channel_options(
    silence_s: tuple[float, float] = CALLS_SILENCE_S, idle_s: float = IDLE_S
) -> tuple[tuple[str, object], ...]:
    """Options of a participant's channel: seconds of silence before a ping, and before it idles."""
    ping_after_s, timeout_s = silence_s
    timeout_ms = round(1000 * timeout_s)
    return (
        *CHANNEL_OPTIONS,
        ("grpc.keepalive_time_ms", round(1000 * ping_after_s)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.client_idle_timeout_ms", round(1000 * idle_s)),
    )


def open_channel(
    target: str,
    silence_s: tuple[float, float] = CALLS_SILENCE_S,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    idle_s: float = IDLE_S,
) -> grpc.Channel:
    """Open a channel as a participant does. target: HOST:PORT, or any other gRPC target.

    credentials: without them all goes in the clear.
    """
    return channels.open_channel(target, channel_options(silence_s, idle_s), credentials)


# Called with target and silence, and with `credentials` if there are certificates.
OpenChannel = Callable[..., grpc.Channel]


class _Message(Protocol):
    def ByteSize(self) -> int: ...  # noqa: N802  # protobuf's name


_Request = TypeVar("_Request", bound=_Message)
_Answer = TypeVar("_Answer")
_Used = TypeVar("_Used")
_Method = Callable[[CoordinatorStub], "grpc.UnaryUnaryMultiCallable[_Request, _Answer]"]

_UPLOAD_MISSING = RefusalReason.Name(RefusalReason.UPLOAD_MISSING)
# Statuses of a stream that can be resumed: the coordinator, or the connection, went away, or was
# too slow for this part.
_BROKEN_OFF = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
_BROKEN_OFF_BECAUSE = (
    "",
    RefusalReason.Name(RefusalReason.UNAVAILABLE),
    RefusalReason.Name(RefusalReason.REQUEST_MISSING),
)


class Refused(Exception):
    """A call was not carried out, or we do not know whether it was.

    reason: the coordinator's code, such as "NOT_A_MEMBER"; empty if it gave none, which is so
    whenever the answer does not come from the coordinator itself.
    retry_after_s: when to come again; 0 if the coordinator leaves it to us.
    """

    def __init__(
        self, reason: str, status: grpc.StatusCode, message: str, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message or reason or status.name)
        self.reason = reason
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s

    def event(self, call: Call) -> RefusedBy:
        """The event that tells the protocol of this refusal."""
        return RefusedBy(call, self.reason, self.status.name, self.message, self.retry_after_s)

    def __repr__(self) -> str:
        return f"Refused({self.reason!r}, {self.status.name}, {self.message!r})"


class KeptMetadata:
    """The latest metadata of a model. The coordinator names them by a digest, and sends them once.

    digest: empty if there are none.
    """

    def __init__(self) -> None:
        self.digest = b""
        self._metadata: dict[str, str] = {}
        self._lock = Lock()

    def complete(self, work: pb.StartTrainingRoundResponse) -> bool:
        """Keep the metadata of an assignment, or add those that it leaves out. Returns False if
        they are not at hand."""
        with self._lock:
            if work.metadata_digest and work.metadata:
                self.digest, self._metadata = work.metadata_digest, dict(work.metadata)
            elif work.metadata_digest:
                work.metadata.update(self._metadata if work.metadata_digest == self.digest else {})
        return bool(work.metadata) or not work.metadata_digest


class Connections:
    """The connections of one participant, or of all participants of a process, to a coordinator.

    There are two, so that no heartbeat waits behind an upload. The second is made when the first
    weights travel through it.
    """

    def __init__(
        self, target: str, channel: OpenChannel = open_channel, tls: "Certificates | None" = None
    ) -> None:
        """Prepare two channels, one for calls and one for weights."""

        def connect(silence_s: tuple[float, float]) -> CurrentChannel[CoordinatorStub]:
            def opens(
                _: str, __: object, credentials: grpc.ChannelCredentials | None
            ) -> grpc.Channel:
                if credentials is None:
                    return channel(target, silence_s)
                return channel(target, silence_s, credentials=credentials)

            return CurrentChannel(target, (), tls, CoordinatorStub, opens)

        self.calls, self.transfers = connect(CALLS_SILENCE_S), connect(TRANSFERS_SILENCE_S)

    def close(self) -> None:
        """End all calls."""
        self.calls.close()
        self.transfers.close()


class CoordinatorClient:
    """One participant's calls to its coordinator. Safe to use from several threads.

    target, channel: the connections are opened by channel(target, silence), see CALLS_SILENCE_S.
    participant_id: stable across reconnects, since all that we are due is booked on it.
    instance_id: of this process, or of the state directory that it shares with the one before it.
    direct: how to use the store's URLs, closed with the client; None: they are not used.
    on_offer_failed: told when weights go through the coordinator because of it.
    clock: seconds, monotonic.
    tls: certificates of this participant; None: all goes in the clear.
    spare, connections, model_metadata: memory of downloads, the connections, and the metadata of
        the latest model, if participants of this process share them.
    """

    # Answered when the update is durable: measured, synchronised to disk, and committed. One that
    # was put into the store the coordinator copies and reads before, which takes time by its size.
    hand_in_timeout_s = 60.0
    # Time limit of the call that brings a model of up to max_inline_bytes with its metadata.
    work_timeout_s = 120.0
    max_inline_bytes = MAX_INLINE_BYTES
    # A larger update inside its call goes through the connection of transfers: on a line of 3 KB/s
    # heartbeats would wait behind it for longer than the lease.
    max_beside_heartbeats_bytes = 16 << 10
    # Time limit of one part of a transfer; see parts.py. A tile of an encoded update, of up to
    # 128 KiB, is the largest part on a slow line.
    part_timeout_s = 90.0

    def __init__(
        self,
        target: str,
        participant_id: str,
        *,
        instance_id: str = "",
        call_timeout_s: float = CALL_TIMEOUT_S,
        direct: DirectTransfer | None = None,
        on_offer_failed: Callable[[OfferFailed], None] = lambda failed: None,
        channel: OpenChannel = open_channel,
        clock: Callable[[], float] = time.monotonic,
        tls: "Certificates | None" = None,
        spare: Spare | None = None,
        connections: Connections | None = None,
        model_metadata: KeptMetadata | None = None,
    ) -> None:
        self._own = Connections(target, channel, tls) if connections is None else None
        ways = self._own or connections
        assert ways is not None
        self._calls, self._transfers = ways.calls, ways.transfers
        self._tls = tls
        self._is_closed = False
        self._target = target
        self._participant_id = participant_id
        self.metadata: tuple[tuple[str, str], ...] = ((PARTICIPANT_ID_KEY, participant_id),)
        if instance_id:
            self.metadata += ((INSTANCE_ID_KEY, instance_id),)
        self._call_timeout_s = call_timeout_s
        self._direct = direct
        self._on_offer_failed = on_offer_failed
        # Digest of the upload that broke off: the coordinator may have a part of it.
        self._broken_digest = b""
        self._clock = clock
        self._parts_up, self._parts_down = PartSize(), PartSize()
        self._unfinished: Download | None = None  # that the next try goes on with
        self.model_metadata = model_metadata or KeptMetadata()
        self._spare = spare or Spare(max_arrays=1)  # of downloads
        # The model or update that is on its way, for another thread to show.
        self.transfer: Download | Upload | None = None

    def why_away(self) -> str:
        """Look why no call reaches the coordinator; empty if a gRPC server answers there."""
        return advised(channels.find_cause(self._target, tls=self._tls))

    def close(self) -> None:
        """Cancel what is under way and disconnect. Later calls are Refused."""
        self._is_closed = True
        if self._own is not None:
            self._own.close()
        if self._direct is not None:
            self._direct.close()

    def __enter__(self) -> "CoordinatorClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rendezvous(
        self,
        profile: DataProfile | None = None,
        tags: Mapping[str, str] | None = None,
        *,
        can_evaluate: bool = False,
        can_initialise: bool = True,
        process_group_address: str = "",
        can_divide: bool = False,
        division: Division | None = None,
    ) -> pb.RendezvousResponse:
        """Ask to take part. division: by which the profile was made."""
        request = pb.RendezvousRequest(
            tags=tags or {},
            can_evaluate=can_evaluate,
            cannot_initialise=not can_initialise,
            process_group_address=process_group_address,
            can_divide=can_divide,
        )
        if division is not None:
            request.division.folds = division.folds
            request.division.fold = division.fold
            request.division.seed = division.seed
            request.division.measures = division.measures
        if profile is not None:
            request.profile.CopyFrom(
                pb.DataProfile(
                    num_samples=profile.num_samples,
                    num_features=profile.num_features,
                    classes=profile.classes,
                    columns=[
                        pb.Column(name=column.name, type=column.type, unit=column.unit)
                        for column in profile.columns
                    ],
                    target=profile.target,
                    task=profile.task,
                    statistics=profile.statistics,
                )
            )
        return self._contact(lambda stub: stub.Rendezvous, request)

    def heartbeat(
        self,
        state: "pb.State.ValueType",
        round_: int,
        *,
        transfer: pb.Transfer | None = None,
        known_findings: bytes = b"",
        timeout_s: float | None = None,
    ) -> pb.HeartbeatResponse:
        """Say READY or TRAINING, and learn the state; FINISHED leaves the session.

        transfer: progress of the one under way, for an operator to see.
        known_findings: digest of the findings that need not be told again.
        """
        request = pb.HeartbeatRequest(
            state=state, round=round_, transfer=transfer, known_findings=known_findings
        )
        return self._contact(lambda stub: stub.Heartbeat, request, timeout_s)

    def watch(self) -> Iterator[pb.WatchResponse]:
        """Yield every change of state, the present one first. Raises Refused for a broken
        stream."""
        request = pb.WatchRequest(keeps_metadata=True)
        with self._guarded(self._calls) as stub:
            call = stub.Watch(request, metadata=self.metadata)
            try:
                yield from map(self.complete, call)
            finally:
                call.cancel()

    def answer_questions(
        self, answer: Callable[[pb.PredictionQuestion], pb.PredictionAnswer]
    ) -> None:
        """Answer the coordinator's questions for predictions until the stream ends. Raises Refused
        when it breaks."""
        answers: SimpleQueue[pb.PredictionAnswer | None] = SimpleQueue()
        answers.put(pb.PredictionAnswer())  # opens the stream
        with self._guarded(self._calls) as stub:
            stream = Cancellable(stub.Predict(iter(answers.get, None), metadata=self.metadata))
            try:
                for question in stream.call:
                    answers.put(answer(question))
            finally:
                answers.put(None)
                stream.cancel()

    def start_request(self, damaged_model_digest: bytes = b"") -> pb.StartTrainingRoundRequest:
        """Make the request for the work of the open round.

        damaged_model_digest: of a model whose download had other bytes.
        """
        return pb.StartTrainingRoundRequest(
            damaged_model_digest=damaged_model_digest, known_metadata=self.model_metadata.digest
        )

    def start_round(self, damaged_model_digest: bytes = b"") -> pb.StartTrainingRoundResponse:
        """Ask for the work of the open round; see start_request()."""
        request = self.start_request(damaged_model_digest)
        work = self._unary(lambda stub: stub.StartTrainingRound, request, self.work_timeout_s)
        if not self.model_metadata.complete(work):  # a watch has brought others meanwhile
            request.ClearField("known_metadata")
            work = self._unary(lambda stub: stub.StartTrainingRound, request, self.work_timeout_s)
        return work

    def end_request(
        self,
        round_: int,
        update: pb.WeightsRef | None,
        num_samples: int,
        metrics: str,
        layout: Layout = (),
        evaluation: Evaluation | None = None,
        attempt: int = 0,
    ) -> pb.EndTrainingRoundRequest:
        """Make the request that hands in what put_weights() has returned.

        update: None in an evaluation round. metrics: JSON list of points. layout: of initial
        weights, or of the slice that a process group has trained. attempt: of that group.
        evaluation: of the model that the round started from.
        """
        request = pb.EndTrainingRoundRequest(
            participant_id=self._participant_id,
            number_samples=num_samples,
            metrics=metrics,
            round=round_,
            update=update,
            attempt=attempt,
            takes_next_round=True,
            known_metadata=self.model_metadata.digest,
            layout=[
                pb.Tensor(name=s.name, shape=s.shape, dtype=s.dtype, kind=s.kind) for s in layout
            ],
        )
        if evaluation is not None:
            request.evaluation.CopyFrom(evaluation_message(evaluation))
        return request

    def end_timeout_s(self, request: pb.EndTrainingRoundRequest) -> float:
        """Time limit of the call that hands in an update of this size."""
        return self.hand_in_timeout_s + request.update.size_bytes / SLOWEST_STORE_BYTES_PER_S

    def end_round(self, request: pb.EndTrainingRoundRequest) -> pb.WatchResponse | None:
        """Hand in. Returns the news of the next round if the coordinator tells it with the
        answer."""
        timeout_s = self.end_timeout_s(request)
        way = self._calls
        if request.ByteSize() > self.max_beside_heartbeats_bytes:
            way = self._transfers
        answer = self._unary(lambda stub: stub.EndTrainingRound, request, timeout_s, way=way)
        return self.complete(answer.next_round) if answer.HasField("next_round") else None

    def complete(self, news: pb.WatchResponse) -> pb.WatchResponse:
        """Add the model's metadata that the coordinator leaves out of the work in a
        notification."""
        if news.HasField("work") and not self.model_metadata.complete(news.work):
            news.ClearField("work")  # to be asked for
        return news

    def report_failure(self, round_: int, failure: Failure, timeout_s: float) -> None:
        """Say that the participant's own code failed in this round."""
        request = pb.ReportFailureRequest(
            round=round_,
            kind=failure.kind,
            message=failure.message,
            traceback=failure.traceback,
        )
        self._unary(lambda stub: stub.ReportFailure, request, timeout_s)

    def report_group_broken(self, round_: int, attempt: int, reason: str) -> None:
        """Say that the process group of this attempt at a round broke."""
        request = pb.ReportFailureRequest(round=round_, attempt=attempt, message=reason)
        self._unary(lambda stub: stub.ReportFailure, request)

    def get_weights(self, ref: pb.WeightsRef) -> NDArray[Any]:
        """Download a global model: (d,), writable, and checked against the size and digest of ref.
        Raises Refused, with status DATA_LOSS if what arrived is not what ref promises."""
        download, self._unfinished = self._unfinished, None
        if download is None or download.ref.digest != ref.digest or ref.data:
            download = Download(ref, self._spare)
        download.ref = ref  # the same bytes may have another key by now, and a URL that is valid
        self.transfer = download
        try:
            if ref.data:
                download.add(ref.data)
            elif not self._fetch_directly(download):
                self._fetch_in_chunks(download)
            return download.vector()
        except Refused:
            self._unfinished = download
            raise
        except Damaged as damaged:
            raise _damaged(ref, str(damaged)) from None
        finally:
            self.transfer = None

    def put_weights(
        self,
        round_: int,
        weights: NDArray[Any],
        offer: pb.WeightsRef | None = None,
        encoded: Encoded | None = None,
    ) -> pb.WeightsRef:
        """Upload a local update, (d,). Returns what end_request() must be given.

        A small one is not uploaded: it travels inside the reference that is returned. One that
        broke off goes on where the coordinator has it, in this call or in the next one for the same
        update. offer: where the store takes it; used if the reference that is returned has its key.
        encoded: a shorter form of it for the way through the coordinator.
        """
        upload = Upload(weights, encoded)
        ref = pb.WeightsRef(size_bytes=upload.size_bytes, digest=upload.digest)
        if upload.size_bytes <= self.max_inline_bytes:
            ref.key = f"{round_}/{self._participant_id}"
            ref.data = upload.start + upload.data
            return ref
        self.transfer = upload
        try:
            if offer is not None and offer.url and (key := self._put_directly(offer, upload)):
                ref.key = key
                return ref
            return self._put_in_chunks(round_, upload)
        finally:
            self.transfer = None

    def _put_in_chunks(self, round_: int, upload: Upload) -> pb.WeightsRef:
        """Upload through the coordinator, part by part, going on after breaks as long as bytes
        arrive. Returns the reference. Raises Refused."""
        parts = self._parts_up
        offset = self._find_upload(round_, upload) if upload.digest == self._broken_digest else 0
        while True:
            self._broken_digest = upload.digest
            upload.share = offset / upload.size_bytes
            num_bytes, began_at = upload.part(offset, parts.num_bytes), self._clock()
            try:
                answer = self._put_part(round_, upload, offset, num_bytes)
            except Refused as refused:
                took_s = self._clock() - began_at
                if refused.reason == _UPLOAD_MISSING and offset:
                    offset = 0  # it was dropped since we asked
                    continue
                if refused.status not in _BROKEN_OFF or refused.reason not in _BROKEN_OFF_BECAUSE:
                    raise
                resumed_at = offset
                offset = self._find_upload(round_, upload)
                parts.note_broken_off(max(0, offset - resumed_at), took_s)
                # Each attempt must send bytes, so their number is bounded.
                if offset <= resumed_at:
                    raise
                continue
            parts.note_acknowledged(num_bytes, self._clock() - began_at)
            if answer.HasField("ref"):
                self._broken_digest = b""
                return answer.ref
            offset = answer.offset

    def _find_upload(self, round_: int, upload: Upload) -> int:
        """Ask for the offset at which an upload that broke off can go on; 0 if it must begin again.

        Any other failure says nothing of what the coordinator has, so it is raised, and the next
        attempt asks again.
        """
        request = pb.FindUploadRequest(
            round=round_, size_bytes=upload.size_bytes, digest=upload.digest
        )
        # A restarted coordinator reads again what the one before it has received.
        timeout_s = self.hand_in_timeout_s + upload.size_bytes / SLOWEST_STORE_BYTES_PER_S
        found = self._unary(lambda stub: stub.FindUpload, request, timeout_s)
        return found.offset if upload.can_begin_at(found.offset) else 0

    def _put_part(
        self, round_: int, upload: Upload, offset: int, num_bytes: int
    ) -> pb.PutWeightsResponse:
        """Send a part of an upload. Returns the answer, which may come before all is sent."""
        is_last = upload.is_last(offset, num_bytes)
        header = pb.PutWeightsRequest.Header(
            round=round_,
            size_bytes=upload.size_bytes,
            digest=upload.digest,
            encoding=upload.encoding,
            offset=offset,
            is_part=not is_last,
        )

        def messages() -> Iterator[pb.PutWeightsRequest]:
            request = pb.PutWeightsRequest(header=header)
            for chunk in upload.chunks(offset, self._parts_up.message_bytes, num_bytes):
                request.data = chunk
                yield request
                request = pb.PutWeightsRequest()

        timeout_s = self.part_timeout_s
        if is_last:  # the answer waits for the disk
            timeout_s += upload.size_bytes / SLOWEST_STORE_BYTES_PER_S
        with self._guarded(self._transfers) as stub:
            return stub.PutWeights(messages(), metadata=self.metadata, timeout=timeout_s)

    def on_offer_refused(self, offer: pb.WeightsRef) -> None:
        """Send the next upload through the coordinator, which refused what was put there."""
        if self._direct is not None:
            reason = "the coordinator does not take what was put there"
            url = with_host(offer.url, self._target)
            self._on_offer_failed(self._direct.note_failed("PUT", url, reason))

    def _fetch_directly(self, download: Download) -> bool:
        """Download from the offered URL. Returns whether all is here now; if not, a part of it may
        be."""
        url = download.ref.url
        if not url:
            return False
        url = with_host(url, self._target)
        return bool(self._use_offer(lambda direct: direct.fetch(url, download)))

    def _put_directly(self, offer: pb.WeightsRef, upload: Upload) -> str:
        """Upload to the offered URL. Returns the key of the stored update; "" if it is not
        stored."""
        if upload.encoding != pb.PLAIN:
            return ""  # a store does not decode
        url = with_host(offer.url, self._target)
        pieces = (memoryview(upload.start), upload.data)

        def on_sent(num_bytes: int) -> None:
            upload.share = num_bytes / upload.size_bytes

        key = self._use_offer(lambda direct: direct.put(url, pieces, on_sent, digest=upload.digest))
        if key is None:
            if upload.share:  # the coordinator may have a part of it
                self._broken_digest = upload.digest
            return ""
        return key or offer.key

    def _use_offer(self, transfer: Callable[[DirectTransfer], _Used]) -> _Used | None:
        """Do a direct transfer; None without one, and if it has failed, of which on_offer_failed is
        told."""
        if self._direct is None:
            return None
        try:
            return transfer(self._direct)
        except OfferFailed as failed:
            if not self._direct.is_closed:  # else it is we who have ended it
                self._on_offer_failed(failed)
            return None

    def _fetch_in_chunks(self, download: Download) -> None:
        """Download the rest through the coordinator, part by part, going on after breaks as long as
        bytes arrive. Raises Refused and Damaged."""
        parts = self._parts_down
        while not download.is_whole:
            resumed_at, began_at = download.received, self._clock()
            try:
                for chunk in self._stream(download.ref, resumed_at, parts.num_bytes):
                    download.add(chunk)
            except Refused as refused:
                received = download.received - resumed_at
                parts.note_broken_off(received, self._clock() - began_at)
                # Each attempt must receive bytes, so the number of attempts is bounded.
                if refused.status in _BROKEN_OFF and received:
                    continue
                raise
            received = download.received - resumed_at
            if received < min(parts.num_bytes, download.size_bytes - resumed_at):
                return  # the object is shorter than promised
            parts.note_acknowledged(received, self._clock() - began_at)

    def _stream(self, ref: pb.WeightsRef, offset: int, num_bytes: int) -> Iterator[bytes]:
        """Yield the bytes of an object from this offset on. Raises Refused, and Damaged if it is
        another object than `ref` names."""
        request = pb.GetWeightsRequest(key=ref.key, offset=offset, num_bytes=num_bytes)
        with self._guarded(self._transfers) as stub:
            stream = stub.GetWeights(request, metadata=self.metadata, timeout=self.part_timeout_s)
            try:
                for message in stream:
                    if message.HasField("ref") and message.ref.digest != ref.digest:
                        raise Damaged("the coordinator sends another object")
                    yield message.data
            finally:
                stream.cancel()  # else the rest would go on arriving after a failure of ours

    def _contact(
        self,
        method: "_Method[_Request, _Answer]",
        request: _Request,
        timeout_s: float | None = None,
    ) -> _Answer:
        """Make a call that is a sign of life. With its time limit, which it tells, the coordinator
        knows how long it has waited there. Raises Refused."""
        timeout_s = timeout_s if timeout_s is not None else self._call_timeout_s
        timeout_s += _on_a_slow_line_s(request)
        told = (TIMEOUT_KEY, str(round(1000 * timeout_s)))
        with self._guarded(self._calls) as stub:
            return method(stub)(request, metadata=(*self.metadata, told), timeout=timeout_s)

    def _unary(
        self,
        method: "_Method[_Request, _Answer]",
        request: _Request,
        timeout_s: float | None = None,
        *,
        way: CurrentChannel[CoordinatorStub] | None = None,
    ) -> _Answer:
        """Make a call. Raises Refused.

        way: by default that of calls. timeout_s: beside the time that a large request takes on the
            slowest line.
        """
        timeout_s = timeout_s if timeout_s is not None else self._call_timeout_s
        timeout_s += _on_a_slow_line_s(request)
        with self._guarded(way or self._calls) as stub:
            return method(stub)(request, metadata=self.metadata, timeout=timeout_s)

    @contextmanager
    def _guarded(self, way: CurrentChannel[CoordinatorStub]) -> Iterator[CoordinatorStub]:
        """Lend the stub for one call, whose failure becomes Refused."""
        try:
            with way.stub() as stub:
                yield stub
        except grpc.RpcError as error:
            raise refused_by(error) from None
        except ValueError as error:
            # gRPC raises no more than this for a call on a channel that another thread has closed.
            if not self._is_closed or isinstance(error, Damaged):
                raise
            raise Refused("", grpc.StatusCode.CANCELLED, "the connection is closed") from None


def _on_a_slow_line_s(request: _Message) -> float:
    """Seconds that a request takes on the slowest line. gRPC takes and gives whole messages."""
    return request.ByteSize() / SLOWEST_LINE_BYTES_PER_S


def _damaged(ref: pb.WeightsRef, what: str) -> Refused:
    """The refusal of a download with wrong bytes."""
    return Refused("", grpc.StatusCode.DATA_LOSS, f"download of {ref.key!r}: {what}")


def refused_by(error: grpc.RpcError) -> Refused:
    """Convert the error of a call to Refused, with the coordinator's reason if it gave one."""
    # Every error of a blocking call is the call, too; the types do not say so.
    call = cast(Any, error)
    try:
        status = rpc_status.from_call(call)
    except ValueError:
        status = None  # details of another status: some proxy rewrote one of them
    reason, retry_after_s = "", 0.0
    for detail in status.details if status is not None else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            reason = str(info.reason)
        elif detail.Unpack(retry):
            retry_after_s = max(0.0, retry.retry_delay.ToMicroseconds() / 1e6)
    return Refused(reason, call.code(), details_of(call), retry_after_s)
