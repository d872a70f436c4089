"""Sections of the report on how good the model is: figures and curves."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from xain_coordinator.cli.report.charts import Line, chart, number, table
from xain_coordinator.core.parts.evaluation import WELL_KNOWN
from xain_coordinator.server.calls.translate import tallies_of
from xain_wire.fl.coordinator_pb2 import Evaluation
from xain_wire.fl.inspection_pb2 import GetStatusResponse, RoundStatus
from xain_workloads.exported.lineage import Measured, figures_of
from xain_workloads.measures.calibration import calibration_figures
from xain_workloads.measures.figures import (
    Figure,
    calibration_curve,
    class_figures,
    figures,
    is_better,
    roc_curve,
    share_of,
)
from xain_workloads.measures.tallies import Tallies, counts_by_class, records
from xain_workloads.measures.thresholds import RATES

MAX_CONFUSED = 20  # classes of a confusion matrix
MAX_CURVES = 3  # classes whose curves are drawn
MAX_SITES = 200

# Figures in the table of the sites.
OF_SITES = ("accuracy", "sensitivity", "specificity", "auc", "log_loss", "r2", "rmse", "mae")

# Figures in which always predicting one class or value does not win.
JUDGED = frozenset(("accuracy", "auc", "log_loss", "r2", "rmse", "mae"))

WORDS: Mapping[str, str] = {
    "accuracy": "share of the rows whose class is predicted",
    "balanced_accuracy": "the same with each class counting alike: mean sensitivity of the classes",
    "sensitivity": "share of the rows of {} that are found",
    "specificity": "share of the other rows that are not taken for {}",
    "precision": "share of the rows taken for {} that are of it",
    "f1": "harmonic mean of sensitivity and precision",
    "auc": "how often a row of {} has a higher score than another row; 0.5 is chance",
    "log_loss": "how far the probabilities are from the outcomes; less is better",
    "brier": "mean squared error of the probabilities; less is better",
    "calibration_error": "mean distance of probability and share in ten groups; less is better",
    "observed_expected": "rows of {} over the sum of their probabilities; 1 is right",
    "calibration_intercept": "what the log odds lack; 0 is right, below 0 they are too high",
    "calibration_slope": "what the log odds are to be multiplied by; 1 is right, below 1 they are"
    " too far from each other, as of a model that knows its training rows too well",
    "r2": "share of the variance of the target that is explained",
    "rmse": "typical error, in the unit of the target; less is better",
    "mse": "mean squared error; less is better",
    "mae": "mean absolute error, in the unit of the target; less is better",
}


_INTERVALS = (
    "Intervals: Wilson's of shares of rows and of observed / expected, DeLong's of AUC, the normal"
    " approximation of log loss, Brier score and calibration error, Wald's of calibration intercept"
    " and slope. F1 is 2J / (1 + J) of the share J = TP / (TP + FP + FN). Limits of a mean over"
    " classes are combined by their squares. All take rows for independent and the model for given."
    " Without a threshold a row is predicted as its most probable class."
)
_WEIGHED = (
    "Rows weighed by their class in training, so that probabilities are those of classes of equal"
    " size: too high for rare classes on purpose. Log loss, Brier score and all figures of"
    " calibration are of these probabilities, and look worse than those of a model without weights."
    " AUC is not concerned; the rare class is predicted more often, at the cost of accuracy."
)
_OF_NUMBERS = (
    "Intervals: the normal approximation of mean errors, by the delta method of RMSE and R². They"
    " take rows for independent and the model for given."
)


def measured(
    status: GetStatusResponse, rounds: Sequence[RoundStatus], classes: Sequence[str]
) -> str:
    """The section on the figures of the best model, or else the latest; empty without tallies."""
    tallies = tallies_of(status.measured)
    if tallies is None:
        return ""
    names = [*classes, *(f"class {k}" for k in range(len(classes), tallies.num_classes))]
    is_own = any(one.coordinator_evaluation.num_samples for one in rounds)
    of = "of the coordinator" if is_own else _whose(status.measured_round, rounds)
    alone = f"Of the latest session alone, {escape(status.study)}. " if status.study else ""
    parts = [
        f"<h2>How good is model {status.measured_round}?</h2>",
        f'<p class="soft">{alone}Measured on {tallies.num_rows:,} rows {of}. An'
        " interval has the true value in 95 of 100 such studies; the baseline is what always"
        f" predicting {'the commonest class' if tallies.num_classes else 'the mean'} has on the"
        f" same rows.{escape(_chosen(status, rounds))}</p>",
        f'<p class="soft">{_WEIGHED}</p>' if status.weighs_classes else "",
        _pooled(tallies, names),
        f'<p class="soft">{_INTERVALS if tallies.num_classes else _OF_NUMBERS}</p>',
        _classes(tallies, names),
        _confusion(tallies, names),
        _curves(tallies, names),
        _threshold(status, names),
    ]
    return "".join(parts)


def _whose(number: int, rounds: Sequence[RoundStatus]) -> str:
    """Say on the rows of which sites model `number` was measured."""
    known = next((one.sites for one in rounds if one.round == number), ())
    sites = [site.participant_id for site in known if site.evaluation.num_samples]
    of = f"of {escape(sites[0])} alone" if len(sites) == 1 else "of all sites together"
    return f"{of}, on which nobody trained"


def _chosen(status: GetStatusResponse, rounds: Sequence[RoundStatus]) -> str:
    """The sentence on the choice of the model by the rows that it is measured on; empty where they
    have chosen none."""
    both = ((one.evaluation, one.coordinator_evaluation) for one in rounds if one.round)
    num_compared = sum(any(status.metric in one.metrics for one in of) for of in both)
    if not status.HasField("best_round") or num_compared < 2:
        return ""
    extreme = "smallest" if status.metric_is_minimised else "largest"
    return (
        f" These rows have also chosen the model: of {num_compared:,} models it has the {extreme}"
        f" {words(status.metric)}. So its figures are slightly optimistic; those of folds are not."
    )


def _pooled(tallies: Tallies, names: Sequence[str]) -> str:
    """Table of the figures of all rows, with intervals and baselines."""
    of = names[1] if tallies.num_classes == 2 else "a class, on average over the classes,"
    rows = []
    for name, figure in {**figures(tallies), **calibration_figures(tallies)}.items():
        shown = number(figure.baseline) if figure.baseline is not None else ""
        rows.append(
            (
                words(name),
                escape(WORDS[name].format(of)),
                f"<b>{number(figure.value)}</b>",
                interval(figure),
                shown,
            )
        )
    head = ("figure", "what it says", "all rows", "95 % interval", "baseline")
    return table(head, rows, texts=(1,))


def _classes(tallies: Tallies, names: Sequence[str]) -> str:
    """Table of the figures of each class; empty for two classes and for regression."""
    counts = counts_by_class(tallies)
    if not counts or tallies.num_classes == 2:
        return ""  # of two classes the figures of all rows are those of the second one
    shown = ("sensitivity", "specificity", "precision", "f1", "auc")
    rows = []
    for k, of in list(class_figures(tallies).items())[:MAX_SITES]:
        cells = [_told(of[name]) if name in of else "" for name in shown]
        rows.append([escape(names[k]), f"{counts[k][0]:,}", *cells])
    return "<h3>By class</h3>" + table(["class", "rows", *map(words, shown)], rows)


def _confusion(tallies: Tallies, names: Sequence[str]) -> str:
    """The confusion matrix; empty without one, and for many classes."""
    counts = counts_by_class(tallies)
    if not tallies.confusion or len(counts) > MAX_CONFUSED:
        return ""
    cells = {(of, as_): rows for of, as_, rows in records(tallies.confusion, 3)}
    rows = []
    for of, (total, _, _) in counts.items():
        line = []
        for as_ in counts:
            rows_of = cells.get((of, as_), 0)
            share = f" ({rows_of / total:.0%})" if rows_of else ""
            line.append(f"<b>{rows_of:,}</b>{share}" if of == as_ else f"{rows_of:,}{share}")
        rows.append([escape(names[of]), *line, f"{total:,}"])
    head = ["is, predicted as:", *(escape(names[k]) for k in counts), "rows"]
    return (
        '<h3>Confusion matrix</h3><p class="soft">A line for each true class, a column for each'
        " predicted one; in bold what is right.</p>" + table(head, rows)
    )


def _curves(tallies: Tallies, names: Sequence[str]) -> str:
    """ROC and calibration, of many classes those that are told apart worst."""
    known = {k: of["auc"] for k, of in class_figures(tallies).items() if "auc" in of}
    if not known:
        return ""
    shown = sorted(known, key=lambda k: known[k].value)[:MAX_CURVES]
    rocs, calibrations, groups_of = [], [], []
    for k in shown:
        roc, groups = roc_curve(tallies, k), calibration_curve(tallies, k)
        chance = Line("chance", "baseline", [(0.0, 0.0), (1.0, 1.0)])
        exact = Line("as often as predicted", "baseline", [(0.0, 0.0), (1.0, 1.0)])
        title = f"ROC of {names[k]}: AUC {_told(known[k])}"
        rocs.append(
            chart(title, [Line("sensitivity", "sites", roc), chance], x_name="1 − specificity")
        )
        shares = Line(f"share of {names[k]}", "sites", [(p, share) for p, share, _ in groups])
        title = f"Calibration of {names[k]}: share of ten groups by probability"
        calibrations.append(chart(title, [shares, exact], x_name="predicted probability"))
        groups_of.append(_groups(names[k], groups))
    more = ""
    if len(known) > MAX_CURVES:
        told = f"Of {len(known)} classes the {MAX_CURVES} that are told apart worst."
        more = f'<p class="soft">{told}</p>'
    drawn = f'<div class="charts squares">{"".join(rocs + calibrations)}</div>'
    return f"<h3>Curves</h3>{more}{drawn}{''.join(groups_of)}"


def _groups(name: str, groups: Sequence[tuple[float, float, int]]) -> str:
    """The points of a calibration curve with their rows and intervals."""
    found = [(p, share_of(round(share * rows), rows), rows) for p, share, rows in groups]
    cells = [
        [number(p), f"{rows:,}", number(share.value), interval(share)] for p, share, rows in found
    ]
    head = ("mean probability", "rows", f"share of {escape(name)}", "95 % interval")
    title = f"Calibration of {escape(name)} in numbers"
    return f"<details><summary>{title}</summary>{table(head, cells)}</details>"


def _threshold(status: GetStatusResponse, names: Sequence[str]) -> str:
    """The threshold of the model that is shown, and its figures; empty without one."""
    known = {one.round: one for one in status.thresholds}
    one = known.get(status.measured_round)
    if one is None:
        return ""
    found = figures_of(one.figures)
    rows = [
        [escape(rate), f"<b>{number(found[name].value)}</b>", interval(found[name])]
        for name, rate in RATES.items()
        if name in found
    ]
    told = (
        f"A row is predicted as {names[1]} if its probability of it is {one.value:.3g} or more, by"
        f' [evaluate] threshold = "{one.criterion}"; exported models predict so. It was chosen on'
        " these rows, so that its figures are slightly optimistic. The next candidate above it is"
        f" {one.value + one.resolution:.3g}."
    )
    head = ("at the threshold", "all rows", "95 % interval")
    return f'<h3>Threshold</h3><p class="soft">{escape(told)}</p>' + table(head, rows)


def site_cells(
    evaluations: Mapping[str, Evaluation], names: Iterable[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Headings and cells of the figures of sites with their intervals, then of other metrics."""
    of_sites = {name: Measured.of(one) for name, one in evaluations.items()}
    known = {figure for one in of_sites.values() for figure in one.figures}
    shown = [name for name in OF_SITES if name in known]
    others = {name for one in of_sites.values() for name in one.metrics if name not in known}
    plain = sorted(others - {"loss"} if known else others)
    cells = {}
    for name in names:
        one = of_sites.get(name)
        if one is None:
            cells[name] = [""] * (len(shown) + len(plain))
            continue
        cells[name] = [
            _marked(figure, one.figures[figure]) if figure in one.figures else ""
            for figure in shown
        ] + [number(one.metrics[m]) if m in one.metrics else "" for m in plain]
    return [*map(words, shown), *map(escape, plain)], cells


def _marked(name: str, figure: Figure) -> str:
    """Cell of a site's figure; "▼" marks one that is worse than its baseline."""
    baseline = figure.baseline
    is_worse = (
        baseline is not None
        and name in JUDGED
        and figure.value != baseline
        and not is_better(figure.value, baseline, is_minimised=WELL_KNOWN[name])
    )
    mark = " ▼" if is_worse else ""
    return f'{number(figure.value)}{mark}<br><span class="soft">{interval(figure)}</span>'


def _told(figure: Figure) -> str:
    """A figure with its interval in brackets."""
    limits = interval(figure)
    return number(figure.value) + (f" ({limits})" if limits else "")


def interval(figure: Figure) -> str:
    """The 95 % interval of a figure; empty if it has none."""
    if figure.low is None or figure.high is None:
        return ""
    return f"{number(figure.low)} to {number(figure.high)}"


def words(name: str) -> str:
    """The name of a figure as a heading."""
    known = {"auc": "AUC", "r2": "R²", "rmse": "RMSE", "mse": "MSE", "mae": "MAE", "f1": "F1"}
    known["observed_expected"] = "observed / expected"
    return known.get(name, name.replace("_", " "))
