"""All sections of a configuration, and values that follow from several of them."""

from typing import Any, Literal

from pydantic import Field

from xain_coordinator.config.sections.aggregation import AggregationSettings, ModelSettings
from xain_coordinator.config.sections.evaluate import EvaluateSettings
from xain_coordinator.config.sections.http import HttpSettings
from xain_coordinator.config.sections.launch import LaunchSettings
from xain_coordinator.config.sections.metrics import MetricsSettings
from xain_coordinator.config.sections.parameters import ParametersSettings
from xain_coordinator.config.sections.rounds import RoundsSettings
from xain_coordinator.config.sections.schema import SchemaSettings
from xain_coordinator.config.sections.server import (
    CoordinatorLoggingSettings,
    PredictSettings,
    ServerSettings,
)
from xain_coordinator.config.sections.storage import JournalSettings, StorageSettings
from xain_coordinator.config.sections.study import SearchSettings, StudySettings
from xain_coordinator.config.sections.workload import WorkloadSettings
from xain_foundation.security.tls_settings import TlsSettings
from xain_foundation.settings.fields import Section
from xain_workloads.passes import ROUNDS, default_passes

CheckLevel = Literal["refuse", "warn", "note", "off"]


class Sections(Section):
    """The sections, without checks of how they fit together."""

    server: ServerSettings = ServerSettings()
    tls: TlsSettings = TlsSettings()
    rounds: RoundsSettings = RoundsSettings()
    train: dict[str, Any] = Field(default_factory=dict)
    evaluate: EvaluateSettings = EvaluateSettings()
    workload: WorkloadSettings = WorkloadSettings()
    model: ModelSettings = ModelSettings()
    checks: dict[str, CheckLevel] = Field(default_factory=dict)
    # Models of pydantic have a method `schema`.
    data_schema: SchemaSettings = Field(default=SchemaSettings(), alias="schema")
    aggregation: AggregationSettings = AggregationSettings()
    predict: PredictSettings = PredictSettings()
    storage: StorageSettings = StorageSettings()
    journal: JournalSettings = JournalSettings()
    metrics: MetricsSettings = MetricsSettings()
    logging: CoordinatorLoggingSettings = CoordinatorLoggingSettings()
    http: HttpSettings = HttpSettings()
    parameters: ParametersSettings = ParametersSettings()
    launch: LaunchSettings = LaunchSettings()
    study: StudySettings = StudySettings()
    search: SearchSettings = SearchSettings()

    @property
    def keeps_estimators(self) -> bool:
        """Whether fitted estimators stay at the participants."""
        return self.workload.name == "bagging" and not self.workload.options.get("publish")

    @property
    def num_stages(self) -> int:
        """Stages that the rule "assemble" puts together; 0: one for each participant."""
        options = self.workload.options
        if not self.workload.name:
            return int(self.aggregation.options.get("stages", 0))
        cuts = options.get("cuts")
        return int(options.get("stages", 0)) or (len(cuts) + 1 if cuts else 0)

    @property
    def has_default_length(self) -> bool:
        """Whether neither passes nor rounds are set."""
        return self.rounds.passes is None and self.rounds.rounds is None

    @property
    def passes(self) -> int:
        """Passes over all rows that a session trains for; 0 if its rounds are counted."""
        if not self.has_default_length:
            return self.rounds.passes or 0
        return default_passes(self.workload.name, self.workload.made_options)

    @property
    def num_rounds(self) -> int:
        """Rounds of a session that counts them."""
        own = getattr(self.workload.made_options, "rounds", ROUNDS)  # of bagging
        return int(own if self.rounds.rounds is None else self.rounds.rounds)
