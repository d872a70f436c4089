"""xain-coordinator, except that it kills itself (kill -9) at its n-th step of one kind.

    python dying.py KIND N ARGUMENTS...

KIND is "sync": just before bytes of a file become durable. Those of SQLite are its own and not seen
here; two kinds are around them: "before-commit", when something has been decided and is not in the
journal yet, and "after-commit", when it is there and nobody has heard of it. "after-opening" is the
same for the opening of round N, in whichever commit that is. The audit log has steps of its own:
"audit-before" a line is written, "audit-torn", when half of it is, "audit-unsynced", and
"audit-after", when nobody has heard of it.
"""

import itertools
import os
import signal
import sys
import time
from typing import Any

from xain_coordinator.access.audit_log import AuditLog
from xain_coordinator.cli.main import main
from xain_coordinator.core.vocabulary.events import RoundOpened
from xain_coordinator.journal import sqlite
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import Record

kind, number = sys.argv.pop(1), int(sys.argv.pop(1))
counter = itertools.count(1)
fsync, write, append = os.fsync, os.write, AuditLog.append
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


def dying_append(log: AuditLog, lines: Any) -> None:
    step("audit-before")
    os.write, os.fsync = dying_write, unsynced
    append(log, lines)
    os.write, os.fsync = write, fsync
    step("audit-after")


def dying_write(fd: int, data: Any) -> int:
    if kind == "audit-torn" and next(counter) == number:
        write(fd, bytes(data)[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return write(fd, data)


def unsynced(fd: int) -> None:
    step("audit-unsynced")
    fsync(fd)


if kind.startswith("audit-"):
    AuditLog.append = dying_append
else:
    os.fsync = dying_fsync
SqliteJournal._commit = dying_commit  # of small groups, too, which are prepared before
sqlite.encode_record = noting_encode
main()
