"""Sites whose rows disagree, so that local training draws each of them to an optimum of its own."""

import numpy as np

from xain_workloads.tables.data import from_arrays
from xain_workloads.tables.dataset import Dataset


def unlike_sites() -> list[Dataset]:
    """Four sites that disagree about the slopes and about how much each column varies."""
    sites = []
    for number in range(4):
        chance = np.random.default_rng(number)
        features = chance.normal(size=(40 + 10 * number, 3)) * chance.uniform(0.3, 2.0, 3)
        noise = chance.normal(size=len(features))
        target = features @ chance.normal(size=3) + number + noise
        sites.append(from_arrays(features, target, task="regression"))
    return sites


def optimum(sites: list[Dataset]) -> np.ndarray:
    """Slopes and intercept of least squares over all rows."""
    features = np.concatenate([site.features for site in sites])
    with_ones = np.column_stack([features, np.ones(len(features))])
    target = np.concatenate([site.target for site in sites])
    return np.linalg.lstsq(with_ones, target, rcond=None)[0]
