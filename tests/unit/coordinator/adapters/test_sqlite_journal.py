"""What SqliteJournal does beyond the contract: with real processes, files and full disks."""

import os
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from xain_coordinator.core.events import RoundClosed, SessionOpened
from xain_coordinator.core.values import Rules
from xain_coordinator.journal.sqlite import APPLICATION_ID, SqliteJournal
from xain_coordinator.ports import JournalError, Record

PREAMBLE = """
import itertools, sys
from fractions import Fraction
from pathlib import Path
from xain_coordinator.core.events import RoundClosed, SessionOpened
from xain_coordinator.core.values import Rules
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import JournalError, Record

rules = Rules(1, 1, 1, Fraction(1), 1, 1, 1, 1.0, "random", "mean", 0, 1.0, 1.0, "empty")
"""

WRITER = (
    PREAMBLE
    + """
journal = SqliteJournal(Path(sys.argv[1]))
journal.append([Record(0.0, SessionOpened("s", rules, 0.0))])
for n in itertools.count():
    journal.append([Record(0.5, RoundClosed(2 * n)), Record(0.5, RoundClosed(2 * n + 1))])
    print(n, flush=True)
"""
)

HOLDER = (
    PREAMBLE
    + """
journal = SqliteJournal(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""
)

OPENER = (
    PREAMBLE
    + """
try:
    SqliteJournal(Path(sys.argv[1]))
except JournalError as error:
    print(error)
"""
)


def rules() -> Rules:
    scope: dict[str, Rules] = {}
    exec(PREAMBLE, scope)
    return scope["rules"]


OPENED = Record(0.0, SessionOpened("s", rules(), 0.0))


def closed(number: int) -> Record:
    return Record(float(number), RoundClosed(number))


def start(script: str, path: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_nothing_acknowledged_is_lost_to_kill_9(tmp_path: Path) -> None:
    """And every append is there whole or not at all."""
    path = tmp_path / "journal"
    with start(WRITER, path) as process:
        assert process.stdout is not None
        try:
            acknowledged = [int(process.stdout.readline()) for _ in range(40)]
        finally:
            process.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in process.stdout if line.endswith("\n")]
    assert acknowledged == list(range(len(acknowledged)))
    with closing(SqliteJournal(path)) as journal:
        records = journal.load()
        assert records[0] == OPENED
        rounds = [r.event.round for r in records[1:] if isinstance(r.event, RoundClosed)]
        assert rounds == list(range(len(records) - 1))
        assert len(rounds) % 2 == 0
        assert len(rounds) >= 2 * len(acknowledged)
        journal.append([closed(len(rounds))])
        assert journal.load()[-1] == closed(len(rounds))


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    """The lock is the kernel's: whoever holds it loses it with its life."""
    path = tmp_path / "journal"
    with start(HOLDER, path) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "open\n"
            with pytest.raises(JournalError, match=f"{path} is in use by another process"):
                SqliteJournal(path)
        finally:
            process.send_signal(signal.SIGKILL)
    with closing(SqliteJournal(path)) as journal:
        journal.append([OPENED])
        second = subprocess.run(
            [sys.executable, "-c", OPENER, str(path)], capture_output=True, text=True, check=True
        )
        assert f"{path} is in use by another process" in second.stdout
        with pytest.raises(JournalError, match="in use"):
            SqliteJournal(path)
        journal.append([closed(0)])
    with closing(SqliteJournal(path)) as journal:
        assert list(journal.load()) == [OPENED, closed(0)]


def test_it_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for number in range(3):
        with closing(SqliteJournal(path)) as journal:
            journal.append([OPENED] if number == 0 else [closed(number)])
    with closing(SqliteJournal(path)) as journal:
        assert list(journal.load()) == [OPENED, closed(1), closed(2)]


def test_it_is_durable(tmp_path: Path) -> None:
    """WAL alone is not: without synchronous=FULL a power cut takes what was acknowledged."""
    with closing(SqliteJournal(tmp_path / "journal")) as journal:
        db = journal._db
        assert db is not None
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_it_may_be_used_from_other_threads(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal")
    journal.append([OPENED])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: journal.append([closed(n), closed(n)]), range(40)))
        records = pool.submit(journal.load).result()
        pool.submit(journal.close).result()
    numbers = [r.event.round for r in records if isinstance(r.event, RoundClosed)]
    assert numbers[::2] == numbers[1::2]  # appends do not mix
    assert sorted(numbers[::2]) == list(range(40))


def test_a_failure_within_a_transaction_takes_it_all_back(tmp_path: Path) -> None:
    with closing(SqliteJournal(tmp_path / "journal")) as journal:
        journal.append([OPENED])
        db = journal._db
        assert db is not None
        db.execute(
            "CREATE TEMP TRIGGER fail BEFORE INSERT ON record WHEN NEW.seq = 3 "
            "BEGIN SELECT RAISE(FAIL, 'no'); END"
        )
        with pytest.raises(JournalError):
            journal.append([closed(1), closed(2), closed(3)])
        assert list(journal.load()) == [OPENED]
        db.execute("DROP TRIGGER fail")
        journal.append([closed(4)])
        assert list(journal.load()) == [OPENED, closed(4)]


def test_a_full_disk(tmp_path: Path) -> None:
    """What was acknowledged stays, and the journal goes on when there is room."""
    path = tmp_path / "journal"
    with closing(SqliteJournal(path)) as journal:
        journal.append([OPENED])
        db = journal._db
        assert db is not None
        db.execute("PRAGMA max_page_count = 2")
        with pytest.raises(JournalError, match=f"{path} has no room left on its disk"):
            journal.append([closed(n) for n in range(10_000)])
        assert list(journal.load()) == [OPENED]
        db.execute("PRAGMA max_page_count = 1000000")
        journal.append([closed(0)])
        assert list(journal.load()) == [OPENED, closed(0)]


def test_a_disk_that_refuses_a_write(tmp_path: Path) -> None:
    """The operating system's refusal, in the middle of the write-ahead log."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "journal"
    with closing(SqliteJournal(path)) as journal:
        journal.append([OPENED])
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
        try:
            with pytest.raises(JournalError, match=f"{path} cannot be read or written"):
                journal.append([closed(n) for n in range(10_000)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list(journal.load()) == [OPENED]
        journal.append([closed(0)])
    with closing(SqliteJournal(path)) as journal:
        assert list(journal.load()) == [OPENED, closed(0)]


@pytest.mark.parametrize(
    "content", [b"garbage, and rather a lot of it\n" * 100, b"SQLite", b"\0\0"]
)
def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=f"{path} is not a journal"):
        SqliteJournal(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("application_id", "version", "message"),
    [(APPLICATION_ID, 2, "has format 2"), (0, 0, "another program"), (7, 1, "another program")],
)
def test_another_format_is_left_alone(
    tmp_path: Path, application_id: int, version: int, message: str
) -> None:
    path = tmp_path / "journal"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE record (x)")
        db.execute(f"PRAGMA application_id = {application_id}")
        db.execute(f"PRAGMA user_version = {version}")
        db.commit()
    content = path.read_bytes()
    with pytest.raises(JournalError, match=message):
        SqliteJournal(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_file_is_a_new_journal(tmp_path: Path) -> None:
    """Whoever created it may have died before the first write."""
    path = tmp_path / "journal"
    path.touch()
    with closing(SqliteJournal(path)) as journal:
        assert list(journal.load()) == []


def test_a_damaged_page(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with closing(SqliteJournal(path)) as journal:
        journal.append([OPENED, *(closed(n) for n in range(1000))])
    content = bytearray(path.read_bytes())
    content[4096:-4096] = b"\xff" * (len(content) - 8192)
    path.write_bytes(content)
    with pytest.raises(JournalError, match=f"{path} is damaged"):
        SqliteJournal(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DELETE FROM record WHERE seq = 1", "record 1 of session 1 is missing"),
        ("UPDATE record SET type = 'RoundSquared' WHERE seq = 1", "'RoundSquared'"),
        ("UPDATE record SET body = '{}' WHERE seq = 1", "a RoundClosed .* round: "),
        ("UPDATE record SET body = '{' WHERE seq = 1", "a RoundClosed .* body: "),
        ('UPDATE record SET body = \'{"round":1,"x":2}\' WHERE seq = 1', "a RoundClosed .* x: "),
    ],
)
def test_a_record_that_cannot_be_read_is_named(
    tmp_path: Path, statement: str, message: str
) -> None:
    """Never passed over: a session without one of its events is another session."""
    path = tmp_path / "journal"
    with closing(SqliteJournal(path)) as journal:
        journal.append([OPENED, closed(1), closed(2)])
    with closing(sqlite3.connect(path)) as db:
        db.execute(statement)
        db.commit()
    with closing(SqliteJournal(path)) as journal, pytest.raises(JournalError, match=message):
        journal.load()


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(JournalError, match=f"{file}/folder cannot be created: Not a directory"):
        SqliteJournal(file / "folder" / "journal")


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=f"{tmp_path} cannot be opened"):
        SqliteJournal(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(0o555)
    if os.access(folder, os.W_OK):
        folder = Path("/proc/self")  # root may write everywhere but there
    with pytest.raises(JournalError, match=f"{folder}/journal cannot be"):
        SqliteJournal(folder / "journal")
