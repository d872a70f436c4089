"""Predictions asked of participants that keep their estimators: agents, and answers by hand."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from integration.conftest import config_for
from integration.coordinator.test_bagging import halves, last_model, settings
from integration.coordinator.test_trees import gather
from support.refusals import refused_as
from support.waiting import until
from support.wire import Member, reason, refused
from unit.workloads.test_bagging import by_class, flowers
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.cli.extend import extend
from xain_coordinator.core.vocabulary.values import Phase
from xain_coordinator.server.predictions import MAX_ROWS_BYTES
from xain_participant import Agent, WorkloadParticipant
from xain_participant.sdk.estimators import FOLDER, KeptEstimators
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_workloads.ensembles.ensembles import MAGIC, Frame, pack, unpack
from xain_workloads.ensembles.held import Holding, pack_holdings, unpack_holdings
from xain_workloads.errors import DataError
from xain_workloads.tables.data import load
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.schema import MAX_NAMES_BYTES
from xain_workloads.tables.table import Table
from xain_workloads.workload import create

PATIENCE_S = 60.0


def kept(num_sites: int, **options: Any) -> dict[str, Any]:
    return settings(num_sites, publish=False, **options)


@asynccontextmanager
async def serving(
    coordinator: SessionCoordinator, participants: Sequence[WorkloadParticipant], *, first: int = 0
) -> AsyncIterator[list[Agent]]:
    """Agents that stay after the end; inside, the session is finished. first: in their names."""
    target = f"127.0.0.1:{coordinator.port}"
    agents = [Agent(one, target, f"p{i}", serve=True) for i, one in enumerate(participants, first)]
    threads = [threading.Thread(target=agent.run, daemon=True) for agent in agents]
    try:
        for thread in threads:
            thread.start()
        async with asyncio.timeout(PATIENCE_S):
            while coordinator.driver.session.phase is not Phase.FINISHED:
                await coordinator.driver.wait_for_change()
        yield agents
    finally:
        for agent in agents:
            agent.stop()
        for thread in threads:
            await asyncio.to_thread(thread.join, PATIENCE_S)
            assert not thread.is_alive()


def rows_of(data: Dataset) -> tuple[list[str], list[list[float]]]:
    return list(data.feature_names), data.features.tolist()


@pytest.mark.parametrize("vote", ["soft", "hard"])
async def test_participants_predict_as_the_published_ensemble_would(start, join, tmp_path, vote):
    """String labels; each site lacks classes."""
    data = flowers()
    names = tuple(sorted(set(data.target.tolist())))
    parts = [replace(Table.from_dataset(part), classes=names) for part in by_class(data)]
    coordinator = await start(**kept(3, estimators=2, vote=vote, parameters={"max_depth": 3}))
    stores = [KeptEstimators(tmp_path / f"p{i}", f"p{i}") for i in range(3)]
    sites = [
        WorkloadParticipant(part, estimators=store)
        for part, store in zip(parts, stores, strict=True)
    ]
    async with serving(coordinator, sites):
        found = await coordinator.server.predictions.ask(*rows_of(data))
        assert (found.answered, found.missing) == (("p0", "p1", "p2"), {})
        assert found.classes == names
        np.testing.assert_allclose(found.probabilities.sum(axis=1), 1)
        again = await coordinator.server.predictions.ask(*rows_of(data))
        assert np.array_equal(again.probabilities, found.probabilities)
        model = await last_model(coordinator, join)
        held = unpack_holdings(model.vector.tobytes())
        frames = []
        for one in held:
            path = tmp_path / one.participant / FOLDER / f"{one.digest}.bin"
            content = path.read_bytes()
            fitted = unpack(content[content.index(MAGIC) :])
            frames += [Frame(one.rows, frame.file) for frame in fitted]
        options = {"estimators": 2, "vote": vote, "publish": True}
        published = replace(model, vector=np.frombuffer(pack(frames), np.uint8))
        features = prepare(model.metadata, data).features
        expected = create("bagging", options).predict(published, features)
        assert found.values.tolist() == expected.tolist()


# --- answers by hand ---


class Site:
    """A participant that hands in made-up estimators, and answers questions by hand."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.digest = ""

    async def hand_in(self, number: int, num_samples: int = 10) -> None:
        self.digest = f"{number:032x}"
        named = pack_holdings([Holding(2, self.digest)])
        await self.member.hand_in(np.frombuffer(named, np.uint8), num_samples)

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Any]:
        call = self.member.stub.Predict(metadata=self.member.metadata)
        await call.write(pb.PredictionAnswer())
        try:
            yield call
        finally:
            call.cancel()

    async def answer(self, call: Any, **fields: Any) -> pb.PredictionQuestion:
        question = await call.read()
        await call.write(pb.PredictionAnswer(number=question.number, **fields))
        return question


def shares(*row: float, num_rows: int = 2) -> bytes:
    return np.tile(np.array(row, "<f8"), num_rows).tobytes()


def thirds() -> list[Dataset]:
    data = load("wine")
    return [data.subset(range(at, data.num_samples, 3)) for at in range(3)]


@pytest.fixture
async def three(start, join) -> tuple[SessionCoordinator, list[Site]]:
    """A coordinator after the round of three sites with 10, 20 and 30 rows."""
    found = settings(3, publish=False, estimators=2)
    found["rounds"]["rounds"] = 1
    coordinator = await start(**found)
    coordinator.server.predictions.reconnect_s = 0.5
    members = await gather(coordinator, join, thirds())
    sites = [Site(member) for member in members]
    for number, site in enumerate(sites):
        await site.hand_in(number, 10 * (number + 1))
    await members[0].until(pb.FINISHED, 0)
    return coordinator, sites


ROWS = rows_of(load("wine").subset([0, 100]))


async def opened(coordinator: SessionCoordinator, num: int) -> None:
    """Wait until so many streams are open."""
    await until(lambda: len(coordinator.server.predictions._streams) == num)


async def asked(
    coordinator: SessionCoordinator, num: int, rows: Any = ROWS, **options: Any
) -> asyncio.Task[Any]:
    """A question, asked once so many streams are open."""
    await opened(coordinator, num)
    return asyncio.create_task(coordinator.server.predictions.ask(*rows, **options))


async def test_votes_are_weighted_by_rows_of_participants_that_answered(three):
    coordinator, (a, b, c) = three
    async with a.stream() as of_a, b.stream() as of_b, c.stream() as of_c:
        asking = await asked(coordinator, 3)
        question = await a.answer(of_a, votes=shares(1, 0, 0))
        assert [(e.digest.hex(), e.weight) for e in question.estimators] == [(a.digest, 10)]
        assert len(question.features) == 8 * 2 * 13
        await b.answer(of_b, votes=shares(0, 1, 0))
        await c.answer(of_c, error="no rows of mine")
        found = await asking
    np.testing.assert_allclose(found.probabilities, [[1 / 3, 2 / 3, 0]] * 2)
    assert found.values.tolist() == ["class_1", "class_1"]
    assert (found.answered, found.missing) == (("p0", "p1"), {"p2": "no rows of mine"})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"votes": shares(0.5, 0, 0)}, "shares of classes that do not add up to 1"),
        ({"votes": shares(1, 0, 0, num_rows=3)}, "it answered with 72 bytes, expected were 48"),
        ({"votes": shares(np.nan, 0, 1)}, "its answer has values that are not finite"),
        ({"votes": shares(1, 1, 0)}, "shares of classes that do not add up to 1"),
        ({"votes": shares(-1, 2, 0)}, "shares of classes that do not add up to 1"),
        ({"votes": shares(1, 0, 0), "lost": [bytes(15) + b"\2"]}, "it has lost all of its est"),
        ({"error": "\x1b[2J rows\nof another"}, " [2J rows of another"),
        ({"votes": bytes(4 << 20)}, "its connection broke off"),
    ],
)
async def test_useless_answers_harm_only_their_sender(three, fields, why):
    coordinator, (a, b, c) = three
    async with a.stream() as of_a, b.stream() as of_b, c.stream() as of_c:
        asking = await asked(coordinator, 3)
        question = await of_c.read()
        await of_c.write(pb.PredictionAnswer(**{"number": question.number, **fields}))
        await a.answer(of_a, votes=shares(0, 0, 1))
        await b.answer(of_b, votes=shares(0, 0, 1))
        found = await asking
    assert found.values.tolist() == ["class_2", "class_2"]
    assert found.answered == ("p0", "p1")
    assert list(found.missing) == ["p2"]
    assert why in found.missing["p2"]
    assert found.missing["p2"].isprintable()


async def test_answers_with_another_number_are_dropped(three):
    coordinator, (a, _, _) = three
    async with a.stream() as call:
        asking = await asked(coordinator, 1)
        question = await call.read()
        other = question.number + 1
        await call.write(pb.PredictionAnswer(number=other, votes=shares(1, 0, 0)))
        await call.write(pb.PredictionAnswer(number=question.number, votes=shares(0, 1, 0)))
        found = await asking
    assert (found.answered, found.values.tolist()) == (("p0",), ["class_1", "class_1"])


async def test_participant_without_an_answer_is_named_with_the_timeout(three):
    coordinator, (a, _, _) = three
    async with a.stream():
        await opened(coordinator, 1)
        with refused_as("NOBODY_ANSWERED") as caught:
            await coordinator.server.predictions.ask(*ROWS, timeout_s=0.1, max_retries=1)
    assert re.search("0.1 s, .* 2 times", str(caught.value))


async def test_large_finite_numbers_of_one_participant_do_not_overflow(start, join):
    """The participant has 10 of 40 rows."""
    train, _ = halves(load("diabetes", task="regression"))
    rules = kept(2, estimators=2, estimator="DecisionTreeRegressor")
    rules["rounds"]["rounds"] = 1
    coordinator = await start(**rules)
    sites = [Site(member) for member in await gather(coordinator, join, halves(train))]
    for number, site in enumerate(sites):
        await site.hand_in(number, 10 + 20 * number)
    await sites[0].member.until(pb.FINISHED, 0)
    async with sites[0].stream() as of_a, sites[1].stream() as of_b:
        asking = await asked(coordinator, 2, rows_of(train.subset([0])))
        await sites[0].answer(of_a, votes=np.array([1e308], "<f8").tobytes())
        await sites[1].answer(of_b, votes=np.array([1.0], "<f8").tobytes())
        found = await asking
    np.testing.assert_allclose(found.values, [0.25e308])


async def test_silent_participant_is_asked_again_on_its_newest_stream(three):
    coordinator, (a, _, _) = three
    async with a.stream() as old:
        asking = await asked(coordinator, 1, timeout_s=PATIENCE_S, max_retries=3)
        await old.read()
        async with a.stream() as new:
            await a.answer(new, votes=shares(0, 1, 0))
            found = await asking
        assert await old.read() is grpc.aio.EOF
    assert found.answered == ("p0",)
    assert found.missing == dict.fromkeys(("p1", "p2"), "it is not connected, asked 4 times")


async def test_question_without_answers_is_an_error_that_says_why(three):
    coordinator, (a, _, _) = three
    reader = a.member
    rows = inspection.AskPredictionsRequest(columns=ROWS[0], rows=str(ROWS[1]), timeout_s=0.1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reader.inspection.AskPredictions(rows)
    assert (caught.value.code(), reason(caught.value)) == (
        grpc.StatusCode.UNAVAILABLE,
        "NOBODY_ANSWERED",
    )
    assert re.search("p0: .*; p1: ", caught.value.details())
    with refused_as("NOBODY_ANSWERED") as nobody:
        await coordinator.server.predictions.ask(*ROWS, timeout_s=0.1)
    assert all(f"{name}: " in str(nobody.value) for name in ("p0", "p1", "p2"))


async def test_participant_that_has_lost_a_part_counts_with_the_rest(start, join):
    found = settings(1, publish=False, estimators=2)
    coordinator = await start(**found)
    (member,) = await gather(coordinator, join, [load("wine")])
    site = Site(member)
    for round_ in range(2):
        await member.until(pb.ROUND, round_)
        named = pack_holdings([Holding(2, f"{round_:032x}")])
        await member.hand_in(np.frombuffer(named, np.uint8), 7, round_)
    await member.until(pb.FINISHED, 1)
    async with site.stream() as call:
        asking = await asked(coordinator, 1)
        await site.answer(call, votes=shares(0, 1, 0), lost=[bytes(16)])
        answer = await asking
    assert answer.answered == ("p0",)
    assert answer.missing == {
        "p0": "it has lost the estimators of 1 of its 2 trainings; the others count"
    }


async def test_questions_are_bounded(three):
    coordinator, (a, _, _) = three
    predictor = coordinator.server.predictions
    predictor.max_rows, predictor.max_asked, predictor.max_batch_bytes = 2, 1, 8 * 13
    for columns, rows, why in (
        (ROWS[0], [], "there are no rows to predict"),
        (ROWS[0], [*ROWS[1], ROWS[1][0]], "3 rows; at most 2"),
        (ROWS[0][1:], [row[1:] for row in ROWS[1]], "the model needs column"),
        ([*ROWS[0], "x"], [[*row, 1] for row in ROWS[1]], "no column 'x' in the model"),
        (ROWS[0], [row[1:] for row in ROWS[1]], "row 1 has 12 values, there are 13 columns"),
        (ROWS[0], [["?!", *row[1:]] for row in ROWS[1]], "row 1: '\\?!' is no number"),
    ):
        with pytest.raises(DataError, match=why):
            await predictor.ask(columns, rows)
    predictor.max_answers_bytes = 8 * 3 * 3 * 2 - 1
    with pytest.raises(DataError, match=r"2 rows; at most 1 .* with 3 outputs"):
        await predictor.ask(*ROWS)
    predictor.max_answers_bytes += 1
    for timeout_s, max_retries in ((0.0, 0), (float("nan"), 0), (1.0, -1), (1.0, 101)):
        with pytest.raises(DataError, match=r"timeout_s|max_retries"):
            await predictor.ask(*ROWS, timeout_s=timeout_s, max_retries=max_retries)
    async with a.stream() as call:
        await opened(coordinator, 1)
        asking = asyncio.create_task(predictor.ask(*ROWS))
        first = await a.answer(call, votes=shares(1, 0, 0, num_rows=1))
        with refused_as("TOO_MANY_CALLS"):
            await predictor.ask(*ROWS)
        second = await a.answer(call, votes=shares(0, 1, 0, num_rows=1))
        assert (await asking).values.tolist() == ["class_0", "class_1"]
    assert (first.num_rows, second.num_rows) == (1, 1)


async def test_requests_that_take_long_to_parse_are_refused(start, join):
    """Else many empty rows in a message keep the event loop from all other calls."""
    coordinator = await start()
    coordinator.server.predictions.max_rows = 10
    reader = join(coordinator, "reader")
    for rows, code in (
        ("[" + "[]," * 10 + "[]]", "INVALID_REQUEST"),
        ("[" + "9" * (MAX_ROWS_BYTES + MAX_NAMES_BYTES + (64 << 10)), "TOO_LARGE"),
    ):
        request = inspection.AskPredictionsRequest(columns=["a"], rows=rows)
        assert (await refused(reader.inspection.AskPredictions(request)))[1] == code


async def test_unregistered_clients_cannot_answer_and_a_stop_ends_the_streams(three, join):
    coordinator, (a, _, _) = three
    unregistered = Site(join(coordinator, "unregistered"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with unregistered.stream() as call:
            await call.read()
    assert reason(caught.value) == "NOT_A_MEMBER"
    async with a.stream() as call:
        asking = await asked(coordinator, 1)
        await call.read()
        await coordinator.stop()
        with refused_as("NOBODY_ANSWERED", match="the coordinator is shutting down"):
            await asking


async def test_there_are_no_predictions_before_a_model_or_of_a_published_one(start, join):
    coordinator = await start(**settings(2, publish=False))
    with refused_as("NOT_FITTED", match="there is no model yet"):
        await coordinator.server.predictions.ask(*ROWS)
    await gather(coordinator, join, halves(load("wine")))
    with refused_as("NOT_FITTED", match="no participant has fitted an estimator yet"):
        await coordinator.server.predictions.ask(*ROWS)


async def test_extended_session_asks_for_the_estimators_of_both_sessions(start, join, tmp_path):
    rules = settings(1, publish=False, estimators=2)
    rules["rounds"]["rounds"] = 1
    coordinator = await start(**rules)
    (member,) = await gather(coordinator, join, [load("wine")])
    await Site(member).hand_in(1)
    await member.until(pb.FINISHED, 0)
    await coordinator.stop()
    extend(config_for(tmp_path, **rules), "+1", None)
    coordinator = await start(**rules)
    (member,) = await gather(coordinator, join, [load("wine")])
    site = Site(member)
    await site.hand_in(2)
    await member.until(pb.FINISHED, 0)
    async with site.stream() as call:
        asking = await asked(coordinator, 1)
        question = await site.answer(call, votes=shares(0, 1, 0))
        assert (await asking).answered == ("p0",)
    assert [int(one.digest.hex(), 16) for one in question.estimators] == [1, 2]
