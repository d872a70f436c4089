"""Cost of a round that a script drives, beside one that the coordinator drives alone.

    python benchmarks/scripted.py [--participants 8] [--rounds 200]

The same agents, in processes of their own, and a model of 10 float32. Alone: `xain-coordinator`.
A script: xain.session(), which configures each round, waits for it, reads its record, and tells an
evaluation. What counts is the time from the opening of one round to that of the next, as the
coordinator records it. Both come by turns, REPEATS times; the medians of all rounds are compared.
Writes bench-results/scripted.json.
"""

import argparse
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import flags
import processes
import results

import xain
from xain_foundation.net.sockets import free_ports

SIZE = 10
REPEATS = 3
WARM_UP_ROUNDS = 5


def serve(folder: Path, port: int, participants: int, rounds: int) -> None:
    """The script, in a process of its own: prints the time of each cycle in seconds."""
    with xain.session(
        rounds=rounds,
        min_participants=participants,
        data_dir=folder,
        address=f"127.0.0.1:{port}",
        settings={"rounds.initial_weights": "average"},
        metric="r2",
        linger_s=0.0,
        progress=False,
    ) as session:
        print("serving", flush=True)
        for round_ in session:
            round_.configure(lr=0.1 * 0.99**round_.number)
            record = round_.run()
            record.evaluate(r2=1 - 0.5**record.model)
        opened = [one.opened_seconds for one in session._asked.rounds()]
    print(*(after - before for before, after in pairwise(opened)))


def cycles_of_script(participants: int, rounds: int) -> list[float]:
    (port,) = free_ports(1)
    with results.scratch() as folder:
        command = [sys.executable, __file__, "--role", "script", "--folder", str(folder)]
        command += ["--port", str(port), "--participants", str(participants)]
        command += ["--rounds", str(rounds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "serving\n"
            with processes.agents(f"127.0.0.1:{port}", participants, SIZE) as them:
                them.go()
                them.finish()
            return [float(text) for text in process.stdout.readline().split()]


def cycles_alone(participants: int, rounds: int) -> list[float]:
    rules = {
        "rounds.rounds": rounds,
        "rounds.initial_weights": "average",
        "rounds.min_participants": participants,
        "logging.level": "info",
    }
    with results.scratch() as folder:
        coordinator = processes.CoordinatorProcess(folder, rules)
        try:
            coordinator.start()
            with processes.agents(coordinator.target, participants, SIZE) as them:
                them.go()
                them.finish()
            opened = [one.opened_seconds for one in coordinator.rounds()]
        finally:
            coordinator.stop()
    return [after - before for before, after in pairwise(opened)]


def main() -> None:
    parser = flags.parser(__doc__, quick="few rounds, to see that it works")
    parser.add_argument("--participants", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--role", default="main", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role == "script":
        serve(given.folder, given.port, given.participants, given.rounds)
        return
    results.begin(quick=given.quick, any_load=given.any_load)
    repeats = REPEATS
    if given.quick:
        given.participants, given.rounds, repeats = 2, 10, 1
    alone: list[float] = []
    script: list[float] = []
    for _ in range(repeats):
        alone += cycles_alone(given.participants, given.rounds)[WARM_UP_ROUNDS:]
        script += cycles_of_script(given.participants, given.rounds)[WARM_UP_ROUNDS:]
    median_alone, median_script = statistics.median(alone), statistics.median(script)
    results.report(
        "scripted",
        {
            "participants": given.participants,
            "rounds": given.rounds,
            "alone_ms": round(1000 * median_alone, 2),
            "script_ms": round(1000 * median_script, 2),
            "ratio_to_alone": round(median_script / median_alone, 2),
        },
    )


if __name__ == "__main__":
    main()
