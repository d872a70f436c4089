"""The sections [aggregation] and [model]."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from xain_coordinator.config.choices import ANY_RULE
from xain_coordinator.config.named import naming
from xain_coordinator.core.vocabulary.values import Option
from xain_coordinator.extensions.options import options_of
from xain_foundation.settings.fields import Check, Conflicts, Section, Texts, WrongSetting

if TYPE_CHECKING:
    from xain_coordinator.aggregation.aggregator import Aggregator
    from xain_coordinator.aggregation.optimizers import Optimizer


class ModelSettings(Section):
    """[model]"""

    personal: Texts = ()


class AggregationSettings(Section):
    """[aggregation]"""

    rule: str = ANY_RULE
    options: dict[str, Option] = Field(default_factory=dict)
    optimizer: str = ""
    optimizer_options: dict[str, Option] = Field(default_factory=dict)

    # The rules are imported where they are needed: numpy comes with them, which --help need not.

    def made_rule(self) -> "Aggregator":
        """The configured aggregation rule. Raises WrongSetting."""
        from xain_coordinator.aggregation.rules import known_rules, make_rule

        with naming("rule", "options", known_rules):
            return make_rule(self.rule, self.options)

    def made_optimizer(self) -> "Optimizer | None":
        """The configured server optimiser; None without one. Raises WrongSetting."""
        from xain_coordinator.aggregation.optimizers import OPTIMIZERS
        from xain_coordinator.aggregation.rules import make_optimizer

        if not self.optimizer:
            return None
        known = (*sorted(OPTIMIZERS), 'or "" for none')
        with naming("optimizer", "optimizer_options", lambda: known):
            return make_optimizer(self.optimizer, self.optimizer_options)

    @property
    def whole_options(self) -> Mapping[str, Option]:
        """Options of the rule: those that are given, and the defaults of the others. Raises
        WrongSetting."""
        with naming("rule", "options", tuple):
            return options_of(self.made_rule(), self.options)

    @Check
    def _rule_can_be_made(self) -> None:
        """Check that the rule exists and takes its options."""
        _ = self.whole_options

    @Check
    def _optimizer_can_be_made(self) -> Conflicts:
        """Check that the optimiser exists and takes its options, or that neither is set."""
        if self.made_optimizer() is None and self.optimizer_options:
            yield WrongSetting(
                "optimizer_options", "without aggregation.optimizer nothing would read them"
            )
