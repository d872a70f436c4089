"""Refused updates are counted, and a participant with too many of them is replaced."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.process import CoordinatorProcess, Keep
from support.wire import Code, Member, assert_refused, npy, refused
from xain_coordinator.core.vocabulary.commands import Tick
from xain_coordinator.core.vocabulary.errors import Unavailable
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection

GOOD = np.float32([1, 2, 3])
BAD = np.float32([1, np.nan, 3])
THREE = {"rounds": 3, "min_participants": 2, "start_participants": 3, "controller": "ordered"}


INVALID = (Code.INVALID_ARGUMENT, "INVALID_UPDATE")


async def status_of(member: Member, participant_id: str) -> inspection.ParticipantStatus:
    answer = await member.inspection.ListParticipants(inspection.ListParticipantsRequest())
    (status,) = [one for one in answer.participants if one.participant_id == participant_id]
    return status


async def bring_nan(member: Member) -> None:
    await assert_refused(member.hand_in(BAD), *INVALID)


async def test_each_kind_of_unusable_update_is_counted(in_round):
    """Refusals of stream and session count; late updates and updates for others do not."""
    _, a, b, _ = await in_round(
        "a", "b", "c", rounds={**THREE, "refused_limit": 99}, server={"max_update_bytes": 1000}
    )
    await b.hand_in(GOOD)  # from now on the shape is known
    too_large = (Code.RESOURCE_EXHAUSTED, "TOO_LARGE")
    good, other = npy(GOOD), npy(GOOD + 1)
    bad = [
        (a.hand_in(BAD), INVALID),
        (a.hand_in(BAD), INVALID),
        (a.hand_in(np.float32([1])), INVALID),
        (a.hand_in(np.float64([1, 2, 3])), INVALID),
        (a.hand_in(GOOD, num_samples=-1), INVALID),
        (a.upload_bytes(b"no array at all"), INVALID),
        (a.upload_bytes(good, announced=b"0" * 16), INVALID),
        (a.upload_bytes(other, size=len(other) - 1), INVALID),
        (a.upload(np.zeros(1000, np.float32)), too_large),
    ]
    for number, (call, why) in enumerate(bad, 1):
        await assert_refused(call, *why)
        assert (await status_of(a, "a")).num_refused == number
    not_counted = [
        (a.upload(GOOD, 1), "STALE_ROUND"),
        (a.end(pb.WeightsRef(key="0/a", digest=b"1" * 16)), "UPLOAD_MISSING"),
        (a.hand_in(GOOD, round_=7), "STALE_ROUND"),
        (a.end(name="../a"), "INVALID_NAME"),
    ]
    for call, why in not_counted:
        assert (await refused(call))[1] == why
    assert (await status_of(a, "a")).num_refused == len(bad)
    await a.hand_in(GOOD)
    assert not (await status_of(a, "a")).HasField("left_out_until")


async def test_upload_that_is_there_is_handed_in_by_its_digest_alone(in_round):
    """Once there is a model, whose updates have a size. What is not there is missing, and no fault
    of a size that nobody has told."""
    _, a = await in_round("a", rounds={"rounds": 2})
    await a.hand_in(GOOD)
    await a.until(pb.ROUND, 1)
    assert (await refused(a.end(pb.WeightsRef(), round_=1)))[1] == "UPLOAD_MISSING"
    assert (await status_of(a, "a")).num_refused == 0
    ref = await a.upload(GOOD, 1)
    await a.end(pb.WeightsRef(key=ref.key, digest=ref.digest), round_=1)
    await a.until(pb.FINISHED, 1)


async def test_a_xain_client_is_counted_by_its_address(in_round):
    """XAIN's client says neither its name nor which round it means."""
    coordinator, member = await in_round(None, rounds={"rounds": 1})
    session = coordinator.driver.session
    (address,) = session.members
    upload = coordinator.store.upload("0/uuid")
    upload.write(npy(BAD))
    upload.commit(overwrite=False)
    await assert_refused(member.end(name="uuid", round_=None), *INVALID)
    assert coordinator.driver.session.selection.faults_of(address).num_refused == 1


async def test_a_refusal_is_told_when_it_is_durable(in_round, monkeypatch):
    """If it cannot be written down, its sender hears UNAVAILABLE, and comes again to the next."""
    coordinator, a = await in_round("a", rounds={"rounds": 1})
    ref = await a.upload(BAD)

    def fail(records: Any, objects: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(coordinator.driver._journal, "prepare", fail)
    await assert_refused(a.end(ref), Code.UNAVAILABLE, "UNAVAILABLE")
    with pytest.raises(Unavailable):
        await coordinator.driver.submit(Tick())


@pytest.fixture
async def process(keep: Keep, tmp_path: Path) -> CoordinatorProcess:
    settings = {f"rounds.{key}": value for key, value in THREE.items()}
    settings["rounds.fraction_participants"] = "2/3"
    coordinator = keep(CoordinatorProcess(tmp_path, settings))
    await coordinator.start()
    return coordinator


async def test_a_refusal_that_was_heard_of_survives_a_kill(process):
    """Killed after each of three, it leaves out after the third as if nothing had been."""
    members = {name: Member(process.port, name) for name in "abc"}
    for member in members.values():
        await member.rendezvous()
    await members["a"].until(pb.ROUND, 0)
    for _ in range(3):
        await bring_nan(members["a"])
        await process.kill()
        await process.start()
        await asyncio.gather(*(member.close() for member in members.values()))
        members = {name: Member(process.port, name) for name in "abc"}
    assert (await members["a"].heartbeat()).state == pb.STANDBY
    assert (await members["c"].heartbeat()).state == pb.ROUND
    status = await status_of(members["b"], "a")
    assert (status.num_refused, status.left_out_until) == (3, 4)
    await asyncio.gather(*(member.close() for member in members.values()))
