"""Profiles of participants add up to one."""

import subprocess
import sys
from itertools import permutations

import pytest

from xain_workloads.tables.profile import DataProfile, sort_classes, union


@pytest.mark.parametrize(
    ("names", "in_order"),
    [
        (["10", "9", "-1", "2.5", "9"], ("-1", "2.5", "9", "10")),
        (["10", "9", "b", "a"], ("10", "9", "a", "b")),
    ],
    ids=["numbers", "text, because of one name that is no number"],
)
def test_classes_sort_as_what_they_are(names, in_order):
    """Class order is weight order, and "10" comes after "9" for all."""
    assert sort_classes(names) == in_order


@pytest.mark.parametrize(
    "names", [["nan", "2", "1", "3"], ["1", "1.0", "01", "2"], ["b", "a", "c"], ["inf", "1", "2"]]
)
def test_order_of_classes_does_not_depend_on_the_order_of_joining(names):
    """The classes include nan and equal numbers."""
    assert len({sort_classes(order) for order in permutations(names)}) == 1


@pytest.mark.parametrize(
    ("first", "together"),
    [
        (DataProfile(3, 4, ("0", "2")), DataProfile(8, 4, ("0", "1", "2"))),
        # An empty partition, whose width may be a guess, stops no other.
        (DataProfile(0, 1), DataProfile(5, 4, ("1", "2"))),
    ],
)
def test_union_adds_rows_and_merges_classes(first, together):
    """The model knows every class that any participant knows."""
    assert union([first, DataProfile(5, 4, ("1", "2"))]) == together


def test_union_refuses_profiles_that_do_not_fit():
    """Different widths, or no rows anywhere, are told before training starts."""
    with pytest.raises(ValueError, match=r"number of features: \[3, 4\]"):
        union([DataProfile(1, 4), DataProfile(1, 3)])
    with pytest.raises(ValueError, match="no participant has any rows"):
        union([DataProfile(0, 4)])


LIGHT = ["model", "workload", "tables.profile", "tables.partition", "linear.sgd"]


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_stay_light(module):
    """The coordinator imports these, and has neither scikit-learn nor Arrow."""
    code = (
        f"import sys, xain_workloads.{module};"
        "print(sorted({'sklearn', 'pyarrow', 'scipy', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
