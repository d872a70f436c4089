"""The journal of the scheduler: damage is named, and older formats are read."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from xain_parameters.scheduler.journal import Journal
from xain_parameters.scheduler.state import ServerCame, fold

EVENTS = [ServerCame(f"s{index}", f"host:{index}", index + 1) for index in range(3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal with three events."""
    path = tmp_path / "scheduler.db"
    journal = Journal(path)
    for event in EVENTS:
        journal.append([event], fold(journal.state, [event]))
    journal.close()
    return path


def execute(path: Path, command: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(command)


def test_journal_that_is_opened_again_has_its_state(path):
    journal = Journal(path)
    assert list(journal.state.servers) == ["s0", "s1", "s2"]
    assert not journal.is_new
    journal.close()


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("UPDATE event SET body = CAST(substr(body, 1, 20) AS BLOB)", "event 1 is damaged"),
        ("UPDATE event SET body = CAST('' AS BLOB) WHERE seq = 2", "event 2 is damaged"),
        ("DELETE FROM event WHERE seq = 2", "event 2 is missing"),
        ("UPDATE snapshot SET body = x'00'", "the snapshot is damaged"),
    ],
)
def test_damaged_record_is_named(path, command, text):
    execute(path, command)
    with pytest.raises(OSError, match=rf"scheduler\.db: {text}"):
        Journal(path)
