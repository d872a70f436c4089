"""Files of fitted estimators beside pickles, files of skops and the fit, as ratios.

    python benchmarks/estimators.py [--rows N] [--columns N]

Fits forests, boosted and single trees, a pipeline and a stacking to made-up rows, and writes and
reads each as bagging does with a published ensemble. Prints the bytes of the file in those of a
pickle and of skops, and the processor time that its owner, the coordinator and a reader take in
that of the fit.
"""

import pickle
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

from sklearn.datasets import make_classification

from xain_workloads.ensembles.estimators import described, files, skops_files

FOREST = "RandomForestClassifier"
DESCRIPTIONS: dict[str, Any] = {
    "forest": FOREST,
    "shallow forest": {"estimator": FOREST, "parameters": {"max_depth": 4}},
    "extra trees": "ExtraTreesClassifier",
    "gradient boosting": "GradientBoostingClassifier",
    "histogram boosting": "HistGradientBoostingClassifier",
    "tree": "DecisionTreeClassifier",
    "logistic": "LogisticRegression",
    "pipeline": {"pipeline": ["PCA", FOREST]},
    "stacking": {
        "estimator": "StackingClassifier",
        "parameters": {"estimators": [FOREST, {"pipeline": ["PCA", "SVC"]}, "GaussianNB"]},
    },
}


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """The result of a call, and the processor time of this process that it took, in seconds."""
    start = time.process_time()
    return call(*arguments), time.process_time() - start


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--columns", type=int, default=20)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, target = make_classification(given.rows, given.columns, random_state=0)
    skops_files.import_skops_io()
    files.load(files.dump(described.read("DecisionTreeClassifier").make(0).fit(rows, target)))
    print(
        f"{'':20} {'pickle':>8} {'skops':>8} | {'write':>8} {'check':>8} {'read':>8} {'skops':>8}"
    )
    for name, description in DESCRIPTIONS.items():
        read = described.read(description)
        estimator, fit_s = timed(described.fit, read.make(0), rows, target)
        file, write_s = timed(files.dump, estimator)
        _, check_s = timed(files.check, file, {read.name}, given.columns)
        _, load_s = timed(files.load, file)
        other, skops_s = timed(skops_files.dump, estimator)
        pickled = len(pickle.dumps(estimator))
        times = " ".join(f"{one / fit_s:8.3f}" for one in (write_s, check_s, load_s, skops_s))
        print(f"{name:20} {len(file) / pickled:8.2f} {len(file) / len(other):8.2f} | {times}")


if __name__ == "__main__":
    main()
