"""Slices of a model that arrive over real channels, in rounds of the rule "assemble"."""

import numpy as np

from support.wire import Code, Member, assert_refused
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection

TENSORS = [pb.Tensor(name=name, shape=[2], dtype="float32") for name in "pqrs"]
ROUNDS = {
    "rounds": 1,
    "min_participants": 2,
    "start_participants": 2,
    "refused_limit": 1,
    "initial_weights": "first",
    "controller": "ordered",
}


async def hand_in(member: Member, tensors: str, round_: int, attempt: int = 0) -> None:
    """Upload and end with the tensors of these names."""
    owned = [tensor for tensor in TENSORS if tensor.name in tensors]
    ref = await member.upload(np.ones(2 * len(owned), np.float32), round_)
    request = pb.EndTrainingRoundRequest(
        participant_id=member.participant_id,
        number_samples=1,
        round=round_,
        update=ref,
        layout=owned,
        attempt=attempt,
    )
    await member.stub.EndTrainingRound(request, metadata=member.metadata)


async def attempt_of(member: Member) -> int:
    answer = await member.heartbeat()
    return int(answer.attempt)


async def test_slice_that_overlaps_another_one_starts_the_round_again(start, join):
    coordinator = await start(rounds=ROUNDS, aggregation={"rule": "assemble"})
    a, b = (join(coordinator, name) for name in "ab")
    for member in (a, b):
        rendezvous = pb.RendezvousRequest(process_group_address=":29500")
        await member.stub.Rendezvous(rendezvous, metadata=member.metadata)
    await a.until(pb.ROUND, 0)
    await hand_in(a, "pqrs", 0)
    for member in (a, b):
        await member.until(pb.ROUND, 1)
    await hand_in(a, "pqrs", 1, attempt=1)
    mismatch = (Code.FAILED_PRECONDITION, "SLICE_MISMATCH")
    await assert_refused(hand_in(b, "rs", 1, 1), *mismatch)
    assert [await attempt_of(a), await attempt_of(b)] == [2, 2]
    stale = (Code.FAILED_PRECONDITION, "STALE_ATTEMPT")
    await assert_refused(hand_in(b, "rs", 1, 1), *stale)
    answer = await b.inspection.ListParticipants(inspection.ListParticipantsRequest())
    assert [one.num_refused for one in answer.participants] == [0, 0]
    await hand_in(a, "pq", 1, attempt=2)
    await hand_in(b, "rs", 1, attempt=2)
    await a.until(pb.FINISHED, 1)
    assert coordinator.driver.session.cause == "completed"
