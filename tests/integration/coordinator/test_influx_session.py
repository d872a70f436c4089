"""The metrics of whole sessions, in InfluxDB's protocol."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from support.commands import status_json
from support.influx_servers import StrictInflux, VictoriaMetrics
from support.process import CoordinatorProcess, Keep
from support.waiting import until
from support.wire import Member, npy
from xain_participant.sdk.metrics import Measured, to_json
from xain_wire.fl import coordinator_pb2 as pb

ROUNDS = 3
SIZE = 5
MS = 10**6

Launch = Callable[..., CoordinatorProcess]


@pytest.fixture
def launch(keep: Keep, tmp_path: Path) -> Launch:
    """A coordinator of two participants in a process of its own, to be started."""

    def make(**metrics: object) -> CoordinatorProcess:
        settings = {"rounds.rounds": ROUNDS, "rounds.min_participants": 2}
        settings |= {f"metrics.{key}": value for key, value in metrics.items()}
        return keep(CoordinatorProcess(tmp_path, settings))

    return make


@pytest.fixture
def influx() -> Iterator[StrictInflux]:
    with StrictInflux() as server:
        yield server


@pytest.fixture
def victoria() -> Iterator[VictoriaMetrics]:
    missing = VictoriaMetrics.missing()
    if missing is not None:
        pytest.skip(missing)  # says what is not installed
    with VictoriaMetrics() as server:
        yield server


def report(name: str, round_: int) -> Measured:
    """Metrics of this participant in this round; one loss is whole, as JSON may have it, and the
    time is one that every store keeps exactly."""
    at_ns = time.time_ns() // MS * MS
    share = 1.0 if name == "a" else 0.5
    return Measured(
        at_ns, {"loss": share / 2**round_, "accuracy": 0.25, "samples": 10.0, "seconds": 0.125}
    )


async def train(members: Sequence[Member], rounds: int = ROUNDS) -> dict[tuple[str, int], Measured]:
    """A whole session by these; what each reported in each round."""
    reported = {}
    for member in members:
        await member.rendezvous()
    for round_ in range(rounds):
        for member in members:
            assert member.participant_id is not None
            await member.until(pb.ROUND, round_)
            await member.heartbeat(pb.TRAINING, round_)
            one = report(member.participant_id, round_)
            reported[member.participant_id, round_] = one
            text, _ = to_json([one], participant_id=member.participant_id, round_=round_)
            ref = await member.upload(np.ones(SIZE, np.float32), round_)
            await member.end(ref, 10, round_, metrics=text)
    for member in members:
        await member.until(pb.FINISHED, rounds - 1)
    return reported


async def test_a_session_is_read_back_point_by_point(join, launch, victoria):
    """Every round of the coordinator's series, and every value that a participant reported."""
    coordinator = launch(kind="influxdb", url=victoria.url, org="o", bucket="b")
    await coordinator.start()
    members = [join(coordinator, name) for name in "ab"]
    reported = await train(members)
    assert await coordinator.stop() == 0
    series = victoria.series()

    def values(measurement: str, field: str, name: str = "") -> list[float]:
        return [value for _, value in series[f"{measurement}_{field}", name]]

    states = values("coordinator", "state")
    rounds = values("coordinator", "round")
    assert len(states) == len(rounds)
    assert states[-1] == 2
    assert [r for i, r in enumerate(rounds) if r not in rounds[:i]] == list(range(ROUNDS))
    assert rounds == sorted(rounds)
    assert max(values("coordinator", "connected")) == 2
    assert max(values("coordinator", "selected")) == 2
    assert values("coordinator", "num_updates") == [2] * ROUNDS
    size = len(npy(np.ones(SIZE, np.float32)))
    assert values("coordinator", "update_bytes") == [2 * size] * ROUNDS
    durations = values("coordinator", "round_seconds")
    aggregations = values("coordinator", "aggregation_seconds")
    assert len(durations) == len(aggregations) == ROUNDS
    assert all(0 < a < d for a, d in zip(aggregations, durations, strict=True))
    for name in ("a", "b"):
        measured = [reported[name, round_] for round_ in range(ROUNDS)]
        for field in ("loss", "accuracy", "samples", "seconds"):
            assert series[f"participant_{field}", name] == [
                (one.time_ns // MS, one.values[field]) for one in measured
            ]
        # One from each heartbeat and one when it hears of the end; and the round of each report.
        assert values("participant", "state", name) == [*[4] * ROUNDS, 2]
        rounds = [*range(ROUNDS), *range(ROUNDS), ROUNDS - 1]
        assert sorted(values("participant", "round", name)) == sorted(rounds)
    assert {name for _, name in series} == {"", "a", "b"}
    assert '"metrics_' not in coordinator.log()


async def test_lost_points_are_counted_in_the_status(join, launch, influx):
    """One participant's points are refused: they are counted, and the others arrive."""
    influx.refuses = lambda line: line.tags.get("id") == "b"
    influx.partial = True
    coordinator = launch(**influx.settings())
    await coordinator.start()
    members = [join(coordinator, name) for name in "ab"]
    await train(members)
    num_bad = 2 * ROUNDS + 1  # a heartbeat and a report in each, and one at the end

    async def are_counted() -> bool:
        num_lost = (await members[0].status()).counters["lost_metrics"]
        assert num_lost <= num_bad
        return num_lost == num_bad

    await until(are_counted)
    shown = await status_json(coordinator.port)
    assert shown["status"]["counters"]["lost_metrics"] == num_bad
    assert await coordinator.stop() == 0
    assert sum("loss" in line.fields for line in influx.lines) == ROUNDS
    assert {line.tags.get("id", "") for line in influx.lines} == {"", "a"}
    own = [line for line in influx.lines if line.measurement == "coordinator"]
    assert max(own, key=lambda line: line.at_ns).fields["state"] == 2
