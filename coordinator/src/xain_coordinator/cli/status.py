"""State of a session for people: the output of `xain-coordinator status`, and each frame of the
live view."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from statistics import median

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from xain_coordinator.cli import figures, gains, importance
from xain_coordinator.inspection.client import MAX_PARTICIPANTS, MAX_ROUNDS, Snapshot, clean
from xain_foundation.settings.hints import hint
from xain_foundation.wheels import pip_install
from xain_wire.fl import coordinator_pb2, inspection_pb2
from xain_workloads.tables.checks.describe import TableOne
from xain_workloads.tables.checks.findings import told

_MAX_NAMES = 6
MAX_FINDINGS = 20
TIMED_ROUNDS = 5  # from which the time to the end is estimated
MAX_LINES = 12  # of table one
CURVE_ROUNDS = 60  # rounds that curves are made of
CURVE_COLUMNS = 40
BAR_COLUMNS = 12  # so that the state fits 80 columns
MAX_METRICS = 4
LIVE_ROWS = 12
LIVE_PARAMETER_LINES = 6
LIVE_WARNINGS = 3

_BARS = "▁▂▃▄▅▆▇█"


def frame(
    snapshot: Snapshot, table_one: TableOne | None = None, *, is_live: bool = False
) -> RenderableType:
    """How a session stands, how its metrics have gone, who trains, and what is wrong.

    table_one: of the data of all sites, if it is known.
    is_live: the frame is one of many on a terminal; of some 30 lines at most, it has no tables of
        the data and of the rounds, and the first parameter_lines(). A reader of the other kind
        prints them below it, whole.
    """
    status, rounds = snapshot.status, snapshot.rounds.rounds
    parts: list[RenderableType] = [_headline(snapshot, is_live=is_live)]
    if (curves := _curves(rounds, status.metric)) is not None:
        parts.append(curves)
    if not is_live:
        parts += _data(status, table_one)
    if snapshot.participants.participants or status.sites:
        max_rows = LIVE_ROWS if is_live else MAX_PARTICIPANTS
        parts += _titled("Participants", participants(snapshot, max_rows, folds=not is_live))
    if not is_live:
        parts += _past(snapshot)
    if is_live:
        lines = parameter_lines(status)[:LIVE_PARAMETER_LINES]
        parts += [Text(line, overflow="ellipsis", no_wrap=True) for line in lines]
    return Group(*parts)


def _titled(title: str, *parts: RenderableType) -> list[RenderableType]:
    """Parts of a frame below a title."""
    return [Text(f"\n{title}", style="bold"), *parts]


def _data(
    status: inspection_pb2.GetStatusResponse, table_one: TableOne | None
) -> list[RenderableType]:
    """The part on the data: first lines of table one, and findings; empty without any."""
    parts: list[RenderableType] = []
    if table_one is not None:
        whole = Text("the whole table: xain-coordinator describe", style="dim")
        parts += [_together(table_one), whole]
    if status.findings:
        parts.append(findings(status))
    return _titled("Data", *parts) if parts else []


def _past(snapshot: Snapshot) -> list[RenderableType]:
    """The latest rounds, the latest model, and the counters."""
    parts: list[RenderableType] = []
    if snapshot.rounds.rounds:
        parts += _titled("Recent rounds", _rounds(snapshot.rounds.rounds, snapshot.status.metric))
        if (number := snapshot.rounds.total_size - MAX_ROUNDS) > 0:
            earlier = "1 earlier round" if number == 1 else f"{number:,} earlier rounds"
            parts.append(Text(f"and {earlier}; see the report, or status --json", style="dim"))
    if snapshot.models.models:
        parts.append(_model(snapshot.models.models[-1]))
    counters = {name: count for name, count in snapshot.status.counters.items() if count}
    if counters:
        told = ", ".join(f"{name} {count:,}" for name, count in sorted(counters.items()))
        parts += _titled("Counters", _text(told))
    return parts


def findings(status: inspection_pb2.GetStatusResponse) -> Table:
    """Table of what the checks of the data have found, the worst first."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("level", "site", "column", "finding"):
        table.add_column(heading, overflow="fold")
    styles = {"refuse": "bold red", "warn": "yellow"}
    for one in status.findings[:MAX_FINDINGS]:
        level = Text(clean(one.level), style=styles.get(one.level, "dim"))
        table.add_row(
            level,
            _text(one.participant_id or "all"),
            _text(one.column),
            _text(told(one.text, one.fix)),
        )
    if (more := len(status.findings) - MAX_FINDINGS) > 0:
        table.add_row("", "", "", Text(f"and {more} more; see status --json", style="dim"))
    return table


def _together(table_one: TableOne) -> Table:
    """The first lines of table one, of all sites together."""
    lines = [(line[0], line[1], line[-1]) for line in table_one.cells()[1:]]
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for _ in lines[0]:
        table.add_column(overflow="fold")
    for line in lines[:MAX_LINES]:
        table.add_row(*map(_text, line))
    return table


def parameter_lines(status: inspection_pb2.GetStatusResponse) -> list[str]:
    """The state of the parameter server in the coordinator's process, as `xain-parameter-server
    status` shows it; nothing without one."""
    if not status.parameters:
        return []
    try:
        from xain_parameters.scheduler import reports
    except ModuleNotFoundError:
        how = pip_install("xain-coordinator", "parameters")
        return [f"parameters: {how} to see them, or " + hint("xain-coordinator", "--json")]
    return list(map(clean, reports.lines_of(reports.from_json(status.parameters))))


def _headline(snapshot: Snapshot, *, is_live: bool) -> Table:
    """Table of what is most important: state, what is awaited, warnings, how good the models
    are."""
    status, rounds = snapshot.status, snapshot.rounds.rounds
    is_over = status.state == coordinator_pb2.FINISHED or status.phase == "finished"
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(no_wrap=is_live, overflow="ellipsis" if is_live else "fold", ratio=1)
    grid.add_row("state", _state(status, is_over=is_over))
    if status.study:
        grid.add_row("study", _text(status.study))
    if status.plan:
        grid.add_row("training", _text(status.plan))
    if (to_go := time_left(snapshot)) is not None:
        grid.add_row("time left", f"{'at most ' if status.plan else ''}{duration(to_go)}")
    if status.waiting_for and not is_over:
        grid.add_row("waiting for", _text(status.waiting_for))
    for warning in status.warnings[-LIVE_WARNINGS:] if is_live else status.warnings:
        # Whole: its end says what to do.
        text = Text(clean(warning), style="bold yellow", no_wrap=False, overflow="fold")
        grid.add_row("warning", text)
    here = f"{status.num_connected} still connected" if is_over else connected(status)
    grid.add_row("participants", here)
    if status.num_selected:
        awaited = "evaluations" if status.phase == "evaluating" else "updates"
        grid.add_row(awaited, f"{status.num_updates} of {status.num_selected} in")
    _add_figures(grid, status, rounds)
    if status.HasField("deadline_seconds"):
        grid.add_row("deadline", f"in {duration(max(status.deadline_seconds, 0.0))}")
    if status.HasField("ends_seconds"):
        left = duration(max(status.ends_seconds, 0.0))
        grid.add_row("ends", f"in {left}, if nothing changes")
    if not is_live:
        _add_origin(grid, status)
    about = f"{clean(status.session_id)}, {duration(status.session_seconds)}"
    if status.version:
        about += f", version {clean(status.version)}"
    grid.add_row("session", Text(about))
    return grid


def _state(status: inspection_pb2.GetStatusResponse, *, is_over: bool) -> Table:
    """Line with the session's state, and a bar of the rounds that are over."""
    state = clean(status.phase) or coordinator_pb2.State.Name(status.state).lower()
    styles = dict.fromkeys(("collecting", "aggregating", "evaluating"), "bold green")
    line = Text(state, style="bold" if is_over else styles.get(state, "bold yellow"))
    told = f"{progress(status)} done"
    if is_over:
        because = f": {clean(status.ended_because)}" if status.ended_because else ""
        told = f"{clean(status.cause)}{because}; {told}"
    elif state == "evaluating":
        told = "the last model"
    else:  # rounds are counted from 0, in keys and logs too
        told = f"round {status.round}, {told}"
    line.append(f"  {told}", style="default")
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(max(status.num_rounds, 1), status.num_trained, width=BAR_COLUMNS)
    row.add_row(line, bar)
    return row


def _add_figures(
    grid: Table,
    status: inspection_pb2.GetStatusResponse,
    rounds: Sequence[inspection_pb2.RoundStatus],
) -> None:
    """Add lines on how good the models are: latest and best model, threshold, gain, central model,
    importance and trend."""
    if (measured := figures.latest(rounds)) is not None:
        grid.add_row(f"model {measured[0]}", _text(figures.sentence(measured[1])))
    if status.HasField("best_round"):
        best = f"{status.best_round}, {clean(status.metric)} {status.best_value:.4g}"
        grid.add_row("best model", Text(best))
    if (threshold := figures.threshold_of(status)) is not None:
        grid.add_row("threshold", _text(figures.threshold_text(threshold)))
    if (found := gains.gains(status, rounds)) is not None and (told := gains.sentence(found)):
        grid.add_row("gain", _text(told))
    if found is not None and (told := gains.central_sentence(found)):
        grid.add_row("central", _text(told))
    if status.HasField("importance"):
        grid.add_row("importance", _text(importance.sentence(status.importance)))
    if status.trend:
        grid.add_row("more passes", _text(status.trend))


def _add_origin(grid: Table, status: inspection_pb2.GetStatusResponse) -> None:
    """Add lines on the model begun with, health socket, open sockets and audit log."""
    if status.began_with:
        before = f", {status.rounds_before} rounds before" if status.rounds_before else ""
        grid.add_row("began with", _text(f"{status.began_with}{before}"))
    if status.health_socket:
        grid.add_row("health checks", _text(status.health_socket))
    if status.in_the_clear:
        grid.add_row("in the clear", _text(", ".join(status.in_the_clear)))
    if status.audit_hash:
        hashed = f"{status.audit_lines:,} lines, the last with the hash {status.audit_hash}"
        grid.add_row("audit log", _text(hashed))


def _curves(rounds: Iterable[inspection_pb2.RoundStatus], first: str) -> RenderableType | None:
    """A line for each metric: evaluated by the coordinator, else by sites, else in training."""
    series: dict[str, list[float]] = {}
    for one in rounds:
        measured: Mapping[str, float] = {
            **one.metrics,
            **one.evaluation.metrics,
            **one.coordinator_evaluation.metrics,
        }
        for name, value in measured.items():
            if name not in ("samples", "seconds"):
                series.setdefault(name, []).append(value)
    if not series:
        return None
    names = sorted(series, key=lambda name: (name != first, list(series).index(name)))
    table = Table.grid(padding=(0, 2))
    for name in names[:MAX_METRICS]:
        values = series[name]
        table.add_row(Text(clean(name)), Text(f"{values[-1]:.4g}"), Text(sparkline(values)))
    return table


def sparkline(values: Iterable[float], columns: int = CURVE_COLUMNS) -> str:
    """The latest values as a row of bars, from the lowest of them to the highest."""
    shown = [value for value in values if isfinite(value)][-columns:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high == low:
        return _BARS[3] * len(shown)
    return "".join(_BARS[round((v - low) / (high - low) * (len(_BARS) - 1))] for v in shown)


def connected(status: inspection_pb2.GetStatusResponse) -> str:
    """Numbers of participants that are connected, and that wait for a free slot of the session."""
    told = f"{status.num_connected} connected, {status.num_required} required"
    if status.num_waiting:
        limit = f"rounds.max_participants is {status.max_participants}"
        told += f", {status.num_waiting} not let in ({limit})"
    return told


def progress(status: inspection_pb2.GetStatusResponse) -> str:
    """Rounds of training that are over, as in "3 of 7 rounds"; before the first, passes."""
    if status.num_passes and not status.plan:
        return f"0 of {status.num_passes} passes"
    return f"{status.num_trained} of {status.num_rounds} rounds"


def time_left(snapshot: Snapshot) -> float | None:
    """Estimated seconds to the end of the training, from the latest rounds; None if unknown."""
    status, rounds = snapshot.status, snapshot.rounds.rounds
    latest = [
        one.seconds
        for one in rounds
        if one.phase == "published" and one.task == coordinator_pb2.TRAIN
    ]
    if status.state == coordinator_pb2.FINISHED or not latest:
        return None
    return (status.num_rounds - status.num_trained) * median(latest[-TIMED_ROUNDS:])


def participants(snapshot: Snapshot, max_rows: int, *, folds: bool) -> Table:
    """Table of the participants, and then of those that are away. folds: whether long texts are
    folded, instead of being cut."""
    there, gone = snapshot.participants.participants, absent(snapshot)
    known = accounts(snapshot)
    has_tags = any(one.tags for one in there)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("site", "now", "samples", "rounds", "last problem", *["tags"][:has_tags]):
        table.add_column(
            heading,
            justify="right" if heading in ("samples", "rounds") else "left",
            no_wrap=not folds or heading not in ("last problem", "tags"),
            overflow="fold" if folds else "ellipsis",
        )
    for one in there[:max_rows]:
        account = known.get(one.participant_id)
        table.add_row(
            _text(one.participant_id),
            _now(one),
            f"{one.profile.num_samples:,}" if one.HasField("profile") else "",
            counted(one, account),
            Text(clean(problem(one, account)), style="yellow"),
            *[_text(", ".join(f"{key}={one.tags[key]}" for key in sorted(one.tags)))][:has_tags],
        )
    for away in gone[: max(0, max_rows - len(there))]:
        now, why = Text(clean(away.away), style="yellow"), clean(problem(away, away))
        table.add_row(
            _text(away.participant_id), now, "", counted(away, away), Text(why, style="yellow")
        )
    more = max(len(there), snapshot.status.num_connected) - min(len(there), max_rows)
    if more > 0:
        table.add_row(Text(f"and {more} more; status --json shows all", style="dim"))
    return table


def _now(one: inspection_pb2.ParticipantStatus) -> Text:
    """State of a participant in the present round."""
    # Only after the end of a session the list has participants that are gone.
    if one.reported_state == coordinator_pb2.FINISHED:
        return Text("gone", style="dim")
    if one.update_accepted:
        return Text("handed in", style="green")
    if moving := transfer(one):
        return Text(moving, style="cyan")
    if one.reported_state == coordinator_pb2.TRAINING:
        return Text("trains", style="cyan")
    if one.selected:
        return Text("selected")
    if one.not_eligible_because:
        return Text(clean(one.not_eligible_because.partition(":")[0]), style="dim")
    return Text("waits", style="dim")


def accounts(snapshot: Snapshot) -> dict[str, inspection_pb2.SiteAccount]:
    """Accounts of the participants that were selected at least once, by name; of many a part."""
    return {one.participant_id: one for one in snapshot.status.sites}


def counted(
    one: inspection_pb2.ParticipantStatus | inspection_pb2.SiteAccount,
    account: inspection_pb2.SiteAccount | None,
) -> str:
    """Rounds that a participant counted in, of those that it was selected for."""
    if account is None:
        return str(one.rounds_contributed)
    return f"{one.rounds_contributed} of {account.rounds_selected}"


def problem(
    one: inspection_pb2.ParticipantStatus | inspection_pb2.SiteAccount,
    account: inspection_pb2.SiteAccount | None,
) -> str:
    """The latest problem of a participant; empty if it has had none."""
    if isinstance(one, inspection_pb2.ParticipantStatus) and one.conflict:
        return one.conflict
    if account is not None and account.rounds_missed:
        rounds = "1 round" if account.rounds_missed == 1 else f"{account.rounds_missed} rounds"
        return f"not counted for {rounds}: {account.last_reason or 'no reason is known'}"
    return one.last_failure


def absent(snapshot: Snapshot) -> list[inspection_pb2.SiteAccount]:
    """Participants that were selected at least once and are not connected."""
    return [one for one in snapshot.status.sites if one.away]


def transfer(one: inspection_pb2.ParticipantStatus) -> str:
    """Progress of a participant's transfer; empty if none is under way."""
    if not one.HasField("transfer"):
        return ""
    is_upload = one.transfer.direction == coordinator_pb2.Transfer.UPLOAD
    return f"{'uploading' if is_upload else 'downloading'} {one.transfer.percent} %"


def _rounds(rounds: Iterable[inspection_pb2.RoundStatus], metric: str) -> Table:
    """Table of the latest rounds. metric: the one that models are compared by; empty if there is
    none yet."""
    shown_rounds = list(rounds)[-MAX_ROUNDS:]
    by_sites = any(metric in one.evaluation.metrics for one in shown_rounds)
    by_us = any(metric in one.coordinator_evaluation.metrics for one in shown_rounds)
    heading = figures.label(metric, (one.evaluation for one in shown_rounds))
    measured = [heading] * by_sites + [f"{clean(metric)} here"] * by_us
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("round", "state", "updates", "samples", "time", *measured, "problems"):
        is_text = heading in ("state", "problems")
        # Problems are long and may be folded; other columns are not cut for them.
        table.add_column(
            heading,
            header_style="dim",
            justify="left" if is_text else "right",
            no_wrap=heading != "problems",
        )
    for one in shown_rounds:
        table.add_row(
            str(one.round),
            _text(one.phase),
            f"{one.num_contributors}/{one.num_selected}",
            f"{one.num_samples:,}",
            duration(one.seconds),
            *([_metric(one.evaluation, metric)] if by_sites else []),
            *([_metric(one.coordinator_evaluation, metric)] if by_us else []),
            Text(_problems(one)),
        )
    return table


def _problems(one: inspection_pb2.RoundStatus) -> str:
    """Reasons why selected participants did not count: by name, or numbers if they are many."""
    why = [f"{clean(p)}: {clean(reason)}" for p, reason in sorted(one.missing.items())]
    why += [
        f"{clean(p)}, damaged: {clean(reason)}" for p, reason in sorted(one.damaged_updates.items())
    ]
    if not one.missing:
        why += [f"{number} {clean(kind)}" for kind, number in sorted(one.num_missing.items())]
    more = f"; and {len(why) - _MAX_NAMES} more" if len(why) > _MAX_NAMES else ""
    return f"{'; '.join(why[:_MAX_NAMES])}{more}"


def _metric(evaluation: coordinator_pb2.Evaluation, metric: str) -> str:
    """A metric as text; empty if it was not measured."""
    return f"{evaluation.metrics[metric]:.4g}" if metric in evaluation.metrics else ""


def _model(one: inspection_pb2.ModelStatus) -> Text:
    """Line about a model: key, dtype, shape and size."""
    shape = " × ".join(map(str, one.shape))
    about = f"{one.ref.key}, {one.dtype} {shape}, {one.ref.size_bytes:,} bytes"
    return Text.assemble(("\nLatest model  ", "bold"), clean(about))


def _text(text: str) -> Text:
    """Text without control characters, whose brackets are not taken for rich's markup."""
    # Text, so that a name with brackets is not taken for rich's markup.
    return Text(clean(text))


def duration(seconds: float) -> str:
    """Seconds as text in two units, such as "3 min 20 s"."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
