"""Rounds of a pass over the data, where a round is less: a step of gradient descent on some rows,
or a level of trees."""

from collections.abc import Sequence
from typing import Any

from xain_workloads.boosting_options import HISTOGRAM
from xain_workloads.profile import DataProfile

KEY = "steps_per_pass"  # in the metadata of a model; absent: 1


def steps_per_pass(options: Any, profiles: Sequence[DataProfile]) -> int:
    """Rounds in which the largest site passes over its rows once, or that a tree grows in.

    options: of a workload.
    """
    mode = getattr(options, "mode", "")
    if mode == HISTOGRAM:
        return int(options.max_depth)
    batch_size = getattr(options, "batch_size", 0)
    if mode == "gradient" and batch_size:
        return max([1, *(-(-profile.num_samples // batch_size) for profile in profiles)])
    return 1
