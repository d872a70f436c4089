"""What every benchmark does with its figures."""

import json
import platform
from collections.abc import Mapping
from pathlib import Path


def report(name: str, figures: Mapping[str, object]) -> None:
    """Print them, a line each, and write them to bench-results/NAME.json."""
    result = {**figures, "python": platform.python_version(), "machine": platform.machine()}
    for key, value in result.items():
        print(f"{key:20} {value}")
    target = Path("bench-results") / f"{name}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
