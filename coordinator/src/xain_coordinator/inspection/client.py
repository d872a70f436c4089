"""Answers of the Inspection service as one snapshot."""

import asyncio
import time
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.net import channels
from xain_foundation.net.grpc_calls import details_of
from xain_foundation.security.handshakes import Fault
from xain_foundation.security.tls import Certificates
from xain_foundation.settings.hints import hint
from xain_foundation.settings.schema import MASK
from xain_wire.fl import inspection_pb2, inspection_pb2_grpc

TIMEOUT_S = 5.0

# Rows shown; --json has all. A screen is enough for people, and a fleet may be thousands.
MAX_PARTICIPANTS = 40
MAX_ROUNDS = 8
_MAX_MODELS = 3

_PAGE = 1000  # participants, rounds or models: as many as a coordinator gives in one answer


# Certificates of the one who asks; None: all goes in the clear, or through a Unix socket.
TLS: ContextVar[Certificates | None] = ContextVar("TLS", default=None)


class NoStatus(CommandFailed):
    """The coordinator did not answer with its status."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Answers of the coordinator, which are moments apart."""

    status: inspection_pb2.GetStatusResponse
    participants: inspection_pb2.ListParticipantsResponse  # all pages that were asked for
    rounds: inspection_pb2.ListRoundsResponse
    models: inspection_pb2.ListModelsResponse


def fetch(
    address: str,
    *,
    everything: bool = False,
    num_rounds: int = MAX_ROUNDS,
    timeout_s: float = TIMEOUT_S,
) -> Snapshot:
    """Fetch a snapshot from the coordinator at "host:port": status, participants, rounds, models.

    everything: all participants, rounds and models, page by page, not the first or latest few.
    num_rounds: of the latest few. timeout_s: in all; with everything, for each page.

    Raises NoStatus within timeout_s or little more.
    """
    gives_up_at = time.monotonic() + timeout_s
    with open_channel(address) as channel:
        stub = inspection_pb2_grpc.InspectionStub(channel)

        dialogue = _dialogue(everything=everything, num_rounds=num_rounds)
        answer = None
        try:
            while True:
                method, request = dialogue.send(answer)
                left_s = timeout_s if everything else max(0.0, gives_up_at - time.monotonic())
                answer = getattr(stub, method)(request, timeout=left_s)
        except StopIteration as end:
            return cast(Snapshot, end.value)
        except grpc.RpcError as error:
            raise NoStatus(_why(address, error, timeout_s)) from None


def open_channel(address: str) -> grpc.Channel:
    """A connection to the coordinator at "host:port", or "unix:PATH"."""
    tls = TLS.get()
    # A list of models with their layouts may exceed gRPC's usual 4 MiB.
    options = [("grpc.max_receive_message_length", -1)]
    return channels.open_channel(address, options, None if tls is None else tls.of_channel())


def description(address: str) -> str:
    """Table one of the session of the coordinator at "host:port", as JSON; "" if there is none yet.
    Raises NoStatus."""
    with open_channel(address) as channel:
        stub = inspection_pb2_grpc.InspectionStub(channel)
        try:
            return stub.Describe(inspection_pb2.DescribeRequest(), timeout=TIMEOUT_S).table
        except grpc.RpcError as error:
            raise NoStatus(f"{address} does not describe its data: {details_of(error)}") from None


def study_of(address: str) -> str:
    """The table of the study of the coordinator at "host:port" as JSON; "" if it is of none, or of
    an earlier version. Raises NoStatus."""
    with open_channel(address) as channel:
        stub = inspection_pb2_grpc.InspectionStub(channel)
        try:
            return stub.DescribeStudy(
                inspection_pb2.DescribeStudyRequest(), timeout=TIMEOUT_S
            ).table
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return ""
            raise NoStatus(f"{address} does not tell of its study: {details_of(error)}") from None


async def ask_service(
    service: Any, *, everything: bool = False, num_rounds: int = MAX_ROUNDS
) -> Snapshot:
    """Ask an InspectionService in this process for a snapshot, without a call over the network.
    service: not imported by its type, since the server and all below it come with it."""
    no_call: Any = None  # the answers to such requests do not depend on it
    dialogue = _dialogue(everything=everything, num_rounds=num_rounds)
    answer = None
    try:
        while True:
            method, request = dialogue.send(answer)
            answer = await getattr(service, method)(request, no_call)
            await asyncio.sleep(0)  # a long history must not keep the event loop
    except StopIteration as end:
        return cast(Snapshot, end.value)


def _dialogue(
    *, everything: bool, num_rounds: int
) -> Generator[tuple[str, Message], Any, Snapshot]:
    """The questions for a snapshot, as (method, request); the answer to each is sent in, and the
    return value is the snapshot."""
    page_size = _PAGE if everything else 0
    limits = (0, 0) if everything else (num_rounds, _MAX_MODELS)
    first = inspection_pb2.ListParticipantsRequest(page_size=page_size or MAX_PARTICIPANTS)
    participants = yield from _pages("ListParticipants", first, everything)
    status = yield "GetStatus", inspection_pb2.GetStatusRequest(whole=everything)
    rounds = inspection_pb2.ListRoundsRequest(limit=limits[0], page_size=page_size)
    models = inspection_pb2.ListModelsRequest(limit=limits[1], page_size=page_size)
    return Snapshot(
        status,
        participants,
        (yield from _pages("ListRounds", rounds, everything)),
        (yield from _pages("ListModels", models, everything)),
    )


def _pages(method: str, request: Any, everything: bool) -> Generator[tuple[str, Message], Any, Any]:
    """Ask for the first page of a list, or with `everything` for all pages. Returns them as one
    answer."""
    whole = yield method, request
    while everything and whole.next_page_token:
        request.page_token = whole.next_page_token
        whole.ClearField("next_page_token")
        whole.MergeFrom((yield method, request))
    return whole


def _why(address: str, error: grpc.RpcError, timeout_s: float) -> str:
    """Why a call has failed, and what to do, for an operator. timeout_s: that the call had."""
    assert isinstance(error, grpc.Call)
    if "@" in address:  # no address has one, but a URL with a password in it, which gRPC would show
        return f"{MASK} is no address: write HOST or HOST:PORT without a user's name"
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            cause = channels.find_cause(address, tls=TLS.get())
            why = cause.text or clean(details_of(error))
            if cause.fault is Fault.NEEDS_TLS:
                return (
                    f"the coordinator at {address} lets nobody in without a certificate: on its "
                    "machine, "
                    + hint("xain-coordinator", "--data-dir FOLDER")
                    + ", with the folder of its data; elsewhere, "
                    + hint("xain-coordinator", "--tls FOLDER")
                    + ", with a certificate that `xain-participant join` has got for an operator"
                )
            elsewhere = hint("xain-coordinator", "--address HOST:PORT")
            return f"nobody answers at {address}: {why}; is a coordinator there? Else {elsewhere}"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer from {address} within {timeout_s:g} s"
        case grpc.StatusCode.UNIMPLEMENTED:
            return f"{address} answers, but not as a coordinator that can be inspected"
        case code:
            return f"{address} answered {code.name}: {clean(details_of(error))}"


def clean(text: str) -> str:
    r"""The text with "\ufffd" for each control character: names come from the network and could
    move the cursor."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
