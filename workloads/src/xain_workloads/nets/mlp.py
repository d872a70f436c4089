"""Multi-layer perceptrons: the networks and steps of scikit-learn's MLPClassifier and MLPRegressor.

The output is softmax for more than two classes, one logistic unit for two, and linear for
regression. A participant trains all outputs of the global model, also those of classes that it has
never seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_workloads.chance import random_state
from xain_workloads.class_weights import row_weights
from xain_workloads.errors import Diverged
from xain_workloads.linear.minibatch import (
    Gradient,
    Layer,
    LayersOf,
    Loss,
    Penalty,
    Steps,
    batch_rows,
    gradient_of,
    scores,
    train_epochs,
)
from xain_workloads.measures.losses import binomial_loss, multinomial_loss, squared_loss
from xain_workloads.model import Layout, Model, TensorSpec, Vector, flatten
from xain_workloads.nets.mlp_options import MlpOptions
from xain_workloads.options import from_mapping, to_text
from xain_workloads.remedies import OPTIONS as REMEDY
from xain_workloads.remedies import corrected_by
from xain_workloads.scaffold import without_control
from xain_workloads.supervised import (
    Array,
    Measured,
    classes_of,
    classes_to_learn,
    coded_target,
    num_outputs,
    predictions,
    require_training,
    require_width,
    rows_of_gradient,
    rows_to_predict,
    score_metrics,
    score_tallies,
    softmax,
)
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import target_scale
from xain_workloads.tables.profile import DataProfile, union
from xain_workloads.tables.reading.scales import Scale
from xain_workloads.workload import TrainResult

_DEFAULTS = MlpOptions()


@dataclass(frozen=True, slots=True)
class MlpWorkload:
    """Multi-layer perceptrons. The arrays of a Model are "hidden0.coef" (p, units),
    "hidden0.intercept" (units,), the same for each further layer, "output.coef" and
    "output.intercept"; its metadata hold "classes" as those of the workload "sgd" do."""

    options: MlpOptions = _DEFAULTS
    name: ClassVar[str] = "mlp"
    personal: ClassVar[tuple[str, ...]] = ("output.*",)  # with the remedy "personal"
    scaling: ClassVar[str] = "standard"
    missing: ClassVar[str] = "median"

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        """The workload with these options. Raises ValueError that names an option that is unknown
        or wrong."""
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
            "options": to_text(self.options, later=("mode", "class_weight", *REMEDY)),
            "classes": dumps(list(classes)),
        }
        return Model(flatten(arrays, layout), layout, metadata)

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
        model before the step, on the rows of the step; "objective" is the loss with the penalty.
        """
        require_training(epochs, epoch_base, seed)
        options = self.options
        classes, vector, layers_of = self._open(model)
        codes = coded_target(self.options.task, classes, data)
        require_width(len(layers_of(vector)[0].coef), data.features)
        scale = Scale() if classes else target_scale(model.metadata)
        target = codes if classes else (codes - scale.center) / scale.scale

        steps = self._steps(len(classes), len(target))
        weights = row_weights(model.metadata, len(classes), codes)
        if options.mode == "gradient":
            rows = rows_of_gradient(options.batch_size, len(target), (seed, epoch_base))
            found = gradient_of(
                steps,
                vector,
                layers_of,
                data.features[rows],
                target[rows],
                decay=options.alpha,
                weights=None if weights is None else weights[rows],
            )
            metrics = score_metrics(options.task, found.scores, codes[rows], scale)
            return self._gradient(found, layers_of(vector), data.num_samples, metrics)
        corrected = corrected_by(vector, options.remedy, options.proximal_mu, correction)
        trained, outputs, path = train_epochs(
            steps,
            vector,
            layers_of,
            data.features,
            target,
            epochs=range(epoch_base, epoch_base + epochs),
            seed=seed,
            dtype=options.dtype,
            diverged=self._diverged,
            weights=weights,
            corrected=corrected,
        )
        metrics = score_metrics(options.task, outputs, codes, scale)
        return TrainResult(trained, data.num_samples, metrics, path=path)

    def _gradient(
        self, found: Gradient, layers: Sequence[Layer], num_rows: int, metrics: dict[str, float]
    ) -> TrainResult:
        """Make the result of mode "gradient", and add "objective". Raises Diverged. metrics: of the
        rows of the step, at the model with these layers."""
        vector: Vector = found.vector.astype(self.options.dtype)
        if not (np.isfinite(vector).all() and np.isfinite(found.scores).all()):
            raise Diverged(
                "the gradient is not finite: lower aggregation.options.eta0, or scale the data"
            )
        squares = sum(float(np.square(coef).sum()) for coef, _ in layers)
        metrics["objective"] = found.loss + self.options.alpha / 2 * squares
        return TrainResult(vector, num_rows, metrics)

    def measure(self, model: Model, data: Dataset) -> Measured:
        """Metrics on data: "accuracy" and "loss", or "r2" and "mse".

        loss: the mean cross-entropy, without the penalty. mse: in the unit of the target, squared.
        """
        classes, layers = self._layers(model)
        target = coded_target(self.options.task, classes, data)
        require_width(len(layers[0].coef), data.features)
        outputs = self._scores(layers, data.features)
        scale = Scale() if classes else target_scale(model.metadata)
        probabilities = softmax(outputs) if classes else None
        return Measured(
            score_metrics(self.options.task, outputs, target, scale),
            score_tallies(len(classes), outputs, target, scale, probabilities),
        )

    def predict(self, model: Model, features: ArrayLike) -> NDArray[Any]:
        """Predict class names or numbers, (n,). Of equal scores the class that comes first wins."""
        classes, layers = self._layers(model)
        outputs = self._scores(layers, rows_to_predict(len(layers[0].coef), features))
        return predictions(outputs, classes, model.metadata)

    def probabilities(self, model: Model, features: ArrayLike) -> Array | None:
        """(n, k) probabilities of the classes; None for regression."""
        classes, layers = self._layers(model)
        rows = rows_to_predict(len(layers[0].coef), features)
        return softmax(self._scores(layers, rows)) if classes else None

    def to_sklearn(self, model: Model) -> Any:
        """Convert a model to an MLPClassifier or MLPRegressor."""
        classes, layers = self._layers(model)
        if not classes:  # the output is linear: predictions in the unit of the target
            scale = target_scale(model.metadata)
            coef, intercept = layers[-1]
            layers[-1] = Layer(coef * scale.scale, intercept * scale.scale + scale.center)
        estimator = self._estimator(layers)
        if classes:
            names = np.array(classes, dtype=np.str_)
            # The binarizer turns outputs into class names; it has no public way to rename them.
            estimator.classes_ = estimator._label_binarizer.classes_ = names
        return estimator

    def _layout(self, num_features: int, num_outputs: int) -> Layout:
        """Name, shape and dtype of coef and intercept of each layer, the output layer last."""
        names = [f"hidden{i}" for i in range(len(self.options.hidden_layers))]
        widths = [num_features, *self.options.hidden_layers, num_outputs]
        specs: list[TensorSpec] = []
        for i, name in enumerate([*names, "output"]):
            specs.append(TensorSpec(f"{name}.coef", (widths[i], widths[i + 1]), self.options.dtype))
            specs.append(TensorSpec(f"{name}.intercept", (widths[i + 1],), self.options.dtype))
        return tuple(specs)

    def _open(self, model: Model) -> tuple[tuple[str, ...], Array, LayersOf]:
        """(classes, weights, layers) of a model; a float64 copy, since training writes into it.
        Raises ValueError if the model is none of this workload."""
        model = without_control(model)
        classes = classes_of(self.options.task, model.metadata)
        first = model.layout[0].shape if model.layout else ()
        expected = self._layout(first[0] if first else 0, num_outputs(classes))
        found, wanted = (
            {spec.name: spec.shape for spec in layout} for layout in (model.layout, expected)
        )
        if list(found.items()) != list(wanted.items()):
            raise ValueError(f"the model's arrays are {found}; expected {wanted}")
        shapes = [spec.shape for spec in expected[::2]]

        def layers_of(vector: Array) -> list[Layer]:
            layers, start = [], 0
            for inputs, outputs in shapes:
                middle, end = start + inputs * outputs, start + (inputs + 1) * outputs
                coef = vector[start:middle].reshape(inputs, outputs)
                layers.append(Layer(coef, vector[middle:end]))
                start = end
            return layers

        return classes, np.array(model.vector, dtype=np.float64), layers_of

    def _layers(self, model: Model) -> tuple[tuple[str, ...], list[Layer]]:
        classes, vector, layers_of = self._open(model)
        return classes, list(layers_of(vector))

    def _steps(self, num_classes: int, num_rows: int) -> Steps:
        """Choose loss, step size, rows, solver and penalty of a step by the options."""
        options = self.options
        return Steps(
            loss=_loss(num_classes),
            step_size=lambda number, rows: options.learning_rate_init,
            batch_rows=options.batch_size or batch_rows(num_rows),
            activation=options.activation,
            solver=options.solver,
            momentum=options.momentum,
            penalty=Penalty(options.alpha, is_divided=True),
        )

    def _estimator(self, layers: Sequence[Layer]) -> Any:
        """A fitted estimator of scikit-learn with these weights."""
        # Here, because a coordinator, which never trains, need not have it.
        from sklearn.neural_network import MLPClassifier, MLPRegressor

        options = self.options
        settings = {
            "hidden_layer_sizes": options.hidden_layers,
            "activation": options.activation,
            "solver": options.solver,
            "alpha": options.alpha,
            "batch_size": 1,
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
            estimator = MLPClassifier(**settings)
            estimator.partial_fit(row, positions[:1], classes=positions)
        else:
            estimator = MLPRegressor(**settings)
            estimator.partial_fit(row, np.zeros(1))
        estimator.batch_size = options.batch_size or "auto"
        estimator.coefs_ = [coef for coef, _ in layers]
        estimator.intercepts_ = [intercept for _, intercept in layers]
        del estimator._optimizer
        return estimator

    def _scores(self, layers: Sequence[Layer], features: Array) -> Array:
        """(n, k) outputs before softmax or logistic function."""
        return scores(self.options.activation, layers, features)

    def _diverged(self, epoch: int) -> Diverged:
        """The error of a training whose weights ran away in this epoch, with what to change."""
        return Diverged(
            f"training diverged in epoch {epoch + 1} with solver = {self.options.solver!r} and"
            f" learning_rate_init = {self.options.learning_rate_init:g}: lower"
            " learning_rate_init, or scale the data"
        )


def _loss(num_classes: int) -> Loss:
    """The loss that training minimises; no classes: regression."""
    if not num_classes:
        return squared_loss
    return multinomial_loss if num_classes > 2 else binomial_loss
