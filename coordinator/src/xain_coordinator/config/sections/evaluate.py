"""The section [evaluate]: how often models are evaluated, by which metric, and on what."""

from typing import Literal

from pydantic import Field

from xain_coordinator.core.parts.evaluation import WELL_KNOWN
from xain_foundation.settings.fields import Check, Conflicts, WrongSetting
from xain_wire.limits import MAX_INT32
from xain_workloads.tables.table_settings import TableSettings

_MAX_WAIT_S = 24 * 3600.0


class EvaluateSettings(TableSettings):
    """[evaluate]"""

    every: int = Field(default=1, ge=0, le=MAX_INT32)
    metric: str = ""
    direction: Literal["", "max", "min"] = ""
    patience: int | None = Field(default=None, ge=0, le=MAX_INT32)
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    min_rows: int = Field(default=5, ge=5, le=MAX_INT32)
    deadline_s: float = Field(default=600.0, gt=0, le=_MAX_WAIT_S)
    threshold: str = ""
    local: bool = True
    importance: bool = True
    data: str = ""

    @property
    def is_minimised(self) -> bool:
        """Whether less of the named metric is better."""
        return self.direction == "min" or (
            not self.direction and WELL_KNOWN.get(self.metric, False)
        )

    @Check
    def _metric_has_a_direction(self) -> Conflicts:
        """Check that the direction of the named metric is known, and none is given without a
        metric."""
        if self.direction and not self.metric:
            yield WrongSetting("direction", "it is that of evaluate.metric, which is not set")
        if self.metric and not self.direction and self.metric not in WELL_KNOWN:
            yield WrongSetting(
                "direction",
                'it must be "max" or "min" for this evaluate.metric; it is known only of '
                f"{', '.join(sorted(WELL_KNOWN))}",
            )

    @Check
    def _threshold_can_be_chosen(self) -> Conflicts:
        """Check that the threshold is a known criterion, and that models are evaluated."""
        if not self.threshold:
            return
        from xain_workloads.measures.thresholds import Criterion

        if self.every == 0:
            yield WrongSetting("threshold", "with evaluate.every = 0 nothing is evaluated")
        try:
            Criterion.parse(self.threshold)
        except ValueError as error:
            yield WrongSetting("threshold", str(error))

    @Check
    def _patience_has_models(self) -> Conflicts:
        """Check that models are evaluated if there is patience, and min_delta comes with it."""
        if self.min_delta and not self.patience:
            yield WrongSetting("min_delta", "it goes with evaluate.patience, which is not set")
        if self.patience and not self.every:
            yield WrongSetting("patience", "it needs evaluate.every above 0")

    @Check
    def _data_can_be_read(self) -> Conflicts:
        """Check that evaluate.data names a readable table; without it that no setting is about a
        table."""
        if not self.data:
            for name in self.changed(*TableSettings.model_fields):
                yield WrongSetting(name, "nothing would read it without evaluate.data")
            return
        if self.every == 0:
            yield WrongSetting("data", "with evaluate.every = 0 nothing is evaluated")
        yield from self.source_conflicts("evaluate", "data", self.data)
