"""Data of the demo, as every participant splits them, and the accuracy without a split."""

from dataclasses import dataclass

import numpy as np

from xain_workloads.tables.data import Dataset, load
from xain_workloads.tables.partition import Partition, split_train_test
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.workload import create, evaluate, fit_centralised

SOURCE = "digits"
SCALE = 1 / 16  # the pixels are 0 to 16
TEST_FRACTION = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The data of each participant, and the rows that nobody trains on.

    trains: by participant; test: all that they set aside.
    """

    trains: tuple[Dataset, ...]
    test: Dataset


def split(num_parts: int, alpha: float, seed: int) -> Split:
    """Split the data set as each participant does by itself."""
    data = load(SOURCE, dialect=Dialect(scale=SCALE))
    pairs = [
        split_train_test(
            Partition("dirichlet", num_parts, index, alpha, seed).apply(data), TEST_FRACTION, seed
        )
        for index in range(num_parts)
    ]
    return Split(tuple(train for train, _ in pairs), _joined([test for _, test in pairs]))


def participant_settings(
    index: int, num_parts: int, alpha: float, seed: int
) -> dict[str, dict[str, object]]:
    """The configuration under which a participant makes the same split."""
    return {
        "participant": {"id": f"site-{index}"},
        "data": {"source": SOURCE, "scale": SCALE, "test_fraction": TEST_FRACTION},
        "partition": {
            "kind": "dirichlet",
            "num_parts": num_parts,
            "index": index,
            "alpha": alpha,
            "seed": seed,
        },
        "training": {"seed": seed},
        "logging": {"level": "info"},
    }


def centralised_accuracy(data: Split, epochs: int, eta0: float, seed: int) -> float:
    """Test accuracy of the same model trained on all rows in one place."""
    model = fit_centralised(
        create("sgd", {"eta0": eta0}), _joined(data.trains), epochs=epochs, seed=seed
    )
    return evaluate(model, data.test)["accuracy"]


def _joined(parts: "list[Dataset] | tuple[Dataset, ...]") -> Dataset:
    """The rows of several data sets as one."""
    return Dataset(
        np.concatenate([part.features for part in parts]),
        np.concatenate([part.target for part in parts]),
        parts[0].feature_names,
    )
