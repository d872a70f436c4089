"""Models in MLflow's registry, where MLflow is installed."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from xain_workloads.errors import NoModel
from xain_workloads.exported import formats
from xain_workloads.model import Model

_PARAMETERS = ("session", "round", "digest", "workload", "num_samples")


def register(name: str, model: Model, about: Mapping[str, Any]) -> str:
    """Log a run with a model's metrics and files, and register the model under a name.

    MLFLOW_TRACKING_URI, a setting of MLflow, names the server. Trees are registered as .json,
    networks of PyTorch and models of scripts as .safetensors, and other models as .skops.
    Returns the model's URI. Raises NoModel.
    """
    try:
        import mlflow
        from mlflow.exceptions import MlflowException
    except ModuleNotFoundError:
        raise NoModel("MLflow is not installed: pip install mlflow") from None
    parameters = {key: about[key] for key in _PARAMETERS}
    measured = {
        f"{key}_{metric}": value
        for key in ("evaluation", "coordinator_evaluation")
        for metric, value in (about[key] or {}).get("metrics", {}).items()
    }
    try:
        client = mlflow.MlflowClient()
        mlflow.set_experiment(name)
        with (
            mlflow.start_run(run_name=f"{about['session']}/{about['round']}") as run,
            TemporaryDirectory() as folder,
        ):
            mlflow.log_params(parameters)
            mlflow.log_metrics(measured)
            formats.write(Path(folder) / _file_name(model), model, about)
            (Path(folder) / "about.json").write_text(json.dumps(about, indent=2), encoding="utf-8")
            mlflow.log_artifacts(folder, "model")
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        made = client.create_model_version(name, f"{run.info.artifact_uri}/model", run.info.run_id)
    except MlflowException as error:
        raise NoModel(f"MLflow refuses the model: {error}") from None
    return f"models:/{name}/{made.version}"


def _file_name(model: Model) -> str:
    """Name of a model's file, whose format follows from its workload."""
    workload = model.metadata.get("workload")
    if workload == "xgboost":
        return "model.json"
    if workload == "neural":
        return "model.safetensors"
    return "model.skops" if workload else "model.safetensors"
