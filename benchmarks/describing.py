"""Memory and time of describing and checking the data of many sites.

Each of --sites has --columns columns of numbers and its own 100 rows. Prints the memory that the
profiles take as they lie in a session, the most that table one, the checks and the first model
add to it, and the seconds that each of them takes.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
from processes import peak_memory_mb

from xain_workloads.tables.checks.checking import check
from xain_workloads.tables.checks.describe import TableOne
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.table import Table
from xain_workloads.workload import create, initial_model

ROWS = 100


def profile_of(site: int, num_columns: int) -> DataProfile:
    chance = np.random.default_rng(site)
    features = chance.normal(size=(ROWS, num_columns))
    labels = np.array(["no", "yes"])[(features[:, 0] + chance.normal(size=ROWS) > 0).astype(int)]
    names = tuple(f"column {number}" for number in range(num_columns))
    return Table.from_dataset(Dataset(features, labels, names)).profile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=2000)
    parser.add_argument("--columns", type=int, default=100)
    given = parser.parse_args()

    before = peak_memory_mb() or 0.0
    sites = [(f"site {n}", profile_of(n, given.columns)) for n in range(given.sites)]
    size = sum(len(profile.statistics) for _, profile in sites) / 1e6
    held = peak_memory_mb() or 0.0
    print(f"profiles: {size:.0f} MB of text, {held - before:.0f} MB in memory")

    workload = create("sgd")
    done: dict[str, Callable[[], object]] = {
        "table one": lambda: TableOne.of(sites),
        "checks": lambda: check(sites),
        "first model": lambda: initial_model(workload, [profile for _, profile in sites]),
    }
    for name, make in done.items():
        began = time.monotonic()
        make()
        seconds = time.monotonic() - began
        print(f"{name}: {seconds:.1f} s, peak {(peak_memory_mb() or 0.0) - held:.0f} MB more")


if __name__ == "__main__":
    main()
