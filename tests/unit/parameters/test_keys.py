import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xain_parameters.keys import END, Range, even, is_cover, mixed, owners

edges = st.sets(st.integers(1, END - 1), max_size=8)


def cover(inner: set[int]) -> list[Range]:
    all_edges = [0, *sorted(inner), END]
    return [Range(a, b) for a, b in itertools.pairwise(all_edges)]


@given(edges, st.integers(1, 10_000))
def test_every_key_of_a_bound_lies_in_exactly_one_range(inner, bound):
    """The last one included, which ps-lite's ranges leave out."""
    ranges = cover(inner)
    assert is_cover(ranges)
    low_high = [each.indices(bound) for each in ranges]
    assert low_high[0][0] == 0
    assert low_high[-1][1] == bound
    assert all(a[1] == b[0] for a, b in itertools.pairwise(low_high))


@given(edges, st.lists(st.integers(0, END - 1), max_size=50))
def test_every_64_bit_key_has_one_owner(inner, keys):
    ranges = cover(inner)
    array = np.array(keys, np.uint64)
    positions = mixed(array)
    for key, index in zip(positions.tolist(), owners(array, ranges).tolist(), strict=True):
        assert ranges[index].start <= key < ranges[index].stop


def test_mix_is_bijective_and_spreads_small_keys():
    positions = mixed(np.arange(1 << 16, dtype=np.uint64))
    assert len(np.unique(positions)) == 1 << 16
    counts = np.bincount((positions >> np.uint64(60)).astype(int), minlength=16)
    assert counts.min() > 3_700  # of 4,096 a sixteenth


def test_even_ranges_cover_everything():
    for num in range(1, 20):
        assert is_cover(even(num))
    assert not is_cover([Range(0, 5), Range(6, END)])
