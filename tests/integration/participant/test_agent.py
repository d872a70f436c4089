"""The agent end to end: threads, channel and clock, against a scripted coordinator."""

import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import structlog
from structlog.testing import capture_logs

from integration.participant.scripted import (
    PATIENCE_S,
    Ledger,
    ScriptedCoordinator,
    failure,
    refusal,
    refuse,
)
from integration.participant.store import (
    SECRET,
    Fault,
    ScriptedStore,
    break_off,
    hang,
    object_of,
    send,
    status,
)
from xain_participant import Agent, CoordinatorClient, Participant, Progress, direct, run
from xain_participant import client as client_module
from xain_participant import protocol as p
from xain_participant.alive import SLACK_S, Alive
from xain_participant.work import Work
from xain_proto.fl import coordinator_pb2 as pb
from xain_workloads.model import Layout, TensorSpec
from xain_workloads.profile import DataProfile

Serve = Callable[..., ScriptedCoordinator]


class Adder(Participant):
    """Adds 1 to every weight. It waits, when told to, until the test lets it go on."""

    def __init__(self) -> None:
        self.trained: list[float] = []  # the first weight of each model that was trained
        self.models: list[tuple[Layout, Mapping[str, str]]] = []
        self.initialised = 0
        self.entered = threading.Event()
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.error: BaseException | None = None

    def profile(self) -> DataProfile | None:
        return DataProfile(5, 2)

    def on_model(self, layout: Layout, metadata: Mapping[str, str]) -> None:
        self.models.append((layout, metadata))

    def init_weights(self) -> Any:
        self.initialised += 1
        return np.ones(4, dtype=np.float32)

    def train_round(self, weights: Any, epochs: int, epoch_base: int) -> Any:
        self.trained.append(float(weights[0]))
        self.entered.set()
        assert self.may_finish.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        self.update_metrics(loss=float(weights[0]))
        return weights + 1, 5


@pytest.fixture
def adder() -> Iterator[Adder]:
    adder = Adder()
    yield adder
    adder.may_finish.set()  # whatever went wrong, its thread comes to an end


Launch = Callable[..., "Running"]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Run agents in threads; all have come to an end when the test has."""
    running: list[Running] = []

    def start(participant: Participant, target: str, alive: Alive | None = None) -> Running:
        running.append(Running(participant, target, alive))
        return running[-1]

    yield start
    for one in running:
        one.agent.stop()
        one.code()


class Running:
    """An agent in a thread of its own."""

    def __init__(self, participant: Participant, target: str, alive: Alive | None) -> None:
        self.seen: list[Progress] = []
        self.agent = Agent(participant, target, "ward-7", observer=self.seen.append, alive=alive)
        self._code: int | None = None
        # A daemon, so that a test that fails does not keep the others from ending.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._code = self.agent.run()

    def code(self) -> int:
        self._thread.join(PATIENCE_S)
        assert self._code is not None, "it has not come to an end"
        return self._code

    @property
    def steps(self) -> list[tuple[str, int]]:
        return [(seen.what, seen.round) for seen in self.seen]


def test_it_trains_every_round_and_ends_when_the_session_does(
    serve: Serve, adder: Adder, launch: Launch
) -> None:
    server = serve(Ledger(rounds=3, metadata={"workload": "adding"}))
    running = launch(adder, server.target)
    assert running.code() == 0
    assert adder.trained == [0, 1, 2]
    assert server.ledger.model.tolist() == [3, 3, 3, 3]
    assert [accepted[0] for accepted in server.ledger.accepted.values()] == [5, 5, 5]
    assert server.profiles == [pb.DataProfile(num_samples=5, num_features=2)]
    assert adder.models[0] == ((TensorSpec("w", (4,), "float32"),), {"workload": "adding"})
    assert running.steps == [
        ("joined", -1),
        *((what, r) for r in range(3) for what in ("training", "trained", "handed_in")),
        ("finished", 2),
    ]
    assert running.seen[2].metrics == {"loss": 0.0}


def test_metrics_travel_with_their_round(serve: Serve, adder: Adder) -> None:
    server = serve()
    assert run(adder, server.target, "ward-7") == 0
    (point,) = json.loads(server.ledger.accepted[1][2])
    assert point["measurement"] == "participant"
    assert point["tags"] == {"id": "ward-7"}
    assert point["fields"] == {"loss": 1.0, "round": 1}


def test_the_empty_model_is_initialised(serve: Serve, adder: Adder) -> None:
    server = serve(Ledger(model=np.empty(0)))
    assert run(adder, server.target, "ward-7") == 0
    assert adder.initialised == 1
    assert server.ledger.accepted[0][0] == 0
    assert adder.trained == [1], "the second round trains what the first initialised"


def test_without_a_watch_heartbeats_suffice(serve: Serve, adder: Adder) -> None:
    """XAIN's coordinator has none."""
    server = serve()
    server.has_watch = False
    assert run(adder, server.target, "ward-7") == 0
    assert adder.trained == [0, 1]


def test_a_round_is_learnt_from_the_watch(serve: Serve, adder: Adder, launch: Launch) -> None:
    """The only heartbeat of this test comes before the round opens."""
    server = serve(Ledger(paused=True))
    server.heartbeat_interval_ms = 3_600_000
    running = launch(adder, server.target)
    server.wait_until(lambda: server.calls["Heartbeat"] == 1 and server.calls["Watch"] == 1)
    server.change(paused=False)
    assert running.code() == 0
    assert server.calls["Heartbeat"] == 1


def test_heartbeats_go_on_while_it_trains(serve: Serve, adder: Adder, launch: Launch) -> None:
    server = serve()
    adder.may_finish.clear()
    running = launch(adder, server.target)
    server.wait_until(lambda: server.heartbeats.count((pb.TRAINING, 0)) >= 3)
    adder.may_finish.set()
    assert running.code() == 0
    assert server.heartbeats[0] == (pb.READY, -1)


def test_a_coordinator_that_restarts_gets_the_result_that_was_trained_meanwhile(
    serve: Serve, adder: Adder, launch: Launch
) -> None:
    """Another process on the same port, with the same journal: nobody trains again."""
    first = serve()
    adder.may_finish.clear()
    running = launch(adder, first.target)
    assert adder.entered.wait(PATIENCE_S)
    first.stop()
    adder.may_finish.set()
    second = serve(first.ledger, first.port)
    assert running.code() == 0
    assert adder.trained == [0, 1]
    assert sorted(second.ledger.accepted) == [0, 1]


def test_a_coordinator_that_is_not_there_yet_is_waited_for(
    serve: Serve, adder: Adder, launch: Launch
) -> None:
    early = serve()
    early.stop()
    running = launch(adder, early.target)
    serve(port=early.port)
    assert running.code() == 0


def test_who_is_expired_while_training_joins_again_with_its_result(
    serve: Serve, adder: Adder, launch: Launch
) -> None:
    server = serve()
    adder.may_finish.clear()
    running = launch(adder, server.target)
    assert adder.entered.wait(PATIENCE_S)
    server.change(members=set())
    server.wait_until(lambda: server.calls["Rendezvous"] == 2)
    adder.may_finish.set()
    assert running.code() == 0
    assert adder.trained == [0, 1]


def large() -> Ledger:
    """A session whose weights do not fit into a reference: they travel in streams."""
    return Ledger(model=np.zeros(50_000, dtype=np.float32))


def test_an_upload_by_a_stranger_leads_back_in(serve: Serve, adder: Adder) -> None:
    server = serve(large())
    server.before["PutWeights"].append(refusal("NOT_A_MEMBER", grpc.StatusCode.PERMISSION_DENIED))
    assert run(adder, server.target, "ward-7") == 0
    assert server.calls["Rendezvous"] == 2
    assert adder.trained == [0, 1]


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_an_acknowledgement_that_is_lost_is_asked_for_again(
    serve: Serve, adder: Adder, status: grpc.StatusCode
) -> None:
    """The update counts, its answer gets lost: the same bytes are sent again, not made again."""
    server = serve()
    server.tells_accepted = False
    server.after["EndTrainingRound"].append(failure(status))
    assert run(adder, server.target, "ward-7") == 0
    assert adder.trained == [0, 1]
    assert server.calls["EndTrainingRound"] == 3


def test_an_acknowledgement_that_is_lost_is_made_up_by_an_advertisement(
    serve: Serve, adder: Adder, launch: Launch
) -> None:
    server = serve()
    server.after["EndTrainingRound"].append(failure(grpc.StatusCode.UNAVAILABLE))
    running = launch(adder, server.target)
    server.wait_until(lambda: 0 in server.ledger.accepted)
    heard = server.calls["Heartbeat"]
    server.wait_until(lambda: server.calls["Heartbeat"] > heard + 1)  # one was answered since
    server.change(round=1)
    assert running.code() == 0
    assert running.steps.count(("training", 0)) == 1
    assert running.steps.count(("training", 1)) == 1


@pytest.mark.parametrize("ledger", [Ledger, large], ids=["small", "large"])
def test_a_result_that_cannot_be_delivered_now_is_sent_again(
    serve: Serve, adder: Adder, ledger: Callable[[], Ledger]
) -> None:
    server = serve(ledger())
    server.before["EndTrainingRound"].extend(
        [
            failure(grpc.StatusCode.UNAVAILABLE),
            refusal("NOT_IN_ROUND"),
            refusal("UPLOAD_MISSING"),
        ]
    )
    assert run(adder, server.target, "ward-7") == 0
    assert adder.trained == [0, 1]
    assert server.calls["EndTrainingRound"] == 5
    assert server.calls["PutWeights"] == (5 if ledger is large else 0)


@pytest.fixture
def offering(serve: Serve, store: ScriptedStore) -> ScriptedCoordinator:
    """A coordinator that offers to fetch and put weights at the store."""
    server = serve(large())
    server.store_url = store.url
    server.store_objects = store.objects
    return server


def test_offered_weights_go_past_the_coordinator(
    offering: ScriptedCoordinator, store: ScriptedStore, adder: Adder
) -> None:
    assert run(adder, offering.target, "ward-7") == 0
    assert store.methods == ["GET", "PUT"] * 2
    assert offering.calls["GetWeights"] == offering.calls["PutWeights"] == 0
    assert np.array_equal(offering.ledger.model, np.full(50_000, 2, np.float32))


FAULTS: dict[str, Fault] = {
    "refused": status(403),
    "failing": status(503),
    "redirecting": status(307, Location=f"/x?{SECRET}"),
    "breaking off": break_off(0),
    "no HTTP": send(f"{SECRET}\n"),
    "malformed header": send(f"HTTP/1.1 403 {SECRET}\n: {SECRET}\n\n"),
    "other bytes": object_of(SECRET.encode()),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_store_that_fails_is_gone_around_and_its_url_is_told_to_nobody(
    offering: ScriptedCoordinator,
    store: ScriptedStore,
    adder: Adder,
    launch: Launch,
    fault: Fault,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The session goes on at once through the coordinator, and the host is left alone."""
    caplog.set_level(logging.DEBUG)
    store.faults.extend([fault] * 10)
    with capture_logs() as logs:
        running = launch(adder, offering.target)
        assert running.code() == 0
    assert adder.trained == [0, 1]
    assert (offering.calls["GetWeights"], offering.calls["PutWeights"]) == (2, 2)
    failed = [entry for entry in logs if entry["event"] == "offer_failed"]
    assert [(e["log_level"], e["round"], e["method"], e["host"]) for e in failed] == [
        ("warning", 0, "GET", store.host),
        ("warning", 0, "PUT", store.host),
    ]
    assert store.methods in (["GET", "PUT"], ["GET", "PUT", "PUT"])  # one may begin again
    assert SECRET not in f"{logs}{running.seen}{caplog.text}"


def test_a_failure_inside_a_transfer_does_not_tell_the_url(
    offering: ScriptedCoordinator,
    store: ScriptedStore,
    adder: Adder,
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not even a bug of our own, whose traceback is logged."""
    monkeypatch.setattr(direct._Target, "host", property(lambda target: 1 / 0))
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.JSONRenderer()],
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    running = launch(adder, offering.target)
    assert running.code() == 1
    assert "ZeroDivisionError" in caplog.text
    assert SECRET not in f"{running.seen}{caplog.text}"


def test_an_update_that_lies_in_the_store_is_not_put_again(
    offering: ScriptedCoordinator, store: ScriptedStore, adder: Adder
) -> None:
    """Only what it is called is handed in again, however long the coordinator was away."""
    offering.before["EndTrainingRound"].extend(
        [failure(grpc.StatusCode.UNAVAILABLE), refusal("NOT_IN_ROUND")]
    )
    offering.tells_accepted = False
    offering.after["EndTrainingRound"].append(failure(grpc.StatusCode.UNAVAILABLE))
    assert run(adder, offering.target, "ward-7") == 0
    assert offering.calls["EndTrainingRound"] == 5
    assert store.methods.count("PUT") == 2
    assert adder.trained == [0, 1]


def test_an_update_that_the_coordinator_does_not_find_goes_through_it(
    offering: ScriptedCoordinator, store: ScriptedStore, adder: Adder
) -> None:
    """A store that says it has it may be another one than the coordinator's."""

    def lose(_: Any) -> None:
        del store.objects["/incoming/0/ward-7"]

    offering.before["EndTrainingRound"].append(lose)
    with capture_logs() as logs:
        assert run(adder, offering.target, "ward-7") == 0
    assert adder.trained == [0, 1]
    assert store.methods.count("PUT") == 1
    assert offering.calls["PutWeights"] == 2
    (entry,) = [entry for entry in logs if entry["event"] == "offer_failed"]
    assert (entry["method"], entry["host"]) == ("PUT", store.host)


def test_without_direct_no_offer_is_used(
    offering: ScriptedCoordinator, store: ScriptedStore, adder: Adder
) -> None:
    """The operator of a site decides whether anything but the coordinator is spoken to."""
    assert Agent(adder, offering.target, "ward-7", direct=False).run() == 0
    assert store.methods == []


def test_an_offer_is_for_its_round_only(
    offering: ScriptedCoordinator, store: ScriptedStore, adder: Adder
) -> None:
    with CoordinatorClient(offering.target, "ward-7", direct=direct.DirectTransfer()) as client:
        client.rendezvous()
        work = Work(adder, client, "ward-7")
        assert work.do(p.Call.BEGIN_ROUND, 0) == p.Assigned(0)
        assert work.do(p.Call.TRAIN, 0) == p.Trained(0)
        work.assign(pb.StartTrainingRoundResponse(round=1, upload=client.start_round().upload))
        assert work.do(p.Call.HAND_IN, 0) == p.HandedIn(0)
    assert store.methods == ["GET"]
    assert offering.calls["PutWeights"] == 1


def test_a_store_that_is_away_is_worth_one_warning(
    offering: ScriptedCoordinator,
    store: ScriptedStore,
    adder: Adder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(direct, "PAUSE_S", 0)
    store.faults.extend([status(503)] * 4)
    with capture_logs() as logs:
        assert run(adder, offering.target, "ward-7") == 0
    failed = [entry for entry in logs if entry["event"] == "offer_failed"]
    assert [(e["log_level"], e["round"], e["method"]) for e in failed] == [
        ("warning", 0, "GET"),
        ("warning", 0, "PUT"),
        ("debug", 1, "GET"),
        ("debug", 1, "PUT"),
    ]


def test_stop_ends_a_transfer_that_hangs(
    offering: ScriptedCoordinator,
    store: ScriptedStore,
    adder: Adder,
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not the transfer's own time limit that ends it."""
    patient = functools.partial(direct.DirectTransfer, chunk_timeout_s=10 * PATIENCE_S)
    monkeypatch.setattr(client_module, "DirectTransfer", patient)
    store.faults.append(hang)
    running = launch(adder, offering.target)
    store.wait_until(lambda: store.methods == ["GET"])
    with capture_logs() as logs:
        running.agent.stop(7)
        assert running.code() == 7
    workers = [thread for thread in threading.enumerate() if thread.name == "work-ward-7"]
    for worker in workers:
        worker.join(PATIENCE_S / 2)
        assert not worker.is_alive()
    assert adder.trained == []
    assert "offer_failed" not in {entry["event"] for entry in logs}, "it is we who ended it"


def test_an_invalid_update_is_logged_as_an_error_and_the_fourth_is_the_end(
    serve: Serve, adder: Adder
) -> None:
    """It leaves a coordinator that asks it again after three, so that the round does not wait for
    it."""
    server = serve()

    def invalid(context: Any) -> None:
        refuse(context, "INVALID_UPDATE", grpc.StatusCode.INVALID_ARGUMENT, "not finite at 3")

    server.before["EndTrainingRound"].extend([invalid] * 4)
    with capture_logs() as logs:
        assert run(adder, server.target, "ward-7") == 1
    assert server.heartbeats[-1] == (pb.FINISHED, 0)
    errors = [entry for entry in logs if entry["event"] == "update_invalid"]
    assert [(e["log_level"], e["round"], e["reason"]) for e in errors] == [
        ("error", 0, "not finite at 3")
    ] * 4
    assert len(adder.trained) == 4


@pytest.mark.parametrize(
    "fault",
    [
        refusal("TOO_LARGE", grpc.StatusCode.RESOURCE_EXHAUSTED),
        failure(grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["the coordinator's", "gRPC's own"],
)
def test_what_is_too_large_is_the_end_at_once(
    serve: Serve, adder: Adder, launch: Launch, fault: Callable[[Any], None]
) -> None:
    server = serve()
    server.before["EndTrainingRound"].append(fault)
    running = launch(adder, server.target)
    assert running.code() == 1
    assert running.seen[-1].message.startswith("the update of round 0 was refused: ")
    assert adder.trained == [0]


def test_a_result_that_is_dropped_before_its_turn_is_not_sent(serve: Serve, adder: Adder) -> None:
    """An advertisement says that it has arrived while the worker is on its way to send it."""
    server = serve()
    with CoordinatorClient(server.target, "ward-7") as client:
        work = Work(adder, client, "ward-7")
        assert work.result is None
        assert work.do(p.Call.HAND_IN, 3) == p.HandedIn(3)
    assert server.calls == {}


def test_more_metrics_than_the_coordinator_takes_are_cut(serve: Serve, adder: Adder) -> None:
    """The newest are kept, and how many are missing is told."""
    trains = adder.train_round

    def verbose(*arguments: Any) -> Any:
        for _ in range(900):
            adder.update_metrics(**{f"loss_{i}": 0.5 for i in range(10)})
        return trains(*arguments)

    adder.train_round = verbose  # type: ignore[method-assign]  # a probe
    server = serve(Ledger(rounds=1))
    with capture_logs() as logs:
        assert run(adder, server.target, "ward-7") == 0
    text = server.ledger.accepted[0][2]
    assert len(text.encode()) <= 64 * 1024
    points = json.loads(text)
    assert points[-1]["fields"] == {"loss": 0.0, "round": 0}
    (entry,) = [entry for entry in logs if entry["event"] == "metrics_dropped"]
    assert (entry["log_level"], entry["round"]) == ("warning", 0)
    assert entry["num_points"] == 901 - len(points)


def test_a_session_that_ends_without_a_result_is_a_failure(
    serve: Serve, adder: Adder, launch: Launch
) -> None:
    server = serve(Ledger(paused=True))
    running = launch(adder, server.target)
    server.wait_until(lambda: server.calls["Heartbeat"] > 0)
    server.change(round=2, cause="no model can be made")
    assert running.code() == 1
    assert running.seen[-1].message.endswith("no model can be made")


def test_a_coordinator_that_is_away_is_worth_one_warning(serve: Serve, adder: Adder) -> None:
    server = serve()
    server.before["Rendezvous"].extend([failure(grpc.StatusCode.UNAVAILABLE)] * 3)
    with capture_logs() as logs:
        assert run(adder, server.target, "ward-7") == 0
    levels = [entry["log_level"] for entry in logs if entry["event"] == "refused"]
    assert levels == ["warning", "debug", "debug"]


def test_every_event_names_participant_and_round(serve: Serve, adder: Adder) -> None:
    with capture_logs() as logs:
        assert run(adder, serve().target, "ward-7") == 0
    assert {entry["event"] for entry in logs} >= {"joined", "training", "handed_in", "exiting"}
    assert all(entry["participant"] == "ward-7" for entry in logs)
    assert all(isinstance(entry["round"], int) for entry in logs)


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(0)])
def test_a_participant_that_fails_leaves_the_session(
    serve: Serve, adder: Adder, error: BaseException
) -> None:
    """So that somebody else can take its place at once."""
    server = serve()
    adder.error = error
    with capture_logs() as logs:
        assert run(adder, server.target, "ward-7") == 1
    assert server.heartbeats[-1] == (pb.FINISHED, 0)
    (entry,) = [entry for entry in logs if entry["event"] == "work_failed"]
    assert entry["exc_info"] is error


def test_a_result_of_the_wrong_type_fails_like_an_exception(
    serve: Serve, adder: Adder, launch: Launch
) -> None:
    adder.train_round = lambda *_: ([1.0], 5)  # type: ignore[method-assign]  # a probe
    running = launch(adder, serve().target)
    assert running.code() == 1
    assert "numpy array, not list" in running.seen[-1].message


def test_a_profile_that_does_not_fit_ends_with_the_reason(
    serve: Serve, adder: Adder, launch: Launch
) -> None:
    server = serve()
    server.before["Rendezvous"].append(
        lambda context: refuse(
            context, "PROFILE_MISMATCH", grpc.StatusCode.INVALID_ARGUMENT, "check its columns"
        )
    )
    running = launch(adder, server.target)
    assert running.code() == 1
    assert running.seen[-1] == Progress("finished", "ward-7", -1, "check its columns")


def test_without_rows_nobody_joins(serve: Serve) -> None:
    class Empty(Adder):
        def profile(self) -> DataProfile | None:
            return DataProfile(0, 2)

    server = serve()
    with capture_logs() as logs:
        assert run(Empty(), server.target, "ward-7") == 0
    assert [entry["event"] for entry in logs] == ["nothing_to_train_on"]
    assert server.calls == {}


def test_stop_leaves_even_in_the_middle_of_training(
    serve: Serve, adder: Adder, launch: Launch
) -> None:
    """The training itself cannot be interrupted, and must not hold anybody up."""
    server = serve()
    adder.may_finish.clear()
    running = launch(adder, server.target)
    assert adder.entered.wait(PATIENCE_S)
    assert running.agent.stop(7)
    assert not running.agent.stop(), "only the first time counts"
    assert running.code() == 7
    assert server.heartbeats[-1] == (pb.FINISHED, 0)


def silence_s(file: Path) -> float:
    """How much longer nothing need be heard."""
    return file.stat().st_mtime - time.time()


def wait_for_a_sign(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while silence_s(file) < 0:
        assert time.monotonic() < deadline, "it shows no sign of life"
        time.sleep(0.01)  # a poll, not a race: it ends with the sign


def test_a_health_check_sees_that_it_lives(
    serve: Serve, adder: Adder, launch: Launch, tmp_path: Path
) -> None:
    """What an earlier run left does not count. While it trains, and while the coordinator is away,
    there are signs of life; each says for how long it holds."""
    file = tmp_path / "alive"
    file.touch()
    alive = Alive(file)
    assert file.stat().st_mtime == 0
    server = serve()
    adder.may_finish.clear()
    running = launch(adder, server.target, alive)
    assert adder.entered.wait(PATIENCE_S)
    os.utime(file, (0, 0))
    wait_for_a_sign(file)
    assert silence_s(file) <= server.heartbeat_interval_ms / 1000 + SLACK_S
    server.stop()
    os.utime(file, (0, 0))
    wait_for_a_sign(file)
    assert silence_s(file) <= p.MAX_BACKOFF_S + SLACK_S
    running.agent.stop(7)
    assert running.code() == 7


def test_a_health_file_that_is_gone_ends_nothing(
    serve: Serve, adder: Adder, launch: Launch, tmp_path: Path
) -> None:
    file = tmp_path / "alive"
    alive = Alive(file)
    file.unlink()
    assert launch(adder, serve().target, alive).code() == 0
    assert not file.exists()


@pytest.mark.parametrize("name", ["", "global", "a/b", "Köln", "ward 7 "])
def test_a_name_that_cannot_travel_is_refused_at_once(adder: Adder, name: str) -> None:
    """gRPC cannot send some of them at all, and would be asked for ever."""
    with pytest.raises(ValueError, match="participant_id is"):
        run(adder, "localhost:1", name)


def test_without_an_id_it_makes_one(serve: Serve, adder: Adder) -> None:
    server = serve()
    first, second = Agent(adder, server.target), Agent(adder, server.target)
    assert first.participant_id != second.participant_id
    assert first.run() == 0
    assert server.identities == {first.participant_id}
    second.stop()
    second.run()
