"""Imports of a workload before its first training."""

import json
import subprocess
import sys

import pytest

from xain_workloads import workload

# Packages whose import takes long; of others a first training may load a module.
SLOW = ("sklearn", "skops", "scipy", "pandas", "joblib", "torch", "xgboost", "xain_workloads")
MOST = 3  # single modules take no time: a package has hundreds
SCRIPT = """
import json, sys
from dataclasses import replace
from xain_participant import WorkloadParticipant
from xain_workloads import workload
from xain_workloads.tables.data import load
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.table import Table

name, options = sys.argv[1], json.loads(sys.argv[2])
is_number = options.get("task") == "regression"
table = Table.from_dataset(load("diabetes", task="regression") if is_number else load("iris"))
workload.import_needed(name, options)
before = set(sys.modules)
made = workload.create(name, options)
model = workload.initial_model(made, [table.profile()])
data = prepare(model.metadata, table, to_train=True)
result = made.train(model, data, epochs=1, epoch_base=0, seed=0)
if workload.trains(made) and name != "glm":
    made.measure(replace(model, vector=result.vector), data)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {}),
        ("mlp", {}),
        ("glm", {"task": "regression"}),
        ("bagging", {"publish": True}),
        ("bagging", {"vote": "soft", "publish": True, "estimator": "ExtraTreesClassifier"}),
        ("neural", {}),
        ("xgboost", {}),
    ],
)
def test_first_training_imports_nothing_that_takes_long(name, options):
    """So a participant that has imported what its workload needs is ready."""
    run = [sys.executable, "-c", SCRIPT, name, json.dumps(options)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    new = json.loads(done.stdout)
    late = [one for one in new if one.partition(".")[0] in SLOW]
    assert len(late) <= MOST, late


def test_unknown_workload_and_wrong_option_are_told():
    with pytest.raises(ValueError, match="unknown workload"):
        workload.import_needed("sdg")
    with pytest.raises(ValueError, match="lossy"):
        workload.import_needed("sgd", {"lossy": 1})
