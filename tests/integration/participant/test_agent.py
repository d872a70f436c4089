"""The agent end to end: threads, channel and clock, against a scripted coordinator."""

import json
import logging
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from integration.participant.agents import Adder
from integration.participant.scripted import PATIENCE_S, Ledger
from support.logs import capture_logs
from support.messaging import until
from support.waiting import wait_until
from xain_participant import Agent, run
from xain_participant.agent.alive import SLACK_S, Alive
from xain_participant.agent.protocol import MAX_BACKOFF_S
from xain_participant.wire.client import CoordinatorClient
from xain_wire.fl import coordinator_pb2 as pb
from xain_workloads.model import TensorSpec


def closed_target() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_agent_trains_every_round_and_ends_with_the_session(serve, adder, launch):
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


def test_metrics_travel_with_their_round(serve, adder):
    server = serve()
    assert run(adder, server.target, "ward-7") == 0
    (point,) = json.loads(server.ledger.accepted[1][2])
    assert point["measurement"] == "participant"
    assert point["tags"] == {"id": "ward-7"}
    assert point["fields"] == {"loss": 1.0, "round": 1}


def test_a_round_is_learnt_from_the_watch(serve, adder, launch):
    """The only heartbeat of this test comes before the round opens."""
    server = serve(Ledger(paused=True))
    server.heartbeat_interval_ms = 3_600_000
    running = launch(adder, server.target)
    server.wait_until(lambda: server.calls["Heartbeat"] == 1 and server.calls["Watch"] == 1)
    server.change(paused=False)
    assert running.code() == 0
    assert server.calls["Heartbeat"] == 1


def test_a_coordinator_that_is_away_is_worth_one_warning(adder, launch):
    with capture_logs() as logs:

        def levels() -> list[str]:
            return [entry["log_level"] for entry in logs if entry["event"] == "coordinator_away"]

        agent = launch(adder, closed_target())
        until(lambda: levels().count("debug") >= 2 and "warning" in levels(), "the lines")
        agent.agent.stop()
        assert agent.code() == 0
    assert levels().count("warning") == 1


def test_another_cause_why_a_coordinator_is_away_is_another_warning(adder, launch, monkeypatch):
    """A coordinator that was away comes back with certificates."""
    causes = iter(["refused", "refused", "it speaks TLS"])
    monkeypatch.setattr(CoordinatorClient, "why_away", lambda _: next(causes, "it speaks TLS"))
    with capture_logs() as logs:

        def told(level: str) -> list[str]:
            away = [entry for entry in logs if entry["event"] == "coordinator_away"]
            return [entry["cause"] for entry in away if entry["log_level"] == level]

        agent = launch(adder, closed_target())
        agent.agent.look_again_s = 0.0
        until(lambda: "it speaks TLS" in told("debug"), "a look that finds nothing new")
        agent.agent.stop()
        assert agent.code() == 0
    assert told("warning") == ["refused", "it speaks TLS"]


@pytest.mark.usefixtures("without_proxies")
def test_proxy_is_told_at_the_start_and_with_the_cause(adder, launch, monkeypatch, caplog):
    """Behind a dead proxy nothing else says why no coordinator answers."""
    caplog.set_level(logging.INFO, "xain_participant")
    dead = f"http://{closed_target()}"
    monkeypatch.setenv("HTTPS_PROXY", dead)
    with capture_logs() as logs:
        agent = launch(adder, "fleet.invalid:50051")
        until(lambda: any(entry.get("cause") for entry in logs), "the warning")
        agent.agent.stop()
        assert agent.code() == 0
    (starting,) = [entry for entry in logs if entry["event"] == "starting"]
    assert starting["proxy"] == f"{dead} (HTTPS_PROXY)"
    away = next(entry for entry in logs if entry.get("cause"))
    assert away["cause"] == (
        f"the proxy {dead} (HTTPS_PROXY) cannot be reached: connection refused"
    )


def test_retries_do_not_wait_for_the_cause_of_a_failed_connection(adder, launch, monkeypatch):
    """Calls are tried again, and a stop ends the run, while a name service does not answer."""
    ends = threading.Event()
    monkeypatch.setattr(CoordinatorClient, "why_away", lambda _: ends.wait(120.0) and "late")
    with capture_logs() as logs:
        agent = launch(adder, closed_target())
        until(lambda: any(entry["event"] == "coordinator_away" for entry in logs), "another try")
        agent.agent.stop()
        assert agent.code() == 0
        assert not ends.is_set()
        ends.set()
        for thread in threading.enumerate():
            if thread.name.startswith("look-"):
                thread.join()
    assert {e["log_level"] for e in logs if e["event"] == "coordinator_away"} == {"debug"}


def test_every_event_names_participant_and_round(serve, adder, caplog):
    caplog.set_level(logging.INFO, "xain_participant")  # no line is made that nobody would read
    with capture_logs() as logs:
        assert run(adder, serve().target, "ward-7") == 0
    assert {entry["event"] for entry in logs} >= {"joined", "training", "handed_in", "exiting"}
    assert all(entry["participant"] == "ward-7" for entry in logs)
    assert all(isinstance(entry["round"], int) for entry in logs)


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(0)])
def test_a_participant_that_fails_leaves_the_session(serve, adder, error):
    """Another participant can replace it at once."""
    server = serve()
    adder.error = error
    with capture_logs() as logs:
        assert run(adder, server.target, "ward-7") == 1
    assert server.heartbeats[-1] == (pb.FINISHED, 0)
    (entry,) = [entry for entry in logs if entry["event"] == "work_failed"]
    assert entry["exc_info"] is error


def test_stop_leaves_even_in_the_middle_of_training(serve, adder, launch):
    """The training itself cannot be interrupted, and must not hold up other work."""
    server = serve()
    adder.may_finish.clear()
    running = launch(adder, server.target)
    assert adder.entered.wait(PATIENCE_S)
    assert running.agent.stop(7)
    assert not running.agent.stop(), "only the first time counts"
    assert running.code() == 7
    assert server.heartbeats[-1] == (pb.FINISHED, 0)


def silence_s(file: Path) -> float:
    """Seconds for which the file still counts as a sign of life."""
    return file.stat().st_mtime - time.time()


def test_a_health_check_sees_that_it_lives(serve, adder, launch, tmp_path):
    """The file of an earlier run does not count. While the agent trains, and while the coordinator
    is away, the file says until when the agent counts as alive."""
    file = tmp_path / "alive"
    file.touch()
    alive = Alive(file)
    assert file.stat().st_mtime == 0
    server = serve()
    adder.may_finish.clear()
    running = launch(adder, server.target, alive=alive)
    assert adder.entered.wait(PATIENCE_S)
    os.utime(file, (0, 0))
    wait_until(lambda: silence_s(file) >= 0)
    assert silence_s(file) <= server.heartbeat_interval_ms / 1000 + SLACK_S
    server.stop()
    os.utime(file, (0, 0))
    wait_until(lambda: silence_s(file) >= 0)
    assert silence_s(file) <= MAX_BACKOFF_S + SLACK_S
    running.agent.stop(7)
    assert running.code() == 7


def test_a_health_file_that_is_gone_ends_nothing(serve, adder, launch, tmp_path):
    file = tmp_path / "alive"
    alive = Alive(file)
    file.unlink()
    assert launch(adder, serve().target, alive=alive).code() == 0
    assert not file.exists()


def test_without_an_id_it_makes_one(serve, adder):
    server = serve()
    first, second = Agent(adder, server.target), Agent(adder, server.target)
    assert first.participant_id != second.participant_id
    assert first.run() == 0
    assert server.identities == {first.participant_id}
    second.stop()
    second.run()


def test_an_error_of_the_observer_ends_the_run(serve):
    """Whichever thread has told the observer, run() raises the error."""

    def fail(step: str, round_: int, reason: str) -> None:
        if step == "trained":
            raise ValueError("no room for the log")

    coordinator = serve(Ledger(rounds=2))
    with pytest.raises(ValueError, match="no room for the log"):
        Agent(Adder(), coordinator.target, "ward-7", observer=fail).run()
