"""Calls of clients that are no members."""

from support.transfers import LARGE, with_model
from support.wire import npy
from xain_wire.fl import coordinator_pb2 as pb


async def test_unregistered_clients_can_have_a_model_while_it_is_trained_and_afterwards(
    start, join
):
    coordinator, member = await with_model(start, join, LARGE)
    unregistered, nameless = join(coordinator, "unregistered"), join(coordinator, None)
    for one in (member, unregistered, nameless):
        assert await one.download("1/global") == npy(LARGE)
    await member.hand_in(LARGE, round_=1)
    await member.until(pb.FINISHED, 1)
    assert await nameless.download("1/global") == npy(LARGE)
