"""Refused calls leave nothing in memory, and say what is wrong with a request."""

import asyncio
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import grpc
import pytest

from support.hostile import METHODS, Metadata, ask, channel, path
from support.logs import capture_logs
from support.wire import Code, assert_refused, digest, reason
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.core.vocabulary.errors import Refusal
from xain_coordinator.server.calls import requests
from xain_coordinator.telemetry.log_files import LatencyFile
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection

BY_NAME = {path(method).rpartition(".")[2]: method for method in METHODS}
MEMBER = (("xain-participant-id", "a"),)
UNREGISTERED = (("xain-participant-id", "b"),)
DATA = b"x" * 10_000
HEADER = pb.PutWeightsRequest.Header(round=0, size_bytes=len(DATA), digest=digest(DATA))
THREE = {"rounds": 3}
WRONG_ROUND = pb.PutWeightsRequest.Header(round=7, size_bytes=len(DATA), digest=digest(DATA))


@contextmanager
def collected() -> Iterator[list[str]]:
    """Fills its list, at the end, with what the garbage collector has found."""
    found = []
    gc.collect()
    gc.freeze()  # what is there now is not looked through again
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        for thing in gc.garbage:
            if isinstance(thing, FrameType) and "xain_coordinator" in thing.f_code.co_filename:
                found.append(thing.f_code.co_qualname)
            elif isinstance(thing, Refusal | grpc.aio.AbortError):
                found.append(repr(thing))
            elif type(thing).__name__ in ("_ServicerContext", "RPCState"):
                found.append(type(thing).__name__)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


REFUSED = [
    ("Coordinator/FindUpload", UNREGISTERED, pb.FindUploadRequest(digest=b"d")),
    ("Coordinator/FindUpload", MEMBER, pb.FindUploadRequest(round=7, digest=b"d")),
    ("Coordinator/GetWeights", MEMBER, pb.GetWeightsRequest(key="x" * 1000)),
    ("Coordinator/Heartbeat", UNREGISTERED, pb.HeartbeatRequest()),
    ("Coordinator/Watch", UNREGISTERED, pb.WatchRequest()),
    ("Coordinator/Rendezvous", UNREGISTERED, pb.RendezvousRequest(tags={"": ""})),
    ("Coordinator/PutWeights", UNREGISTERED, pb.PutWeightsRequest(header=HEADER, data=DATA)),
    ("Coordinator/PutWeights", MEMBER, pb.PutWeightsRequest(header=HEADER, data=DATA)),
    ("Coordinator/PutWeights", MEMBER, pb.PutWeightsRequest(header=WRONG_ROUND, data=DATA)),
    ("Coordinator/PutWeights", MEMBER, pb.PutWeightsRequest(data=DATA)),
    ("Coordinator/EndTrainingRound", MEMBER, pb.EndTrainingRoundRequest(participant_id="a")),
    (
        "Coordinator/EndTrainingRound",
        MEMBER,
        pb.EndTrainingRoundRequest(
            participant_id="a", update=pb.WeightsRef(data=DATA, digest=digest(DATA))
        ),
    ),
    (
        "Inspection/ListParticipants",
        UNREGISTERED,
        inspection.ListParticipantsRequest(page_token="!" * 1000),
    ),
    ("Membership/Renew", UNREGISTERED, pb.WatchRequest()),
    ("Membership/Watch", UNREGISTERED, pb.WatchRequest()),
]


async def test_refused_calls_leave_nothing_to_the_garbage_collector(in_round, tmp_path):
    """A cycle would keep the request, which may have megabytes, until the next collection."""
    latencies = LatencyFile(tmp_path / "latency.jsonl")
    coordinator, _ = await in_round("a", rounds=THREE, latencies=latencies)
    kept = {}
    for number, (name, identity, message) in enumerate(REFUSED):
        request = message.SerializeToString()

        def calls(
            name: str = name, request: bytes = request, identity: Metadata = identity
        ) -> set[Code]:
            with channel(coordinator.port) as opened:
                return {ask(opened, BY_NAME[name], [request], identity).code for _ in range(2)}

        await asyncio.to_thread(calls)  # what is made once, such as by an import
        with collected() as found:
            codes = await asyncio.to_thread(calls)
            while coordinator._server.admission.num_calls:  # noqa: ASYNC110  # it has no event
                await asyncio.sleep(0.01)  # a poll, not a race: the tasks of the calls end
            await asyncio.sleep(0.05)  # and what they leave to the event loop
        assert Code.OK not in codes, name
        kept |= {f"{number} {name}": found} if found else {}
    assert not kept
    latencies.close()


async def answers(
    coordinator: SessionCoordinator, name: str, messages: list[bytes]
) -> tuple[Code, str]:
    def call() -> tuple[Code, str]:
        with channel(coordinator.port) as opened:
            answer = ask(opened, BY_NAME[name], messages, MEMBER)
            return answer.code, answer.details

    return await asyncio.to_thread(call)


async def test_malformed_request_is_invalid_on_every_method_and_logged_once(in_round):
    """One short line in the log says how many there were, whatever their number."""
    coordinator, _ = await in_round("a", rounds=THREE)
    with capture_logs() as entries:
        for name, method in BY_NAME.items():
            if method.name != "List":  # of Health, which gRPC's asyncio servicer does not have
                code, details = await answers(coordinator, name, [b"\xff\xff"])
                assert (name, code) == (name, Code.INVALID_ARGUMENT)
                assert "not a protobuf message" in details
    (line,) = (entry for entry in entries if entry["log_level"] in ("warning", "error"))
    assert (line["event"], line["num"]) == ("invalid_requests", 1)
    assert coordinator.counters["INVALID_REQUEST"] == len(BY_NAME) - 1


async def test_call_without_a_request_is_invalid(in_round):
    """The stream of a unary call may end before its only message. The log has no line of it: the
    stream of a call that is cancelled ends the same way."""
    coordinator, _ = await in_round("a", rounds=THREE)
    with capture_logs() as entries:
        assert await answers(coordinator, "Coordinator/Heartbeat", []) == (
            Code.INVALID_ARGUMENT,
            "the call ended without a request",
        )
    assert not [entry for entry in entries if entry["log_level"] in ("warning", "error")]


async def test_method_that_a_service_lacks_is_unimplemented(in_round):
    """gRPC's generated code answers it with an exception."""
    coordinator, _ = await in_round("a", rounds=THREE)
    code, _ = await answers(coordinator, "Health/List", [b""])
    assert code is Code.UNIMPLEMENTED


async def test_long_request_is_refused_before_it_is_parsed(in_round):
    """The limit of a method is far below that of a message."""
    coordinator, _ = await in_round("a", rounds=THREE)
    too_long = b"\xff" * (requests.MAX_REQUEST_BYTES + 1)
    code, details = await answers(coordinator, "Coordinator/FindUpload", [too_long])
    assert code is Code.RESOURCE_EXHAUSTED
    assert "16384 bytes at most, and has 16385" in details


async def test_long_values_are_shortened_in_messages(in_round):
    """A client takes 8 KiB of metadata; a longer message would be lost altogether."""
    coordinator, member = await in_round("a", rounds=THREE)
    key = "x" * 10_000
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await member.download(key)
    assert caught.value.code() is Code.NOT_FOUND
    assert len(caught.value.details() or "") < 300
    assert "10000 characters" in (caught.value.details() or "")
    assert reason(caught.value) == "UNKNOWN_MODEL"
    code, details = await answers(
        coordinator, "Membership/Renew", [b"\x0a\x90\x4e" + b"g" * 10_000]
    )
    assert code is Code.NOT_FOUND
    assert len(details) < 300


NINES = "9" * 5000


@pytest.mark.parametrize(
    "key",
    [f"0/a.{'0' * 32}/{NINES}-1", f"0/a.{'0' * 32}/1-{NINES}", f"{NINES}/a.{'0' * 32}", NINES],
)
async def test_key_with_thousands_of_digits_is_no_upload(in_round, key):
    """Python's int() refuses more than 4,300 digits."""
    _, member = await in_round("a", rounds=THREE)
    await assert_refused(
        member.end(pb.WeightsRef(key=key, digest=digest(b""))), Code.FAILED_PRECONDITION
    )


async def test_calls_cancelled_while_they_are_refused_log_nothing(in_round, caplog):
    """gRPC cannot send the status of a call whose caller has gone away."""
    coordinator, member = await in_round("a", rounds=THREE)
    with capture_logs() as entries:
        for name in ("Membership/Renew", "Membership/Watch", "Coordinator/FindUpload"):
            method = BY_NAME[name]
            call = member.channel.stream_stream(path(method))
            for number in range(300):
                begun = call(metadata=UNREGISTERED)
                await begun.write(b"")
                for _ in range(number % 20):
                    await asyncio.sleep(0)  # the call gets so many steps before its end
                begun.cancel()
        await asyncio.sleep(0.1)  # time for the ends of the last calls to be logged
    assert not [entry for entry in entries if entry["log_level"] in ("warning", "error")]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert coordinator.counters["NOT_A_MEMBER"] > 0


async def test_refused_metrics_are_logged_at_a_bounded_rate(in_round, join):
    """Metrics of a member without an update are read, and logged, before the call is refused; those
    of an unregistered client are not."""
    coordinator, member = await in_round("a", rounds=THREE)
    with capture_logs() as entries:
        for sender in (join(coordinator, "b"), member, member, member):
            with pytest.raises(grpc.aio.AioRpcError):
                await sender.end(pb.WeightsRef(), metrics="[" * 1000)
    (line,) = (entry for entry in entries if entry["event"] == "metrics_refused")
    assert len(str(line)) < 1000
    assert coordinator.counters["invalid_metrics"] == 3
