"""Remedies for sites with unlike rows: terms that are added to the gradient of each local step."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from xain_workloads.measures.losses import Array
from xain_workloads.options import require_choice, require_range

SCAFFOLD = "scaffold"
REMEDIES = ("", "proximal", SCAFFOLD, "personal")
PROXIMAL_MU = 0.1  # chosen by measurement: docs/learning.md
OPTIONS = ("remedy", "proximal_mu")


def require_remedy(remedy: str, proximal_mu: float, mode: str, optimizer: str = "sgd") -> None:
    """Raise ValueError unless these options of a workload fit together. optimizer: of local
    steps."""
    require_choice("remedy", remedy, REMEDIES)
    require_range("proximal_mu", proximal_mu, above=0)
    if remedy and mode != "federated":
        raise ValueError(
            f"remedy is {remedy!r}; it corrects local training, and mode {mode!r} has none: leave"
            " it out"
        )
    if remedy == SCAFFOLD and optimizer != "sgd":
        raise ValueError(
            f"remedy is {remedy!r}; it needs steps that follow the gradient, and those of"
            f' {optimizer!r} do not: use "sgd"'
        )


def corrected_by(
    start: NDArray[np.floating], remedy: str, proximal_mu: float, correction: Array | None
) -> Callable[[Array, Array], None] | None:
    """Make the function that adds a remedy's term to a gradient, in place; None without remedy.

    start: (d,) weights of the global model. correction: (d,) of control variates.
    Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks", equation 2.
    """
    if correction is not None:
        added = correction

        def by_variates(vector: Array, gradient: Array) -> None:
            gradient += added

        return by_variates
    if remedy != "proximal":
        return None
    center = np.array(start, np.float64)

    def by_proximity(vector: Array, gradient: Array) -> None:
        gradient += proximal_mu * (vector - center)

    return by_proximity
