"""The demo's command line and its course from the first process to the last table."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from xain_coordinator.cli.demo.sites import DemoLaunch, Settings
from xain_coordinator.cli.launch.cli import run
from xain_coordinator.config.sections.launch import COORDINATOR, LaunchSettings
from xain_foundation.commands import fail, make_app, run_app
from xain_foundation.exit_statuses import EXIT_FAILED, CommandFailed
from xain_foundation.logs import streams
from xain_foundation.wheels import pip_install
from xain_wire.limits import MAX_INT32
from xain_workloads.tables.partition import MAX_ALPHA

PROGRAM = "xain-coordinator demo"

app = make_app()

_HELP = """Train one model over several processes, each with a different slice of real data.

A coordinator and its participants run as processes of this machine and talk gRPC. The data are
scikit-learn's handwritten digits, split by label: each site has seen mostly some of the ten. The
sites measure every round's model on rows that nobody trained on, and the last one is shown beside
the same model trained on all rows in one place. A page with learning curves and sites remains.

While it runs, kill what you like with `kill -9`: the others go on without a participant, and a
coordinator that is killed while it serves is started again, up to 5 times, and continues the same
round.
"""

_EXAMPLES = """**Examples**

- `xain-coordinator demo` : four participants, until the last round

- `xain-coordinator demo --rounds 500` : long enough to kill something

- `xain-coordinator demo --alpha 0.1 --participants 8` : more sites, which differ more

- `xain-coordinator demo --keep run/` : keep logs, journal, weights and metrics
"""


@app.command(help=_HELP, epilog=_EXAMPLES)
def _demo(
    participants: Annotated[int, typer.Option(min=2, max=64, help="How many take part.")] = 4,
    rounds: Annotated[
        int, typer.Option(min=1, max=MAX_INT32 // Settings.epochs, help="Rounds to train.")
    ] = 20,
    alpha: Annotated[
        float,
        typer.Option(min=0.01, max=MAX_ALPHA, help="How alike the sites are; small is unlike."),
    ] = 0.5,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of the split and of the training.")
    ] = 0,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", file_okay=False, help="Work in this folder, and leave it there."
        ),
    ] = None,
) -> None:
    """The command `demo`: train one model at several sites on this machine, with a report."""
    if any(find_spec(package) is None for package in ("sklearn", "xain_participant")):
        how = pip_install("xain-participant", "tables")
        fail(PROGRAM, f"it runs participants here, too: {how}", EXIT_FAILED)
    streams.unblock()
    console = Console(highlight=False)
    console.print(f"Starting a coordinator and {participants} participants ...")
    settings = Settings(participants, rounds, alpha, seed)
    with _folder(keep) as folder:
        report = Path(tempfile.gettempdir()) / f"xain-demo-{os.getpid()}.html"
        if keep is not None:
            report = folder / "report.html"
        try:
            status = run(
                "process",
                LaunchSettings(name=f"demo-{os.getpid()}"),
                "sgd",
                [COORDINATOR],
                partial(DemoLaunch, settings, folder, report, console),
                is_quiet=True,
                say=lambda text: console.print(text, style="yellow", markup=False),
            )
        except CommandFailed as error:
            fail(PROGRAM, str(error), EXIT_FAILED)
    raise typer.Exit(status)


def main(arguments: Sequence[str]) -> int:
    """Run the demo; returns its exit status."""
    return run_app(app, PROGRAM, arguments)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """The folder to keep, or a temporary one that is removed at the end."""
    if keep is not None:
        yield keep.absolute()
    else:
        with tempfile.TemporaryDirectory(prefix="xain-demo-") as folder:
            yield Path(folder)
