"""Data sets that scikit-learn brings along, read from its files.

scikit-learn itself is not imported: that takes a second and 60 MB, and most workloads train without
it. A test compares each set with scikit-learn's own.
"""

from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_OF_NUCLEI = (
    *("radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity"),
    *("concave points", "symmetry", "fractal dimension"),
)
_OF_WINE = (
    *("alcohol", "malic_acid", "ash", "alcalinity_of_ash", "magnesium", "total_phenols"),
    *("flavanoids", "nonflavanoid_phenols", "proanthocyanins", "color_intensity", "hue"),
    *("od280/od315_of_diluted_wines", "proline"),
)
_FEATURES = {
    "breast_cancer": [
        *(f"mean {name}" for name in _OF_NUCLEI),
        *(f"{name} error" for name in _OF_NUCLEI),
        *(f"worst {name}" for name in _OF_NUCLEI),
    ],
    "diabetes": ["age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"],
    "digits": [f"pixel_{row}_{column}" for row, column in product(range(8), repeat=2)],
    "iris": [
        f"{part} {size} (cm)" for part, size in product(("sepal", "petal"), ("length", "width"))
    ],
    "wine": [*_OF_WINE],
}
_FILES = {
    "breast_cancer": "breast_cancer.csv",
    "diabetes": "diabetes_data_raw.csv.gz",
    "digits": "digits.csv.gz",
    "iris": "iris.csv",
    "wine": "wine_data.csv",
}
BUNDLED = tuple(_FILES)


class Bundled(NamedTuple):
    """A set. target: measurements, or where there are classes their indices in class_names."""

    features: NDArray[np.float64]
    target: NDArray[Any]
    feature_names: list[str]
    class_names: NDArray[Any] | None


def read_bundled(name: str) -> Bundled:
    """Read a data set that scikit-learn brings, from its files. Raises ModuleNotFoundError where
    scikit-learn is not installed."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    folder = Path(found.origin).parent / "datasets" / "data"
    path = folder / _FILES[name]
    if name == "diabetes":
        features = np.loadtxt(path)
        # Mean 0 and length 1, in the steps of scikit-learn: to the same bits.
        deviations = features.std(axis=0)
        features -= features.mean(axis=0)
        features /= deviations
        features /= len(features) ** 0.5
        target = np.loadtxt(folder / "diabetes_target.csv.gz")
        return Bundled(features, target, _FEATURES[name], None)
    if name == "digits":
        rows, class_names = np.loadtxt(path, delimiter=","), np.arange(10)
    else:
        with path.open(encoding="utf-8") as file:
            # The first line has both sizes and the names of the classes.
            class_names = np.array(file.readline().strip().split(",")[2:])
            rows = np.loadtxt(file, delimiter=",")
    target = rows[:, -1].astype(np.int64)
    return Bundled(np.ascontiguousarray(rows[:, :-1]), target, _FEATURES[name], class_names)
