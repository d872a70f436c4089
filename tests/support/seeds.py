"""Seeds of a simulation: one in full, or many on all processors."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

CHUNK = 25  # seeds that a process takes at a time
NUM_FAILURES_SHOWN = 3


def failures_of(
    simulate: Callable[[Any], object], from_seed: Callable[[int], Any], seeds: Sequence[int]
) -> list[str]:
    found = []
    for seed in seeds:
        try:
            simulate(from_seed(seed))
        except AssertionError as failed:
            found.append(f"seed {seed}: {failed}")
    return found


def in_chunks(
    seeds: range,
    num_jobs: int,
    simulate: Callable[[Any], object],
    from_seed: Callable[[int], Any],
    progress: Callable[[int, int, float], None] = lambda *_: None,
) -> int:
    """Run seeds on several processors; returns the exit status. It ends after a few failures.

    simulate: a function of a module that processes can import. Raises AssertionError.
    progress: told how many seeds are done, of how many, after how many seconds.
    """
    began_at = time.monotonic()
    num_done = 0
    failures: list[str] = []
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    # A fork of a process with threads, such as that of the tests, may wait for a lock for ever.
    with ProcessPoolExecutor(num_jobs, get_context("spawn")) as pool:
        run = partial(failures_of, simulate, from_seed)
        for chunk, found in zip(chunks, pool.map(run, chunks), strict=True):
            num_done += len(chunk)
            failures += found
            progress(num_done, len(seeds), time.monotonic() - began_at)
            if len(failures) >= NUM_FAILURES_SHOWN:
                pool.shutdown(cancel_futures=True)
                break
    for failure in failures[:NUM_FAILURES_SHOWN]:
        sys.stdout.write(f"\n{failure}\n")
    took_s = time.monotonic() - began_at
    sys.stdout.write(f"\n{num_done} seeds in {took_s:.0f} s, {len(failures) or 'no'} failures\n")
    return 1 if failures else 0


def main(
    program: str,
    about: str,
    simulate: Callable[..., object],
    from_seed: Callable[[int], Any],
    progress: Callable[[int, int, float], None] = lambda *_: None,
) -> int:
    """The command line of a simulation. 0: all is well. 1: what must never happen has happened."""
    parser = argparse.ArgumentParser(
        f"python -m {program}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, metavar="N", help="this one, in full")
    which.add_argument("--seeds", type=int, metavar="NUM", help="so many")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first of --seeds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="NUM")
    given = parser.parse_args()
    if given.seed is not None:
        return _show(given.seed, simulate, from_seed)
    seeds = range(given.first, given.first + given.seeds)
    return in_chunks(seeds, max(1, given.jobs), simulate, from_seed, progress)


def _show(seed: int, simulate: Callable[..., object], from_seed: Callable[[int], Any]) -> int:
    scenario = from_seed(seed)
    _say(f"{scenario}\n")
    try:
        outcome = simulate(scenario, show=_say)
    except AssertionError as failed:
        _say(f"\nseed {seed}: {getattr(failed, 'what', failed)}")
        return 1
    _say(f"\nseed {seed}: {outcome}")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
