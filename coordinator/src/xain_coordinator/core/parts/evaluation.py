"""Evaluations of global models: bounds on what sites send, figures over the rows of all sites,
averages and spread over sites, best model.

The evaluations of round r are of model r, from which the round starts.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isfinite, sqrt

from xain_coordinator.core.parts import descent
from xain_coordinator.core.parts.descent import NOT_BEGUN, Descent
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.vocabulary.replacing import replace
from xain_coordinator.core.vocabulary.values import (
    CentralModel,
    Evaluation,
    GlobalModel,
    Importance,
    LocalModel,
    Rules,
)
from xain_workloads.comparing import importance
from xain_workloads.comparing.gains import added
from xain_workloads.comparing.gains import check as check_local
from xain_workloads.measures.figures import (
    CLASS_FIGURES,
    DEFAULTS,
    LOSSES,
    NUMBER_FIGURES,
    OF_WEIGHED_CLASSES,
    figures,
    is_better,
)
from xain_workloads.measures.tallies import Tallies, add, check, have_probabilities
from xain_workloads.measures.thresholds import Threshold, choose

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
    "sensitivity": False,
    "specificity": False,
    "precision": False,
    "recall": False,
    "f1": False,
    "auc": False,
    "r2": False,
    "loss": True,
    "log_loss": True,
    "brier": True,
    "calibration_error": True,
    "perplexity": True,
    "mse": True,
    "rmse": True,
    "mae": True,
}

# Always predicting one class has the best value that there is of one of these two: that is nothing
# to beat.
_NOTHING_TO_BEAT = frozenset(("sensitivity", "specificity"))

# Metrics that tallies give for all rows; those of single sites are not averaged.
_OF_TALLIES = frozenset((*CLASS_FIGURES, *NUMBER_FIGURES))

# Models that wait for the coordinator's own evaluation, beside the one that is being evaluated. If
# evaluations take longer than rounds, the oldest waiting model is left out.
MAX_BACKLOG = 8


Loss = tuple[str, float, float]  # name, value, baseline


def _is_low(loss: Loss | None) -> bool:
    """Whether a loss is below that of the best constant prediction; True without one."""
    return loss is None or loss[1] < loss[2]


@dataclass(frozen=True, slots=True)
class Best:
    """The best of the trained models that were evaluated. The untrained one does not compete.

    round, value: number and metric of the best model; the earlier one of two equal models.
    improved_round, improved_value: of the last model that was better than all before by more than
        min_delta. Patience is counted from this model.
    latest_round, latest_value: of the model that was evaluated last.
    baseline, latest_baseline: the metric of always predicting the commonest class, or the mean, on
        the rows that the best and the latest model were evaluated on; None if it has none.
    tallies, latest_tallies: of these rows, for confusion matrix and curves; None if there are none.
    loss, latest_loss: name, value and baseline of log_loss or mse of the two models, where another
        metric is compared; None if there is none.
    """

    metric: str
    is_minimised: bool
    round: int
    value: float
    improved_round: int
    improved_value: float
    latest_round: int
    latest_value: float
    baseline: float | None = None
    latest_baseline: float | None = None
    tallies: Tallies | None = None
    latest_tallies: Tallies | None = None
    loss: Loss | None = None
    latest_loss: Loss | None = None

    @property
    def beats_baseline(self) -> bool:
        """Whether the best model is better than the best constant prediction by its metric and by
        its loss, as far as is known."""
        return _is_low(self.loss) and (
            self.baseline is None
            or is_better(self.value, self.baseline, is_minimised=self.is_minimised)
        )

    @property
    def no_better(self) -> str:
        """A sentence that the latest model is no better than the best constant prediction; "" if it
        is."""
        name, value, baseline = self.metric, self.latest_value, self.latest_baseline
        if baseline is None or is_better(value, baseline, is_minimised=self.is_minimised):
            if self.latest_loss is None or _is_low(self.latest_loss):
                return ""
            name, value, baseline = self.latest_loss
        of = "the mean" if name in NUMBER_FIGURES else "the commonest class"
        text = (
            f"Model {self.latest_round} is no better than always predicting {of}: its {name} over"
            f" the held-out rows is {value:.4g}, and that of {of} {baseline:.4g}"
        )
        if self.beats_baseline:
            by = "" if name == self.metric else f"{self.metric} "
            return f"{text}; the best model is {self.round}, with {by}{self.value:.4g}."
        return f"{text}; no model was better."


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


def checked(
    num_samples: int,
    metrics: Mapping[str, float],
    tallies: Tallies | None = None,
    *,
    withheld: bool = False,
    num_classes: int | None = None,
    has_probabilities: bool = False,
    local: LocalModel | None = None,
    importances: Sequence[Importance] = (),
) -> Evaluation:
    """Check an evaluation from the network; return it with its metrics sorted, or empty if it is
    withheld.

    num_classes: of the model, 0 for a regression; None if it is not known, as of a script's.
    has_probabilities: whether the model is known to have some. local, importances: checked in the
    same way. Raises ValueError if it breaks a bound, or has tallies of another kind of model, which
    would spoil the sums over all sites.
    """
    if withheld:
        return Evaluation(0, {}, withheld=True)
    if not 0 <= num_samples <= MAX_SAMPLES:
        raise ValueError(f"the model was evaluated on {num_samples} samples")
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"there are {len(metrics)} metrics; at most {MAX_METRICS} are taken")
    for name, value in metrics.items():
        if (why := why_not_metric(name, value)) is not None:
            raise ValueError(why)
    of_local = None if local is None else local.tallies
    if local is not None:
        check_local(local)
    for one in (tallies, of_local):
        if one is None:
            continue
        check(one)
        if num_classes not in (None, one.num_classes):
            raise ValueError(
                f"tallies are of {one.num_classes} classes, and the model has {num_classes}"
            )
        if has_probabilities and not have_probabilities(one):
            raise ValueError("tallies lack losses or scores, and the model has probabilities")
    importance.check(importances)
    if importances and tallies is None:
        raise ValueError("there are importances, and no tallies of the rows that they are of")
    if of_local is not None and (tallies is None or of_local.num_rows != tallies.num_rows):
        raise ValueError("the tallies of the local model are of other rows")
    kept = {name: metrics[name] for name in sorted(metrics)}
    return Evaluation(num_samples, kept, tallies, local=local, importances=tuple(importances))


def mean_metrics(sites: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """The mean of each metric over the sites that have it, weighted by their samples.

    sites: (samples, metrics), in any order. If no site has samples, all weigh the same.
    At most MAX_METRICS names are kept, those of the most sites.
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


def together(evaluations: Collection[Evaluation]) -> Evaluation | None:
    """The evaluation of sites together, with the figures that follow from their tallies; None
    without any."""
    return combined(evaluations, pooled(evaluations))


def combined(evaluations: Iterable[Evaluation], tallies: Tallies | None) -> Evaluation | None:
    """The evaluation of sites together; None without any.

    tallies: of all of them, or None. The metrics are the figures that follow from the tallies, and
    of all others the averages over sites, weighted by samples.
    """
    measured = [one for one in evaluations if one.num_samples and (one.metrics or one.tallies)]
    if not measured:
        return None
    found = {} if tallies is None else figures(tallies)
    averages = mean_metrics((one.num_samples, _plain(one)) for one in measured)
    metrics = {name: value for name, value in averages.items() if name not in found}
    metrics |= {name: figure.value for name, figure in found.items()}
    num_samples = sum(one.num_samples for one in measured)
    return Evaluation(
        num_samples,
        metrics,
        figures=found,
        local=_local(measured),
        importances=importance.added((one.num_samples, one.importances) for one in measured),
    )


def _local(measured: Collection[Evaluation]) -> LocalModel | None:
    """The local models of all sites as one: the figures of their added tallies, each model measured
    on the rows of its own site. Without tallies, the one of a single site; None for more or
    none."""
    known = [one.local for one in measured if one.local is not None]
    tallies = add(one.tallies for one in known if one.tallies is not None)
    if tallies is None:
        return known[0] if len(known) == 1 else None
    return LocalModel(
        passes=max(one.passes for one in known),
        differences=added(
            (one.tallies.num_rows, one.differences) for one in known if one.tallies is not None
        ),
        figures=figures(tallies),
        num_samples=tallies.num_rows,
    )


def pooled(evaluations: Iterable[Evaluation]) -> Tallies | None:
    """The tallies of all sites together; None without any."""
    known = [one.tallies for one in evaluations if one.num_samples and one.tallies is not None]
    return add(known) if known else None


def _plain(one: Evaluation) -> Mapping[str, float]:
    """Metrics of a site that no tallies give."""
    if one.tallies is None and not one.figures:
        return one.metrics
    return {name: value for name, value in one.metrics.items() if name not in _OF_TALLIES}


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
    """The spread of values, of which there is at least one."""
    mean = fsum(values) / len(values)
    variance = fsum((value - mean) ** 2 for value in values) / len(values)
    return Spread(min(values), max(values), sqrt(variance))


def compared_by(best: Best | None, rules: Rules, evaluation: Evaluation) -> str:
    """The metric that models are compared by; "" if none is named and there are only averages."""
    if best is not None:
        return best.metric
    default = next((name for name in DEFAULTS if name in evaluation.figures), "")
    return rules.evaluate_metric or default


def loss_of(evaluation: Evaluation, rules: Rules) -> tuple[str, float] | None:
    """Name and value of the loss of an evaluation that follows from tallies; None without one. If
    rows weigh by their class, it is what AUC, or the balanced accuracy, lacks to 1."""
    names = OF_WEIGHED_CLASSES if rules.weighs_classes else LOSSES
    name = next((name for name in names if name in evaluation.figures), None)
    if name is None:
        return None
    value = evaluation.figures[name].value
    return name, value if name in LOSSES else 1 - value


def _loss(evaluation: Evaluation) -> Loss | None:
    """The log loss or squared error of an evaluation with that of the best constant prediction;
    None if it has neither."""
    for name in LOSSES:
        figure = evaluation.figures.get(name)
        if figure is not None and figure.baseline is not None:
            return name, figure.value, figure.baseline
    return None


def better(
    best: Best | None,
    rules: Rules,
    number: int,
    evaluation: Evaluation | None,
    tallies: Tallies | None = None,
) -> Best | None:
    """The best model after trained model `number` was evaluated over all sites; `best` itself if
    there is no evaluation, or it lacks the metric.

    Unless a metric is named, models are compared by the first figure of DEFAULTS that there is, and
    by no average. Whatever the metric, a model whose loss is below that of the best constant
    prediction is better than one whose loss is not, unless rows weigh by their class.
    """
    if evaluation is None:
        return best
    metric = compared_by(best, rules, evaluation)
    if metric not in evaluation.metrics:
        return best
    # Probabilities of a model whose rows weigh by their class are too high for rare ones.
    is_judged_by_loss = metric not in LOSSES and not rules.weighs_classes
    loss = _loss(evaluation) if is_judged_by_loss else None
    value = evaluation.metrics[metric]
    figure = evaluation.figures.get(metric)
    baseline = None if figure is None or metric in _NOTHING_TO_BEAT else figure.baseline
    if best is None:
        is_minimised = rules.evaluate_minimised if rules.evaluate_metric else WELL_KNOWN[metric]
        latest = number, value
        on = baseline, baseline
        return Best(
            *(metric, is_minimised, *latest, *latest, *latest, *on, tallies, tallies),
            loss=loss,
            latest_loss=loss,
        )
    sign = -1.0 if best.is_minimised else 1.0
    is_best = (_is_low(loss), sign * value) > (_is_low(best.loss), sign * best.value)
    has_improved = sign * (value - best.improved_value) > rules.evaluate_min_delta
    return Best(
        metric,
        best.is_minimised,
        number if is_best else best.round,
        value if is_best else best.value,
        number if has_improved else best.improved_round,
        value if has_improved else best.improved_value,
        number,
        value,
        baseline if is_best else best.baseline,
        baseline,
        tallies if is_best else best.tallies,
        tallies,
        loss if is_best else best.loss,
        loss,
    )


def is_out_of_patience(best: Best | None, rules: Rules, rounds_per_pass: int) -> bool:
    """Whether no model has been better for evaluate_patience passes over the data. False if a model
    was evaluated on fewer than evaluate_patience_rows rows."""
    if best is None or rules.evaluate_patience == 0:
        return False
    rows = [0 if one is None else one.num_rows for one in (best.tallies, best.latest_tallies)]
    if min(rows) < rules.evaluate_patience_rows:
        return False
    return best.latest_round - best.improved_round >= rules.evaluate_patience * rounds_per_pass


@dataclass(frozen=True)  # without slots: see replacing.py
class EvaluationProgress:
    """Results of the evaluations, and those that are still owed.

    best: of the trained models that were evaluated; see `winner`.
    owed: models that the coordinator is to measure on its own data; the first is being measured.
    last_round: the one in which the last model was evaluated, when it is over.
    ended_because: why a completed session has made fewer models than its rules say; "" otherwise.
    descent: with the rule "gradient", how the loss in training has fallen.
    measured_round: number of the model that was evaluated last, the untrained one among them; -1
        before the first.
    lacks_metric: whether the latest evaluation lacks the metric that models are compared by, or has
        only averages, and none is named.
    central: of a session that is over; None if there is none.
    """

    best: Best | None = None
    owed: tuple[GlobalModel, ...] = ()
    last_round: Round | None = None
    ended_because: str = ""
    descent: Descent = NOT_BEGUN
    measured_round: int = -1
    lacks_metric: bool = False
    central: CentralModel | None = None

    @property
    def winner(self) -> Best | None:
        """The best model, unless it is no better than the best constant prediction."""
        return self.best if self.best is not None and self.best.beats_baseline else None

    @property
    def no_better(self) -> str:
        """One sentence, if the latest model is no better than the best constant prediction; "" if
        it is, or without an evaluation."""
        return "" if self.best is None else self.best.no_better

    @property
    def shown(self) -> tuple[int, Tallies] | None:
        """Number and tallies of the best model, or of the model that was evaluated last if none is
        the best; None without any."""
        if self.best is None:
            return None
        found = self.best.round, self.best.tallies
        if self.winner is None:
            found = self.best.latest_round, self.best.latest_tallies
        return None if found[1] is None else (found[0], found[1])

    def thresholds(self, rules: Rules) -> dict[int, Threshold]:
        """Thresholds of the best model and of the model that was evaluated last, by number, as far
        as there are any."""
        best = self.best
        if best is None or not rules.evaluate_threshold:
            return {}
        known = ((best.round, best.tallies), (best.latest_round, best.latest_tallies))
        found = {
            number: choose(tallies, rules.evaluate_threshold)
            for number, tallies in known
            if tallies is not None
        }
        return {number: one for number, one in found.items() if one is not None}

    def compared(
        self, round_: Round, rules: Rules, untrained: int | None = None
    ) -> "EvaluationProgress":
        """The progress after the model of a round is compared with the best one, by what
        participants have measured; unchanged where the coordinator has data: its own evaluations
        take the place of theirs. untrained: number of the untrained model; None if the first model
        was trained before."""
        if rules.evaluate_data or not round_.evaluations:
            return self
        return self._measured(round_.number, round_.evaluations.values(), rules, untrained)

    def evaluated(
        self,
        number: int,
        evaluation: Evaluation | None,
        rules: Rules,
        untrained: int | None = None,
    ) -> "EvaluationProgress":
        """The progress after the coordinator's evaluation of the first model that it owes, which it
        owes no more. evaluation: None if it failed. untrained: number of the untrained model."""
        progress = (
            self if evaluation is None else self.measured(number, evaluation, rules, untrained)
        )
        return replace(progress, owed=self.owed[1:])

    def measured(
        self, number: int, evaluation: Evaluation, rules: Rules, untrained: int | None = None
    ) -> "EvaluationProgress":
        """The progress after a model is compared with the best one by an evaluation that the
        coordinator does not owe, such as a script's. untrained: number of the untrained model."""
        return self._measured(number, (evaluation,), rules, untrained)

    def _measured(
        self,
        number: int,
        measured: Collection[Evaluation],
        rules: Rules,
        untrained: int | None,
    ) -> "EvaluationProgress":
        """The progress after a model was measured at all sites together; unchanged if they measured
        nothing. The untrained model is noted and never the best. untrained: its number."""
        tallies = pooled(measured)
        evaluation = combined(measured, tallies)
        if evaluation is None:
            return self
        best = self.best
        if number != untrained:
            best = better(best, rules, number, evaluation, tallies)
        lacks = compared_by(best, rules, evaluation) not in evaluation.metrics
        return replace(self, best=best, measured_round=number, lacks_metric=lacks)

    def owing(
        self, model: GlobalModel | None, rules: Rules, steps: int, *, is_last: bool
    ) -> "EvaluationProgress":
        """The progress with the present model among those that the coordinator is to evaluate;
        unchanged if it evaluates none, not this one, or has done so. Beside the last model no
        earlier ones wait.

        steps: rounds that a whole model takes.
        """
        if not rules.evaluate_data or rules.evaluate_every == 0 or model is None or model.is_empty:
            return self
        is_evaluated = self.measured_round == model.round
        if is_evaluated or not (is_last or rules.evaluates(model.round, steps)):
            return self
        first, waiting = self.owed[:1], self.owed[1:]
        kept = () if is_last else waiting[1 - MAX_BACKLOG :]
        return replace(self, owed=first if model in first else (*first, *kept, model))

    def descended(self, round_: Round, rules: Rules) -> "EvaluationProgress":
        """The progress after a step of the rule "gradient", by the mean loss at the model before
        it. Unchanged with other rules."""
        if round_.learning_rate is None:
            return self
        sites = ((round_.updates[p].num_samples, {"loss": v}) for p, v in round_.losses.items())
        loss = mean_metrics(sites).get("loss")
        after = descent.after_step(rules.aggregation_options, self.descent, loss)
        return replace(self, descent=after)
