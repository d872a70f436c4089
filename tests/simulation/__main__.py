"""The simulation from the command line; see --help."""

import argparse
import os
import sys
from collections.abc import Sequence

from simulation.scenario import from_seed
from simulation.world import Failed, simulate
from support.seeds import in_chunks

LOGGED_EVERY = 1000

ABOUT = """\
Simulate the whole system in one thread on a virtual clock, with faults drawn from a seed: crashes
of coordinator and participants at any step, lost, late and doubled messages, partitions, dead
connections, power cuts, full disks, a store that is away, a second coordinator.

The same seed gives the same history, on every machine:

    python -m simulation --seeds 10000    seeds 0 to 9999, on all processors
    python -m simulation --seed 123       one of them, with all that happens
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all is well. 1: something happened that must never happen."""
    parser = argparse.ArgumentParser(
        "python -m simulation",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, metavar="N", help="this one, in full")
    which.add_argument("--seeds", type=int, metavar="NUM", help="so many")
    parser.add_argument(
        "--first", type=int, default=0, metavar="N", help="the first of --seeds (default: 0)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="NUM",
        help="processes (default: one for each processor)",
    )
    given = parser.parse_args(arguments)
    if given.seed is not None:
        return _show(given.seed)
    seeds = range(given.first, given.first + given.seeds)
    return in_chunks(seeds, max(1, given.jobs), simulate, from_seed, _progress)


def _show(seed: int) -> int:
    scenario = from_seed(seed)
    _say(f"{scenario}\n")
    try:
        outcome = simulate(scenario, show=_say)
    except Failed as failed:
        _say(f"\nseed {seed}: {failed.what}")
        return 1
    _say(f"\nseed {seed}: {outcome}")
    return 0


def _progress(num_done: int, num_all: int, took_s: float) -> None:
    """A line that changes, or for a log one now and then."""
    text = f"{num_done} of {num_all} seeds, {num_done / took_s:.0f} a second"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text} ")
    elif num_done % LOGGED_EVERY == 0:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
