"""Studies: sessions one after the other, and one table of what came of them.

    next_step(plan, study, outcomes) -> the next session, or None at the end
    lines(plan, outcomes)            -> the table
    outcome_of(session, history)     -> what came of a finished session

All of it follows from the plan and from the journalled sessions, so that a coordinator that is
killed in the middle goes on as if it had not been.

A model is measured by a session of its own after its training, on rows that have neither trained
nor chosen it. Within a training, models are compared on the rows that each site holds out of its
part, as without a study.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, sqrt
from typing import Literal

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts.evaluation import pooled, together
from xain_coordinator.core.view.history import History
from xain_coordinator.core.vocabulary.values import Division, Evaluation, Figure, Step, Tallies
from xain_wire.metadata import COMPLETED
from xain_workloads.measures.calibration import calibration_figures
from xain_workloads.measures.figures import LOSSES, figures
from xain_workloads.measures.tallies import add

Kind = Literal["folds", "leave_out", "cross", "search", "model"]

ALL_SITES = "all sites"


@dataclass(frozen=True, slots=True)
class Plan:
    """Sessions and measurements of a study.

    kind: "folds": train without each fold of the rows of all sites, and measure on it. "leave_out":
        train without each site, and measure there. "cross": train at all sites and at each site
        alone, and measure each model at each site. "search": train with each of the options, and
        halve their number by loss until one is left. "model": measure a model that there is.
    folds: of the rows of each site. With "cross" the first fold is the one to be measured on.
    seed: of the folds.
    final: whether a last training has all rows, and the best options of a search.
    options: of a search, each with its settings as JSON by dotted key.
    budget: rounds, or passes, of the first trainings of a search; each halving doubles it.
    source: of the model to be measured, as Lineage.source. all_rows: on all rows of the sites,
        instead of those that they hold out.
    """

    kind: Kind
    folds: int = 5
    seed: int = 0
    final: bool = False
    options: tuple[Mapping[str, str], ...] = ()
    budget: int = 1
    source: str = ""
    all_rows: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a session of a study.

    why: the session has no result; "" if it has one.
    number: of the model that is taken: the best one, or else the last; None without one.
    num_rounds: rounds that were trained.
    sites: those that counted in the training.
    by_site: evaluations of that model, with figures where there are tallies.
    tallies: of all sites together.
    metric: that models are compared by; "" if there is none. loss: what it comes to for that model
        over the held-out rows of all sites, the less the better; None if it is not known.
    """

    session_id: str
    step: Step
    why: str = ""
    number: int | None = None
    num_rounds: int = 0
    sites: tuple[str, ...] = ()
    by_site: Mapping[str, Evaluation] = field(default_factory=dict)
    tallies: Tallies | None = None
    metric: str = ""
    loss: float | None = None

    @property
    def source(self) -> str:
        """The model that is taken, as Lineage.source; "" without one."""
        return "" if self.number is None else f"{self.session_id}/{self.number}"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table of a study: a model, measured on some rows.

    model: how it was trained. site: where it was measured; "" for all sites together.
    note: why nothing was measured, or how it was measured.
    """

    model: str
    site: str
    session_id: str = ""
    num_rows: int = 0
    figures: Mapping[str, Figure] = field(default_factory=dict)
    averages: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and standard deviation of a figure over n folds or sites."""

    mean: float
    std: float
    n: int


def outcome_of(session: Session, history: History) -> Outcome:
    """Outcome of a finished session of a study."""
    step, progress = session.rules.step, session.evaluation
    assert step is not None, f"session {session.session_id} is of no study"
    why = "" if session.cause == COMPLETED else session.cause
    model = session.model
    if why or model is None:
        return Outcome(session.session_id, step, why or "there is no model")
    if step.task == "measure":
        last = progress.last_round
        measured = {} if last is None else dict(sorted(last.evaluations.items()))
        tallies = add(e.tallies for e in measured.values() if e.tallies is not None)
        return Outcome(session.session_id, step, "", 0, by_site=measured, tallies=tallies)
    number = model.round if progress.winner is None else progress.winner.round
    tallies = progress.shown[1] if progress.shown is not None else None
    record = next((one for one in history.rounds if one.round == number), None)
    sites = {} if record is None else record.sites
    metric, loss = _compared(session)
    return Outcome(
        session.session_id,
        step,
        number=number,
        num_rounds=session.num_trained,
        sites=tuple(sorted(n for n, one in history.accounts.by_name.items() if one.num_counted)),
        by_site={
            name: site.evaluation
            for name, site in sorted(sites.items())
            if site.evaluation is not None
        },
        tallies=tallies,
        metric=metric,
        loss=loss,
    )


def _compared(session: Session) -> tuple[str, float | None]:
    """Metric and loss by which a search compares a training; None as its loss without one."""
    best, metric = session.evaluation.best, session.rules.evaluate_metric
    if best is None or (not metric and best.metric not in LOSSES):
        return metric, None
    value = best.latest_value if session.evaluation.winner is None else best.value
    return best.metric, value if best.is_minimised else -value


def why_not_compared(plan: Plan, one: Outcome) -> str:
    """Why an option leaves a search that has trained it; "" if it is compared with the others."""
    if plan.kind != "search" or not one.step.budget or one.why or one.loss is not None:
        return ""
    return f"not compared: its model has no {one.metric or ' or '.join(LOSSES)}"


# --- the sessions ---------------------------------------------------------------------------------

Steps = Generator[Step, Outcome, None]


def next_step(plan: Plan, study: str, outcomes: Sequence[Outcome]) -> Step | None:
    """The next step of a study after these outcomes, with which its plan is run again; None at the
    end. study: its name."""
    steps = _PLANS[plan.kind](plan)
    try:
        step = next(steps)
        for outcome in outcomes:
            step = steps.send(outcome)
    except StopIteration:
        return None
    return replace(step, study=study)


def _train(
    label: str,
    sites: tuple[str, ...],
    division: Division | None = None,
    position: tuple[int, int] = (0, 0),
) -> Step:
    """A step that trains. label, position: for people. sites: that take part; empty: all."""
    return Step("", "train", label, position, sites, division)


def _measure(trained: Outcome, sites: tuple[str, ...], division: Division | None) -> Step:
    """The step that measures a trained model at these sites."""
    of = trained.step
    return Step("", "measure", of.label, of.position, sites, division, trained.source)


def _folds(plan: Plan) -> Steps:
    """Train without each fold and measure on it; the sites are those of the first training."""
    sites: tuple[str, ...] = ()
    for fold in range(plan.folds):
        kept = Division(plan.folds, fold, plan.seed)
        trained = yield _train(f"fold {fold + 1}", sites, kept, (fold + 1, plan.folds))
        sites = sites or trained.sites
        if trained.source:
            yield _measure(trained, sites, replace(kept, measures=True))
    if plan.final:
        yield _train("all rows", sites)


def _leave_out(plan: Plan) -> Steps:
    """Train at all sites, then without each of them in succession, and measure there."""
    whole = yield _train(ALL_SITES, ())
    for number, site in enumerate(whole.sites, 1):
        others = tuple(one for one in whole.sites if one != site)
        trained = yield _train(f"without {site}", others, None, (number, len(whole.sites)))
        if trained.source:
            yield _measure(trained, (site,), Division(1, measures=True))


def _cross(plan: Plan) -> Steps:
    """Train at all sites and at each alone, without the first fold, on which each model is measured
    at all sites."""
    kept = Division(plan.folds, 0, plan.seed)
    whole = yield _train(ALL_SITES, (), kept)
    if whole.source:
        yield _measure(whole, whole.sites, replace(kept, measures=True))
    for number, site in enumerate(whole.sites, 1):
        trained = yield _train(f"{site} alone", (site,), kept, (number, len(whole.sites)))
        if trained.source:
            yield _measure(trained, whole.sites, replace(kept, measures=True))
    if plan.final:
        yield _train("all rows", whole.sites)


def _search(plan: Plan) -> Steps:
    """Train with each of the options, keep the better half and double the budget, until one is
    left; with it, train on all rows if asked for. Options whose model has no loss leave the
    search."""
    sites: tuple[str, ...] = ()
    left = list(range(len(plan.options)))
    budget, num_rungs = plan.budget, (len(left) - 1).bit_length()
    for rung in range(1, num_rungs + 1):
        loss: dict[int, float] = {}
        for number, option in enumerate(left, 1):
            step = _train(f"rung {rung}, option {number}", sites, None, (number, len(left)))
            trained = yield replace(step, options=plan.options[option], budget=budget)
            sites = sites or trained.sites
            if trained.loss is not None:
                loss[option] = trained.loss
        left = sorted(loss, key=lambda one: (loss[one], one))[: (len(left) + 1) // 2]
        budget *= 2
        if len(left) < 2:
            break
    if plan.final and left:
        yield replace(_train("the best options", sites), options=plan.options[left[0]])


def _model(plan: Plan) -> Steps:
    """Measure a model that there is."""
    division = Division(1, measures=True) if plan.all_rows else None
    yield Step("", "measure", plan.source, division=division, model=plan.source)


_PLANS = {
    "folds": _folds,
    "leave_out": _leave_out,
    "cross": _cross,
    "search": _search,
    "model": _model,
}


# --- the table ------------------------------------------------------------------------------------


def lines(plan: Plan, outcomes: Sequence[Outcome]) -> list[Line]:
    """Lines of a study's table so far: of each session, then those pooled over folds or sites."""
    found = [line for one in outcomes for line in _lines_of(plan, one)]
    if (units := _units(plan, outcomes)) and len(units) > 1:
        label = "all folds" if plan.kind == "folds" else "each site left out"
        found += _pooled(label, units)
    return found


def spreads(plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, Spread]:
    """Mean and standard deviation of each figure over folds, or over the sites that were left out;
    empty for other studies, and below two of them."""
    values: dict[str, list[float]] = {}
    for one in _units(plan, outcomes):
        if one.tallies is not None:
            for name, figure in figures(one.tallies).items():
                values.setdefault(name, []).append(figure.value)
    return {name: _spread(of) for name, of in values.items() if len(of) > 1}


def best_option(plan: Plan, outcomes: Sequence[Outcome]) -> int | None:
    """Number of the best options of a search that is over, from 0; None without one. The best ones
    of the last rung in which options were compared."""
    if plan.kind != "search" or next_step(plan, "", outcomes) is not None:
        return None
    compared = [one for one in outcomes if one.step.budget and one.loss is not None]
    if not compared:
        return None
    last = [one for one in compared if one.step.budget == compared[-1].step.budget]
    numbered = [(one.loss, plan.options.index(one.step.options)) for one in last]
    return min(numbered, key=lambda one: (one[0] or 0.0, one[1]))[1]


def option_name(plan: Plan, step: Step) -> str:
    """The settings of a step of a search as text, by the last parts of their keys."""
    options = step.options
    short = {key: key.rpartition(".")[2] for key in options}
    is_unique = len({*short.values()}) == len(short)
    return ", ".join(
        f"{short[key] if is_unique else key} = {value}" for key, value in options.items()
    )


def _units(plan: Plan, outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The sessions over which a mean is taken: of folds, or of sites that were left out."""
    if plan.kind not in ("folds", "leave_out"):
        return []
    return [one for one in outcomes if one.step.task == "measure"]


def _lines_of(plan: Plan, one: Outcome) -> Iterator[Line]:
    """Lines of one session: why it has no result, what a training has come to, or what was
    measured."""
    step = one.step
    model = option_name(plan, step) if plan.kind == "search" else step.label
    if one.why:
        yield Line(model, "", one.session_id, note=one.why)
        return
    if step.task == "train":
        if plan.kind == "search" or (plan.kind == "leave_out" and not step.sites):
            rounds = "1 round" if one.num_rounds == 1 else f"{one.num_rounds} rounds"
            rung = step.label.partition(",")[0]
            whole = "whole training" if plan.kind == "search" else "held-out rows"
            note = f"{rung if step.budget else whole}, {rounds}"
            if why := why_not_compared(plan, one):
                note = f"{note}; {why}"
            yield from _lines(model, one, note)
        return
    yield from _lines(model, one, "", is_calibrated=plan.kind == "leave_out")


def _lines(model: str, one: Outcome, note: str, *, is_calibrated: bool = False) -> Iterator[Line]:
    """Lines of a model: of all sites together, and of each. note: of the first. is_calibrated: with
    figures of calibration of each site."""
    whole = together([*one.by_site.values()])
    if one.tallies is not None:
        whole = together([Evaluation(one.tallies.num_rows, {}, one.tallies)])
    if whole is None:
        yield Line(model, "", one.session_id, note=note or "nothing was measured")
    elif len(one.by_site) != 1 or one.step.options:
        yield _line(model, "", one.session_id, whole, note)
    if one.step.options:
        return  # of a search
    for site, measured in one.by_site.items():
        if measured.withheld:
            yield Line(model, site, one.session_id, note="too few rows: they stay at the site")
        elif measured.num_samples:
            evaluation = together([measured]) if measured.tallies is not None else measured
            if evaluation is not None and is_calibrated:
                evaluation = _calibrated(evaluation, measured.tallies)
            yield _line(model, site, one.session_id, evaluation or measured, note)


def _line(model: str, site: str, session_id: str, measured: Evaluation, note: str = "") -> Line:
    """A line of one evaluation, figures and plain averages apart."""
    averages = {n: v for n, v in measured.metrics.items() if n not in measured.figures}
    if measured.figures:
        averages.pop("loss", None)  # log_loss or mse is the same
    return Line(model, site, session_id, measured.num_samples, measured.figures, averages, note)


def _pooled(model: str, units: Sequence[Outcome]) -> Iterator[Line]:
    """Lines over the rows of all units, of all sites together and of each."""
    of_sites: dict[str, list[Evaluation]] = {}
    for one in units:
        for site, measured in one.by_site.items():
            if measured.num_samples and measured.tallies is not None:
                of_sites.setdefault(site, []).append(measured)
    groups = {"": [e for of in of_sites.values() for e in of]}
    groups |= {site: of for site, of in sorted(of_sites.items()) if len(of) > 1}
    for site, measured_there in groups.items():
        if (whole := together(measured_there)) is not None:
            yield _line(model, site, "", _calibrated(whole, pooled(measured_there)))


def _calibrated(measured: Evaluation, tallies: Tallies | None) -> Evaluation:
    """An evaluation with the figures of calibration beside its own."""
    return replace(measured, figures={**measured.figures, **calibration_figures(tallies)})


def _spread(values: Sequence[float]) -> Spread:
    """Mean and spread of two or more values. std: of the sample, since folds are few."""
    mean = fsum(values) / len(values)
    variance = fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Spread(mean, sqrt(variance), len(values))
