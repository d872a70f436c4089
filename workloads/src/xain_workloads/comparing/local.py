"""Local models: what a site would have without the others.

A site trains the workload on its own rows alone, with as many passes as the session has made, and
with preprocessing by its own statistics. The model is measured on the site's held-out rows, which
the global models are measured on, too. The central model is that of a coordinator with own rows.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from json import loads

import numpy as np

from xain_foundation.logs.logger import get_logger
from xain_workloads.class_weights import KEY as CLASS_WEIGHTS_KEY
from xain_workloads.comparing.gains import Budget, Difference, LocalModel
from xain_workloads.ensembles.ensembles import KEY as ENSEMBLE_KEY
from xain_workloads.ensembles.stacking import Stack, next_model
from xain_workloads.errors import DataError, Diverged
from xain_workloads.linear.row_losses import row_losses
from xain_workloads.measures.figures import OF_WEIGHED_CLASSES, figures
from xain_workloads.measures.tallies import Tallies
from xain_workloads.model import Model
from xain_workloads.supervised import Array
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import PreprocessingOptions, at_site, prepare
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.table import Table
from xain_workloads.time_limit import OutOfTime, time_limit
from xain_workloads.trees.trees import ANY_NUMBER, BoosterKind, joined, parse_update
from xain_workloads.workload import Workload, create, initial_model

log = get_logger(__name__)

# Parts of the training. After each one the model is measured, and the best is the local model, as
# the best round's is the model of the session; and it is seen whether there is time for the next. A
# part that takes longer than was to be expected is given up at the time limit.
NUM_PARTS = 10
MIN_ROWS = 10  # to train on
# Parts of a workload in a training with others, and alone.
_ALONE = {"gradient": "federated", "histogram": "bagging", "cyclic": "bagging"}


def train_local(
    metadata: Mapping[str, str],
    profile: DataProfile,
    data: Table,
    test: Table,
    budget: Budget,
    seed: int,
    losses: Mapping[int, Array | None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    began: float | None = None,
) -> tuple[LocalModel, Model | None]:
    """Train and measure a model of these rows alone. The model is None if there is none.

    metadata: of the global model. profile: of the site's rows, data. test: held-out rows, one at
    least. seed: as Workload.train() takes it. losses: row_losses() of global models on the held-out
    rows, by their numbers. began: time of the clock from which the limit counts; None: now.
    Raises nothing of the workload: the reason stands in the outcome, without values of the data.
    """
    if data.num_samples < MIN_ROWS:
        return LocalModel(why_not=f"there are fewer than {MIN_ROWS} rows to train on"), None
    if data.task == "classification" and len(set(data.target.tolist())) < 2:
        return LocalModel(why_not="all rows to train on are of one class"), None
    began = clock() if began is None else began
    best: _Best | None = None
    done = 0
    try:
        workload, model = _untrained(metadata, profile, budget.preprocessing)
        at_home = at_site(model.metadata, data)
        rows = prepare(at_home, data, fill_absent=True, to_train=True)
        held_out = prepare(at_home, test, fill_absent=True)
        parts = _parts(budget.passes)
        if workload.name == "bagging":
            parts = [1] * budget.passes  # as rounds, of which each has a task of its own
        if hasattr(workload, "fitted"):
            parts = [budget.passes]  # it knows itself when it is at its end
        for number, passes in enumerate(parts, 1):
            spent = clock() - began
            if done and spent * number / (number - 1) > budget.limit_s:
                break
            try:
                with time_limit(lambda: clock() - began > budget.limit_s):
                    model = _continued(workload, model, rows, passes, done, seed)
            except OutOfTime:
                break
            done += passes
            if workload.name != "bagging":  # whose estimators are only added
                best = _better(best, model, workload.measure(model, held_out).tallies)
        if not done:
            return LocalModel(why_not="there was no time for the first part of its training"), None
        if workload.name == "bagging":
            best = _better(best, model, workload.measure(model, held_out).tallies)
    except Diverged:
        pass  # it may have been good before
    except (DataError, ValueError, TimeoutError) as error:
        log.warning("local_model_failed", reason=str(error) or type(error).__name__)
        why_not = f"no model can be trained on its rows ({type(error).__name__})"
        return LocalModel(why_not=why_not), None
    if best is None:
        return LocalModel(passes=done, why_not="its training diverged"), None
    own = row_losses(workload, best.model, held_out)
    differences = [
        Difference(number, float((own - of_all).sum()), float(np.square(own - of_all).sum()))
        for number, of_all in (losses or {}).items()
        if own is not None and of_all is not None
    ]
    return LocalModel(best.tallies, done, differences=tuple(differences)), best.model


def _untrained(
    metadata: Mapping[str, str], profile: DataProfile, preprocessing: str
) -> tuple[Workload, Model]:
    """The workload of a model as a site trains it alone, and its model of the site's rows. Classes
    are those of all sites, so that held-out rows of a class without rows to train on count."""
    options = loads(metadata.get("options", "{}"))
    mode = options.get("mode")
    if mode == "gradient":
        options.pop("batch_size", None)  # of a gradient
    if mode in _ALONE:
        options["mode"] = _ALONE[mode]
    options.pop("remedy", None)  # for sites that are unlike
    workload = create(metadata["workload"], options)
    chosen = PreprocessingOptions(**loads(preprocessing or "{}"))
    classes = tuple(loads(metadata.get("classes", "[]")))
    return workload, initial_model(workload, [replace(profile, classes=classes)], chosen)


def _parts(passes: int) -> list[int]:
    """Divide the passes of a training into NUM_PARTS parts at most; returns the passes of each."""
    number = min(NUM_PARTS, max(passes, 1))
    ends = [passes * end // number for end in range(1, number)] + [max(passes, 1)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _continued(
    workload: Workload, model: Model, rows: Dataset, passes: int, done: int, seed: int
) -> Model:
    """Train a model for more passes, as the only site of a session, and return the next model."""
    fitted: Callable[[Model, Dataset], Model] | None = getattr(workload, "fitted", None)
    if fitted is not None:
        return fitted(model, rows)
    result = workload.train(model, rows, epochs=passes, epoch_base=done, seed=seed)
    if model.vector.dtype != np.uint8:
        return replace(model, vector=result.vector)
    before, added = model.vector.tobytes(), result.vector.tobytes()
    if ENSEMBLE_KEY in model.metadata:
        sent = [("", added, result.num_samples)]
        after = next_model(Stack.parse(before), sent, model.metadata)
    else:
        kind = BoosterKind.from_metadata(model.metadata)
        after = joined(before, [(parse_update(added, kind, ANY_NUMBER), result.num_samples)], kind)
    return replace(model, vector=np.frombuffer(after, np.uint8))


@dataclass(frozen=True, slots=True)
class _Best:
    model: Model
    tallies: Tallies

    @property
    def loss(self) -> float:
        """Loss by which models are compared on the same rows; less is better."""
        if CLASS_WEIGHTS_KEY in self.model.metadata:
            known = figures(self.tallies)
            return -next(known[name].value for name in OF_WEIGHED_CLASSES if name in known)
        sums = self.tallies.sums
        return sums.get("log_loss", sums.get("squared_error", -float(self.tallies.right)))


def _better(best: _Best | None, model: Model, tallies: Tallies | None) -> _Best | None:
    """The better one of two models. tallies: None if the predictions of `model` are far off."""
    if tallies is None:
        return best
    other = _Best(model, tallies)
    return other if best is None or other.loss < best.loss else best
