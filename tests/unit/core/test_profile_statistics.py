"""Statistics in data profiles: refused if damaged, kept while a model may be made from them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.core.bench import Bench, make_rules

from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.effects import InitialiseModel
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.schema import Column
from xain_workloads.tables.table import Table


def profile(*names: str) -> DataProfile:
    target = np.array(["x", "y"] * 5)
    values = {name: np.arange(10.0) for name in names}
    return Table(tuple(Column(name) for name in names), values, target).profile()


def with_count(number: int) -> str:
    """Statistics of which one column says to have so many values."""
    told = json.loads(profile("a", "b").statistics)
    told["columns"][0]["count"] = number
    return json.dumps(told)


def changed(**keys: object) -> str:
    """Statistics with other values under these keys; None removes one."""
    told = json.loads(profile("a", "b").statistics) | keys
    return json.dumps({key: value for key, value in told.items() if value is not None})


MOMENTS = {"count": 10, "mean": 0.0, "m2": 1.0}


@pytest.mark.parametrize(
    ("statistics", "complaint"),
    [
        ("{}", "cannot be read: Object missing required field `version`"),
        ("no JSON", "the statistics cannot be read: JSON is malformed"),
        (profile("a").statistics, "are of 1 columns; the data have 2"),
        (changed(rows=10**6), "are of 1000000 rows; the data have"),
        (with_count(10**6), "are of 1000000 rows; the data have"),
        (profile("a", "c").statistics, "a number column 'c', which the data do not have"),
        (changed(target=MOMENTS), "'class_counts' and moments of a 'target'"),
        (changed(target=MOMENTS, class_counts=None), "moments of the target of a classification"),
        (changed(class_counts={"x": 5, "z": 5}), "count 'z', of which the data have no class"),
        (changed(class_counts={"x": -1}), ">= 0 - at `$.class_counts"),
        (changed(class_counts={"x": 5, "y": 6}), "count 11 rows of classes; the data have 10"),
    ],
)
def test_statistics_that_cannot_be_used_are_refused_for_their_sender(statistics, complaint):
    """The initial model could not be made from them, and the session would wait for all."""
    bench = Bench(make_rules(min_participants=2))
    damaged = replace(profile("a", "b"), statistics=statistics)
    refusal = bench.refuses(c.Rendezvous("x", damaged), errors.ProfileMismatch)
    assert complaint in str(refusal)
    bench.join("a", "b", profile=profile("a", "b"))
    assert bench.session.model is not None
    assert complaint in str(bench.refuses(c.Rendezvous("x", damaged), errors.ProfileMismatch))


def test_statistics_of_a_regression_that_count_classes_are_refused():
    numbers = replace(profile("a", "b"), task="regression")
    refusal = Bench(make_rules()).refuses(c.Rendezvous("x", numbers), errors.ProfileMismatch)
    assert "count the classes of a regression" in str(refusal)


def test_statistics_are_forgotten_when_no_model_can_be_made_from_them_any_more():
    """Each may take 512 KiB, in memory and in every snapshot. A model that has to be made again is
    made with the preprocessing that was fitted from them."""
    bench = Bench(make_rules(min_participants=2, rounds=3), answers=False)
    told = profile("a")
    bench.join("a", "b", profile=told)
    assert bench.owed == [InitialiseModel("workload", (told, told), names=("a", "b"))]
    bench.restart()
    assert bench.owed == [InitialiseModel("workload", (told, told), names=("a", "b"))]
    (requested,) = bench.happened(e.ModelRequested)
    assert requested == e.ModelRequested(participants=("a", "b"))  # the journal has their profiles
    bench.answer()
    bench.join("late", profile=told)
    known = bench.session.members.values()
    assert [member.profile for member in known] == [replace(told, statistics="")] * 3
    assert bench.session.requested == (replace(told, statistics=""),) * 2
    bench.restart()
    bench.end_all()
    bench.answer()
    assert bench.session.requested == (replace(told, statistics=""),) * 2
