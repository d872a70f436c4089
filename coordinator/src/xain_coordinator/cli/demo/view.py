"""Display of the demo: participants, the session as it goes on, and the comparison at the end."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from xain_coordinator.cli.demo.training import Split
from xain_coordinator.cli.live_view import view
from xain_coordinator.server.inspection_client import Snapshot
from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.fl.coordinator_pb2 import Evaluation
from xain_proto.fl.inspection_pb2 import RoundStatus
from xain_proto.metadata import COMPLETED


def sites(pids: Mapping[str, int], data: Split) -> RenderableType:
    """Table of the participants and their data."""
    title = "Participants, and how many rows of each digit they have"
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for heading in ("site", "pid", "rows"):
        table.add_column(heading, justify="left" if heading == "site" else "right")
    classes = sorted(set(data.test.target.tolist()), key=int)
    for name in classes:
        table.add_column(name, justify="right", style="dim")
    for (site, pid), train in zip(pids.items(), data.trains, strict=True):
        labels = train.target.tolist()
        counts = [str(labels.count(name) or "") for name in classes]
        table.add_row(site, str(pid), str(train.num_samples), *counts)
    return Group(table, Text(f"Tested on {data.test.num_samples} rows that nobody trains on.\n"))


def invitation(pid: int, address: str, command: Sequence[str]) -> Text:
    """Text with commands to try while the demo runs. soft_wrap keeps each command in one piece.

    pid, address: of the coordinator. command: starts a site again.
    """
    return Text.assemble(
        f"Coordinator: pid {pid}, address {address}.\nTry ",
        ("kill -9", "bold"),
        " on any of them; a site comes back with\n",
        (shlex.join(command), "bold"),
        "\n",
    )


class Progress:
    """The rounds so far.

    cause: why the session has ended. last: evaluation of its last model.
    """

    def __init__(self, num_rounds: int) -> None:
        self.finished = False
        self.cause = ""
        self.last = Evaluation()
        self._num_rounds = num_rounds
        self._rounds: dict[int, RoundStatus] = {}
        self._next_told = 0

    def update(self, snapshot: Snapshot) -> None:
        """Take in what the coordinator answers."""
        self._rounds |= {one.round: one for one in snapshot.rounds.rounds}
        self.finished, self.cause = snapshot.status.state == pb.FINISHED, snapshot.status.cause
        if self._rounds:
            self.last = self._rounds[max(self._rounds)].evaluation

    def new_lines(self) -> Iterator[str]:
        """A line for each new round of training. The participants of the next round measure its
        model."""
        while (measured := self._rounds.get(self._next_told + 1)) is not None and (
            measured.phase == "published" or self.finished
        ):
            round_ = self._rounds[self._next_told]
            accuracy = measured.evaluation.metrics.get("accuracy", 0.0)
            yield (
                f"round {round_.round + 1} of {self._num_rounds}: "
                f"{round_.num_contributors} updates, test accuracy {accuracy:.1%}"
            )
            self._next_told += 1


@contextmanager
def display(console: Console, progress: Progress) -> Iterator[Callable[[Snapshot], None]]:
    """Show the session: live on a terminal, else a line per round. The yielded function is to be
    called with each new snapshot, of which the progress knows."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda snapshot: live.update(view(snapshot), refresh=True)
    else:

        def print_lines(snapshot: Snapshot) -> None:
            for line in progress.new_lines():
                console.print(line)

        yield print_lines


def comparison(progress: Progress, num_tested: int, centralised: float) -> str:
    """Lines with the accuracy of the federated model beside that of the centralised one.

    num_tested: rows that all sites together set aside.
    """
    last = progress.last
    ours = round(100 * last.metrics.get("accuracy", 0.0), 1)
    theirs = round(100 * centralised, 1)
    here = f", on the {last.num_samples} test rows of the sites that are left"
    early = "" if progress.cause == COMPLETED else f"The session ended early: {progress.cause}\n"
    return (
        f"{early}Test accuracy\n"
        f"  federated, data stayed where it was{here if last.num_samples < num_tested else ''}: "
        f"{ours:.1f}%\n"
        f"  the same model on all data in one place: {theirs:.1f}%\n"
        f"  difference: {ours - theirs:+.1f} points"
    )
