"""The status stream and the latency stream of a real coordinator, in files of their own."""

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from support.process import CoordinatorProcess
from support.wire import Code, Member, assert_refused
from xain_coordinator.cli.timings import TRAINING, read
from xain_coordinator.telemetry.log_files import LatencyFile
from xain_wire.fl import coordinator_pb2 as pb

COORDINATOR = "/xain_proto.fl.Coordinator/"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def train(members: list[Member], rounds: int = 1) -> None:
    for member in members:
        await member.rendezvous()
    for round_ in range(rounds):
        for member in members:
            await member.until(pb.ROUND, round_)
            await member.start()
            await member.hand_in([1.0], round_=round_)
    for member in members:
        await member.until(pb.FINISHED, rounds - 1)


async def test_streams_of_a_coordinator_process(keep, tmp_path, join):
    """A session of two participants: every call with its caller, status and seconds, every update
    with its round, and the session's events, although the log shows errors only."""
    status, latency = tmp_path / "streams" / "status.jsonl", tmp_path / "streams" / "latency.jsonl"
    settings = {
        "rounds.rounds": 2,
        "rounds.min_participants": 2,
        "logging.level": "error",
        "logging.status_file": status,
        "logging.latency_file": latency,
    }
    coordinator = keep(CoordinatorProcess(tmp_path, settings))
    await coordinator.begin()
    members = [join(coordinator, "a"), join(coordinator, "b")]
    async with asyncio.timeout(60):
        for member in members:
            await member.channel.channel_ready()
    unregistered = join(coordinator, "unregistered")
    await assert_refused(unregistered.start(), Code.PERMISSION_DENIED)
    await train(members, rounds=2)
    await members[0].status()
    assert await coordinator.stop(signal.SIGTERM) == 0
    assert coordinator.log() == ""

    events = [line["event"] for line in lines_of(status)]
    assert events.count("participant_joined") == 2
    assert events.count("round_opened") == 2
    assert events.count("update_accepted") == 4
    assert events.count("model_published") >= 2
    assert events[-1] == "participation"
    assert "session_finished" in events

    written = lines_of(latency)
    calls = [line for line in written if "method" in line]
    for line in calls:
        assert line.keys() - {"participant"} == {"time", "method", "status", "seconds"}
        assert 0 <= line["seconds"] < 60
    told = [
        (line["method"].rpartition("/")[2], line.get("participant"), line["status"])
        for line in calls
    ]
    for name in ("a", "b"):
        assert told.count(("Rendezvous", name, "OK")) == 1
        for method in ("StartTrainingRound", "PutWeights", "EndTrainingRound"):
            assert told.count((method, name, "OK")) == 2
        assert any((method, one) == ("Watch", name) for method, one, _ in told)
    assert told.count(("StartTrainingRound", "unregistered", "PERMISSION_DENIED")) == 1
    assert told.count(("GetStatus", None, "OK")) == 1
    updates = [line for line in written if "method" not in line]
    assert [(line["participant"], line["round"]) for line in updates] == [
        ("a", 0), ("b", 0), ("a", 1), ("b", 1),
    ]  # fmt: skip
    for line in updates:
        assert line.keys() == {"time", "participant", "round", "seconds"}
        assert 0 <= line["seconds"] < 60
    # b began when a had handed in.
    assert updates[0]["seconds"] < updates[1]["seconds"]

    with latency.open("rb") as file:
        timings = read(file)
    assert timings.num_unreadable == 0
    seconds = [s for (endpoint, _), s in timings.by_caller.items() if endpoint == TRAINING]
    assert sum(map(len, seconds)) == 4


@pytest.mark.parametrize("rounds", [{"consistency": "bsp"}, {"consistency": "ssp", "staleness": 1}])
async def test_refused_and_cancelled_calls_have_their_status(start, tmp_path, join, rounds):
    """A request that a handler refuses, one that is malformed, and a caller that goes away
    from a stream."""
    path = tmp_path / "latency.jsonl"
    latencies = LatencyFile(path)
    coordinator = await start(rounds={"rounds": 1, **rounds}, latencies=latencies)
    try:
        member = join(coordinator, "a")
        await member.rendezvous()
        await member.until(pb.ROUND, 0)  # cancels its Watch
        call = member.channel.unary_unary(f"{COORDINATOR}Heartbeat")
        await assert_refused(call(b"\xff", metadata=member.metadata), Code.INVALID_ARGUMENT)
        await assert_refused(member.end(round_=0), Code.FAILED_PRECONDITION)
        await member.hand_in([1.0])
    finally:
        await coordinator.stop()
        latencies.close()
    written = lines_of(path)
    told = [
        (line["method"].rpartition("/")[2], line["status"]) for line in written if "method" in line
    ]
    assert told.count(("Watch", "CANCELLED")) == 1
    assert told.count(("Heartbeat", "INVALID_ARGUMENT")) == 1
    assert told.count(("EndTrainingRound", "FAILED_PRECONDITION")) == 1
    assert told.count(("EndTrainingRound", "OK")) == 1
    assert [line["round"] for line in written if "method" not in line] == [0]


@pytest.mark.parametrize(
    "key", [*("logging.status_file", "logging.latency_file"), "server.port_file"]
)
async def test_unwritable_path_is_refused_with_one_line_and_exit_status_2(tmp_path, key):
    """A start and check-config refuse it, and nothing is begun."""
    folder = tmp_path / "folder"
    folder.mkdir()
    refused = CoordinatorProcess(tmp_path, {key: folder})
    assert await refused.fails() == 2
    (line,) = refused.log().splitlines()
    told = json.loads(line)
    assert told["event"] == "cannot_start"
    assert re.fullmatch(f"{key}: {folder} .*is a folder", told["error"])
    assert not (tmp_path / "journal.sqlite").exists()
    assert await refused.run_command("check-config") == 2
    last = refused.log().splitlines()[1:]
    assert last == [f"xain-coordinator: {key}: {folder} cannot be written: it is a folder"]


async def test_latency_of_a_stale_update_counts_from_the_round_it_was_trained_in(
    enter, start, tmp_path
):
    """b trains for the whole of round 1, and hands in during round 2."""
    path = tmp_path / "latency.jsonl"
    latencies = LatencyFile(path)
    rounds = {"rounds": 3, "start_participants": 2, "buffer_size": 1, "consistency": "asp"}
    coordinator = await start(rounds=rounds, latencies=latencies)
    a, b = await enter(coordinator, "a", "b")
    for member in (a, b):
        await member.until(pb.ROUND, 0)
        await member.hand_in([1.0])  # the initial weights, which are waited for
    await a.until(pb.ROUND, 1)
    opened_at = coordinator.driver.session.base.opened_at
    for member in (a, b):
        await member.start()
    await a.hand_in([1.0], round_=1)
    await a.until(pb.ROUND, 2)
    next_at = coordinator.driver.session.base.opened_at
    await b.hand_in([1.0], round_=1)
    latencies.close()
    updates = [line for line in lines_of(path) if "method" not in line]
    told = [(line["participant"], line["round"]) for line in updates]
    assert told == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert updates[-1]["seconds"] > next_at - opened_at
