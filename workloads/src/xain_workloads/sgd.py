"""Linear models by stochastic gradient descent, through scikit-learn's SGDClassifier and
SGDRegressor.

With more than two classes there is one row of weights per class, trained against all the others
(one versus rest), and with two there is one row, for the second class. A participant trains every
row of the global model, also those of classes that it has never seen: to it, all its rows are
"the rest".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from json import dumps
from typing import Any, ClassVar, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_foundation.hints import hint
from xain_workloads.dataset import Dataset, Task
from xain_workloads.errors import Diverged
from xain_workloads.losses import margin_loss, multinomial_loss, penalty, residual_loss
from xain_workloads.model import Model, TensorSpec, Vector, flatten, size_of, unflatten
from xain_workloads.options import from_mapping, require_choice, require_range, to_text
from xain_workloads.preprocessing import target_scale
from xain_workloads.profile import DataProfile, union
from xain_workloads.scales import Scale
from xain_workloads.supervised import (
    DIVERGED_SCORE,
    Array,
    Measured,
    best_class,
    classes_of,
    classes_to_learn,
    coded_target,
    epoch_seed,
    num_outputs,
    predictions,
    regression_metrics,
    require_training,
    require_width,
    rows_to_predict,
    score_tallies,
    softmax,
)
from xain_workloads.workload import TrainResult

# The first loss of each task is its default.
LOSSES: Mapping[str, tuple[str, ...]] = {
    "classification": ("log_loss", "hinge", "modified_huber", "perceptron", "squared_hinge"),
    "regression": (
        "squared_error",
        "epsilon_insensitive",
        "huber",
        "squared_epsilon_insensitive",
    ),
}
PENALTIES = ("l2", "l1", "elasticnet", "none")
MODES = ("federated", "gradient")
DEFAULT_ETA0 = 0.01
# Largest second derivatives by the score, of the losses whose derivative has no bound. A step that
# is longer than the inverse, divided by the squares of a row, goes beyond the row's minimum.
_CURVATURES: Mapping[str, float] = {
    "squared_error": 1.0,
    "squared_epsilon_insensitive": 2.0,
    "squared_hinge": 2.0,
}
# Without "adaptive", which watches one long fit and cannot look across rounds.
LEARNING_RATES = ("constant", "invscaling", "optimal")


@dataclass(frozen=True, slots=True)
class SgdOptions:
    """Options of the workload "sgd", named as scikit-learn names them.

    task: "classification" or "regression".
    loss: one of LOSSES[task]; empty means the first.
    penalty, alpha, l1_ratio: the regulariser, its weight, and the share of L1 in "elasticnet".
    learning_rate, eta0, power_t: the step at the t-th row that a participant sees is eta0
        ("constant"), eta0 / t**power_t ("invscaling") or 1 / (alpha * (t0 + t)) ("optimal").
        eta0 = 0: DEFAULT_ETA0, or what is safe for the rows of the site; see safe_step().
    epsilon: width of the insensitive zone; for regression losses that have one.
    dtype: of the weights between participants, "float32" or "float64". Training is in float64.
    mode: "federated" trains locally; "gradient" sends the gradient of the regularised loss. There
        "log_loss" with more than two classes is multinomial, and the step is the coordinator's.
    batch_size: rows of a gradient, drawn anew for each step; 0: all rows.
    Raises ValueError that names the field.
    """

    task: str = "classification"
    mode: str = "federated"
    loss: str = ""
    penalty: str = "l2"
    alpha: float = 1e-4
    l1_ratio: float = 0.15
    learning_rate: str = "constant"
    eta0: float = 0.0
    power_t: float = 0.25
    epsilon: float = 0.1
    fit_intercept: bool = True
    dtype: str = ""
    batch_size: int = 0

    def __post_init__(self) -> None:
        require_choice("task", self.task, get_args(Task))
        require_choice("mode", self.mode, MODES)
        if not self.dtype:
            # Gradients of many sites sum to that of the union of their rows, to float64's accuracy.
            dtype = "float64" if self.mode == "gradient" else "float32"
            object.__setattr__(self, "dtype", dtype)
        if not self.loss:
            object.__setattr__(self, "loss", LOSSES[self.task][0])
        require_choice("loss", self.loss, LOSSES[self.task])
        require_choice("penalty", self.penalty, PENALTIES)
        require_choice("learning_rate", self.learning_rate, LEARNING_RATES)
        require_choice("dtype", self.dtype, ("float32", "float64"))
        require_range("alpha", self.alpha, at_least=0)
        if self.learning_rate == "optimal" and self.alpha == 0:
            raise ValueError("alpha is 0; learning_rate 'optimal' divides by it")
        require_range("l1_ratio", self.l1_ratio, at_least=0, at_most=1)
        require_range("eta0", self.eta0, at_least=0)
        require_range("power_t", self.power_t, at_least=0)
        require_range("epsilon", self.epsilon, at_least=0)
        require_range("batch_size", self.batch_size, at_least=0)
        if self.mode == "gradient":
            for name in ("learning_rate", "eta0", "power_t"):
                if getattr(self, name) != _DEFAULTS[name]:
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}; in mode 'gradient' the coordinator"
                        f" takes the steps: "
                        + hint("xain-coordinator", f"aggregation.options.{name} = VALUE")
                    )
        elif self.batch_size:
            raise ValueError(f"batch_size is {self.batch_size}; it is for mode 'gradient' only")


_DEFAULTS = {field.name: field.default for field in fields(SgdOptions)}


@dataclass(frozen=True, slots=True)
class SgdWorkload:
    """Linear models. The arrays of a Model are "coef" (k, p) and "intercept" (k,), where k is the
    number of classes, or 1 for two classes and for regression; its metadata hold "classes", the
    class names in the order of the rows, as a JSON list."""

    options: SgdOptions = SgdOptions()
    name: ClassVar[str] = "sgd"
    scaling: ClassVar[str] = "standard"
    missing: ClassVar[str] = "median"

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        """Raises ValueError that names an option that is unknown or wrong."""
        return cls(from_mapping(SgdOptions, options, workload=cls.name))

    def initial_model(
        self, profiles: Sequence[DataProfile], metadata: Mapping[str, str] | None = None
    ) -> Model:
        """A model of zeros. Classification needs two classes in all profiles together."""
        profile = union(profiles)
        classes = classes_to_learn(self.options.task, profile)
        num_rows = num_outputs(classes)
        layout = (
            TensorSpec("coef", (num_rows, profile.num_features), self.options.dtype),
            TensorSpec("intercept", (num_rows,), self.options.dtype),
        )
        metadata = {
            "workload": self.name,
            "options": to_text(self.options, later=("mode", "batch_size", "eta0")),
            "classes": dumps(list(classes)),
        }
        return Model(np.zeros(size_of(layout), dtype=self.options.dtype), layout, metadata)

    def train(
        self, model: Model, data: Dataset, *, epochs: int, epoch_base: int, seed: int
    ) -> TrainResult:
        """See Workload.train. Metrics: as of measure(), after training.

        In mode "gradient" the vector is the gradient at the model, and the metrics are those of the
        model before the step; "objective" is the loss with the penalty.
        """
        require_training(epochs, epoch_base, seed)
        classes, coef, intercept = self._open(model)
        target = coded_target(self.options.task, classes, data)
        require_width(coef.shape[1], data.features)
        scale = Scale() if classes else target_scale(model.metadata)
        if not classes:
            target = (target - scale.center) / scale.scale
        if self.options.mode == "gradient":
            rows = self._rows(data.num_samples, (seed, epoch_base))
            features, target = data.features[rows], target[rows]
            return self._gradient(
                model, (coef, intercept), features, target, scale, data.num_samples
            )

        eta0 = self.options.eta0 or safe_step(self.options.loss, data.features)
        estimator = self._estimator(classes, coef, intercept, eta0)
        # The clock of the learning rate goes on where the rounds before left it, on the supposition
        # that they had as many rows. A float, because scikit-learn's loop takes a C double.
        estimator.t_ = float(epoch_base * data.num_samples + 1)
        for epoch in range(epoch_base, epoch_base + epochs):
            estimator.random_state = epoch_seed(seed, epoch)  # of the shuffle of partial_fit()
            try:
                estimator.partial_fit(data.features, target)
            except ValueError as error:
                # Message of scikit-learn when a weight stops being finite within the epoch.
                if "under-/overflow" not in str(error):
                    raise
                raise self._diverged(epoch) from error

        arrays = {
            "coef": np.reshape(estimator.coef_, coef.shape),
            "intercept": np.reshape(estimator.intercept_, intercept.shape),
        }
        with np.errstate(over="ignore"):  # beyond float32: infinite, and told below
            vector: Vector = flatten(arrays, model.layout)
        if not np.isfinite(vector).all():
            raise self._diverged(epoch_base + epochs - 1)
        with np.errstate(over="ignore", invalid="ignore"):
            scores = data.features @ arrays["coef"].T + arrays["intercept"]
            metrics = self._metrics(scores, target, scale)
        if not np.abs(scores).max() < DIVERGED_SCORE or not np.isfinite([*metrics.values()]).all():
            raise self._diverged(epoch_base + epochs - 1)
        return TrainResult(vector, data.num_samples, metrics)

    def _rows(self, num_samples: int, seed: tuple[int, int]) -> Any:
        """The rows of a gradient: all, or a mini-batch without repetition."""
        if not 0 < self.options.batch_size < num_samples:
            return slice(None)
        chance = np.random.default_rng(seed)
        return chance.choice(num_samples, self.options.batch_size, replace=False)

    def _gradient(
        self,
        model: Model,
        weights: tuple[Array, Array],
        features: Array,
        target: NDArray[Any],
        scale: Scale,
        num_samples: int,
    ) -> TrainResult:
        """The gradient of the mean loss over these rows, and of the penalty.

        weights: (coef, intercept). target, scale: as training has them.
        """
        coef, intercept = weights
        # Weights that run away are told by the check below.
        with np.errstate(over="ignore", invalid="ignore"):
            scores = features @ coef.T + intercept
            losses, derivatives = self._losses(scores, target)
            value, of_penalty = penalty(self.options.penalty, self.options.l1_ratio, coef)
            arrays = {
                "coef": derivatives.T @ features / len(features) + self.options.alpha * of_penalty,
                "intercept": derivatives.mean(axis=0) * self.options.fit_intercept,
            }
            vector: Vector = flatten(arrays, model.layout)
            metrics = self._metrics(scores, target, scale, losses)
            metrics["objective"] = float(losses.mean()) + self.options.alpha * value
        if not np.isfinite([*metrics.values()]).all() or not np.isfinite(vector).all():
            raise Diverged(
                "the gradient is not finite: lower aggregation.options.eta0, or scale the data"
            )
        return TrainResult(vector, num_samples, metrics)

    def _losses(self, scores: Array, target: NDArray[Any]) -> tuple[Array, Array]:
        """The loss of each row, (n,), and its derivatives by the scores, (n, k)."""
        options = self.options
        if options.task == "regression":
            losses, derivatives = residual_loss(
                options.loss, scores - target[:, np.newaxis], options.epsilon
            )
        elif self._is_multinomial(scores.shape[1]):
            return multinomial_loss(scores, target)
        else:
            signs = _signs(scores.shape[1], target)
            losses, by_margin = margin_loss(options.loss, signs * scores)
            derivatives = by_margin * signs
        return losses.sum(axis=1), derivatives

    def _is_multinomial(self, num_scores: int) -> bool:
        options = self.options
        return options.mode == "gradient" and options.loss == "log_loss" and num_scores > 1

    def measure(self, model: Model, data: Dataset) -> Measured:
        """Metrics on data: "accuracy" and "loss", or "r2" and "mse".

        loss: what training minimises, without the penalty: the mean over rows of the loss, summed
        over the one-versus-rest problems. For two classes and log_loss that is the cross-entropy.
        mse: in the unit of the target, squared. r2: see regression_metrics().
        """
        classes, coef, intercept = self._open(model)
        codes = coded_target(self.options.task, classes, data)
        require_width(coef.shape[1], data.features)
        scale = Scale() if classes else target_scale(model.metadata)
        target = codes if classes else (codes - scale.center) / scale.scale
        scores = data.features @ coef.T + intercept
        probabilities = self._probabilities(scores)
        return Measured(
            self._metrics(scores, target, scale),
            score_tallies(len(classes), scores, codes, scale, probabilities),
        )

    def predict(self, model: Model, features: ArrayLike) -> NDArray[Any]:
        """See Workload.predict. Two scores that are equal go to the class that comes first."""
        classes, coef, intercept = self._open(model)
        scores = rows_to_predict(coef.shape[1], features) @ coef.T + intercept
        return predictions(scores, classes, model.metadata)

    def probabilities(self, model: Model, features: ArrayLike) -> Array | None:
        """See Workload.probabilities: those of scikit-learn's SGDClassifier, which has them for the
        losses "log_loss" and "modified_huber"."""
        _, coef, intercept = self._open(model)
        return self._probabilities(rows_to_predict(coef.shape[1], features) @ coef.T + intercept)

    def _probabilities(self, scores: Array) -> Array | None:
        """(n, k) scores to (n, classes) probabilities; None for a loss without them.

        Source: Zadrozny and Elkan 2002, for more than two classes one against the rest.
        """
        if self.options.loss == "log_loss":
            if scores.shape[1] == 1 or self._is_multinomial(scores.shape[1]):
                return softmax(scores)
            # Logistic functions of sum 1, by their logarithms: they may all be too small.
            return softmax(-np.logaddexp(0.0, -scores))
        if self.options.loss == "modified_huber":
            shares = (np.clip(scores, -1, 1) + 1) / 2
            if scores.shape[1] == 1:
                return np.concatenate([1 - shares, shares], axis=1)
            sums = shares.sum(axis=1, keepdims=True)
            even = np.full_like(shares, 1 / shares.shape[1])
            return np.asarray(np.divide(shares, sums, out=even, where=sums > 0))
        return None

    def to_sklearn(self, model: Model) -> Any:
        """See Workload.to_sklearn: an SGDClassifier or SGDRegressor."""
        classes, coef, intercept = self._open(model)
        if not classes:  # predictions in the unit of the target
            scale = target_scale(model.metadata)
            coef, intercept = coef * scale.scale, intercept * scale.scale + scale.center
        if self._is_multinomial(len(coef)):
            # Its probabilities are a softmax, which those of SGDClassifier are not.
            from sklearn.linear_model import LogisticRegression

            estimator = LogisticRegression()
            estimator.coef_, estimator.intercept_ = coef, intercept
        else:
            estimator = self._estimator(classes, coef, intercept, self.options.eta0 or DEFAULT_ETA0)
        if classes:
            estimator.classes_ = np.array(classes, dtype=np.str_)
        estimator.n_features_in_ = coef.shape[1]
        estimator.n_iter_, estimator.t_ = 1, 1.0
        return estimator

    def _open(self, model: Model) -> tuple[tuple[str, ...], Array, Array]:
        """(classes, coef, intercept) of a model; float64 copies, since training writes into them.

        Raises ValueError if the model is none of this workload.
        """
        classes = classes_of(self.options.task, model.metadata)
        arrays = unflatten(model.vector, model.layout)
        num_rows = num_outputs(classes)
        shapes = {name: array.shape for name, array in arrays.items()}
        coef = arrays.get("coef", np.empty(0))
        if coef.ndim != 2 or shapes != {
            "coef": (num_rows, coef.shape[1]),
            "intercept": (num_rows,),
        }:
            raise ValueError(
                f"the model's arrays are {shapes}; expected 'coef' ({num_rows}, p) and"
                f" 'intercept' ({num_rows},)"
            )
        return (
            classes,
            np.array(coef, dtype=np.float64, order="C"),
            np.array(arrays["intercept"], dtype=np.float64),
        )

    def _estimator(
        self, classes: tuple[str, ...], coef: Array, intercept: Array, eta0: float
    ) -> Any:
        """An estimator in the state that partial_fit() would have left it in with these weights."""
        # Here, because a coordinator, which never trains, need not have it.
        from sklearn.linear_model import SGDClassifier, SGDRegressor

        options = self.options
        settings = {
            "loss": options.loss,
            "penalty": None if options.penalty == "none" else options.penalty,
            "alpha": options.alpha,
            "l1_ratio": options.l1_ratio,
            "learning_rate": options.learning_rate,
            "eta0": eta0,
            "power_t": options.power_t,
            "epsilon": options.epsilon,
            "fit_intercept": options.fit_intercept,
        }
        if not classes:
            estimator = SGDRegressor(**settings)
            estimator.coef_ = coef[0]
        else:
            estimator = SGDClassifier(**settings)
            # Positions, not names: scikit-learn would sort names as text, "10" before "9".
            estimator.classes_ = np.arange(len(classes))
            estimator.coef_ = coef
        estimator.intercept_ = intercept
        return estimator

    def _metrics(
        self, scores: Array, target: NDArray[Any], scale: Scale, losses: Array | None = None
    ) -> dict[str, float]:
        """scores: (n, k). target: (n,), as training has it: positions of classes, or scaled.
        losses: (n,), as _losses() gives them; computed if None."""
        if self.options.task == "classification":
            if losses is None:
                losses, _ = self._losses(scores, target)
            return {
                "accuracy": float(np.mean(best_class(scores) == target)),
                "loss": float(losses.mean()),
            }
        metrics = regression_metrics(scores[:, 0], target)
        return {**metrics, "mse": metrics["mse"] * scale.scale**2}

    def _diverged(self, epoch: int) -> Diverged:
        if self.options.learning_rate == "optimal":  # it does not use eta0
            settings, advice = f"alpha = {self.options.alpha:g}", "choose another learning_rate"
        else:
            settings, advice = f"eta0 = {self.options.eta0 or DEFAULT_ETA0:g}", "lower eta0"
        return Diverged(
            f"training diverged in epoch {epoch + 1} with learning_rate ="
            f" {self.options.learning_rate!r} and {settings}: {advice}, or scale the data"
        )


def safe_step(loss: str, features: Array) -> float:
    """DEFAULT_ETA0, or the longest step that goes beyond the minimum of no row, if that is shorter.

    features: (n, p), n > 0. With 200 columns of spread 1 the squares of a row sum to 200, and a
    step of 0.01 turns its error into the opposite one; with more columns it grows.
    """
    if loss not in _CURVATURES:
        return DEFAULT_ETA0
    squares = float(np.einsum("ij,ij->i", features, features).max()) + 1  # of the intercept
    return min(DEFAULT_ETA0, 1 / (_CURVATURES[loss] * squares))


def _signs(num_scores: int, target: NDArray[Any]) -> Array:
    """(n, k): +1 where the row is of the problem's class, -1 elsewhere. One score is of class 1."""
    positive = np.arange(num_scores) if num_scores > 1 else np.array([1])
    return np.where(target[:, np.newaxis] == positive, 1.0, -1.0)
