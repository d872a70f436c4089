"""`xain-coordinator study` and `evaluate`: the table of a study."""

import json
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from xain_coordinator.assembly.study import Study
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.vocabulary.values import Phase
from xain_coordinator.export.studies import Table, remarks, rows
from xain_coordinator.inspection.client import clean, study_of
from xain_coordinator.journal.restore import open_stopped, restore
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.process.run import run
from xain_foundation.exit_statuses import CommandFailed


def table_of(config: CoordinatorConfig, address: str | None) -> Table:
    """The table of the study of the latest session, from the files of a stopped coordinator or from
    one that runs. Raises CommandFailed, JournalError and NoStatus."""
    text = _from_files(config) if address is None else study_of(address)
    if not text:
        raise CommandFailed("the latest session is of no study")
    return parsed(text)


def parsed(text: str) -> Table:
    """The table in the answer of a coordinator."""
    table: dict[str, Any] = json.loads(text)
    return table


def _from_files(config: CoordinatorConfig) -> str:
    """The table as JSON, from the journal of a stopped coordinator; "" if its latest session is of
    no study."""
    with open_stopped(config.journal.path) as (journal, last):
        study = Study.of(last.session, journal, {})
        return "" if study is None else study.table(last.session, last.history)


def show(table: Table, console: Console, *, intervals: bool = True) -> None:
    """Print the table for people."""
    console.print(grid(table, intervals=intervals))
    for line in remarks(table):
        console.print(Text(clean(line)))


def grid(table: Table, *, intervals: bool) -> Grid:
    """The table of a study, laid out for a terminal."""
    head, *lines = rows(table, intervals=intervals)
    made = Grid(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, heading in enumerate(head):
        is_text = number == 0 or heading in ("", "measured at")
        made.add_column(clean(heading), justify="left" if is_text else "right", overflow="fold")
    for line in lines:
        made.add_row(*_texts(line))
    return made


def _texts(cells: Iterable[str]) -> list[Text]:
    """Cells of a row as text of rich."""
    return [Text(clean(cell)) for cell in cells]


def evaluate(config: CoordinatorConfig, print_table: Callable[[Table], None]) -> int:
    """Have a model measured at the sites, print what came of it, and let the sites go. Returns the
    exit status. An evaluation of the same model that was stopped or killed goes on."""
    return run(
        config,
        new_session=not _is_under_way(config),
        when_done=lambda text: print_table(parsed(text)),
    )


def _is_under_way(config: CoordinatorConfig) -> bool:
    """Whether the journal's latest session is an unfinished part of the configured study."""
    if not config.journal.path.exists():
        return False
    with closing(SqliteJournal(config.journal.path)) as journal:
        restored = restore(journal)
    if restored is None:
        return False
    session = restored[0].session
    return session.phase is not Phase.FINISHED and session.rules.study == config.rules().study
