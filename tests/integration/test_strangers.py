"""What a coordinator does for those who are no members."""

from support.transfers import LARGE, MIB, NEVER_S, with_model
from support.wire import Member, npy
from xain_coordinator.server import places
from xain_coordinator.server.places import SMALL_BYTES
from xain_proto.fl import coordinator_pb2 as pb


async def largest_message(member: Member, data: bytes) -> int:
    """Of a whole download of the model 1/global, in bytes of weights."""
    request = pb.GetWeightsRequest(key="1/global")
    call = member.stub.GetWeights(request, metadata=member.metadata)
    chunks = [message.data async for message in call]
    assert b"".join(chunks) == data
    return max(map(len, chunks))


async def test_a_stranger_has_models_in_small_chunks_until_the_end(start, join, monkeypatch):
    """What members share is not for it while they train, and for everybody afterwards."""
    monkeypatch.setattr(places, "SLOW_S", NEVER_S)
    coordinator, member = await with_model(start, join, LARGE)
    stranger, nameless = join(coordinator, "stranger"), join(coordinator, None)
    assert await largest_message(member, npy(LARGE)) == MIB
    assert await largest_message(stranger, npy(LARGE)) == SMALL_BYTES
    assert await largest_message(nameless, npy(LARGE)) == SMALL_BYTES
    await member.hand_in(LARGE, round_=1)
    await member.until(pb.FINISHED, 1)
    assert await largest_message(nameless, npy(LARGE)) == MIB
