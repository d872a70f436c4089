"""The live view of a session: `xain-coordinator status --watch`, and the coordinator's terminal.

A frame is made from what the Inspection service answers, as that of `status` is.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from xain_coordinator.cli.status import CURVE_ROUNDS, frame, progress
from xain_coordinator.inspection import client as inspection_client
from xain_coordinator.inspection.client import NoStatus, Snapshot, clean
from xain_foundation.logs import logs
from xain_wire.fl import coordinator_pb2 as pb

EVERY_S = 1.0


def line(snapshot: Snapshot) -> str:
    """State of the session in one line, for a pipe."""
    status = snapshot.status
    of = f"{clean(status.study)}: " if status.study else ""
    told = f"{of}{clean(status.phase)} round {status.round}, {progress(status)} done"
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
    """Show the session of the coordinator at "host:port" until it is finished. Raises NoStatus if
    there is no answer at first; later a coordinator that is away is waited for."""
    snapshot = inspection_client.fetch(address, num_rounds=CURVE_ROUNDS)
    with shown(console) as show:
        show(snapshot, "")
        while snapshot.status.state != pb.FINISHED:
            time.sleep(EVERY_S)  # between two updates of the view
            note = ""
            try:
                snapshot = inspection_client.fetch(address, num_rounds=CURVE_ROUNDS)
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
                Group(
                    frame(snapshot, is_live=True), Text(f"! {note}" if note else "", style="yellow")
                ),
                refresh=True,
            )
        return
    told = ""

    def print_change(snapshot: Snapshot, note: str) -> None:
        """Print the line of a snapshot if it differs from the one before."""
        nonlocal told
        now = line(snapshot)
        if now != told:
            console.print(now, markup=False, highlight=False, soft_wrap=True)
        told = now

    yield print_change


@contextlib.asynccontextmanager
async def on_terminal(ask: Callable[[int], Awaitable[Snapshot]]) -> AsyncIterator[None]:
    """Show the session below the log lines of this process, on standard error. ask: for a snapshot
    with a number of rounds, in the event loop that runs."""
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
    """Show a new snapshot every EVERY_S, until the task is cancelled."""
    while True:
        live.update(frame(await ask(CURVE_ROUNDS), is_live=True), refresh=True)
        await asyncio.sleep(EVERY_S)  # between two updates of the view
