"""Samples a second of two stages beside torch alone in one process.

    python benchmarks/pipeline.py [--epochs 5] [--schedule gpipe]

A network of four linear layers is trained on random rows: as two stages by two processes with one
thread of torch each, and by one process with one thread and with two, all on the same batches. The
seconds of a round are counted: those of the stages include the opening of the group, the start of
the schedule and the evaluation of all rows, which one process does too. The processes are warm.

ratio: samples a second of the stages over those of one process with one thread; at most 2.
ratio_to_two_threads: the same beside one process with two threads.
largest_difference: of any weight from those of one process.
Writes bench-results/pipeline.json.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import flags

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import results

from xain_participant.sdk.participant import Assignment, ProcessGroup
from xain_participant.stages.stage_trainer import StageTrainer
from xain_workloads.model import Vector
from xain_workloads.nets.neural import NeuralWorkload
from xain_workloads.nets.neural_modules import import_torch
from xain_workloads.nets.threads import use_threads
from xain_workloads.tables.dataset import Dataset

FEATURES, CLASSES = 256, 10
OPTIONS = {"batch_size": 256, "learning_rate": 0.01, "seed": 0, "device": "cpu"}


def rows(num_rows: int) -> Dataset:
    drawn = np.random.default_rng(0)
    features = drawn.normal(size=(num_rows, FEATURES))
    return Dataset(features, drawn.integers(CLASSES, size=num_rows).astype(str))


def layers(width: int) -> list[dict[str, object]]:
    hidden = [{"type": "linear", "out_features": width}, {"type": "relu"}]
    return [*hidden, *hidden, *hidden, {"type": "linear"}]


def alone(width: int, data: Dataset, epochs: int, threads: int) -> tuple[float, Vector]:
    """Seconds of the epochs in this process, and the vector after them."""
    use_threads(threads)
    import_torch()
    workload = NeuralWorkload.from_options({**OPTIONS, "layers": layers(width)})
    model = workload.initial_model([data.profile()])
    workload.train(model, data, epochs=1, epoch_base=0, seed=0)
    begin = time.perf_counter()
    made = workload.train(model, data, epochs=epochs, epoch_base=0, seed=0)
    return time.perf_counter() - begin, made.vector


def in_stages(width: int, data: Dataset, epochs: int, schedule: str) -> tuple[float, Vector]:
    """Seconds of the epochs with two stages, and the vector after them."""
    options = {"mode": "pipeline", "schedule": schedule, "layers": layers(width), **OPTIONS}
    model = NeuralWorkload.from_options(options).initial_model([data.profile()])
    trainers = [StageTrainer("127.0.0.1"), StageTrainer("127.0.0.1")]
    address = trainers[0].address  # once: two threads that ask first would reserve two ports

    def train(attempt: int, num_epochs: int, rank: int) -> Vector:
        group = ProcessGroup(attempt, rank, 2, address)
        made = trainers[rank].train(
            Assignment("s1", 0, process_group=group), model, data, epochs=num_epochs, epoch_base=0
        )
        return made.vector

    use_threads(1)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(partial(train, 1, 1), range(2)))
            begin = time.perf_counter()
            slices = list(pool.map(partial(train, 2, epochs), range(2)))
            return time.perf_counter() - begin, np.concatenate(slices)
    finally:
        for trainer in trainers:
            trainer.end()


def main() -> None:
    parser = flags.parser(__doc__, quick="a small network, to see that it works")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--schedule", choices=("gpipe", "1f1b"), default="gpipe")
    given = parser.parse_args()
    results.begin(quick=given.quick, any_load=given.any_load)
    width, num_rows, epochs = (32, 512, 1) if given.quick else (1024, 4096, given.epochs)
    data = rows(num_rows)
    alone_s, vector = alone(width, data, epochs, threads=1)
    two_threads_s, _ = alone(width, data, epochs, threads=2)
    stages_s, together = in_stages(width, data, epochs, given.schedule)
    difference = float(np.abs(vector - together).max())
    assert difference < 1e-3, f"the weights differ by {difference:g}"
    samples = num_rows * epochs
    results.report(
        "pipeline",
        {
            "rows": num_rows,
            "epochs": epochs,
            "width": width,
            "schedule": given.schedule,
            "samples_per_s_in_two_stages": round(samples / stages_s),
            "samples_per_s_alone": round(samples / alone_s),
            "samples_per_s_alone_with_two_threads": round(samples / two_threads_s),
            "ratio": round(alone_s / stages_s, 2),
            "ratio_to_two_threads": round(two_threads_s / stages_s, 2),
            "largest_difference": difference,
        },
    )


if __name__ == "__main__":
    main()
