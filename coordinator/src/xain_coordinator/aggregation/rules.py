"""The rules of aggregation and the optimisers by name, made from the options of `[aggregation]`."""

from collections.abc import Mapping

from xain_coordinator.aggregation.aggregator import Aggregator, is_surveyor
from xain_coordinator.aggregation.assembling import Assemble
from xain_coordinator.aggregation.averages import Gradient, Identity, Mean, Sum, WeightedAverage
from xain_coordinator.aggregation.distances import (
    CentredClipping,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormClipping,
)
from xain_coordinator.aggregation.optimizers import OPTIMIZERS, Optimizer
from xain_coordinator.aggregation.order_statistics import Median, TrimmedMean
from xain_coordinator.aggregation.trees import Ensemble, Trees
from xain_coordinator.extensions.options import WrongOption, make
from xain_coordinator.extensions.plugins import AGGREGATORS, PluginFailed, known, load

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
    "trees": Trees,
}

# Methods that a plug-in must have; one without them is refused before the first round.
_PARTS = ("takes_stale", "check", "combine")
_PARTS_OF_SURVEYORS = ("needs_base", "weigh")


def known_rules() -> list[str]:
    """Names of the aggregation rules, built in or plugged in, sorted."""
    return known(AGGREGATORS, BUILT_IN)


def make_rule(name: str, options: Mapping[str, object]) -> Aggregator:
    """Raises KeyError if there is no such rule, PluginFailed if it is there and cannot be used, and
    WrongOption."""
    kind = load(AGGREGATORS, name, BUILT_IN)
    if not isinstance(kind, type):
        raise PluginFailed(f"the plug-in {name!r} is no rule: it is not a class")
    made: Aggregator = make(kind, f"rule {name!r}", options)
    parts = _PARTS + (_PARTS_OF_SURVEYORS if hasattr(made, "survey") else ())
    missing = [part for part in parts if not hasattr(made, part)]
    if missing:
        raise PluginFailed(f"the plug-in {name!r} is no rule: it has no {', '.join(missing)}")
    if is_surveyor(made) and made.takes_stale:
        # The weights of stale updates follow from their age, and no survey would be asked for any.
        raise PluginFailed(
            f"the plug-in {name!r} is no rule: it has both survey and takes_stale = True; a rule "
            "that surveys cannot take stale updates"
        )
    return made


def make_optimizer(name: str, options: Mapping[str, object]) -> Optimizer:
    """Raises KeyError if there is no such optimiser, and WrongOption."""
    return make(OPTIMIZERS[name], f"optimiser {name!r}", options)


def rule_of_session(name: str, options: Mapping[str, object]) -> Aggregator:
    """The rule that a session was opened with.

    Raises PluginFailed if there is none any more, or one that is not what it was: that can be put
    right, so it does not end the session.
    """
    try:
        return make_rule(name, _that_count(name, options))
    except KeyError:
        raise PluginFailed(
            f"the session was opened with the rule {name!r}, and no plug-in gives it any more; "
            "install it again"
        ) from None
    except WrongOption as error:
        raise PluginFailed(
            f"the session was opened with other options than the rule {name!r} has now: {error}; "
            "install the version that it had"
        ) from None


def _that_count(name: str, options: Mapping[str, object]) -> Mapping[str, object]:
    """Options without those that an earlier version stored with its sessions and nothing reads."""
    if RULES.get(name) is NormClipping and options.get("threshold"):
        return {option: value for option, value in options.items() if option != "quantile"}
    return options


def optimizer_of_session(name: str, options: Mapping[str, object]) -> Optimizer:
    """The optimiser that a session was opened with, by another version perhaps.

    Raises PluginFailed if this one has none of that name, or with other options.
    """
    try:
        return make_optimizer(name, options)
    except KeyError:
        why = "this version has no such optimiser"
    except WrongOption as error:
        why = f"it has other options now: {error}"
    raise PluginFailed(
        f"the session was opened with the optimiser {name!r}, and {why}; install the version that "
        "it was opened with"
    )
