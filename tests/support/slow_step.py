"""The step of an optimiser on one coordinate, in Python's own floats.

Source: Reddi et al. 2021, Adaptive Federated Optimization, Algorithm 2.
"""

import math
from collections.abc import Mapping


def slow_step(
    name: str, options: Mapping[str, int | float], x: float, result: float, m: float, v: float
) -> tuple[float, float, float]:
    """x, m and v after one round. result: of the rule. options: all that the optimiser has."""
    delta, eta = result - x, options["learning_rate"]
    if abs(delta) > 1e19:
        return x, m, v  # no step: its square would be beyond float32
    if name == "fedavgm":
        m = options["beta"] * m + delta
        return x + eta * m, m, v
    squared = delta * delta
    m = options["beta1"] * m + (1 - options["beta1"]) * delta
    if name == "fedadagrad":
        v = v + squared
    elif name == "fedadam":
        v = options["beta2"] * v + (1 - options["beta2"]) * squared
    else:
        v = v - (1 - options["beta2"]) * squared * math.copysign(1, v - squared)
    return x + eta * (m / (math.sqrt(v) + options["tau"])), m, v
