"""Linear models by stochastic gradient descent, as scikit-learn's SGDClassifier and SGDRegressor
have them, over mini-batches of rows.

With more than two classes there is one row of weights per class, trained together by "log_loss"
(softmax) and by the other losses each against all the others (one versus rest); with two there is
one row, for the second class. A participant trains every row of the global model, also those of
classes that it has never seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from json import dumps
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_workloads.class_weights import row_weights
from xain_workloads.errors import Diverged
from xain_workloads.linear.minibatch import (
    Layer,
    LayersOf,
    Penalty,
    Steps,
    batch_rows,
    train_epochs,
)
from xain_workloads.linear.sgd_options import MULTINOMIAL, OVR, SgdOptions
from xain_workloads.linear.step_sizes import curvature_of, safe_step, schedule
from xain_workloads.measures.losses import margin_loss, multinomial_loss, penalty, residual_loss
from xain_workloads.model import Model, TensorSpec, Vector, flatten, size_of, unflatten
from xain_workloads.options import from_mapping, to_text
from xain_workloads.remedies import OPTIONS as REMEDY
from xain_workloads.remedies import corrected_by
from xain_workloads.scaffold import without_control
from xain_workloads.supervised import (
    Array,
    Measured,
    best_class,
    classes_of,
    classes_to_learn,
    coded_target,
    num_outputs,
    predictions,
    regression_metrics,
    require_training,
    require_width,
    rows_of_gradient,
    rows_to_predict,
    score_tallies,
    softmax,
)
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import target_scale
from xain_workloads.tables.profile import DataProfile, union
from xain_workloads.tables.reading.scales import Scale
from xain_workloads.workload import TrainResult

_DEFAULTS = SgdOptions()
_LATER = ("mode", "batch_size", "eta0", "class_weight", "multi_class", *REMEDY)


@dataclass(frozen=True, slots=True)
class SgdWorkload:
    """Linear models. The arrays of a Model are "coef" (k, p) and "intercept" (k,), where k is the
    number of classes, or 1 for two classes and for regression; its metadata hold "classes", the
    class names in the order of the rows, as a JSON list."""

    options: SgdOptions = _DEFAULTS
    name: ClassVar[str] = "sgd"
    personal: ClassVar[tuple[str, ...]] = ("intercept",)  # with the remedy "personal"
    scaling: ClassVar[str] = "standard"
    missing: ClassVar[str] = "median"

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        """The workload with these options. Raises ValueError that names an option that is unknown
        or wrong."""
        return cls(from_mapping(SgdOptions, options, workload=cls.name))

    @classmethod
    def from_model(cls, options: Mapping[str, object]) -> Self:
        """The workload of a model with these options. A model of an earlier version, which does not
        say how it trains several classes, goes on as it was. Raises as from_options() does."""
        is_averaged = options.get("mode", "federated") == "federated"
        has_choice = options.get("loss") == "log_loss"
        known = {"multi_class": OVR} if is_averaged and has_choice else {}
        return cls.from_options({**known, **options})

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
        # Participants of earlier versions, which train one class against the rest, do not know the
        # option, and refuse the model.
        is_new = self.options.is_softmax and self.options.mode == "federated" and num_rows > 1
        options = replace(self.options, multi_class=MULTINOMIAL if is_new else "")
        metadata = {
            "workload": self.name,
            "options": to_text(options, later=_LATER),
            "classes": dumps(list(classes)),
        }
        return Model(np.zeros(size_of(layout), dtype=self.options.dtype), layout, metadata)

    def train(
        self,
        model: Model,
        data: Dataset,
        *,
        epochs: int,
        epoch_base: int,
        seed: int,
        correction: Array | None = None,
    ) -> TrainResult:
        """Train on local data; see Workload.train. correction: see scaffold.Variates; None for
        none.

        In mode "gradient" the vector is the gradient at the model, and the metrics are those of the
        model before the step; "objective" is the loss with the penalty.
        """
        require_training(epochs, epoch_base, seed)
        options = self.options
        classes, coef, intercept = self._open(model)
        target = coded_target(self.options.task, classes, data)
        require_width(coef.shape[1], data.features)
        scale = Scale() if classes else target_scale(model.metadata)
        if not classes:
            target = (target - scale.center) / scale.scale
        if self.options.mode == "gradient":
            rows = rows_of_gradient(options.batch_size, data.num_samples, (seed, epoch_base))
            return self._gradient(model, data.features, target, scale, rows)

        weights = row_weights(model.metadata, len(classes), target)
        vector = np.concatenate([coef.ravel(), intercept])
        corrected = corrected_by(vector, options.remedy, options.proximal_mu, correction)
        trained, scores, path = train_epochs(
            self._steps(data.features, weights, len(coef), epoch_base),
            vector,
            self._layers_of(coef),
            data.features,
            target,
            epochs=range(epoch_base, epoch_base + epochs),
            seed=seed,
            dtype=options.dtype,
            diverged=self._diverged,
            weights=weights,
            corrected=corrected,
        )
        with np.errstate(over="ignore", invalid="ignore"):
            metrics = self._metrics(scores, target, scale)
        if not np.isfinite([*metrics.values()]).all():
            raise self._diverged(epoch_base + epochs - 1)
        return TrainResult(trained, data.num_samples, metrics, path=path)

    def _layers_of(self, like: Array) -> LayersOf:
        """Make the function that views a flat vector as one layer. like: coef, (k, p)."""
        size, is_fitted = like.size, self.options.fit_intercept

        def layers_of(vector: Array) -> list[Layer]:
            intercept = vector[size:]
            coef = vector[:size].reshape(like.shape).T
            return [Layer(coef, intercept if is_fitted else intercept.copy())]

        return layers_of

    def _steps(
        self, features: Array, weights: Array | None, num_scores: int, epoch_base: int
    ) -> Steps:
        """Choose loss, penalty, rows and sizes of the steps for the rows of this site."""
        options, num_rows = self.options, len(features)
        rows = min(options.batch_size or batch_rows(num_rows), num_rows)
        eta0 = options.eta0
        if not eta0 and options.learning_rate != "optimal":
            decay = options.weight_of_penalty * (1 - options.share_of_l1)
            decay += options.proximal_mu if options.remedy == "proximal" else 0.0
            curvature = curvature_of(options, num_scores)
            eta0 = safe_step(curvature, features, rows, decay, weights)
        # The clock of the step size goes on where the rounds before left it, on the supposition
        # that they had as many rows.
        first = epoch_base * -(-num_rows // rows)
        return Steps(
            loss=self._losses,
            step_size=schedule(options, eta0, rows, first),
            batch_rows=rows,
            penalty=Penalty(options.weight_of_penalty, options.share_of_l1),
        )

    def _gradient(
        self, model: Model, features: Array, target: NDArray[Any], scale: Scale, rows: Any
    ) -> TrainResult:
        """The gradient of the mean loss over some rows, and of the penalty.

        target, scale: as training has them.
        """
        classes, coef, intercept = self._open(model)
        num_samples, features, target = len(target), features[rows], target[rows]
        weights = row_weights(model.metadata, len(classes), target)
        # Weights that run away are told by the check below.
        with np.errstate(over="ignore", invalid="ignore"):
            scores = features @ coef.T + intercept
            losses, derivatives = self._losses(scores, target)
            metrics = self._metrics(scores, target, scale, losses)
            if weights is not None:
                losses, derivatives = losses * weights, derivatives * weights[:, np.newaxis]
            value, of_penalty = penalty(self.options.penalty, self.options.l1_ratio, coef)
            arrays = {
                "coef": derivatives.T @ features / len(features) + self.options.alpha * of_penalty,
                "intercept": derivatives.mean(axis=0) * self.options.fit_intercept,
            }
            vector: Vector = flatten(arrays, model.layout)
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
        elif options.is_softmax and scores.shape[1] > 1:
            return multinomial_loss(scores, target)
        else:
            signs = _signs(scores.shape[1], target)
            losses, by_margin = margin_loss(options.loss, signs * scores)
            derivatives = by_margin * signs
        return losses.sum(axis=1), derivatives

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
        """Predict class names or numbers, (n,). Of equal scores the class that comes first wins."""
        classes, coef, intercept = self._open(model)
        scores = rows_to_predict(coef.shape[1], features) @ coef.T + intercept
        return predictions(scores, classes, model.metadata)

    def probabilities(self, model: Model, features: ArrayLike) -> Array | None:
        """Predict (n, classes) probabilities for the losses "log_loss" (of several classes, by a
        softmax) and "modified_huber"; None for other losses."""
        _, coef, intercept = self._open(model)
        return self._probabilities(rows_to_predict(coef.shape[1], features) @ coef.T + intercept)

    def _probabilities(self, scores: Array) -> Array | None:
        """(n, k) scores to (n, classes) probabilities; None for a loss without them.

        Source: Zadrozny and Elkan 2002, for more than two classes of "modified_huber".
        """
        if self.options.loss == "log_loss":
            return softmax(scores)
        if self.options.loss == "modified_huber":
            shares = (np.clip(scores, -1, 1) + 1) / 2
            if scores.shape[1] == 1:
                return np.concatenate([1 - shares, shares], axis=1)
            sums = shares.sum(axis=1, keepdims=True)
            even = np.full_like(shares, 1 / shares.shape[1])
            return np.asarray(np.divide(shares, sums, out=even, where=sums > 0))
        return None

    def to_sklearn(self, model: Model) -> Any:
        """Convert a model to an SGDClassifier or SGDRegressor, or a LogisticRegression for
        "log_loss" with more than two classes."""
        # Here, because a coordinator, which never trains, need not have it.
        from sklearn.linear_model import LogisticRegression, SGDClassifier, SGDRegressor

        options = self.options
        classes, coef, intercept = self._open(model)
        settings = {
            "loss": options.loss,
            "penalty": None if options.penalty == "none" else options.penalty,
            "alpha": options.alpha,
            "l1_ratio": options.l1_ratio,
            "learning_rate": options.learning_rate,
            "eta0": options.eta0 or 0.01,  # as scikit-learn's; ours depends on the rows
            "power_t": options.power_t,
            "epsilon": options.epsilon,
            "fit_intercept": options.fit_intercept,
        }
        if not classes:  # predictions in the unit of the target
            scale = target_scale(model.metadata)
            estimator = SGDRegressor(**settings)
            estimator.coef_ = coef[0] * scale.scale
            estimator.intercept_ = intercept * scale.scale + scale.center
        else:
            # The probabilities of an SGDClassifier are no softmax.
            is_multinomial = options.loss == "log_loss" and len(coef) > 1
            estimator = LogisticRegression() if is_multinomial else SGDClassifier(**settings)
            estimator.coef_, estimator.intercept_ = coef, intercept
            estimator.classes_ = np.array(classes, dtype=np.str_)
        estimator.n_features_in_ = coef.shape[1]
        estimator.n_iter_, estimator.t_ = 1, 1.0
        return estimator

    def _open(self, model: Model) -> tuple[tuple[str, ...], Array, Array]:
        """(classes, coef, intercept) of a model; float64 copies, since training writes into them.
        Raises ValueError if the model is none of this workload."""
        model = without_control(model)
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

    def _metrics(
        self, scores: Array, target: NDArray[Any], scale: Scale, losses: Array | None = None
    ) -> dict[str, float]:
        """Accuracy and loss of (n, k) scores, or regression_metrics() in the target's unit.

        target: (n,), as training has it: positions of classes, or scaled. losses: (n,), as
        _losses() gives them; computed if None.
        """
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
        """The error of a training whose weights ran away in this epoch, with what to change."""
        if self.options.learning_rate == "optimal":  # it does not use eta0
            settings, advice = f"alpha = {self.options.alpha:g}", "choose another learning_rate"
        elif self.options.eta0:
            settings, advice = f"eta0 = {self.options.eta0:g}", "lower eta0, or leave it out"
        else:
            settings, advice = "the default of eta0", "set a lower one"
        return Diverged(
            f"training diverged in epoch {epoch + 1} with learning_rate ="
            f" {self.options.learning_rate!r} and {settings}: {advice}, or scale the data"
        )


def _signs(num_scores: int, target: NDArray[Any]) -> Array:
    """(n, k): +1 where the row is of the problem's class, -1 elsewhere. One score is of class 1."""
    positive = np.arange(num_scores) if num_scores > 1 else np.array([1])
    return np.where(target[:, np.newaxis] == positive, 1.0, -1.0)
