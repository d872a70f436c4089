"""Tables, models and trainings for tests of workloads."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from xain_workloads.errors import DataError
from xain_workloads.model import Model
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import PreprocessingOptions, prepare
from xain_workloads.tables.schema import Column
from xain_workloads.tables.table import Table
from xain_workloads.workload import Workload, create, initial_model

PREPROCESSED = PreprocessingOptions()


def table_of(values: Mapping[str, Any], target: Any, *more: Any, **others: Any) -> Table:
    """Columns of numbers, and of categories where the values are none."""
    arrays = {name: np.asarray(given) for name, given in values.items()}
    is_number = {name: array.dtype.kind in "iuf" for name, array in arrays.items()}
    columns = tuple(
        Column(name, "number" if numbers else "category") for name, numbers in is_number.items()
    )
    arrays = {
        name: array.astype(np.float64 if is_number[name] else object)
        for name, array in arrays.items()
    }
    return Table(columns, arrays, target, *more, **others)


def by_target(data: Table, num_sites: int) -> list[Table]:
    """Parts of sites that are as unlike as can be: most have rows of one class only."""
    order = np.argsort(data.target, kind="stable")
    return [data.subset(rows) for rows in np.array_split(order, num_sites)]


def opened(
    workload: Workload, *sites: Table | Dataset, options: PreprocessingOptions = PREPROCESSED
) -> tuple[Model, list[Dataset]]:
    """The initial model of some sites, and their prepared rows."""
    tables = [one if isinstance(one, Table) else Table.from_dataset(one) for one in sites]
    profiles = [one.profile() for one in tables]
    model = initial_model(workload, profiles, options)
    return model, [prepare(model.metadata, one, to_train=True) for one in tables]


def trained(
    name: str,
    options: Mapping[str, Any],
    site: Table | Dataset,
    *,
    epochs: int = 1,
    preprocessing: PreprocessingOptions = PREPROCESSED,
) -> tuple[Workload, Model]:
    """A workload, and its model after one round of one site. A gradient is a step of the model."""
    workload = create(name, options)
    model, (rows,) = opened(workload, site, options=preprocessing)
    vector = workload.train(model, rows, epochs=epochs, epoch_base=0, seed=1).vector
    if options.get("mode") == "gradient":
        vector = model.vector - 5 * vector
    return workload, replace(model, vector=vector)


def refused(complaint: str) -> Any:
    """Require an error of the data that has these words."""
    return pytest.raises(DataError, match=re.escape(complaint))
