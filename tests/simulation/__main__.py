"""The simulation from the command line; see --help."""

import sys

from simulation.scenario import from_seed
from simulation.world import simulate
from support.seeds import main

LOGGED_EVERY = 1000

ABOUT = """\
Simulate the whole system in one thread on a virtual clock, with faults drawn from a seed: crashes
of coordinator and participants at any step, lost, late and doubled messages, partitions, dead
connections, power cuts, full disks, a store that is away, a second coordinator.

The same seed gives the same history, on every machine:

    python -m simulation --seeds 10000    seeds 0 to 9999, on all processors
    python -m simulation --seed 123       one of them, with all that happens
"""


def progress(num_done: int, num_all: int, took_s: float) -> None:
    """A line that changes, or for a log one now and then."""
    text = f"{num_done} of {num_all} seeds, {num_done / took_s:.0f} a second"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text} ")
    elif num_done % LOGGED_EVERY == 0:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main("simulation", ABOUT, simulate, from_seed, progress))
