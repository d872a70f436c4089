"""The answer to a small update brings the next round, if that opens soon."""

import asyncio

import numpy as np
import pytest

from support.waiting import until
from support.wire import inside
from xain_coordinator.core.machine.questions import advertise
from xain_wire.fl import coordinator_pb2 as pb

ROUNDS = {"rounds": 3, "min_participants": 2, "start_participants": 2}


def update_of(member, round_: int, *, takes_next_round: bool = True) -> pb.EndTrainingRoundRequest:
    return pb.EndTrainingRoundRequest(
        participant_id=member.participant_id,
        number_samples=1,
        round=round_,
        update=inside(np.float32([round_, 1.0])),
        takes_next_round=takes_next_round,
    )


async def hand_in(member, round_: int, **options: bool) -> pb.EndTrainingRoundResponse:
    request = update_of(member, round_, **options)
    return await member.stub.EndTrainingRound(request, metadata=member.metadata)


async def test_answers_bring_the_work_of_the_next_round(enter, start):
    """Watch does not repeat what an answer brings. The end comes by Watch."""
    coordinator = await start(rounds=ROUNDS)
    members = await enter(coordinator, "a", "b", round_=0)
    streams = [one.stub.Watch(pb.WatchRequest(), metadata=one.metadata) for one in members]
    for stream in streams:
        assert (await stream.read()).round == 0
    for round_ in range(2):
        answers = await asyncio.gather(*(hand_in(member, round_) for member in members))
        for answer in answers:
            assert answer.next_round.state == pb.ROUND
            assert answer.next_round.work.round == answer.next_round.round == round_ + 1
            assert answer.next_round.work.model.data
    last = await asyncio.gather(*(hand_in(member, 2) for member in members))
    assert not any(answer.HasField("next_round") for answer in last)
    for stream in streams:
        message = await stream.read()
        assert (message.state, message.round) == (pb.FINISHED, 2)


async def test_answer_does_not_wait_for_a_slow_round(enter, start):
    """The news comes by Watch then."""
    coordinator = await start(rounds=ROUNDS)
    a, b = await enter(coordinator, "a", "b", round_=0)
    stream = a.stub.Watch(pb.WatchRequest(), metadata=a.metadata)
    await stream.read()
    assert not (await hand_in(a, 0)).HasField("next_round")
    await hand_in(b, 0, takes_next_round=False)
    message = await stream.read()
    assert message.work.round == message.round == 1


async def test_participant_that_does_not_ask_gets_the_news_by_watch(enter, start):
    coordinator = await start(rounds=ROUNDS)
    a, b = await enter(coordinator, "a", "b", round_=0)
    stream = a.stub.Watch(pb.WatchRequest(), metadata=a.metadata)
    await stream.read()
    answers = await asyncio.gather(
        hand_in(a, 0, takes_next_round=False), hand_in(b, 0, takes_next_round=True)
    )
    assert [answer.HasField("next_round") for answer in answers] == [False, True]
    assert (await stream.read()).work.round == 1


async def test_caller_that_hangs_up_while_it_waits_gets_the_news_by_watch(enter, start):
    coordinator = await start(rounds=ROUNDS)
    coordinator._server.service.next_round_s = 60.0
    a, b = await enter(coordinator, "a", "b", round_=0)
    stream = a.stub.Watch(pb.WatchRequest(), metadata=a.metadata)
    await stream.read()
    call = a.stub.EndTrainingRound(update_of(a, 0), metadata=a.metadata)
    await until(lambda: advertise(coordinator.driver.session, "a").update_accepted)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await hand_in(b, 0)
    assert (await stream.read()).work.round == 1


async def test_answers_of_many_participants_do_not_wait(enter, start):
    coordinator = await start(rounds=ROUNDS)
    service = coordinator._server.service
    service.few_participants, service.next_round_s = 1, 60.0
    a, _ = await enter(coordinator, "a", "b", round_=0)
    answer = await asyncio.wait_for(hand_in(a, 0), 30)
    assert not answer.HasField("next_round")
