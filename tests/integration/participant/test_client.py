"""The client against a real server: chunks, digests, refusals."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

from integration.participant.conftest import Serve
from integration.participant.scripted import (
    PATIENCE_S,
    Ledger,
    ScriptedCoordinator,
    failure,
    refusal,
    refuse,
)
from integration.participant.store import ScriptedStore, break_off, status
from support.wire import digest, npy
from xain_participant.stages.parts import PartSize
from xain_participant.wire.client import Connections, CoordinatorClient, Refused
from xain_participant.wire.direct import DirectTransfer, OfferFailed
from xain_wire.fl import coordinator_pb2 as pb
from xain_workloads.tables.profile import DataProfile

BIG = np.arange(1_000_000, dtype=np.float32)  # four chunks


@pytest.fixture
def server(serve: Serve) -> ScriptedCoordinator:
    return serve(Ledger(model=BIG, members={"ward-7"}))


@pytest.fixture
def failed_offers() -> list[OfferFailed]:
    """Failures of offers that the client has reported."""
    return []


@pytest.fixture
def client(
    server: ScriptedCoordinator, failed_offers: list[OfferFailed]
) -> Iterator[CoordinatorClient]:
    with CoordinatorClient(
        server.target,
        "ward-7",
        call_timeout_s=PATIENCE_S,
        direct=DirectTransfer(),
        on_offer_failed=failed_offers.append,
    ) as client:
        yield client


@pytest.fixture
def offers(server: ScriptedCoordinator, store: ScriptedStore) -> ScriptedStore:
    """The store where the coordinator offers to fetch and put weights."""
    server.store_url = store.url
    server.store_objects = store.objects
    return store


def test_rendezvous_sends_profile_and_identity(client, server):
    assert client.rendezvous(DataProfile(3, 2, ("a", "b"))).session_id == "s1"
    client.rendezvous()
    assert server.profiles == [
        pb.DataProfile(num_samples=3, num_features=2, classes=["a", "b"]),
        None,
    ]
    assert server.identities == {"ward-7"}


def test_a_download_is_the_model(client):
    weights = client.get_weights(client.start_round().model)
    assert weights.dtype == np.float32
    assert weights.tobytes() == BIG.tobytes()
    assert weights.flags.writeable
    assert weights.flags.aligned


def test_an_upload_goes_in_chunks_and_arrives_whole(client, server):
    ref = client.put_weights(0, BIG)
    assert ref == pb.WeightsRef(key="0/ward-7", size_bytes=len(npy(BIG)), digest=digest(npy(BIG)))
    assert server.uploads["0/ward-7"] == npy(BIG)
    assert max(server.upload_chunks) <= PartSize.most_message_bytes
    client.end_round(client.end_request(0, ref, 5, '[{"a": 1}]'))
    num_samples, vector, metrics = server.ledger.accepted[0]
    assert (num_samples, metrics) == (5, '[{"a": 1}]')
    assert vector.tobytes() == BIG.tobytes()


def test_upload_that_is_ended_without_progress_is_refused(client, server):
    """The refusal is passed on, so that the upload is tried again later."""
    server.before["PutWeights"].append(refusal("UNAVAILABLE", grpc.StatusCode.UNAVAILABLE))
    assert _refused(lambda: client.put_weights(0, BIG)).reason == "UNAVAILABLE"
    client.put_weights(0, BIG)
    assert server.uploads["0/ward-7"] == npy(BIG)


def test_an_upload_may_be_answered_before_it_is_read(client, server):
    """The coordinator does so with an update that it has accepted already."""
    server.answer_uploads_with = pb.WeightsRef(key="0/earlier")
    assert client.put_weights(0, np.zeros(20_000_000, np.float32)).key == "0/earlier"


def _refused(call: Callable[[], object]) -> Refused:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    "wrong",
    [
        pb.WeightsRef(digest=bytes(16)),
        pb.WeightsRef(size_bytes=len(npy(BIG)) - 1),
        pb.WeightsRef(size_bytes=len(npy(BIG)) + 1),
    ],
    ids=["digest", "too-short", "too-long"],
)
def test_a_damaged_download_is_refused(client, wrong):
    ref = client.start_round().model
    ref.MergeFrom(wrong)
    refused = _refused(lambda: client.get_weights(ref))
    assert refused.status is grpc.StatusCode.DATA_LOSS
    assert refused.reason == ""


def test_a_damaged_download_stays_one_while_the_client_closes(server):
    """A call of a client that closes is cancelled, and what has arrived is damaged all the same."""
    with contextlib.closing(Connections(server.target)) as connections:
        client = CoordinatorClient(server.target, "ward-7", connections=connections)
        client.close()  # and the connections stay, as those of other participants
        ref = pb.WeightsRef(key="0/global", size_bytes=len(npy(BIG)), digest=bytes(16))
        refused = _refused(lambda: client.get_weights(ref))
    assert refused.status is grpc.StatusCode.DATA_LOSS
    assert "another object" in refused.message


@pytest.mark.parametrize("data", [b"", b"no array", npy(np.zeros((2, 2))), npy(BIG)[:-4]])
def test_only_a_whole_vector_is_a_model(client, server, data):
    """Size and digest as promised, and yet nothing to train from."""
    server.stored = data
    ref = pb.WeightsRef(key="0/global", size_bytes=len(data), digest=digest(data))
    refused = _refused(lambda: client.get_weights(ref))
    assert refused.status is grpc.StatusCode.DATA_LOSS
    assert ".npy" in refused.message


def test_a_download_that_breaks_off_goes_on_where_it_stopped(client, server):
    server.chunk_bytes = 1 << 18
    server.after["GetWeights"].extend([lambda _: None, failure(grpc.StatusCode.UNAVAILABLE)] * 2)
    assert client.get_weights(client.start_round().model).tobytes() == BIG.tobytes()
    assert server.calls["GetWeights"] == 3


def test_a_download_that_brings_nothing_ends(client, server):
    server.before["GetWeights"].append(failure(grpc.StatusCode.UNAVAILABLE))
    refused = _refused(lambda: client.get_weights(client.start_round().model))
    assert refused.status is grpc.StatusCode.UNAVAILABLE


def test_download_begun_from_the_store_ends_from_the_coordinator(
    client, server, offers, failed_offers
):
    """Nothing is fetched twice."""
    offers.faults.extend([break_off(PartSize.most_message_bytes), status(500)])
    assert client.get_weights(client.start_round().model).tobytes() == BIG.tobytes()
    assert server.download_offsets == [PartSize.most_message_bytes]
    assert [(failed.host, failed.reason) for failed in failed_offers] == [
        (offers.host, "status 500")
    ]


@pytest.mark.parametrize("is_inside", [False, True])
def test_next_try_of_a_download_goes_by_its_own_reference(client, server, offers, is_inside):
    """The URL of the first one may have expired meanwhile, and its key be another round's."""
    later = client.start_round().model
    ref = pb.WeightsRef(key=later.key, size_bytes=later.size_bytes, digest=later.digest)
    away = failure(grpc.StatusCode.UNAVAILABLE)
    server.before["GetWeights"].extend([lambda _: None, away])
    server.after["GetWeights"].append(away)  # a part of the model has come
    _refused(lambda: client.get_weights(ref))
    if is_inside:
        later.data = npy(BIG)
    assert client.get_weights(later).tobytes() == BIG.tobytes()
    assert offers.methods == ([] if is_inside else ["GET"])


def test_refusals_carry_the_coordinators_reason(client, server):
    server.before["Heartbeat"].append(refusal("NOT_A_MEMBER", grpc.StatusCode.PERMISSION_DENIED))
    refused = _refused(lambda: client.heartbeat(pb.READY, -1))
    assert refused.reason == "NOT_A_MEMBER"
    assert refused.status is grpc.StatusCode.PERMISSION_DENIED
    assert str(refused) == "because"
    assert refused.retry_after_s == 0.0


@pytest.mark.parametrize(
    "fault",
    [
        failure(grpc.StatusCode.ABORTED),
        lambda context: refuse(context, "NOT_A_MEMBER", domain="proxy.example.org"),
    ],
    ids=["no-details", "another-domain"],
)
def test_reasons_come_from_the_coordinator_only(client, server, fault):
    server.before["Heartbeat"].append(fault)
    assert _refused(lambda: client.heartbeat(pb.READY, -1)).reason == ""


def test_a_call_has_a_deadline(serve):
    server = serve()
    answer = threading.Event()
    for method in ("Heartbeat", "StartTrainingRound"):
        server.before[method].append(lambda _: answer.wait(PATIENCE_S) and None)
    with CoordinatorClient(server.target, "p", call_timeout_s=0.2) as client:
        client.work_timeout_s = 0.2
        for call in (lambda: client.heartbeat(pb.READY, -1), client.start_round):
            assert _refused(call).status is grpc.StatusCode.DEADLINE_EXCEEDED
    answer.set()


def test_a_watch_tells_changes(client, server):
    seen = client.watch()
    assert next(seen).state == pb.ROUND
    server.change(paused=True)
    assert next(seen).state == pb.STANDBY


def test_a_watch_that_breaks_says_so(client, server):
    server.before["Watch"].append(failure(grpc.StatusCode.UNAVAILABLE))
    refused = _refused(lambda: list(client.watch()))
    assert refused.status is grpc.StatusCode.UNAVAILABLE
