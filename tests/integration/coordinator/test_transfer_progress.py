"""Progress of transfers, as heartbeats tell it and the status shows it."""

from typing import Any

import pytest

from support.wire import Member
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_wire.metadata import INSTANCE_ID_KEY

UPLOAD, DOWNLOAD = pb.Transfer.UPLOAD, pb.Transfer.DOWNLOAD


async def shown(member: Member) -> tuple["pb.Transfer.Direction.ValueType", int] | None:
    """Direction and percent of the first participant's transfer."""
    listed = await member.inspection.ListParticipants(inspection.ListParticipantsRequest())
    first = listed.participants[0]
    if not first.HasField("transfer"):
        return None
    return first.transfer.direction, first.transfer.percent


async def tell(member: Member, direction: Any, percent: int, round_: int = 0) -> None:
    await member.heartbeat(pb.TRAINING, round_, pb.Transfer(direction=direction, percent=percent))


@pytest.fixture
async def member(start: Any, join: Any) -> Member:
    """A participant that is selected for round 0, as its heartbeat says."""
    coordinator = await start(rounds={"rounds": 2, "min_participants": 1})
    member = join(coordinator, "a")
    member.metadata += ((INSTANCE_ID_KEY, "1"),)
    await member.rendezvous()
    await member.until(pb.ROUND, 0)
    await member.heartbeat(pb.TRAINING, 0)
    return member


async def test_status_shows_the_transfer_of_the_last_heartbeat(member):
    assert await shown(member) is None
    await tell(member, DOWNLOAD, 80)
    assert await shown(member) == (DOWNLOAD, 80)
    await tell(member, UPLOAD, 0)
    assert await shown(member) == (UPLOAD, 0)
    await member.heartbeat(pb.TRAINING, 0)
    assert await shown(member) is None


async def test_accepted_update_ends_the_transfer_that_is_shown(member):
    """At once, though the participant's next heartbeat comes only in the next round."""
    await tell(member, UPLOAD, 43)
    await member.hand_in([1.0, 2.0])
    assert await shown(member) is None
    await member.until(pb.ROUND, 1)
    assert await shown(member) is None
    await tell(member, DOWNLOAD, 5, round_=1)
    assert await shown(member) == (DOWNLOAD, 5)


@pytest.mark.parametrize(
    ("direction", "percent", "expected"),
    [(UPLOAD, 4000, (UPLOAD, 100)), (UPLOAD, 2**32 - 1, (UPLOAD, 100)), (7, 43, None)],
)
async def test_absurd_transfer_breaks_nothing(member, direction, percent, expected):
    """The heartbeat counts, and the round goes on."""
    await tell(member, direction, percent)
    assert await shown(member) == expected
    await member.hand_in([1.0, 2.0])
    await member.until(pb.ROUND, 1)
