"""Thousands of participants on one coordinator process: 100, 500 and 2,000, a model of 10 float32.

    python benchmarks/fleet.py [--participants 100,500,2000] [--rounds 3] [--skip-aggregation]
                               [--through-grpc] [--quick]

For each number a coordinator and two processes of participants (fleet_agents.py): all start at
once and join; they train, and only their heartbeats go on, for a heartbeat interval; the
coordinator is killed with SIGKILL and started again; then come the rounds. At last the greatest
number heartbeats while four more hand in models of 250 MB, so that a gigabyte is aggregated; with
--through-grpc their weights pass the gRPC port, as those of participants that reach no other.

Beside it, in the same run, a bare grpc.aio server (fleet_bare.py), which answers the same
participants with bytes made beforehand and does nothing else; and, as controls of the last part,
the same heartbeats on it while numpy aggregates as much in two threads of another process, and
while bulk_round.py moves as many models over plain sockets. Everything shares the machine's cores,
the participants too, so that a heartbeat takes long wherever the cores are busy: what the
coordinator adds to that is its ratio to the controls. Prints medians and ratios; writes
bench-results/fleet.json.

join_s: from the start of the participants to the last that is told of round 0.
told_s: from the opening of a round to the last that has its work, in rounds in which training takes
longer than that. told_busy_s: the same in rounds in which each trains at once, so that the first
have handed in before the last are told. round_s: to the new model of such a round.
heartbeat_cpu_ms: of the coordinator's processor time, a heartbeat's share when nothing else is on.
memory_kb: what each participant adds to the coordinator's memory.
back_s: from the start of the new process to the last of all streams that stands again.
opening: of the heartbeats that were sent in the first two seconds of a round in which each trains
at once, the 99th percentile.
rejoined: rendezvous after the restart; there should be none. slow: heartbeats then that took so
long that an agent would have taken a silent connection for dead.

Heartbeats are measured once the fleet is at rest, when what connecting has left behind is answered.
Of the last part each counts where it was sent, whenever it was answered: aggregating, from the last
update accepted to the new model; transferring, from a round's opening to the last update; opening,
in the first two seconds of these. One that is given up counts with the time until then. Their 99th
percentiles are of all rounds together, and aggregating_round_p99_ms is the median of those of the
single rounds. at_rest: whether the fleet came to rest before within a minute.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import flags
import numpy as np
import results
from bulk_round import bulk_round
from certificates import Issuer, close_coordinator
from fleet_agents import site
from fleet_crowd import PATIENCE_S, Crowd, Figures, Heartbeats, Server, wait
from numpy.typing import NDArray

from xain_foundation.logs.logs import configure
from xain_foundation.net.sockets import free_ports
from xain_participant import Participant
from xain_participant.agent.agent import run
from xain_participant.wire.client import CALLS_SILENCE_S

BARE = Path(__file__).with_name("fleet_bare.py")
SPARE_FILES = 200
HEAVY = 4  # participants with large models
HEAVY_ROUNDS = 5  # the first initialises
OPENING_S = 2.0
REST_S = 0.05  # a fleet is at rest when the 99th percentile is below that
TILE = 1 << 18  # elements that numpy takes at once, so that its float64 stay in the cache

Spans = Sequence[tuple[float, float]]  # from when to when


@dataclass(frozen=True, slots=True)
class Scale:
    """interval_s: between two heartbeats. heavy_size: of the large models, in float32; by default
    250 MB each, a gigabyte together. control_s: how long numpy aggregates at least. patience_s: for
    a fleet to come to rest; on a machine with other work it may never be."""

    interval_s: float = 10.0
    heavy_size: int = 62_500_000
    control_s: float = 10.0
    patience_s: float = 60.0


QUICK = Scale(interval_s=0.5, heavy_size=50_000, control_s=0.2, patience_s=0.5)


class Heavy(Participant):
    """Training that takes no time, of a model that takes some. size: in float32."""

    def __init__(self, size: int) -> None:
        self._size = size

    def init_weights(self) -> NDArray[np.float32]:
        return np.random.default_rng(os.getpid()).random(self._size, np.float32)

    def train_round(
        self, weights: NDArray[np.float32], epochs: int, epoch_base: int
    ) -> tuple[NDArray[np.float32], int]:
        weights += np.float32(os.getpid() % 7)
        return weights, 10


@contextmanager
def coordinator(folder: Path, settings: dict[str, object]) -> Iterator[tuple[Server, int]]:
    port = free_ports(1)[0]
    changes = [f"--set={key}={value}" for key, value in settings.items()]
    server = Server(
        [
            *(sys.executable, "-m", "xain_coordinator", f"--data-dir={folder / 'data'}"),
            *(f"--port={port}", "--set=logging.console=false", *changes),
        ],
        folder / "log",
    )
    try:
        yield server, port
    finally:
        server.kill()


@contextmanager
def bare(folder: Path, scale: Scale) -> Iterator[tuple[Server, int]]:
    port = free_ports(1)[0]
    command = [sys.executable, str(BARE), str(port), str(round(1000 * scale.interval_s))]
    server = Server(command, folder / "log")
    try:
        yield server, port
    finally:
        server.kill()


def within(heartbeats: Heartbeats, spans: Spans) -> Heartbeats:
    """The heartbeats that were sent in one of the spans, whenever they were answered."""
    return [beat for beat in heartbeats if any(begin <= beat[0] <= end for begin, end in spans)]


def p99_ms(heartbeats: Heartbeats) -> float | None:
    seconds = sorted(answered_s for _, answered_s in heartbeats)
    return round(1000 * seconds[int(0.99 * (len(seconds) - 1))], 1) if seconds else None


def median_p99_ms(heartbeats: Heartbeats, spans: Spans) -> float | None:
    """Median of the 99th percentiles of the spans in which heartbeats were sent."""
    each = [p99_ms(within(heartbeats, [span])) for span in spans]
    p99s = [p99 for p99 in each if p99 is not None]
    return round(statistics.median(p99s), 1) if p99s else None


def come_to_rest(crowd: Crowd, scale: Scale) -> bool:
    """Forget latencies until the load of connecting is over. Whether it was in time."""
    give_up_at = time.monotonic() + scale.patience_s
    is_at_rest = False
    while not is_at_rest and time.monotonic() < give_up_at:
        crowd.ask("forget")
        time.sleep(OPENING_S)  # what is looked at: in that time some are sent
        p99 = p99_ms(crowd.ask("heartbeats")["heartbeats"])
        is_at_rest = p99 is not None and p99 < 1000 * REST_S
    crowd.ask("forget")
    return is_at_rest


def idle(crowd: Crowd, server: Server, scale: Scale) -> Figures:
    """Nothing but heartbeats."""
    is_at_rest = come_to_rest(crowd, scale)
    cpu_s = server.cpu_s
    time.sleep(1.5 * scale.interval_s)  # what is measured: in this time each sends at least one
    spent_s = server.cpu_s - cpu_s
    beats = crowd.heartbeats(server)
    return {
        "at_rest": is_at_rest,
        "heartbeat_cpu_ms": round(1000 * spent_s / len(beats), 2),
        "heartbeat_p99_ms": p99_ms(beats),
    }


def measure(number: int, rounds: int, scale: Scale) -> Figures:
    """One coordinator and so many participants."""
    settings = {**settings_of(number, scale), "rounds.rounds": 2 * rounds + 1}
    with results.scratch() as folder, coordinator(folder, settings) as (server, port):
        memory_kb = server.memory_kb
        crowd = Crowd(port, number)
        try:
            figures: Figures = {
                **joined(crowd, server, memory_kb),
                **idle(crowd, server, scale),
                **restart(crowd, server),
            }
            crowd.ask("forget")
            # The first initialises, and the restart fell into it.
            for round_ in range(rounds):
                crowd.train(until=round_)
                crowd.all_told(round_ + 1, server)
            crowd.train(until=2 * rounds)
            wait(lambda: bool(server.events("session_finished")), "the rounds", server)
            opened = {event["round"]: event["at"] for event in server.events("round_opened")}
            published = {event["round"]: event["at"] for event in server.events("model_published")}
            beats = crowd.heartbeats(server)
            told = crowd.ask("look")["told"]
            waiting, training = range(1, rounds + 1), range(rounds + 1, 2 * rounds + 1)
            openings = [(opened[round_], opened[round_] + OPENING_S) for round_ in training]
            figures["opening_p99_ms"] = p99_ms(within(beats, openings))
            for name, numbers in (("told_s", waiting), ("told_busy_s", training)):
                told_s = [told[round_][1] - opened[round_] for round_ in numbers]
                figures[name] = round(statistics.median(told_s), 3)
            round_s = [published[round_] - opened[round_] for round_ in training]
            figures["round_s"] = round(statistics.median(round_s), 3)
            return figures
        finally:
            crowd.end()


def settings_of(number: int, scale: Scale) -> dict[str, object]:
    return {
        "rounds.initial_weights": "average",
        "rounds.min_participants": number,
        "server.heartbeat_time_s": scale.interval_s,
    }


def joined(crowd: Crowd, server: Server, memory_kb: int) -> Figures:
    """Wait until all have joined. memory_kb: of the server before."""
    joined_at = crowd.all_told(0, server)
    return {
        "participants": crowd.number,
        "join_s": round(joined_at - crowd.started_at, 2),
        "memory_kb": round((server.memory_kb - memory_kb) / crowd.number, 1),
    }


def measure_join(number: int, scale: Scale, *, is_closed: bool) -> Figures:
    """Figures of joining alone. is_closed: each participant has a certificate."""
    with results.scratch() as folder:
        certificates = None
        if is_closed:
            close_coordinator(folder / "data")
            issuer = Issuer(folder / "data")
            for i in range(number):
                issuer.folder(site(i))
            certificates = issuer.holders
        with coordinator(folder, settings_of(number, scale)) as (server, port):
            cpu_s, memory_kb = server.cpu_s, server.memory_kb
            crowd = Crowd(port, number, certificates)
            try:
                figures = joined(crowd, server, memory_kb)
                return {**figures, "join_cpu_s": round(server.cpu_s - cpu_s, 2)}
            finally:
                crowd.end()


def restart(crowd: Crowd, server: Server) -> Figures:
    """kill -9 while all participants are connected."""
    crowd.ask("forget")
    server.kill()
    server.start()
    wait(lambda: is_back(crowd.ask("look"), crowd.number), "all to come back", server)
    seen = crowd.ask("heartbeats")
    return {
        "back_s": round(seen["watching_since"] - server.started_at, 2),
        "rejoined": seen["rendezvous"],
        "slow": sum(answered_s > CALLS_SILENCE_S[1] for _, answered_s in seen["heartbeats"]),
    }


def is_back(seen: Figures, number: int) -> bool:
    return bool(seen["lost"] >= number and seen["watching"] == number)


def measure_bare(number: int, scale: Scale) -> Figures:
    """The same participants on a server that does nothing."""
    with results.scratch() as folder, bare(folder, scale) as (server, port):
        memory_kb = server.memory_kb
        crowd = Crowd(port, number)
        try:
            wait(lambda: crowd.ask("look")["watching"] == number, "all to connect", server)
            used_kb = server.memory_kb - memory_kb
            figures = idle(crowd, server, scale)
            began = time.monotonic()
            assert server.process.stdin is not None
            server.process.stdin.write(b"tell\n")
            server.process.stdin.flush()
            told_at = crowd.all_told(1, server)
            return {
                "bare_memory_kb": round(used_kb / number, 1),
                "bare_told_s": round(told_at - began, 3),
                **{f"bare_{name}": value for name, value in figures.items()},
            }
        finally:
            crowd.end()


def measure_aggregation(number: int, scale: Scale, *, through_grpc: bool = False) -> Figures:
    """Heartbeats while a gigabyte is aggregated. The training ones are the first by name, so that
    the others are connected, and nothing else."""
    settings: dict[str, object] = {
        "server.heartbeat_time_s": scale.interval_s,
        "rounds.rounds": HEAVY_ROUNDS,
        "rounds.initial_weights": "average",
        "rounds.min_participants": HEAVY,
        "rounds.fraction_participants": f"{(HEAVY - 0.5) / (number + HEAVY):.9f}",
        "rounds.start_participants": number + HEAVY,
        "rounds.max_participants": number + HEAVY,
        "rounds.controller": "ordered",
    }
    if through_grpc:
        settings["server.weights_port"] = "off"
    with results.scratch() as folder, coordinator(folder, settings) as (server, port):
        crowd = Crowd(port, number)
        command = [sys.executable, __file__, "--heavy", str(scale.heavy_size), str(port)]
        heavy: list[subprocess.Popen[bytes]] = []
        try:
            wait(lambda: crowd.ask("look")["watching"] == number, "all to connect", server)
            is_at_rest = come_to_rest(crowd, scale)
            heavy = [subprocess.Popen([*command, f"a-{i}"]) for i in range(HEAVY)]
            wait(lambda: bool(server.events("session_finished")), "the rounds", server)
            beats = crowd.heartbeats(server)
            opened = [event["at"] for event in server.events("round_opened")]
            published = [event["at"] for event in server.events("model_published")]
            seconds = aggregation_seconds(folder / "data" / "metrics.jsonl", server)
            closed = [at - s for at, s in zip(published, seconds, strict=True)]
            aggregating = list(zip(closed, published, strict=True))
            transferring = list(zip(opened, closed, strict=True))
            opening = [(at, min(at + OPENING_S, end)) for at, end in transferring]
            return {
                "participants": number,
                "at_rest": is_at_rest,
                "aggregation_s": round(statistics.median(seconds), 3),
                "aggregating": len(within(beats, aggregating)),
                "aggregating_p99_ms": p99_ms(within(beats, aggregating)),
                "aggregating_round_p99_ms": median_p99_ms(beats, aggregating),
                "transferring": len(within(beats, transferring)),
                "transferring_p99_ms": p99_ms(within(beats, transferring)),
                "opening": len(within(beats, opening)),
                "opening_p99_ms": p99_ms(within(beats, opening)),
            }
        finally:
            for process in heavy:
                process.kill()
                process.wait(30)
            crowd.end()


def aggregation_seconds(metrics: Path, server: Server) -> list[float]:
    """Seconds of each round from the last update accepted to the new model."""
    name = "aggregation_seconds"

    def told() -> list[float]:
        points = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        return [float(json.loads(point)["fields"][name]) for point in points if name in point]

    wait(lambda: len(told()) == HEAVY_ROUNDS, "the rounds to be measured", server)
    return told()


def measure_control(number: int, scale: Scale) -> Figures:
    """The same heartbeats on a server that does nothing, while numpy aggregates as much."""
    with results.scratch() as folder, bare(folder, scale) as (server, port):
        crowd = Crowd(port, number)
        try:
            wait(lambda: crowd.ask("look")["watching"] == number, "all to connect", server)
            command = [sys.executable, __file__, "--numpy", str(scale.heavy_size)]
            command.append(str(scale.control_s))
            is_at_rest = come_to_rest(crowd, scale)
            spans = _spans(command)
            beats = within(crowd.heartbeats(server), spans)
            moving = _spans([sys.executable, __file__, "--bulk", str(scale.heavy_size)])
            beats_moving = within(crowd.heartbeats(server), moving)
        finally:
            crowd.end()
    return {
        "bulk_transferring": len(beats_moving),
        "bulk_transferring_p99_ms": p99_ms(beats_moving),
        "numpy_s": round(statistics.median(end - begin for begin, end in spans), 3),
        "numpy_aggregating": len(beats),
        "numpy_aggregating_p99_ms": p99_ms(beats),
        "numpy_at_rest": is_at_rest,
    }


def _spans(command: Sequence[str]) -> Spans:
    """The answer of a process that works beside the heartbeats: from when to when it did."""
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=PATIENCE_S)
    spans: Spans = json.loads(answer.stdout)
    return spans


def move(size: int) -> list[tuple[float, float]]:
    """Move as many large models down and up as the heavy participants do, over plain sockets, and
    aggregate the updates. Returns the begin and the end of all of it."""
    with results.scratch() as folder:
        seconds = bulk_round(folder, HEAVY, 4 * size, HEAVY_ROUNDS)
    end = time.monotonic()
    return [(end - sum(seconds), end)]


def aggregate(size: int, at_least_s: float) -> list[tuple[float, float]]:
    """Aggregate large models in memory again and again, with two threads, as a coordinator does.

    Returns the begin and the end of each aggregation.
    """
    rng = np.random.default_rng(0)
    updates = [rng.random(size, np.float32) for _ in range(HEAVY)]
    model = np.empty(size, np.float32)

    def average(first: int, last: int) -> None:
        for begin in range(first, last, TILE):
            tile = slice(begin, min(begin + TILE, last))
            total = np.zeros(tile.stop - tile.start, np.float64)
            for update in updates:
                total += np.multiply(update[tile], 10.0, dtype=np.float64)  # n_k
            model[tile] = total / (10.0 * HEAVY)

    spans: list[tuple[float, float]] = []
    with ThreadPoolExecutor(2) as threads:
        while sum(end - begin for begin, end in spans) < at_least_s:
            began = time.monotonic()
            list(threads.map(average, (0, size // 2), (size // 2, size)))
            spans.append((began, time.monotonic()))
    return spans


def ratios(row: Figures, pairs: Sequence[tuple[str, str]]) -> Figures:
    """Ratio of the first of each pair to the second; None where the second is 0 or missing."""
    return {
        f"{name}_ratio": round(row[name] / row[other], 2) if row[name] and row[other] else None
        for name, other in pairs
    }


def raise_file_limit(most: int) -> None:
    """The coordinator has a file descriptor for each participant; every process inherits the
    limit from here."""
    needed = most + SPARE_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemExit(
            f"{most} participants need {needed} file descriptors, and this user may have {hard}: "
            "raise the limit (ulimit -Hn), or ask for fewer with --participants"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def main() -> None:
    parser = flags.parser(__doc__)
    parser.add_argument(
        "--participants",
        type=flags.numbers,
        default=[100, 500, 2000],
        metavar="N,N",
        help="how many; default: 100,500,2000",
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each kind; default: 3")
    parser.add_argument("--skip-aggregation", action="store_true", help="leave out the last part")
    parser.add_argument(
        "--through-grpc", action="store_true", help="the last part without the weights port"
    )
    parser.add_argument("--heavy", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--numpy", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--bulk", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bulk:
        print(json.dumps(move(given.bulk)))
        return
    if given.heavy:
        size, port, name = given.heavy
        configure("warning", console=False, third_party=False)
        sys.exit(run(Heavy(int(size)), f"127.0.0.1:{port}", name))
    if given.numpy:
        size, at_least_s = given.numpy
        print(json.dumps(aggregate(int(size), float(at_least_s))))
        return
    results.begin(quick=given.quick, any_load=given.any_load)
    scale = Scale()
    if given.quick:
        given.participants, given.rounds, scale = [4], 1, QUICK
    most = max(given.participants)
    raise_file_limit(most + HEAVY)
    fleets = []
    for number in given.participants:
        row = {**measure(number, given.rounds, scale), **measure_bare(number, scale)}
        names = ("told_s", "heartbeat_cpu_ms", "memory_kb")
        fleets.append({**row, **ratios(row, [(name, f"bare_{name}") for name in names])})
        print(json.dumps(fleets[-1]), file=sys.stderr)
    figures: Figures = {"rounds": given.rounds, "fleets": fleets}
    if not given.skip_aggregation:
        aggregation = measure_aggregation(most, scale, through_grpc=given.through_grpc)
        row = {**aggregation, **measure_control(most, scale)}
        pairs = [
            ("aggregating_p99_ms", "numpy_aggregating_p99_ms"),
            ("transferring_p99_ms", "bulk_transferring_p99_ms"),
        ]
        figures["aggregation"] = [{**row, **ratios(row, pairs)}]
    results.report("fleet", figures)


if __name__ == "__main__":
    main()
