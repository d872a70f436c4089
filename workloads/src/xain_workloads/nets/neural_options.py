"""Options of the workload "neural"."""

from dataclasses import dataclass, fields
from typing import Any, get_args

from xain_foundation.settings.hints import hint
from xain_workloads.class_weights import require_class_weight
from xain_workloads.nets.neural_builders import require_name
from xain_workloads.nets.neural_layers import require_layers
from xain_workloads.options import require_choice, require_no_local_steps, require_range
from xain_workloads.remedies import PROXIMAL_MU, require_remedy
from xain_workloads.tables.dataset import Task

MODES = ("federated", "gradient", "pipeline")
OPTIMIZERS = ("sgd", "adam")
SCHEDULES = ("gpipe", "1f1b")
DEVICES = ("auto", "cpu", "cuda")
DEFAULT_LAYERS: tuple[dict[str, Any], ...] = (
    {"type": "linear", "out_features": 64},
    {"type": "relu"},
    {"type": "linear"},
)


@dataclass(frozen=True, slots=True)
class NeuralOptions:
    """Options of the workload "neural", named as torch names them.

    task: "classification" or "regression".
    mode: "federated" trains locally and averages weights; "gradient" sends the gradient of the
        loss; "pipeline" cuts the network into stages over the participants.
    builder: "package.module:function" of a function (num_features, num_outputs) -> torch module;
        see neural_builders. layers: the network as a list; see neural_layers. One of the two;
        without both, DEFAULT_LAYERS. num_outputs is the number of classes, or 1 for regression.
    optimizer: "sgd" or "adam", of local steps; fresh in each round. learning_rate, momentum (of
        "sgd"), weight_decay: its settings.
    batch_size: rows of a step. 0: in mode "gradient" all rows, else see minibatch.batch_rows().
    seed: of the initial weights.
    dtype: of the weights, and of training: "float32" or "float64".
    device: of training: "cpu", "cuda", or "auto", which is a GPU where there is one.
    stages, cuts, micro_batches, schedule: of mode "pipeline". stages: 0 for as many as there are
        participants. cuts: position of the first layer of each stage but the first; empty for
        stages of balanced cost. micro_batches: parts of a batch. schedule: one of SCHEDULES.
    class_weight: "balanced" weighs rows by the inverse of the count of their class at all sites.
    remedy, proximal_mu: those of [workload], which the coordinator adds.
    Raises ValueError that names the field.
    """

    task: str = "classification"
    mode: str = "federated"
    builder: str = ""
    layers: tuple[dict[str, Any], ...] = ()
    optimizer: str = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int = 0
    seed: int = 0
    dtype: str = ""
    device: str = "auto"
    stages: int = 0
    cuts: tuple[int, ...] = ()
    micro_batches: int = 4
    schedule: str = "gpipe"
    class_weight: str = ""
    remedy: str = ""
    proximal_mu: float = PROXIMAL_MU

    def __post_init__(self) -> None:
        """Fill in layers and dtype, and check all options. Raises ValueError."""
        require_choice("task", self.task, get_args(Task))
        require_choice("mode", self.mode, MODES)
        if self.builder:
            require_name(self.builder)
            if self.layers:
                raise ValueError("layers is set, and so is builder; leave one of them out")
        else:
            if not self.layers:
                object.__setattr__(self, "layers", DEFAULT_LAYERS)
            require_layers(self.layers)
        if not self.dtype:
            # Gradients of many sites sum to that of the union of their rows, to float64's accuracy.
            dtype = "float64" if self.mode == "gradient" else "float32"
            object.__setattr__(self, "dtype", dtype)
        require_choice("dtype", self.dtype, ("float32", "float64"))
        require_choice("device", self.device, DEVICES)
        require_choice("optimizer", self.optimizer, OPTIMIZERS)
        require_range("learning_rate", self.learning_rate, above=0)
        require_range("momentum", self.momentum, at_least=0)
        if self.momentum >= 1:
            raise ValueError(f"momentum is {self.momentum}; it must be below 1")
        require_range("weight_decay", self.weight_decay, at_least=0)
        require_range("batch_size", self.batch_size, at_least=0)
        require_range("seed", self.seed, at_least=0, at_most=2**63 - 1)
        require_class_weight(self.class_weight, self.task)
        require_remedy(self.remedy, self.proximal_mu, self.mode, self.optimizer)
        if self.remedy == "personal" and self.builder:
            raise ValueError(
                "remedy is 'personal'; nothing tells which layer of a builder is the last: "
                + hint("xain-coordinator", 'model.personal = ["NAME.*"]')
            )
        self._check_pipeline()
        if self.mode == "gradient":
            require_no_local_steps(self, ("optimizer", "learning_rate", "momentum"))

    def _check_pipeline(self) -> None:
        require_range("stages", self.stages, at_least=0)
        require_range("micro_batches", self.micro_batches, at_least=1)
        require_choice("schedule", self.schedule, SCHEDULES)
        if self.cuts:
            if list(self.cuts) != sorted({*self.cuts}) or self.cuts[0] < 1:
                raise ValueError(f"cuts is {self.cuts}; it must rise, from 1 on")
            if self.layers and self.cuts[-1] >= len(self.layers):
                raise ValueError(
                    f"cuts is {self.cuts}; there are {len(self.layers)} layers, counted from 0"
                )
            if self.stages not in (0, len(self.cuts) + 1):
                raise ValueError(f"stages is {self.stages}; cuts makes {len(self.cuts) + 1} stages")
        if self.mode != "pipeline":
            for name in ("stages", "cuts", "micro_batches", "schedule"):
                if getattr(self, name) != _DEFAULTS[name]:
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}; it is for mode 'pipeline' only"
                    )


_DEFAULTS = {field.name: field.default for field in fields(NeuralOptions)}
