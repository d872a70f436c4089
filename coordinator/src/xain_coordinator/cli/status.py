"""Output of `xain-coordinator status` for people: the snapshot as tables."""

from collections.abc import Iterable
from statistics import median

from rich.console import Console
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


def render(snapshot: Snapshot, console: Console, table_one: TableOne | None = None) -> None:
    """Tables of a status: the state, the data, the participants, then the rounds."""
    console.print(_headline(snapshot))
    if table_one is not None or snapshot.status.findings:
        console.print(Text("\nData", style="bold"))
    if table_one is not None:
        console.print(_together(table_one))
        console.print(Text("the whole table: xain-coordinator describe", style="dim"))
    if snapshot.status.findings:
        console.print(findings(snapshot.status))
    if snapshot.participants.participants or snapshot.status.sites:
        console.print(Text("\nParticipants", style="bold"))
        console.print(participants(snapshot, MAX_PARTICIPANTS, folds=True))
    if snapshot.rounds.rounds:
        console.print(_rounds(snapshot.rounds.rounds, snapshot.status.metric))
        if (number := snapshot.rounds.total_size - MAX_ROUNDS) > 0:
            earlier = "1 earlier round" if number == 1 else f"{number:,} earlier rounds"
            console.print(Text(f"and {earlier}; see the report, or status --json", style="dim"))
    if snapshot.models.models:
        console.print(_model(snapshot.models.models[-1]))
    counters = {name: count for name, count in snapshot.status.counters.items() if count}
    if counters:
        told = ", ".join(f"{name} {count:,}" for name, count in sorted(counters.items()))
        console.print(Text("\nCounters", style="bold"), _text(told))
    for line in parameter_lines(snapshot.status):
        console.print(_text(line), soft_wrap=True)


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
    return reports.lines_of(reports.from_json(status.parameters))


def _headline(snapshot: Snapshot) -> Table:
    status, rounds = snapshot.status, snapshot.rounds.rounds
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()

    state = clean(status.phase) or coordinator_pb2.State.Name(status.state).lower()
    styles = dict.fromkeys(("collecting", "aggregating", "evaluating"), "bold green")
    styles["finished"] = "bold"
    line = Text(state, style=styles.get(state, "bold yellow"))
    if state == "finished":
        because = f": {clean(status.ended_because)}" if status.ended_because else ""
        line.append(f"  {clean(status.cause)}{because}", style="default")
    elif state == "evaluating":
        line.append("  the last model", style="default")
    else:
        # Rounds are counted from 0, in keys and logs too.
        line.append(f"  round {status.round}, {progress(status)} done", style="default")
    grid.add_row("state", line)
    if status.study:
        grid.add_row("study", _text(status.study))
    if status.plan:
        to_go = time_left(snapshot)
        most = "" if to_go is None else f"; at most {duration(to_go)} left"
        grid.add_row("training", _text(f"{status.plan}{most}"))
    if status.waiting_for and state != "finished":
        grid.add_row("waiting for", _text(status.waiting_for))
    for warning in status.warnings:
        grid.add_row("warning", Text(clean(warning), style="bold yellow"))
    is_over = state == "finished"
    here = f"{status.num_connected} still connected" if is_over else connected(status)
    grid.add_row("participants", here)
    if status.num_selected:
        awaited = "evaluations" if state == "evaluating" else "updates"
        grid.add_row(awaited, f"{status.num_updates} of {status.num_selected} in")
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
    if status.HasField("deadline_seconds"):
        grid.add_row("deadline", f"in {duration(max(status.deadline_seconds, 0.0))}")
    if status.HasField("ends_seconds"):
        left = duration(max(status.ends_seconds, 0.0))
        grid.add_row("ends", f"in {left}, if nothing changes")
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
    about = f"{clean(status.session_id)}, {duration(status.session_seconds)}"
    if status.version:
        about += f", version {clean(status.version)}"
    grid.add_row("session", Text(about))
    return grid


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
    """Table of the participants, and then of those that are away.

    folds: whether long texts are folded, instead of being cut.
    """
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
    """metric: the one that models are compared by; empty if there is none yet."""
    shown_rounds = list(rounds)[-MAX_ROUNDS:]
    by_sites = any(metric in one.evaluation.metrics for one in shown_rounds)
    by_us = any(metric in one.coordinator_evaluation.metrics for one in shown_rounds)
    heading = figures.label(metric, (one.evaluation for one in shown_rounds))
    measured = [heading] * by_sites + [f"{clean(metric)} here"] * by_us
    table = Table(title="\nRecent rounds", title_justify="left", title_style="bold", box=None)
    table.padding = (0, 2, 0, 0)
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
    return f"{evaluation.metrics[metric]:.4g}" if metric in evaluation.metrics else ""


def _model(one: inspection_pb2.ModelStatus) -> Text:
    shape = " × ".join(map(str, one.shape))
    about = f"{one.ref.key}, {one.dtype} {shape}, {one.ref.size_bytes:,} bytes"
    return Text.assemble(("\nLatest model  ", "bold"), clean(about))


def _text(text: str) -> Text:
    # Text, so that a name with brackets is not taken for rich's markup.
    return Text(clean(text))


def duration(seconds: float) -> str:
    """A duration as text."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
