"""A threshold for models of two classes, chosen by a named criterion on the scores of all rows.

A row is predicted as the second class if its probability of that class is the threshold or more.
The candidates are the lower edges of the bins that tallies count scores in, and one above all of
them: those of scikit-learn's roc_curve(), with scores of one bin counting as equal. A threshold
that is chosen on the rows that it is measured on is slightly better there than on other rows.
Sources: Youden 1950 for sensitivity + specificity - 1; Elkan 2001 for costs.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from xain_workloads.errors import DataError
from xain_workloads.measures.figures import Figure, share_of
from xain_workloads.measures.tallies import Tallies, probability_at, records
from xain_workloads.model import Model

KEY = "threshold"  # in the metadata of a model that is taken home
FORMS = '"youden", "cost = NUMBER", "sensitivity >= NUMBER" or "specificity >= NUMBER"'

# With the words of the reports.
RATES: Mapping[str, str] = {
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "positive_predictive_value": "positive predictive value",
    "negative_predictive_value": "negative predictive value",
}

_LEAST = probability_at(float("-inf"), 0)
_TEXT = re.compile(r"(youden)|(cost)\s*=\s*(\S+)|(sensitivity|specificity)\s*>=\s*(\S+)")


@dataclass(frozen=True, slots=True)
class Criterion:
    """Criterion by which a threshold is chosen.

    name: "youden", the largest sum of sensitivity and specificity; "cost", the least cost, where a
        row of the second class that is missed costs `number` times as much as another row that is
        taken for it; "sensitivity" or "specificity", at least `number`, with the other as large as
        it can be.
    """

    name: str
    number: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one of FORMS. Raises ValueError."""
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"it must be {FORMS}")
        youden, cost, weight, rate, least = found.groups()
        if youden:
            return cls(youden)
        try:
            number = float(weight or least)
        except ValueError:
            raise ValueError(f"{weight or least!r} is no number; it must be {FORMS}") from None
        if cost and not (isfinite(number) and number > 0):
            raise ValueError(f"the cost of a row that is missed is {number:g}; it must be above 0")
        if rate and not 0 < number <= 1:
            raise ValueError(f"the least {rate} is {number:g}; it must be above 0, and at most 1")
        return cls(cost or rate, number)


@dataclass(frozen=True, slots=True)
class Threshold:
    """A threshold and what it does on the rows that it was chosen on.

    value: least probability of the second class with which a row is predicted as that class.
    criterion: as it was written. resolution: from this candidate to the next one above it.
    figures: those of RATES that rows are known for, with Wilson's 95 % interval.
    """

    value: float
    criterion: str
    resolution: float = 0.0
    figures: Mapping[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """edge: of a bin. found, wrong: rows of the second class, and other rows, that are predicted as
    the second class."""

    edge: int
    found: int
    wrong: int


def choose(tallies: Tallies, text: str) -> Threshold | None:
    """The threshold by a criterion, of equally good ones the highest. None unless there are two
    classes with rows of both, and scores. Raises ValueError as Criterion.parse() does."""
    criterion = Criterion.parse(text)
    is_known = tallies.num_classes == 2 and len(tallies.scores) == 2
    bins = list(records(tallies.scores[1], 3)) if is_known else []
    rows, others = sum(p for _, p, _ in bins), sum(q for _, _, q in bins)
    if not rows or not others:
        return None
    candidates = list(_candidates(bins))
    match criterion.name:
        case "youden":
            best = max(candidates, key=lambda one: one.found * others - one.wrong * rows)
        case "cost":
            best = min(candidates, key=lambda one: one.wrong - criterion.number * one.found)
        case "sensitivity":
            best = next(one for one in candidates if one.found / rows >= criterion.number)
        case _:
            few = [one for one in candidates if (others - one.wrong) / others >= criterion.number]
            best = max(few, key=lambda one: one.found)
    taken = best.found + best.wrong
    parts = {
        "sensitivity": (best.found, rows),
        "specificity": (others - best.wrong, others),
        "positive_predictive_value": (best.found, taken),
        "negative_predictive_value": (others - best.wrong, rows + others - taken),
    }
    known = {name: share_of(*part) for name, part in parts.items() if part[1]}
    value, above = (probability_at(best.edge + i, tallies.level) for i in (0, 1))
    # The first bin has all that lies below it, too.
    value = value if value > _LEAST else 0.0
    return Threshold(value, text.strip(), above - value, known)


def _candidates(bins: list[tuple[int, ...]]) -> Iterator[_Candidate]:
    """Yield a candidate for each edge of a bin, from the highest to the lowest."""
    found = wrong = 0
    yield _Candidate(bins[-1][0] + 1, found, wrong)
    for at, of_class, others in reversed(bins):
        found, wrong = found + of_class, wrong + others
        yield _Candidate(at, found, wrong)


# --- a model with a threshold ---------------------------------------------------------------------


def threshold_of(metadata: Mapping[str, str]) -> float | None:
    """The threshold in the metadata of a model; None without one. Raises DataError if it is no
    probability: the text may come from a file of anybody."""
    text = metadata.get(KEY)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not 0 <= value <= 1:
        raise DataError(f"the threshold in the model's metadata is {text[:40]!r}, no probability")
    return value


def with_threshold(model: Model, threshold: Threshold | None) -> Model:
    """Copy a model with a threshold, which its predictions then follow; None changes nothing."""
    if threshold is None:
        return model
    return replace(model, metadata={**model.metadata, KEY: repr(threshold.value)})


def classes_at(
    threshold: float, probabilities: NDArray[np.float64], classes: Sequence[str]
) -> NDArray[Any]:
    """Predict (n,) class names: the second class at the threshold and above. probabilities: (n,
    2)."""
    return np.array(classes, dtype=np.str_)[(probabilities[:, 1] >= threshold).astype(np.intp)]
