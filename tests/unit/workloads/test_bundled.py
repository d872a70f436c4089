"""Data sets of scikit-learn that are read without it."""

import subprocess
import sys

import numpy as np
import pytest
from sklearn import datasets

from xain_workloads.bundled import BUNDLED, read_bundled


@pytest.mark.parametrize("name", BUNDLED)
def test_sets_are_those_of_scikit_learn(name):
    """To the bit, so that a model does not depend on who has read its rows."""
    theirs = getattr(datasets, f"load_{name}")()
    ours = read_bundled(name)
    np.testing.assert_array_equal(ours.features, theirs.data)
    np.testing.assert_array_equal(ours.target, theirs.target)
    assert ours.feature_names == [str(each) for each in theirs.feature_names]
    if ours.class_names is None:
        assert "target_names" not in theirs
    else:
        np.testing.assert_array_equal(ours.class_names, theirs.target_names)


def test_table_of_a_set_is_made_without_scikit_learn():
    """The import takes longer than all else that a participant does before its first round."""
    load = "from xain_workloads.tables.data import load; load('iris')"
    script = f"import sys; {load}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert not {"sklearn", "scipy"} & set(done.stdout.split())
