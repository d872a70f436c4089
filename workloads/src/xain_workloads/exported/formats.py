"""Formats of exported models. Each file can be loaded without this program.

.npz          numpy: an array for each tensor
.safetensors  PyTorch and others: an array for each tensor, as load_state_dict() takes them
.json         XGBoost's own format for its models; for others the tensors as lists of numbers
.skops        scikit-learn: a fitted Pipeline with the preprocessing
.onnx         ONNX: the same Pipeline
.csv          a spreadsheet or R: coefficients with intervals, of the workload "glm"

Every file but a .csv also has one JSON object with the model's lineage, layout and metrics. Nothing
is pickled or unpickled.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_foundation.names import shortened
from xain_foundation.wheels import pip_install_extra
from xain_workloads.ensembles import ensembles, held
from xain_workloads.ensembles.estimators import skops_files
from xain_workloads.errors import NoModel
from xain_workloads.exported.model_files import (
    UNREADABLE,
    check_archive,
    metadata_of,
    parse_json,
    read_json,
)
from xain_workloads.linear.glm.coefficients import coefficients_of
from xain_workloads.measures.thresholds import KEY as THRESHOLD_KEY
from xain_workloads.measures.thresholds import threshold_of
from xain_workloads.model import Model, TensorSpec, flatten, unflatten
from xain_workloads.scaffold import without_control
from xain_workloads.tables.preprocessing import preprocessing_of
from xain_workloads.workload import from_metadata

KEY = "xain"  # name of the JSON object, where the format has names
WHOLE = "weights"  # name of the one tensor of a model without a layout

# Types of pipelines that skops loads only if they are named as trusted.
TRUSTED = (
    *skops_files.TRUSTED,
    "sklearn.calibration._CalibratedClassifier",
    "sklearn.calibration._SigmoidCalibration",
    "sklearn.feature_selection._mutual_info.mutual_info_classif",
    "sklearn.feature_selection._mutual_info.mutual_info_regression",
    "sklearn.feature_selection._univariate_selection.chi2",
    "sklearn.feature_selection._univariate_selection.f_classif",
    "sklearn.feature_selection._univariate_selection.f_regression",
    "sklearn.multiclass._ConstantPredictor",
    "xgboost.core.Booster",
    "xgboost.sklearn.XGBClassifier",
    "xgboost.sklearn.XGBRegressor",
)


_Tensors = tuple[Mapping[str, NDArray[Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """Content of an exported file. about: its JSON object, with the model's metadata under
    "metadata".

    pipeline: a fitted Pipeline, of .skops files, which have no `model`.
    """

    about: Mapping[str, Any]
    model: Model | None = None
    pipeline: Any = None


def write(path: Path, model: Model, about: Mapping[str, Any]) -> None:
    """Write a model to path in place, in the format of its suffix. about: a JSON object with its
    lineage and metrics. Raises OSError; NoModel if the format cannot hold the model."""
    writer = WRITERS.get(path.suffix)
    if writer is None:
        raise NoModel(f"{path}: the file's name must end in one of: {', '.join(sorted(WRITERS))}")
    model = without_control(model)
    if is_held(model):
        raise NoModel(f"{path}: there is no model to export: {held.WHY_NO_MODEL}")
    whole = {
        **about,
        "metadata": dict(model.metadata),
        "layout": [asdict(spec) for spec in model.layout],
    }
    try:
        writer(path, model, whole)
    except ModuleNotFoundError as missing:
        is_trees = model.vector.dtype == np.uint8 and ensembles.KEY not in model.metadata
        other = ".json" if is_trees else ".npz"
        also = f"; a {other} file needs none, and predict reads it" if path.suffix != other else ""
        raise NoModel(f"{_missing(missing, path)}{also}") from None


def is_held(model: Model) -> bool:
    """Whether the model is a list of estimators that stay at the participants."""
    return model.vector[: len(held.MAGIC)].tobytes() == held.MAGIC


def read(path: Path) -> Exported:
    """Read a file of write(), other than .onnx. Raises NoModel."""
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise NoModel(f"{path}: only files can be read that end in {', '.join(sorted(_READERS))}")
    try:
        exported = reader(path)
        _require_described(exported.about)
        return exported
    except ModuleNotFoundError as missing:
        raise _missing(missing, path) from None
    except FileNotFoundError:
        raise NoModel(f"{path}: no such file") from None
    except UNREADABLE as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise NoModel(f"{path}: no model can be read from it: {shortened(why, 300)}") from None


def _require_described(about: Mapping[str, Any]) -> None:
    """Raise ValueError, TypeError or LookupError if the JSON object is none of described()."""
    texts = [about.get("target", ""), *about.get("classes", ())]
    for column in about.get("columns", ()):
        texts += [column["name"], column["type"]]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("names of columns, classes and the target are texts")


def pipeline_of(model: Model) -> Any:
    """Convert a model to a fitted Pipeline of scikit-learn, with its preprocessing and its
    threshold.

    Raises NoModel if the model is of no known workload.
    """
    from sklearn.pipeline import Pipeline

    steps = []
    preprocessing = preprocessing_of(model.metadata)
    if preprocessing is not None:
        steps.append(("preprocessing", preprocessing.to_sklearn()))
    try:
        estimator = from_metadata(model.metadata).to_sklearn(model)
    except ValueError as error:
        raise NoModel(f"no estimator can be made of the model: {error}") from None
    threshold = threshold_of(model.metadata)
    if threshold is not None and hasattr(estimator, "predict_proba"):
        estimator = _at_threshold(estimator, threshold)
    steps.append(("model", estimator))
    return Pipeline(steps)


def _at_threshold(estimator: Any, threshold: float) -> Any:
    """Put a fitted estimator of two classes into a FixedThresholdClassifier."""
    from sklearn.model_selection import FixedThresholdClassifier

    fixed = FixedThresholdClassifier(
        estimator, threshold=threshold, response_method="predict_proba"
    )
    fixed.estimator_ = estimator
    return fixed


def columns_of(metadata: Mapping[str, str]) -> list[dict[str, str]]:
    """Names and types of the columns that a model's rows have, in order; empty if unknown."""
    preprocessing = preprocessing_of(metadata)
    if preprocessing is None:
        return []
    return [{"name": name, "type": kind} for name, kind in preprocessing.types.items()]


def _missing(missing: ModuleNotFoundError, path: Path) -> NoModel:
    """The error of a format whose package is not installed, with how to install it."""
    return NoModel(
        f"{path}: a {path.suffix} file needs {missing.name}: "
        + ("pip install xgboost" if missing.name == "xgboost" else pip_install_extra("export"))
    )


def _no_ensemble(path: Path) -> NoModel:
    """The error of a format that cannot hold ensembles."""
    other = ", or train another workload, such as mlp" if path.suffix == ".onnx" else ""
    return NoModel(
        f"{path}: ensembles have no form in {path.suffix}; take {path.stem}.skops, which"
        f" scikit-learn and `predict` read{other}"
    )


def _tensors(model: Model) -> dict[str, NDArray[Any]]:
    return unflatten(model.vector, model.layout) if model.layout else {WHOLE: model.vector}


def read_weights(path: Path) -> tuple[Model, Mapping[str, Any]]:
    """Read a model, and the JSON object of its file, {} for a file that another program has
    written.

    Without the object, tensors have the layout in which they lie in the file. Raises NoModel for a
    file that has no weights to go on with, and what UNREADABLE lists.
    """
    reader = _TENSORS.get(path.suffix)
    if reader is None:
        has_pipeline = path.suffix in WRITERS
        why = "a file of this kind predicts, and has no weights to train" if has_pipeline else ""
        raise NoModel(
            f"{path}: {why or 'a model to begin with has another name'}; give a .npy file, or one "
            f"of `xain-coordinator export` that ends in {', '.join(sorted(_TENSORS))}"
        )
    try:
        tensors, about = reader(path)
    except ModuleNotFoundError as missing:
        raise _missing(missing, path) from None
    return _model(tensors, about), about


def _exported(path: Path) -> Exported:
    """Read a file of tensors that `xain-coordinator export` has written. Raises ValueError."""
    tensors, about = _TENSORS[path.suffix](path)
    if "layout" not in about:
        raise ValueError(f"it has no object {KEY!r} of `xain-coordinator export`")
    return Exported(about, _model(tensors, about))


def _model(tensors: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> Model:
    """Build a model of tensors by the layout in the JSON object, or else as the file has them."""
    metadata = metadata_of(about)
    if "layout" not in about:
        found = tuple(
            TensorSpec(name, array.shape, array.dtype.name) for name, array in tensors.items()
        )
        return Model(flatten(tensors, found), found, metadata)
    layout = tuple(
        TensorSpec(str(t["name"]), tuple(map(int, t["shape"])), str(t["dtype"]), t["kind"])
        for t in about["layout"]
    )
    if not layout:
        return Model(np.asarray(tensors[WHOLE]), (), metadata)
    return Model(flatten(tensors, layout), layout, metadata)


# --- .npz and .safetensors ---


def _write_npz(path: Path, model: Model, about: Mapping[str, Any]) -> None:
    tensors = _tensors(model)
    if KEY in tensors:
        raise NoModel(f"{path}: a tensor is called {KEY!r}; take another format")
    with path.open("wb") as file:  # numpy would append its suffix to a name
        np.savez(file, allow_pickle=False, **tensors, **{KEY: np.array(json.dumps(about))})


def _read_npz_tensors(path: Path) -> _Tensors:
    check_archive(path)
    with np.load(path, allow_pickle=False) as arrays:
        about = parse_json(str(arrays[KEY])) if KEY in arrays else {}
        tensors = {name: arrays[name] for name in arrays if name != KEY}
    return tensors, about


def _write_safetensors(path: Path, model: Model, about: Mapping[str, Any]) -> None:
    from safetensors.numpy import save_file

    tensors = {name: np.ascontiguousarray(array) for name, array in _tensors(model).items()}
    save_file(tensors, path, metadata={KEY: json.dumps(about)})


def _read_safetensors_tensors(path: Path) -> _Tensors:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            about = parse_json(metadata[KEY]) if KEY in metadata else {}
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    return tensors, about


# --- .json ---


def _write_json(path: Path, model: Model, about: Mapping[str, Any]) -> None:
    if ensembles.KEY in model.metadata:
        raise _no_ensemble(path)
    if model.vector.dtype == np.uint8:  # XGBoost's model, to which it lets its owner add attributes
        whole = json.loads(model.vector.tobytes())
        whole["learner"].setdefault("attributes", {})[KEY] = json.dumps(about)
    else:
        tensors = {name: array.tolist() for name, array in _tensors(model).items()}
        whole = {KEY: about, "tensors": tensors}
    path.write_text(json.dumps(whole), encoding="utf-8")


def _read_json_tensors(path: Path) -> _Tensors:
    whole = read_json(path)
    if "learner" in whole:
        about = parse_json(whole["learner"]["attributes"].pop(KEY))
        data = json.dumps(whole, separators=(",", ":")).encode()
        return {WHOLE: np.frombuffer(data, np.uint8)}, about
    about = whole[KEY]
    tensors = {
        t["name"]: np.array(whole["tensors"][t["name"]], t["dtype"]).reshape(t["shape"])
        for t in about["layout"]
    } or {WHOLE: np.array(whole["tensors"][WHOLE], np.float32)}
    return tensors, about


# --- pipelines ---


def _write_skops(path: Path, model: Model, about: Mapping[str, Any]) -> None:
    pipeline = pipeline_of(model)
    pipeline.xain_ = json.dumps(about)
    if ensembles.KEY in model.metadata:  # its schema without blanks, which are a half of it
        path.write_bytes(skops_files.dump(pipeline))
    else:
        skops_files.import_skops_io().dump(pipeline, path)


def _read_skops(path: Path) -> Exported:
    check_archive(path)
    skops_io = skops_files.import_skops_io()
    from skops.io.exceptions import UntrustedTypesFoundException

    try:
        pipeline = skops_io.load(path, trusted=list(TRUSTED))
    except UntrustedTypesFoundException as error:
        raise NoModel(f"{path}: {' '.join(str(error).split())}") from None
    return Exported(parse_json(pipeline.xain_), pipeline=pipeline)


def _write_onnx(path: Path, model: Model, about: Mapping[str, Any]) -> None:
    """Write the model with its preprocessing as ONNX. Raises NoModel if the format cannot hold
    it."""
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from skl2onnx.common.exceptions import MissingConverter, MissingShapeCalculator

    if ensembles.KEY in model.metadata:
        raise _no_ensemble(path)
    if model.vector.dtype == np.uint8:
        raise NoModel(f"{path}: trees are exported to .json, which XGBoost reads")
    threshold = threshold_of(model.metadata)
    bare = {key: text for key, text in model.metadata.items() if key != THRESHOLD_KEY}
    pipeline = pipeline_of(replace(model, metadata=bare))
    columns = columns_of(model.metadata)
    if any(column["type"] == "category" for column in columns):
        # One input for each column, since they are of two types.
        inputs = [
            (
                column["name"],
                (FloatTensorType if column["type"] == "number" else StringTensorType)([None, 1]),
            )
            for column in columns
        ]
    else:
        width = len(columns) or pipeline.steps[-1][1].n_features_in_
        inputs = [("X", FloatTensorType([None, width]))]
    estimator = pipeline.steps[-1][1]
    options = {id(estimator): {"zipmap": False}} if hasattr(estimator, "classes_") else None
    try:
        made = to_onnx(pipeline, initial_types=inputs, options=options)
    except (MissingConverter, MissingShapeCalculator, NotImplementedError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise NoModel(f"{path}: the pipeline has no form in ONNX: {reason}") from None
    if threshold is not None:
        _add_threshold(made.graph, threshold, json.loads(model.metadata["classes"]))
    made.metadata_props.add(key=KEY, value=json.dumps(about))
    path.write_bytes(made.SerializeToString())


def _add_threshold(graph: Any, threshold: float, classes: Sequence[str]) -> None:
    """Let the labels of a graph of two classes follow a threshold: skl2onnx knows no
    FixedThresholdClassifier."""
    from onnx import TensorProto, helper

    label, shares = (output.name for output in graph.output)
    for node in graph.node:
        node.output[:] = ["larger" if name == label else name for name in node.output]
        node.input[:] = ["larger" if name == label else name for name in node.input]
    names: list[Any] = [[name.encode()] for name in classes]
    graph.initializer.extend(
        [
            helper.make_tensor("second", TensorProto.INT64, [], [1]),
            helper.make_tensor("threshold", TensorProto.FLOAT, [], [threshold]),
            helper.make_tensor("class0", TensorProto.STRING, [1], names[0]),
            helper.make_tensor("class1", TensorProto.STRING, [1], names[1]),
        ]
    )
    graph.node.extend(
        [
            helper.make_node("Gather", [shares, "second"], ["share"], axis=1),
            helper.make_node("GreaterOrEqual", ["share", "threshold"], ["is_second"]),
            helper.make_node("Where", ["is_second", "class1", "class0"], [label]),
        ]
    )


def _write_csv(path: Path, model: Model, about: Mapping[str, Any]) -> None:
    path.write_text(coefficients_of(model).to_csv(), encoding="utf-8", newline="")


_Writer = Callable[[Path, Model, Mapping[str, Any]], None]
WRITERS: Mapping[str, _Writer] = {
    ".csv": _write_csv,
    ".json": _write_json,
    ".npz": _write_npz,
    ".onnx": _write_onnx,
    ".safetensors": _write_safetensors,
    ".skops": _write_skops,
}
_TENSORS: Mapping[str, Callable[[Path], _Tensors]] = {
    ".json": _read_json_tensors,
    ".npz": _read_npz_tensors,
    ".safetensors": _read_safetensors_tensors,
}
_READERS: Mapping[str, Callable[[Path], Exported]] = {
    **dict.fromkeys(_TENSORS, _exported),
    ".skops": _read_skops,
}
