"""Neural networks by PyTorch: a list of layers, or any module that a builder makes.

The output is a score for each class, with the softmax in the loss, or one number for regression. A
participant trains all outputs of the global model, also those of classes that it has never seen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json import JSONDecodeError, dumps, loads
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_workloads.class_weights import row_weights
from xain_workloads.errors import DataError, Diverged
from xain_workloads.linear.minibatch import batch_rows, path_of
from xain_workloads.model import Model, TensorSpec, flatten, unflatten
from xain_workloads.nets.mlp import MlpWorkload
from xain_workloads.nets.mlp_options import MlpOptions
from xain_workloads.nets.neural_layers import initial_tensors, layout_of_layers, plan
from xain_workloads.nets.neural_modules import (
    Network,
    corrector_of,
    gradient_of,
    layout_of,
    loss_of,
    make_module,
    open_network,
    optimizer_of,
    seeded,
    vector_of,
)
from xain_workloads.nets.neural_options import NeuralOptions
from xain_workloads.options import from_mapping, to_text
from xain_workloads.remedies import OPTIONS as REMEDY
from xain_workloads.scaffold import without_control
from xain_workloads.supervised import (
    DIVERGED_SCORE,
    Array,
    Measured,
    classes_of,
    classes_to_learn,
    coded_target,
    predictions,
    require_training,
    require_width,
    rows_to_predict,
    score_metrics,
    score_tallies,
    softmax,
)
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import target_scale
from xain_workloads.tables.profile import DataProfile, union
from xain_workloads.tables.reading.scales import Scale
from xain_workloads.time_limit import check_time
from xain_workloads.workload import TrainResult

KEY = "neural"  # in the metadata of a model


@dataclass(frozen=True, slots=True)
class NeuralWorkload:
    """Neural networks. The tensors of a Model have torch's own names, in the order of
    state_dict(); its metadata hold "classes" as those of the workload "sgd" do, and under KEY the
    number of prepared features."""

    options: NeuralOptions
    name: ClassVar[str] = "neural"
    scaling: ClassVar[str] = "standard"
    missing: ClassVar[str] = "median"
    # The second is what PyTorch's optimisers import at their first step.
    needed: ClassVar[tuple[str, ...]] = ("torch", "torch._dynamo")

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        """The workload with these options. Raises ValueError that names an option that is unknown
        or wrong."""
        return cls(from_mapping(NeuralOptions, options, workload=cls.name))

    @property
    def personal(self) -> tuple[str, ...]:
        """Patterns of the tensors of the last layer, which the remedy "personal" keeps at sites."""
        linear = [i for i, layer in enumerate(self.options.layers) if layer["type"] == "linear"]
        return (f"{linear[-1]}.*",) if linear else ()

    def initial_model(
        self, profiles: Sequence[DataProfile], metadata: Mapping[str, str] | None = None
    ) -> Model:
        """Weights drawn from the seed: by numpy for a list of layers, by the builder's own code,
        which needs torch, for a builder. Classification needs two classes in all profiles.

        Raises DataError if the network does not fit the data, or the builder cannot be used.
        """
        profile = union(profiles)
        classes = classes_to_learn(self.options.task, profile)
        width, outputs = profile.num_features, max(len(classes), 1)
        if self.options.builder:
            try:
                module = make_module(self.options, width, outputs)
            except ModuleNotFoundError as missing:
                raise DataError(f"the coordinator calls the builder, and {missing}") from missing
            layout = layout_of(module, self.options.dtype)
            vector = vector_of(module, layout)
        else:
            layers = plan(self.options.layers, width, outputs)
            layout = layout_of_layers(layers, self.options.dtype)
            vector = flatten(initial_tensors(layers, self.options.seed), layout)
        made = {
            "workload": self.name,
            "options": to_text(self.options, later=("class_weight", *REMEDY)),
            "classes": dumps(list(classes)),
            KEY: dumps({"num_features": width}),
        }
        return Model(vector, layout, made)

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
        none. On a GPU the same inputs may give slightly different vectors.

        In mode "gradient" the vector is the gradient at the model, and the metrics are those of the
        model before the step, on the rows of the step; "objective" is the loss with the penalty of
        weight_decay.
        """
        require_training(epochs, epoch_base, seed)
        codes, target, scale = self.targets_of(model, data)
        weights = self.row_weights(model, codes)
        network = self.network(model)
        try:
            if self.options.mode == "gradient":
                return self._gradient(
                    network, model, data.features, (codes, target), scale, (seed, epoch_base)
                )
            num_steps = self._train_epochs(
                network,
                data.features,
                (target, weights),
                corrector_of(network.module, model.layout, self.options, correction),
                [(seed, epoch) for epoch in range(epoch_base, epoch_base + epochs)],
            )
        except ValueError as error:
            # torch's message for a batch normalisation that is given one row.
            if "Expected more than 1 value per channel" not in str(error):
                raise
            raise DataError("batch normalisation needs two rows or more to train on") from error
        vector = vector_of(network.module, model.layout)
        scores = network.scores(data.features)
        if not (np.isfinite(vector).all() and np.abs(scores).max() < DIVERGED_SCORE):
            raise Diverged(
                f"training diverged in epochs {epoch_base + 1} to {epoch_base + epochs} with"
                f" learning_rate = {self.options.learning_rate:g}: lower learning_rate, or scale"
                " the data"
            )
        sizes = [self.options.learning_rate] * num_steps
        path = path_of(self.options.momentum, sizes, is_nesterov=False)
        metrics = self.metrics_of(scores, codes, scale)
        return TrainResult(vector, data.num_samples, metrics, path=path)

    def _train_epochs(
        self,
        network: Network,
        features: Array,
        target_and_weights: tuple[NDArray[Any], Array | None],
        correct: Callable[[], None],
        seeds: Sequence[tuple[int, int]],
    ) -> int:
        """Train the network on the rows in orders drawn from the seeds. Returns the number of
        steps.

        correct: called between the gradient and the step.
        """
        target, weights = target_and_weights
        optimizer = optimizer_of(network.module, self.options)
        inputs, targets = network.inputs(features), network.targets(target)
        of_rows = None if weights is None else network.targets(weights)
        network.module.train()
        num_steps = 0
        for seed in seeds:
            batches, torch_seed = self.batches(len(target), seed)
            num_steps += len(batches)
            with seeded(torch_seed):
                for rows in batches:
                    optimizer.zero_grad()
                    known = None if of_rows is None else of_rows[rows]
                    loss_of(network.outputs(inputs[rows]), targets[rows], known).backward()
                    correct()
                    optimizer.step()
                    check_time()
        return num_steps

    def batches(self, num_rows: int, seed: tuple[int, int]) -> tuple[list[NDArray[np.intp]], int]:
        """Draw the rows of each step of an epoch, in nearly equal batches, and torch's seed."""
        drawn = np.random.default_rng(seed)
        order = drawn.permutation(num_rows)
        size = self.options.batch_size or batch_rows(num_rows)
        return np.array_split(order, -(-num_rows // size)), int(drawn.integers(2**63))

    def targets_of(self, model: Model, data: Dataset) -> tuple[NDArray[Any], NDArray[Any], Scale]:
        """(n,) coded targets, (n,) targets to train on, which are scaled, and their scale. Raises
        DataError if the data do not fit the model."""
        classes, width = self._read_metadata(model)
        codes = coded_target(self.options.task, classes, data)
        require_width(width, data.features)
        scale = Scale() if classes else target_scale(model.metadata)
        return codes, codes if classes else (codes - scale.center) / scale.scale, scale

    def row_weights(self, model: Model, codes: NDArray[Any]) -> Array | None:
        """(n,) weights of the rows in the loss; None if all weigh alike. codes: (n,), as
        targets_of() gives them."""
        classes, _ = self._read_metadata(model)
        return row_weights(model.metadata, len(classes), codes)

    def _gradient(
        self,
        network: Network,
        model: Model,
        features: Array,
        codes_and_target: tuple[NDArray[Any], NDArray[Any]],
        scale: Scale,
        seed: tuple[int, int],
    ) -> TrainResult:
        """The gradient of the mean loss over the rows of this step, and of the penalty.

        codes_and_target: (n,) each; the target is scaled.
        """
        codes, target = codes_and_target
        weighed = self.row_weights(model, codes)
        drawn = np.random.default_rng(seed)
        rows: Any = slice(None)
        if 0 < self.options.batch_size < len(target):
            rows = drawn.choice(len(target), self.options.batch_size, replace=False)
        network.module.train()
        with seeded(int(drawn.integers(2**63))):
            outputs = network.outputs(network.inputs(features[rows]))
            of_rows = None if weighed is None else network.targets(weighed[rows])
            objective = loss_of(outputs, network.targets(target[rows]), of_rows)
            if self.options.weight_decay:
                weights = [weight for weight in network.module.parameters() if weight.requires_grad]
                squares = sum(weight.square().sum() for weight in weights)
                objective = objective + self.options.weight_decay / 2 * squares
            objective.backward()
        vector = gradient_of(network.module, model.layout)
        scores = outputs.detach().cpu().double().numpy()
        if not (np.isfinite(vector).all() and np.isfinite(scores).all()):
            raise Diverged(
                "the gradient is not finite: lower aggregation.options.eta0, or scale the data"
            )
        metrics = self.metrics_of(scores, codes[rows], scale)
        metrics["objective"] = float(objective.detach())
        return TrainResult(vector, len(target), metrics)

    def measure(self, model: Model, data: Dataset) -> Measured:
        """Metrics on data: "accuracy" and "loss", or "r2" and "mse".

        loss: the mean cross-entropy, without a penalty. mse: in the unit of the target, squared.
        """
        classes, width = self._read_metadata(model)
        target = coded_target(self.options.task, classes, data)
        require_width(width, data.features)
        scale = Scale() if classes else target_scale(model.metadata)
        scores = self.network(model).scores(data.features)
        probabilities = softmax(scores) if classes else None
        return Measured(
            self.metrics_of(scores, target, scale),
            score_tallies(len(classes), scores, target, scale, probabilities),
        )

    def predict(self, model: Model, features: ArrayLike) -> NDArray[Any]:
        """Predict class names or numbers, (n,). Of equal scores the class that comes first wins."""
        classes, width = self._read_metadata(model)
        scores = self.network(model).scores(rows_to_predict(width, features))
        return predictions(scores, classes, model.metadata)

    def probabilities(self, model: Model, features: ArrayLike) -> Array | None:
        """(n, k) probabilities of the classes; None for regression."""
        classes, width = self._read_metadata(model)
        rows = rows_to_predict(width, features)
        return softmax(self.network(model).scores(rows)) if classes else None

    def to_sklearn(self, model: Model) -> Any:
        """Convert a list of linear layers, with one kind of activation between them, to an
        MLPClassifier or MLPRegressor. Raises ValueError for other networks, which scikit-learn does
        not have."""
        classes, _ = self._read_metadata(model)
        activation = self._perceptron()
        if not activation:
            raise ValueError(
                "scikit-learn has no estimator for this network; export its tensors to"
                " .safetensors, and load them into the torch module with load_state_dict()"
            )
        model = without_control(model)
        tensors = unflatten(model.vector.astype(np.float64), model.layout)
        numbers = range(0, len(self.options.layers), 2)
        layers = []
        for number in numbers:
            coef = tensors[f"{number}.weight"].T
            layers.append((coef, tensors.get(f"{number}.bias", np.zeros(coef.shape[1]))))
        if len(classes) == 2:  # one logistic unit in the place of a softmax of two scores
            coef, intercept = layers[-1]
            layers[-1] = coef[:, 1:] - coef[:, :1], intercept[1:] - intercept[:1]
        names = [f"hidden{i}" for i in range(len(layers) - 1)]
        arrays = {
            f"{name}.{part}": values
            for name, pair in zip([*names, "output"], layers, strict=True)
            for part, values in zip(("coef", "intercept"), pair, strict=True)
        }
        units = tuple(coef.shape[1] for coef, _ in layers[:-1])
        like = MlpOptions(task=self.options.task, hidden_layers=units, activation=activation)
        layout = tuple(TensorSpec(name, values.shape, "float64") for name, values in arrays.items())
        same = Model(flatten(arrays, layout), layout, model.metadata)
        return MlpWorkload(like).to_sklearn(same)

    def network(self, model: Model) -> Network:
        """The network with the weights of a model. Raises as open_network() does."""
        classes, width = self._read_metadata(model)
        return open_network(self.options, without_control(model), width, max(len(classes), 1))

    def _read_metadata(self, model: Model) -> tuple[tuple[str, ...], int]:
        """Read (classes, number of features) of a model. Raises ValueError without them."""
        classes = classes_of(self.options.task, model.metadata)
        try:
            width = loads(model.metadata.get(KEY, "{}")).get("num_features")
        except (JSONDecodeError, AttributeError):
            width = None
        if type(width) is not int or width < 1:
            raise ValueError("the model's metadata do not have the number of features")
        return classes, width

    def _perceptron(self) -> str:
        """The activation, in scikit-learn's words, of a network that is a multi-layer perceptron
        with hidden layers; "" if it is none."""
        types = [layer["type"] for layer in self.options.layers]
        between = {*types[1::2]}
        if len(types) < 3 or {*types[::2]} != {"linear"} or len(types) % 2 == 0:
            return ""
        named = {"relu": "relu", "tanh": "tanh", "sigmoid": "logistic"}
        return named.get(between.pop(), "") if len(between) == 1 else ""

    def metrics_of(self, scores: Array, target: NDArray[Any], scale: Scale) -> dict[str, float]:
        """scores: (n, k). target: (n,), as coded_target() gives it."""
        return score_metrics(self.options.task, scores, target, scale)
