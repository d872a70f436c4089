"""Whole sessions over a real channel."""

import asyncio
import io
import json
from fractions import Fraction

import grpc
import numpy as np
import pytest

from support.wire import digest, npy
from xain_coordinator.core.values import Phase
from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.fl import inspection_pb2 as inspection


def array(data: bytes) -> np.ndarray:
    return np.load(io.BytesIO(data), allow_pickle=False)


async def test_a_session_from_rendezvous_to_finished(start, join):
    """Two rounds: the first initialises with equal weights, the second averages by samples."""
    coordinator = await start(rounds={"rounds": 2, "min_participants": 2, "epochs": 3})
    a, b = join(coordinator, "a"), join(coordinator, "b")
    assert (await a.rendezvous()).reply == pb.ACCEPT
    assert (await a.heartbeat()).state == pb.STANDBY
    assert (await b.rendezvous()).reply == pb.ACCEPT
    await a.until(pb.ROUND, 0)

    first = await a.start()
    assert (first.round, first.epochs, first.epoch_base) == (0, 0, 0)
    assert array(await a.download(first.model.key)).shape == (0,)
    await a.hand_in([0.0, 2.0], num_samples=1)
    await b.hand_in([2.0, 4.0], num_samples=99)  # nothing is learnt yet, so it does not weigh
    await a.until(pb.ROUND, 1)

    second = await b.start()
    assert (second.round, second.epochs, second.epoch_base) == (1, 3, 0)
    assert array(await b.download(second.model.key)).tolist() == [1.0, 3.0]
    await a.hand_in([1.0, 1.0], num_samples=3, round_=1)
    seen = await a.heartbeat()
    assert (seen.state, seen.round, seen.update_accepted) == (pb.ROUND, 1, True)
    assert not (await b.heartbeat()).update_accepted
    await b.hand_in([0.0, 0.0], num_samples=1, round_=1)
    await a.until(pb.FINISHED, 1)
    assert array(await a.download("2/global")).tolist() == [0.75, 0.75]


async def test_finished_is_served_to_everybody_for_ever(start, join):
    """After the end heartbeats hear FINISHED, and nothing that comes changes the session (X3)."""
    coordinator = await start(rounds={"rounds": 1, "min_participants": 1})
    a, late = join(coordinator, "a"), join(coordinator, "late")
    await a.rendezvous()
    await a.until(pb.ROUND, 0)
    await a.hand_in([1.0])
    await a.until(pb.FINISHED, 0)
    ended = coordinator.driver.session
    await a.heartbeat(pb.FINISHED)
    assert (await late.rendezvous()).reply == pb.ACCEPT
    assert (await late.heartbeat()).state == pb.FINISHED
    assert [seen.state async for seen in late.watch()] == [pb.FINISHED]
    assert coordinator.driver.session == ended


async def test_beyond_max_participants_comes_later_with_a_delay(start, join):
    """LATER says when to ask again; a known participant is accepted again, not counted twice."""
    coordinator = await start(
        rounds={"min_participants": 2},
        server={"heartbeat_time_s": 1.0, "heartbeat_timeout_s": 0.5},
    )
    a, b, c = (join(coordinator, name) for name in "abc")
    await a.rendezvous()
    accepted = await a.rendezvous()
    assert (accepted.reply, accepted.heartbeat_interval_ms) == (pb.ACCEPT, 1000)
    await b.rendezvous()
    assert (await a.rendezvous()).reply == pb.ACCEPT
    later = await c.rendezvous()
    assert (later.reply, later.retry_after_ms) == (pb.LATER, 1500)


async def test_rendezvous_at_once_admits_exactly_as_many_as_there_are_places(start, join):
    """Twenty at the same moment: N are in and the round opens (X7)."""
    coordinator = await start(rounds={"min_participants": 5})
    members = [join(coordinator, f"p{i:02}") for i in range(20)]
    replies = await asyncio.gather(*(member.rendezvous() for member in members))
    assert [reply.reply for reply in replies].count(pb.ACCEPT) == 5
    admitted = [m for m, reply in zip(members, replies, strict=True) if reply.reply == pb.ACCEPT]
    await admitted[0].until(pb.ROUND, 0)
    assert len(coordinator.driver.session.members) == 5
    assert coordinator.driver.session.phase is Phase.COLLECTING


async def test_last_updates_at_once_aggregate_once(start, join):
    """All hand in at the same moment: one aggregation, one new round (X6)."""
    coordinator = await start(rounds={"rounds": 3, "min_participants": 8})
    members = [join(coordinator, f"p{i}") for i in range(8)]
    for member in members:
        await member.rendezvous()
    await members[0].until(pb.ROUND, 0)
    await asyncio.gather(*(member.hand_in([float(i)]) for i, member in enumerate(members)))
    await members[0].until(pb.ROUND, 1)
    models = await members[0].inspection.ListModels(inspection.ListModelsRequest())
    assert [model.ref.key for model in models.models] == ["0/global", "1/global"]
    assert coordinator.driver.session.epoch_base == 0
    assert array(await members[0].download("1/global")).tolist() == [3.5]


async def test_a_departure_completes_a_round(start, join):
    """The last one outstanding leaves: what is there is aggregated at once, without anybody asking
    (X5); a departed sender's update counts."""
    coordinator = await start(
        rounds={"rounds": 2, "min_participants": 2, "start_participants": 3, "max_participants": 3}
    )
    a, b, c = (join(coordinator, name) for name in "abc")
    for member in (a, b, c):
        await member.rendezvous()
    await a.until(pb.ROUND, 0)
    await a.hand_in([1.0])
    await b.hand_in([3.0])
    await c.heartbeat(pb.FINISHED)
    await a.until(pb.ROUND, 1)
    assert array(await a.download("1/global")).tolist() == [2.0]


async def test_silence_is_a_departure_and_a_restart_joins_again(start, join):
    """A participant that died is noticed when its lease runs out; the round waits for the quorum
    (X4) and goes on with the same updates when the participant is back under its id."""
    coordinator = await start(
        rounds={"rounds": 1, "min_participants": 2},
        server={"heartbeat_time_s": 0.2, "heartbeat_timeout_s": 0.1},
    )
    a, b = join(coordinator, "a"), join(coordinator, "b")
    await a.rendezvous()
    await b.rendezvous()
    await a.until(pb.ROUND, 0)

    async def alive() -> None:
        while True:
            await a.heartbeat()
            await asyncio.sleep(0.05)

    beating = asyncio.create_task(alive())
    await a.hand_in([1.0])
    seen = await a.until(pb.STANDBY, 0)  # b has not been heard for 0.3 s
    assert seen.update_accepted
    await b.rendezvous()
    await b.until(pb.ROUND, 0)
    await b.hand_in([3.0])
    beating.cancel()
    await a.until(pb.FINISHED, 0)
    assert array(await a.download("1/global")).tolist() == [2.0]


async def test_a_restarted_participant_is_told_that_its_update_is_in(start, join):
    """It lost its memory, the coordinator did not: nothing is trained twice."""
    coordinator = await start(rounds={"min_participants": 2})
    a, b = join(coordinator, "a"), join(coordinator, "b")
    await a.rendezvous()
    await b.rendezvous()
    await a.until(pb.ROUND, 0)
    await a.hand_in([1.0])
    again = join(coordinator, "a")
    assert (await again.rendezvous()).reply == pb.ACCEPT
    assert (await again.heartbeat()).update_accepted
    assert (await again.start()).update_accepted


async def test_without_an_id_the_peer_address_is_the_identity(start, join):
    """XAIN clients: each connection is a participant, its upload name is bound to it (X12)."""
    coordinator = await start(rounds={"rounds": 1, "min_participants": 2})
    a, b = join(coordinator, None), join(coordinator, None)
    await a.rendezvous()
    await b.rendezvous()
    assert len(coordinator.driver.session.members) == 2
    assert all(name.startswith("ipv4:127.0.0.1:") for name in coordinator.driver.session.members)
    await a.until(pb.ROUND, 0)
    # What a XAIN client does with S3 of its own, done through the store that the coordinator has.
    for name, value in (("uuid-a", 1.0), ("uuid-b", 3.0)):
        upload = coordinator.store.upload(f"0/{name}")
        upload.write(npy([value]))
        upload.commit(overwrite=False)
    await a.end(name="uuid-a", round_=None)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await b.end(name="uuid-a", round_=None)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await b.end(name="uuid-b", round_=None)
    await a.until(pb.FINISHED, 0)
    assert array(await a.download("1/global")).tolist() == [2.0]


async def test_the_initial_model_comes_from_the_profiles(start, join):
    """With a workload the first round trains already, on the union of the classes."""
    coordinator = await start(rounds={"rounds": 1, "min_participants": 2}, workload={"name": "sgd"})
    a, b = join(coordinator, "a"), join(coordinator, "b")
    await a.rendezvous(pb.DataProfile(num_samples=5, num_features=4, classes=["2", "10"]))
    await b.rendezvous(pb.DataProfile(num_samples=5, num_features=4, classes=["1", "2"]))
    await a.until(pb.ROUND, 0)
    work = await a.start()
    assert work.epochs == 1
    assert [(t.name, list(t.shape)) for t in work.layout] == [("coef", [3, 4]), ("intercept", [3])]
    assert work.metadata["classes"] == '["1", "2", "10"]'
    vector = array(await a.download(work.model.key))
    assert vector.shape == (15,)
    assert not vector.any()


async def test_small_weights_travel_inside_their_reference(start, join):
    """Down with the assignment, up with the hand-in; in the store they are what a stream leaves."""
    coordinator = await start(rounds={"rounds": 2, "min_participants": 2})
    a, b = join(coordinator, "a"), join(coordinator, "b")
    await a.rendezvous()
    await b.rendezvous()
    await a.until(pb.ROUND, 0)
    data = npy([1.0, 2.0])
    ref = pb.WeightsRef(size_bytes=len(data), digest=digest(data), data=data)
    await a.end(ref)
    await a.end(ref)  # again: the first answer again
    with coordinator.store.open("0/a") as reader:
        assert reader.read(0, reader.size) == data
    await b.hand_in([3.0, 4.0])
    await a.until(pb.ROUND, 1)
    model = (await a.start()).model
    assert model.data == await a.download("1/global")
    assert array(model.data).tolist() == [2.0, 3.0]


async def test_large_weights_travel_in_chunks(start, join):
    """Several chunks up and down, from any offset, bit for bit."""
    coordinator = await start(rounds={"rounds": 1, "min_participants": 1})
    a = join(coordinator, "a")
    await a.rendezvous()
    await a.until(pb.ROUND, 0)
    vector = np.random.default_rng(0).standard_normal(700_000).astype(np.float32)
    await a.hand_in(vector)
    await a.until(pb.FINISHED, 0)
    data = await a.download("1/global")
    np.testing.assert_array_equal(array(data), vector)
    assert await a.download("1/global", offset=1_500_001) == data[1_500_001:]
    assert await a.download("1/global", offset=len(data)) == b""


async def test_an_accepted_update_is_never_overwritten(start, join):
    """An upload begun before the acceptance and ended after it leaves the accepted one alone."""
    coordinator = await start(rounds={"rounds": 1, "min_participants": 2})
    a, b = join(coordinator, "a"), join(coordinator, "b")
    await a.rendezvous()
    await b.rendezvous()
    await a.until(pb.ROUND, 0)
    other = npy([100.0])
    header = pb.PutWeightsRequest.Header(round=0, size_bytes=len(other), digest=b"?" * 16)
    late = a.stub.PutWeights(metadata=a.metadata)
    await late.write(pb.PutWeightsRequest(header=header, data=other[:50]))
    await a.hand_in([1.0])
    await late.write(pb.PutWeightsRequest(data=other[50:]))
    await late.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await late
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    await b.hand_in([3.0])
    await a.until(pb.FINISHED, 0)
    assert array(await a.download("1/global")).tolist() == [2.0]


async def test_inspection_tells_what_an_operator_asks(start, join):
    """Status, participants, rounds and models of a session in its second round."""
    coordinator = await start(rounds={"rounds": 2, "min_participants": 2})
    a, b = join(coordinator, "a"), join(coordinator, "b")
    status = await a.inspection.GetStatus(inspection.GetStatusRequest())
    assert status.waiting_for == "2 more participants: 0 of 2 connected."
    await a.rendezvous(pb.DataProfile(num_samples=7, num_features=4))
    await b.rendezvous()
    await a.until(pb.ROUND, 0)
    await a.hand_in([1.0], num_samples=7)
    await b.hand_in([1.0], num_samples=5)
    await a.until(pb.ROUND, 1)
    await b.hand_in([1.0], num_samples=5, round_=1)
    await a.heartbeat(pb.TRAINING, 1)

    status = await a.inspection.GetStatus(inspection.GetStatusRequest())
    assert (status.state, status.phase, status.round) == (pb.ROUND, "collecting", 1)
    assert (status.num_connected, status.num_selected, status.num_updates) == (2, 2, 1)
    assert status.waiting_for == "1 of 2 updates: a."
    listed = await a.inspection.ListParticipants(inspection.ListParticipantsRequest())
    people = {p.participant_id: p for p in listed.participants}
    assert people["a"].profile.num_samples == 7
    assert people["a"].reported_state == pb.TRAINING
    assert (people["a"].update_accepted, people["b"].update_accepted) == (False, True)
    assert (people["a"].rounds_contributed, people["b"].rounds_contributed) == (1, 2)
    assert all(0 < p.lease_seconds <= 15 for p in people.values())
    rounds = (await a.inspection.ListRounds(inspection.ListRoundsRequest())).rounds
    assert [(r.round, r.phase, r.num_samples) for r in rounds] == [
        (0, "published", 12),
        (1, "collecting", 5),
    ]
    assert list(rounds[0].contributors) == ["a", "b"]
    models = (await a.inspection.ListModels(inspection.ListModelsRequest(limit=1))).models
    assert [(m.round, m.ref.key, m.dtype, list(m.shape)) for m in models] == [
        (1, "1/global", "float64", [1])
    ]


async def test_metrics_reach_the_local_file(start, join, tmp_path):
    """State, round and what participants report end up in the embedded metrics file,
    under the sender's own id."""
    coordinator = await start(rounds={"rounds": 1, "min_participants": 1})
    a = join(coordinator, "a")
    await a.rendezvous()
    await a.until(pb.ROUND, 0)
    text = '[{"measurement":"participant","time":5,"tags":{"id":"b"},"fields":{"loss":0.25}}]'
    await a.end(await a.upload([1.0]), metrics=text)
    await a.until(pb.FINISHED, 0)
    await coordinator.stop()
    points = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    reported = [point for point in points if "loss" in point["fields"]]
    assert [(point["tags"], point["fields"]) for point in reported] == [
        ({"id": "a"}, {"loss": 0.25})  # its own, whatever it claims
    ]
    states = [p["fields"]["state"] for p in points if p["measurement"] == "coordinator"]
    assert states[-1] == 2


async def test_rules_are_exact(start):
    """A fraction in the configuration is the decimal that was written."""
    coordinator = await start(rounds={"min_participants": 10, "fraction_participants": 0.1})
    rules = coordinator.driver.session.rules
    assert (rules.fraction_participants, rules.num_required) == (Fraction(1, 10), 91)
