"""A session that a script drives over the operator's socket."""

import asyncio
import json

import grpc

from xain_wire.fl import access_pb2 as access
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.access_pb2_grpc import ControlStub

SETTINGS = {"rounds": 2, "initial_weights": "average", "min_participants": 2, "scripted": True}


async def until(stream, is_so) -> access.FollowScriptResponse:
    async with asyncio.timeout(120):
        async for status in stream:
            if is_so(status):
                return status
    raise AssertionError("the stream has ended")


async def code_of(call) -> tuple[grpc.StatusCode, str]:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("it was not refused")


async def test_script_configures_measures_and_ends_a_session_through_a_restart(
    start, join, tmp_path
):
    """Sites train with the settings of the script, its decisions are there after a restart, and
    only its end finishes the session."""
    coordinator = await start(rounds=SETTINGS, train={"lr": 0.5, "momentum": 0.9})
    a, b = join(coordinator, "a"), join(coordinator, "b")
    await a.rendezvous()
    await b.rendezvous()
    await a.until(pb.ROUND, 0)
    for member in (a, b):
        await member.hand_in([0.0, 2.0])
    configured = access.ConfigureRoundRequest(
        round=1, config='{"lr": 0.25}', by_site={"b": '{"epochs": 7, "lr": 1}'}
    )
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'journal.sock'}") as channel:
        control = ControlStub(channel)
        stream = control.FollowScript(access.FollowScriptRequest())
        status = await until(stream, lambda one: one.waits)
        assert (status.round, status.model, status.is_trained) == (1, 1, False)
        assert "to configure round 1" in status.waiting_for
        assert (await a.heartbeat()).state == pb.STANDBY
        await control.ConfigureRound(configured)
        await a.until(pb.ROUND, 1)
        first, second = await a.start(), await b.start()
        assert json.loads(first.train_config) == {"lr": 0.25, "momentum": 0.9}
        assert json.loads(second.train_config) == {"lr": 1, "momentum": 0.9}
        assert (first.epochs, second.epochs) == (1, 7)
        other = access.ConfigureRoundRequest(round=1, config='{"lr": 2}')
        code, details = await code_of(control.ConfigureRound(other))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert '{"lr": 0.25}' in details
        code, details = await code_of(
            control.ConfigureRound(access.ConfigureRoundRequest(round=1, config="[1]"))
        )
        assert (code, details) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "the settings of the round are no JSON object",
        )
    await coordinator.stop()

    coordinator = await start(rounds=SETTINGS, train={"lr": 0.5, "momentum": 0.9})
    a, b = join(coordinator, "a"), join(coordinator, "b")
    await a.rendezvous()
    await b.rendezvous()
    await a.until(pb.ROUND, 1)
    assert json.loads((await b.start()).train_config) == {"lr": 1, "momentum": 0.9}
    for member in (a, b):
        await member.hand_in([1.0, 1.0], round_=1)
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'journal.sock'}") as channel:
        control = ControlStub(channel)
        stream = control.FollowScript(access.FollowScriptRequest())
        status = await until(stream, lambda one: one.is_trained)
        assert status.waits
        assert status.configured.round == 1
        measured = access.RecordEvaluationRequest(model=2, metrics={"accuracy": 0.75})
        await control.RecordEvaluation(measured)
        await control.RecordEvaluation(measured)
        await control.EndScript(access.EndScriptRequest())
        status = await until(stream, lambda one: one.is_finished)
        assert status.cause == "completed"
        assert dict(status.evaluated.metrics) == {"accuracy": 0.75}
