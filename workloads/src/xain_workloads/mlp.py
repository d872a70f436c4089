"""Multi-layer perceptrons, through scikit-learn's MLPClassifier and MLPRegressor, or by PyTorch.

The output is softmax for more than two classes, one logistic unit for two, and linear for
regression. A participant trains all outputs of the global model, also those of classes that it has
never seen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from json import dumps
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_workloads.chance import random_state
from xain_workloads.dataset import Dataset
from xain_workloads.errors import Diverged
from xain_workloads.mlp_options import MlpOptions
from xain_workloads.model import Layout, Model, TensorSpec, Vector, flatten, unflatten
from xain_workloads.neural_modules import import_torch
from xain_workloads.options import from_mapping, to_text
from xain_workloads.preprocessing import target_scale
from xain_workloads.profile import DataProfile, union
from xain_workloads.scales import Scale
from xain_workloads.supervised import (
    DIVERGED_SCORE,
    Array,
    Measured,
    classes_of,
    classes_to_learn,
    coded_target,
    epoch_seed,
    num_outputs,
    predictions,
    require_training,
    require_width,
    rows_to_predict,
    score_metrics,
    score_tallies,
    softmax,
)
from xain_workloads.workload import TrainResult

# Weights from which on engine "auto" takes PyTorch. Measured on two cores in float64, 16 rows a
# step: with 5,000 weights a step takes 0.3 ms by either engine, with 300,000 it takes 5 ms by
# scikit-learn and 2.5 ms by PyTorch. The import of PyTorch takes 1.5 s and 100 MB.
NUM_WEIGHTS_FOR_TORCH = 200_000
# Chosen by benchmarks/learning.py. With 32 rows a step, seven sites with 57 rows each are 0.04
# behind centralised training on breast_cancer; with an eighth of the rows, seven sites with 180 are
# 0.013 behind on digits.
STEPS_OF_SMALL_SITES = 16
SMALLEST_BATCH, LARGEST_BATCH = 4, 32
_DEFAULTS = MlpOptions()


def batch_rows(num_rows: int) -> int:
    """Rows of a step at a site with this many rows, where the options do not say it: a sixteenth of
    the rows, from SMALLEST_BATCH to LARGEST_BATCH.

    So an epoch of a small site has several steps. In one step momentum does nothing, as it begins
    anew with each round.
    """
    return min(max(num_rows // STEPS_OF_SMALL_SITES, SMALLEST_BATCH), LARGEST_BATCH)


@dataclass(frozen=True, slots=True)
class MlpWorkload:
    """Multi-layer perceptrons. The arrays of a Model are "hidden0.coef" (p, units),
    "hidden0.intercept" (units,), the same for each further layer, "output.coef" and
    "output.intercept"; its metadata hold "classes" as those of the workload "sgd" do."""

    options: MlpOptions = _DEFAULTS
    name: ClassVar[str] = "mlp"
    scaling: ClassVar[str] = "standard"
    missing: ClassVar[str] = "median"

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        """Raises ValueError that names an option that is unknown or wrong."""
        return cls(from_mapping(MlpOptions, options, workload=cls.name))

    def initial_model(
        self, profiles: Sequence[DataProfile], metadata: Mapping[str, str] | None = None
    ) -> Model:
        """Uniform weights drawn from the seed. Classification needs two classes in all profiles.

        Source: Glorot and Bengio 2010, with the factors of scikit-learn's _init_coef.
        """
        profile = union(profiles)
        classes = classes_to_learn(self.options.task, profile)
        layout = self._layout(profile.num_features, num_outputs(classes))
        chance = random_state(self.options.seed)
        factor = 2.0 if self.options.activation == "logistic" else 6.0
        arrays: dict[str, NDArray[Any]] = {}
        for coef, intercept in zip(layout[::2], layout[1::2], strict=True):
            bound = float(np.sqrt(factor / sum(coef.shape)))
            for spec in (coef, intercept):
                arrays[spec.name] = chance.uniform(-bound, bound, spec.shape)
        metadata = {
            "workload": self.name,
            "options": to_text(self.options, later=("engine",)),
            "classes": dumps(list(classes)),
        }
        return Model(flatten(arrays, layout), layout, metadata)

    def train(
        self, model: Model, data: Dataset, *, epochs: int, epoch_base: int, seed: int
    ) -> TrainResult:
        """See Workload.train. Metrics: as of measure(), after training."""
        require_training(epochs, epoch_base, seed)
        classes, layers = self._open(model)
        codes = coded_target(self.options.task, classes, data)
        require_width(len(layers[0][0]), data.features)
        scale = Scale() if classes else target_scale(model.metadata)
        target = codes if classes else (codes - scale.center) / scale.scale

        batch_size = self.options.batch_size or batch_rows(len(target))
        num_finite = self._engine(model.vector.size)(
            layers,
            data.features,
            target,
            batch_rows=min(batch_size, len(target)),
            seeds=[epoch_seed(seed, epoch_base + epoch) for epoch in range(epochs)],
        )
        if num_finite < epochs:
            raise self._diverged(epoch_base + num_finite)
        arrays = {
            spec.name: array
            for spec, array in zip(
                model.layout, [array for layer in layers for array in layer], strict=True
            )
        }
        with np.errstate(over="ignore"):  # beyond float32: infinite, and told below
            vector: Vector = flatten(arrays, model.layout)
        with np.errstate(over="ignore", invalid="ignore"):
            scores = self._scores(layers, data.features)
        is_finite = np.isfinite(vector).all() and np.abs(scores).max() < DIVERGED_SCORE
        if not is_finite:
            raise self._diverged(epoch_base + epochs - 1)
        return TrainResult(
            vector, data.num_samples, score_metrics(self.options.task, scores, codes, scale)
        )

    def measure(self, model: Model, data: Dataset) -> Measured:
        """Metrics on data: "accuracy" and "loss", or "r2" and "mse".

        loss: the mean cross-entropy, without the penalty. mse: in the unit of the target, squared.
        """
        classes, layers = self._open(model)
        target = coded_target(self.options.task, classes, data)
        require_width(len(layers[0][0]), data.features)
        scores = self._scores(layers, data.features)
        scale = Scale() if classes else target_scale(model.metadata)
        probabilities = softmax(scores) if classes else None
        return Measured(
            score_metrics(self.options.task, scores, target, scale),
            score_tallies(len(classes), scores, target, scale, probabilities),
        )

    def predict(self, model: Model, features: ArrayLike) -> NDArray[Any]:
        """See Workload.predict. Two scores that are equal go to the class that comes first."""
        classes, layers = self._open(model)
        scores = self._scores(layers, rows_to_predict(len(layers[0][0]), features))
        return predictions(scores, classes, model.metadata)

    def probabilities(self, model: Model, features: ArrayLike) -> Array | None:
        """See Workload.probabilities."""
        classes, layers = self._open(model)
        rows = rows_to_predict(len(layers[0][0]), features)
        return softmax(self._scores(layers, rows)) if classes else None

    def to_sklearn(self, model: Model) -> Any:
        """See Workload.to_sklearn: an MLPClassifier or MLPRegressor."""
        classes, layers = self._open(model)
        if not classes:  # the output is linear: predictions in the unit of the target
            scale = target_scale(model.metadata)
            coef, intercept = layers[-1]
            layers[-1] = coef * scale.scale, intercept * scale.scale + scale.center
        estimator = self._estimator(layers, self.options.batch_size or "auto")
        if classes:
            names = np.array(classes, dtype=np.str_)
            # The binarizer turns outputs into class names; it has no public way to rename them.
            estimator.classes_ = estimator._label_binarizer.classes_ = names
        return estimator

    def _layout(self, num_features: int, num_outputs: int) -> Layout:
        names = [f"hidden{i}" for i in range(len(self.options.hidden_layers))]
        widths = [num_features, *self.options.hidden_layers, num_outputs]
        specs: list[TensorSpec] = []
        for i, name in enumerate([*names, "output"]):
            specs.append(TensorSpec(f"{name}.coef", (widths[i], widths[i + 1]), self.options.dtype))
            specs.append(TensorSpec(f"{name}.intercept", (widths[i + 1],), self.options.dtype))
        return tuple(specs)

    def _open(self, model: Model) -> tuple[tuple[str, ...], list[tuple[Array, Array]]]:
        """(classes, (coef, intercept) of each layer) of a model; float64 copies, since training
        writes into them. Raises ValueError if the model is none of this workload."""
        classes = classes_of(self.options.task, model.metadata)
        first = model.layout[0].shape if model.layout else ()
        expected = self._layout(first[0] if first else 0, num_outputs(classes))
        found = {spec.name: spec.shape for spec in model.layout}
        if found != {spec.name: spec.shape for spec in expected}:
            raise ValueError(
                f"the model's arrays are {found}; expected"
                f" { {spec.name: spec.shape for spec in expected} }"
            )
        arrays = unflatten(model.vector, model.layout)
        copies = [np.array(arrays[spec.name], dtype=np.float64, order="C") for spec in expected]
        return classes, list(zip(copies[::2], copies[1::2], strict=True))

    def _engine(self, num_weights: int) -> Callable[..., int]:
        """The function that trains layers in place; see mlp_torch.train() for its arguments.

        Raises ModuleNotFoundError that says how to install PyTorch if the options need it.
        """
        engine = self.options.engine
        if engine == "auto" and num_weights >= NUM_WEIGHTS_FOR_TORCH and find_spec("torch"):
            engine = "torch"
        if engine == "torch":
            import_torch()  # with the number of threads that the process is to use
            from xain_workloads import mlp_torch

            return partial(mlp_torch.train, self.options)
        return self._train_by_sklearn

    def _train_by_sklearn(
        self,
        layers: list[tuple[Array, Array]],
        features: Array,
        target: NDArray[Any],
        *,
        batch_rows: int,
        seeds: Sequence[int],
    ) -> int:
        """See mlp_torch.train()."""
        estimator = self._estimator(layers, batch_rows)  # partial_fit() writes into the layers
        for num_finite, seed in enumerate(seeds):
            estimator.random_state = seed  # of the shuffle of partial_fit()
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    estimator.partial_fit(features, target)
            except ValueError as error:
                # The message names a weight that is not finite after the epoch.
                if "non-finite" not in str(error):
                    raise
                return num_finite
        return len(seeds)

    def _estimator(self, layers: list[tuple[Array, Array]], batch_size: int | str) -> Any:
        """An estimator in the state that partial_fit() would have left it in with these weights."""
        # Here, because a coordinator, which never trains, need not have it.
        from sklearn.neural_network import MLPClassifier, MLPRegressor

        options = self.options
        settings = {
            "hidden_layer_sizes": options.hidden_layers,
            "activation": options.activation,
            "solver": options.solver,
            "alpha": options.alpha,
            "batch_size": batch_size,
            "learning_rate_init": options.learning_rate_init,
            "momentum": options.momentum,
            "n_iter_no_change": np.inf,
            "random_state": 0,
        }
        # One row is fitted, for scikit-learn to set all that it keeps beside the weights; then the
        # weights are replaced, and the optimiser is dropped: the next fit makes a fresh one.
        row = np.zeros((1, len(layers[0][0])))
        estimator: Any
        if options.task == "classification":
            # Positions, not names: scikit-learn would sort names as text, "10" before "9".
            positions = np.arange(max(len(layers[-1][1]), 2))
            estimator = MLPClassifier(**{**settings, "batch_size": 1})
            estimator.partial_fit(row, positions[:1], classes=positions)
        else:
            estimator = MLPRegressor(**{**settings, "batch_size": 1})
            estimator.partial_fit(row, np.zeros(1))
        estimator.batch_size = batch_size
        estimator.coefs_ = [coef for coef, _ in layers]
        estimator.intercepts_ = [intercept for _, intercept in layers]
        del estimator._optimizer
        return estimator

    def _scores(self, layers: Sequence[tuple[Array, Array]], features: Array) -> Array:
        """(n, k) outputs before softmax or logistic function."""
        values = features
        for coef, intercept in layers[:-1]:
            values = _activated(self.options.activation, values @ coef + intercept)
        coef, intercept = layers[-1]
        return np.asarray(values @ coef + intercept)

    def _diverged(self, epoch: int) -> Diverged:
        return Diverged(
            f"training diverged in epoch {epoch + 1} with solver = {self.options.solver!r} and"
            f" learning_rate_init = {self.options.learning_rate_init:g}: lower"
            " learning_rate_init, or scale the data"
        )


def _activated(activation: str, values: Array) -> Array:
    match activation:
        case "relu":
            return np.maximum(values, 0.0)
        case "tanh":
            return np.tanh(values)
        case "logistic":
            with np.errstate(over="ignore"):
                return 1.0 / (1.0 + np.exp(-values))
    return values
