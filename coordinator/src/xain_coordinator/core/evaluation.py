"""Evaluations of global models: bounds on their metrics, mean and spread over sites, best model.

The evaluations of round r are of model r, from which the round starts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isfinite, sqrt

from xain_coordinator.core import descent
from xain_coordinator.core.descent import NOT_BEGUN, Descent
from xain_coordinator.core.replacing import replace
from xain_coordinator.core.round import Round
from xain_coordinator.core.values import Evaluation, GlobalModel, Rules

# Bounds of the metrics that a participant sends, since all of them go into the journal.
MAX_METRICS = 32
MAX_NAME = 64  # characters
# Above it a sum weighted by samples could overflow.
MAX_VALUE = 1e100
MAX_SAMPLES = 2**53

# Metrics with a well-known direction; True: a smaller value is better.
WELL_KNOWN: Mapping[str, bool] = {
    "accuracy": False,
    "balanced_accuracy": False,
    "precision": False,
    "recall": False,
    "f1": False,
    "auc": False,
    "r2": False,
    "loss": True,
    "log_loss": True,
    "perplexity": True,
    "mse": True,
    "rmse": True,
    "mae": True,
}

# Without a named metric, models are compared by the first of these that an evaluation has.
DEFAULTS = ("accuracy", "r2", "loss")

# Models that wait for the coordinator's own evaluation, beside the one that is being evaluated. If
# evaluations take longer than rounds, the oldest waiting model is left out.
MAX_BACKLOG = 8


@dataclass(frozen=True, slots=True)
class Best:
    """The best of the models that were evaluated.

    round, value: number and metric of the best model; the earlier one of two equal models.
    improved_round, improved_value: of the last model that was better than all before by more than
        min_delta. Patience is counted from this model.
    latest_round: number of the model that was evaluated last.
    """

    metric: str
    is_minimised: bool
    round: int
    value: float
    improved_round: int
    improved_value: float
    latest_round: int


@dataclass(frozen=True, slots=True)
class Spread:
    """A metric over sites, each of which counts once. std: of the population."""

    min: float
    max: float
    std: float


def why_not_metric(name: str, value: float) -> str | None:
    """Why a metric cannot be kept; None if it can."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        return f"a metric's name must be 1 to {MAX_NAME} printable characters"
    if not isfinite(value) or abs(value) > MAX_VALUE:
        return f"metric {name!r} is {value}; it must be finite, and at most {MAX_VALUE:g}"
    return None


def checked(num_samples: int, metrics: Mapping[str, float]) -> Evaluation:
    """Check an evaluation from the network. Raises ValueError if it breaks a bound."""
    if not 0 <= num_samples <= MAX_SAMPLES:
        raise ValueError(f"the model was evaluated on {num_samples} samples")
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"there are {len(metrics)} metrics; at most {MAX_METRICS} are taken")
    for name, value in metrics.items():
        if (why := why_not_metric(name, value)) is not None:
            raise ValueError(why)
    return Evaluation(num_samples, {name: metrics[name] for name in sorted(metrics)})


def mean_metrics(sites: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """The mean of each metric over the sites that have it, weighted by their samples.

    sites: (samples, metrics), in any order. If no site has samples, all weigh the same.
    At most MAX_METRICS names are kept, those of the most sites: see _kept.
    """
    values: dict[str, list[tuple[int, float]]] = {}
    for num_samples, metrics in sites:
        for name, value in metrics.items():
            values.setdefault(name, []).append((num_samples, value))
    means = {}
    for name in _kept(values):
        total = sum(num_samples for num_samples, _ in values[name])
        weighted = values[name] if total else [(1, value) for _, value in values[name]]
        # fsum is exact, so the mean does not depend on the order of the sites.
        means[name] = fsum(n * value for n, value in weighted) / (total or len(weighted))
    return means


def mean_evaluation(evaluations: Iterable[Evaluation]) -> Evaluation | None:
    """The mean over sites, weighted by samples, and their samples together; None without any."""
    measured = [one for one in evaluations if one.num_samples and one.metrics]
    if not measured:
        return None
    metrics = mean_metrics((one.num_samples, one.metrics) for one in measured)
    return Evaluation(sum(one.num_samples for one in measured), metrics)


def spreads(evaluations: Iterable[Evaluation]) -> dict[str, Spread]:
    """The spread of each metric over the sites that have it; the order does not matter."""
    values: dict[str, list[float]] = {}
    for one in evaluations:
        if one.num_samples:
            for name, value in one.metrics.items():
                values.setdefault(name, []).append(value)
    return {name: _spread(values[name]) for name in _kept(values)}


def _kept(values: Mapping[str, Sequence[object]]) -> list[str]:
    """The MAX_METRICS names that the most sites have sent, in alphabetical order: one site's names
    cannot push out the others'."""
    by_sites = sorted(values, key=lambda name: (-len(values[name]), name))
    return sorted(by_sites[:MAX_METRICS])


def _spread(values: list[float]) -> Spread:
    mean = fsum(values) / len(values)
    variance = fsum((value - mean) ** 2 for value in values) / len(values)
    return Spread(min(values), max(values), sqrt(variance))


def better(
    best: Best | None, rules: Rules, number: int, evaluation: Evaluation | None
) -> Best | None:
    """The best model after the evaluation of model `number`."""
    if evaluation is None:
        return best
    default = next((name for name in DEFAULTS if name in evaluation.metrics), "")
    metric = best.metric if best is not None else rules.evaluate_metric or default
    if metric not in evaluation.metrics:
        return best
    value = evaluation.metrics[metric]
    if best is None:
        is_minimised = rules.evaluate_minimised if rules.evaluate_metric else WELL_KNOWN[metric]
        return Best(metric, is_minimised, number, value, number, value, number)
    sign = -1.0 if best.is_minimised else 1.0
    is_best = sign * value > sign * best.value
    has_improved = sign * (value - best.improved_value) > rules.evaluate_min_delta
    return Best(
        metric,
        best.is_minimised,
        number if is_best else best.round,
        value if is_best else best.value,
        number if has_improved else best.improved_round,
        value if has_improved else best.improved_value,
        number,
    )


def is_out_of_patience(best: Best | None, rules: Rules) -> bool:
    """Whether no model has been better for evaluate_patience rounds."""
    if best is None or rules.evaluate_patience == 0:
        return False
    return best.latest_round - best.improved_round >= rules.evaluate_patience


@dataclass(frozen=True)  # without slots: see replacing.py
class EvaluationProgress:
    """Results of the evaluations, and those that are still owed.

    best: of the models that were evaluated.
    owed: models that the coordinator is to measure on its own data; the first is being measured.
    last_round: the one in which the last model was evaluated, when it is over.
    ended_because: why a completed session has made fewer models than its rules say; "" otherwise.
    descent: with the rule "gradient", how the loss in training has fallen.
    """

    best: Best | None = None
    owed: tuple[GlobalModel, ...] = ()
    last_round: Round | None = None
    ended_because: str = ""
    descent: Descent = NOT_BEGUN

    def compared(self, round_: Round, rules: Rules) -> "EvaluationProgress":
        """Compare the model of a round with the best one, by what participants have measured. The
        coordinator's own evaluations take the place of theirs where it has data."""
        if rules.evaluate_data or not round_.evaluations:
            return self
        mean = mean_evaluation(round_.evaluations.values())
        return replace(self, best=better(self.best, rules, round_.number, mean))

    def evaluated(
        self, number: int, evaluation: Evaluation | None, rules: Rules
    ) -> "EvaluationProgress":
        """Note the coordinator's evaluation of the first model that it owes, or that it failed."""
        best = better(self.best, rules, number, evaluation)
        return replace(self, best=best, owed=self.owed[1:])

    def owing(
        self, model: GlobalModel | None, rules: Rules, *, is_last: bool
    ) -> "EvaluationProgress":
        """Let the coordinator evaluate the present model, if it is to be evaluated. The last model
        does not wait for earlier ones."""
        if not rules.evaluate_data or rules.evaluate_every == 0 or model is None or model.is_empty:
            return self
        is_evaluated = self.best is not None and self.best.latest_round == model.round
        if is_evaluated or not (is_last or rules.evaluates(model.round)):
            return self
        first, waiting = self.owed[:1], self.owed[1:]
        kept = () if is_last else waiting[1 - MAX_BACKLOG :]
        return replace(self, owed=first if model in first else (*first, *kept, model))

    def descended(self, round_: Round, rules: Rules) -> "EvaluationProgress":
        """Take the mean loss at the model that the step of a round has left."""
        if round_.learning_rate is None:
            return self
        sites = ((round_.updates[p].num_samples, {"loss": v}) for p, v in round_.losses.items())
        loss = mean_metrics(sites).get("loss")
        after = descent.after_step(rules.aggregation_options, self.descent, loss)
        return replace(self, descent=after)
