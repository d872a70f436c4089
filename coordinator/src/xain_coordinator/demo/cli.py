"""The demo's command line and its course from the first process to the last table."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import grpc
import typer
from rich.console import Console
from rich.live import Live

from xain_coordinator.demo import view
from xain_coordinator.demo.fleet import Fleet, FleetError
from xain_coordinator.demo.training import (
    Observer,
    centralised_accuracy,
    participant_settings,
    split,
)

POLL_S = 0.1
ANSWER_TIMEOUT_S = 60.0
ETA0 = 0.1
EPOCHS = 5  # local passes between two aggregations
MAX_BASELINE_EPOCHS = 200  # beyond it the baseline has long converged
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

Answer = TypeVar("Answer")

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_HELP = """Train one model over several processes, each with a different slice of real data.

A coordinator and its participants run as processes of this machine and talk gRPC. The data are
scikit-learn's handwritten digits, split by label: each site has seen mostly some of the ten. Every
round's model is measured on rows that nobody trained on, and the last one is shown beside the same
model trained on all rows in one place.

While it runs, kill what you like with `kill -9`: the others go on without a participant, and a dead
coordinator is started again and continues the same round.
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
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to train.")] = 20,
    alpha: Annotated[
        float, typer.Option(min=0.01, help="How alike the sites are; small is unlike.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Of the split and of the training.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Work in this folder, and leave it there.")
    ] = None,
) -> None:
    with _folder(keep) as folder:
        raise typer.Exit(_run(Console(), folder, participants, rounds, alpha, seed))


def main(arguments: Sequence[str]) -> int:
    """Run the demo; returns its exit status."""
    try:
        status = app(list(arguments), prog_name="xain-coordinator demo", standalone_mode=False)
    except typer.Abort:
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status if isinstance(status, int) else 0


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
    else:
        with tempfile.TemporaryDirectory(prefix="xain-demo-") as folder:
            yield Path(folder)


def _run(
    console: Console, folder: Path, participants: int, rounds: int, alpha: float, seed: int
) -> int:
    data = split(participants, alpha, seed)
    fleet = Fleet(
        folder,
        {
            "workload.name": "sgd",
            "workload.options.eta0": ETA0,
            "rounds.epochs": EPOCHS,
            "rounds.rounds": rounds,
            # Two are enough to go on with: the demo is there to have participants killed.
            "rounds.min_participants": 2,
            "rounds.start_participants": participants,
            "rounds.max_participants": participants,
            "rounds.start_timeout_s": 15,
            "rounds.seed": seed,
            "server.heartbeat_time_s": 1,
            "server.heartbeat_timeout_s": 2,
            "server.drain_s": 1,
            "logging.console": "false",
        },
        {
            f"site-{index}": participant_settings(index, participants, alpha, seed)
            for index in range(participants)
        },
    )
    try:
        fleet.start()
        console.print(view.sites(fleet, data))
        console.print(view.invitation(fleet, folder))
        observer = Observer(fleet.port, data.test)
        try:
            _watch(console, fleet, observer, rounds)
            accuracies, status = _ask(fleet, lambda: (observer.accuracies(), observer.status()))
        finally:
            observer.close()
        fleet.wait_for_participants()
        epochs = min(rounds * EPOCHS, MAX_BASELINE_EPOCHS)
        with console.status("Training the same model on all rows in one place ..."):
            baseline = centralised_accuracy(data, epochs, ETA0, seed)
        console.print(view.verdict(status, fleet, accuracies[max(accuracies)], baseline))
        return 0 if status.cause == "completed" else EXIT_FAILED
    except FleetError as error:
        console.print(f"[red]The demo has failed:[/red] {error}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        console.print("Stopping ...")
        return EXIT_INTERRUPTED
    finally:
        fleet.stop()


def _ask(
    fleet: Fleet, question: Callable[[], Answer], on_restart: Callable[[], None] = lambda: None
) -> Answer:
    """What the coordinator answers, also if it is killed meanwhile: then it is started again, and
    asked again. Raises FleetError if it gives no answer for ANSWER_TIMEOUT_S."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        try:
            return question()
        except grpc.RpcError as error:
            if fleet.revive():
                on_restart()
                deadline = time.monotonic() + ANSWER_TIMEOUT_S
            elif time.monotonic() > deadline:
                raise FleetError(f"the coordinator does not answer: {_reason(error)}") from error
        time.sleep(POLL_S)


def _reason(error: grpc.RpcError) -> str:
    return error.code().name if isinstance(error, grpc.Call) else str(error)


def _watch(console: Console, fleet: Fleet, observer: Observer, num_rounds: int) -> None:
    """Show the session until it has ended: live on a terminal, else a line per round."""
    progress = view.Progress(num_rounds)

    def look() -> None:
        progress.update(observer.status(), observer.rounds(), observer.accuracies(), fleet)

    def on_restart() -> None:
        progress.note("The coordinator was killed; it goes on with the same round.")

    with _display(console, progress) as refresh:
        while not progress.finished:
            # Before looking: those that leave after the end must not be taken for lost.
            gone = all(process.status is not None for process in fleet.participants.values())
            _ask(fleet, look, on_restart)
            refresh()
            if gone and not progress.finished:
                raise FleetError("all participants are gone, and the training is not done")
            time.sleep(POLL_S)


class _Refresh:
    """What to do when there is news."""

    def __init__(self, console: Console, progress: view.Progress, live: Live | None) -> None:
        self._console, self._progress, self._live = console, progress, live

    def __call__(self) -> None:
        if self._live is not None:
            self._live.update(self._progress.table(), refresh=True)
        else:
            for line in self._progress.new_lines():
                self._console.print(line)


@contextmanager
def _display(console: Console, progress: view.Progress) -> Iterator[_Refresh]:
    if not console.is_terminal:
        yield _Refresh(console, progress, None)
        console.print(progress.table(everything=True))
        return
    with Live(progress.table(), console=console, auto_refresh=False, transient=True) as live:
        yield _Refresh(console, progress, live)
    console.print(progress.table(everything=True))
