"""Bodies of requests and answers. They are the OpenAPI description, too."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator

from xain_wire.limits import MAX_INT32

MAX_TEXT = 10_000  # characters of a cell
Cell = Annotated[str, Field(max_length=MAX_TEXT)] | bool | int | float | None
_CELL_TYPES = frozenset((str, bool, int, float, type(None)))


def _as_they_came(rows: Any) -> Any:
    """The same rows, checked: lists of finite numbers, texts, true, false and None. They are not
    copied, since they are most of what a body takes, and the first mistake is the only one that is
    told. Raises ValueError."""
    if not isinstance(rows, list) or not rows:
        raise ValueError("rows must be a list of one row at least")
    for at, row in enumerate(rows):
        if not isinstance(row, list):
            raise ValueError(f"row {at + 1} must be a list of cells")
        if not _CELL_TYPES.issuperset(map(type, row)):
            raise ValueError(f"row {at + 1}: a cell is a text, a number, true, false or null")
        if not all(math.isfinite(cell) for cell in row if type(cell) is float):
            raise ValueError(f"row {at + 1}: a number is not finite")
        if any(len(cell) > MAX_TEXT for cell in row if type(cell) is str):
            raise ValueError(f"row {at + 1}: a text has {MAX_TEXT} characters at most")
    return rows


Rows = Annotated[
    list[list[Cell]], PlainValidator(_as_they_came, json_schema_input_type=list[list[Cell]])
]
Name = Annotated[str, Field(max_length=1000)]
Columns = Annotated[list[Name], Field(min_length=1, max_length=100_000), FailFast()]
Given = Annotated[Name, Field(min_length=1)]
Option = bool | int | float | str
Count = Annotated[int, Field(ge=1, le=MAX_INT32)]
Number = Annotated[int, Field(ge=0, le=MAX_INT32)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class WorkloadChange(_Request):
    """Change of the workload or of its options. Given options replace those of the same name;
    another workload begins without any."""

    name: Given | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class AggregationChange(_Request):
    """Change of the aggregation rule or of its options."""

    rule: Given | None = None
    options: dict[str, Option] = Field(default_factory=dict)
    optimizer: Name | None = None
    optimizer_options: dict[str, Option] = Field(default_factory=dict)


class FitRequest(_Request):
    """Request of a fit as configured, except for the settings given here. wait: answer when the
    session has ended."""

    wait: bool = False
    rounds: Count | None = None
    passes: Count | None = None
    epochs: Number | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    min_participants: Count | None = None
    workload: WorkloadChange | None = None
    aggregation: AggregationChange | None = None


class PredictRequest(_Request):
    """Request of predictions for rows, given by columns. Names are matched without case and
    surrounding blanks; null is a missing value."""

    columns: Columns
    rows: Rows
    model: Literal["last", "best"] | Number = "last"
    probabilities: bool = False

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"columns": ["age", "ward"], "rows": [[71, "north"]]}]}
    )


class Fitted(BaseModel):
    """The models that predictions are made with: those of the last session that was completed."""

    session: str
    last: int
    best: int | None


class Status(BaseModel):
    """state: "waiting" for a request, "fitting", "finished", or "failed" if the session has ended
    without a result, for `cause`. passes: over all rows, from which `rounds` follow when the first
    round opens; 0 where rounds are counted. plan: both in words, from then on. progress: share of
    the rounds that are over, 0 to 1. missing: participants of rounds.expected_participants that are
    not connected, or were not at the end."""

    state: Literal["waiting", "fitting", "finished", "failed"]
    session: str
    phase: str
    round: int
    rounds: int
    passes: int
    plan: str
    progress: float
    connected: int
    required: int
    missing: list[str]
    waiting_for: str
    cause: str
    workload: str
    fitted: Fitted | None


class Predictions(BaseModel):
    """predictions: one for each row, a class name or a number. classes: names of the columns of
    `probabilities`. threshold: least probability of the second class that is predicted; null: the
    larger one counts. answered, missing: of a model whose parts stay with the participants: the
    participants that have answered, and why the others have not."""

    session: str
    round: int
    predictions: list[str | float]
    classes: list[str] = Field(default_factory=list)
    threshold: float | None = None
    probabilities: list[list[float]] | None = None
    answered: list[str] = Field(default_factory=list)
    missing: dict[str, str] = Field(default_factory=dict)


class Rounds(BaseModel):
    """Records of the latest rounds of the present session, oldest first."""

    session: str
    rounds: list[dict[str, Any]]


class Models(BaseModel):
    """Global models of the present session, oldest first."""

    session: str
    models: list[dict[str, Any]]


class Detail(BaseModel):
    code: str
    message: str


class ErrorBody(BaseModel):
    """Every error of /v1 has this body. code: stable, for programs."""

    error: Detail


class ChimeraDetails(BaseModel):
    errorCode: int  # noqa: N815  # Chimera's names
    errorMessage: str  # noqa: N815  # as above


class ChimeraError(BaseModel):
    """Every error of Chimera's paths has this body. errorCode: the HTTP status."""

    message: str
    details: ChimeraDetails


class ChimeraFit(BaseModel):
    fit: Literal["ok"]


class ChimeraPredictRequest(BaseModel):
    X_pred_columns: Columns
    X_pred_rows: Rows


class ChimeraPredictions(BaseModel):
    y_pred_rows: list[str | float]
