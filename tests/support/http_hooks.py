"""Hooks of schemathesis for the HTTP face: fits that end soon, and rows that the model predicts."""

from typing import Any

import schemathesis
from schemathesis.generation import GenerationMode

COLUMNS = ["sepal length (cm)", "sepal width (cm)", "petal length (cm)", "petal width (cm)"]
MOST = {"rounds": 2, "epochs": 2, "min_participants": 1}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Bound what a fit takes, and give every second prediction the columns of the model."""
    body = case.body
    if not isinstance(body, dict):
        return
    for key, most in MOST.items():
        if type(body.get(key)) is int:
            body[key] = min(body[key], most)
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE:
        return
    for columns, rows in (("columns", "rows"), ("X_pred_columns", "X_pred_rows")):
        if rows in body and len(body[rows]) % 2:
            body[columns] = COLUMNS
            body[rows] = [[*row, 1, 2.5, None, 4][:4] for row in body[rows]]
