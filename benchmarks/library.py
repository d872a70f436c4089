"""Estimators of scikit-learn and XGBoost, fitted in one place: the best of a small grid by the loss
on a validation part."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error, r2_score
from sklearn.neural_network import MLPClassifier, MLPRegressor

from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.table import Table
from xain_workloads.workload import create, initial_model

Array = NDArray[Any]
# Workloads by the estimator that they are compared with.
LIBRARY = {"sgd": "linear", "mlp": "network", "neural": "network", "xgboost": "trees"}


def score(kind: str, train: Table, validation: Table, test: Table) -> float:
    """Accuracy or R2 on the test part, of the estimator that is best on the validation part.

    kind: a value of LIBRARY.
    """
    is_regression = train.task == "regression"
    workload = create("xgboost" if kind == "trees" else "sgd", {"task": train.task})
    metadata = initial_model(workload, [train.profile()]).metadata
    (x, y), (x_validation, y_validation), (x_test, y_test) = (
        (data.features, data.target)
        for data in (prepare(metadata, t) for t in (train, validation, test))
    )
    if is_regression:
        center, spread = float(np.mean(y)), float(np.std(y))
        y, y_validation, y_test = ((one - center) / spread for one in (y, y_validation, y_test))
    else:
        classes = sorted({*y.tolist()})
        y, y_validation, y_test = (
            np.array([classes.index(one) if one in classes else 0 for one in part.tolist()])
            for part in (y, y_validation, y_test)
        )
    best, best_loss = 0.0, np.inf
    for estimator in _grid(kind, is_regression=is_regression):
        estimator.fit(x, y)
        if is_regression:
            loss = mean_squared_error(y_validation, estimator.predict(x_validation))
        else:
            shares = estimator.predict_proba(x_validation).astype(np.float64)
            shares /= shares.sum(axis=1, keepdims=True)
            loss = log_loss(y_validation, shares, labels=range(len(classes)))
        if loss < best_loss:
            measure = r2_score if is_regression else accuracy_score
            best, best_loss = float(measure(y_test, estimator.predict(x_test))), loss
    return best


def _grid(kind: str, *, is_regression: bool) -> Iterator[Any]:
    match kind:
        case "linear":
            for strength in (0.01, 0.1, 1.0, 10.0, 100.0):
                if is_regression:
                    yield Ridge(alpha=10 * strength)
                else:
                    yield LogisticRegression(C=strength, max_iter=2000)
        case "network":
            made = MLPRegressor if is_regression else MLPClassifier
            for alpha in (1e-4, 1.0):
                for epochs in (50, 200):
                    yield made(
                        hidden_layer_sizes=(64,), alpha=alpha, max_iter=epochs, random_state=0
                    )
        case "trees":
            import xgboost

            kinds = xgboost.XGBRegressor if is_regression else xgboost.XGBClassifier
            for depth in (3, 6):
                for eta, trees in ((0.3, 20), (0.1, 50), (0.1, 150)):
                    yield kinds(max_depth=depth, learning_rate=eta, n_estimators=trees, n_jobs=1)
