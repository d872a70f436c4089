"""The coordinator's own evaluation of a global model, on data that no participant trains on."""

from collections.abc import Callable
from functools import lru_cache

from xain_coordinator.core.evaluation import MAX_METRICS, why_not_metric
from xain_coordinator.core.values import Evaluation, GlobalModel
from xain_coordinator.ports import WeightsStore
from xain_coordinator.stores.integrity import read_vector
from xain_foundation.wheels import pip_install
from xain_workloads.errors import DataError
from xain_workloads.model import Model
from xain_workloads.preprocessing import preprocessing_of
from xain_workloads.schema import ColumnType
from xain_workloads.table import Table
from xain_workloads.table_settings import TableSettings
from xain_workloads.workload import measure

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
    preprocessing = preprocessing_of(model.metadata)
    data = load(() if preprocessing is None else tuple(preprocessing.types.items()))
    measured = measure(Model(read_vector(store, model.ref), model.layout, model.metadata), data)
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
