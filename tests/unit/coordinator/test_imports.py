"""Packages that a coordinator imports before its configuration asks for them."""

import subprocess
import sys

HEAVY = {"boto3", "influxdb_client", "reactivex", "sklearn", "torch", "mlflow", "fastapi", "docker"}
HEAVY |= {"ray"}  # which only a launch on a cluster loads

PROGRAM = """
import sys
import xain
import xain_coordinator.assembly.coordinator
import xain_coordinator.cli.launch.cli
import xain_coordinator.cli.main
import xain_coordinator.process.run
print(sorted(HEAVY & set(sys.modules)))
"""


def test_packages_of_other_stores_are_imported_only_by_their_stores() -> None:
    """InfluxDB's client takes 14 MB and S3's half a second, which nobody else is to pay."""
    ended = subprocess.run(
        [sys.executable, "-c", f"HEAVY = {HEAVY}\n{PROGRAM}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "[]\n"
