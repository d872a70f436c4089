"""The client against a real server: chunks, digests, refusals."""

import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

from integration.participant.scripted import (
    PATIENCE_S,
    Ledger,
    ScriptedCoordinator,
    digest,
    failure,
    npy,
    refusal,
    refuse,
)
from integration.participant.store import ScriptedStore, break_off, status
from xain_participant.stages.parts import PartSize
from xain_participant.wire.client import CoordinatorClient, Refused
from xain_participant.wire.direct import DirectTransfer, OfferFailed
from xain_wire.fl import coordinator_pb2 as pb
from xain_workloads.tables.profile import DataProfile

BIG = np.arange(1_000_000, dtype=np.float32)  # four chunks


@pytest.fixture
def server(serve: Callable[..., ScriptedCoordinator]) -> ScriptedCoordinator:
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


def test_rendezvous_sends_profile_and_identity(
    client: CoordinatorClient, server: ScriptedCoordinator
) -> None:
    assert client.rendezvous(DataProfile(3, 2, ("a", "b"))).session_id == "s1"
    client.rendezvous()
    assert server.profiles == [
        pb.DataProfile(num_samples=3, num_features=2, classes=["a", "b"]),
        None,
    ]
    assert server.identities == {"ward-7"}


def test_a_download_is_the_model(client: CoordinatorClient) -> None:
    weights = client.get_weights(client.start_round().model)
    assert weights.dtype == np.float32
    assert weights.tobytes() == BIG.tobytes()
    assert weights.flags.writeable
    assert weights.flags.aligned


def test_the_empty_model_is_an_empty_vector(
    client: CoordinatorClient, server: ScriptedCoordinator
) -> None:
    server.ledger.model = np.empty(0)
    assert client.get_weights(client.start_round().model).shape == (0,)


def test_a_small_update_travels_inside_its_reference(
    client: CoordinatorClient, server: ScriptedCoordinator
) -> None:
    small = np.float32([1, 2, 3])
    ref = client.put_weights(0, small)
    assert (ref.key, ref.size_bytes, ref.data) == ("0/ward-7", len(npy(small)), npy(small))
    assert ref.digest == digest(npy(small))
    client.end_round(client.end_request(0, ref, 5, ""))
    assert server.calls["PutWeights"] == 0
    assert server.ledger.accepted[0][1].tolist() == [1, 2, 3]


def test_a_small_model_is_taken_out_of_its_reference(client: CoordinatorClient) -> None:
    data = npy(np.float32([1, 2, 3]))
    ref = pb.WeightsRef(key="0/global", size_bytes=len(data), digest=digest(data), data=data)
    assert client.get_weights(ref).tolist() == [1, 2, 3]
    ref.digest = digest(b"another")
    assert _refused(lambda: client.get_weights(ref)).status is grpc.StatusCode.DATA_LOSS


def test_an_upload_goes_in_chunks_and_arrives_whole(
    client: CoordinatorClient, server: ScriptedCoordinator
) -> None:
    ref = client.put_weights(0, BIG)
    assert ref == pb.WeightsRef(key="0/ward-7", size_bytes=len(npy(BIG)), digest=digest(npy(BIG)))
    assert server.uploads["0/ward-7"] == npy(BIG)
    assert max(server.upload_chunks) <= PartSize.most_message_bytes
    client.end_round(client.end_request(0, ref, 5, '[{"a": 1}]'))
    num_samples, vector, metrics = server.ledger.accepted[0]
    assert (num_samples, metrics) == (5, '[{"a": 1}]')
    assert vector.tobytes() == BIG.tobytes()


def test_upload_that_is_ended_without_progress_is_refused(
    client: CoordinatorClient, server: ScriptedCoordinator
) -> None:
    """The refusal is passed on, so that the upload is tried again later."""
    server.before["PutWeights"].append(refusal("UNAVAILABLE", grpc.StatusCode.UNAVAILABLE))
    assert _refused(lambda: client.put_weights(0, BIG)).reason == "UNAVAILABLE"
    client.put_weights(0, BIG)
    assert server.uploads["0/ward-7"] == npy(BIG)


def test_an_upload_may_be_answered_before_it_is_read(
    client: CoordinatorClient, server: ScriptedCoordinator
) -> None:
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
def test_a_damaged_download_is_refused(client: CoordinatorClient, wrong: pb.WeightsRef) -> None:
    ref = client.start_round().model
    ref.MergeFrom(wrong)
    refused = _refused(lambda: client.get_weights(ref))
    assert refused.status is grpc.StatusCode.DATA_LOSS
    assert refused.reason == ""


def test_bytes_spoilt_on_the_way_are_noticed(
    client: CoordinatorClient, server: ScriptedCoordinator
) -> None:
    """The coordinator names the right object, and other bytes arrive."""
    ref = client.start_round().model
    spoilt = BIG.copy()
    spoilt[-1] += 1
    server.ledger.model = spoilt
    server.digest_told = ref.digest
    assert _refused(lambda: client.get_weights(ref)).status is grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize("data", [b"", b"no array", npy(np.zeros((2, 2))), npy(BIG)[:-4]])
def test_only_a_whole_vector_is_a_model(
    client: CoordinatorClient, server: ScriptedCoordinator, data: bytes
) -> None:
    """Size and digest as promised, and yet nothing to train from."""
    server.stored = data
    ref = pb.WeightsRef(key="0/global", size_bytes=len(data), digest=digest(data))
    refused = _refused(lambda: client.get_weights(ref))
    assert refused.status is grpc.StatusCode.DATA_LOSS
    assert ".npy" in refused.message


def test_a_download_that_breaks_off_goes_on_where_it_stopped(
    client: CoordinatorClient, server: ScriptedCoordinator
) -> None:
    server.chunk_bytes = 1 << 18
    server.after["GetWeights"].extend([lambda _: None, failure(grpc.StatusCode.UNAVAILABLE)] * 2)
    assert client.get_weights(client.start_round().model).tobytes() == BIG.tobytes()
    assert server.calls["GetWeights"] == 3


def test_a_download_that_brings_nothing_ends(
    client: CoordinatorClient, server: ScriptedCoordinator
) -> None:
    server.before["GetWeights"].append(failure(grpc.StatusCode.UNAVAILABLE))
    refused = _refused(lambda: client.get_weights(client.start_round().model))
    assert refused.status is grpc.StatusCode.UNAVAILABLE


def test_an_offered_model_is_fetched_from_the_store(
    client: CoordinatorClient, server: ScriptedCoordinator, offers: ScriptedStore
) -> None:
    assert client.get_weights(client.start_round().model).tobytes() == BIG.tobytes()
    assert offers.methods == ["GET"]
    assert server.calls["GetWeights"] == 0


def test_a_model_inside_its_reference_is_not_fetched(
    client: CoordinatorClient, offers: ScriptedStore
) -> None:
    data = npy(np.float32([1, 2, 3]))
    ref = pb.WeightsRef(
        key="0/global",
        size_bytes=len(data),
        digest=digest(data),
        data=data,
        url=offers.url("/0/global"),
    )
    assert client.get_weights(ref).tolist() == [1, 2, 3]
    assert offers.calls == []


def test_download_begun_from_the_store_ends_from_the_coordinator(
    client: CoordinatorClient,
    server: ScriptedCoordinator,
    offers: ScriptedStore,
    failed_offers: list[OfferFailed],
) -> None:
    """Nothing is fetched twice."""
    offers.faults.extend([break_off(PartSize.most_message_bytes), status(500)])
    assert client.get_weights(client.start_round().model).tobytes() == BIG.tobytes()
    assert server.download_offsets == [PartSize.most_message_bytes]
    assert [(failed.host, failed.reason) for failed in failed_offers] == [
        (offers.host, "status 500")
    ]


@pytest.mark.parametrize("is_inside", [False, True])
def test_next_try_of_a_download_goes_by_its_own_reference(
    client: CoordinatorClient,
    server: ScriptedCoordinator,
    offers: ScriptedStore,
    is_inside: bool,
) -> None:
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


def test_an_update_is_put_into_the_store_where_it_is_offered(
    client: CoordinatorClient, server: ScriptedCoordinator, offers: ScriptedStore
) -> None:
    ref = client.put_weights(0, BIG, client.start_round().upload)
    assert ref == pb.WeightsRef(
        key="incoming/0/ward-7", size_bytes=len(npy(BIG)), digest=digest(npy(BIG))
    )
    assert offers.objects["/incoming/0/ward-7"] == npy(BIG)
    assert server.calls["PutWeights"] == 0
    client.end_round(client.end_request(0, ref, 5, ""))
    assert server.ledger.accepted[0][1].tobytes() == BIG.tobytes()


def test_an_update_that_the_store_does_not_take_goes_through_the_coordinator(
    client: CoordinatorClient,
    server: ScriptedCoordinator,
    offers: ScriptedStore,
    failed_offers: list[OfferFailed],
) -> None:
    """Such as when training has outlasted the URL. It is told once, and not tried again."""
    offers.faults.append(status(403))
    offer = client.start_round().upload
    for _ in range(2):
        assert client.put_weights(0, BIG, offer).key == "0/ward-7"
    assert server.calls["PutWeights"] == 2
    assert offers.methods == ["PUT"]
    # The store may hang up before its answer has been read.
    ((host, method),) = [(failed.host, failed.method) for failed in failed_offers]
    assert (host, method) == (offers.host, "PUT")


def test_refusals_carry_the_coordinators_reason(
    client: CoordinatorClient, server: ScriptedCoordinator
) -> None:
    server.before["Heartbeat"].append(refusal("NOT_A_MEMBER", grpc.StatusCode.PERMISSION_DENIED))
    refused = _refused(lambda: client.heartbeat(pb.READY, -1))
    assert refused.reason == "NOT_A_MEMBER"
    assert refused.status is grpc.StatusCode.PERMISSION_DENIED
    assert str(refused) == "because"
    assert refused.retry_after_s == 0.0


def test_refusals_carry_when_to_come_again(
    client: CoordinatorClient, server: ScriptedCoordinator
) -> None:
    unavailable = grpc.StatusCode.UNAVAILABLE
    server.before["Watch"].append(
        lambda context: refuse(context, "UNAVAILABLE", unavailable, retry_after_s=1.25)
    )
    refused = _refused(lambda: list(client.watch()))
    assert (refused.reason, refused.status) == ("UNAVAILABLE", unavailable)
    assert refused.retry_after_s == 1.25


@pytest.mark.parametrize(
    "fault",
    [
        failure(grpc.StatusCode.ABORTED),
        lambda context: refuse(context, "NOT_A_MEMBER", domain="proxy.example.org"),
    ],
    ids=["no-details", "another-domain"],
)
def test_reasons_come_from_the_coordinator_only(
    client: CoordinatorClient, server: ScriptedCoordinator, fault: Callable[[object], None]
) -> None:
    server.before["Heartbeat"].append(fault)
    assert _refused(lambda: client.heartbeat(pb.READY, -1)).reason == ""


def test_uploads_and_downloads_are_refused_like_calls(
    client: CoordinatorClient, server: ScriptedCoordinator
) -> None:
    server.before["PutWeights"].append(refusal("ROUND_CLOSED"))
    assert _refused(lambda: client.put_weights(0, BIG)).reason == "ROUND_CLOSED"
    ref = client.start_round().model
    server.before["GetWeights"].append(refusal("UNKNOWN_MODEL", grpc.StatusCode.NOT_FOUND))
    assert _refused(lambda: client.get_weights(ref)).reason == "UNKNOWN_MODEL"


def test_a_call_has_a_deadline(serve: Callable[..., ScriptedCoordinator]) -> None:
    server = serve()
    answer = threading.Event()
    for method in ("Heartbeat", "StartTrainingRound"):
        server.before[method].append(lambda _: answer.wait(PATIENCE_S) and None)
    with CoordinatorClient(server.target, "p", call_timeout_s=0.2) as client:
        client.work_timeout_s = 0.2
        for call in (lambda: client.heartbeat(pb.READY, -1), client.start_round):
            assert _refused(call).status is grpc.StatusCode.DEADLINE_EXCEEDED
    answer.set()


def test_a_watch_tells_changes(client: CoordinatorClient, server: ScriptedCoordinator) -> None:
    seen = client.watch()
    assert next(seen).state == pb.ROUND
    server.change(paused=True)
    assert next(seen).state == pb.STANDBY


def test_a_watch_that_breaks_says_so(
    client: CoordinatorClient, server: ScriptedCoordinator
) -> None:
    server.before["Watch"].append(failure(grpc.StatusCode.UNAVAILABLE))
    refused = _refused(lambda: list(client.watch()))
    assert refused.status is grpc.StatusCode.UNAVAILABLE
