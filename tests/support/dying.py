"""xain-coordinator, except that it kills itself (kill -9) at its n-th step of one kind.

    python dying.py KIND N ARGUMENTS...

KIND is "sync": just before bytes of a file become durable. Those of SQLite are its own and not seen
here; two kinds are around them: "before-commit", when something has been decided and is not in the
journal yet, and "after-commit", when it is there and nobody has heard of it. "after-opening" is the
same for the opening of round N, in whichever commit that is. The steps of the audit log are
"audit-before", "audit-torn", "audit-unsynced" and "audit-after"; see access_loop.
"""

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from xain_coordinator.cli.main import main
from xain_coordinator.core.vocabulary.events import RoundOpened
from xain_coordinator.journal import sqlite
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import Record

kind, number = sys.argv.pop(1), int(sys.argv.pop(1))
counter = itertools.count(1)
fsync = os.fsync
commit, encode_record = SqliteJournal._commit, sqlite.encode_record
has_opened = False  # round `number`, in a record that was encoded


def noting_encode(record: Record) -> Any:
    global has_opened
    has_opened |= isinstance(record.event, RoundOpened) and record.event.round == number
    return encode_record(record)


def step(name: str) -> None:
    if name == kind and next(counter) == number:
        os.kill(os.getpid(), signal.SIGKILL)


def dying_fsync(fd: int) -> None:
    step("sync")
    fsync(fd)


def dying_commit(journal: SqliteJournal, written: Any) -> None:
    if kind == "before-commit":
        time.sleep(0.05)  # a slow disk: what does not wait for it gets far
    step("before-commit")
    commit(journal, written)
    step("after-commit")
    if has_opened and kind == "after-opening":
        os.kill(os.getpid(), signal.SIGKILL)


if kind.startswith("audit-"):
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.access_loop import die_at

    die_at(kind.removeprefix("audit-"), number)
else:
    os.fsync = dying_fsync
SqliteJournal._commit = dying_commit  # of small groups, too, which are prepared before
sqlite.encode_record = noting_encode
main()
