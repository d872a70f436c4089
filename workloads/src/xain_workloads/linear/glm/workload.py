"""The workload "glm": linear, logistic, multinomial and Poisson regression without penalty.

In a round a participant sends sums over its rows (see newton.py), and the coordinator takes a step.
The result is the maximum of the likelihood of all rows, as one would compute it in one place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from json import dumps
from math import log
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_foundation.settings.hints import hint
from xain_workloads.errors import DataError
from xain_workloads.linear.glm import design
from xain_workloads.linear.glm.families import deviance, means, num_totals, predictors, sums
from xain_workloads.linear.glm.newton import stepped
from xain_workloads.linear.glm.options import LINEAR, NAME, POISSON, GlmOptions
from xain_workloads.linear.newton import MAX_PARAMETERS, Fit
from xain_workloads.measures.tallies import tally_classes, tally_numbers
from xain_workloads.model import ENDED, Model
from xain_workloads.options import from_mapping, to_text
from xain_workloads.supervised import (
    Array,
    Measured,
    best_class,
    classes_of,
    classes_to_learn,
    coded_target,
    regression_metrics,
    require_training,
    require_width,
    rows_to_predict,
    score_metrics,
    softmax,
)
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import (
    CategoryColumn,
    preprocessing_of,
    target_center,
    target_scale,
)
from xain_workloads.tables.profile import DataProfile, union
from xain_workloads.tables.reading.scales import Scale
from xain_workloads.tables.reading.statistics_json import from_json
from xain_workloads.tables.statistics import CategoryStatistics, merge
from xain_workloads.time_limit import check_time
from xain_workloads.workload import TrainResult

_DEFAULTS = GlmOptions()


@dataclass(frozen=True, slots=True)
class GlmWorkload:
    """Generalised linear models. The arrays of a Model are those of newton.Fit: "coef" (k, p) and
    "intercept" (k,), where k is 1, or the number of classes less 1 with more than two, and the sums
    from which errors and intervals follow (see coefficients.py). Its metadata hold "classes", as
    those of the workload "sgd", and the reference categories under design.KEY."""

    options: GlmOptions = _DEFAULTS
    name: ClassVar[str] = NAME
    scaling: ClassVar[str] = "standard"
    missing: ClassVar[str] = "median"
    clip: ClassVar[float] = 0.0  # a coefficient is of the column as it is

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        """The workload with these options. Raises ValueError that names an option that is unknown
        or wrong."""
        return cls(from_mapping(GlmOptions, options, workload=cls.name))

    def initial_model(
        self, profiles: Sequence[DataProfile], metadata: Mapping[str, str] | None = None
    ) -> Model:
        """A model of zeros; of Poisson regression the intercept is that of the mean target, from
        which Newton's method converges."""
        given = metadata or {}
        profile = union(profiles)
        classes = classes_to_learn(self.options.task, profile)
        reference = self.options.reference_class
        if reference and reference not in classes:
            raise DataError(
                f"workload.options.reference_class is {reference!r}; the classes are: "
                f"{', '.join(map(repr, classes))}"
            )
        k = max(len(classes) - 1, 1)
        point = np.zeros((k, profile.num_features + 1))
        if point.size > MAX_PARAMETERS:
            raise DataError(
                f"{profile.num_features} prepared features make {point.size} parameters; at most"
                f" {MAX_PARAMETERS} are fitted without a penalty: drop columns, or take the"
                " workload sgd"
            )
        if self.options.family == POISSON and (center := target_center(given)) > 0:
            point[:, 0] = log(center)
        fit = Fit.at(point, num_totals(self.options.family, len(classes)))
        made = {
            "workload": self.name,
            "options": to_text(self.options, later=()),
            "classes": dumps(list(classes)),
            design.KEY: given.get(design.KEY) or self._references(profiles, given),
        }
        return Model(fit.to_vector(), fit.layout, made)

    def _references(self, profiles: Sequence[DataProfile], given: Mapping[str, str]) -> str:
        """JSON of the reference category of each category column: the commonest of all sites, the
        first of equal ones, or that of the options."""
        preprocessing = preprocessing_of(given)
        columns = () if preprocessing is None else preprocessing.columns
        chosen = dict(self.options.references)
        found: dict[str, str] = {}
        texts = sorted(profile.statistics for profile in profiles if profile.statistics)
        merged = merge(map(from_json, texts), [column.name for column in columns])
        for column in columns:
            if not isinstance(column, CategoryColumn):
                continue
            of = merged.columns[column.name]
            assert isinstance(of, CategoryStatistics), "preprocessing is fitted from the same"
            name = chosen.pop(column.name, None)
            if name is not None and name not in column.categories:
                raise DataError(
                    f"workload.options.references has {name!r} for column {column.name!r}, whose"
                    f" categories are: {', '.join(map(repr, column.categories))}"
                )
            if column.categories:
                commonest = max(column.categories, key=lambda one: of.counts.get(one, 0))
                found[column.name] = name or commonest
        if chosen:
            raise DataError(
                f"workload.options.references has {next(iter(chosen))!r}, which is no column of"
                " categories"
            )
        return dumps(found)

    def train(
        self, model: Model, data: Dataset, *, epochs: int, epoch_base: int, seed: int
    ) -> TrainResult:
        """Sum score and information of the local rows at the model; no weight is changed.

        The sums are the vector; the metrics are those of the given model. See Workload.train.
        """
        require_training(epochs, epoch_base, seed)
        fit, classes = self._open(model)
        target, scale = self._target(model, classes, data)
        require_width(fit.point.shape[1] - 1, data.features)
        found = sums(self.options.family, fit, data.features, (target - scale.center) / scale.scale)
        return TrainResult(found.to_vector(), data.num_samples, self.measure(model, data).metrics)

    def few_rows(self, model: Model, data: Dataset, min_known: int) -> list[str]:
        """Categories that fewer than min_known rows have, whose sums tell of these rows. Raises
        DataError if all sums would: of fewer rows than parameters, or than min_known."""
        fit, _ = self._open(model)
        needed = max(fit.point.size, min_known)
        if min_known > 1 and data.num_samples < needed:
            raise DataError(
                f"the model has {fit.point.size} parameters, and sums over"
                f" {data.num_samples} rows would tell each of them; at least {needed} rows are"
                " needed at a site: leave columns out, or allow it, "
                + hint("xain-participant", "data.min_known = 1")
            )
        of = design.Design.of(model.metadata, fit.point.shape[1] - 1)
        if of.preprocessing is None:
            return []
        first = len(of.preprocessing.numbers)
        counts = data.features[:, first:].sum(axis=0)
        few = np.flatnonzero((counts > 0) & (counts < min_known)) + first + 1
        return [of.words(at) for at in few.tolist()]

    def fitted(self, model: Model, data: Dataset) -> Model:
        """Take up to options.rounds steps on these rows alone, until there is no further one."""
        for _ in range(self.options.rounds):
            update = self.train(model, data, epochs=1, epoch_base=0, seed=0).vector
            vector, metadata = stepped(model.vector, model.layout, model.metadata, [update])
            model = replace(model, vector=vector, metadata=metadata)
            if ENDED in metadata:
                break
            check_time()
        return model

    def measure(self, model: Model, data: Dataset) -> Measured:
        """Metrics on data: "accuracy" and "loss", the mean cross-entropy, or "r2" and "mse"; of
        Poisson regression also "deviance", the mean over rows."""
        fit, classes = self._open(model)
        target, _ = self._target(model, classes, data)
        require_width(fit.point.shape[1] - 1, data.features)
        eta = predictors(self.options.family, fit.point, data.features)
        if classes:
            codes = target.astype(np.intp)
            scores = _scores(eta)
            shares, predicted = softmax(scores), best_class(scores)
            metrics = score_metrics("classification", scores, codes, Scale())
            return Measured(metrics, tally_classes(len(classes), codes, predicted, shares))
        numbers = self._numbers(model, eta)
        metrics = regression_metrics(numbers, target)
        if self.options.family == POISSON:
            metrics["deviance"] = deviance(POISSON, eta, target) / len(target)
        return Measured(metrics, tally_numbers(target, numbers))

    def predict(self, model: Model, features: ArrayLike) -> NDArray[Any]:
        """Predict class names or numbers, (n,). Of two equal probabilities the first class wins."""
        eta, classes = self._predictors(model, features)
        if classes:
            return np.array(classes, dtype=np.str_)[best_class(_scores(eta))]
        return self._numbers(model, eta)

    def probabilities(self, model: Model, features: ArrayLike) -> Array | None:
        """See Workload.probabilities."""
        eta, classes = self._predictors(model, features)
        return softmax(_scores(eta)) if classes else None

    def to_sklearn(self, model: Model) -> Any:
        """Convert a model to a LogisticRegression, LinearRegression or PoissonRegressor."""
        from sklearn.linear_model import LinearRegression, LogisticRegression, PoissonRegressor

        fit, classes = self._open(model)
        coef, intercept = fit.point[:, 1:], fit.point[:, 0]
        estimator: Any
        if classes:
            if len(classes) > 2:  # the scores of the first class are 0
                coef = np.concatenate([np.zeros_like(coef[:1]), coef])
                intercept = np.concatenate([[0.0], intercept])
            estimator = LogisticRegression()
            estimator.classes_ = np.array(classes, dtype=np.str_)
            estimator.n_iter_ = np.ones(1, np.int32)
        elif self.options.family == LINEAR:
            scale = target_scale(model.metadata)
            estimator = LinearRegression()
            coef, intercept = coef[0] * scale.scale, intercept[0] * scale.scale + scale.center
        else:
            estimator = PoissonRegressor(alpha=0)
            coef, intercept = coef[0], intercept[0]
            estimator.n_iter_ = 1
            estimator._base_loss = estimator._get_loss()
        estimator.coef_, estimator.intercept_ = coef, intercept
        estimator.n_features_in_ = fit.point.shape[1] - 1
        return estimator

    def _open(self, model: Model) -> tuple[Fit, tuple[str, ...]]:
        """Read a model's fit and classes. Raises ValueError if it is of another workload."""
        classes = classes_of(self.options.task, model.metadata)
        fit = Fit.of(np.asarray(model.vector, np.float64), model.layout)
        if len(fit.point) != max(len(classes) - 1, 1):
            raise ValueError(
                f"a model of {len(fit.point)} blocks is none for {len(classes)} classes"
            )
        return fit, classes

    def _target(self, model: Model, classes: tuple[str, ...], data: Dataset) -> tuple[Array, Scale]:
        """The target as float64, and the scale in which it is fitted. Raises DataError."""
        target = coded_target(self.options.task, classes, data).astype(np.float64)
        if self.options.family == POISSON and (target < 0).any():
            raise DataError(
                "the target has a value below 0; family 'poisson' is for counts of events"
            )
        is_scaled = self.options.family == LINEAR
        return target, target_scale(model.metadata) if is_scaled else Scale()

    def _predictors(self, model: Model, features: ArrayLike) -> tuple[Array, tuple[str, ...]]:
        fit, classes = self._open(model)
        rows = rows_to_predict(fit.point.shape[1] - 1, features)
        return predictors(self.options.family, fit.point, rows), classes

    def _numbers(self, model: Model, eta: Array) -> Array:
        """Convert linear predictors to (n,) predictions in the unit of the target."""
        numbers = means(self.options.family, eta)[:, 0]
        if self.options.family != LINEAR:
            return numbers
        scale = target_scale(model.metadata)
        return np.asarray(numbers * scale.scale + scale.center)


def _scores(eta: Array) -> Array:
    """Linear predictors as softmax() takes them: with a 0 for the first class of more than two."""
    return eta if eta.shape[1] == 1 else np.concatenate([0 * eta[:, :1], eta], axis=1)
