"""Mappings that change one entry at a time: as copies would be, without the copying."""

from collections.abc import Mapping
from functools import partial
from string import ascii_lowercase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xain_coordinator.core.vocabulary.layered import (
    MAX_CHANGES,
    _Layered,
    excluding,
    including,
    including_all,
)

KEYS = ascii_lowercase  # more than MAX_CHANGES, so that a mapping of them has layers
NUM = 2000


def changed(
    mapping: Mapping[str, int], plain: dict[str, int], change: str, key: str, value: int
) -> tuple[Mapping[str, int], dict[str, int]]:
    """One change of a mapping, and of a copy of the dict that it is to be like."""
    plain = dict(plain)
    match change:
        case "including":
            plain.pop(key, None)
            plain[key] = value
            return including(mapping, key, value), plain
        case "excluding":
            plain.pop(key, None)
            return excluding(mapping, key), plain
        case _:
            more = {name: value for name in KEYS if name >= key}
            plain = {name: old for name, old in plain.items() if name not in more} | more
            return including_all(mapping, more), plain


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["including", "including", "excluding", "all"]),
            st.sampled_from(KEYS),
            st.integers(),
            st.integers(0, 3),
        ),
        max_size=120,
    )
)
def test_every_version_is_like_a_copy(steps):
    """In content and order, whatever becomes of those that come from it, and from whichever of the
    versions so far the next one comes."""
    first = dict.fromkeys(KEYS, 0)
    versions = [(first, first)]
    for change, key, value, back in steps:
        mapping, plain = versions[-1 - min(back, len(versions) - 1)]
        versions.append(changed(mapping, plain, change, key, value))
    for mapping, plain in versions:
        assert list(mapping) == list(mapping.keys()) == list(plain)
        assert list(mapping.items()) == list(plain.items())
        assert list(mapping.values()) == list(plain.values())
        assert len(mapping) == len(plain)
        assert mapping == plain
        assert repr(mapping) == repr(plain)
        assert [mapping.get(key) for key in KEYS] == [plain.get(key) for key in KEYS]
        assert [key in mapping for key in KEYS] == [key in plain for key in KEYS]
        for key, value in plain.items():
            assert mapping[key] == value
            assert (key, value) in mapping.items()
        for key in set(KEYS) - set(plain):
            assert mapping.get(key, "none") == "none"
            with pytest.raises(KeyError, match=key):
                mapping[key]


def test_most_changes_copy_few_entries():
    """The cost of a change does not grow with the mapping."""
    mapping = dict.fromkeys(map(str, range(NUM)), 0)
    num_whole = 0
    for number in range(NUM):
        change = excluding if number % 3 == 0 else partial(including, value=number)
        mapping = change(mapping, key=str(number))
        if isinstance(mapping, _Layered):
            assert len(mapping.layers[1]) < MAX_CHANGES
        else:
            num_whole += 1
    assert len(mapping) == NUM - len(range(0, NUM, 3))
    assert 1 <= num_whole <= NUM // MAX_CHANGES + 1


def test_a_key_that_is_not_there_is_not_removed():
    mapping = {"a": 1}
    assert excluding(mapping, "b") is mapping
