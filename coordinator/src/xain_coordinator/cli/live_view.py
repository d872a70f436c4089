"""The live view of a session: `xain-coordinator status --watch`, and the coordinator's terminal.

It is made from what the Inspection service answers, and shows how the session stands, how its
metrics have gone, who trains, and what is wrong.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from math import isfinite

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from xain_coordinator.cli import status as status_view
from xain_coordinator.cli.status import duration
from xain_coordinator.inspection import client as inspection_client
from xain_coordinator.inspection.client import NoStatus, Snapshot, clean
from xain_foundation.logs import logs
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.inspection_pb2 import RoundStatus

EVERY_S = 1.0
ROUNDS = 60  # that curves are made of
CURVE_COLUMNS = 40
BAR_COLUMNS = 12  # so that the headline fits 80 columns
MAX_ROWS = 12
MAX_METRICS = 4
MAX_PARAMETER_LINES = 6

_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Iterable[float], columns: int = CURVE_COLUMNS) -> str:
    """The latest values as a row of bars, from the lowest of them to the highest."""
    shown = [value for value in values if isfinite(value)][-columns:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high == low:
        return _LEVELS[3] * len(shown)
    return "".join(_LEVELS[round((v - low) / (high - low) * (len(_LEVELS) - 1))] for v in shown)


def view(snapshot: Snapshot) -> RenderableType:
    """Live view of a session, at most some 30 lines."""
    status, rounds = snapshot.status, snapshot.rounds.rounds
    parts: list[RenderableType] = [_headline(snapshot)]
    curves = _curves(rounds, status.metric)
    if curves is not None:
        parts.append(curves)
    if snapshot.participants.participants or status.sites:
        parts.append(status_view.participants(snapshot, MAX_ROWS, folds=False))
    parts += [
        Text(clean(line), style="dim", overflow="ellipsis", no_wrap=True)
        for line in status_view.parameter_lines(status)[:MAX_PARAMETER_LINES]
    ]
    parts += [Text(f"! {clean(warning)}", style="yellow") for warning in status.warnings[-3:]]
    return Group(*parts)


def _headline(snapshot: Snapshot) -> RenderableType:
    status = snapshot.status
    state = clean(status.phase)
    is_over = status.state == pb.FINISHED
    grid = Table.grid(padding=(0, 2))
    left = status_view.time_left(snapshot)
    facts: list[RenderableType] = [Text(clean(status.study), style="bold")] if status.study else []
    facts += [
        Text(state, style="bold" if is_over else "bold green"),
        ProgressBar(
            total=max(status.num_rounds, 1), completed=status.num_trained, width=BAR_COLUMNS
        ),
        Text(status_view.progress(status)),
    ]
    if status.num_selected:
        what = "evaluations" if state == "evaluating" else "updates"
        facts.append(Text(f"{status.num_updates} of {status.num_selected} {what} in"))
    if left is not None:
        facts.append(Text(f"{duration(left)} left"))
    grid.add_row(*facts)
    why = f"{status.cause}: {status.ended_because}" if status.ended_because else status.cause
    about = []
    if status.HasField("best_round"):
        about.append(f"best model {status.best_round}, {status.metric} {status.best_value:.4g}")
    if not is_over:
        about.append(status_view.connected(status))
    about += [duration(status.session_seconds), f"session {status.session_id}"]
    told = (why if is_over else f"waiting for: {status.waiting_for}", "; ".join(about))
    lines = [Text(clean(t), style="dim", overflow="ellipsis", no_wrap=True) for t in told if t]
    return Group(grid, *lines)


def _curves(rounds: Iterable[RoundStatus], first: str) -> RenderableType | None:
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


def line(snapshot: Snapshot) -> str:
    """State of the session in one line, for a pipe."""
    status = snapshot.status
    of = f"{clean(status.study)}: " if status.study else ""
    told = f"{of}{clean(status.phase)} round {status.round}, {status_view.progress(status)} done"
    if status.num_selected:
        told += f", {status.num_updates} of {status.num_selected} updates in"
    if status.state == pb.FINISHED:
        why = f"{status.cause}: {status.ended_because}" if status.ended_because else status.cause
        told = f"{of}finished ({clean(why)})"
    for one in reversed(snapshot.rounds.rounds):
        metrics = {**one.evaluation.metrics, **one.coordinator_evaluation.metrics}
        if metrics:
            measured = ", ".join(f"{clean(n)} {v:.4g}" for n, v in sorted(metrics.items()))
            return f"{told}; model {one.round}: {measured}"
    return told


def watch(address: str, console: Console) -> None:
    """Show the session of the coordinator at "host:port" until it is finished.

    Raises NoStatus if there is no answer at first; later a coordinator that is away is waited for.
    """
    snapshot = inspection_client.fetch(address, num_rounds=ROUNDS)
    with shown(console) as show:
        show(snapshot, "")
        while snapshot.status.state != pb.FINISHED:
            time.sleep(EVERY_S)  # between two updates of the view
            note = ""
            try:
                snapshot = inspection_client.fetch(address, num_rounds=ROUNDS)
            except NoStatus as away:
                note = f"{clean(str(away))}; waiting for it"
            show(snapshot, note)


@contextlib.contextmanager
def shown(console: Console) -> Iterator[Callable[[Snapshot, str], None]]:
    """Show the snapshots that the yielded function is called with: in a live view on a terminal,
    with a note below it, else in a line for each change."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda snapshot, note: live.update(
                Group(view(snapshot), Text(f"! {note}" if note else "", style="yellow")),
                refresh=True,
            )
        return
    told = ""

    def print_change(snapshot: Snapshot, note: str) -> None:
        nonlocal told
        now = line(snapshot)
        if now != told:
            console.print(now, markup=False, highlight=False, soft_wrap=True)
        told = now

    yield print_change


@contextlib.asynccontextmanager
async def on_terminal(ask: Callable[[int], Awaitable[Snapshot]]) -> AsyncIterator[None]:
    """Show the session below the log lines of this process, on standard error.

    ask: for a snapshot with a number of rounds, in the event loop that runs.
    """
    console = Console(stderr=True)
    live = Live(console=console, auto_refresh=False, redirect_stdout=False, transient=True)
    before = sys.stderr
    with live:
        logs.write_to(sys.stderr)  # rich has put a stream there that prints above the view
        task = asyncio.create_task(_keep_updating(live, ask))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            logs.write_to(before)


async def _keep_updating(live: Live, ask: Callable[[int], Awaitable[Snapshot]]) -> None:
    while True:
        live.update(view(await ask(ROUNDS)), refresh=True)
        await asyncio.sleep(EVERY_S)  # between two updates of the view
