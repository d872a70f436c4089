"""CSV files as people have them."""

from pathlib import Path

import numpy as np


def write_rows(path: Path, seed: int, num_rows: int) -> None:
    """Rows of which each column tells a part: an income around 50000 with gaps, a dose around
    0.001, and a ward, one of which is rare; in an order of columns that depends on the seed."""
    chance = np.random.RandomState(seed)
    income = chance.normal(5e4, 1e4, num_rows)
    dose = chance.normal(1e-3, 2e-4, num_rows)
    ward = chance.randint(0, 3, num_rows)
    score = (income - 5e4) / 1e4 + (dose - 1e-3) / 2e-4 + np.array([-2.0, 0.0, 2.0])[ward]
    cells = {
        "income": ["NA" if chance.rand() < 0.05 else f"{value:.0f}" for value in income],
        "dose": [f"{value:.6f}" for value in dose],
        "ward": [
            "" if chance.rand() < 0.05 else ("secret ward" if i == 0 else "ABC"[value])
            for i, value in enumerate(ward)
        ],
    }
    names = list(np.roll(list(cells), seed))
    lines = [",".join([*names, "outcome"])]
    outcomes = ["yn"[int(value > 0)] for value in score]
    lines += map(",".join, zip(*(cells[name] for name in names), outcomes, strict=True))
    path.write_text("\n".join([*lines, ""]))
