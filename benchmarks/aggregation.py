"""Speed and memory of aggregation: every rule, from files, against numpy.

    python benchmarks/aggregation.py [--updates 4,16,64] [--total-mb 256]
    python benchmarks/aggregation.py --peaks

The engine reads k random updates of float32 from files, combines them, and writes the model, with
its digests checked and its fsync done. The files are in the page cache: the engine is measured, not
the disk. Each model is a new file. Beside it numpy does the same on arrays that are in memory
already, on whole arrays, as one would write it; it must come to the same model. 64 updates only for
the rules that are weighted sums.

All speeds are GB of updates a second, of a single pass: a rule that has to read twice is half as
fast where reading is the limit. The raw limits of the same run: reading and copying float32 with
numpy, and float64 accumulation, which is what an average cannot do without. Prints the tables;
writes bench-results/aggregation.json.

--peaks measures memory instead, each time in a new process: every rule with few and with 16 updates
of 100 MB, and the weighted average of 6 updates of 3.2 GB. One file serves as all updates, so that
it stays in the page cache. Writes bench-results/aggregation_peaks.json; takes 7 GB of the disk.
"""

import multiprocessing as mp
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import baselines
import flags
import numpy as np
import results
from baselines import Array
from processes import peak_memory_mb
from rules import Case, cases

from xain_coordinator.aggregation.engine import aggregate
from xain_coordinator.core.vocabulary.effects import Aggregate
from xain_coordinator.core.vocabulary.values import GlobalModel, Update
from xain_coordinator.ports import WeightsStore
from xain_coordinator.process.allocator import configure_allocator
from xain_coordinator.stores.files import FileStore
from xain_coordinator.updates.measuring import measure
from xain_wire.np import npy_header

ROUND = 1
REPEATS = 3
ENOUGH_S = 2.0  # no more repeats after this
ONLY_LINEAR = 64  # updates, from which on only weighted sums are measured

MANY = 16  # updates of the peaks
PEAK_MB = 100
LARGE_MB = 3200
NUM_LARGE = 6


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
        models: list[Array] = []
        with np.errstate(all="ignore"):
            taken = median_within(
                lambda: baselines.seconds(lambda: models.append(in_memory(*given)))
            )
        return taken, models[-1]


def median_within(once: Callable[[], float]) -> float:
    """Median seconds of TURNS calls, or of as many as fit into ENOUGH_S."""
    begin = time.monotonic()
    taken: list[float] = []
    while len(taken) < REPEATS and (not taken or time.monotonic() - begin < ENOUGH_S):
        taken.append(once())
    return statistics.median(taken)


def row_of(case: Case, bench: Bench, updates: Array, limit: float) -> dict[str, object]:
    """limit: GB/s of float64 accumulation with all cores."""
    num_bytes = updates[: case.participants].nbytes
    taken, model = bench.engine(case)
    speed = num_bytes / taken / 1e9
    row: dict[str, object] = {
        "rule": case.name,
        "updates": case.participants or len(updates),
        "gb_per_s": speed,
        "gb_per_s_and_core": speed / baselines.cores(),
    }
    plain = bench.numpy(case)
    if plain is not None:
        seconds, expected = plain
        if not np.allclose(model, expected, rtol=1e-4, atol=1e-5):
            raise SystemExit(f"{case.name} and numpy come to different models")
        row["numpy_gb_per_s"] = num_bytes / seconds / 1e9
        row["ratio_to_numpy"] = seconds / taken
    row["ratio_to_accumulation"] = speed / limit
    return row


def few(case: Case) -> int:
    return max(case.least_updates, 2)


def peaks(quick: bool) -> list[dict[str, object]]:
    """Peak memory of a process that aggregates; before: what it had when it began."""
    peak_mb, large_mb = (1, 4) if quick else (PEAK_MB, LARGE_MB)
    rows = [
        peak_of(case, count, peak_mb)
        for case in cases()
        for count in ((case.participants,) if case.participants else (few(case), MANY))
    ]
    plain = next(case for case in cases() if case.name == "weighted_average")
    rows.append(peak_of(plain, NUM_LARGE, large_mb))
    return rows


def peak_of(case: Case, num_updates: int, model_mb: int) -> dict[str, object]:
    with results.scratch() as folder:
        context = mp.get_context("spawn")
        here, there = context.Pipe()
        work = context.Process(target=measure_peak, args=(there, folder, case.name, num_updates))
        put_repeated(FileStore(folder), f"{ROUND}/global", model_mb * 10**6 // 4)
        with results.uninterrupted():
            work.start()
        try:
            seconds, before, peak = here.recv()
        finally:
            work.kill()
            work.join()
    return {
        "rule": case.name,
        "updates": num_updates,
        "model_mb": model_mb,
        "s": seconds,
        "gb_per_s": num_updates * model_mb / 1e3 / seconds,
        "before_mb": before,
        "peak_mb": peak,
    }


def put_repeated(store: WeightsStore, key: str, length: int) -> None:
    """A vector of so many float32, the same random numbers over and over."""
    chunk = memoryview(baselines.random_updates(1, 1 << 24)[0].data).cast("B")
    upload = store.upload(key)
    upload.write(npy_header(np.dtype(np.float32), (length,)))
    for start in range(0, 4 * length, len(chunk)):
        upload.write(chunk[: 4 * length - start])
    upload.commit(overwrite=True)


def measure_peak(pipe: Connection, folder: Path, name: str, num_updates: int) -> None:
    """Send the seconds, and the peak memory before and after."""
    case = next(case for case in cases() if case.name == name)
    store = FileStore(folder)
    weights = measure(store, f"{ROUND}/global")
    updates = tuple(Update(f"p{i:02}", weights, i + 1) for i in range(num_updates))
    base = GlobalModel(ROUND, weights.ref, weights.dtype, weights.shape)
    work = Aggregate(
        ROUND, case.rule, updates, base, options=case.options, optimizer=case.optimizer
    )
    configure_allocator()
    before = peak_memory_mb()
    seconds = baselines.seconds(lambda: aggregate(store, work))
    pipe.send((seconds, before, peak_memory_mb()))


def main() -> None:
    parser = flags.parser(__doc__)
    parser.add_argument(
        "--updates",
        type=flags.numbers,
        default=[4, 16, 64],
        metavar="K,K",
        help="numbers of updates; default: 4,16,64",
    )
    parser.add_argument("--total-mb", type=int, default=256, help="of all updates together")
    parser.add_argument(
        "--rule", action="append", metavar="NAME", help="only this one; may be given again"
    )
    parser.add_argument("--peaks", action="store_true", help="measure memory instead of speed")
    given = parser.parse_args()
    results.begin(quick=given.quick, any_load=given.any_load)
    if given.peaks:
        results.report("aggregation_peaks", {"by_rule": peaks(given.quick)})
        return
    configure_allocator()
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
            bench = Bench(FileStore(folder), updates, base)
            for case in chosen:
                if not case.is_linear and k >= ONLY_LINEAR:
                    continue
                if case.participants is not None and k != given.updates[0]:
                    continue  # the same with every k
                if k < case.least_updates:
                    continue
                rows.append(row_of(case, bench, updates, limit))
    results.report(
        "aggregation",
        {"total_mb": given.total_mb, "cores": baselines.cores(), "memory": memory, "by_rule": rows},
    )


if __name__ == "__main__":
    main()
