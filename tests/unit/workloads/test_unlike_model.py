"""A site that joins after the first model was made is compared with the model."""

import numpy as np
import pytest

from support.learning import table_of
from xain_workloads.tables.checks.unlike_model import unlike_columns
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.table import Table
from xain_workloads.workload import create, initial_model


def site(pressures: np.ndarray, sexes: tuple[str | None, ...] = ("female", "male")) -> Table:
    rows = len(pressures)
    names = np.empty(rows, dtype=object)
    names[:] = [sexes[i % len(sexes)] for i in range(rows)]
    target = np.array(["alive", "dead"] * (rows // 2))
    return table_of({"pressure": pressures, "sex": names}, target)


PRESSURES = np.random.default_rng(1).normal(140, 30, 60)
MODEL = initial_model(create("sgd"), [site(PRESSURES).profile(), site(PRESSURES + 5).profile()])


@pytest.mark.parametrize(
    ("late", "told"),
    [
        (site(PRESSURES - 20), []),
        (site(PRESSURES, ("female", "male", "male", None)), []),
        (site(PRESSURES[:8] / 7.5), []),  # too few rows to tell
        (
            site(PRESSURES / 7.5),
            ['its median, 18|spreads below the mean|set data.factors."pressure" = N'],
        ),
        (
            site(PRESSURES, ("F", "M")),
            ["60 of 60 values are unknown|'female', 'male', and not 'F', 'M'; set data.replace"],
        ),
    ],
    ids=["another mean", "missing values", "few rows", "another unit", "other names"],
)
def test_columns_of_a_late_site_are_compared_with_the_model(late, told):
    """Numbers by their median and the model's mean and spread, categories by their names."""
    assert prepare(MODEL.metadata, late).features.shape[1] == 3
    found = list(unlike_columns(MODEL.metadata, late))
    assert len(found) == len(told)
    for message, parts in zip(found, told, strict=True):
        assert all(part in message for part in parts.split("|")), message


def test_trees_tell_nothing_of_numbers():
    profiles = [site(PRESSURES).profile(), site(PRESSURES).profile()]
    model = initial_model(create("xgboost", {"mode": "bagging"}), profiles)
    assert list(unlike_columns(model.metadata, site(PRESSURES / 7.5))) == []
