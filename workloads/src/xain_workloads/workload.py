"""Workloads: their interface, and a registry by name."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from importlib import import_module
from json import JSONDecodeError, dumps, loads
from typing import Any, Protocol, cast

from numpy.typing import ArrayLike, NDArray

from xain_workloads.class_weights import KEY as CLASS_WEIGHTS_KEY
from xain_workloads.class_weights import balanced
from xain_workloads.errors import DataError
from xain_workloads.measures.figures import metric_names
from xain_workloads.measures.thresholds import classes_at, threshold_of
from xain_workloads.model import GROUP, Model, Vector
from xain_workloads.remedies import SCAFFOLD
from xain_workloads.scaffold import with_control
from xain_workloads.supervised import Array, Measured
from xain_workloads.tables.checks.withholding import Shared, withhold
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import (
    CLIP,
    COLUMNS_KEY,
    KEY,
    PreprocessingOptions,
    fit,
    prepare,
    preprocessing_of,
)
from xain_workloads.tables.profile import DataProfile, sort_classes
from xain_workloads.tables.reading.statistics_json import from_json
from xain_workloads.tables.table import Table

DEFAULT_PREPROCESSING = PreprocessingOptions()
MAX_WEIGHTS = 100_000_000  # prepared features times classes, as of a coordinator's sessions


@dataclass(frozen=True, slots=True, eq=False)
class TrainResult:
    """The result of local training.

    vector: (d,), in the layout and dtype of the model that it started from.
    num_samples: rows it was trained on, n_k in McMahan et al. 2017.
    metrics: finite numbers by name, measured on the local data after training.
    kept: what stays at the participant and is not in the vector, such as fitted estimators.
    path: how far a constant gradient of 1 would have led; 0 if that is not known.
    """

    vector: Vector
    num_samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    kept: bytes = b""
    path: float = 0.0


class Workload(Protocol):
    """A kind of training. It keeps no state between calls: all that is learnt is in the Model."""

    @property
    def name(self) -> str:
        """Key of the workload in the registry, and in a model's metadata."""

    @property
    def scaling(self) -> str:
        """Default scaling of number columns; see PreprocessingOptions."""

    @property
    def missing(self) -> str:
        """Default treatment of missing numbers; see PreprocessingOptions."""

    def initial_model(
        self, profiles: Sequence[DataProfile], metadata: Mapping[str, str] | None = None
    ) -> Model:
        """The global model before the first round.

        profiles: with the number of prepared features. metadata: with the preprocessing, if there
        is one; all of a model that is made again, whose profiles have no statistics any more.

        Its metadata hold "workload" and "options", from which from_metadata() rebuilds this
        workload. Raises ValueError if the profiles do not fit together or do not suffice.
        """

    def train(
        self, model: Model, data: Dataset, *, epochs: int, epoch_base: int, seed: int
    ) -> TrainResult:
        """Train on local data, starting from a model, which stays as it is.

        epochs: passes over the data, 1 or more.
        epoch_base: passes that led to this model, 0 or more; rounds before this one times epochs.
        seed: 0 or more. The same inputs give the same vector, bit for bit.
        Raises DataError without rows, or if the data do not fit the model, and Diverged if the
        weights run away.
        """

    def measure(self, model: Model, data: Dataset) -> Measured:
        """Metrics and tallies of a model on data, by one prediction of the rows. Raises
        DataError as train() does."""

    def predict(self, model: Model, features: ArrayLike) -> NDArray[Any]:
        """Predict rows. features: (n, p) numbers.

        Returns (n,): class names for classification, float64 for regression.
        Raises DataError if the features do not fit the model.
        """

    def probabilities(self, model: Model, features: ArrayLike) -> Array | None:
        """Probability of each class for rows. features: (n, p) numbers.

        Returns (n, k) float64 in the order of metadata "classes", each row of sum 1; None for
        regression, and for a model that has no probabilities, such as one of hinge loss or of
        votes. Raises as predict() does.
        """

    def to_sklearn(self, model: Model) -> Any:
        """The model as a fitted estimator of scikit-learn, which predicts the same from prepared
        features."""


# Names of classes, which are imported when they are needed. A name that comes with a model from the
# network can reach these classes and nothing else.
_WORKLOADS = {
    "bagging": "xain_workloads.ensembles.bagging:BaggingWorkload",
    "describe": "xain_workloads.tables.checks.describing:DescribeWorkload",
    "glm": "xain_workloads.linear.glm.workload:GlmWorkload",
    "mlp": "xain_workloads.nets.mlp:MlpWorkload",
    "neural": "xain_workloads.nets.neural:NeuralWorkload",
    "sgd": "xain_workloads.linear.sgd:SgdWorkload",
    "xgboost": "xain_workloads.trees.boosting:BoostingWorkload",
}


def known_workloads() -> tuple[str, ...]:
    """Names that create() accepts, sorted."""
    return tuple(sorted(_WORKLOADS))


def create(name: str, options: Mapping[str, object] | None = None) -> Workload:
    """Build the workload of that name with these options. Raises ValueError that lists the known
    workloads, or that names the wrong option."""
    return cast(Workload, _class_of(name).from_options(options or {}))


def import_needed(name: str, options: Mapping[str, object] | None = None) -> None:
    """Import what training and measuring with a workload needs, so that its first round takes no
    longer than the next.

    Raises ValueError as create() does, and ImportError where a package is missing.
    """
    for module in getattr(create(name, options), "needed", ()):
        import_module(module)


def _class_of(name: str) -> Any:
    """Import the class of a workload by its name. Raises ValueError for an unknown name."""
    if name not in _WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(known_workloads())}")
    module, _, attribute = _WORKLOADS[name].partition(":")
    return getattr(import_module(module), attribute)


def from_metadata(metadata: Mapping[str, str]) -> Workload:
    """Rebuild the workload that made a model, from the model's metadata alone. Raises ValueError if
    "workload" or "options" is missing or wrong."""
    if "workload" not in metadata:
        raise ValueError("the model's metadata do not name its workload")
    try:
        options = loads(metadata.get("options", "{}"))
    except (JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the options in the model's metadata are not JSON: {error}") from error
    if not isinstance(options, dict):
        raise ValueError("the options in the model's metadata are not a JSON object")
    kind = _class_of(metadata["workload"])
    return cast(Workload, getattr(kind, "from_model", kind.from_options)(options))


def initial_model(
    workload: Workload,
    profiles: Sequence[DataProfile],
    options: PreprocessingOptions = DEFAULT_PREPROCESSING,
    made: Mapping[str, str] | None = None,
    min_sites: int = 1,
) -> Model:
    """The global model before the first round, with the preprocessing of all sites in its metadata,
    and the control variate that the remedy "scaffold" needs.

    made: metadata of the model, if it is made again. Then the profiles need no statistics.
    min_sites: that a figure in the metadata must be of.
    Without statistics of each site there is no preprocessing, and the workload makes the model for
    the columns as they are. Raises ValueError as Workload.initial_model does.
    """
    shared = Shared(profiles) if made else withhold(profiles, min_sites)
    model = _initial_model(workload, shared, options, made)
    return with_control(model) if uses_control(workload) else model


def uses_control(workload: Workload) -> bool:
    """Whether models of a workload have a control variate."""
    return getattr(getattr(workload, "options", None), "remedy", "") == SCAFFOLD


def _initial_model(
    workload: Workload,
    shared: Shared,
    options: PreprocessingOptions,
    made: Mapping[str, str] | None,
) -> Model:
    """The model that training begins with: preprocessing is fitted to the statistics of all sites,
    unless there is one already, and the workload makes its weights. Raises ValueError and
    DataError."""
    profiles = shared.profiles
    known = [profile for profile in profiles if profile.num_samples > 0]
    if not trains(workload):
        return workload.initial_model(known, made)
    weights = _class_weights(workload, known, made or {}, shared.classes)
    fitted = preprocessing_of(made or {})
    if fitted is None and not (known and all(profile.statistics for profile in known)):
        model = workload.initial_model(profiles, made)
        model = replace(model, metadata={**model.metadata, **weights})
        named = next((profile.columns for profile in known if profile.columns), ())
        if not named:
            return model
        names = dumps({"names": [column.name for column in named]})
        return replace(model, metadata={**model.metadata, COLUMNS_KEY: names})
    chosen = replace(
        options,
        scaling=options.scaling or workload.scaling,
        missing=options.missing or workload.missing,
        clip=getattr(workload, "clip", CLIP) if options.clip is None else options.clip,
    )
    preprocessing = fitted or fit(known, chosen).without_shares(shared.shares)
    width = preprocessing.num_features
    num_classes = len({name for profile in known for name in profile.classes})
    if width * max(num_classes, 1) > MAX_WEIGHTS:
        raise DataError(
            f"{width} prepared features times {num_classes} classes need a model of more than"
            f" {MAX_WEIGHTS} weights; drop columns, or raise min_category_count"
        )
    widened = [replace(profile, num_features=width) for profile in known]
    prepared = {KEY: preprocessing.to_json(), **weights}
    model = workload.initial_model(widened, made or prepared)
    # The name of the target is for users of the exported model.
    aim = {"target": known[0].target} if known[0].target else {}
    grouped = {GROUP: name} if (name := _group(known)) else {}
    return replace(model, metadata={**model.metadata, **aim, **grouped, **prepared})


def _group(profiles: Sequence[DataProfile]) -> str:
    """The column of groups of rows at the first site that declares one; "" without any."""
    may_declare = (one.statistics for one in profiles if '"group":' in one.statistics)
    return next(filter(None, (from_json(text).group for text in may_declare)), "")


def _class_weights(
    workload: Workload,
    profiles: Sequence[DataProfile],
    made: Mapping[str, str],
    withheld: Set[str],
) -> dict[str, str]:
    """The weights of classes for the metadata of a model; empty if all weigh alike.

    withheld: classes whose numbers of rows are not to be told.
    Raises DataError if a site has sent no statistics.
    """
    if not getattr(getattr(workload, "options", None), "class_weight", ""):
        return {}
    if CLASS_WEIGHTS_KEY in made:
        return {CLASS_WEIGHTS_KEY: made[CLASS_WEIGHTS_KEY]}
    classes = sort_classes(name for profile in profiles for name in profile.classes)
    return {CLASS_WEIGHTS_KEY: balanced(profiles, classes, withheld)}


def evaluate(model: Model, data: Table | Dataset) -> dict[str, float]:
    """Metrics of a model on rows as they are in a file. Raises as Workload.measure does."""
    return measure(model, data).metrics


def measure(model: Model, data: Table | Dataset) -> Measured:
    """Metrics and tallies of a model on rows as they are in a file. See Workload.measure."""
    return from_metadata(model.metadata).measure(model, prepare(model.metadata, data))


def predict(model: Model, data: Table | Dataset) -> NDArray[Any]:
    """Predictions for rows as they are in a file. Raises as Workload.predict does."""
    return predict_prepared(model, prepare(model.metadata, data).features)


def predict_prepared(model: Model, features: ArrayLike) -> NDArray[Any]:
    """Predictions for prepared rows, by the threshold of the model if it has one. Raises as
    Workload.predict does."""
    made, threshold = from_metadata(model.metadata), threshold_of(model.metadata)
    shares = None if threshold is None else made.probabilities(model, features)
    if threshold is None or shares is None or shares.shape[1] != 2:
        return made.predict(model, features)
    return classes_at(threshold, shares, loads(model.metadata["classes"]))


def probabilities(model: Model, data: Table | Dataset) -> Array | None:
    """Probability of each class for rows as they are in a file. See Workload.probabilities."""
    features = prepare(model.metadata, data).features
    return from_metadata(model.metadata).probabilities(model, features)


def trains(workload: Workload) -> bool:
    """Whether rounds of training follow on the initial model."""
    return bool(getattr(workload, "trains", True))


def metrics_of(workload: Workload) -> tuple[str, ...]:
    """Names of the metrics by which the models of a workload are measured."""
    options: Any = getattr(workload, "options", None)
    has_probabilities = getattr(options, "vote", "soft") != "hard" and getattr(
        options, "loss", "log_loss"
    ) in ("log_loss", "modified_huber")
    return metric_names(getattr(options, "task", ""), has_probabilities=has_probabilities)


def fit_centralised(workload: Workload, data: Table | Dataset, *, epochs: int, seed: int) -> Model:
    """Train on all data in one place: the baseline that federated training is measured against."""
    table = data if isinstance(data, Table) else Table.from_dataset(data)
    model = initial_model(workload, [table.profile()])
    prepared = prepare(model.metadata, table, to_train=True)
    if hasattr(workload, "fitted"):  # what it sends is no model
        fitted: Model = workload.fitted(model, prepared)
        return fitted
    result = workload.train(model, prepared, epochs=epochs, epoch_base=0, seed=seed)
    return replace(model, vector=result.vector)
