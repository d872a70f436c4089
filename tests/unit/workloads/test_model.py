"""A model is one flat vector: cutting and joining lose nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xain_workloads.model import TensorSpec, flatten, size_of, unflatten

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(
    st.lists(shapes, max_size=5), st.sampled_from(["float32", "float64"]), st.integers(0, 2**32 - 1)
)
def test_flatten_and_unflatten_are_inverse(all_shapes, dtype, seed):
    """No element moves or changes, whatever the shapes, empty and scalar ones too."""
    layout = tuple(TensorSpec(f"a{i}", shape, dtype) for i, shape in enumerate(all_shapes))
    chance = np.random.default_rng(seed)
    arrays = {spec.name: chance.normal(size=spec.shape).astype(dtype) for spec in layout}

    vector = flatten(arrays, layout)
    back = unflatten(vector, layout)

    assert vector.shape == (size_of(layout),)
    assert list(back) == list(arrays)
    for spec in layout:
        assert back[spec.name].dtype == np.dtype(dtype)
        np.testing.assert_array_equal(back[spec.name], arrays[spec.name])
    np.testing.assert_array_equal(flatten(back, layout), vector)


def test_arrays_lie_in_the_order_of_the_layout():
    """The layout decides the order, not the mapping, since every participant has its own."""
    layout = (TensorSpec("w", (2, 2), "float32"), TensorSpec("b", (1,), "float32"))
    vector = flatten({"b": np.array([5]), "w": np.array([[1, 2], [3, 4]])}, layout)
    np.testing.assert_array_equal(vector, np.array([1, 2, 3, 4, 5], dtype=np.float32))
    assert vector.dtype == np.float32


def test_flatten_does_not_share_memory():
    """A vector that was handed in must not change when training goes on."""
    layout = (TensorSpec("w", (3,), "float64"),)
    weights = np.zeros(3)
    vector = flatten({"w": weights}, layout)
    weights += 1
    np.testing.assert_array_equal(vector, np.zeros(3))


def test_wrong_arrays_are_named():
    """A missing array, a wrong shape and a wrong length each say what was expected."""
    layout = (TensorSpec("coef", (1, 2), "float32"), TensorSpec("intercept", (1,), "float32"))
    with pytest.raises(ValueError, match=r"'intercept', which is not there"):
        flatten({"coef": np.zeros((1, 2))}, layout)
    with pytest.raises(ValueError, match=r"'coef' has shape \(2,\), expected \(1, 2\)"):
        flatten({"coef": np.zeros(2), "intercept": np.zeros(1)}, layout)
    with pytest.raises(ValueError, match=r"shape \(2,\), the layout needs \(3,\)"):
        unflatten(np.zeros(2, dtype=np.float32), layout)
