"""Settings that a program hands over as a TOML file."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xain.settings_file import as_toml

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=6,
)


@given(st.dictionaries(TEXT, VALUES))
def test_values_keep_their_types(train: dict[str, Any]) -> None:
    """Text that looks like a number or like true stays text, and a table stays a table."""
    read = tomllib.loads(as_toml({"rounds.rounds": 3, "train": train}))
    assert repr(read) == repr({"rounds": {"rounds": 3}, "train": train})


def test_later_settings_override_earlier_ones() -> None:
    """Whether they come one by one or as a section; what the caller has given stays as it is."""
    train = {"lr": 1, "opt": {"a": 1}}
    settings = {"train": train, "train.opt.b": np.float32(0.5), "train.lr": 2, 'a."b.c"': Path("p")}
    assert tomllib.loads(as_toml(settings)) == {
        "train": {"lr": 2, "opt": {"a": 1, "b": 0.5}},
        "a": {"b.c": "p"},
    }
    assert train == {"lr": 1, "opt": {"a": 1}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": {"a": {"b": None}}}, "train.a.b is None; a setting is a number"),
        ({"train": {"a": [{1}]}}, r"train.a is \{1\}; a setting is"),
        ({"a b": 1}, "'a b' is no key of a setting"),
        ({"train": 1, "train.a": 1}, "train.a is within train, which is given as a value"),
    ],
)
def test_setting_that_toml_cannot_hold_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_toml(settings)
