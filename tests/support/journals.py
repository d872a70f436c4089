"""Journals as files."""

import sqlite3
import subprocess
import sys
from pathlib import Path

from xain_coordinator.journal.sqlite import SqliteJournal


def copy_journal(source: Path, target: Path) -> None:
    """Copy a journal in a process of its own: closing a file gives up its process's locks on it."""
    target.mkdir(exist_ok=True)
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import pathlib, shutil, sys\n"
            "for path in pathlib.Path(sys.argv[1]).glob('journal.sqlite*'):\n"
            "    shutil.copy(path, sys.argv[2])\n",
            *(str(source), str(target)),
        ],
        check=True,
        timeout=60,
    )


def database(journal: SqliteJournal) -> sqlite3.Connection:
    """The connection of an open journal, whose bounds and settings no other one has."""
    connection = journal._db
    assert connection is not None
    return connection
