"""The image of the participant, whose libraries deploy/images/trim.py makes smaller."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Imports of packages that the image leaves out fail as they do there.
SCRIPT = """
import sys
from importlib.abc import MetaPathFinder

sys.path.insert(0, sys.argv[1])
import trim

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.replace(".", "/") in trim.UNUSED:
            raise ModuleNotFoundError(f"{name} is not in the image")

sys.meta_path.insert(0, Absent())
from xain_workloads.tables.data import load_table
from xain_workloads.workload import create, evaluate, fit_centralised

for name in ("sgd", "mlp"):
    for source, task in (("iris", "classification"), ("diabetes", "regression")):
        table = load_table(source, task=task)
        model = fit_centralised(create(name, {"task": task}), table, epochs=1, seed=0)
        print(name, source, evaluate(model, table))
"""


def test_image_keeps_all_that_training_imports():
    """The lock of the image has scikit-learn, so its workloads train there."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT / "deploy" / "images")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
