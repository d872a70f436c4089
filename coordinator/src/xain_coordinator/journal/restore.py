"""Restore a session from its journal: the latest snapshot, and the records since."""

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from xain_coordinator.core.machine.evolve import begin, evolve
from xain_coordinator.core.view.history import History
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import Journal, JournalError, Record, Snapshot
from xain_foundation.settings.hints import hint


def restore(journal: Journal) -> tuple[Snapshot, int] | None:
    """Fold the journal's latest session. Returns it and the number of records that a snapshot
    covers; None if there is no session. Raises JournalError."""
    saved = journal.snapshot()
    num_saved = 0 if saved is None else saved.num_records
    records = iter(journal.load(num_saved))
    if saved is None:
        first = next(records, None)
        if first is None:
            return None
        saved = _begun(first)
    return _folded(saved, records), num_saved


@contextmanager
def open_stopped(path: Path) -> Iterator[tuple[SqliteJournal, Snapshot]]:
    """The journal of a stopped coordinator, and its latest session. Raises JournalError."""
    if not path.exists():
        raise JournalError(
            f"there is no journal at {path}; " + hint("xain-coordinator", "--data-dir FOLDER")
        )
    with closing(SqliteJournal(path)) as journal:
        restored = restore(journal)
        if restored is None:
            raise JournalError(f"there is no session in {path}")
        yield journal, restored[0]


def restore_session(records: Iterable[Record]) -> Snapshot:
    """Fold all records of a session. Raises JournalError."""
    rest = iter(records)
    return _folded(_begun(next(rest)), rest)


def _begun(first: Record) -> Snapshot:
    """The session after its first record. Raises JournalError if that is not its opening."""
    if not isinstance(first.event, e.SessionOpened):
        raise JournalError(
            f"the journal begins with {type(first.event).__name__}, not with a session"
        )
    return Snapshot(1, first.at, begin(first.event), History(rules=first.event.rules))


def _folded(saved: Snapshot, records: Iterable[Record]) -> Snapshot:
    """A session and its history after more records. Raises JournalError if one cannot be folded."""
    number, at, session, history = saved.num_records, saved.at, saved.session, saved.history
    for record in records:
        try:
            session = evolve(session, record.event)
            history.apply(record.event)
        except Exception as error:  # whatever a record leads to that this version never writes
            raise JournalError(
                f"the journal cannot be replayed: record {number}, {type(record.event).__name__}: "
                f"{type(error).__name__}: {error}; use the version of the program that wrote it"
            ) from error
        number, at = number + 1, record.at
    return Snapshot(number, at, session, history)
