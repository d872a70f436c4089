"""The coordinator evaluates models on data of its own, and a failure costs it nothing else."""

import sys
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import numpy as np
import pytest
from tests.unit.coordinator.test_work import Disk, fleet, make_rules

from support.logs import capture_logs
from xain_coordinator.assembly.warm_start import load_model_file
from xain_coordinator.config.sections.evaluate import EvaluateSettings
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import GlobalModel, Phase
from xain_coordinator.driver.effects import store_model
from xain_coordinator.driver.own_evaluation import (
    SEED,
    TEST_FRACTION,
    evaluate_stored,
    fit_central,
    load_own_data,
)
from xain_coordinator.ports import StoreError
from xain_coordinator.stores.memory import MemoryStore
from xain_coordinator.upkeep.model_folder import write_central
from xain_workloads.comparing.gains import Budget, LocalModel
from xain_workloads.errors import DataError
from xain_workloads.linear.row_losses import single_losses
from xain_workloads.model import Model
from xain_workloads.tables.data import load_table
from xain_workloads.tables.partition import split_train_test
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.table import Table
from xain_workloads.tables.table_settings import TableSettings
from xain_workloads.workload import create, fit_centralised, initial_model, measure


@pytest.fixture(scope="module")
def iris() -> Table:
    return load_table("iris")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def stored(iris: Table, store: MemoryStore) -> GlobalModel:
    """An initial model for iris, in the store."""
    return store_model(store, 0, create("sgd").initial_model([iris.profile()]))


def test_stored_model_is_measured_as_the_workload_measures_it(iris, store, stored):
    found = evaluate_stored(store, stored, lambda _: iris)
    assert found.num_samples == 150
    assert sorted(found.metrics) == ["accuracy", "loss"]
    assert found.metrics["accuracy"] == pytest.approx(1 / 3)


def test_central_model_is_trained_on_four_fifths_and_compared_on_the_others(iris, store, tmp_path):
    """On the same rows as the global model, and the same each time. Its file is that of a model."""
    workload = create("sgd")
    whole = fit_centralised(workload, iris, epochs=3, seed=1)
    stored = store_model(store, 4, whole)
    found, exported = fit_central(store, stored, lambda _: iris, Budget(1, 1e9))
    assert fit_central(store, stored, lambda _: iris, Budget(1, 1e9))[0] == found
    train, test = split_train_test(iris, TEST_FRACTION, SEED)
    assert found.tallies == measure(whole, test).tallies
    local = found.local
    alone = fit_centralised(workload, train, epochs=1, seed=SEED)
    assert local.passes == 1
    assert local.tallies.num_rows == test.num_samples == 30
    (difference,) = local.differences
    assert difference.round == 4
    losses = [single_losses(workload, one, prepare(one.metadata, test)) for one in (whole, alone)]
    kept = write_central(tmp_path, exported)
    loaded, profile = load_model_file(Path(kept))
    np.testing.assert_array_equal(loaded.vector, exported.model.vector)
    assert measure(loaded, test).tallies == local.tallies
    assert measure(alone, test).tallies == local.tallies
    assert difference.total == pytest.approx((losses[1] - losses[0]).sum())
    assert [column.name for column in profile.columns] == [one.name for one in iris.columns]


def test_central_model_is_cut_short_by_a_clock_that_goes_ahead(iris, store):
    """A coordinator that is stopped does not wait for the end of the training."""
    stored = store_model(store, 1, fit_centralised(create("sgd"), iris, epochs=1, seed=1))
    found, exported = fit_central(store, stored, lambda _: iris, Budget(1000, 1e9), lambda: inf)
    assert found.local.why_not == "there was no time for the first part of its training"
    assert exported is None


def test_central_model_needs_rows_of_two_classes(iris, store):
    stored = store_model(store, 1, fit_centralised(create("sgd"), iris, epochs=1, seed=1))
    of_one = iris.subset(range(40))
    found, exported = fit_central(store, stored, lambda _: of_one, Budget(3, 1e9))
    assert found.num_samples == 8, "the global model is measured all the same"
    assert found.local == LocalModel(why_not="all rows to train on are of one class")
    assert exported is None


def test_model_without_a_workload_cannot_be_measured(iris, store):
    model = store_model(store, 0, Model(np.zeros(3, np.float32), ()))
    with pytest.raises(ValueError, match="do not name its workload"):
        evaluate_stored(store, model, lambda _: iris)


def test_damaged_model_is_not_measured(iris, store, stored):
    other = replace(stored, ref=replace(stored.ref, digest="0" * 32))
    with pytest.raises(StoreError, match="damaged"):
        evaluate_stored(store, other, lambda _: iris)


def test_category_of_number_codes_is_read_as_the_model_takes_it(tmp_path, store):
    """The sites have declared the type, which the coordinator's own file does not tell."""
    file = tmp_path / "rows.csv"
    file.write_text("ward,y\n" + "1,yes\n2,no\n" * 20)
    site = load_table(file, target="y", types={"ward": "category"})
    model = store_model(store, 0, initial_model(create("sgd"), [site.profile(5)]))
    found = evaluate_stored(
        store, model, partial(load_own_data, str(file), TableSettings(target="y"))
    )
    assert found.num_samples == 40
    assert found.metrics["accuracy"] == 0.5


def test_missing_package_is_named(tmp_path, monkeypatch):
    file = tmp_path / "rows.csv"
    file.write_text("a,y\n1,yes\n2,no\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        DataError, match=r"without pyarrow: pip install 'xain_participant-.*\[tables\]'"
    ):
        load_own_data(str(file), TableSettings(target="y"))


def test_data_without_rows_are_refused(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("a,y\n")
    with pytest.raises(DataError, match="no rows"):
        load_own_data(str(file), TableSettings(target="y"))


async def test_evaluation_that_fails_is_a_warning(store):
    """Here the data of a restarted coordinator are no longer configured."""
    journal = Disk()
    with capture_logs() as logs:
        async with fleet(journal, store, make_rules(evaluate_data=True)) as f:
            await f.join("p0")
            await f.until(Phase.COLLECTING)
            await f.hand_in("p0")
            await f.driver.brings(c.EvaluationDone)
            await f.until(Phase.FINISHED)
            assert f.driver.session.cause == "completed"
            assert f.driver.failure is None
    (event,) = [one for one in journal.events if isinstance(one, e.ModelEvaluated)]
    assert (event.round, event.evaluation) == (1, None)
    assert event.reason.startswith("[evaluate] data is not set")
    (line,) = [one for one in logs if one["event"] == "evaluation_failed"]
    assert line["log_level"] == "warning"


async def test_central_model_that_cannot_be_trained_is_a_warning(store):
    """The data are no longer configured here either; the reason is kept for the status."""
    journal = Disk()
    rules = replace(make_rules(evaluate_data=True), evaluate_local=True, rounds=2)
    with capture_logs() as logs:
        async with fleet(journal, store, rules) as f:
            await f.join("p0")
            await f.until(Phase.COLLECTING)
            await f.hand_in("p0")  # the initial weights
            await f.driver.brings(c.AggregationDone)
            await f.hand_in("p0", round_=1)
            await f.driver.brings(c.CentralDone)
            await f.until(Phase.FINISHED)
            assert f.driver.session.cause == "completed"
            central = f.driver.session.evaluation.central
    reason = central.evaluation.local.why_not
    assert reason.startswith("[evaluate] data is not set")
    (line,) = [one for one in logs if one["event"] == "no_central_model"]
    assert (line["log_level"], line["reason"]) == ("warning", reason)


def test_own_data_are_read_by_the_keys_of_evaluate(tmp_path):
    """A message names the coordinator's keys, which are those of the sites, and they mend it."""
    file = tmp_path / "own.csv"
    file.write_text("a,y\n1,u\nn/a,v\n3,u\n4,\n5,v\n")
    with pytest.raises(DataError) as caught:
        load_own_data(str(file), TableSettings(target="y"))
    assert 'set evaluate.missing = ["n/a"]' in str(caught.value)
    assert 'set evaluate.missing_target = "drop"' in str(caught.value)
    assert "data." not in str(caught.value).replace(str(file), "")
    settings = EvaluateSettings(data=str(file), missing=("n/a",), missing_target="drop")
    table = load_own_data(str(file), settings)
    assert (table.num_samples, table.without_target) == (4, 1)


def test_own_data_are_chosen_by_the_keys_of_the_sites(tmp_path):
    """Columns that the sites leave out, names that they rename, and rows that they do not take."""
    file = tmp_path / "own.csv"
    file.write_text("Nr,Station,Alter,seen,y\n1,7,61,2020-01-03,u\n2,8,17,2020-01-04,v\n")
    settings = EvaluateSettings(
        data=str(file),
        drop=("Nr",),
        rename={"Station": "ward", "Alter": "age"},
        dates={"seen": "parts"},
        where="age >= 18",
    )
    of_model = (("ward", "category"), ("age", "number"), ("seen year", "number"))
    table = load_own_data(str(file), settings, of_model)
    types = {column.name: column.type for column in table.columns}
    assert (types["ward"], types["age"], table.num_samples) == ("category", "number", 1)
    assert "Nr" not in types
    with pytest.raises(DataError, match=r"no column 'dose'; there are: 'ward', 'age'"):
        load_own_data(str(file), settings, (*of_model, ("dose", "number")))
    with pytest.raises(DataError, match=r"\[evaluate\] drop names 'No', which is no column"):
        load_own_data(str(file), EvaluateSettings(data=str(file), drop=("No",)))
