"""The workload "describe": data are described and checked, and nothing is trained."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_workloads.dataset import Dataset
from xain_workloads.model import Model
from xain_workloads.profile import DataProfile
from xain_workloads.workload import TrainResult

_NOTHING = "the workload describe trains nothing"


class DescribeWorkload:
    """A session of this workload ends when the data of all participants are described. Its model is
    empty."""

    name = "describe"
    scaling = "none"
    missing = "median"
    trains = False

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        """Raises ValueError if there is an option."""
        if options:
            raise ValueError(f"unknown option {next(iter(options))!r}: describe has none")
        return cls()

    def initial_model(
        self, profiles: Sequence[DataProfile], metadata: Mapping[str, str] | None = None
    ) -> Model:
        """An empty model."""
        return Model(np.empty((0,), np.float32), (), {"workload": self.name, "options": "{}"})

    def train(
        self, model: Model, data: Dataset, *, epochs: int, epoch_base: int, seed: int
    ) -> TrainResult:
        """Raises ValueError."""
        raise ValueError(_NOTHING)

    def evaluate(self, model: Model, data: Dataset) -> dict[str, float]:
        """Raises ValueError."""
        raise ValueError(_NOTHING)

    def predict(self, model: Model, features: ArrayLike) -> NDArray[Any]:
        """Raises ValueError."""
        raise ValueError(_NOTHING)

    def to_sklearn(self, model: Model) -> Any:
        """Raises ValueError."""
        raise ValueError(_NOTHING)
