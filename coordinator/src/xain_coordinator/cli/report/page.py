"""A session as one HTML page without scripts, and without fonts or images of another host.

It shows the content of `xain-coordinator status --json` and of `xain-coordinator describe`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files

from xain_coordinator.cli import figures
from xain_coordinator.cli import status as status_view
from xain_coordinator.cli.report import about, study
from xain_coordinator.cli.report.charts import Line, chart, number, table, timeline
from xain_coordinator.cli.report.effects import effects
from xain_coordinator.cli.report.gained import gained
from xain_coordinator.cli.report.important import important
from xain_coordinator.cli.report.measured import measured, site_cells
from xain_coordinator.cli.report.method import method
from xain_coordinator.cli.status import duration
from xain_coordinator.export.studies import Table
from xain_coordinator.inspection.client import Snapshot
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.coordinator_pb2 import Evaluation
from xain_wire.fl.inspection_pb2 import GetStatusResponse, RoundStatus
from xain_workloads.linear.glm.coefficients import Coefficients
from xain_workloads.tables.checks.describe import TableOne

MAX_ROUNDS = 60  # of the roster and the timeline; the latest are shown
MAX_ROWS = 200  # of a table

# Metrics of training that say nothing about learning.
UNCHARTED = frozenset(("samples", "seconds"))


def page(
    snapshot: Snapshot,
    described: TableOne | None = None,
    now: datetime | None = None,
    study_table: Table | None = None,
    coefficients: Coefficients | None = None,
) -> str:
    """The HTML page of a session. described: its data. now: when the page is written. study_table:
    of the study that it is a part of. coefficients: of its last model, if that has some."""
    status = snapshot.status
    rounds = list(snapshot.rounds.rounds)
    metadata = about.metadata_of(snapshot)
    target, model = about.target_of(snapshot, described), metadata.get("workload", "")
    title = f"{target}, predicted by {model}" if target and model else ""
    title = title or f"Session {status.session_id}"
    style = files("xain_coordinator.cli.report").joinpath("style.css").read_text(encoding="utf-8")
    sections = [
        _outcome(status, rounds, study.first_line(study_table)),
        _head(status, rounds),
        study.section(study_table),
        about.about(snapshot, described, now),
        method(snapshot, rounds, described),
        about.findings(status),
        effects(coefficients, status.num_trained),
        measured(status, rounds, about.classes_of(metadata)),
        important(status),
        gained(status, rounds),
        _sites(snapshot, rounds),
        _left_out(snapshot, rounds),
        _curves(status, rounds),
        _roster(rounds),
        _reasons(rounds),
        _timeline(rounds),
        about.table_one(described),  # last, since it may be long
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"<h1>{escape(title)}</h1>{''.join(sections)}</body></html>\n"
    )


def _outcome(status: GetStatusResponse, rounds: Sequence[RoundStatus], of_study: str) -> str:
    """The first line: the figures of the study, or whether there is a model that is better than the
    baseline."""
    if of_study:
        return f'<p class="verdict"><b>{escape(of_study)}</b></p>'
    has_best = status.HasField("best_round")
    if status.no_better:
        so_far = "" if status.state == pb.FINISHED else " so far"
        what = "got worse" if has_best else "has learned nothing of use"
        text = f"This training {what}{so_far}: {status.no_better}"
        return f'<p class="warning verdict"><b>{escape(text)}</b></p>'
    if not has_best:
        return ""
    known = {one.round: one for one in rounds}.get(status.best_round, RoundStatus())
    both = (known.coordinator_evaluation, known.evaluation)
    evaluation = next((one for one in both if status.metric in one.metrics), both[1])
    figure = evaluation.figures.get(status.metric)
    metric = figures.label(status.metric, [evaluation])
    told = number(status.best_value) if figure is None else figures.sentence(evaluation)
    kind = "rows of the coordinator" if evaluation is both[0] else "held-out rows"
    rows = f" on {evaluation.num_samples:,} {kind}" if evaluation.num_samples else ""
    text = f"Model {status.best_round} is the best by {metric}: {told}{rows}."
    return f'<p class="verdict"><b>{escape(text)}</b></p>'


def _head(status: GetStatusResponse, rounds: Sequence[RoundStatus]) -> str:
    """State, numbers and warnings of the session as HTML."""
    is_over = status.state == pb.FINISHED
    because = f": {status.ended_because}" if status.ended_because else ""
    state = f"{status.cause}{because}" if is_over else f"Waiting for: {status.waiting_for}"
    counted = {name for one in rounds for name in one.contributors}
    counted |= {one.participant_id for one in status.sites if one.rounds_contributed}
    took_part = f"{len(counted)} took part"
    facts = [
        ("state", status.phase),
        ("rounds", f"{status.num_trained} of {status.num_rounds}"),
        ("participants", took_part if is_over else status_view.connected(status)),
        ("time", duration(status.session_seconds)),
    ]
    if status.HasField("best_round"):
        value = f", {status.metric} {number(status.best_value)}" if status.metric else ""
        facts.append(("best model", f"{status.best_round}{value}"))
    listed = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts
    )
    told = [one for one in status.warnings if one != status.no_better]
    warnings = "".join(f'<p class="warning">{escape(one)}</p>' for one in told)
    lost = rounds[0].round if rounds else 0
    cut = f'<p class="soft">Rounds before {lost} are no longer kept.</p>' if lost else ""
    return f'<p class="soft">{escape(state)}</p><dl>{listed}</dl>{warnings}{cut}'


def _curves(status: GetStatusResponse, rounds: Sequence[RoundStatus]) -> str:
    """The section of learning curves: the metrics that matter most, and others folded."""
    evaluated = dict.fromkeys(
        name for one in rounds for evaluation in _both(one) for name in evaluation.metrics
    )
    trained = dict.fromkeys(name for one in rounds for name in one.metrics if name not in UNCHARTED)
    if not evaluated and not trained:
        return (
            "<h2>Learning</h2><p>Nothing was measured. Participants measure models on rows that "
            "they hold out, [data] test_fraction of them, if these are enough.</p>"
        )
    if status.metric in evaluated:  # the metric that models are compared by comes first
        evaluated = {status.metric: None, **evaluated}
    best = status.best_round if status.HasField("best_round") else None
    derived = {name for one in rounds for of in _both(one) for name in of.figures}
    first: list[str] = []
    more: list[str] = []
    for name in evaluated:
        is_first = name == status.metric or name in figures.SHOWN or name not in derived
        (first if is_first else more).append(_curve(name, rounds, best))
    first += [_curve(name, rounds, None) for name in trained if name not in evaluated]
    others = "".join(more) and (
        f"<details><summary>{len(more)} more</summary>"
        f'<div class="charts">{"".join(more)}</div></details>'
    )
    return f'<h2>Learning</h2><div class="charts">{"".join(first)}</div>{others}'


def _both(one: RoundStatus) -> tuple[Evaluation, Evaluation]:
    """Evaluations of a round's model: at the sites, and by the coordinator."""
    return one.evaluation, one.coordinator_evaluation


def _curve(name: str, rounds: Sequence[RoundStatus], best: int | None) -> str:
    """Chart of a metric over the models: at sites, by the coordinator, in training, and the
    baseline. best: number of the best model."""
    sites = _values(name, ((one.round, one.evaluation.metrics) for one in rounds))
    band = [
        (one.round, one.spread[name].min, one.spread[name].max)
        for one in rounds
        if name in one.spread
    ]
    own = _values(name, ((one.round, one.coordinator_evaluation.metrics) for one in rounds))
    # A round trains the next model.
    training = _values(name, ((one.round + 1, one.metrics) for one in rounds))
    averages = any(name in one.evaluation.averages for one in rounds)
    where = "held-out rows of the participants"
    # The best constant prediction on the same rows.
    constant = [
        (one.round, of.figures[name].baseline)
        for one in rounds
        for of in [one.coordinator_evaluation if own else one.evaluation]
        if name in of.figures and of.figures[name].HasField("baseline")
    ]
    lines = [
        Line(f"average over {where}" if averages else where, "sites", sites, band),
        Line("rows of the coordinator", "own", own),
        Line("training, average over participants", "training", training),
        Line("always the commonest class, or the mean", "baseline", constant),
    ]
    return chart(name, [line for line in lines if line.points], mark=best)


def _values(
    name: str, known: Iterable[tuple[int, Mapping[str, float]]]
) -> list[tuple[float, float]]:
    """Points of a metric where it is known."""
    return [(number_, metrics[name]) for number_, metrics in known if name in metrics]


def _sites(snapshot: Snapshot, rounds: Sequence[RoundStatus]) -> str:
    """A row for each site: its rows, in how many rounds it counted, and its figures."""
    training = [one for one in rounds if one.task == pb.TRAIN]
    counted = Counter(name for one in training for name in one.contributors)
    sites = [site for one in rounds for site in one.sites]
    samples = {site.participant_id: site.num_samples for site in sites if site.num_samples}
    shown = _evaluated_round(snapshot.status, rounds)
    latest = {
        site.participant_id: site.evaluation for site in shown.sites if site.HasField("evaluation")
    }
    members = {one.participant_id: one for one in snapshot.participants.participants}
    known = status_view.accounts(snapshot)
    missing = (name for one in rounds for name in one.missing)
    names = sorted({*members, *counted, *known, *samples, *latest, *missing})
    if not names:
        return ""
    head, cells = site_cells(latest, names)
    rows = []
    for name in names[:MAX_ROWS]:
        member, account = members.get(name), known.get(name)
        evaluation = latest.get(name, Evaluation())
        held_out = f"{evaluation.num_samples:,}" if evaluation.num_samples else ""
        why = status_view.problem(account, account) if account else ""
        if member is not None:
            why = status_view.problem(member, account) or member.not_eligible_because
        rows.append(
            [
                escape(name),
                status_view.counted(account, account) if account else str(counted[name]),
                f"{samples[name]:,}" if name in samples else "",
                "too few" if evaluation.withheld else held_out,
                *cells[name],
                escape(why),
            ]
        )
    told = f'<p class="soft">The figures are those of model {shown.round}, with 95 % intervals.'
    told += " ▼ is worse than the baseline on the rows of that site.</p>"
    columns = ["site", "rounds counted", "rows trained on", "rows held out", *head, "last problem"]
    shown_rows = table(columns, rows, texts=(len(columns) - 1,))
    return f"<h2>Sites</h2>{told if head else ''}{shown_rows}{_more(len(names), MAX_ROWS)}"


def _evaluated_round(status: GetStatusResponse, rounds: Sequence[RoundStatus]) -> RoundStatus:
    """The round of the model that is shown, or the latest with evaluations of sites."""
    with_sites = [one for one in rounds if any(site.HasField("evaluation") for site in one.sites)]
    if status.HasField("measured"):
        for one in with_sites:
            if one.round == status.measured_round:
                return one
    return with_sites[-1] if with_sites else RoundStatus()


def _left_out(snapshot: Snapshot, rounds: Sequence[RoundStatus]) -> str:
    """Sites whose rows are in no model, or in no figure, and why; empty if there are none."""
    status = snapshot.status
    found = [(name, "not let in", why) for name, why in sorted(status.not_admitted.items())]
    found += [
        (one.participant_id, "in no model", one.last_failure or one.last_reason)
        for one in status.sites
        if one.rounds_selected and not one.rounds_contributed
    ]
    shown = _evaluated_round(status, rounds)
    found += [
        (site.participant_id, "in no figure", "too few held-out rows: they stay at the site")
        for site in shown.sites
        if site.evaluation.withheld
    ]
    measured_at = {site.participant_id for site in shown.sites if site.HasField("evaluation")}
    trained = {name for one in rounds if one.task == pb.TRAIN for name in one.contributors}
    if measured_at:
        why = (
            "nothing of it is known for this model: it holds out too few rows, or none, or was away"
        )
        found += [(name, "in no figure", why) for name in sorted(trained - measured_at)]
    if not found:
        return ""
    rows = [[escape(cell) for cell in one] for one in found[:MAX_ROWS]]
    head = ("site", "is", "because")
    return (
        f"<h2>Who was left out</h2>{table(head, rows, texts=(1, 2))}{_more(len(found), MAX_ROWS)}"
    )


def _roster(rounds: Sequence[RoundStatus]) -> str:
    """Table of who counted in which round; empty without names."""
    rosters = [one for one in rounds if one.selected or one.contributors or one.missing]
    # Initial weights are no contribution. A failure to make them is among the reasons.
    shown = [one for one in rosters if one.task != pb.INITIALISE][-MAX_ROUNDS:]
    names = sorted({n for one in shown for n in (*one.selected, *one.contributors, *one.missing)})
    if not names:
        return ""
    head = "".join(
        "<th>eval</th>" if one.task == pb.EVALUATE else f"<th>{one.round}</th>" for one in shown
    )
    rows = [
        f'<tr><th scope="row">{escape(name)}</th>{"".join(_cell(one, name) for one in shown)}</tr>'
        for name in names[:MAX_ROWS]
    ]
    return (
        '<h2>Who counted</h2><p class="soft"><span class="yes">●</span> counted, '
        '<span class="no">×</span> selected and did not count, blank: not selected</p>'
        f'<div class="wide"><table class="roster"><thead><tr><th>round</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{_more(len(names), MAX_ROWS)}"
        f"{_latest(len(shown), sum(one.task != pb.INITIALISE for one in rounds))}"
    )


def _cell(one: RoundStatus, name: str) -> str:
    """Cell of a participant in a round: counted, not counted and why, or not selected."""
    if name in one.contributors:
        return f'<td class="yes" title="round {one.round}: counted">●</td>'
    if name not in one.missing and name not in one.selected:
        return "<td></td>"
    # A round is in standby while it is paused.
    is_open = one.phase in ("collecting", "aggregating", "evaluating", "standby")
    why = one.missing.get(name, "trains" if is_open else "did not hand in")
    style, mark = ("soft", "…") if is_open and name not in one.missing else ("no", "×")
    tip = escape(f"round {one.round}: {why}")
    return f'<td class="{style}" title="{tip}">{mark}</td>'


def _reasons(rounds: Sequence[RoundStatus]) -> str:
    """Reasons why participants did not count, each with its rounds, the latest reason first."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for one in rounds:
        for reason in sorted({**one.damaged_updates, **one.missing}.items()):
            numbers.setdefault(reason, []).append(one.round)
    if not numbers:
        return ""
    found = sorted(numbers.items(), key=lambda one: (-one[1][-1], one[0]))
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="reason">{escape(why)}</td>'
        f'<td class="num">{len(in_rounds)}</td><td class="reason">{_ranges(in_rounds)}</td></tr>'
        for (name, why), in_rounds in found[:MAX_ROWS]
    )
    return (
        '<h2>Why not</h2><div class="wide"><table><thead><tr><th>site</th><th>reason</th>'
        '<th class="num">times</th><th>in rounds</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
        f"{_more(len(found), MAX_ROWS)}{_unnamed(rounds)}"
    )


def _unnamed(rounds: Sequence[RoundStatus]) -> str:
    """The sentence about rounds whose record has numbers only; empty if there are none."""
    number_ = sum(bool(one.num_missing) and not one.missing for one in rounds)
    return (
        f'<p class="soft">of {number_:,} more rounds only numbers are kept</p>' if number_ else ""
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text, with runs as ranges: 0, 2 to 5, 9."""
    ranges: list[list[int]] = []
    for number_ in numbers:
        if ranges and number_ == ranges[-1][1] + 1:
            ranges[-1][1] = number_
        else:
            ranges.append([number_, number_])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in ranges)


def _timeline(rounds: Sequence[RoundStatus]) -> str:
    """The section with a bar for each of the latest rounds."""
    shown = rounds[-MAX_ROUNDS:]
    if not shown:
        return ""
    spans = [
        (
            f"{one.round} {pb.Task.Name(one.task).lower()}" if one.task else str(one.round),
            one.opened_seconds,
            one.opened_seconds + one.seconds,
            f"{duration(one.seconds)}, {one.num_contributors} of {one.num_selected}",
        )
        for one in shown
    ]
    began, ended = duration(spans[0][1]), duration(max(end for _, _, end, _ in spans))
    told = f"From {began} to {ended} after the session was opened, a bar for each round"
    return (
        f'<h2>Timeline</h2><p class="soft">{told}</p>{timeline(spans)}'
        f"{_latest(len(shown), len(rounds))}"
    )


def _latest(shown: int, number_: int) -> str:
    """The sentence under a part that shows the latest rounds only; empty if these are all."""
    if shown >= number_:
        return ""
    return f'<p class="soft">the latest {shown} of {number_:,} rounds</p>'


def _more(number_: int, shown: int) -> str:
    """Sentence on how many rows are not shown; empty if all are."""
    return f'<p class="soft">and {number_ - shown} more</p>' if number_ > shown else ""
