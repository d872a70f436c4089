"""Options of the workload "sgd"."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import get_args

from xain_foundation.settings.hints import hint
from xain_workloads.class_weights import require_class_weight
from xain_workloads.options import require_choice, require_range
from xain_workloads.remedies import PROXIMAL_MU, require_remedy
from xain_workloads.tables.dataset import Task

# The first loss of each task is its default.
LOSSES: Mapping[str, tuple[str, ...]] = {
    "classification": ("log_loss", "hinge", "modified_huber", "perceptron", "squared_hinge"),
    "regression": (
        "squared_error",
        "epsilon_insensitive",
        "huber",
        "squared_epsilon_insensitive",
    ),
}
PENALTIES = ("l2", "l1", "elasticnet", "none")
MODES = ("federated", "gradient")
# Without "adaptive", which watches one long fit and cannot look across rounds.
LEARNING_RATES = ("constant", "invscaling", "optimal")
OVR, MULTINOMIAL = "ovr", "multinomial"


@dataclass(frozen=True, slots=True)
class SgdOptions:
    """Options of the workload "sgd", named as scikit-learn names them.

    task: "classification" or "regression".
    loss: one of LOSSES[task]; empty means the first.
    multi_class: with more than two classes. "multinomial", the default of "log_loss", trains them
        together, and "ovr", as all other losses do, one class against the rest.
    penalty, alpha, l1_ratio: the regulariser, its weight, and the share of L1 in "elasticnet".
    learning_rate, eta0, power_t: the t-th step of a participant is eta0 ("constant"),
        eta0 / t**power_t ("invscaling") or 1 / (alpha * (t0 + t - 1)) ("optimal").
        eta0 = 0: what is safe for the rows of the site; see step_sizes.safe_step().
    epsilon: width of the insensitive zone; for regression losses that have one.
    dtype: of the weights between participants, "float32" or "float64". Training is in float64.
    mode: "federated" trains locally; "gradient" sends the gradient of the regularised loss, and
        the step is the coordinator's.
    batch_size: rows of a step, or of a gradient, drawn anew for each. 0: see
        minibatch.batch_rows(); in mode "gradient" all rows.
    class_weight: "balanced" weighs rows by the inverse of the count of their class at all sites.
    remedy, proximal_mu: those of [workload], which the coordinator adds.
    Raises ValueError that names the field.
    """

    task: str = "classification"
    mode: str = "federated"
    loss: str = ""
    penalty: str = "l2"
    alpha: float = 1e-4
    l1_ratio: float = 0.15
    learning_rate: str = "constant"
    eta0: float = 0.0
    power_t: float = 0.25
    epsilon: float = 0.1
    fit_intercept: bool = True
    dtype: str = ""
    batch_size: int = 0
    class_weight: str = ""
    multi_class: str = ""
    remedy: str = ""
    proximal_mu: float = PROXIMAL_MU

    def __post_init__(self) -> None:
        """Fill in dtype and loss, and check all options. Raises ValueError."""
        require_choice("task", self.task, get_args(Task))
        require_choice("mode", self.mode, MODES)
        if not self.dtype:
            # Gradients of many sites sum to that of the union of their rows, to float64's accuracy.
            dtype = "float64" if self.mode == "gradient" else "float32"
            object.__setattr__(self, "dtype", dtype)
        if not self.loss:
            object.__setattr__(self, "loss", LOSSES[self.task][0])
        require_choice("loss", self.loss, LOSSES[self.task])
        require_choice("multi_class", self.multi_class, ("", OVR, MULTINOMIAL))
        if self.multi_class == MULTINOMIAL and self.loss != "log_loss":
            raise ValueError(
                f"multi_class is {MULTINOMIAL!r}; loss {self.loss!r} trains one class against the"
                " rest: leave it out"
            )
        if self.multi_class == OVR and self.mode == "gradient" and self.loss == "log_loss":
            raise ValueError(
                f"multi_class is {OVR!r}; gradients of log_loss are multinomial: leave it out"
            )
        require_choice("penalty", self.penalty, PENALTIES)
        require_choice("learning_rate", self.learning_rate, LEARNING_RATES)
        require_choice("dtype", self.dtype, ("float32", "float64"))
        require_range("alpha", self.alpha, at_least=0)
        if self.learning_rate == "optimal" and self.alpha == 0:
            raise ValueError("alpha is 0; learning_rate 'optimal' divides by it")
        require_range("l1_ratio", self.l1_ratio, at_least=0, at_most=1)
        require_range("eta0", self.eta0, at_least=0)
        require_range("power_t", self.power_t, at_least=0)
        require_range("epsilon", self.epsilon, at_least=0)
        require_range("batch_size", self.batch_size, at_least=0)
        require_class_weight(self.class_weight, self.task)
        require_remedy(self.remedy, self.proximal_mu, self.mode)
        if self.remedy == "personal" and not self.fit_intercept:
            raise ValueError(
                "remedy is 'personal'; it keeps intercepts at their sites, and there are none with"
                " fit_intercept = false: leave it out"
            )
        if self.mode == "gradient":
            for name in ("learning_rate", "eta0", "power_t"):
                if getattr(self, name) != _DEFAULTS[name]:
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}; in mode 'gradient' the coordinator"
                        f" takes the steps: "
                        + hint("xain-coordinator", f"aggregation.options.{name} = VALUE")
                    )

    @property
    def is_softmax(self) -> bool:
        """Whether the scores of more than two classes are trained together."""
        return self.loss == "log_loss" and self.multi_class != OVR

    @property
    def share_of_l1(self) -> float:
        """The share of L1 in the penalty."""
        return {"l1": 1.0, "elasticnet": self.l1_ratio}.get(self.penalty, 0.0)

    @property
    def weight_of_penalty(self) -> float:
        """alpha, or 0 without a penalty."""
        return 0.0 if self.penalty == "none" else self.alpha


_DEFAULTS = {field.name: field.default for field in fields(SgdOptions)}
