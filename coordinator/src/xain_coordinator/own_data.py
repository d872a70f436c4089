"""The coordinator's own evaluation of a global model, on data that no participant trains on."""

from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xain_coordinator.admission import chunks
from xain_coordinator.bundles import open_weights
from xain_coordinator.core.evaluation import MAX_METRICS, why_not_metric
from xain_coordinator.core.values import Evaluation, GlobalModel
from xain_coordinator.ports import WeightsStore
from xain_workloads.data import load_table
from xain_workloads.dataset import Task
from xain_workloads.errors import DataError
from xain_workloads.model import Model
from xain_workloads.preprocessing import prepare
from xain_workloads.table import Table
from xain_workloads.workload import from_metadata


class CannotEvaluate(Exception):
    """The model cannot be measured. The message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnData:
    """A table of the coordinator's own. Its rows are prepared as each model says."""

    data: Table

    def evaluate(self, store: WeightsStore, model: GlobalModel) -> Evaluation:
        """Measure a stored model. Blocks.

        Raises CannotEvaluate, the store's errors, and whatever the model's workload raises.
        """
        metadata = model.metadata
        if "workload" not in metadata:
            raise CannotEvaluate("the model's metadata name no workload, so nothing can read it")
        workload = from_metadata(metadata)
        vector = _read(store, model)
        data = prepare(metadata, self.data)
        metrics = workload.evaluate(Model(vector, model.layout, metadata), data)
        usable = {
            name: float(metrics[name])
            for name in sorted(metrics)
            if why_not_metric(name, metrics[name]) is None
        }
        if not usable:
            raise CannotEvaluate("no metric of the model is finite")
        return Evaluation(self.data.num_samples, dict(list(usable.items())[:MAX_METRICS]))


def load_own_data(source: str, *, target: str | None, task: Task, scale: float) -> OwnData:
    """Load the coordinator's own data set. Raises DataError."""
    try:
        data = load_table(source, target=target, task=task, scale=scale)
    except ModuleNotFoundError as missing:
        raise DataError(
            f"{source} cannot be read without {missing.name}: pip install 'xain-workloads[train]'"
        ) from missing
    if data.num_samples == 0:
        raise DataError(f"{source} has no rows to evaluate a model on")
    return OwnData(data)


def _read(store: WeightsStore, model: GlobalModel) -> NDArray[Any]:
    """The model's vector. Raises CannotEvaluate, and the store's errors."""
    ref = model.ref
    with open_weights(store, ref.key) as reader:
        if reader.size != ref.size_bytes:
            raise CannotEvaluate(f"{ref.key} has {reader.size} bytes, not {ref.size_bytes}")
        data = bytearray().join(chunks(reader))
    if xxhash.xxh3_128_hexdigest(data) != ref.digest:
        raise CannotEvaluate(f"{ref.key} is damaged in the store")
    vector: NDArray[Any] = np.load(BytesIO(data), allow_pickle=False)
    return vector
