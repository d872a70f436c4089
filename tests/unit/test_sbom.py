"""The bill of materials names every locked package with its hashes."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_bill_of_materials_names_each_locked_package_once():
    lock = ROOT / "locks/requirements-coordinator.lock"
    made = subprocess.run(
        [sys.executable, str(ROOT / "deploy" / "sbom.py"), str(lock), str(lock)],
        capture_output=True,
        check=True,
    )
    bill = json.loads(made.stdout)
    listed = {f"{one['name']}=={one['version']}": one["hashes"] for one in bill["components"]}
    lines = lock.read_text(encoding="utf-8").splitlines()
    pinned = [line.split(" ")[0] for line in lines if "==" in line and not line.startswith(" ")]
    assert sorted(listed) == sorted(pinned)
    assert len(bill["components"]) == len(pinned)
    num_hashes = sum("--hash=sha256:" in line for line in lines)
    assert sum(map(len, listed.values())) == num_hashes
