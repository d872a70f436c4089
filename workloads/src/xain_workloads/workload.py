"""What a workload is, and where to find one by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from json import JSONDecodeError, loads
from typing import Any, Protocol, cast

from numpy.typing import ArrayLike, NDArray

from xain_workloads.data import Dataset
from xain_workloads.model import Model, Vector
from xain_workloads.profile import DataProfile


@dataclass(frozen=True, slots=True, eq=False)
class TrainResult:
    """What local training brings back.

    vector: (d,), in the layout and dtype of the model that it started from.
    num_samples: rows it was trained on, n_k in McMahan et al. 2017.
    metrics: finite numbers by name, measured on the local data after training.
    """

    vector: Vector
    num_samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)


class Workload(Protocol):
    """A kind of training. It keeps no state between calls: all that is learnt is in the Model."""

    @property
    def name(self) -> str:
        """Its key in the registry, and in a model's metadata."""

    def initial_model(self, profiles: Sequence[DataProfile]) -> Model:
        """The global model before the first round.

        Its metadata hold "workload" and "options", from which from_metadata() rebuilds this
        workload. Raises ValueError if the profiles do not fit together or do not suffice.
        """

    def train(
        self, model: Model, data: Dataset, *, epochs: int, epoch_base: int, seed: int
    ) -> TrainResult:
        """Train on local data, starting from a model, which stays as it is.

        epochs: passes over the data, 1 or more.
        epoch_base: passes that led to this model, 0 or more; rounds before this one times epochs.
        seed: 0 or more. The same inputs give the same vector, bit for bit.
        Raises NoData without rows, DataError if the data do not fit the model, Diverged if
        the weights run away.
        """

    def evaluate(self, model: Model, data: Dataset) -> dict[str, float]:
        """Metrics of a model on data. Raises NoData and DataError as train() does."""

    def predict(self, model: Model, features: ArrayLike) -> NDArray[Any]:
        """Predict rows. features: (n, p) numbers.

        Returns (n,): class names for classification, float64 for regression.
        Raises DataError if the features do not fit the model.
        """


# Named, not imported: who trains linear models need not wait for the import of the others. And a
# name that comes with a model from the network can reach these classes and nothing else.
_WORKLOADS = {
    "sgd": "xain_workloads.sgd:SgdWorkload",
    "xgboost": "xain_workloads.boosting:BoostingWorkload",
}


def known_workloads() -> tuple[str, ...]:
    """Names that create() accepts, sorted."""
    return tuple(sorted(_WORKLOADS))


def create(name: str, options: Mapping[str, object] | None = None) -> Workload:
    """The workload of that name.

    Raises ValueError that lists the known workloads, or that names the wrong option.
    """
    if name not in _WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(known_workloads())}")
    module, _, attribute = _WORKLOADS[name].partition(":")
    return cast(Workload, getattr(import_module(module), attribute).from_options(options or {}))


def from_metadata(metadata: Mapping[str, str]) -> Workload:
    """The workload that made a model, from the model's metadata alone.

    Raises ValueError if "workload" or "options" is missing or wrong.
    """
    if "workload" not in metadata:
        raise ValueError("the model's metadata do not name its workload")
    try:
        options = loads(metadata.get("options", "{}"))
    except (JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the options in the model's metadata are not JSON: {error}") from error
    if not isinstance(options, dict):
        raise ValueError("the options in the model's metadata are not a JSON object")
    return create(metadata["workload"], options)


def fit_centralised(workload: Workload, data: Dataset, *, epochs: int, seed: int) -> Model:
    """Train on all data in one place: the baseline that federated training is measured against."""
    model = workload.initial_model([data.profile()])
    result = workload.train(model, data, epochs=epochs, epoch_base=0, seed=seed)
    return replace(model, vector=result.vector)
