"""Modules that a coordinator imports before it is asked for what they do."""

import subprocess
import sys

# Packages of other stores, faces and frameworks; what prints help, a frame or an error of the
# command line; and modules for some models, questions and configurations only.
UNNEEDED = {
    "boto3",
    "docker",
    "fastapi",
    "grpc_reflection.v1alpha",
    "h11",
    "influxdb_client",
    "mlflow",
    "pygments",
    "ray",
    "reactivex",
    "rich",
    "sklearn",
    "torch",
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

PROGRAM = """
import sys
import xain
import xain_coordinator.assembly.coordinator
import xain_coordinator.cli.launch.cli
import xain_coordinator.cli.main
import xain_coordinator.process.run
print(*sorted(UNNEEDED & set(sys.modules)))
"""


def test_start_imports_nothing_that_only_some_runs_need() -> None:
    """InfluxDB's client takes 14 MB, S3's half a second and rich an eighth of a start."""
    ended = subprocess.run(
        [sys.executable, "-c", f"UNNEEDED = {UNNEEDED}\n{PROGRAM}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "\n"
