import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xain_parameters.client.cuts import cut_keys, summed, unique
from xain_parameters.keys import END, Range, owners

edges = st.sets(st.integers(1, END - 1), max_size=40)
keys = st.lists(st.integers(0, END - 1) | st.integers(0, 20), max_size=80)


@pytest.mark.parametrize("is_bounded", [True, False])
@given(edges, keys)
def test_each_key_is_cut_to_the_range_that_owns_it(is_bounded, inner, numbers):
    """Once, and in ascending order within a range; for few ranges and for many."""
    bound = 1_000 if is_bounded else None
    ranges = [Range(*pair) for pair in itertools.pairwise([0, *sorted(inner), END])]
    if is_bounded:
        numbers = [number % 1_000 for number in numbers]
    array = np.array(sorted(set(numbers)), np.uint64)
    if bound is None:
        expected = owners(array, ranges)
    else:
        lows = [each.indices(bound)[0] for each in ranges]
        expected = np.array([sum(low <= key for low in lows) - 1 for key in array.tolist()])
    order, cuts = cut_keys(array, ranges, bound)
    ordered = array if order is None else array[order]
    found = {index: ordered[start:stop] for index, start, stop in cuts}
    assert sorted(found) == sorted(set(expected.tolist()))
    for index, part in found.items():
        np.testing.assert_array_equal(part, array[expected == index])


@given(keys)
def test_duplicate_keys_are_summed_and_found_again(numbers):
    array = np.array(numbers, np.uint64)
    values = np.arange(2 * len(numbers), dtype=np.float64).reshape(-1, 2)
    different, sums = summed(array, values)
    assert different.tolist() == sorted(set(numbers))
    for key, total in zip(different, sums, strict=True):
        np.testing.assert_array_equal(total, values[array == key].sum(axis=0))
    different, inverse = unique(array)
    again = different if inverse is None else different[inverse]
    np.testing.assert_array_equal(again, array)
