"""Model: one flat vector plus a layout that names its tensors and their shapes.

Flat, because aggregation, key ranges, shards and streams are then all the same thing: slices.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.floating[Any]]
Kind = Literal["weight", "statistic", "control"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One array of a model.

    dtype: numpy's name for it, such as "float32".
    kind: "weight" for what is trained; "statistic" for what is averaged by sample count and kept
        out of server optimisers, such as the running mean of a batch normalisation; "control" for
        the control variate of the server, see scaffold.py.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "weight"

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


Layout = tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """Weights with everything needed to use them.

    vector: (d,), one dtype for all arrays.
    layout: the arrays in the order in which they lie in the vector, without gaps.
    metadata: what a workload must know beside the weights, such as the names of the classes.
    """

    vector: Vector
    layout: Layout
    metadata: Mapping[str, str] = field(default_factory=dict)


def size_of(layout: Layout) -> int:
    """Length d of the vector that a layout describes."""
    return sum(spec.size for spec in layout)


def flatten(arrays: Mapping[str, NDArray[Any]], layout: Layout) -> Vector:
    """Concatenate named arrays into one vector of the layout's common dtype. Raises ValueError if
    an array is missing or has another shape than the layout says."""
    parts: list[NDArray[Any]] = [np.empty(0, dtype=_common_dtype(layout))]  # no arrays, no elements
    for spec in layout:
        if spec.name not in arrays:
            raise ValueError(f"the layout names array {spec.name!r}, which is not there")
        array = np.asarray(arrays[spec.name])
        if array.shape != spec.shape:
            raise ValueError(f"array {spec.name!r} has shape {array.shape}, expected {spec.shape}")
        parts.append(array.ravel())
    return np.concatenate(parts).astype(_common_dtype(layout), copy=False)


def unflatten(vector: Vector, layout: Layout) -> dict[str, NDArray[Any]]:
    """Cut a vector into its named arrays: views where the dtype agrees, copies elsewhere. Raises
    ValueError if the vector's length is not the layout's."""
    expected = size_of(layout)
    if vector.shape != (expected,):
        raise ValueError(f"the vector has shape {vector.shape}, the layout needs ({expected},)")
    arrays: dict[str, NDArray[Any]] = {}
    start = 0
    for spec in layout:
        piece = vector[start : start + spec.size].reshape(spec.shape)
        arrays[spec.name] = piece.astype(spec.dtype, copy=False)
        start += spec.size
    return arrays


# The metric with which a site tells that it has lost its own control variate.
CONTROL_LOST = "control_lost"


def control_size(layout: Layout) -> int:
    """Elements of the control variate at the end of a vector; 0 without one."""
    return layout[-1].size if layout and layout[-1].kind == "control" else 0


PERSONAL = "personal"  # in the metadata of a model
GROUP = "group"  # in the metadata of a model: name of the column by which rows were kept together
# In the metadata of a model: why no training follows on it, and lines that a person must know.
ENDED, TOLD = "ended_because", "warnings"
LEFT_OUT = "left_out"  # JSON: parameters of regression that are not fitted, and why
STEPS = "steps_per_pass"  # rounds of a pass, as earlier versions wrote them into models
OF_TRAINING = (ENDED, TOLD, LEFT_OUT, STEPS)  # those that say nothing of the next training


def personal_patterns(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Patterns of the names of tensors that each participant keeps for itself, such as "head.*".

    metadata: PERSONAL holds a JSON list. Raises ValueError if it is none.
    """
    patterns = json.loads(metadata.get(PERSONAL, "[]"))
    if not isinstance(patterns, list) or not all(isinstance(one, str) for one in patterns):
        raise ValueError(f"the metadata have {patterns!r} for {PERSONAL!r}, not a list of names")
    return tuple(patterns)


def is_personal(name: str, patterns: Sequence[str]) -> bool:
    """Whether a tensor of this name stays at each participant."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def require_personal(names: Sequence[str], patterns: Sequence[str]) -> None:
    """Raise ValueError if a pattern matches none of the names, or no name is left to be shared."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"model.personal has {pattern!r}, which is no tensor of the model; there are: "
                f"{', '.join(names)}"
            )
    if patterns and all(is_personal(name, patterns) for name in names):
        raise ValueError(
            f"model.personal matches all tensors of the model ({', '.join(names)}), so that "
            "nothing would be trained together"
        )


def _common_dtype(layout: Layout) -> np.dtype[Any]:
    dtypes: Sequence[np.dtype[Any]] = [np.dtype(spec.dtype) for spec in layout]
    return np.result_type(*dtypes) if dtypes else np.dtype(np.float32)
