"""Bagging: estimators of scikit-learn that each participant fits on bootstraps of its own rows.

A participant fits `estimators` of them in a round and sends them alone. The coordinator appends the
estimators of all participants to the ensemble, so more rounds make a larger ensemble. With vote =
"stacked" the rounds after the first ones train a linear model of the votes and the columns, over
the rows of all participants (see stacking.py). With publish = false the participant keeps its
estimators and sends their digest; the ensemble is a list of them (see held.py), and participants
are asked for votes.
Source: Breiman 1996, "Bagging predictors".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from json import dumps
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_foundation.logs.logger import get_logger
from xain_workloads.class_weights import class_weights, row_weights
from xain_workloads.ensembles.bagging_options import ONE_CLASS, BaggingOptions, options_of_model
from xain_workloads.ensembles.ensembles import (
    KEY,
    Frame,
    load,
    num_features_of,
    pack,
    unpack,
)
from xain_workloads.ensembles.estimators import described
from xain_workloads.ensembles.estimators.allowed import class_of
from xain_workloads.ensembles.estimators.files import dump
from xain_workloads.ensembles.held import WHY_NO_MODEL, Holding, digest_of, pack_holdings
from xain_workloads.ensembles.stacking import Shape, Stack, features_of, pack_sums, scores_of
from xain_workloads.ensembles.voting import (
    stacking_classifier,
    stacking_regressor,
    voting_classifier,
    voting_regressor,
    with_all_classes,
)
from xain_workloads.errors import DataError
from xain_workloads.linear.glm.families import sums
from xain_workloads.measures.tallies import tally_classes, tally_numbers
from xain_workloads.model import Model
from xain_workloads.options import from_mapping, to_text
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
    softmax,
)
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import target_scale
from xain_workloads.tables.profile import DataProfile, union
from xain_workloads.time_limit import check_time
from xain_workloads.workload import TrainResult

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BaggingWorkload:
    """Bagged estimators. The vector of a Model is bytes (uint8) without a layout, as
    stacking.Stack.to_bytes() writes them; its metadata hold "classes", of which estimators know
    positions."""

    options: BaggingOptions
    name: ClassVar[str] = "bagging"
    scaling: ClassVar[str] = "standard"
    missing: ClassVar[str] = "median"
    # Modules of the vote, and of a bootstrap with one class; the options import the estimator.
    needed: ClassVar[tuple[str, ...]] = (
        "sklearn.compose",
        "sklearn.dummy",
        "sklearn.ensemble",
        "sklearn.linear_model",
    )

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        """The workload with these options. Raises ValueError that names an option that is unknown
        or wrong."""
        return cls(from_mapping(BaggingOptions, options, workload=cls.name))

    @property
    def needs_model(self) -> bool:
        """Whether a training depends on the vector of the model before."""
        return self.options.is_stacked

    def initial_model(
        self, profiles: Sequence[DataProfile], metadata: Mapping[str, str] | None = None
    ) -> Model:
        """An ensemble without estimators. Classification needs two classes in all profiles."""
        profile = union(profiles)
        num_classes = len(profile.classes)
        if num_classes > 2 and (name := described.of_two_classes(self.options.description)):
            raise DataError(f"{name} is made for two classes, and there are {num_classes}")
        made = {
            "workload": self.name,
            "options": to_text(self.options, later=("class_weight",)),
            "classes": dumps(list(classes_to_learn(self.options.task, profile))),
            KEY: dumps({"num_features": profile.num_features}),
        }
        return Model(_vector(Stack().to_bytes(is_held=not self.options.publish)), (), made)

    def train(
        self, model: Model, data: Dataset, *, epochs: int, epoch_base: int, seed: int
    ) -> TrainResult:
        """Fit estimators on bootstraps of the local rows; see Workload.train. The vector holds the
        new estimators alone; with publish = false it names them, and they are in `kept`. In a round
        that trains the linear model of stacked votes, it has sums; see stacking.pack_sums().

        model: its vector may be empty but for stacked votes.
        seed: of the participant; see seed_of(). Bootstraps are drawn from it, from the seed in the
            options and from the estimator's number, `epoch_base` rounds having passed.
        Metrics: "oob_score" of the new estimators; see oob_score(). Left out if no row is out of
            a bootstrap. In a round that trains the linear model, of the model that was given, from
            its second step on.
        """
        require_training(epochs, epoch_base, seed)
        classes, num_features = self._open(model)
        target = coded_target(self.options.task, classes, data)
        rows = rows_to_predict(num_features, data.features)
        if self.options.is_stacked and len(model.vector):
            stack = Stack.parse(model.vector.tobytes())
            if (shape := stack.due(model.metadata)) is not None:
                return self._sums(stack, shape, model.metadata, data, target, seed)
        weights = class_weights(model.metadata, len(classes))
        estimators, samples, frames = [], [], []
        per_round = self.options.estimators
        if self.options.publish and (holders := self.options.rows_held_by()):
            log.warning(
                "rows_are_published",
                estimators=holders,
                hint="the coordinator and all participants get rows of this site, which these "
                "estimators hold; publish = false leaves them here",
            )
        for number in range(epoch_base * per_round, (epoch_base + epochs) * per_round):
            drawn, sample = self._bootstrap(seed, number, data)
            samples.append(sample)
            estimators.append(self._fitted(data, rows[sample], target[sample], drawn, weights))
            file = dump(estimators[-1])
            frames.append(Frame(data.num_samples, file, owner_of(seed), number))
            check_time()
        score = oob_score(estimators, samples, rows, target, len(classes))
        metrics = {} if score is None else {"oob_score": score}
        fitted = pack(frames)
        if self.options.publish:
            return TrainResult(_vector(fitted), data.num_samples, metrics)
        named = pack_holdings([Holding(len(frames), digest_of(fitted))])
        return TrainResult(_vector(named), data.num_samples, metrics, fitted)

    def _bootstrap(
        self, seed: int, number: int, data: Dataset
    ) -> tuple[np.random.Generator, NDArray[np.intp]]:
        """The generator of the estimator of this number, and the rows that it is fitted on: as many
        as there are; of data with groups all rows of as many groups as there are."""
        drawn = np.random.default_rng((self.options.seed, seed, number))
        if data.groups is None:
            return drawn, drawn.integers(0, data.num_samples, data.num_samples)
        _, codes, sizes = np.unique(data.groups, return_inverse=True, return_counts=True)
        groups = np.split(np.argsort(codes, kind="stable"), np.cumsum(sizes)[:-1])
        chosen = drawn.integers(0, len(groups), len(groups))
        return drawn, np.concatenate([groups[at] for at in chosen])

    def _fitted(
        self,
        data: Dataset,
        rows: Array,
        target: NDArray[Any],
        drawn: np.random.Generator,
        weights: Array | None,
    ) -> Any:
        """Fit one estimator. Raises DataError if the estimator cannot be fitted on the rows.
        weights: of classes.

        data: of which the rows are drawn. With groups an estimator does not stop early, as it would
        divide the rows of a group, unless the parameters say so.
        """
        state = int(drawn.integers(2**31))
        if self.options.task == "classification" and len(np.unique(target)) == 1:
            return class_of(ONE_CLASS)(strategy="prior").fit(rows, target)
        description = self.options.description
        estimator = description.make(state, with_groups=data.groups is not None)
        try:
            return described.fit(
                estimator, rows, target, None if weights is None else weights[target]
            )
        except ValueError as error:
            raise DataError(
                f"{description.name} cannot be fitted on these rows: {error}"
            ) from error

    # --- the linear model of stacked votes ---

    def _sums(
        self,
        stack: Stack,
        shape: Shape,
        metadata: Mapping[str, str],
        data: Dataset,
        target: NDArray[Any],
        seed: int,
    ) -> TrainResult:
        """Sum score and information of the rows, for the next step of the linear model of votes."""
        rows = data.features
        votes, is_voted = np.zeros((len(rows), 0, 1)), np.ones(len(rows), np.bool_)
        if shape.num_sites:
            votes, is_voted = self._votes(stack, shape, metadata, data, seed)
        rows, target, votes = rows[is_voted], target[is_voted], votes[is_voted]
        if not shape.num_classes:
            scale = target_scale(metadata)
            votes, target = ((one - scale.center) / scale.scale for one in (votes, target))
        features, linear = features_of(votes, rows, shape), stack.training(shape)
        weights = row_weights(metadata, shape.num_classes, target)
        found = sums(shape.family, linear.fit, features, target.astype(np.float64), weights)
        metrics = {}
        if shape.num_sites and linear.fit.rows and len(target):
            scores = scores_of(features, linear.coefficients(shape.num_classes))
            metrics = {"oob_score": _score(shape, scores, target)}
        return TrainResult(_vector(pack_sums(found)), len(is_voted), metrics)

    def _votes(
        self,
        stack: Stack,
        shape: Shape,
        metadata: Mapping[str, str],
        data: Dataset,
        seed: int,
    ) -> tuple[Array, NDArray[np.bool_]]:
        """(n, sites, k) mean votes, and whether there are votes of each site for a row.

        An estimator of this participant votes for the rows out of its bootstrap alone. Where the
        rows are others than it was fitted on, as their number tells, it does not vote.
        """
        rows = data.features
        members = _members(
            tuple(frame.file for frame in stack.frames), metadata["options"], rows.shape[1]
        )
        owners = {owner: at for at, owner in enumerate(stack.owners)}
        votes = np.zeros((len(rows), shape.num_sites, max(shape.num_classes, 1)))
        weights = np.zeros((len(rows), shape.num_sites))
        for frame, member in zip(stack.frames, members, strict=True):
            site = owners[frame.owner] if shape.num_sites > 1 else 0
            may_vote = np.ones(len(rows), np.bool_)
            if frame.owner == owner_of(seed):
                if frame.weight != len(rows):
                    continue
                _, sample = self._bootstrap(seed, frame.number, data)
                may_vote[sample] = False
            if may_vote.any():
                votes[may_vote, site] += frame.weight * _votes_of(
                    member, rows[may_vote], shape.num_classes
                )
                weights[may_vote, site] += frame.weight
        votes /= np.where(weights > 0, weights, 1)[:, :, np.newaxis]
        return votes, np.asarray((weights > 0).all(axis=1))

    # --- the model ---

    def measure(self, model: Model, data: Dataset) -> Measured:
        """Metrics on data: "accuracy", and "loss" but with vote = "hard", the mean cross-entropy;
        or "r2" and "mse"."""
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
        """Predict class names or numbers, (n,). Raises ValueError without estimators."""
        classes, num_features = self._open(model)
        rows = rows_to_predict(num_features, features)
        predicted = self.to_sklearn(model).predict(rows)
        return np.asarray(predicted, dtype=np.str_ if classes else np.float64)

    def probabilities(self, model: Model, features: ArrayLike) -> Array | None:
        """(n, k) probabilities of the linear model with vote = "stacked", or the weighted mean over
        the estimators with "soft"; None with "hard" and for regression.

        Raises ValueError if the ensemble has no estimators yet.
        """
        classes, num_features = self._open(model)
        rows = rows_to_predict(num_features, features)
        voting = self.to_sklearn(model)
        if not classes or self.options.vote == "hard":
            return None
        return np.asarray(voting.predict_proba(rows), dtype=np.float64)

    def to_sklearn(self, model: Model) -> Any:
        """Convert the ensemble to a VotingClassifier or VotingRegressor, or, as soon as the linear
        model of stacked votes has its first step, to a StackingClassifier or StackingRegressor.

        Raises ValueError if the ensemble has no estimators yet.
        """
        voting = self._voting(model)
        if voting is None:
            raise ValueError("the ensemble has no estimators before the first round has ended")
        return voting

    def _open(self, model: Model) -> tuple[tuple[str, ...], int]:
        """The classes and the number of features of a model. Raises ValueError if the model is none
        of this workload."""
        if model.vector.dtype != np.uint8:
            raise ValueError(f"a model of {model.vector.dtype} is no ensemble, which is bytes")
        classes = classes_of(self.options.task, model.metadata)
        return classes, num_features_of(model.metadata)

    def _voting(self, model: Model) -> Any:
        """The fitted estimator of the whole ensemble; None if it has no estimators. Raises
        ValueError if the estimators stay at the participants."""
        classes, num_features = self._open(model)
        if not self.options.publish:
            raise ValueError(WHY_NO_MODEL)
        stack = Stack.parse(model.vector.tobytes())
        frames = stack.frames
        if not frames:
            return None
        if not any(frame.weight for frame in frames):
            raise ValueError("all votes in the ensemble have the weight 0")
        files = tuple(frame.file for frame in frames)
        members: Sequence[Any] = _members(files, model.metadata["options"], num_features)
        if classes:
            members = [with_all_classes(m, len(classes), num_features) for m in members]
        vote = "hard" if self.options.vote == "hard" else "soft"

        def voting_of(chosen: Sequence[int]) -> Any:
            voters = [members[at] for at in chosen]
            weights = [float(frames[at].weight) for at in chosen]
            if classes:
                return voting_classifier(voters, weights, classes, vote)
            return voting_regressor(voters, weights)

        everyone = range(len(frames))
        linear = stack.linear(model.metadata)
        if linear is None:
            return voting_of(everyone)
        shape, coefficients = linear
        votings = [voting_of(everyone)]
        if shape.num_sites > 1:
            votings = [
                voting_of([at for at in everyone if frames[at].owner == owner])
                for owner in stack.owners
            ]
        if classes:
            return stacking_classifier(votings, coefficients, classes, shape.num_columns)
        scale = target_scale(model.metadata)
        return stacking_regressor(votings, coefficients, scale, shape.num_columns)


class LoadedEstimators:
    """The estimators of one training, to vote by themselves.

    kept: packed frames; see TrainResult. metadata: of the model.
    Raises ValueError, InvalidContent among them, if the frames do not fit the model.
    """

    def __init__(self, kept: bytes, metadata: Mapping[str, str]) -> None:
        """Load the estimators, and give each one all classes."""
        self._options = options_of_model(metadata)
        self.num_classes = len(classes_of(self._options.task, metadata))
        self.num_features = num_features_of(metadata)
        members = [load(frame.file, self._options, self.num_features) for frame in unpack(kept)]
        if self.num_classes:
            members = [with_all_classes(m, self.num_classes, self.num_features) for m in members]
        self._members = members

    def __len__(self) -> int:
        return len(self._members)

    def sum_of_votes(self, features: ArrayLike) -> Array:
        """(n, k) sums over the estimators: of probabilities with vote = "soft", of votes for a
        class with "hard", k classes; of predictions for regression, k = 1.

        features: (n, p), prepared as the model says. Raises DataError if they do not fit.
        """
        rows = rows_to_predict(self.num_features, features)
        votes = np.zeros((len(rows), max(self.num_classes, 1)))
        for member in self._members:
            if not self.num_classes:
                votes[:, 0] += np.asarray(member.predict(rows), np.float64).reshape(-1)
            elif self._options.vote == "hard":
                votes[np.arange(len(rows)), member.predict(rows)] += 1
            else:
                votes += member.predict_proba(rows)
        return votes


def seed_of(seed: int, participant_id: str) -> int:
    """The seed of a participant, so that participants with the same rows draw other bootstraps."""
    return int.from_bytes(sha256(f"{seed}/{participant_id}".encode()).digest()[:8], "big")


def owner_of(seed: int) -> int:
    """The number by which a participant knows its own estimators; it does not tell the seed."""
    return int.from_bytes(sha256(f"owner/{seed}".encode()).digest()[:8], "big")


def oob_score(
    estimators: Sequence[Any],
    samples: Sequence[NDArray[np.intp]],
    rows: Array,
    target: NDArray[Any],
    num_classes: int,
) -> float | None:
    """Out-of-bag score: each row is predicted by the estimators whose bootstraps lack it.

    Returns the accuracy, or r2 with num_classes = 0, as scikit-learn's BaggingClassifier and
    BaggingRegressor do. Rows that are in all bootstraps are left out; None if all are.
    """
    votes = np.zeros((len(rows), max(num_classes, 1)))
    count = np.zeros(len(rows), np.intp)
    for estimator, drawn in zip(estimators, samples, strict=True):
        out = np.ones(len(rows), np.bool_)
        out[drawn] = False
        if out.any():
            count += out
            votes[out] += _votes_of(estimator, rows[out], num_classes)
    known = count > 0
    if not known.any():
        return None
    if num_classes:
        best = np.argmax(votes[known], axis=1)
        return float(np.mean(best == target[known]))
    return regression_metrics(votes[known, 0] / count[known], target[known])["r2"]


# Rounds that train the linear model have the same estimators, which take seconds to load.
@lru_cache(maxsize=1)
def _members(files: tuple[bytes, ...], options: str, num_features: int) -> tuple[Any, ...]:
    """The estimators of an ensemble. options: in the metadata of its model."""
    read = options_of_model({"options": options})
    return tuple(load(file, read, num_features) for file in files)


def _votes_of(member: Any, rows: Array, num_classes: int) -> Array:
    """(n, k) probabilities of k classes, or 1 for the class that is predicted by an estimator
    without probabilities; (n, 1) predictions with num_classes = 0."""
    if not num_classes:
        return np.asarray(member.predict(rows), np.float64).reshape(-1, 1)
    votes = np.zeros((len(rows), num_classes))
    if hasattr(member, "predict_proba"):
        votes[:, member.classes_] = member.predict_proba(rows)
    else:
        votes[np.arange(len(rows)), member.predict(rows)] = 1
    return votes


def _score(shape: Shape, scores: Array, target: NDArray[Any]) -> float:
    if not shape.num_classes:
        return regression_metrics(scores[:, 0], target)["r2"]
    return float(np.mean(softmax(scores).argmax(axis=1) == target))


def _vector(data: bytes) -> Any:
    return np.frombuffer(data, dtype=np.uint8)
