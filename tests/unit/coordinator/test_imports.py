"""Modules that a coordinator imports before it is asked for what they do."""

import subprocess
import sys

import pytest

# Packages of other stores and faces, of frameworks, and of a launch on a cluster.
PACKAGES = {
    *("boto3", "docker", "fastapi", "influxdb_client", "mlflow", "ray", "reactivex", "sklearn"),
    "torch",
}
# Printers of help, of a frame and of an error; and modules for some models and questions only.
PARTS = {
    *("grpc_reflection.v1alpha", "h11", "pygments", "rich"),
    "xain_coordinator.aggregation.trees",
    "xain_coordinator.driver.own_evaluation",
    "xain_coordinator.updates.content",
    "xain_workloads.ensembles",
    "xain_workloads.exported.formats",
    "xain_workloads.linear.newton",
    "xain_workloads.nets.neural_modules",
    "xain_workloads.tables.checks.checking",
    "xain_workloads.tables.rows",
    "xain_workloads.trees.trees",
}


@pytest.mark.parametrize(
    ("modules", "unneeded"),
    [
        ("xain_coordinator.cli.main, xain_coordinator.process.run", PACKAGES | PARTS),
        ("xain, xain_coordinator.cli.launch.cli", PACKAGES),
    ],
)
def test_start_imports_nothing_that_only_some_runs_need(modules, unneeded):
    """InfluxDB's client takes 14 MB, S3's half a second and rich an eighth of a start."""
    program = f"import sys, {modules}; print(*sorted({unneeded} & set(sys.modules)))"
    run = [sys.executable, "-c", program]
    ended = subprocess.run(run, capture_output=True, text=True, check=True)
    assert ended.stdout == "\n"
