"""The workload "describe": data are described and checked, and nothing is trained."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from xain_workloads.model import Model
from xain_workloads.tables.profile import DataProfile


class DescribeWorkload:
    """A session of this workload ends when the data of all participants are described. Its model is
    empty."""

    name = "describe"
    scaling = "none"
    missing = "median"
    trains = False

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        """The workload, which has no options. Raises ValueError if there is an option."""
        if options:
            raise ValueError(f"unknown option {next(iter(options))!r}: describe has none")
        return cls()

    def initial_model(
        self, profiles: Sequence[DataProfile], metadata: Mapping[str, str] | None = None
    ) -> Model:
        """An empty model."""
        return Model(np.empty((0,), np.float32), (), {"workload": self.name, "options": "{}"})

    def _trains_nothing(self, *arguments: Any, **options: Any) -> Any:
        """Stands for each step of a training. Raises ValueError."""
        raise ValueError("the workload describe trains nothing")

    train = measure = predict = probabilities = to_sklearn = _trains_nothing
