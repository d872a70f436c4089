"""Steps of regression without penalty (see ../newton.py), where they end, and what has no value.

In the first step the parameters of a model are taken in one after the other. One that follows from
those before it, as a constant column does, is left out and stays 0. Later on the weights of rows
would hide that. One by which some outcomes are certain grows without end (separation: Albert and
Anderson 1984). It is held where it is as soon as the others have nearly converged, and these
converge without it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from json import dumps, loads
from math import log

import numpy as np
from numpy.typing import NDArray

from xain_workloads.linear.glm.design import Design
from xain_workloads.linear.glm.options import LINEAR, LOGISTIC, options_of_model
from xain_workloads.linear.newton import (
    MOST_HALVINGS,
    Array,
    Fit,
    factored,
    halved,
    has_risen,
    solved,
    summed,
)
from xain_workloads.model import ENDED, LEFT_OUT, TOLD, Layout, Vector

# A step is the last one if its length in standard errors is below a millionth. Those after it are
# shorter by orders of magnitude.
_SHORT = 1e-12  # square of that length
_LONGEST_CHANGE = 3.0  # of the linear predictor in a step; a first logistic step makes 2 at most
# Share of a column's squares that is left when those before it are taken out of it. Less is
# rounding: in the first step a variance inflation factor of 1e10.
_LEAST_LEFT, _LEAST_LEFT_LATER = 1e-10, 1e-14
# Separation: the steps have become short in standard errors, since those of a separated parameter
# grow without end, while a parameter still moves by about 1, and the steps hardly get shorter.
_SEPARATED_STEP = 0.1
_NEARLY = 1e-4  # square of a step's length in standard errors
_SLOW = 0.1  # of a square to the one before it; 1/e for a separated parameter

CONVERGED = "converged: a further step would change no coefficient by a millionth of its error"
STUCK = "stopped: the deviance falls no further, though the fit has not converged"
_ALL_SEPARATED = "stopped: the columns together tell the class of every row (separation)"
# A deviance below it gives every row its own class by more than 1/2. Then the classes are separate
# by the columns, and no parameter has a finite value.
_SEPARATED_DEVIANCE = 2 * log(2)
MAX_TOLD = 5  # columns in a sentence


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The step from a point at which the sums are known.

    values: (m,). decrement: square of the length in standard errors, with separated parameters;
    rest: without. left_out, separated: (m,) parameters that are not moved.
    dispersion: of the rows about the model, 1 but for the linear one. num_free: parameters that
    have a value of their own.
    """

    values: Array
    decrement: float
    rest: float
    left_out: NDArray[np.bool_]
    separated: NDArray[np.bool_]
    dispersion: float
    num_free: int

    @property
    def is_all_separated(self) -> bool:
        """Whether no parameter has a finite value."""
        return bool((self.left_out | self.separated).all()) and bool(self.separated.any())


def step_of(fit: Fit, design: Design, metadata: Mapping[str, str]) -> Step:
    """The Newton step at `before`, from the sums of the fit. metadata: of the model, with
    LEFT_OUT."""
    k, width = fit.point.shape
    family = options_of_model(metadata).family
    is_taken = np.ones(width, np.bool_)
    is_taken[list(map(int, left_out_of(metadata)))] = False
    taken = np.flatnonzero(np.tile(is_taken, k))
    lower, kept = factored(fit.information, taken, _LEAST_LEFT_LATER, np.zeros(k * width))
    values = solved(lower, kept, fit.score)
    decrement = max(float(np.sum(fit.score * values)), 0.0)
    dispersion = 1.0
    if family == LINEAR:
        after = max(fit.deviance - decrement, 0.0)
        # A perfect fit leaves nothing but rounding.
        around_mean = fit.totals[1] - fit.totals[0] ** 2 / fit.rows
        dispersion = max(after, 1e-16 * around_mean) / max(fit.rows - len(kept), 1.0)
        decrement = decrement / dispersion if dispersion else 0.0
    left_out = np.ones(k * width, np.bool_)
    left_out[kept] = False
    none = np.zeros(len(left_out), np.bool_)
    step = Step(values, decrement, decrement, left_out, none, dispersion, len(kept))
    if family == LOGISTIC and fit.deviance < _SEPARATED_DEVIANCE:
        return replace(step, values=np.zeros_like(values), rest=0.0, separated=~left_out)
    is_slow = decrement > _SLOW * fit.decrement_before > 0
    if family == LINEAR or decrement > _NEARLY or not is_slow:
        return step
    separated = none
    # Parameters that grow together each take the part of the one that is held.
    while (found := np.abs(values) > _SEPARATED_STEP).any():
        separated = separated | found
        held = taken[~separated[taken]]
        lower, kept = factored(fit.information, held, _LEAST_LEFT_LATER, np.zeros(k * width))
        values = solved(lower, kept, fit.score)
    if not separated.any():
        return step
    rest = max(float(np.sum(fit.score * values)), 0.0)
    return replace(step, values=values, rest=rest, separated=separated)


def left_out_of(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Parameters of a block that follow from others, as text, and why."""
    found: Mapping[str, str] = loads(metadata.get(LEFT_OUT, "{}"))
    return found


def stepped(
    vector: Vector, layout: Layout, metadata: Mapping[str, str], updates: Iterable[Vector]
) -> tuple[Vector, Mapping[str, str]]:
    """Take a Newton step by the sums of all sites, or halve the last step if the deviance has
    risen.

    Returns the vector of the next model and its metadata, which say under ENDED why there is no
    further step, and under TOLD what a person must know. Raises InvalidContent.
    """
    model = Fit.of(vector, layout)
    k, width = model.point.shape
    design = Design.of(metadata, width - 1)
    here = summed(model, layout, updates)
    if has_risen(model, here):
        fit = halved(model)
        ended = STUCK if fit.halvings > MOST_HALVINGS else ""
        return fit.to_vector(), _ending(metadata, ended, metadata.get(TOLD, ""))
    fit = replace(here, before=model.point, decrement_before=model.decrement)
    if LEFT_OUT not in metadata:
        metadata = {**metadata, LEFT_OUT: dumps(_why_left_out(fit.information, design))}
    step = step_of(fit, design, metadata)
    share = 1.0
    if options_of_model(metadata).family != LINEAR:
        # The mean change of the linear predictor, by the weights of the rows. From one far off a
        # step of many rounds would lead back.
        weight = float(np.diagonal(fit.information).reshape(k, width)[:, 0].sum())
        change = np.sqrt(step.decrement / weight) if weight else 0.0
        share = min(1.0, _LONGEST_CHANGE / change) if change else 1.0
    point = fit.before + share * step.values.reshape(k, width)
    fit = replace(fit, point=point, decrement=step.decrement)
    ended = CONVERGED if step.rest <= _SHORT else ""
    if step.is_all_separated:
        ended = _ALL_SEPARATED
    return fit.to_vector(), _ending(metadata, ended, _told(step, design, metadata))


def _ending(metadata: Mapping[str, str], ended: str, told: str) -> Mapping[str, str]:
    """The metadata with these texts; without the keys where there are none."""
    kept = {key: value for key, value in metadata.items() if key not in (ENDED, TOLD)}
    return {**kept, **({ENDED: ended} if ended else {}), **({TOLD: told} if told else {})}


def _told(step: Step, design: Design, metadata: Mapping[str, str]) -> str:
    """Sentences on parameters that have no coefficient, or none of a finite value."""
    lines = [
        f"{_capital(design.words(int(at)))} has no coefficient: {why}."
        for at, why in left_out_of(metadata).items()
        if int(at) not in design.references.values()
    ]
    separated = step.separated.reshape(-1, len(design.columns)).any(axis=0)
    if step.is_all_separated:
        lines.append(
            "The columns together tell the class of every row, so no coefficient has a finite value"
            " (separation): leave columns out, or take the workload sgd, which has a penalty."
        )
    elif separated.any():
        names = [design.words(at) for at in np.flatnonzero(separated).tolist()]
        more = f" and {len(names) - MAX_TOLD} more" if len(names) > MAX_TOLD else ""
        lines.append(
            f"{_capital(', '.join(names[:MAX_TOLD]))}{more}: the coefficient has no finite value,"
            " since by it the outcome of some rows is certain (separation); leave the column out,"
            " or join categories with few rows."
        )
    if len(lines) > MAX_TOLD:
        lines[MAX_TOLD:] = [f"{len(lines) - MAX_TOLD} more columns have no coefficient."]
    return "\n".join(lines)


def _why_left_out(information: Array, design: Design) -> dict[str, str]:
    """The parameters of a block that follow from those before them, and why.

    information: at a model that gives all rows the same weights, but for those that were trained
    before. Its first block is that of the columns.
    """
    width = len(design.columns)
    block = information[:width, :width]
    diagonal = np.diagonal(block)
    smallest = design.smallest * diagonal[0]
    _, kept = factored(block, design.order, _LEAST_LEFT, smallest)
    sizes = np.sqrt(np.maximum(diagonal, 0.0))
    found = {}
    for at in sorted(set(range(width)).difference(kept.tolist())):
        why = "it is constant"
        if diagonal[at] > smallest[at]:
            shares, *_ = np.linalg.lstsq(block[np.ix_(kept, kept)], block[kept, at], rcond=None)
            is_part = np.abs(shares) * sizes[kept] > 1e-6 * sizes[at]
            names = [design.words(one) for one in kept[is_part].tolist() if one]
            if names:
                more = f" and {len(names) - MAX_TOLD} more" if len(names) > MAX_TOLD else ""
                why = f"it follows from {', '.join(names[:MAX_TOLD])}{more}"
        found[str(at)] = why
    return found


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
