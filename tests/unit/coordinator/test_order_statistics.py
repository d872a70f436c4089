"""Median and trimmed mean against what sorting a column in Python gives, and both ways to sort
against each other."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from xain_coordinator.aggregation.aggregator import RuleFailed
from xain_coordinator.aggregation.robust.order_statistics import (
    MAX_NETWORK_ROWS,
    Median,
    TrimmedMean,
    sort_by_column,
    sort_by_network,
)

Array = NDArray[Any]
DTYPES = ("float16", "float32", "float64")
ONES = np.ones(1, np.int64)  # nobody looks at them


@st.composite
def tiles(draw: st.DrawFn, min_rows: int = 1) -> Array:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.integers(min_rows, MAX_NETWORK_ROWS + 9)), draw(st.integers(1, 9))
    # Few different values, so that many are equal, and both zeros.
    values = st.sampled_from([-2.5, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0]) | st.floats(
        width=16, allow_nan=False, allow_infinity=False
    )
    return draw(arrays(dtype, shape, elements=values))


@settings(deadline=None)
@given(tiles(), st.data())
def test_both_ways_to_sort_give_the_same_bits(tile, data):
    """Which of them is taken is a matter of speed alone."""
    first = data.draw(st.integers(0, len(tile) - 1))
    end = data.draw(st.integers(first + 1, len(tile)))
    rows = tile + tile.dtype.type(0)  # one zero only; of two, either may come first
    room = np.concatenate([rows, rows[:1]])
    by_network = sort_by_network(room, first, end)
    expected = np.sort(rows, axis=0)[first:end]
    assert np.stack(by_network).tobytes() == expected.tobytes()
    assert np.stack(sort_by_column(rows, first, end)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("k", range(1, 13))
def test_a_network_sorts_everything(k):
    """A network that sorts all rows of zeros and ones sorts all rows (Knuth 1973, the 0-1
    principle)."""
    columns = np.arange(2**k)
    rows = ((columns >> np.arange(k)[:, np.newaxis]) & 1).astype(np.float32)
    for first in range(k):
        room = np.concatenate([rows, rows[:1]])
        got = sort_by_network(room, first, first + 1)
        assert np.array_equal(got, np.sort(rows, axis=0)[first : first + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_do_not_overflow(dtype):
    """Their mean lies between them."""
    largest = np.finfo(dtype).max
    tile = np.full((4, 2), largest, dtype)
    tile[:, 1] *= -1
    for rule in (Median(), TrimmedMean(1), TrimmedMean(0)):
        combined = rule.combine(tile, ONES)
        np.testing.assert_allclose(combined / float(largest), [1.0, -1.0], rtol=1e-14)


@pytest.mark.parametrize("k", [5, MAX_NETWORK_ROWS + 2])
def test_a_minority_does_not_move_it(k):
    """The result lies among the honest values for any values of the minority."""
    chance = np.random.default_rng(4)
    tile = chance.normal(size=(k, 50)).astype(np.float32)
    num_byzantine = (k - 1) // 2
    honest = tile[num_byzantine:].copy()
    for value in (3e38, -3e38, 0.0):
        tile[:num_byzantine] = value
        for rule in (Median(), TrimmedMean(num_byzantine)):
            combined = rule.combine(tile, ONES)
            assert (honest.min(axis=0) <= combined).all()
            assert (combined <= honest.max(axis=0)).all()


def test_trimmed_mean_needs_enough_updates():
    """Something must be left."""
    TrimmedMean(2).check(5)
    with pytest.raises(RuleFailed, match=r"'trimmed_mean' .*trim = 2 .*4 updates, not 4"):
        TrimmedMean(2).check(4)


def test_a_tile_stays_as_it_is():
    """Sorting takes place elsewhere: the rows are read on in the next pass, or by others."""
    tile = np.arange(12, dtype=np.float32).reshape(3, 4)[::-1].copy()
    before = tile.copy()
    Median().combine(tile, ONES)
    assert np.array_equal(tile, before)
