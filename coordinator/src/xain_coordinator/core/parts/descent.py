"""Gradient descent over rounds: the learning rate of each step, and when the loss falls no more.

A round of the rule "gradient" is a step: participants send gradients of the loss at the global
model, and the coordinator steps against their mean. Schedules, tolerance and names are those of
scikit-learn's SGDClassifier and SGDRegressor, with a step where scikit-learn has an update.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Final

from xain_coordinator.core.vocabulary.values import Option

RULE = "gradient"
LOSSES = ("objective", "loss")  # names of the loss among a participant's metrics, the first is best

_SMALLEST_RATE = 1e-6  # of "adaptive"; below it scikit-learn stops
_DIVISOR = 5


@dataclass(frozen=True, slots=True)
class Descent:
    """Descent of the loss.

    best: smallest mean loss of a step, None before the first.
    num_without: steps in a row that were not better than the best one by more than `tol`.
    num_divisions: of the rate of "adaptive".
    ended_because: why no further step is taken; "" if one is.
    """

    best: float | None = None
    num_without: int = 0
    num_divisions: int = 0
    ended_because: str = ""


NOT_BEGUN: Final = Descent()


def learning_rate(options: Mapping[str, Option], step: int, descent: Descent) -> float:
    """The rate of a step. options: of the rule "gradient". step: from 0."""
    eta0 = _number(options, "eta0")
    match options["learning_rate"]:
        case "invscaling":
            return eta0 / float((step + 1) ** _number(options, "power_t"))
        case "optimal":
            # Bottou's heuristic for t0, as scikit-learn has it.
            alpha = _number(options, "alpha")
            t0 = 1 / (sqrt(1 / sqrt(alpha)) * alpha)
            return 1 / (alpha * (t0 + step))
        case "adaptive":
            return float(eta0 / _DIVISOR**descent.num_divisions)
    return eta0


def after_step(options: Mapping[str, Option], descent: Descent, loss: float | None) -> Descent:
    """The descent after a step. loss: the mean at the model before it; None if none was sent."""
    tol = _number(options, "tol")
    is_adaptive = options["learning_rate"] == "adaptive"
    if loss is None or (tol == 0 and not is_adaptive):
        return descent
    is_better = descent.best is None or loss < descent.best - tol
    descent = replace(
        descent,
        best=loss if descent.best is None else min(loss, descent.best),
        num_without=0 if is_better else descent.num_without + 1,
    )
    num_steps = int(options["n_iter_no_change"])
    if descent.num_without < num_steps:
        return descent
    if is_adaptive:
        descent = replace(descent, num_divisions=descent.num_divisions + 1, num_without=0)
        if learning_rate(options, 0, descent) > _SMALLEST_RATE:
            return descent
    why = f"the loss has not fallen by {tol:g} in {num_steps} steps"
    return replace(descent, ended_because=f"converged: {why}")


def _number(options: Mapping[str, Option], name: str) -> float:
    """An option of the rule "gradient" as a number."""
    return float(options[name])
