"""The coordinator's own data, which no participant trains on: global models are measured on them,
and at the end the central model is trained on a part of them.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from xain_coordinator.core.parts.evaluation import MAX_METRICS, why_not_metric
from xain_coordinator.core.parts.profiles import described
from xain_coordinator.core.vocabulary.values import Evaluation, GlobalModel
from xain_coordinator.ports import WeightsStore
from xain_coordinator.stores.integrity import read_vector
from xain_foundation.wheels import pip_install
from xain_workloads.comparing.gains import Budget, LocalModel
from xain_workloads.comparing.local import train_local
from xain_workloads.errors import DataError
from xain_workloads.exported.formats import Exported, columns_of
from xain_workloads.linear.row_losses import row_losses
from xain_workloads.model import Model
from xain_workloads.tables.partition import split_train_test
from xain_workloads.tables.preprocessing import prepare, preprocessing_of
from xain_workloads.tables.schema import ColumnType
from xain_workloads.tables.table import Table
from xain_workloads.tables.table_settings import TableSettings
from xain_workloads.workload import from_metadata, measure

# Division of the central model's rows: the default of the sites, [data] test_fraction and
# [training] seed.
TEST_FRACTION, SEED = 0.2, 0

Types = tuple[tuple[str, ColumnType], ...]  # of columns, by name


def evaluate_stored(
    store: WeightsStore, model: GlobalModel, load: Callable[[Types], Table]
) -> Evaluation:
    """Measure a stored model on the coordinator's own data. Blocks.

    load: reads the data with the types that the model's columns have: a category may be coded as
        numbers, which a file does not tell.
    Raises DataError if no metric is finite, the store's errors, and whatever the model's workload
    raises.
    """
    found = Model(read_vector(store, model.ref), model.layout, model.metadata)
    return _measured(found, load(_types(model)))


def fit_central(
    store: WeightsStore,
    model: GlobalModel,
    load: Callable[[Types], Table],
    budget: Budget,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Evaluation, Exported | None]:
    """Train the central model, and compare a stored global model with it. Blocks.

    The coordinator's data are divided as a site divides its rows by default, and the central model
    is its local model, which is measured with the global one on the rows that are held out.
    load: reads the data with the types of the model's columns. clock: time.monotonic(), or one that
        goes ahead of it, which cuts the training short.
    Returns the evaluation of the global model, with the central one as its local model, and the
    central model with what a file of it tells; None if there is none. Raises DataError, the store's
    errors and those of the workload.
    """
    began = time.monotonic()
    train, test = split_train_test(load(_types(model)), TEST_FRACTION, SEED)
    if not test.num_samples:
        return Evaluation(0, {}, local=LocalModel(why_not="there are no rows to hold out")), None
    of_all = Model(read_vector(store, model.ref), model.layout, model.metadata)
    evaluation = _measured(of_all, test)
    losses = {}
    if evaluation.tallies is not None:  # else they are too large to be added
        rows = prepare(model.metadata, test)
        losses[model.round] = row_losses(from_metadata(model.metadata), of_all, rows)
    profile = train.profile()
    local, central = train_local(
        model.metadata, profile, train, test, budget, SEED, losses, clock, began
    )
    whole = replace(evaluation, local=local)
    if central is None or local.tallies is None:
        return whole, None
    about = {
        "central": True,
        "workload": central.metadata["workload"],
        "target": central.metadata.get("target", ""),
        "classes": (classes := json.loads(central.metadata.get("classes", "[]"))),
        "columns": columns_of(central.metadata),
        "profile": described([profile], classes),
        "num_samples": train.num_samples,
    }
    return whole, Exported(about, central)


def _types(model: GlobalModel) -> Types:
    """Types of the columns that a model was prepared with; none if it has no preprocessing."""
    preprocessing = preprocessing_of(model.metadata)
    return () if preprocessing is None else tuple(preprocessing.types.items())


def _measured(model: Model, data: Table) -> Evaluation:
    """The evaluation of a model on a table: at most MAX_METRICS metrics that can be kept, and
    tallies. Raises DataError if no metric is finite."""
    measured = measure(model, data)
    metrics = measured.metrics
    usable = [name for name in sorted(metrics) if why_not_metric(name, metrics[name]) is None]
    if not usable:
        raise DataError("no metric of the model is finite")
    return Evaluation(
        data.num_samples,
        {name: float(metrics[name]) for name in usable[:MAX_METRICS]},
        measured.tallies,
    )


@lru_cache(maxsize=1)
def load_own_data(source: str, settings: TableSettings, types: Types = ()) -> Table:
    """Load the coordinator's own data set. types: of columns that it must have, by name. Raises
    DataError."""
    try:
        data = settings.table(source, dict(types))
        data.arranged([name for name, _ in types] or list(data.values))
    except DataError as error:
        # The sites' keys are the coordinator's too, in its own section.
        text = str(error).replace("set data.", "set evaluate.").replace('"data.', '"evaluate.')
        raise DataError(text.replace(" [data] ", " [evaluate] ")) from None
    except ModuleNotFoundError as missing:
        raise DataError(
            f"{source} cannot be read without {missing.name}: "
            f"{pip_install('xain-participant', 'tables')}"
        ) from missing
    if data.num_samples == 0:
        raise DataError(f"{source} has no rows to evaluate a model on")
    return data
