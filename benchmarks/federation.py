"""A training in one process, as a coordinator and its participants would run it.

All settings that are not given are the defaults of the command line. What is left out is the
network, and with it everything that changes no model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xain_coordinator.aggregation.optimizers import Optimizer
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.parts.descent import NOT_BEGUN, learning_rate
from xain_coordinator.core.rules.pacing import plan_of
from xain_foundation.settings.settings import load
from xain_participant.config import ParticipantConfig
from xain_workloads.errors import Diverged
from xain_workloads.measures.figures import figures
from xain_workloads.measures.tallies import add
from xain_workloads.model import Model, Vector, control_size
from xain_workloads.scaffold import Variates, without_control
from xain_workloads.tables.partition import split_train_test
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.table import Table
from xain_workloads.trees.growing import grown
from xain_workloads.trees.histograms import growing, parse_sums
from xain_workloads.workload import TrainResult, Workload, create, initial_model, measure


@dataclass(frozen=True, slots=True)
class Trained:
    """A training that ended.

    taken: the best model by the pooled loss of held-out rows. rounds: exchanges with each site.
    epochs: of local training at each site. diverged: what a site said that could not go on.
    """

    taken: Model
    last: Model
    rounds: int
    epochs: int
    diverged: str = ""


def train(settings: Mapping[str, object], sites: Sequence[Table], seed: int) -> Trained:
    """Train over the rows of sites, of which each holds out its share.

    settings: of the coordinator, by dotted keys.
    """
    config = load(CoordinatorConfig, overrides=settings)
    least = ParticipantConfig().data.min_known
    share = ParticipantConfig().data.test_fraction
    halves = [split_train_test(site, share, 0, least=least) for site in sites]
    options = {**config.workload.whole_options}
    rule_options = config.aggregation.whole_options
    if config.aggregation.rule == "trees":
        options["mode"] = rule_options["mode"]
    workload = create(config.workload.name, options)
    model = initial_model(workload, [table.profile() for table, _ in halves])
    trainer = _Trainer(config, workload, model, [table for table, _ in halves], seed)
    held_out = [table for _, table in halves if table.num_samples]
    return trainer.run(model, held_out)


@dataclass
class _Trainer:
    config: CoordinatorConfig
    workload: Workload
    first: Model
    sites: Sequence[Table]
    seed: int

    def __post_init__(self) -> None:
        self.rows = [prepare(self.first.metadata, site, to_train=True) for site in self.sites]
        self.optimizer: Optimizer | None = self.config.aggregation.made_optimizer()
        begun = {} if self.optimizer is None else self.optimizer.begin()
        length = len(self.first.vector)
        self.state = {name: np.full(length, value) for name, value in begun.items()}
        self.control = control_size(self.first.layout)
        self.own: dict[int, Any] = {}  # control variates of the sites

    def run(self, model: Model, held_out: Sequence[Table]) -> Trained:
        rules = self.config.rules()
        plan = plan_of(rules, [one.num_samples for one in self.rows])
        rounds, epochs, patience = plan.rounds, plan.epochs, rules.evaluate_patience
        best, taken, since, done = np.inf, model, 0, 0
        for number in range(rounds):
            try:
                updates = [
                    self._update(at, model, epochs, number * epochs) for at in range(len(self.rows))
                ]
            except Diverged as error:
                return Trained(taken, model, done, done * epochs, str(error))
            model, done = self._next(model, updates, number), number + 1
            if done % plan.steps and done < rounds:
                continue
            loss = pooled_loss(model, held_out)
            if loss < best:
                best, taken, since = loss, model, 0
                continue
            since += plan.steps if loss < np.inf else 0
            if patience and since >= patience * plan.rounds_per_pass:
                break
        # Without rows to measure by, the last model is taken.
        return Trained(model if best == np.inf else taken, model, done, done * epochs)

    def _update(self, at: int, model: Model, epochs: int, epoch_base: int) -> TrainResult:
        workload: Any = self.workload
        arguments: dict[str, Any] = {"epochs": epochs, "epoch_base": epoch_base, "seed": self.seed}
        if not self.control:
            plain: TrainResult = workload.train(model, self.rows[at], **arguments)
            return plain
        variates, inner = Variates.of(model, self.own.get(at)), without_control(model)
        arguments["correction"] = variates.correction
        trained: TrainResult = workload.train(inner, self.rows[at], **arguments)
        vector, self.own[at] = variates.after(inner, trained.vector, trained.path)
        return replace(trained, vector=vector)

    def _next(self, model: Model, updates: Sequence[TrainResult], number: int) -> Model:
        return replace(model, vector=self._vector(model, updates, number))

    def _vector(self, model: Model, updates: Sequence[TrainResult], number: int) -> Vector:
        aggregation = self.config.aggregation
        if model.vector.dtype == np.uint8:
            return _of_bytes(model, updates)
        tile = np.stack([update.vector for update in updates])
        num_samples = np.array([update.num_samples for update in updates], np.int64)
        combined = aggregation.made_rule().combine(tile, num_samples)
        base = model.vector.astype(np.float64)
        if aggregation.rule == "gradient":
            rate = learning_rate(aggregation.whole_options, number, NOT_BEGUN)
            combined = base - rate * combined
        if self.optimizer is not None:
            result, own = combined, slice(len(combined) - self.control, len(combined))
            combined, after = self.optimizer.step(base, combined, self.state)
            combined[own] = result[own]  # all sites train each round
            self.state = {name: np.array(value) for name, value in after.items()}
        return combined.astype(model.vector.dtype)


def _of_bytes(model: Model, updates: Sequence[TrainResult]) -> Any:
    before = model.vector.tobytes()
    parts = [update.vector.tobytes() for update in updates]
    state = growing(before, model.metadata)
    after = grown(before, model.metadata, [parse_sums(part, state) for part in parts])
    return np.frombuffer(after, np.uint8)


def pooled_loss(model: Model, held_out: Sequence[Table]) -> float:
    """Log loss, or mean squared error, over the rows of all tables."""
    together = add([one for table in held_out if (one := measure(model, table).tallies)])
    if together is None:
        return np.inf
    found = figures(together)
    name = "log_loss" if "log_loss" in found else "mse"
    return found[name].value if name in found else -found["accuracy"].value
