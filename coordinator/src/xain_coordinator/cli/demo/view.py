"""Display of the demo: participants at its beginning, and the comparison at its end."""

import shlex
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from xain_coordinator.cli import figures
from xain_coordinator.cli.demo.training import Split
from xain_coordinator.inspection.client import Snapshot
from xain_wire.fl.coordinator_pb2 import Evaluation
from xain_wire.metadata import COMPLETED


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
    pid, address: of the coordinator. command: starts a site again."""
    return Text.assemble(
        f"Coordinator: pid {pid}, address {address}.\nTry ",
        ("kill -9", "bold"),
        " on any of them; a site comes back with\n",
        (shlex.join(command), "bold"),
        "\n",
    )


def comparison(snapshot: Snapshot, num_tested: int, centralised: float) -> str:
    """Lines with the accuracy of the federated model beside that of the centralised one. snapshot:
    at the end. num_tested: rows that all sites together set aside."""
    rounds, cause = snapshot.rounds.rounds, snapshot.status.cause
    last = rounds[-1].evaluation if rounds else Evaluation()
    ours = round(100 * last.metrics.get("accuracy", 0.0), 1)
    theirs = round(100 * centralised, 1)
    here = f", on the {last.num_samples} test rows of the sites that are left"
    early = "" if cause == COMPLETED else f"The session ended early: {cause}\n"
    return (
        f"{early}Test accuracy\n"
        f"  federated, data stayed where it was{here if last.num_samples < num_tested else ''}: "
        f"{ours:.1f}%\n"
        f"  the same model on all data in one place: {theirs:.1f}%\n"
        f"  difference: {ours - theirs:+.1f} points\n"
        f"  federated, all figures: {figures.sentence(last)}"
    )
