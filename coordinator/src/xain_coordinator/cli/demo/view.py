"""Display of the demo: participants, a table that grows by a row per round, and the comparison at
the end."""

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from xain_coordinator.cli.demo.fleet import Fleet, status_text
from xain_coordinator.cli.demo.training import Split
from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.fl import inspection_pb2 as inspection
from xain_proto.metadata import COMPLETED

LIVE_ROWS = 15  # the table on a terminal shows the latest so many rounds
STARTING = "Participants are starting ..."


def sites(fleet: Fleet, data: Split) -> RenderableType:
    """Table of the participants and their data."""
    title = "Participants, and how many rows of each digit they have"
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("site")
    table.add_column("pid", justify="right")
    table.add_column("rows", justify="right")
    classes = sorted(set(data.test.target.tolist()), key=int)
    for name in classes:
        table.add_column(name, justify="right", style="dim")
    for (site, process), train in zip(fleet.participants.items(), data.trains, strict=True):
        labels = train.target.tolist()
        counts = [str(labels.count(name) or "") for name in classes]
        table.add_row(site, str(process.pid), str(train.num_samples), *counts)
    return Group(table, Text(f"Tested on {data.test.num_samples} rows that nobody trains on.\n"))


def invitation(fleet: Fleet) -> Text:
    """Text with commands to try while the demo runs. soft_wrap keeps each command in one piece."""
    assert fleet.coordinator is not None
    return Text.assemble(
        f"Coordinator: pid {fleet.coordinator.pid}, port {fleet.port}.\n",
        ("Try ", ""),
        ("kill -9", "bold"),
        (" on any of them; a site comes back with\n", ""),
        (
            shlex.join(participant_command(fleet.config_path(next(iter(fleet.participants))))),
            "bold",
        ),
        "\n",
    )


def participant_command(config: Path) -> list[str]:
    """Command that starts a participant from any folder, with this interpreter's program."""
    # Not resolved: in a virtual environment the interpreter is a link to one that is elsewhere.
    interpreter = Path(sys.executable)
    program = shutil.which("xain-participant", path=str(interpreter.parent))
    start = [program] if program else [str(interpreter), "-m", "xain_participant"]
    return [*start, "--config", str(config.absolute())]


class Progress:
    """Progress of the demo: the rounds so far."""

    def __init__(self, num_rounds: int) -> None:
        self.finished = False
        self._num_rounds = num_rounds
        self._rounds: Mapping[int, inspection.RoundStatus] = {}
        self._accuracies: Mapping[int, float] = {}
        self._waiting_for = STARTING
        self._lost_in: dict[str, int] = {}  # the round in which a site was found to have ended
        self._has_restarted = False
        self._notes: dict[str, str] = {}  # the latest one about each process
        self._untold: list[str] = []
        self._next_told = 0

    def update(
        self,
        status: inspection.GetStatusResponse,
        rounds: Mapping[int, inspection.RoundStatus],
        accuracies: Mapping[int, float],
        fleet: Fleet,
    ) -> None:
        """Update the progress from the coordinator's status."""
        self._rounds, self._accuracies = rounds, accuracies
        self._waiting_for = f"Waiting for: {status.waiting_for}"
        if not rounds:  # so far nothing moves: Python and its libraries take a moment to load
            self._waiting_for = f"{STARTING} {self._waiting_for}"
        self.finished = status.state == pb.FINISHED
        if self._has_restarted:
            self._has_restarted = False
            goes_on = f"it goes on with round {status.round + 1}"
            then = "the session was over" if self.finished else goes_on
            self._note("coordinator", f"The coordinator was killed and is back; {then}.")
        for site, process in fleet.participants.items():
            if not (ended := process.status()):
                continue
            how = status_text(ended)
            if site not in self._lost_in:
                self._lost_in[site] = status.round
                self._note(site, f"{site} {how}; the others go on.")
            elif site in self._notes and (back_in := self._back_in(site)) is not None:
                again = f"takes part again since round {back_in + 1}"
                self._note(site, f"{site} {how}, was started again and {again}.")

    def coordinator_restarted(self) -> None:
        """Note with the next update that the coordinator was killed and started again."""
        self._has_restarted = True

    def _back_in(self, site: str) -> int | None:
        """The first round to which a site has contributed since it was found to have ended.

        The rounds up to that one may count an update that it had handed in before.
        """
        rounds = (r for r in self._rounds.values() if r.round > self._lost_in[site])
        return min((r.round for r in rounds if site in r.contributors), default=None)

    def _note(self, about: str, text: str) -> None:
        if self._notes.get(about) != text:
            self._notes.pop(about, None)  # so that the latest note comes last
            self._notes[about] = text
            self._untold.append(text)

    def _published(self, start: int = 0) -> Iterator[inspection.RoundStatus]:
        """Rounds that are over and measured, in order and without gaps, from `start` on."""
        for number in count(start):
            round_ = self._rounds.get(number)
            if round_ is None or round_.phase != "published" or number + 1 not in self._accuracies:
                return
            yield round_

    def table(self, *, everything: bool = False) -> RenderableType:
        """Table with a row per round: the latest rounds, or all."""
        shown = self._published(0 if everything else max(0, len(self._rounds) - 1 - LIVE_ROWS))
        table = Table(title="Rounds", title_justify="left", show_edge=False, pad_edge=False)
        table.add_column("round", justify="right")
        table.add_column("updates", justify="right")
        table.add_column("rows", justify="right")
        table.add_column("seconds", justify="right")
        table.add_column("test accuracy", justify="right")
        table.add_column("", no_wrap=True, width=20)
        for round_ in shown:
            accuracy = self._accuracies[round_.round + 1]
            table.add_row(
                f"{round_.round + 1} / {self._num_rounds}",
                f"{round_.num_contributors} of {round_.num_selected}",
                str(round_.num_samples),
                f"{round_.seconds:.2f}",
                f"{accuracy:.1%}",
                Text("█" * round(accuracy * 20), style="green"),
            )
        notes = [Text(note, style="yellow") for note in self._notes.values()]
        if everything:
            return Group(table, *notes)
        return Group(table, *notes[-3:], Text(self._waiting_for, style="dim"))

    def new_lines(self) -> Iterator[str]:
        """Print a line for each new round, where a table cannot grow."""
        for round_ in self._published(self._next_told):
            self._next_told = round_.round + 1
            accuracy = self._accuracies[round_.round + 1]
            yield (
                f"round {round_.round + 1} of {self._num_rounds}: "
                f"{round_.num_contributors} updates, test accuracy {accuracy:.1%}"
            )
        untold, self._untold = self._untold, []
        yield from untold


def comparison(
    status: inspection.GetStatusResponse, fleet: Fleet, federated: float, centralised: float
) -> RenderableType:
    """Table of the accuracy of the federated model beside that of the centralised one."""
    ours, theirs = round(100 * federated, 1), round(100 * centralised, 1)
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_row("federated, data stayed where it was", f"[bold]{ours:.1f}%[/bold]")
    table.add_row("the same model on all data in one place", f"{theirs:.1f}%")
    table.add_row("difference", f"{ours - theirs:+.1f} points")
    lines: list[RenderableType] = [table]
    if fleet.restarts:
        lines.append(Text(f"The coordinator was killed {_times(fleet.restarts)} and came back."))
    if status.cause != COMPLETED:
        lines.append(Text(f"The session ended early: {status.cause}", style="red"))
    return Panel(Group(*lines), title="Test accuracy", title_align="left", expand=False)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
