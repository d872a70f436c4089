"""The rules of aggregation and the optimisers by name, made from the options of `[aggregation]`."""

from collections.abc import Mapping

from xain_coordinator.aggregation.aggregator import Aggregator
from xain_coordinator.aggregation.averages import Identity, Mean, Sum, WeightedAverage
from xain_coordinator.aggregation.distances import (
    CentredClipping,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormClipping,
)
from xain_coordinator.aggregation.optimizers import OPTIMIZERS, Optimizer
from xain_coordinator.aggregation.options import make
from xain_coordinator.aggregation.order_statistics import Median, TrimmedMean
from xain_coordinator.plugins import AGGREGATORS, PluginFailed, known, load

RULES: Mapping[str, type[Aggregator]] = {
    "centred_clipping": CentredClipping,
    "geometric_median": GeometricMedian,
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

# What a plug-in must have, so that one that lacks it is told apart before the first round has run.
_PARTS = ("takes_stale", "check", "combine")
_PARTS_OF_SURVEYORS = ("needs_base", "weigh")


def known_rules() -> list[str]:
    """Built in or plugged in, sorted."""
    return known(AGGREGATORS, RULES)


def make_rule(name: str, options: Mapping[str, object]) -> Aggregator:
    """Raises KeyError if there is no such rule, PluginFailed if it is there and cannot be used, and
    WrongOption."""
    made = make(load(AGGREGATORS, name, RULES), f"rule {name!r}", options)
    parts = _PARTS + (_PARTS_OF_SURVEYORS if hasattr(made, "survey") else ())
    missing = [part for part in parts if not hasattr(made, part)]
    if missing:
        raise PluginFailed(f"the plug-in {name!r} is no rule: it has no {', '.join(missing)}")
    return made


def make_optimizer(name: str, options: Mapping[str, object]) -> Optimizer:
    """Raises KeyError if there is no such optimiser, and WrongOption."""
    return make(OPTIMIZERS[name], f"optimiser {name!r}", options)
