"""A session that a script drives over the operator's socket."""

import asyncio
import json

import grpc
import pytest

from xain_wire.fl import access_pb2 as access
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2
from xain_wire.fl.access_pb2_grpc import ControlStub
from xain_wire.fl.inspection_pb2_grpc import InspectionStub

SETTINGS = {"rounds": 3, "initial_weights": "average", "min_participants": 2, "scripted": True}
SECTIONS = {"train": {"lr": 0.5, "momentum": 0.9}, "evaluate": {"metric": "accuracy"}}


async def until(stream, is_so) -> access.FollowScriptResponse:
    async with asyncio.timeout(120):
        async for status in stream:
            if is_so(status):
                return status
    raise AssertionError("the stream has ended")


async def refusal_of(call) -> tuple[grpc.StatusCode, str]:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("it was not refused")


@pytest.fixture
async def local(tmp_path):
    """Calls over the socket of whichever coordinator runs."""
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'journal.sock'}") as channel:
        yield channel


@pytest.fixture
async def trained(start, join):
    """A coordinator that has made initial weights, and its two sites."""
    coordinator = await start(rounds=SETTINGS, **SECTIONS)
    sites = join(coordinator, "a"), join(coordinator, "b")
    for site in sites:
        await site.rendezvous()
    await sites[0].until(pb.ROUND, 0)
    for site in sites:
        await site.hand_in([0.0, 2.0])
    return coordinator, *sites


async def test_script_configures_measures_and_ends_a_session_through_a_restart(
    enter, trained, start, tmp_path
):
    """Sites train with the settings of the script, its decisions are there after a restart, and
    only its end finishes the session."""
    coordinator, a, b = trained
    configured = access.ConfigureRoundRequest(
        round=1, config='{"lr": 0.25}', by_site={"b": '{"lr": 1}'}, epochs=2, site_epochs={"b": 7}
    )
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'journal.sock'}") as channel:
        control = ControlStub(channel)
        stream = control.FollowScript(access.FollowScriptRequest())
        status = await until(stream, lambda one: one.waits)
        assert (status.round, status.model, status.rounds) == (1, 1, 3)
        assert not status.is_trained
        shown = await InspectionStub(channel).GetStatus(inspection_pb2.GetStatusRequest())
        assert "to configure round 1" in shown.waiting_for
        assert (await a.heartbeat()).state == pb.STANDBY
        await control.ConfigureRound(configured)
        await a.until(pb.ROUND, 1)
        first, second = await a.start(), await b.start()
        assert json.loads(first.train_config) == {"lr": 0.25, "momentum": 0.9}
        assert json.loads(second.train_config) == {"lr": 1, "momentum": 0.9}
        assert (first.epochs, second.epochs) == (2, 7)
        other = access.ConfigureRoundRequest(round=1, config='{"lr": 2}')
        code, details = await refusal_of(control.ConfigureRound(other))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert '{"lr": 0.25}' in details
    session_id = coordinator.driver.session.session_id
    await coordinator.stop()

    coordinator = await start(rounds=SETTINGS, **SECTIONS)
    a, b = await enter(coordinator, "a", "b", round_=1)
    assert json.loads((await b.start()).train_config) == {"lr": 1, "momentum": 0.9}
    for member in (a, b):
        await member.hand_in([1.0, 1.0], round_=1)
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'journal.sock'}") as channel:
        control = ControlStub(channel)
        stream = control.FollowScript(access.FollowScriptRequest(session_id=session_id))
        status = await until(stream, lambda one: one.waits and one.model == 2)
        assert (status.configured.round, status.configured.epochs) == (1, 2)
        measured = access.RecordEvaluationRequest(
            model=2, metrics={"accuracy": 0.75}, session_id=session_id
        )
        await control.RecordEvaluation(measured)
        await control.RecordEvaluation(measured)
        # A script that follows hears of the evaluation, though nothing else happens.
        status = await until(stream, lambda one: one.HasField("evaluated"))
        assert dict(status.evaluated.metrics) == {"accuracy": 0.75}
        await control.ConfigureRound(access.ConfigureRoundRequest(round=2))
        await a.until(pb.ROUND, 2)
        assert (await a.start()).epoch_base == 2
        for member in (a, b):
            await member.hand_in([3.0, 1.0], round_=2)
        status = await until(stream, lambda one: one.is_trained)
        assert status.waits
        last = access.RecordEvaluationRequest(model=3, metrics={"accuracy": 0.5}, num_samples=9)
        await control.RecordEvaluation(last)
        await control.EndScript(access.EndScriptRequest(session_id=session_id))
        status = await until(stream, lambda one: one.is_finished)
        assert (status.cause, status.is_over) == ("completed", True)
        assert [one async for one in stream] == []
        shown = await InspectionStub(channel).GetStatus(inspection_pb2.GetStatusRequest())
        assert (shown.best_round, shown.best_value) == (2, 0.75)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"config": "[1]"}, "the settings of the round are no JSON object"),
        ({"config": "{"}, "the settings of the round are no JSON: "),
        ({"config": '{"lr": NaN}'}, "NaN is not finite"),
        ({"config": '{"lr": 1e999}'}, "the settings of the round are no JSON: "),
        ({"config": "[" * 100_000}, "the settings of the round are no JSON: nested more"),
        ({"config": '{"epochs": 2}'}, "they have fields of their own, epochs and site_epochs"),
        ({"config": json.dumps({"note": "x" * 70_000})}, "more than 65536 bytes as JSON"),
        ({"by_site": {"": "{}"}}, "a participant without a name is configured"),
        ({"by_site": {"c": '{"lr": 1}'}}, "there is no participant 'c'; there are: a, b"),
        ({"selected": ["a"]}, "a round needs rounds.min_participants = 2"),
        ({"epochs": -1}, "is to have -1 epochs"),
        ({"site_epochs": {"a": 0}}, "a participant is to have 0 epochs"),
    ],
)
async def test_configuration_that_cannot_be_is_told_in_a_sentence(trained, local, fields, told):
    control = ControlStub(local)
    await until(control.FollowScript(access.FollowScriptRequest()), lambda one: one.waits)
    refused = control.ConfigureRound(access.ConfigureRoundRequest(round=1, **fields))
    code, details = await refusal_of(refused)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert told in details


async def test_bytes_of_settings_are_those_of_their_one_form(trained, local):
    """Blanks count as little as the order of the keys: they are no part of the decision."""
    control = ControlStub(local)
    await until(control.FollowScript(access.FollowScriptRequest()), lambda one: one.waits)
    wide = '{"b": 1,' + " " * 70_000 + '"a": 2}'
    await control.ConfigureRound(access.ConfigureRoundRequest(round=1, config=wide))
    again = access.ConfigureRoundRequest(round=1, config='{"a": 2, "b": 1}')
    await control.ConfigureRound(again)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "the evaluation of model 1 has no metric"),
        ({"metrics": {"accuracy": float("nan")}}, "must be finite"),
        ({"metrics": {"accuracy": 1.0}, "num_samples": 2**60}, "samples"),
        ({"metrics": {str(i): 1.0 for i in range(40)}}, "at most 32 are taken"),
    ],
)
async def test_evaluation_that_cannot_be_is_told_in_a_sentence(trained, local, fields, told):
    request = access.RecordEvaluationRequest(model=1, **fields)
    code, details = await refusal_of(ControlStub(local).RecordEvaluation(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert told in details


async def test_script_of_another_session_is_refused(trained, local):
    control = ControlStub(local)
    for call in (
        control.ConfigureRound(access.ConfigureRoundRequest(round=1, session_id="other")),
        control.RecordEvaluation(
            access.RecordEvaluationRequest(model=1, metrics={"loss": 1.0}, session_id="other")
        ),
        control.EndScript(access.EndScriptRequest(session_id="other")),
        control.FollowScript(access.FollowScriptRequest(session_id="other")).read(),
    ):
        code, details = await refusal_of(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "the script drives session other" in details


async def test_failure_of_a_script_ends_the_session_however_long_it_is(trained, local):
    coordinator, *_ = trained
    await ControlStub(local).EndScript(
        access.EndScriptRequest(failure="ValueError: " + "x" * 50_000)
    )
    assert coordinator.driver.session.cause.startswith("the script failed: ValueError: xxx")
    assert len(coordinator.driver.session.cause) < 3000


async def test_session_without_a_script_can_be_followed_and_takes_no_decisions(start, local):
    await start()
    control = ControlStub(local)
    status = await control.FollowScript(access.FollowScriptRequest()).read()
    assert (status.is_scripted, status.waits) == (False, False)
    code, details = await refusal_of(control.ConfigureRound(access.ConfigureRoundRequest()))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "rounds.scripted is not set" in details
