"""Figures and averages of an evaluation as text."""

from collections.abc import Iterable

from xain_coordinator.inspection.client import clean
from xain_wire.fl.coordinator_pb2 import Evaluation, Figure
from xain_wire.fl.inspection_pb2 import GetStatusResponse, ModelThreshold, RoundStatus
from xain_workloads.measures.figures import SHOWN as SHOWN
from xain_workloads.measures.thresholds import RATES


def label(name: str, evaluations: Iterable[Evaluation]) -> str:
    """Heading of a metric; "average" is in it if the evaluations have plain averages alone."""
    measured = [one for one in evaluations if name in one.metrics]
    is_average = bool(measured) and all(name in one.averages for one in measured)
    return f"average {clean(name)}" if is_average else clean(name)


def figure_text(figure: Figure) -> str:
    """A figure with its 95 % interval, and the figure of the best constant prediction."""
    about = []
    if figure.HasField("low") and figure.HasField("high"):
        about.append(f"{figure.low:.3g} to {figure.high:.3g}")
    if figure.HasField("baseline"):
        about.append(f"baseline {figure.baseline:.3g}")
    return f"{figure.value:.4g}" + (f" ({', '.join(about)})" if about else "")


def sentence(evaluation: Evaluation) -> str:
    """The most important figures, or the averages where there are none; empty without either."""
    figures = [name for name in SHOWN if name in evaluation.figures]
    if figures:
        return ", ".join(f"{name} {figure_text(evaluation.figures[name])}" for name in figures)
    return ", ".join(
        f"{label(name, [evaluation])} {value:.4g}"
        for name, value in sorted(evaluation.metrics.items())
    )


def latest(rounds: Iterable[RoundStatus]) -> tuple[int, Evaluation] | None:
    """Number and evaluation of the model that was evaluated last, by the coordinator if it has data
    of its own; None without any."""
    for one in reversed(list(rounds)):
        for measured in (one.coordinator_evaluation, one.evaluation):
            if measured.figures or measured.metrics:
                return one.round, measured
    return None


def threshold_of(status: GetStatusResponse) -> ModelThreshold | None:
    """The threshold of the best model, or, if none is the best, of the one that was evaluated last;
    None without one."""
    known = {one.round: one for one in status.thresholds}
    wanted = status.best_round if status.HasField("best_round") else max(known, default=-1)
    return known.get(wanted)


def threshold_text(threshold: ModelThreshold) -> str:
    """A threshold with what it does on the rows that it was chosen on."""
    rates = [
        f"{words} {figure_text(threshold.figures[name])}"
        for name, words in RATES.items()
        if name in threshold.figures
    ]
    name = clean(threshold.class_name) or "the second class"
    told = f"{threshold.value:.3g} of {name}, by {clean(threshold.criterion)}"
    return f"{told}: {', '.join(rates)}"
