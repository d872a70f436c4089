"""Sessions that follow each other in one process: real coordinators, agents that stay, and the HTTP
face without its port."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from integration.conftest import config_for
from integration.coordinator.test_bagging import halves, settings
from support.logs import capture_logs
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.assembly.sessions import NoParticipants, Sessions
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.view.view import warnings
from xain_coordinator.core.vocabulary.values import Phase
from xain_coordinator.http_face.app import make_app
from xain_coordinator.http_face.errors import HttpError
from xain_coordinator.http_face.events import EventReaders
from xain_coordinator.http_face.fits import Fits
from xain_coordinator.http_face.server import open_listener, serving
from xain_coordinator.ports import JournalError, StoreUnavailable
from xain_coordinator.process.run import start_coordinator
from xain_participant import Agent, WorkloadParticipant
from xain_workloads.exported import formats
from xain_workloads.tables.data import load

PATIENCE_S = 60.0
DATA = load("breast_cancer")
QUESTION = {"columns": list(DATA.feature_names), "rows": DATA.features[:5].tolist()}

Serve = Callable[..., Awaitable[Sessions]]

SERVED: Mapping[str, dict[str, Any]] = {
    "bagging": {**settings(2, estimators=2, vote="stacked"), "rounds": {"min_participants": 2}},
    "glm": {
        "workload": {"name": "glm"},
        "aggregation": {"rule": "newton"},
        "rounds": {"min_participants": 2},
    },
}


class Fleet:
    """Participants that stay, by name."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Agent, threading.Thread]] = {}

    def join(self, sessions: Sessions, *names: str) -> None:
        for name, part in zip(names, halves(DATA), strict=True):
            site = WorkloadParticipant(part)
            agent = Agent(site, f"127.0.0.1:{sessions.current.port}", name, serve=True)
            thread = threading.Thread(target=agent.run, daemon=True)
            self._running[name] = agent, thread
            thread.start()

    async def leave(self, names: Sequence[str]) -> None:
        left = [self._running.pop(name) for name in names]
        for agent, _ in left:
            agent.stop()
        for _, thread in left:
            await asyncio.to_thread(thread.join, PATIENCE_S)
            assert not thread.is_alive()

    @property
    def is_running(self) -> bool:
        return all(thread.is_alive() for _, thread in self._running.values())

    async def end(self) -> None:
        await self.leave(list(self._running))


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    yield fleet
    await fleet.end()


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Open the sessions of a process; the coordinator is stopped at the end."""
    opened = []

    async def begin(
        open_next: Callable[[CoordinatorConfig], Awaitable[SessionCoordinator | None]]
        | None = None,
        **sections: Any,
    ) -> Sessions:
        http = {"port": 0, "participants_timeout_s": PATIENCE_S, **sections.pop("http", {})}
        bagging = settings(2, publish=False, estimators=1)
        config = config_for(tmp_path, http=http, **{**bagging, **sections})
        first = SessionCoordinator(config, resume=True)
        await first.start()
        opened.append(Sessions(config, first, open_next or start_next))
        return opened[-1]

    yield begin
    for sessions in opened:
        await sessions.close()
        await sessions.current.stop()


def make_next(config: CoordinatorConfig) -> SessionCoordinator:
    return SessionCoordinator(config, new_session=True)


async def start_next(config: CoordinatorConfig, _: object) -> SessionCoordinator | None:
    with ExitStack() as at_end:
        return await start_coordinator(config, lambda: make_next(config), asyncio.Event(), at_end)


def with_rounds(sessions: Sessions, **changes: Any) -> CoordinatorConfig:
    config = sessions.config
    return config.model_copy(update={"rounds": config.rounds.model_copy(update=changes)})


@contextmanager
def impatient(sessions: Sessions) -> Iterator[None]:
    """Inside, a fit that lacks participants is refused soon."""
    config = sessions.config
    http = config.http.model_copy(update={"participants_timeout_s": 0.2})
    sessions.config = config.model_copy(update={"http": http})
    yield
    sessions.config = config


async def fit(sessions: Sessions, config: CoordinatorConfig | None = None) -> str:
    """Fit to the end. Returns the session's id."""
    async with asyncio.timeout(PATIENCE_S):
        session = await sessions.wait_for_end(await sessions.fit(config or sessions.config))
        assert session.cause == "completed"
        return session.session_id


async def asked(sessions: Sessions, method: str, path: str, body: object = None) -> httpx.Response:
    fits = Fits(sessions, asyncio.get_running_loop())
    transport = httpx.ASGITransport(make_app(fits, sessions.config.http))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.request(method, path, json=body, timeout=PATIENCE_S)
    fits.close()
    return answer


async def post(sessions: Sessions, path: str, body: object) -> httpx.Response:
    return await asked(sessions, "POST", path, body)


async def test_refused_fit_keeps_the_finished_session(serve, fleet):
    """A fit that lacks participants opens no session; its models stay listed."""
    sessions = await serve()
    fleet.join(sessions, "north", "south")
    first = await fit(sessions)
    with impatient(sessions), pytest.raises(NoParticipants, match="2 of 3 participants"):
        await sessions.fit(with_rounds(sessions, min_participants=3))
    assert (sessions.session.session_id, sessions.session.phase) == (first, Phase.FINISHED)
    assert sessions.models().session_id == first
    assert await fit(sessions) != first


async def test_fit_begins_without_a_missing_participant_and_names_it(serve, fleet):
    """After the declared wait; so does a fit that nobody is there for, when it is refused."""
    rounds = {"expected_participants": ("east", "north", "south"), "start_timeout_s": 0.2}
    sessions = await serve(rounds=rounds)
    fleet.join(sessions, "north", "south")
    with capture_logs() as logs:
        answer = (await post(sessions, "/v1/fit", {"wait": True})).json()
    assert (answer["state"], answer["missing"]) == ("finished", ["east"])
    assert set(sessions.session.members) == {"north", "south"}
    (said,) = [line for line in logs if line["event"] == "participants_missing"]
    assert said["participant"] == ["east"]
    await fleet.leave(["north", "south"])
    with impatient(sessions), pytest.raises(NoParticipants, match="missing: east, north, south"):
        await sessions.fit(sessions.config)


async def test_held_estimators_predict_during_and_after_a_fit_without_a_result(serve, fleet):
    """Participants keep the estimators of the completed session."""
    sessions = await serve()
    fleet.join(sessions, "north", "south")
    first = await fit(sessions)
    await sessions.fit(with_rounds(sessions, rounds=100_000))
    fits = Fits(sessions, asyncio.get_running_loop())
    earlier = await fits.models(first)
    assert earlier.session_id == first, "described while the next fit goes on"
    with pytest.raises(HttpError):
        await fits.models("another")

    async def predicted() -> list[object]:
        """Predictions of both, of which one may be about to connect again."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                answer = (await post(sessions, "/v1/predict", QUESTION)).json()
                assert answer.get("session", first) == first
                if answer.get("answered") == ["north", "south"]:
                    return answer["predictions"]
                await asyncio.sleep(0.05)  # a poll: it ends when both have answered

    during = await predicted()
    await sessions.cancel()
    assert await predicted() == during


@pytest.mark.parametrize("name", SERVED)
async def test_published_model_predicts_over_http_as_its_pipeline_does(
    name, serve, fleet, tmp_path
):
    """The participants that trained the model need not be there."""
    sessions = await serve(**SERVED[name])
    fleet.join(sessions, "north", "south")
    await fit(sessions)
    await fleet.leave(["north", "south"])
    answer = await post(sessions, "/v1/predict", {**QUESTION, "probabilities": True})
    assert answer.status_code == 200, answer.text
    file = tmp_path / "model.skops"
    file.write_bytes(
        (await asked(sessions, "GET", "/v1/models/last/download?format=skops")).content
    )
    pipeline = formats.read(file).pipeline
    kinds = ("StackingClassifier", "LogisticRegression")
    assert type(pipeline.steps[-1][1]).__name__ == kinds[name == "glm"]
    found = answer.json()
    assert found["predictions"] == pipeline.predict(DATA.features[:5]).tolist()
    expected = pipeline.predict_proba(DATA.features[:5])
    np.testing.assert_allclose(found["probabilities"], expected, rtol=1e-9, atol=1e-12)
    onnx = await asked(sessions, "GET", "/v1/models/last/download?format=onnx")
    driver = sessions.current.driver
    if name == "glm":
        told = warnings(driver.session, driver.history)
        assert [line[:39] for line in told] == ["The columns together tell the class of "]
        assert onnx.status_code == 200, onnx.text
    else:
        assert "ensembles have no form in .onnx; take model.skops" in onnx.text


async def test_stream_of_events_ends_at_a_damaged_record(serve, monkeypatch):
    sessions = await serve()

    def damaged(session_id: str, after: int = 0) -> None:
        raise JournalError("record 3 has another checksum than it was written with")

    monkeypatch.setattr(sessions.current.journal, "records_of", damaged)
    stream = EventReaders(Fits(sessions, asyncio.get_running_loop())).open(None)
    async with asyncio.timeout(PATIENCE_S):
        assert [line async for line in stream] == [": hello\n\n"]


async def test_later_fit_waits_for_a_remote_store_that_is_away(serve, fleet):
    num_made = 0

    async def open_next(config: CoordinatorConfig, _: object) -> SessionCoordinator | None:
        def make() -> SessionCoordinator:
            nonlocal num_made
            num_made += 1
            if num_made == 1:
                raise StoreUnavailable("the bucket does not answer")
            return make_next(config)

        remote = config.model_copy(
            update={"storage": config.storage.model_copy(update={"kind": "s3"})}
        )
        with ExitStack() as at_end:
            return await start_coordinator(remote, make, asyncio.Event(), at_end)

    sessions = await serve(open_next)
    fleet.join(sessions, "north", "south")
    first = await fit(sessions)
    assert await fit(sessions) != first
    assert num_made == 2
    assert not sessions.failed.is_set()


async def test_wait_for_a_fit_is_answered_though_later_sessions_have_followed(serve, fleet):
    sessions = await serve()
    fleet.join(sessions, "north", "south")
    driver = await sessions.fit(sessions.config)
    first = (await sessions.wait_for_end(driver)).session_id
    assert await fit(sessions) != first
    async with asyncio.timeout(PATIENCE_S):
        assert (await sessions.wait_for_end(driver)).session_id == first


async def test_server_that_ends_early_ends_the_process(serve, monkeypatch):
    async def tick(self: object, counter: int) -> bool:
        raise MemoryError

    monkeypatch.setattr("uvicorn.Server.on_tick", tick)
    sessions = await serve()
    with open_listener(sessions.config.http) as listener:
        async with serving(sessions, listener), asyncio.timeout(PATIENCE_S):
            await sessions.failed.wait()
    assert isinstance(sessions.failure, MemoryError)


async def test_session_that_cannot_be_opened_ends_the_process(serve, fleet):
    async def open_next(config: CoordinatorConfig, _: object) -> SessionCoordinator | None:
        raise StoreUnavailable("the bucket does not answer")

    sessions = await serve(open_next)
    fleet.join(sessions, "north", "south")
    await fit(sessions)
    with pytest.raises(StoreUnavailable):
        await sessions.fit(sessions.config)
    assert sessions.failed.is_set()
    assert isinstance(sessions.failure, StoreUnavailable)
