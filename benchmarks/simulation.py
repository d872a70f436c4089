"""100 participants simulated in two processes: a small CNN on scikit-learn's digits; and how light
a thousand of them are.

    python benchmarks/simulation.py [--participants 100] [--rounds 40] [--sites 1000] [--peers]

Runs examples/simulate.py: a tenth of the participants trains each round, five passes over a
hundredth of the data each. The first rounds, in which PyTorch's imports settle, are left out of the
median. Beside a round stands one epoch of the same network on all of the data, in one process with
one thread.

Then --sites participants each submit a model of 10 float32 in every round, in turns with as many
participants of fleet.py, which train without a script. Threads and memory are those of a worker;
what a participant takes is the difference to a worker with few.

With --peers rounds of the first --sites participants also in turns with as many on Flower's
simulation, whose clients are run by actors of Ray, as many as our workers. A round lasts from its
beginning to that of the next. Flower is installed into .bench-peers/ when it is not there.

Prints figures; writes bench-results/simulation.json. Needs PyTorch: make setup-torch.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import flags
import fleet
import numpy as np
import results
from fleet_crowd import Crowd, wait

import xain

EXAMPLES = Path(__file__).parents[1] / "examples"
LEFT_OUT = 3  # rounds
EPOCHS = 5  # of which the median is taken
SIZE = 10  # of the model of light(), in float32
LIGHT_ROUNDS = 5  # beside the one that initialises
PEER_ROUNDS = 3  # of each session, beside a warm-up
RUNS = 2  # of each, in turns
FEW = 10  # participants of a worker whose memory is the base


def light(site: xain.Site) -> None:
    """Add 1 to a model of 10 float32. The last round reports the worker's memory and threads."""
    for round_ in xain.rounds({"w": np.zeros(SIZE, np.float32)}):
        metrics = own_status() if round_.number == LIGHT_ROUNDS else {}
        round_.submit({"w": round_.weights["w"] + 1}, samples=10, metrics=metrics)


def own_status() -> dict[str, int]:
    """Resident memory and threads of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {"rss_kb": int(fields["VmRSS"].split()[0]), "threads": int(fields["Threads"])}


def light_rounds(number: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The coordinator's log of so many simulated participants, and the entry of the last round."""
    settings = fleet.settings_of(number, fleet.Scale())
    with results.scratch() as folder:
        done = xain.simulate(
            light,
            number,
            rounds=LIGHT_ROUNDS + 1,
            settings=settings,
            folder=folder,
            progress=False,
        )
        log = (folder / "coordinator.log").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in log], dict(done.history[-1])


def fleet_rounds(number: int) -> list[float]:
    """Seconds of each round with so many participants of fleet.py."""
    settings = {**fleet.settings_of(number, fleet.Scale()), "rounds.rounds": LIGHT_ROUNDS + 1}
    with results.scratch() as folder, fleet.coordinator(folder, settings) as (server, port):
        crowd = Crowd(port, number)
        try:
            crowd.train(until=LIGHT_ROUNDS)
            wait(lambda: bool(server.events("session_finished")), "the rounds", server)
            return seconds_of([*server.events("round_opened"), *server.events("model_published")])
        finally:
            crowd.end()


def seconds_of(lines: Iterable[dict[str, Any]]) -> list[float]:
    """From the opening of each round but the first to its model, by the coordinator's log."""
    at: dict[str, dict[int, float]] = {"round_opened": {}, "model_published": {}}
    for line in lines:
        if line.get("event") in at:
            at[line["event"]][line["round"]] = moment_of(line)
    opened, published = at.values()
    return [published[r] - opened[r] for r in range(1, LIGHT_ROUNDS + 1)]


def intervals_of(lines: Iterable[dict[str, Any]]) -> list[float]:
    """From each model to the next, by the coordinator's log: the time of a whole round."""
    moments = [moment_of(line) for line in lines if line.get("event") == "model_published"]
    return [after - before for before, after in pairwise(moments)]


def moment_of(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()


def measure_peers(number: int, sessions: int) -> list[dict[str, Any]]:
    """Simulated participants in turns with those of each peer."""
    import peers

    ours: list[float] = []
    rows = peers.measure(
        number,
        SIZE,
        PEER_ROUNDS,
        peers.SIMULATED,
        sessions=sessions,
        before=lambda: ours.extend(intervals_of(light_rounds(number)[0])),
    )
    seconds = statistics.median(ours)
    return peers.beside([{**row, "our_round_s_median": seconds} for row in rows], seconds)


def measure_light(number: int, runs: int) -> dict[str, Any]:
    """Simulated participants in turns with those of fleet.py."""
    simulated, real = [], []
    last: dict[str, Any] = {}
    for _ in range(runs):
        lines, last = light_rounds(number)
        simulated += seconds_of(lines)
        real += fleet_rounds(number)
    _, base = light_rounds(2 * FEW)
    more = number / 2 - FEW
    return {
        "participants": number,
        "threads_of_worker": last["threads"],
        "kb_a_participant": (last["rss_kb"] - base["rss_kb"]) / more if more > 0 else None,
        "round_s": statistics.median(simulated),
        "fleet_round_s": statistics.median(real),
        "ratio_to_fleet": statistics.median(simulated) / statistics.median(real),
    }


def main() -> None:
    parser = flags.parser(__doc__)
    parser.add_argument("--participants", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--sites", type=flags.numbers, default=[1000], metavar="N,N", help="default: 1000"
    )
    parser.add_argument("--light-only", action="store_true", help="leave out the CNN")
    parser.add_argument("--peers", action="store_true", help="also Flower's simulation")
    args = parser.parse_args()
    if args.quick:
        args.participants, args.rounds, args.sites = 4, LEFT_OUT + 1, [4]
    results.begin(quick=args.quick, any_load=args.any_load)
    fleet.raise_file_limit(max(args.sites))
    figures: dict[str, object] = {} if args.light_only else measure_cnn(args)
    runs = 1 if args.quick else RUNS
    figures["light"] = [measure_light(number, runs) for number in args.sites]
    if args.peers:
        figures["peers"] = measure_peers(args.sites[0], runs)
    results.report("simulation", figures)


def measure_cnn(args: argparse.Namespace) -> dict[str, object]:
    """A round of the CNN beside an epoch of all its data."""
    sys.path.insert(0, str(EXAMPLES))  # workers import the script by its name
    import simulate
    import torch

    done = xain.simulate(
        simulate.main,
        args.participants,
        workers=1 if args.quick else 2,  # each imports PyTorch
        rounds=args.rounds,
        fraction=0.1,
        epochs=1 if args.quick else 5,
        progress=False,
    )
    rounds = [entry["seconds"] for entry in done.history][LEFT_OUT:]
    x, y, *_ = simulate.digits()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as in a worker; such small batches gain nothing by a second
    model = simulate.make_model()
    epochs = []
    for _ in range(1 if args.quick else EPOCHS):
        begin = time.perf_counter()
        simulate.train(model, x, y, epochs=1)
        epochs.append(time.perf_counter() - begin)
    epoch_s = statistics.median(epochs)
    round_s = statistics.median(rounds)
    return {
        "participants": args.participants,
        "trained_a_round": max(1, args.participants // 10),
        "workers": 2,
        "rounds": args.rounds,
        "accuracy": simulate.accuracy(done.weights),
        "round_s_median": round_s,
        "centralised_epoch_s": epoch_s,
        "ratio_to_centralised_epoch": round_s / epoch_s,
        "whole_s": done.seconds,
    }


if __name__ == "__main__":
    main()
