"""SCAFFOLD: local steps that are corrected by control variates, so that sites with unlike rows do
not pull the model to where none of them wants it.

Each site has a control variate of its own, c_i, which stays there: the gradient of its loss where
it trained last. The server's, c, is the mean of those of all sites by rows. It travels behind the
tensors of the model, as a tensor of the kind "control" with as many elements as all others have. A
site sends c + (its new variate - the one before) there.
Source: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
algorithm 1 with option II.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.model import Model, TensorSpec, Vector, control_size, size_of

NAME = "control"  # of the tensor

Array = NDArray[np.float64]


def with_control(model: Model) -> Model:
    """Append the server's control variate, of zeros, to a model, unless it has one."""
    if control_size(model.layout):
        return model
    size = size_of(model.layout)
    spec = TensorSpec(NAME, (size,), model.layout[0].dtype, "control")
    zeros = np.zeros(size, model.vector.dtype)
    vector = np.concatenate([model.vector, zeros])
    return replace(model, vector=vector, layout=(*model.layout, spec))


def without_control(model: Model) -> Model:
    """Cut the server's control variate off a model, if it has one."""
    size = control_size(model.layout)
    if not size:
        return model
    return replace(model, vector=model.vector[:-size], layout=model.layout[:-1])


@dataclass(frozen=True, slots=True)
class Variates:
    """The control variates with which a site trains. (d,) each.

    server: c. own: c_i. A site that has none yet begins with the server's, which leaves the mean of
    all of them as it is.
    """

    server: Array
    own: Array

    @classmethod
    def of(cls, model: Model, own: Array | None) -> "Variates":
        """model: with a control variate. own: of the site; None if it has none yet."""
        server = np.array(model.vector[-control_size(model.layout) :], np.float64)
        return cls(server, server if own is None else own)

    @property
    def correction(self) -> Array:
        """The vector (d,) that is added to the gradient of each step."""
        return self.server - self.own

    def after(self, model: Model, trained: Vector, path: float) -> tuple[Vector, Array]:
        """The update of the site, (2 d,), and its new control variate, (d,).

        model: that training started from, without its control variate. trained: (d,). path: how far
        a constant gradient of 1 would have led.
        """
        moved = np.asarray(model.vector, np.float64) - trained
        start = 0
        for spec in model.layout:  # statistics have no gradient
            if spec.kind != "weight":
                moved[start : start + spec.size] = 0.0
            start += spec.size
        # c_i - c + (x - y) / (K * lr), without c_i.
        change = moved / path - self.server
        for_server: Any = (self.server + change).astype(trained.dtype)
        # As it is sent: rounding must not add up to a difference between c and the mean.
        return np.concatenate([trained, for_server]), self.own + (for_server - self.server)
