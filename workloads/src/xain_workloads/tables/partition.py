"""Partitions: one data set divided among participants, for demos and experiments, and the rows of a
participant divided into those to train on and those to measure models on.

Each participant has the whole data set, computes the same partition and keeps its own part. So the
result must not depend on the machine or on the version of numpy: chance comes from
numpy.random.RandomState, whose streams are frozen (NEP 19); those of Generator may change with any
release.

Rows of one group, such as the visits of a patient, are never divided. Chance gives a group a number
that depends on the seed, on the group's value and on what is divided: test rows, folds and parts
are independent of each other for equal seeds, too. Groups fall into parts in the order of their
numbers: so rows that are added move few groups to another part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, Self, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from xain_workloads.chance import random_state
from xain_workloads.options import require_range
from xain_workloads.tables.dataset import Dataset, Target
from xain_workloads.tables.division import Division
from xain_workloads.tables.profile import sort_classes
from xain_workloads.tables.table import Table

Kind = Literal["none", "iid", "dirichlet"]
By = Literal["iid", "dirichlet", "quantity", "column"]
Rows = NDArray[np.intp]
Groups = NDArray[np.uint64]
Shares = NDArray[np.float64]
Data = TypeVar("Data", Dataset, Table)

# With a larger alpha the parts are as good as iid, and the sum of the gamma draws may overflow.
MAX_ALPHA = 1e6


@dataclass(frozen=True, slots=True)
class Partition:
    """The part of a data set that a participant keeps.

    kind: "none" keeps all rows, for participants with a file each; "iid" and "dirichlet" as the
        functions of that name.
    num_parts: parts, and so participants, 1 or more.
    index: of the part, 0 <= index < num_parts.
    alpha: concentration of "dirichlet"; the smaller, the more the parts differ.
    seed: 0 or more; the same for all participants.
    """

    kind: Kind = "none"
    num_parts: int = 1
    index: int = 0
    alpha: float = 0.5
    seed: int = 0

    def apply(self, data: Data) -> Data:
        """Divide the data, and return the part `index`, which may be empty."""
        if self.kind == "none":
            return data
        if data.groups is not None:
            alpha = self.alpha if self.kind == "dirichlet" else None
            parts = grouped_parts(data, data.groups, self.num_parts, alpha=alpha, seed=self.seed)
        elif self.kind == "iid":
            parts = iid(data.num_samples, self.num_parts, seed=self.seed)
        else:
            parts = dirichlet(data.target, self.num_parts, alpha=self.alpha, seed=self.seed)
        return data.subset(parts[self.index])


def iid(num_samples: int, num_parts: int, *, seed: int) -> list[Rows]:
    """Divide rows at random into parts whose sizes differ by one at most.

    Returns num_parts arrays of ascending rows; each row is in exactly one.
    """
    order = random_state(seed).permutation(num_samples)
    return [np.sort(part).astype(np.intp) for part in np.array_split(order, num_parts)]


def dirichlet(target: Target, num_parts: int, *, alpha: float, seed: int) -> list[Rows]:
    """Divide rows so that the parts differ in their labels, and in size.

    Each label's rows are divided in proportions drawn from a symmetric Dirichlet distribution over
    the parts. alpha: (0, MAX_ALPHA]; near 0 each label falls to one part, large is close to iid.
    For regression the label is the decile of the target.
    Returns num_parts arrays of ascending rows; each row is in exactly one, and parts may be empty.
    Source: label skew by Dir(alpha) is from Hsu et al. 2019, arXiv:1909.06335, whose clients draw
    labels and have equally many rows. Here labels draw clients, so that every row is used, as in
    Yurochkin et al. 2019, arXiv:1905.12022, section 4.
    """
    chance = random_state(seed)
    parts: list[list[Rows]] = [[] for _ in range(num_parts)]
    for rows in _strata(target):
        cuts = _cuts(_drawn_shares(chance, num_parts, alpha), len(rows))
        pieces = np.split(rows[chance.permutation(len(rows))], cuts)
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    empty = np.empty(0, dtype=np.intp)
    return [np.sort(np.concatenate([empty, *part])) for part in parts]


def quantity(num_samples: int, num_parts: int, *, alpha: float, seed: int) -> list[Rows]:
    """Divide rows at random into parts of different sizes.

    The sizes are in proportions drawn from a symmetric Dirichlet distribution. alpha: (0,
    MAX_ALPHA]; near 0 one part has all rows, large is close to iid.
    Returns num_parts arrays of ascending rows; each row is in exactly one, and parts may be empty.
    Source: Li et al. 2022, arXiv:2102.02079, "quantity skew".
    """
    chance = random_state(seed)
    order = chance.permutation(num_samples)
    cuts = _cuts(_drawn_shares(chance, num_parts, alpha), num_samples)
    return [np.sort(part).astype(np.intp) for part in np.split(order, cuts)]


def by_column(values: NDArray[Any], num_parts: int, *, seed: int) -> list[Rows]:
    """Divide rows so that all rows with one value of a column, such as a hospital, are in one part.

    values: (n,) of the column. The largest value goes first, to the part with the fewest rows, as
    in scikit-learn's GroupKFold. seed: of the order of values with equally many rows.
    Returns num_parts arrays of ascending rows; each row is in exactly one.
    Raises ValueError if there are fewer values than parts.
    """
    found, codes = np.unique(values, return_inverse=True)
    if len(found) < num_parts:
        raise ValueError(
            f"the column has {len(found)} different values, fewer than the {num_parts} parts"
        )
    sizes = np.bincount(codes)
    order = random_state(seed).permutation(len(found))
    part_of, totals = np.zeros(len(found), np.intp), np.zeros(num_parts, np.int64)
    for value in order[np.argsort(-sizes[order], kind="stable")]:
        part_of[value] = np.argmin(totals)
        totals[part_of[value]] += sizes[value]
    return [np.flatnonzero(part_of[codes] == index) for index in range(num_parts)]


def partition(
    labels: Any, num_parts: int, *, by: By = "iid", alpha: float = 0.5, seed: int = 0
) -> list[Rows]:
    """Divide the rows of a data set among participants: parts[site.index] has those of a site.

    labels: (n,) the labels of the rows, or the numbers that a regression predicts; for "column" the
        values of the column.
    by: "iid": at random. "dirichlet": so that the parts differ in their labels. "quantity": in
        their sizes. "column": so that rows with one value are in one part. See the functions of
        these names; `xain-participant --partition` makes the same parts of the same labels.
    alpha: of "dirichlet" and "quantity"; the smaller, the more the parts differ.
    Returns num_parts arrays of ascending row numbers, the same on every machine; each row is in
    exactly one. Raises ValueError for numbers that make no sense, and for another `by`.
    """
    column = np.asarray(labels)
    if column.ndim != 1:
        raise ValueError(f"labels have the shape {column.shape}; one for each row is needed")
    require_range("num_parts", num_parts, at_least=1)
    require_range("alpha", alpha, above=0, at_most=MAX_ALPHA)
    match by:
        case "iid":
            return iid(len(column), num_parts, seed=seed)
        case "dirichlet":
            is_number = column.dtype.kind == "f"
            target = column.astype(np.float64) if is_number else column.astype(np.str_)
            return dirichlet(target, num_parts, alpha=alpha, seed=seed)
        case "quantity":
            return quantity(len(column), num_parts, alpha=alpha, seed=seed)
        case "column":
            return by_column(column, num_parts, seed=seed)
    raise ValueError(f"by is {by!r}; it must be one of {', '.join(get_args(By))}")


def split_train_test(
    data: Data, test_fraction: float, seed: int, *, least: int = 1
) -> tuple[Data, Data]:
    """Set rows aside for testing: as many of each label, or decile, as its share asks for.

    test_fraction: [0, 1). The test set has round(test_fraction * n) rows, but at least one if the
    fraction is not 0, and never the last row of a label: what is not trained cannot be tested. So
    a tiny data set may end with fewer test rows.
    least: rows of a test set, or groups of data with groups; with fewer it is empty.
    Chance gives each place in the table a number, which depends on the seed alone; of a label the
    rows with the smallest ones are set aside. So rows that are added at the end move few others.
    Of data with groups whole groups are set aside, so that the share of rows is met as nearly as
    they allow; none is, if half of a group would be too many.
    Returns (train, test). Raises ValueError that names test_fraction.
    """
    require_range("test_fraction", test_fraction, at_least=0)
    if test_fraction >= 1:
        raise ValueError(f"test_fraction is {test_fraction}; it must be below 1")
    if data.groups is not None:
        is_test = _groups_to_test(data, data.groups, test_fraction, seed)
        is_test &= _num_units(data, is_test) >= least
        return data.subset(np.flatnonzero(~is_test)), data.subset(np.flatnonzero(is_test))
    strata = _strata(data.target)
    sizes = np.array([len(rows) for rows in strata], dtype=np.int64)
    wanted = round(test_fraction * data.num_samples)
    if test_fraction > 0:
        wanted = max(wanted, 1)
    counts = _proportional(sizes, wanted)

    drawn = random_state(seed).random_sample(data.num_samples)
    is_test = np.zeros(data.num_samples, dtype=np.bool_)
    if counts.sum() >= least:
        for rows, count in zip(strata, counts, strict=True):
            is_test[rows[np.argsort(drawn[rows], kind="stable")][:count]] = True
    return data.subset(np.flatnonzero(~is_test)), data.subset(np.flatnonzero(is_test))


def divided(
    data: Data, division: Division | None, test_fraction: float, seed: int, *, least: int = 1
) -> tuple[Data, Data]:
    """Divide rows into those to train on and those to measure models on.

    division: None divides as split_train_test() does, whose arguments the others are.
    Where all rows are to be measured on, they are also those to train on: a session that only
    measures has no training, and its participants describe what they have.
    Returns (train, test).
    """
    if division is None:
        return split_train_test(data, test_fraction, seed, least=least)
    numbers = folds(data.target, division.folds, seed=division.seed, groups=data.groups)
    inside = np.flatnonzero(numbers == division.fold)
    outside = np.flatnonzero(numbers != division.fold)
    if not division.measures:
        return split_train_test(data.subset(outside), test_fraction, seed, least=least)
    train = data.subset(outside) if len(outside) else data
    return train, data.subset(inside if _num_units(data, inside) >= least else inside[:0])


def _num_units(data: Dataset | Table, rows: Rows | NDArray[np.bool_]) -> int:
    """The number of groups that these rows are of, or of rows in data without groups."""
    units = np.arange(data.num_samples) if data.groups is None else data.groups
    return len(np.unique(units[rows]))


def folds(target: Target, num_folds: int, *, seed: int, groups: Groups | None = None) -> Rows:
    """Assign rows to folds at random: (n,) numbers of folds, from 0.

    Folds differ by one row at most, and so do the rows of each label, or of each decile of the
    target of a regression, up to one more. groups: (n,), whose rows are in one fold each; then
    folds differ as groups make it necessary.
    """
    if groups is not None:
        shares = np.full(num_folds, 1 / num_folds)
        return _Grouped.of(target, groups, seed, "folds").parts(lambda: shares)
    drawn = random_state(seed).random_sample(len(target))
    order = [rows[np.argsort(drawn[rows], kind="stable")] for rows in _strata(target)]
    numbers = np.zeros(len(target), dtype=np.intp)
    if order:
        numbers[np.concatenate(order)] = np.arange(len(target)) % num_folds
    return numbers


def grouped_parts(
    data: Dataset | Table, groups: Groups, num_parts: int, *, alpha: float | None, seed: int
) -> list[Rows]:
    """Divide rows evenly, or in Dirichlet shares with an alpha, so that no group is divided."""
    chance = random_state(seed)
    even = np.full(num_parts, 1 / num_parts)
    part = _Grouped.of(data.target, groups, seed, "parts").parts(
        lambda: even if alpha is None else _drawn_shares(chance, num_parts, alpha)
    )
    return [np.flatnonzero(part == index) for index in range(num_parts)]


def _drawn_shares(chance: np.random.RandomState, num_parts: int, alpha: float) -> Shares:
    """(num_parts,) shares that sum to 1, drawn from a symmetric Dirichlet distribution."""
    draws = chance.standard_gamma(alpha, num_parts)
    if not draws.any():
        # All draws underflow when alpha is tiny. The limit is one part that takes all.
        draws[chance.randint(num_parts)] = 1.0
    return np.asarray(draws / draws.sum())


def _cuts(shares: Shares, num_rows: int) -> Rows:
    """Where rows are cut into consecutive pieces of these shares."""
    ends = np.cumsum(shares)[:-1]
    return np.minimum(np.floor(ends * num_rows + 0.5), num_rows).astype(np.intp)


def _groups_to_test(
    data: Dataset | Table, groups: Groups, test_fraction: float, seed: int
) -> NDArray[np.bool_]:
    """(n,) whether a row is set aside; a label without a row to train on takes a group back."""
    shares = np.array([test_fraction, 1 - test_fraction])
    grouped = _Grouped.of(data.target, groups, seed, "")
    is_test: NDArray[np.bool_] = grouped.parts(lambda: shares) == 0
    for rows in _labels(data.target):
        if len(rows) and is_test[rows].all():
            last = rows[np.argmax(grouped.numbers[grouped.codes[rows]])]
            is_test[grouped.codes == grouped.codes[last]] = False
    return is_test


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Groups of rows. codes: (n,) the group of each row. sizes, numbers: (g,) rows of each group,
    and the number that chance gives it. strata: groups that have rows of a label, each in that of
    the rarest one, in ascending order of their numbers; for regression one stratum."""

    codes: Rows
    sizes: NDArray[np.int64]
    numbers: NDArray[np.uint64]
    strata: Sequence[Rows]

    @classmethod
    def of(cls, target: Target, groups: Groups, seed: int, purpose: str) -> Self:
        """Give each group a number by hashing, and put it into the stratum of its rarest label."""
        values, codes = np.unique(groups, return_inverse=True)
        numbers = np.array([_number(value, seed, purpose) for value in values.tolist()], np.uint64)
        free = np.ones(len(values), np.bool_)
        strata = []
        for rows in sorted(_labels(target), key=len):
            of_label = np.zeros(len(values), np.bool_)
            of_label[codes[rows]] = True
            found = np.flatnonzero(of_label & free)
            free[found] = False
            strata.append(found[np.argsort(numbers[found], kind="stable")])
        sizes = np.bincount(codes, minlength=len(values)).astype(np.int64)
        return cls(codes.astype(np.intp), sizes, numbers, strata)

    def parts(self, shares: Callable[[], Shares]) -> Rows:
        """(n,) the part of each row. shares: (k,) of the rows of a stratum that each part gets, of
        each stratum anew."""
        part_of = np.zeros(len(self.sizes), np.intp)
        owed: Shares = np.zeros(1)  # by what earlier strata have left each part too small
        for groups in self.strata:
            sizes = self.sizes[groups]
            wanted = shares() * sizes.sum() + owed
            ends = np.maximum.accumulate(np.cumsum(wanted))
            # A group falls to the part in which its middle lies.
            part = np.searchsorted(ends, np.cumsum(sizes) - sizes / 2, side="right")
            part_of[groups] = np.minimum(part, len(wanted) - 1)
            owed = wanted - np.bincount(part_of[groups], sizes, minlength=len(wanted))
        return part_of[self.codes]


def _number(group: int, seed: int, purpose: str) -> int:
    """The number that chance gives a group. purpose: what is divided; "" for test rows, whose
    division earlier releases have made."""
    text = f"{purpose}/{seed}/{group}" if purpose else f"{seed}/{group}"
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _proportional(sizes: NDArray[np.int64], wanted: int) -> NDArray[np.int64]:
    """Share out `wanted` rows by size, by largest remainders, leaving each stratum one row."""
    limits = np.maximum(sizes - 1, 0)
    exact = wanted * sizes / max(int(sizes.sum()), 1)
    counts = np.minimum(np.floor(exact).astype(np.int64), limits)
    # Stable, so that equal remainders go to the first labels on every platform.
    by_remainder = np.argsort(-(exact - counts), kind="stable")
    missing = min(wanted, int(limits.sum())) - int(counts.sum())
    while missing > 0:
        for i in by_remainder:
            if missing > 0 and counts[i] < limits[i]:
                counts[i] += 1
                missing -= 1
    return counts


def _strata(target: Target) -> list[Rows]:
    """Rows of each label in canonical order; for regression rows of each decile, by rank."""
    if target.dtype.kind == "f":
        order = np.argsort(target, kind="stable")
        return [rows.astype(np.intp) for rows in np.array_split(order, 10) if len(rows)]
    return _labels(target)


def _labels(target: Target) -> list[Rows]:
    """Rows of each label in canonical order; for regression all rows."""
    if target.dtype.kind == "f":
        return [np.arange(len(target))]
    labels, codes = np.unique(target, return_inverse=True)
    position = {label: code for code, label in enumerate(labels.tolist())}
    return [np.flatnonzero(codes == position[label]) for label in sort_classes(position)]
