"""Exported models: each file gives the model back, and is used without this program."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from xain_coordinator.assembly.warm_start import load_model_file
from xain_coordinator.cli import main as cli
from xain_foundation.exit_statuses import CannotStart
from xain_workloads.errors import NoModel
from xain_workloads.exported import formats
from xain_workloads.model import Model, TensorSpec, flatten
from xain_workloads.nets import neural_builders
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.schema import Column
from xain_workloads.tables.statistics import MIN_CATEGORY_COUNT
from xain_workloads.tables.table import Table
from xain_workloads.workload import create, initial_model

ABOUT = {"session": "5e5510", "round": 7, "classes": [], "columns": [], "target": "outcome"}

# Runs pieces of code without this program's packages: a file that needs them would fail.
PLAIN = """
import json, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("xain"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import numpy as np
for line in sys.stdin:
    code, path, rows = json.loads(line)
    names = {"np": np, "json": json, "path": path, "rows": rows}
    exec(code, names)
    print(json.dumps(np.asarray(names["result"]).tolist()), flush=True)
"""
Alone = Callable[[str, Path, Table], Any]


def table(task: str, num_rows: int = 60) -> Table:
    """Rows with a gap, a category, and numbers of two scales."""
    chance = np.random.default_rng(5)
    age = chance.normal(50, 10, num_rows)
    dose = chance.normal(0.001, 0.0002, num_rows)
    dose[3] = np.nan
    ward = np.array([("north", "south", None)[i % 3] for i in range(num_rows)], dtype=object)
    score = (age - 50) / 10 + (ward == "north") * 2.0
    labels = np.where(score > 0.7, "ill", "well").astype(np.str_)
    return Table(
        (Column("age"), Column("dose"), Column("ward", "category")),
        {"age": age, "dose": dose, "ward": ward},
        labels if task == "classification" else score * 100 + 1000,
        "outcome",
    )


def trained(name: str, task: str) -> tuple[Model, Table]:
    data = table(task)
    workload = create(name, {"task": task})
    model = initial_model(workload, [data.profile(MIN_CATEGORY_COUNT)])
    rows = prepare(model.metadata, data)
    result = workload.train(model, rows, epochs=5, epoch_base=0, seed=1)
    return Model(_joined(name, model, result.vector), model.layout, model.metadata), data


def _joined(name: str, model: Model, update: Any) -> Any:
    if name != "xgboost":
        return update
    from xain_workloads.trees import trees

    kind = trees.BoosterKind.from_metadata(model.metadata)
    added = trees.parse_update(update.tobytes(), kind, 5)
    whole = trees.joined(model.vector.tobytes(), [(added, 1)], kind)
    return np.frombuffer(whole, np.uint8)


def predicted(model: Model, data: Table) -> Any:
    workload = create(model.metadata["workload"], json.loads(model.metadata["options"]))
    return workload.predict(model, prepare(model.metadata, data).features)


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    """Run code on a file and a table in a process that imports its libraries once for all tests."""
    with subprocess.Popen(
        [sys.executable, "-c", PLAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def run(code: str, path: Path, data: Table) -> Any:
            rows = [
                [None if value != value else value for value in data.values[c.name].tolist()]
                for c in data.columns
            ]
            print(json.dumps([code, str(path), rows]), file=process.stdin, flush=True)
            answer = process.stdout.readline()
            assert answer, f"it ended with status {process.wait()}"
            return np.array(json.loads(answer))

        yield run


def same(a: Any, b: Any, tolerance: float = 1e-9) -> bool:
    if np.asarray(a).dtype.kind in "UO":
        return list(a) == list(b)
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance))


@pytest.mark.parametrize("suffix", sorted(formats.WRITERS))
@pytest.mark.parametrize("name", ["sgd", "mlp", "neural", "xgboost", "script"])
def test_a_session_begins_with_an_exported_model_or_says_why_not(tmp_path, name, suffix):
    """--from-model takes what `export` writes: weights, layout with the kinds of the tensors,
    metadata and profile. Files that only predict are refused with the names of the others."""
    if name == "script":
        layout = (TensorSpec("b", (2,), "float32", "statistic"), TensorSpec("a", (1, 2), "float64"))
        model = Model(np.arange(4.0), layout, {"personal": "[]"})
    else:
        model, _ = trained(name, "classification")
    path = tmp_path / f"model{suffix}"
    profile = {"num_features": 3, "classes": ["ill", "well"], "target": "outcome"}
    try:
        formats.write(path, model, {**ABOUT, "profile": profile})
    except NoModel:
        path.touch()  # a format that does not hold this model
    if suffix in (".skops", ".onnx", ".csv"):
        with pytest.raises(CannotStart, match=r"give a .npy file, or one of `xain-coord.* .json,"):
            load_model_file(path)
        return
    read, found = load_model_file(path)
    assert read.layout == model.layout
    assert dict(read.metadata) == dict(model.metadata)
    assert (found.num_features, found.classes, found.target) == (3, ("ill", "well"), "outcome")
    if name == "xgboost":
        assert json.loads(read.vector.tobytes()) == json.loads(model.vector.tobytes())
    else:
        assert read.vector.tolist() == model.vector.tolist()


def test_a_session_begins_with_the_state_dict_of_another_program(tmp_path):
    """Without our JSON object the tensors have their names, shapes and order in the file."""
    tensors = {"a.weight": np.float32([[1, 2]]), "b": np.float32([3])}
    save_file(tensors, tmp_path / "model.safetensors")
    model, profile = load_model_file(tmp_path / "model.safetensors")
    assert profile is None
    assert {spec.name: spec.shape for spec in model.layout} == {"a.weight": (1, 2), "b": (1,)}
    assert sorted(model.vector.tolist()) == [1, 2, 3]


SKOPS = """
from skops.io import load, get_untrusted_types
pipeline = load(path, trusted=get_untrusted_types(file=path))
table = np.array(rows, dtype=object).T
for i in (0, 1):
    table[:, i] = [np.nan if value is None else value for value in table[:, i]]
result = pipeline.predict(table)
"""


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("sgd", "classification"),
        ("mlp", "regression"),
        ("neural", "classification"),
        ("xgboost", "classification"),
        ("xgboost", "regression"),
    ],
)
def test_a_pipeline_predicts_the_same_in_plain_scikit_learn(tmp_path, alone, name, task):
    """The file holds preprocessing and estimator; no package of this program is imported."""
    model, data = trained(name, task)
    path = tmp_path / "model.skops"
    formats.write(path, model, ABOUT)
    # Trees and networks predict in single precision.
    tolerance = 1e-5 if name in ("neural", "xgboost") else 1e-9
    found = alone(SKOPS, path, data)
    if name == "xgboost" and task == "classification":  # positions, since XGBoost knows no names
        found = np.array(json.loads(model.metadata["classes"]))[found.astype(int)]
    assert same(found, predicted(model, data), tolerance)


ONNX = """
import onnxruntime
session = onnxruntime.InferenceSession(path)
age, dose, ward = rows
number = lambda values: np.array([np.nan if v is None else v for v in values], np.float32)[:, None]
text = np.array(["" if v is None else v for v in ward], dtype=object)[:, None]
result = session.run(None, {"age": number(age), "dose": number(dose), "ward": text})[0]
"""


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("name", ["sgd", "mlp", "neural"])
def test_an_onnx_model_predicts_the_same(tmp_path, alone, name, task):
    """Up to single precision."""
    model, data = trained(name, task)
    path = tmp_path / "model.onnx"
    formats.write(path, model, ABOUT)
    found = alone(ONNX, path, data)
    assert same(found.ravel(), predicted(model, data), 1e-3)


XGBOOST = """
import xgboost
booster = xgboost.Booster(model_file=path)
about = json.loads(booster.attr("xain"))
result = [about["round"], booster.num_boosted_rounds()]
"""


def test_plain_xgboost_loads_an_exported_model(tmp_path, alone):
    """An attribute of the exported model tells where it is from."""
    model, data = trained("xgboost", "classification")
    path = tmp_path / "model.json"
    formats.write(path, model, ABOUT)
    assert alone(XGBOOST, path, data).tolist() == [7, 5]


TORCH = """
import torch
from safetensors.torch import load_file
module = torch.nn.Linear(3, 2)
module.load_state_dict(load_file(path))
result = module(torch.ones(1, 3)).detach().numpy()
"""


def test_a_torch_module_loads_safetensors(tmp_path, alone):
    """A model of a script of one's own, whose tensors have the names of its modules."""
    tensors = {
        "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bias": np.array([1, 2], np.float32),
    }
    layout = tuple(TensorSpec(name, a.shape, "float32") for name, a in tensors.items())
    path = tmp_path / "model.safetensors"
    formats.write(path, Model(flatten(tensors, layout), layout, {}), ABOUT)
    assert alone(TORCH, path, table("regression")).tolist() == [[4.0, 14.0]]


def test_builder_predicts_from_the_command_line_once_it_is_allowed(tmp_path, monkeypatch):
    (tmp_path / "ward_nets.py").write_text("from torch.nn import Linear as make\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(neural_builders, "_allowed", {"ward_nets:make"})
    data = table("regression")
    options = {"task": "regression", "builder": "ward_nets:make"}
    model = initial_model(create("neural", options), [data.profile(MIN_CATEGORY_COUNT)])
    path, rows = tmp_path / "model.npz", tmp_path / "rows.csv"
    formats.write(path, model, {**ABOUT, "columns": formats.columns_of(model.metadata)})
    rows.write_text("age,dose,ward\n50,0.001,north\n60,0.001,south\n")
    monkeypatch.setattr(neural_builders, "_allowed", set())
    asked = ["predict", f"--model={path}", f"--data={rows}"]
    refused = CliRunner().invoke(cli.app, asked)
    assert refused.exit_code == 1
    assert "--allow-builder ward_nets:make" in refused.stderr
    found = CliRunner().invoke(cli.app, [*asked, "--allow-builder=ward_nets:make"])
    assert (found.exit_code, found.stdout.count("\n")) == (0, 3)


def test_a_model_of_a_script_has_no_pipeline(tmp_path):
    model = Model(np.zeros(3, np.float32), (), {})
    for suffix in (".skops", ".onnx"):
        with pytest.raises(NoModel, match="no estimator"):
            formats.write(tmp_path / f"model{suffix}", model, ABOUT)


def test_trees_have_no_form_in_onnx(tmp_path):
    model, _ = trained("xgboost", "classification")
    with pytest.raises(NoModel, match=r"trees are exported to \.json"):
        formats.write(tmp_path / "model.onnx", model, ABOUT)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".json", ".skops"])
def test_a_file_that_is_no_export_is_refused(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(NoModel, match="no model can be read"):
        formats.read(path)


def test_an_unknown_ending_is_refused(tmp_path):
    with pytest.raises(NoModel, match=r"must end in one of: \.csv, \.json, \.npz"):
        formats.write(tmp_path / "model.pkl", Model(np.zeros(1, np.float32), ()), ABOUT)


REGISTER = """
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from xain_workloads.exported import formats
from xain_coordinator.export.registry import register
read = formats.read(Path(sys.argv[1]))
about = {"session": "5e5510", "round": 7, "digest": "d", "workload": "sgd", "num_samples": 60,
         "evaluation": {"metrics": {"accuracy": 0.9}}, "coordinator_evaluation": None}
for _ in range(2):
    print(register("wards", read.model, about))
import mlflow
version = mlflow.MlflowClient().get_model_version("wards", "2")
run = mlflow.get_run(version.run_id)
print(run.data.metrics["evaluation_accuracy"], run.data.params["round"])
print([file.path for file in mlflow.artifacts.list_artifacts(version.source)])
"""


@pytest.mark.parametrize(("name", "other"), [("sgd", ".npz"), ("xgboost", ".json")])
def test_format_whose_package_is_missing_names_one_that_needs_none(
    tmp_path, monkeypatch, name, other
):
    """As in the image of the participant, where nobody can install one."""
    model, _ = trained(name, "classification")
    monkeypatch.setitem(sys.modules, "skops", None)
    monkeypatch.delitem(sys.modules, "skops.io", raising=False)
    with pytest.raises(NoModel, match=rf"needs skops\S*: pip .*; a \{other} file needs none, and"):
        formats.write(tmp_path / "model.skops", model, ABOUT)
    formats.write(tmp_path / f"model{other}", model, ABOUT)


def test_mlflow_registers_versions_of_a_model(tmp_path):
    """Each export is a new version, whose run has the metrics and the lineage."""
    model, _ = trained("sgd", "classification")
    path = tmp_path / "model.npz"
    formats.write(path, model, ABOUT)
    done = subprocess.run(
        [sys.executable, "-c", REGISTER, str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "MLFLOW_ALLOW_FILE_STORE": "true",  # the only one that needs no server
            "MLFLOW_TRACKING_URI": (tmp_path / "runs").as_uri(),
        },
    )
    assert done.returncode == 0, done.stderr
    first, second, measured, files = done.stdout.splitlines()
    assert (first, second) == ("models:/wards/1", "models:/wards/2")
    assert measured == "0.9 7"
    assert "model.skops" in files
