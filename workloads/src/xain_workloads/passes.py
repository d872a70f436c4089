"""How long a training is: passes over all rows, and the rounds that they take.

A pass uses every row of every site once: an epoch of local training, the steps of gradient descent
that go through the largest site, an iteration of boosted trees. The constants are the defaults of a
training for which nothing else is set.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xain_workloads.trees.boosting_options import HISTOGRAM

# Passes of a training, by workload. A workload that is not named here trains ROUNDS rounds, and so
# do scripts.
PASSES = {"sgd": 50, "mlp": 50, "neural": 50, "xgboost": 100}
# Steps of gradient descent that each take all rows, where their number is not that of PASSES.
STEPS = {"sgd": 200, "mlp": 200, "neural": 200}
ROUNDS = 10
EPOCHS = 1  # of a round of local training

# A training that is counted in passes stops after this share of them without a better model, and
# after _PATIENCE passes at least, if so many held-out rows tell so: what is measured on fewer is
# too much of chance to end a training by.
_PATIENCE_SHARE = 5
_PATIENCE = 10
PATIENCE_ROWS = 100

MAX_ROUNDS = 2**30 - 1  # so that the sum of two is an int32, as the wire has it
_MAX_EPOCHS = 2**31 - 1  # of all rounds together, likewise


@dataclass(frozen=True, slots=True)
class Stride:
    """Rounds of a workload, where they are less than a pass.

    levels: rounds in which a boosting iteration grows; 1 for other models.
    step_rows: rows of each site that a step of gradient descent takes, one a round; 0 for all rows,
        and where a round is no such step.
    """

    levels: int = 1
    step_rows: int = 0


ONE_PASS = Stride()


@dataclass(frozen=True, slots=True)
class Plan:
    """The rounds of a training, as they follow from the sites that it begins with.

    passes: 0 if rounds were set, and no passes.
    rounds, epochs: of training, and of local training in each round.
    steps: rounds after which a model is whole: a tree is grown, or the largest site has gone
        through its rows. Others are not compared.
    rounds_per_pass: in which every row of every site is used; 1 where a round makes several passes.
    num_sites, num_samples: at the start; 0 samples if they are not known.
    num_counted: sites whose updates a model is made of.
    """

    passes: int
    rounds: int
    epochs: int
    steps: int
    rounds_per_pass: int
    num_sites: int
    num_samples: int
    num_counted: int


def stride(options: Any, mode: str = "") -> Stride:
    """The stride of a workload. options: of it. mode: of the rule "trees"; "" with other rules."""
    if mode == HISTOGRAM:
        return Stride(levels=int(options.max_depth))
    if getattr(options, "mode", "") == "gradient":
        return Stride(step_rows=int(options.batch_size))
    return ONE_PASS


def default_passes(workload: str, options: Any) -> int:
    """Passes of a training for which nothing is set; 0 if it is counted in rounds.

    options: of the workload.
    """
    if getattr(options, "mode", "") == "gradient" and not options.batch_size:
        return STEPS.get(workload, PASSES[workload])
    return PASSES.get(workload, 0)


def default_patience(passes: int) -> int:
    """Passes without a better model after which a training of so many passes stops."""
    return max(_PATIENCE, passes // _PATIENCE_SHARE)


def plan(
    passes: int,
    rounds: int,
    epochs: int | None,
    stride: Stride,
    samples: Sequence[int],
    *,
    num_counted: int,
    is_gradient: bool = False,
) -> Plan:
    """Compute how many rounds a training has, and what a pass is, from its sites.

    passes: over all rows; 0: it has so many `rounds` instead.
    epochs: of a round; None if none are set.
    samples: rows of each site at the start; 0 where they are not known.
    num_counted: sites whose updates a model is made of, at least 1.
    is_gradient: whether a round is a step of gradient descent.
    """
    num_sites = max(1, len(samples))
    epochs = EPOCHS if epochs is None else epochs
    steps = stride.levels
    if is_gradient:
        steps = 1
        if stride.step_rows:
            steps = max([1, *(-(-number // stride.step_rows) for number in samples)])
    counted = min(max(1, num_counted), num_sites)
    used = counted * max(
        1, epochs
    )  # sites, each with all of its rows, in a round that makes passes
    if passes:
        whole = -(-passes * num_sites // used)
        rounds = min(whole * steps, MAX_ROUNDS, _MAX_EPOCHS // max(1, epochs))
    return Plan(
        passes,
        rounds,
        epochs,
        steps,
        max(1, -(-steps * num_sites // used)),
        num_sites,
        sum(samples),
        counted,
    )
