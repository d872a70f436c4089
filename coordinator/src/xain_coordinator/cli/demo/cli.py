"""The demo's command line and its course from the first process to the last table."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, TypeVar

import grpc
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from xain_coordinator.cli.demo import view
from xain_coordinator.cli.demo.fleet import Fleet, FleetError
from xain_coordinator.cli.demo.interrupts import EXIT_BASE, Interrupts
from xain_coordinator.cli.demo.training import (
    Observer,
    centralised_accuracy,
    participant_settings,
    split,
)
from xain_foundation.commands import fail
from xain_proto.fl import inspection_pb2 as inspection
from xain_proto.limits import MAX_INT32
from xain_proto.metadata import COMPLETED
from xain_workloads.partition import MAX_ALPHA

POLL_S = 0.1
ANSWER_TIMEOUT_S = 60.0
ETA0 = 0.1
EPOCHS = 5  # local passes between two aggregations
MAX_ROUNDS = MAX_INT32 // EPOCHS
MAX_BASELINE_EPOCHS = 200  # beyond it the baseline has long converged
HEARTBEAT_TIME_S, HEARTBEAT_TIMEOUT_S = 1, 2
LEASE_S = HEARTBEAT_TIME_S + HEARTBEAT_TIMEOUT_S
EXIT_FAILED = 1
PROGRAM = "xain-coordinator demo"

# Statuses of calls to a coordinator that is being killed or started.
PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

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
    rounds: Annotated[int, typer.Option(min=1, max=MAX_ROUNDS, help="Rounds to train.")] = 20,
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
    if any(find_spec(package) is None for package in ("sklearn", "xain_participant")):
        fail(PROGRAM, "it runs participants here, too: pip install xain-participant", EXIT_FAILED)
    interrupts = Interrupts()
    with interrupts.installed(), _folder(keep) as folder:
        try:
            status = _run(Console(), interrupts, folder, participants, rounds, alpha, seed)
        except KeyboardInterrupt:  # before there was anything to stop
            interrupts.hold_to_the_end()
            status = interrupts.exit_status
    raise typer.Exit(status)


def main(arguments: Sequence[str]) -> int:
    """Run the demo; returns its exit status."""
    status = app(list(arguments), prog_name=PROGRAM, standalone_mode=False)
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
    console: Console,
    interrupts: Interrupts,
    folder: Path,
    participants: int,
    rounds: int,
    alpha: float,
    seed: int,
) -> int:
    console.print(f"Starting a coordinator and {participants} participants ...", highlight=False)
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
            "server.heartbeat_time_s": HEARTBEAT_TIME_S,
            "server.heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
            "server.drain_s": 1,
            "logging.console": "false",
        },
        {
            f"site-{index}": participant_settings(index, participants, alpha, seed)
            for index in range(participants)
        },
        interrupts,
    )
    try:
        fleet.start()
        console.print(view.sites(fleet, data))
        console.print(view.invitation(fleet), soft_wrap=True)
        observer = Observer(fleet.port, data.test)
        try:
            status = _watch(console, fleet, observer, rounds)
        finally:
            observer.close()
        fleet.wait_for_participants()
        epochs = min(rounds * EPOCHS, MAX_BASELINE_EPOCHS)
        with console.status("Training the same model on all rows in one place ..."):
            baseline = centralised_accuracy(data, epochs, ETA0, seed)
        console.print(view.comparison(status, fleet, observer.final_accuracy(), baseline))
        return 0 if status.cause == COMPLETED else EXIT_FAILED
    except FleetError as error:
        console.print(
            Text("The demo has failed. ", style="red").append(str(error), style="default")
        )
        return EXIT_FAILED
    except (KeyboardInterrupt, OSError):
        # After SIGHUP there is no terminal any more, and to write to it is an OSError.
        interrupts.hold_to_the_end()
        if not interrupts.number:
            raise
        with suppress(OSError):
            console.print("Stopping ...")
        return interrupts.exit_status
    finally:
        interrupts.hold_to_the_end()
        fleet.stop()


def _ask(
    fleet: Fleet, question: Callable[[], Answer], on_restart: Callable[[], None] = lambda: None
) -> Answer:
    """The answer of the coordinator. If it is killed meanwhile, it is started and asked again.
    Raises FleetError if there is no answer for ANSWER_TIMEOUT_S, or a refusal."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        try:
            return question()
        except grpc.RpcError as error:
            time.sleep(POLL_S)  # before looking: one that was killed is not gone at once
            if fleet.revive():
                on_restart()
                deadline = time.monotonic() + ANSWER_TIMEOUT_S
            elif not isinstance(error, grpc.Call) or error.code() not in PASSING:
                raise FleetError(f"The coordinator refuses to answer: {_reason(error)}") from error
            elif time.monotonic() > deadline:
                raise FleetError(f"The coordinator does not answer: {_reason(error)}") from error


def _reason(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)


def _watch(
    console: Console, fleet: Fleet, observer: Observer, num_rounds: int
) -> inspection.GetStatusResponse:
    """Show the session until it has ended: live on a terminal, else a line per round.

    Returns its last status.
    """
    progress = view.Progress(num_rounds)
    abandoned = Abandoned()

    with _display(console, progress) as refresh:
        while True:
            # Before looking: those that leave after the end must not be taken for lost.
            gone = all(process.status() is not None for process in fleet.participants.values())
            status = _ask(fleet, observer.look, progress.coordinator_restarted)
            progress.update(status, observer.rounds, observer.accuracies, fleet)
            refresh()
            if progress.finished:
                return status
            if abandoned.after(time.monotonic(), gone and status.num_connected == 0):
                raise FleetError(_why_abandoned(fleet))
            time.sleep(POLL_S)  # between two frames


class Abandoned:
    """Whether no participant has been connected for so long that none will come.

    Participants that the demo has not started count, too: a site that was killed may be started
    again by hand, which takes a moment.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def after(self, now: float, is_empty: bool) -> bool:
        """now: seconds of a clock. is_empty: whether no participant is connected now."""
        if not is_empty:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since > LEASE_S


def _why_abandoned(fleet: Fleet) -> str:
    text = "All participants are gone, and the training is not done."
    for name, process in fleet.participants.items():
        status = process.status()
        if status and status < EXIT_BASE:
            return f"{text} The log of {name} ends with:{fleet.end_of_log(name)}"
    return text


@contextmanager
def _display(console: Console, progress: view.Progress) -> Iterator[Callable[[], None]]:
    """Show the progress; what it gives is to be called after changes."""
    if not console.is_terminal:
        console.print(view.STARTING)

        def print_lines() -> None:
            for line in progress.new_lines():
                console.print(line)

        yield print_lines
    else:
        with Live(progress.table(), console=console, auto_refresh=False, transient=True) as live:
            yield lambda: live.update(progress.table(), refresh=True)
    console.print(progress.table(everything=True))
