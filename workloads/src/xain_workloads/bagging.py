"""Bagging: estimators of scikit-learn that each participant fits on bootstraps of its own rows.

A participant fits `estimators` of them in a round and sends them alone. The coordinator appends the
estimators of all participants to the ensemble (see ensembles.appended), so more rounds make a
larger ensemble. With publish = false the participant keeps its estimators and sends their digest;
the ensemble is a list of them (see held.listed), and participants are asked for votes.
Source: Breiman 1996, "Bagging predictors".
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from json import dumps
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_workloads.bagging_options import ONE_CLASS, BaggingOptions, options_of_model
from xain_workloads.dataset import Dataset
from xain_workloads.ensembles import KEY, Frame, dump, load, num_features_of, pack, unpack
from xain_workloads.errors import DataError
from xain_workloads.held import WHY_NO_MODEL, Holding, digest_of, pack_holdings
from xain_workloads.model import Model
from xain_workloads.options import from_mapping
from xain_workloads.preprocessing import preprocessing_of
from xain_workloads.profile import DataProfile, union
from xain_workloads.supervised import (
    Array,
    Measured,
    classes_of,
    classes_to_learn,
    coded_target,
    cross_entropy,
    regression_metrics,
    require_training,
    require_width,
    rows_to_predict,
)
from xain_workloads.tallies import tally_classes, tally_numbers
from xain_workloads.unlike_rows import KEY as POINTS_KEY
from xain_workloads.unlike_rows import fit_points, points_of, with_unlike_rows
from xain_workloads.workload import TrainResult


@dataclass(frozen=True, slots=True)
class BaggingWorkload:
    """Bagged estimators. The vector of a Model is bytes (uint8) without a layout, as
    ensembles.pack() writes them, or held.pack_holdings() with publish = false; its metadata hold
    "classes", of which estimators know positions.

    needs_model: whether a training depends on the vector of the model before.
    """

    options: BaggingOptions
    needs_model: ClassVar[bool] = False
    name: ClassVar[str] = "bagging"
    scaling: ClassVar[str] = "standard"
    missing: ClassVar[str] = "median"

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        """Raises ValueError that names an option that is unknown or wrong."""
        return cls(from_mapping(BaggingOptions, options, workload=cls.name))

    def initial_model(
        self, profiles: Sequence[DataProfile], metadata: Mapping[str, str] | None = None
    ) -> Model:
        """An ensemble without estimators. Classification needs two classes in all profiles."""
        given = metadata or {}
        profile = union(profiles)
        made = {
            "workload": self.name,
            "options": dumps(asdict(self.options), sort_keys=True),
            "classes": dumps(list(classes_to_learn(self.options.task, profile))),
            KEY: dumps({"num_features": profile.num_features}),
        }
        preprocessing = preprocessing_of(given)
        if self.options.is_open and preprocessing is not None:
            known = [profile for profile in profiles if profile.num_samples > 0]
            made[POINTS_KEY] = given.get(POINTS_KEY) or fit_points(known, preprocessing)
        empty = pack([]) if self.options.publish else pack_holdings([])
        return Model(_vector(empty), (), made)

    def train(
        self, model: Model, data: Dataset, *, epochs: int, epoch_base: int, seed: int
    ) -> TrainResult:
        """See Workload.train. The vector holds the new estimators alone; with publish = false it
        names them, and they are in `kept`.

        model: its vector may be empty.
        seed: of the participant; see seed_of(). Bootstraps are drawn from it, from the seed in the
            options and from the estimator's number, `epoch_base` rounds having passed.
        Metrics: "oob_score" of the new estimators; see oob_score(). Left out if no row is out of
            a bootstrap.
        """
        require_training(epochs, epoch_base, seed)
        classes, num_features = self._open(model)
        target = coded_target(self.options.task, classes, data)
        rows = rows_to_predict(num_features, data.features)
        points = points_of(model.metadata, num_features) if self.options.is_open else None
        estimators, samples = [], []
        per_round = self.options.estimators
        for number in range(epoch_base * per_round, (epoch_base + epochs) * per_round):
            drawn = np.random.default_rng((self.options.seed, seed, number))
            samples.append(drawn.integers(0, len(rows), len(rows)))
            bootstrap = rows[samples[-1]], target[samples[-1]]
            if points is not None:
                bootstrap = with_unlike_rows(*bootstrap, len(classes), points, drawn)
            estimators.append(self._fitted(*bootstrap, drawn))
        frames = [Frame(data.num_samples, dump(estimator)) for estimator in estimators]
        score = oob_score(
            estimators, samples, rows, target, len(classes), is_open=self.options.is_open
        )
        metrics = {} if score is None else {"oob_score": score}
        fitted = pack(frames)
        if self.options.publish:
            return TrainResult(_vector(fitted), data.num_samples, metrics)
        named = pack_holdings([Holding(len(frames), digest_of(fitted))])
        return TrainResult(_vector(named), data.num_samples, metrics, fitted)

    def _fitted(self, rows: Array, target: NDArray[Any], drawn: np.random.Generator) -> Any:
        """Raises DataError if the estimator cannot be fitted on the rows."""
        state = int(drawn.integers(2**31))
        if self.options.task == "classification" and len(np.unique(target)) == 1:
            return self.options.estimator_class(ONE_CLASS)(strategy="prior").fit(rows, target)
        kind = self.options.estimator_class()
        estimator = kind(**self.options.parameters)
        if "random_state" in estimator.get_params():
            estimator.set_params(random_state=state)
        try:
            return estimator.fit(rows, target)
        except ValueError as error:
            raise DataError(f"{kind.__name__} cannot be fitted on these rows: {error}") from error

    def measure(self, model: Model, data: Dataset) -> Measured:
        """Metrics on data: "accuracy", and "loss" with vote = "soft", the mean cross-entropy; or
        "r2" and "mse"."""
        classes, num_features = self._open(model)
        target = coded_target(self.options.task, classes, data)
        require_width(num_features, data.features)
        voting = self._voting(model)
        if not classes:
            predicted = np.zeros(len(target)) if voting is None else voting.predict(data.features)
            return Measured(regression_metrics(predicted, target), tally_numbers(target, predicted))
        if self.options.vote == "hard" and voting is not None:
            position = {name: code for code, name in enumerate(classes)}
            codes = np.array([position[name] for name in voting.predict(data.features)])
            accuracy = {"accuracy": float(np.mean(codes == target))}
            return Measured(accuracy, tally_classes(len(classes), target, codes))
        if voting is None:
            probabilities = np.full((len(target), len(classes)), 1 / len(classes))
        else:
            probabilities = voting.predict_proba(data.features)
        codes = np.argmax(probabilities, axis=1)
        metrics = {
            "accuracy": float(np.mean(codes == target)),
            "loss": cross_entropy(probabilities[np.arange(len(target)), target]),
        }
        return Measured(metrics, tally_classes(len(classes), target, codes, probabilities))

    def predict(self, model: Model, features: ArrayLike) -> NDArray[Any]:
        """See Workload.predict. Raises ValueError if the ensemble has no estimators yet."""
        classes, num_features = self._open(model)
        rows = rows_to_predict(num_features, features)
        predicted = self.to_sklearn(model).predict(rows)
        return np.asarray(predicted, dtype=np.str_ if classes else np.float64)

    def probabilities(self, model: Model, features: ArrayLike) -> Array | None:
        """See Workload.probabilities: the weighted mean over the estimators with vote = "soft".

        Raises ValueError if the ensemble has no estimators yet.
        """
        classes, num_features = self._open(model)
        rows = rows_to_predict(num_features, features)
        voting = self.to_sklearn(model)
        if not classes or self.options.vote == "hard":
            return None
        return np.asarray(voting.predict_proba(rows), dtype=np.float64)

    def to_sklearn(self, model: Model) -> Any:
        """See Workload.to_sklearn: a VotingClassifier or VotingRegressor.

        Raises ValueError if the ensemble has no estimators yet.
        """
        voting = self._voting(model)
        if voting is None:
            raise ValueError("the ensemble has no estimators before the first round has ended")
        return voting

    def _open(self, model: Model) -> tuple[tuple[str, ...], int]:
        """Raises ValueError if the model is none of this workload."""
        if model.vector.dtype != np.uint8:
            raise ValueError(f"a model of {model.vector.dtype} is no ensemble, which is bytes")
        classes = classes_of(self.options.task, model.metadata)
        return classes, num_features_of(model.metadata)

    def _voting(self, model: Model) -> Any:
        """The fitted estimator of the whole ensemble; None if it has no estimators.

        Raises ValueError if the estimators stay at the participants.
        """
        classes, num_features = self._open(model)
        if not self.options.publish:
            raise ValueError(WHY_NO_MODEL)
        frames = unpack(model.vector.tobytes())
        if not frames:
            return None
        weights = [float(frame.weight) for frame in frames]
        if not any(weights):
            raise ValueError("all votes in the ensemble have the weight 0")
        members = [load(frame.file, self.options, num_features) for frame in frames]
        if classes:
            return _voting_classifier(members, weights, classes, num_features, self.options.vote)
        return _voting_regressor(members, weights)


class LoadedEstimators:
    """The estimators of one training, to vote by themselves.

    kept: packed frames; see TrainResult. metadata: of the model.
    Raises ValueError, InvalidEnsemble among them, if the frames do not fit the model.
    """

    def __init__(self, kept: bytes, metadata: Mapping[str, str]) -> None:
        self._options = options_of_model(metadata)
        self.num_classes = len(classes_of(self._options.task, metadata))
        self.num_features = num_features_of(metadata)
        members = [load(frame.file, self._options, self.num_features) for frame in unpack(kept)]
        # With one more for rows that are unlike those of the site.
        self._num_known = self.num_classes + (1 if self._options.is_open else 0)
        if self.num_classes:
            members = [_with_all_classes(m, self._num_known, self.num_features) for m in members]
        self._members = members

    def __len__(self) -> int:
        return len(self._members)

    def sum_of_votes(self, features: ArrayLike) -> Array:
        """(n, k) sums over the estimators: of probabilities with vote = "soft" and "open", of votes
        for a class with "hard", k classes; of predictions for regression, k = 1. With "open" the
        probabilities of a row add up to less than 1 where estimators abstain.

        features: (n, p), prepared as the model says. Raises DataError if they do not fit.
        """
        rows = rows_to_predict(self.num_features, features)
        votes = np.zeros((len(rows), max(self._num_known, 1)))
        for member in self._members:
            if not self.num_classes:
                votes[:, 0] += np.asarray(member.predict(rows), np.float64).reshape(-1)
            elif self._options.vote == "hard":
                votes[np.arange(len(rows)), member.predict(rows)] += 1
            else:
                votes += member.predict_proba(rows)
        return votes[:, : max(self.num_classes, 1)]


def seed_of(seed: int, participant_id: str) -> int:
    """The seed of a participant, so that participants with the same rows draw other bootstraps."""
    return int.from_bytes(sha256(f"{seed}/{participant_id}".encode()).digest()[:8], "big")


def oob_score(
    estimators: Sequence[Any],
    samples: Sequence[NDArray[np.intp]],
    rows: Array,
    target: NDArray[Any],
    num_classes: int,
    *,
    is_open: bool = False,
) -> float | None:
    """Out-of-bag score: each row is predicted by the estimators whose bootstraps lack it.

    is_open: the estimators know one more class, which does not count.
    Returns the accuracy, or r2 with num_classes = 0, as scikit-learn's BaggingClassifier and
    BaggingRegressor do. Rows that are in all bootstraps are left out; None if all are.
    """
    votes = np.zeros((len(rows), max(num_classes, 1) + is_open))
    count = np.zeros(len(rows), np.intp)
    for estimator, drawn in zip(estimators, samples, strict=True):
        out = np.ones(len(rows), np.bool_)
        out[drawn] = False
        if not out.any():
            continue
        count += out
        if not num_classes:
            votes[out, 0] += np.asarray(estimator.predict(rows[out]), np.float64).reshape(-1)
        elif hasattr(estimator, "predict_proba"):
            votes[np.ix_(out, estimator.classes_)] += estimator.predict_proba(rows[out])
        else:
            votes[np.flatnonzero(out), estimator.predict(rows[out])] += 1
    known = count > 0
    if not known.any():
        return None
    if num_classes:
        best = np.argmax(votes[known, :num_classes], axis=1)
        return float(np.mean(best == target[known]))
    return regression_metrics(votes[known, 0] / count[known], target[known])["r2"]


def _voting_classifier(
    members: Sequence[Any],
    weights: list[float],
    classes: tuple[str, ...],
    num_features: int,
    vote: str,
) -> Any:
    """A fitted VotingClassifier over all estimators.

    Raises ValueError if an estimator knows other classes.
    """
    from sklearn.ensemble import VotingClassifier
    from sklearn.preprocessing import LabelEncoder

    wrapped = [_with_all_classes(member, len(classes), num_features) for member in members]
    named = [(f"estimator{number}", bag) for number, bag in enumerate(wrapped)]
    voting = VotingClassifier(named, voting=vote, weights=weights)
    voting.estimators_ = wrapped
    voting.le_ = LabelEncoder()
    voting.le_.classes_ = np.array(classes, dtype=np.str_)
    voting.classes_ = voting.le_.classes_
    return voting


def _with_all_classes(member: Any, num_classes: int, num_features: int) -> Any:
    """The estimator in a BaggingClassifier of its own, which gives zeros to the classes that the
    estimator does not know.

    Raises ValueError if the estimator knows other classes.
    """
    from sklearn.ensemble import BaggingClassifier

    positions = np.arange(num_classes)
    known = np.asarray(getattr(member, "classes_", ()))
    if known.ndim != 1 or known.dtype.kind != "i" or not np.isin(known, positions).all():
        raise ValueError(f"an estimator of the ensemble has the classes {known}")
    bag = BaggingClassifier(member, n_estimators=1)
    bag.estimators_ = [member]
    bag.estimators_features_ = [np.arange(num_features)]
    bag.classes_ = positions
    bag.n_classes_ = num_classes
    bag.n_features_in_ = num_features
    return bag


def _voting_regressor(members: Sequence[Any], weights: list[float]) -> Any:
    from sklearn.ensemble import VotingRegressor

    named = [(f"estimator{number}", member) for number, member in enumerate(members)]
    voting = VotingRegressor(named, weights=weights)
    voting.estimators_ = list(members)
    return voting


def _vector(data: bytes) -> Any:
    return np.frombuffer(data, dtype=np.uint8)
