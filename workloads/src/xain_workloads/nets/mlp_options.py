"""Options of multi-layer perceptrons."""

from dataclasses import dataclass
from typing import get_args

from xain_workloads.class_weights import require_class_weight
from xain_workloads.options import require_choice, require_no_local_steps, require_range
from xain_workloads.remedies import PROXIMAL_MU, require_remedy
from xain_workloads.tables.dataset import Task

ACTIVATIONS = ("relu", "tanh", "logistic", "identity")
SOLVERS = ("sgd", "adam")
MODES = ("federated", "gradient")
MAX_LAYERS = 10
MAX_UNITS = 100_000  # of a layer


@dataclass(frozen=True, slots=True)
class MlpOptions:
    """Options of the workload "mlp", named as scikit-learn names them.

    task: "classification" or "regression".
    mode: "federated" trains locally; "gradient" sends the gradient of the loss with its penalty,
        and the step is the coordinator's.
    hidden_layers: units of each hidden layer, at least one layer.
    activation: of the hidden layers, one of ACTIVATIONS.
    solver: "sgd" with Nesterov's momentum, or "adam". Each round starts with a fresh optimiser:
        neither velocity nor moments are kept between rounds.
    learning_rate_init: step size, constant. momentum: for "sgd", 0 to below 1.
    batch_size: rows of a step, or of a gradient, drawn anew for each; a site with fewer rows takes
        all of them. 0: see minibatch.batch_rows(); in mode "gradient" all rows.
    alpha: weight of the L2 penalty, which is divided by the rows of a local step, as scikit-learn
        divides it; in mode "gradient" it is not, so that it is the same for any number of sites.
    seed: of the initial weights, which the coordinator draws once for all sites.
    dtype: of the weights between participants, "float32" or "float64". Training is in float64.
    class_weight: "balanced" weighs rows by the inverse of the count of their class at all sites.
    remedy, proximal_mu: those of [workload], which the coordinator adds.
    Raises ValueError that names the field.
    """

    task: str = "classification"
    mode: str = "federated"
    hidden_layers: tuple[int, ...] = (64,)
    activation: str = "relu"
    solver: str = "sgd"
    learning_rate_init: float = 0.01
    momentum: float = 0.9
    batch_size: int = 0
    alpha: float = 1e-4
    seed: int = 0
    dtype: str = "float32"
    class_weight: str = ""
    remedy: str = ""
    proximal_mu: float = PROXIMAL_MU

    def __post_init__(self) -> None:
        require_choice("task", self.task, get_args(Task))
        require_choice("mode", self.mode, MODES)
        require_choice("activation", self.activation, ACTIVATIONS)
        require_choice("solver", self.solver, SOLVERS)
        require_choice("dtype", self.dtype, ("float32", "float64"))
        if not 1 <= len(self.hidden_layers) <= MAX_LAYERS:
            raise ValueError(
                f"hidden_layers is {self.hidden_layers}; it must have 1 to {MAX_LAYERS} layers"
            )
        for units in self.hidden_layers:
            require_range("hidden_layers", units, at_least=1, at_most=MAX_UNITS)
        require_range("learning_rate_init", self.learning_rate_init, above=0)
        require_range("momentum", self.momentum, at_least=0)
        if self.momentum >= 1:
            raise ValueError(f"momentum is {self.momentum}; it must be below 1")
        require_range("batch_size", self.batch_size, at_least=0)
        require_range("alpha", self.alpha, at_least=0)
        require_range("seed", self.seed, at_least=0)
        require_class_weight(self.class_weight, self.task)
        require_remedy(self.remedy, self.proximal_mu, self.mode, self.solver)
        if self.mode == "gradient":
            require_no_local_steps(self, ("solver", "learning_rate_init", "momentum"))
