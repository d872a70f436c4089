"""The simulation from the command line; see --help."""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

from simulation_parameters.mutations import FOUND_BY, MUTATIONS
from simulation_parameters.scenario import Scenario, from_seed
from simulation_parameters.world import Failed, simulate
from support.seeds import failures_of, in_chunks


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all is well. 1: something happened that must never happen."""
    parser = argparse.ArgumentParser(
        "python -m simulation_parameters",
        description="Simulate the parameter server with faults drawn from seeds.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, metavar="N", help="this one, in full")
    which.add_argument("--seeds", type=int, metavar="NUM", help="so many")
    which.add_argument(
        "--mutants",
        type=int,
        metavar="NUM",
        help="the first seed, of so many, that finds each mutant",
    )
    parser.add_argument("--first", type=int, default=0, metavar="N")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="NUM")
    given = parser.parse_args(arguments)
    if given.seed is not None:
        scenario = from_seed(given.seed)
        _say(f"{scenario}\n")
        try:
            _say(f"\n{simulate(scenario, show=_say)}")
        except Failed as failed:
            _say(f"\nseed {given.seed}: {failed.what}")
            return 1
        return 0
    if given.mutants is not None:
        return _find_mutants(range(given.first, given.first + given.mutants), max(1, given.jobs))
    seeds = range(given.first, given.first + given.seeds)
    return in_chunks(seeds, max(1, given.jobs), simulate, from_seed)


def _find_mutants(seeds: range, num_jobs: int) -> int:
    """Print lines for mutations.FOUND_BY. 1: no seed finds one of the mutants."""
    status = 0
    names = [name for name in MUTATIONS if not isinstance(FOUND_BY.get(name), Scenario)]
    with ProcessPoolExecutor(num_jobs) as pool:
        for name, seed in zip(names, pool.map(finding_seed, names, repeat(seeds)), strict=True):
            _say(f'    "{name}": {seed},')
            status = status if seed is not None else 1
    return status


def finding_seed(name: str, seeds: range) -> int | None:
    """The first seed that fails with the mutant only, beginning with the one that found it last."""
    last = FOUND_BY.get(name)
    for seed in (last, *seeds) if isinstance(last, int) else seeds:
        try:
            with MUTATIONS[name]():
                simulate(from_seed(seed))
        except Failed:
            if not failures_of(simulate, from_seed, [seed]):
                return seed
    return None


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
