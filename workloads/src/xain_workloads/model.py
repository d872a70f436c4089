"""A model is one flat vector plus a layout that says how to cut it.

Flat, because aggregation, key ranges, shards and streams are then all the same thing: slices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One array of a model.

    dtype: numpy's name for it, such as "float32".
    kind: "weight" for what is trained; "statistic" for what is averaged by sample count and kept
        out of server optimisers, such as the running mean of a batch normalisation.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Literal["weight", "statistic"] = "weight"

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
    """Concatenate named arrays into one vector of the layout's common dtype.

    Raises ValueError if an array is missing or has another shape than the layout says.
    """
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
    """Cut a vector into its named arrays: views where the dtype agrees, copies elsewhere.

    Raises ValueError if the vector's length is not the layout's.
    """
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


def _common_dtype(layout: Layout) -> np.dtype[Any]:
    dtypes: Sequence[np.dtype[Any]] = [np.dtype(spec.dtype) for spec in layout]
    return np.result_type(*dtypes) if dtypes else np.dtype(np.float32)
