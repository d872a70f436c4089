"""Results of rules and optimisers, slowly and obviously: every model of a session, one after the
other.

Rules that sum, sort and step are computed to the bit, element by element, in Python's own floats.
Of rules that survey all updates the weights are those of the rule itself, on whole vectors; what
comes of them must also be near to what the papers say, step by step, on the vectors themselves.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.slow_step import slow_step
from xain_coordinator.aggregation.rules import make_rule
from xain_coordinator.core.vocabulary.values import Option

Vector = NDArray[Any]
Floats = list[float]

SURVEYING = ("krum", "multi_krum", "geometric_median", "norm_clipping", "centred_clipping")
NEEDS_BASE = ("norm_clipping", "centred_clipping")
ROBUST = ("median", "trimmed_mean", *SURVEYING)


class Aggregation:
    """The aggregations of one session. options, optimizer_options: all that the rule and the
    optimiser have."""

    def __init__(
        self,
        rule: str,
        options: Mapping[str, Option],
        optimizer: str,
        optimizer_options: Mapping[str, Option],
    ) -> None:
        self._rule = rule
        self._options = options
        self._optimizer = optimizer
        self._optimizer_options: Mapping[str, Any] = optimizer_options
        self._moments: tuple[Floats, Floats] | None = None  # m, v

    def next_model(
        self,
        base: Vector | None,
        rows: Sequence[Vector],
        n_k: Sequence[float],
        lost: float = 0.0,
        share: float | None = None,
    ) -> Vector:
        """base: the model there is, None: there is none. lost: what stale updates have lost, which
        is the weight of the base. share: of the updates in the mean of all control variates; None:
        there are none. Raises AssertionError where a rule is not what it should be."""
        dtype = rows[0].dtype
        if share is not None:
            d = len(base) // 2
            weights = self.next_model(base[:d], [row[:d] for row in rows], n_k, lost)
            means = _sum([row[d:] for row in rows], _shares(self._rule, n_k))
            before = base[d:].astype(float).tolist()
            control = [b + share * (mean - b) for b, mean in zip(before, means, strict=True)]
            return np.concatenate([weights, np.array(control).astype(dtype)])
        rule = self._rule
        if base is None and rule in NEEDS_BASE:
            rule = "weighted_average"
        if lost:
            assert base is not None
            rows, n_k = [*rows, base], [*n_k, lost]
        if rule in SURVEYING:
            combined = self._surveyed(base, rows, n_k)
        elif rule in ("median", "trimmed_mean"):
            combined = _middle(rows, len(rows) - 1 if rule == "median" else 2 * self._trim)
        else:
            combined = _sum(rows, _shares(rule, n_k))
        if self._optimizer and base is not None:
            combined = self._step(base, combined)
            largest = float(np.finfo(dtype).max)
            combined = [min(max(x, -largest), largest) for x in combined]
        return np.array(combined, np.float64).astype(dtype)

    @property
    def _trim(self) -> int:
        return int(self._options["trim"])

    def _step(self, base: Vector, result: Floats) -> Floats:
        options, dtype = self._optimizer_options, np.promote_types(base.dtype, np.float32)
        if self._moments is None:
            begin = float(options["tau"]) ** 2 if "tau" in options else 0.0
            self._moments = [0.0] * len(base), [begin] * len(base)
        steps = [
            slow_step(self._optimizer, options, *one)
            for one in zip(base.astype(float).tolist(), result, *self._moments, strict=True)
        ]
        x, m, v = (list(column) for column in zip(*steps, strict=True))
        # What is remembered is stored, in this dtype.
        self._moments = _as_stored(m, dtype), _as_stored(v, dtype)
        return x

    def _surveyed(
        self, base: Vector | None, rows: Sequence[Vector], n_k: Sequence[float]
    ) -> Floats:
        rule: Any = make_rule(self._rule, self._options)
        origin = np.zeros(1, rows[0].dtype) if base is None else base
        differences = np.subtract(np.stack(rows), origin, dtype=np.float64)
        weights = rule.weigh(rule.survey(differences), np.array(n_k, np.int64))
        candidates = [*rows, *([] if base is None else [base])]
        chosen = [(row, w) for row, w in zip(candidates, weights.tolist(), strict=False) if w]
        found = _sum([row for row, _ in chosen], [w for _, w in chosen])
        vectors = [row.astype(np.float64) for row in rows]
        centre = np.zeros_like(vectors[0]) if base is None else base.astype(np.float64)
        self._require_near(np.array(found), vectors, n_k, centre)
        return found

    def _require_near(
        self, found: Vector, rows: list[Vector], n_k: Sequence[float], base: Vector
    ) -> None:
        """Compare with the formula of the rule's paper."""
        options: Mapping[str, Any] = self._options
        scale = 1e-6 * (1 + max(float(np.abs(row).max()) for row in rows))
        match self._rule:
            case "krum" | "multi_krum":
                f, n = options["num_byzantine"], len(rows)
                ranked = sorted(range(n), key=lambda i: _krum_score(rows, i, f))
                m = 1 if self._rule == "krum" else options["num_selected"] or n - f - 2
                scores = [_krum_score(rows, i, f) for i in ranked]
                if m < n and math.isclose(scores[m - 1], scores[m], rel_tol=1e-6, abs_tol=1e-9):
                    return  # of two that are as good but for rounding, either
                expected = np.mean([rows[i] for i in ranked[:m]], axis=0)
            case "norm_clipping":
                norms = sorted(_norm(row - base) for row in rows)
                radius = options["threshold"]
                if not radius:
                    radius = norms[math.ceil(options["quantile"] * len(norms)) - 1]
                total = sum(n_k)
                shares = [w / total for w in n_k] if total else [1 / len(rows)] * len(rows)
                expected = base + sum(
                    share * _clipped(row - base, radius)
                    for share, row in zip(shares, rows, strict=True)
                )
            case "centred_clipping":
                expected = base
                for _ in range(options["num_iterations"]):
                    lengths = sorted(_norm(row - expected) for row in rows)
                    radius = options["tau"] or lengths[(len(rows) + 1) // 2 - 1]
                    steps = [_clipped(row - expected, radius) for row in rows]
                    expected = expected + np.mean(steps, axis=0)
            case _:
                assert self._rule == "geometric_median"
                sums = [_distances(point, rows) for point in (*rows, np.mean(rows, axis=0))]
                assert _distances(found, rows) <= min(sums) * (1 + 1e-3) + scale, (
                    f"{found} is not the geometric median of {rows}"
                )
                return
        assert float(np.abs(found - expected).max()) <= scale, (
            f"rule {self._rule} gives {found}, it should be near {expected}"
        )


def _shares(rule: str, n_k: Sequence[float]) -> Floats:
    k, total = len(n_k), sum(n_k)
    match rule:
        case "identity" | "sum":
            return [1.0] * k
        case "mean":
            return [1 / k] * k
        case _:
            assert rule == "weighted_average", rule
            return [w / total for w in n_k] if total else [1 / k] * k


def _sum(rows: Sequence[Vector], shares: Sequence[float]) -> Floats:
    """Element by element, in the order of the rows."""
    columns = zip(*(row.astype(np.float64).tolist() for row in rows), strict=True)
    combined = []
    for column in columns:
        value = 0.0
        for x, share in zip(column, shares, strict=True):
            value += x * share
        combined.append(value)
    return combined


def _middle(rows: Sequence[Vector], num_left_out: int) -> Floats:
    """The mean of each column without so many of its values, as many below as above; of a median
    all but one, or two."""
    first = num_left_out // 2
    columns = [sorted(column) for column in zip(*(row.tolist() for row in rows), strict=True)]
    kept = [column[first : len(column) - first] for column in columns]
    return [sum((x * (1 / len(column)) for x in column), 0.0) for column in kept]


def _as_stored(values: Floats, dtype: Any) -> Floats:
    return np.array(values, np.float64).astype(dtype).astype(np.float64).tolist()


def _norm(vector: Vector) -> float:
    return math.sqrt(math.fsum(float(x) ** 2 for x in vector))


def _distances(point: Vector, rows: Sequence[Vector]) -> float:
    return math.fsum(_norm(point - row) for row in rows)


def _clipped(difference: Vector, radius: float) -> Vector:
    length = _norm(difference)
    return difference * min(1.0, radius / length if length else 1.0)


def _krum_score(rows: Sequence[Vector], i: int, f: int) -> float:
    squared = sorted(_norm(rows[i] - row) ** 2 for j, row in enumerate(rows) if j != i)
    return math.fsum(squared[: len(rows) - f - 2])
