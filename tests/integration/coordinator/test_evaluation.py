"""Evaluations over a real channel, as participants of any kind send them."""

import math

import grpc
import pytest

from support.logs import capture_logs
from support.wire import Member, reason
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_wire.fl.inspection_pb2_grpc import InspectionStub

POINTS = (
    '[{"measurement": "participant", "time": 1, "fields": {"loss": 2.0, "round": 1}},'
    ' {"measurement": "participant", "time": 2, "fields": {"loss": 1.0, "test_accuracy": 0.5}}]'
)


async def rendezvous(member: Member, *, can_evaluate: bool = True) -> None:
    await member.stub.Rendezvous(
        pb.RendezvousRequest(can_evaluate=can_evaluate), metadata=member.metadata
    )


async def end(
    member: Member,
    round_: int,
    vector: list[float] | None,
    evaluation: pb.Evaluation | None,
    metrics: str = "",
) -> None:
    """EndTrainingRound, with an update if there is a vector."""
    update = None if vector is None else await member.upload(vector, round_)
    await member.stub.EndTrainingRound(
        pb.EndTrainingRoundRequest(
            participant_id=member.participant_id,
            number_samples=0 if vector is None else 1,
            metrics=metrics,
            round=round_,
            update=update,
            evaluation=evaluation,
        ),
        metadata=member.metadata,
    )


def accuracy(value: float, num_samples: int = 1) -> pb.Evaluation:
    return pb.Evaluation(num_samples=num_samples, metrics={"accuracy": value})


def averaged(value: float, num_samples: int = 1) -> pb.Evaluation:
    """The evaluation of participants without tallies, as the coordinator tells it."""
    return pb.Evaluation(
        num_samples=num_samples, metrics={"accuracy": value}, averages=["accuracy"]
    )


async def rounds_of(member: Member) -> list[inspection.RoundStatus]:
    stub = InspectionStub(member.channel)
    return list((await stub.ListRounds(inspection.ListRoundsRequest())).rounds)


async def test_participants_that_cannot_evaluate_see_the_session_go_on(start, join):
    """XAIN 0.6's participants cannot: the others measure the last model, and all is finished."""
    coordinator = await start(
        rounds={"rounds": 2, "min_participants": 2}, evaluate={"metric": "accuracy"}
    )
    a, old = join(coordinator, "a"), join(coordinator, "old")
    await rendezvous(a)
    await rendezvous(old, can_evaluate=False)
    await a.until(pb.ROUND, 0)
    assert not (await a.start()).evaluate, "there is nothing to evaluate yet"
    await end(a, 0, [1.0], None)
    await end(old, 0, [1.0], None)
    await a.until(pb.ROUND, 1)
    assert (await a.start()).evaluate
    await end(a, 1, [2.0], accuracy(0.5), POINTS)
    await end(old, 1, [2.0], None)

    await a.until(pb.ROUND, 2)
    work = await a.start()
    assert (work.task, work.evaluate, work.model.key) == (pb.EVALUATE, True, "2/global")
    assert (await old.heartbeat()).state == pb.STANDBY
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await old.start()
    assert reason(caught.value) == "NOT_SELECTED"
    status = await a.status()
    assert (status.phase, status.num_selected) == ("evaluating", 1)
    assert "evaluations of the last model: a" in status.waiting_for
    await end(a, 2, None, accuracy(0.75, 4))
    await end(a, 2, None, accuracy(0.75, 4))  # the answer may have been lost
    seen = await old.until(pb.FINISHED, 1)
    assert seen.cause == "completed"
    await end(a, 2, None, accuracy(0.75, 4))

    first, second, last = await rounds_of(a)
    assert not first.HasField("evaluation")
    assert second.evaluation == averaged(0.5)
    assert second.metrics == {"loss": 1.0}
    assert [site.participant_id for site in second.sites] == ["a"]
    assert (last.task, last.phase, last.evaluation) == (pb.EVALUATE, "evaluated", averaged(0.75, 4))
    assert list(last.contributors) == ["a"]
    status = await a.status()
    assert (status.best_round, status.best_value, status.metric) == (2, 0.75, "accuracy")


async def test_log_tells_the_mean_evaluation_of_each_model(start, join):
    """Under the number of the model that was measured; the last one includes all participants."""
    with capture_logs() as lines:
        coordinator = await start(rounds={"rounds": 2, "min_participants": 2})
        a, b = join(coordinator, "a"), join(coordinator, "b")
        for member in (a, b):
            await rendezvous(member)
        for number, vector in ((0, [1.0]), (1, [2.0]), (2, None)):
            for member, value in ((a, 0.25), (b, 0.75)):
                await member.until(pb.ROUND, number)
                await end(member, number, vector, accuracy(value + number) if number else None)
        await a.until(pb.FINISHED, 1)
    told = [
        (line["round"], line["by"], line["averages"])
        for line in lines
        if line["event"] == "model_evaluated"
    ]
    assert told == [(1, "participants", {"accuracy": 1.5}), (2, "participants", {"accuracy": 2.5})]


@pytest.mark.parametrize(
    "evaluation",
    [
        pb.Evaluation(num_samples=1, metrics={"accuracy": math.nan}),
        pb.Evaluation(num_samples=-1, metrics={"accuracy": 1.0}),
        pb.Evaluation(num_samples=1, metrics={"\x1b[2J": 1.0}),
        pb.Evaluation(num_samples=1, metrics={f"m{i}": 1.0 for i in range(40)}),
    ],
    ids=["nan", "negative", "control characters", "too many"],
)
async def test_evaluation_that_cannot_be_kept_costs_its_sender_nothing_else(
    start, join, evaluation
):
    """In a round of training the update counts; at the end it counts as an answer."""
    coordinator = await start(rounds={"rounds": 2, "min_participants": 1})
    a = join(coordinator, "a")
    await rendezvous(a)
    for number in (0, 1):
        await a.until(pb.ROUND, number)
        await end(a, number, [1.0], evaluation)
    await a.until(pb.ROUND, 2)
    await end(a, 2, None, evaluation)
    await a.until(pb.FINISHED, 1)
    rounds = await rounds_of(a)
    assert [one.num_contributors for one in rounds] == [1, 1, 1]
    assert not any(one.HasField("evaluation") for one in rounds)
    assert not (await a.status()).HasField("best_round")
