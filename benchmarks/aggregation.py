"""Speed of aggregation: every rule, from files and from memory, against numpy.

    python benchmarks/aggregation.py [--updates 4,8,16,64] [--total-mb 256]

The engine reads k random updates of float32 from a store, combines them, and writes the model, with
its digests checked and its fsync done. The files are in the page cache: what is measured is the
engine and not the disk. Beside it numpy does the same on arrays that are in memory already, on
whole arrays, as one would write it; it must come to the same model. 64 updates only for the rules
that are weighted sums.

All speeds are GB of updates a second, of a single pass: a rule that has to read twice is half as
fast where reading is the limit. The raw limits of the same run: reading and copying float32 with
numpy, and float64 accumulation, which is what an average cannot do without. Prints the tables;
writes bench-results/aggregation.json.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import baselines
import flags
import numpy as np
import results
from baselines import Array
from rules import Case, cases

from xain_coordinator.admission import measure
from xain_coordinator.aggregation.engine import aggregate
from xain_coordinator.core.effects import Aggregate
from xain_coordinator.core.values import GlobalModel, Update
from xain_coordinator.ports import WeightsStore
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.memory import MemoryStore
from xain_proto.np import npy_header

ROUND = 1
TURNS = 3
ENOUGH_S = 10.0  # no more turns after this
ONLY_LINEAR = 64  # updates, from which on only weighted sums are measured


def put(store: WeightsStore, key: str, vector: Array) -> None:
    upload = store.upload(key)
    upload.write(npy_header(vector.dtype, vector.shape))
    data = vector.data.cast("B")
    for start in range(0, len(data), baselines.CHUNK_BYTES):
        upload.write(bytes(data[start : start + baselines.CHUNK_BYTES]))
    upload.commit(overwrite=True)


def get(store: WeightsStore, model: GlobalModel) -> Array:
    with store.open(model.ref.key) as reader:
        data = reader.read(0, reader.size)
    return np.frombuffer(data, np.float32, offset=len(data) - 4 * model.shape[0])


class Bench:
    """k updates and a model in a store and in memory."""

    def __init__(self, store: WeightsStore, updates: Array, base: Array) -> None:
        self._store = store
        self._updates = updates
        self._base = base
        self.num_samples = np.arange(1, len(updates) + 1)
        put(store, f"{ROUND}/global", base)
        found = measure(store, f"{ROUND}/global")
        self._model = GlobalModel(ROUND, found.ref, found.dtype, found.shape)
        self._handed_in = []
        for i, vector in enumerate(updates):
            put(store, f"{ROUND}/p{i}", vector)
            weights = measure(store, f"{ROUND}/p{i}")
            self._handed_in.append(Update(f"p{i}", weights, int(self.num_samples[i])))
        self._kept = set(store.keys())

    def engine(self, case: Case) -> tuple[float, Array]:
        """Median seconds, and the model."""
        work = Aggregate(
            ROUND,
            case.rule,
            tuple(self._handed_in[: case.participants]),
            self._model,
            options=case.options,
            optimizer=case.optimizer,
        )
        made = aggregate(self._store, work)
        model = get(self._store, made)

        def once() -> float:
            self._forget()
            return baselines.seconds(lambda: aggregate(self._store, work))

        taken = median_within(once)
        self._forget()
        return taken, model

    def _forget(self) -> None:
        """Delete the models made, since the store writes no model that it has already."""
        for key in set(self._store.keys()) - self._kept:
            self._store.delete(key)

    def numpy(self, case: Case) -> tuple[float, Array] | None:
        """Time the same in numpy; None if there is no numpy version of the case."""
        in_memory = case.in_memory
        if in_memory is None:
            return None
        given = (
            self._updates[: case.participants],
            self.num_samples[: case.participants],
            self._base,
        )
        with np.errstate(all="ignore"):
            model = in_memory(*given)
            return median_within(lambda: baselines.seconds(lambda: in_memory(*given))), model


def median_within(once: Callable[[], float]) -> float:
    """Median seconds of TURNS calls, or of as many as fit into ENOUGH_S."""
    begin = time.monotonic()
    taken: list[float] = []
    while len(taken) < TURNS and (not taken or time.monotonic() - begin < ENOUGH_S):
        taken.append(once())
    return statistics.median(taken)


def rows_of(
    case: Case, stores: dict[str, Bench], updates: Array, limit: float
) -> list[dict[str, object]]:
    """limit: GB/s of float64 accumulation with all cores."""
    num_bytes = updates[: case.participants].nbytes
    rows: list[dict[str, object]] = []
    plain = next(iter(stores.values())).numpy(case)
    for name, bench in stores.items():
        taken, model = bench.engine(case)
        speed = num_bytes / taken / 1e9
        row: dict[str, object] = {
            "rule": case.name,
            "updates": case.participants or len(updates),
            "store": name,
            "gb_per_s": speed,
            "gb_per_s_and_core": speed / baselines.cores(),
        }
        if plain is not None:
            seconds, expected = plain
            if not np.allclose(model, expected, rtol=1e-4, atol=1e-5):
                raise SystemExit(f"{case.name} and numpy come to different models")
            row["numpy_gb_per_s"] = num_bytes / seconds / 1e9
            row["ratio_to_numpy"] = seconds / taken
        row["ratio_to_accumulation"] = speed / limit
        rows.append(row)
    return rows


def main() -> None:
    parser = flags.parser(__doc__)
    parser.add_argument(
        "--updates",
        type=flags.numbers,
        default=[4, 8, 16, 64],
        metavar="K,K",
        help="numbers of updates; default: 4,8,16,64",
    )
    parser.add_argument("--total-mb", type=int, default=256, help="of all updates together")
    parser.add_argument(
        "--rule", action="append", metavar="NAME", help="only this one; may be given again"
    )
    given = parser.parse_args()
    results.begin(quick=given.quick, any_load=given.any_load)
    elements = baselines.ELEMENTS
    if given.quick:
        given.updates, given.total_mb, elements = [5], 1, 1 << 20
    memory = baselines.memory(elements)
    limit = memory[-1]["float64_accumulation_gb_per_s"]
    chosen = [case for case in cases() if not given.rule or case.rule in given.rule]
    rows: list[dict[str, object]] = []
    for k in given.updates:
        updates = baselines.random_updates(k, given.total_mb * 10**6 // 4 // k)
        base = baselines.random_updates(1, updates.shape[1])[0] / 8
        with results.scratch() as folder:
            stores = {
                "files": Bench(FileStore(Path(folder)), updates, base),
                "memory": Bench(MemoryStore(), updates, base),
            }
            for case in chosen:
                if not case.is_linear and k >= ONLY_LINEAR:
                    continue
                if case.participants is not None and k != given.updates[0]:
                    continue  # the same with every k
                if k < case.least_updates:
                    continue
                rows.extend(rows_of(case, stores, updates, limit))
    results.report(
        "aggregation",
        {"total_mb": given.total_mb, "cores": baselines.cores(), "memory": memory, "by_rule": rows},
    )


if __name__ == "__main__":
    main()
