"""Options of gradient-boosted trees."""

from collections.abc import Mapping
from dataclasses import dataclass
from json import loads
from typing import get_args

from xain_workloads.class_weights import require_class_weight
from xain_workloads.options import from_mapping, require_choice, require_range
from xain_workloads.tables.dataset import Task

HISTOGRAM = "histogram"
MODES = (HISTOGRAM, "bagging", "cyclic")


@dataclass(frozen=True, slots=True)
class BoostingOptions:
    """Options of the workload "xgboost", named as XGBoost names them.

    mode: what a participant sends in a round. "histogram": sums of gradients, from which the
        coordinator grows the trees of all rows together. "bagging" or "cyclic": trees of its own
        rows. The coordinator sets it from aggregation.options.mode.
    task: "classification" or "regression".
    eta: factor on each iteration's trees. max_depth: of a tree. XGBoost has 0.3 and 6, with which
        trees of few rows overfit.
    min_child_weight, gamma, reg_lambda, reg_alpha: least sum of hessians in a leaf, least gain of a
        split, and the weights of the L2 and L1 penalties on leaves.
    subsample, colsample_bytree: shares of rows and of columns that a tree is made of, drawn anew in
        every boosting iteration.
    max_bin: bins of a column's histogram.
    class_weight: "balanced" weighs rows by the inverse of the count of their class at all sites.
    Raises ValueError that names the field.
    """

    mode: str = "bagging"
    task: str = "classification"
    eta: float = 0.1
    max_depth: int = 3
    min_child_weight: float = 1.0
    gamma: float = 0.0
    reg_lambda: float = 1.0
    reg_alpha: float = 0.0
    subsample: float = 1.0
    colsample_bytree: float = 1.0
    max_bin: int = 256
    class_weight: str = ""

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        require_choice("task", self.task, get_args(Task))
        require_range("eta", self.eta, above=0, at_most=1)
        require_range("max_depth", self.max_depth, at_least=1, at_most=16)
        for name in ("min_child_weight", "gamma", "reg_lambda", "reg_alpha"):
            require_range(name, getattr(self, name), at_least=0)
        require_range("subsample", self.subsample, above=0, at_most=1)
        require_range("colsample_bytree", self.colsample_bytree, above=0, at_most=1)
        require_range("max_bin", self.max_bin, at_least=2, at_most=65536)
        require_class_weight(self.class_weight, self.task)


def options_of_model(metadata: Mapping[str, str]) -> BoostingOptions:
    """Options in the metadata of a model of trees. Raises ValueError."""
    options = loads(metadata.get("options", "{}"))
    return from_mapping(BoostingOptions, options, workload="xgboost")
