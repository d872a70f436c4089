"""The rules of aggregation and the optimisers by name, made from the options of `[aggregation]`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from xain_coordinator.aggregation.aggregator import Aggregator, Joining, is_surveyor
from xain_coordinator.aggregation.assembling import Assemble
from xain_coordinator.aggregation.averages import Gradient, Identity, Mean, Sum, WeightedAverage
from xain_coordinator.aggregation.newton import Newton
from xain_coordinator.aggregation.optimizers import OPTIMIZERS, Optimizer
from xain_coordinator.aggregation.robust.distances import (
    CentredClipping,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormClipping,
)
from xain_coordinator.aggregation.robust.order_statistics import Median, TrimmedMean
from xain_coordinator.core.vocabulary.values import Option, Rules
from xain_coordinator.extensions.options import made_again, make, make_named
from xain_coordinator.extensions.plugins import AGGREGATORS, PluginFailed, known, load


@dataclass(frozen=True)
class Trees(Joining):
    """Make the next booster from all updates, in the order of the participants' names.

    mode: "histogram" grows trees by one level from the sum of all histograms. "bagging" appends the
        trees of all selected participants, each scaled by the participant's share of samples.
        "cyclic" is for one participant a round, which the configuration checks.
    """

    mode: Literal["histogram", "bagging", "cyclic"] = "histogram"


@dataclass(frozen=True)
class Ensemble(Joining):
    """Append the fitted estimators of all updates, or list the estimators that stay at the
    participants, in the order of the participants' names. When all estimators of stacked votes are
    fitted, take a step of the linear model from the sums of all updates."""


def mode_option(rules: Rules) -> Mapping[str, Option]:
    """The rule's mode as an option of the workload, which does its part of it; empty with another
    rule."""
    if rules.aggregation != "trees":
        return {}
    return {"mode": rules.aggregation_options.get("mode", "bagging")}


RULES: Mapping[str, type[Aggregator]] = {
    "centred_clipping": CentredClipping,
    "geometric_median": GeometricMedian,
    "gradient": Gradient,
    "identity": Identity,
    "krum": Krum,
    "mean": Mean,
    "median": Median,
    "multi_krum": MultiKrum,
    "norm_clipping": NormClipping,
    "sum": Sum,
    "trimmed_mean": TrimmedMean,
    "weighted_average": WeightedAverage,
}

# With the rules whose updates are not as long as the model, and do not go through the tile engine.
BUILT_IN: Mapping[str, type[Aggregator]] = {
    **RULES,
    "assemble": Assemble,
    "ensemble": Ensemble,
    "newton": Newton,
    "trees": Trees,
}

# Methods that a plug-in must have; one without them is refused before the first round.
_PARTS = ("takes_stale", "check", "combine")
_PARTS_OF_SURVEYORS = ("needs_base", "weigh")


def known_rules() -> list[str]:
    """Names of the aggregation rules, built in or plugged in, sorted."""
    return known(AGGREGATORS, BUILT_IN)


def make_rule(name: str, options: Mapping[str, object]) -> Aggregator:
    """Make a rule, built in or plugged in, with its options. Raises KeyError if there is none of
    this name, PluginFailed if it is there and cannot be used, and WrongOption."""
    kind = load(AGGREGATORS, name, BUILT_IN)
    parts = _PARTS + (_PARTS_OF_SURVEYORS if hasattr(kind, "survey") else ())
    made: Aggregator = make_named(kind, "rule", name, options, parts)
    if is_surveyor(made) and made.takes_stale:
        # The weights of stale updates follow from their age, and no survey would be asked for any.
        raise PluginFailed(
            f"the plug-in {name!r} is no rule: it has both survey and takes_stale = True; a rule "
            "that surveys cannot take stale updates"
        )
    return made


def make_optimizer(name: str, options: Mapping[str, object]) -> Optimizer:
    """Make an optimiser with its options. Raises KeyError if there is none of this name, and
    WrongOption."""
    return make(OPTIMIZERS[name], f"optimiser {name!r}", options)


def rule_of_session(name: str, options: Mapping[str, Option]) -> Aggregator:
    """The rule that a session was opened with. Raises PluginFailed, as made_again() does."""
    return made_again(make_rule, "rule", name, options)


def optimizer_of_session(name: str, options: Mapping[str, Option]) -> Optimizer:
    """The optimiser that a session was opened with. Raises PluginFailed, as made_again() does."""
    return made_again(make_optimizer, "optimiser", name, options)
