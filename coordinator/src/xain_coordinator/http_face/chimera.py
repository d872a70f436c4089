"""Chimera's REST contract: its paths, bodies, answers and error envelope.

`aggregation` is bagging, `parameter-server` is SGD. Each answers for a session whose workload is of
its kind, by what answers /v1 too.
"""

from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request

from xain_coordinator.http_face import bodies
from xain_coordinator.http_face.admission import RELEASE
from xain_coordinator.http_face.errors import HttpError
from xain_coordinator.http_face.fits import Fits
from xain_coordinator.http_face.predicting import Predictor
from xain_coordinator.server.predictions import Predictions

PREFIX = "/v1/chimera"

Kind = Literal["aggregation", "parameter-server"]

_WORKLOADS: dict[Kind, tuple[str, ...]] = {
    "aggregation": ("bagging", "xgboost"),
    "parameter-server": ("sgd", "mlp", "neural"),
}

# Names of Chimera's exceptions, by our codes.
EXCEPTIONS = {
    "NOT_FITTED": "NotFittedError",
    "FIT_FAILED": "ResponseException",
    "NO_PARTICIPANTS": "ResponseException",
    "NOBODY_ANSWERED": "ResponseException",
    "INVALID_REQUEST": "RequestValidationError",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": bodies.ChimeraError, "description": description}
    for status, description in (
        (409, "Not fitted, or fitting already, or another workload"),
        (413, "The body is too large"),
        (422, "The body cannot be used"),
        (501, "The coordinator lacks a package that the model needs"),
        (503, "No participant is connected, or the coordinator is busy"),
    )
}


def envelope(error: HttpError) -> dict[str, object]:
    """The body of an error's answer, as Chimera's clients read it."""
    name = EXCEPTIONS.get(error.code, "".join(map(str.capitalize, error.code.split("_"))))
    details = {"errorCode": error.status, "errorMessage": name}
    return {"message": error.message, "details": details}


def make_router(fits: Fits) -> APIRouter:
    """The router of Chimera's four paths: fit and predict, for each of its two kinds."""
    router = APIRouter(prefix=PREFIX, tags=["chimera"], responses=_ERRORS)

    def add(kind: Kind) -> None:
        """Add the two calls of a kind of workload, as Chimera has them."""

        async def fit(http: Request) -> bodies.ChimeraFit:
            """Fit with the configured rules; answers when the session has ended."""
            _require(kind, fits.sessions.config.workload.name)
            fitting = await fits.fit(bodies.FitRequest())
            await http.scope[RELEASE]()
            await fits.wait_for_end(fitting)
            return bodies.ChimeraFit(fit="ok")

        async def predict(request: bodies.ChimeraPredictRequest) -> bodies.ChimeraPredictions:
            """Predict a value for each row: a number or a class name; for two classes, where
            `aggregation` asks for it, the probability of the second, as Chimera does."""
            predictor = await fits.predictor()
            _require(kind, predictor.workload)
            is_probability = kind == "aggregation" and len(predictor.classes) == 2
            predicted = await fits.predict(
                predictor,
                request.X_pred_columns,
                request.X_pred_rows,
                probabilities="if_any" if is_probability else False,
            )
            return bodies.ChimeraPredictions(y_pred_rows=_rows(predictor, predicted))

        name = kind.replace("-", "_")
        router.post(f"/{kind}/fit", operation_id=f"chimera_{name}_fit")(fit)
        router.post(f"/{kind}/predict", operation_id=f"chimera_{name}_predict")(predict)

    add("aggregation")
    add("parameter-server")
    return router


def _require(kind: Kind, workload: str) -> None:
    """Check that a workload is of this kind. Raises HttpError."""
    if workload not in _WORKLOADS[kind]:
        expected = ", ".join(_WORKLOADS[kind])
        raise HttpError(
            "OTHER_WORKLOAD",
            f"the workload is {workload or '(none)'}, and {kind} is for: {expected}",
        )


def _rows(predictor: Predictor, predicted: Predictions) -> list[str | float]:
    """Predictions as Chimera answers them: probabilities of the second class if asked for, else
    numbers where the values are numbers, else texts."""
    if predicted.probabilities is not None:
        return [float(value) for value in predicted.probabilities[:, 1]]
    values = np.asarray(predicted.values)
    if predictor.classes:
        try:  # Chimera's labels are numbers
            return [float(value) for value in values.tolist()]
        except ValueError:
            return [str(value) for value in values.tolist()]
    return [float(value) for value in values.tolist()]
