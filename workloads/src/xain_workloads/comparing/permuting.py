"""Permutation importance at a site: see importance.py.

The features that a column is prepared to, such as categories as zeros and ones and an indicator of
missing values, are permuted together. Since rows are prepared one by one, this is what comes of
permuting the column of the table.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import cast

import numpy as np
from numpy.typing import NDArray

from xain_workloads.class_weights import row_weights
from xain_workloads.comparing.importance import MAX_COLUMNS, REPEATS, Importance
from xain_workloads.linear.row_losses import single_losses
from xain_workloads.measures.tallies import are_sums
from xain_workloads.model import Model
from xain_workloads.supervised import Array, classes_of, coded_target
from xain_workloads.tables.dataset import Dataset, Target
from xain_workloads.tables.preprocessing import features_of_columns
from xain_workloads.workload import Workload

# Numbers of the matrices that are predicted at once: a model may take long to be opened, as one of
# many trees, and is opened for each prediction.
NUM_PREDICTED = 1 << 20
_ROUNDING = 1e-12  # of a loss: below it a difference is none, as of a column that no tree asks for

# The order of n rows for the permutation of this number of the column of this name.
Permute = Callable[[str, int, int], NDArray[np.intp]]


def permuted_by(seed: str) -> Permute:
    """Make the function that draws a permutation from the seed, the column's name and a number."""

    def drawn(column: str, number: int, num_rows: int) -> NDArray[np.intp]:
        digest = sha256(f"{seed}/{column}/{number}".encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:16], "big")).permutation(num_rows)

    return drawn


def importances_of(
    workload: Workload,
    models: Mapping[int, Model],
    rows: Dataset,
    limit_s: float,
    permute: Permute,
    clock: Callable[[], float] = time.monotonic,
    num_predicted: int = NUM_PREDICTED,
) -> tuple[Importance, ...]:
    """Measure the importance of the columns of each model by permuting them on the rows.

    models: by their numbers. rows: held-out ones, at least one, prepared. limit_s: seconds for all
    of the models. Where it does not suffice, columns are permuted less often, and then the last
    columns are left out. Empty without names of columns.
    """
    columns = features_of_columns(next(iter(models.values())).metadata)
    names = list(columns)[:MAX_COLUMNS]
    if not names:
        return ()
    found = []
    weights = _weights(next(iter(models.values())), rows)
    for number, model in models.items():
        site = _Site(workload, model, rows, weights, permute, num_predicted)
        began = clock()
        loss = site.losses(rows.features)
        budget = _Budget(limit_s / len(models), began, clock)
        sums: list[tuple[float, float]] = []
        repeats = REPEATS
        while len(sums) < len(names):
            here = budget.repeats(len(names) - len(sums))
            if not here:
                break
            repeats = min(repeats, here)
            group = names[len(sums) : len(sums) + max(1, site.at_once // here)]
            permuted = site.permuted({name: columns[name] for name in group}, here)
            budget.made(here * len(group))
            for losses in permuted:
                apart = losses - loss
                # A prediction of other rows beside these may round in another way.
                apart[np.abs(apart) <= _ROUNDING * np.maximum(loss, loss.mean())] = 0.0
                sums.append((float(apart.sum()), float(np.square(apart).sum())))
        totals, squares = zip(*sums, strict=True) if sums else ((), ())
        if not sums or not are_sums((float(loss.sum()), *totals), squares):
            continue  # of a model that has run away
        positions = tuple(range(len(sums)))
        found.append(Importance(number, float(loss.sum()), repeats, positions, totals, squares))
    return tuple(found)


@dataclass(slots=True)
class _Budget:
    """Time that permutations take, and are allowed to take."""

    limit_s: float
    began: float
    clock: Callable[[], float]
    num_made: int = 0

    def made(self, number: int) -> None:
        self.num_made += number

    def repeats(self, num_columns: int) -> int:
        """How often each of the next columns can be permuted; 0: there is no time left."""
        spent = self.clock() - self.began
        left = self.limit_s - spent
        if left <= 0 or not self.num_made:
            # One prediction says little of many: a model is opened for it, and other programs run.
            return REPEATS if left > 0 else 0
        for_all = num_columns * spent / self.num_made  # once
        return max(1, int(min(REPEATS, left / for_all))) if for_all else REPEATS


@dataclass(frozen=True, slots=True)
class _Site:
    """A model, and the rows that it is measured on. weights: (n,); None if all weigh alike."""

    workload: Workload
    model: Model
    rows: Dataset
    weights: Array | None
    permute: Permute
    num_predicted: int

    @property
    def at_once(self) -> int:
        """Permutations of the rows that are predicted together."""
        return max(1, self.num_predicted // max(self.rows.features.size, 1))

    def losses(self, features: Array) -> Array:
        """(n,) losses of the rows with other features, (n, p), weighed as in training."""
        return np.asarray(self._losses([features])[0])

    def permuted(self, columns: Mapping[str, Sequence[int]], repeats: int) -> Array:
        """(columns, n) losses of the rows with one column permuted, means over its permutations.

        columns: positions of the features of each column, by its name.
        """
        wanted = [(name, number) for name in columns for number in range(repeats)]
        parts = [
            self._losses([self._features(columns[name], name, number) for name, number in part])
            for at in range(0, len(wanted), self.at_once)
            if (part := wanted[at : at + self.at_once])
        ]
        each = np.concatenate(parts).reshape(len(columns), repeats, self.rows.num_samples)
        return np.asarray(each.mean(axis=1))

    def _features(self, positions: Sequence[int], name: str, number: int) -> Array:
        """Copy the features with those of one column permuted, all by the same order."""
        features = self.rows.features.copy()
        order = self.permute(name, number, self.rows.num_samples)
        features[:, positions] = self.rows.features[order[:, np.newaxis], positions]
        return features

    def _losses(self, each: Sequence[Array]) -> Array:
        """Predict the rows with k matrices of features at once: (k, n) losses."""
        target = cast(Target, np.tile(self.rows.target, len(each)))
        whole = replace(self.rows, features=np.concatenate(each), target=target)
        losses = single_losses(self.workload, self.model, whole).reshape(len(each), -1)
        return losses if self.weights is None else losses * self.weights


def _weights(model: Model, rows: Dataset) -> Array | None:
    """(n,) weights of the rows in the loss of training; None if all weigh alike."""
    if rows.task == "regression":
        return None
    classes = classes_of("classification", model.metadata)
    codes = coded_target("classification", classes, rows)
    return row_weights(model.metadata, len(classes), codes)
