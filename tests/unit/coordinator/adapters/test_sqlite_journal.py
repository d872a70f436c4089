"""SqliteJournal beyond the contract: with real processes, files and full disks."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from support.journals import database
from support.logs import capture_logs
from xain_coordinator.core.machine.evolve import begin
from xain_coordinator.core.view.accounts import Account
from xain_coordinator.core.view.history import History
from xain_coordinator.core.vocabulary.events import RoundClosed, SessionFinished, SessionOpened
from xain_coordinator.core.vocabulary.values import Rules
from xain_coordinator.journal.codec import FORMAT, digest_of
from xain_coordinator.journal.restore import restore
from xain_coordinator.journal.sqlite import APPLICATION_ID, MAX_PREPARED_BYTES, SqliteJournal
from xain_coordinator.journal.wal import require_sound_log
from xain_coordinator.ports import JournalError, Record, Snapshot

PREAMBLE = """
import itertools, sys
from fractions import Fraction
from pathlib import Path
from xain_coordinator.core.vocabulary.events import RoundClosed, SessionOpened
from xain_coordinator.core.machine.evolve import begin
from xain_coordinator.core.vocabulary.values import Rules
from xain_coordinator.core.view.history import History
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import JournalError, Record, Snapshot

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

# Appends of two records each, and a snapshot now and then. In the second half the log begins anew
# every few pages, as it does when it is full, so that old pages follow the new ones.
TORN = (
    PREAMBLE
    + """
journal = SqliteJournal(Path(sys.argv[1]))
opened = SessionOpened("s", rules, 0.0)
journal.append([Record(0.0, opened)])
for n in range(24):
    if n == 12 and sys.argv[2] == "checkpoints":
        journal._db.execute("PRAGMA wal_autocheckpoint=20")
    journal.append([Record(0.5, RoundClosed(2 * n)), Record(0.5, RoundClosed(2 * n + 1))])
    if n % 5 == 4:
        journal.save(Snapshot(2 * n + 3, 0.5, begin(opened), History()))
print("written", flush=True)
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


def start(script: str, path: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", script, str(path), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def journal(path: Path) -> Iterator[SqliteJournal]:
    """A journal of one record."""
    with closing(SqliteJournal(path)) as journal:
        journal.append([OPENED])
        yield journal


def change(path: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.create_function("digest_of", -1, digest_of)
        db.execute(statement, values)
        db.commit()


def test_nothing_acknowledged_is_lost_to_kill_9(path):
    """Each append is also in the journal whole or not at all."""
    with start(WRITER, path) as process:
        try:
            acknowledged = [int(process.stdout.readline()) for _ in range(40)]
        finally:
            process.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in process.stdout if line.endswith("\n")]
    assert acknowledged == list(range(len(acknowledged)))
    with closing(SqliteJournal(path)) as journal:
        records = list(journal.load())
        assert records[0] == OPENED
        rounds = [r.event.round for r in records[1:] if isinstance(r.event, RoundClosed)]
        assert rounds == list(range(len(records) - 1))
        assert len(rounds) % 2 == 0
        assert len(rounds) >= 2 * len(acknowledged)
        journal.append([closed(len(rounds))])
        assert list(journal.load())[-1] == closed(len(rounds))


def test_one_process_writes_at_a_time(path):
    """The lock is the kernel's: its holder loses it with its life."""
    with start(HOLDER, path) as process:
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


def test_journal_is_durable(journal):
    """WAL alone is not: without synchronous=FULL a power cut takes what was acknowledged."""
    db = database(journal)
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_a_full_disk(path, journal):
    """Acknowledged records stay, and the journal goes on when there is room."""
    db = database(journal)
    db.execute("PRAGMA max_page_count = 2")
    with pytest.raises(JournalError, match=f"{path} has no room left on its disk"):
        journal.append([closed(n) for n in range(10_000)])
    assert list(journal.load()) == [OPENED]
    db.execute("PRAGMA max_page_count = 1000000")
    journal.append([closed(0)])
    assert list(journal.load()) == [OPENED, closed(0)]


@pytest.mark.parametrize("num_bytes", [20_000, MAX_PREPARED_BYTES + 1])
@pytest.mark.parametrize("is_prepared", [True, False])
def test_room_is_made_on_a_full_disk(num_bytes, is_prepared, journal):
    """The append is tried again, once: on a disk that stays full it fails."""
    db = database(journal)
    (num_pages,) = db.execute("PRAGMA page_count").fetchone()
    asked = []

    def make_room():
        asked.append(True)
        db.execute("PRAGMA max_page_count = 1000000")
        return True

    journal.make_room = make_room
    db.execute(f"PRAGMA max_page_count = {num_pages + 1}")
    objects = {"a": bytes(num_bytes)}
    if is_prepared:
        journal.prepare([closed(0)], objects)()
    else:
        journal.append([closed(0)], objects)
    assert asked == [True]
    assert list(journal.load()) == [OPENED, closed(0)]
    assert journal.read_object("a") == bytes(num_bytes)
    (num_pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {num_pages + 1}")
    journal.make_room = lambda: True
    with pytest.raises(JournalError, match="has no room left on its disk"):
        journal.append([closed(1)], {"b": bytes(num_bytes)})
    assert list(journal.load()) == [OPENED, closed(0)]


def test_no_room_for_a_snapshot(tmp_path, journal):
    """An append needs less than that, and goes on; the snapshot before stays."""
    chance = Random(1)
    names = [f"{chance.getrandbits(512):0128x}" for _ in range(200)]  # they do not compress
    before = Snapshot(1, 0.0, begin(OPENED.event), History())
    large = replace(before, history=History(accounts=dict.fromkeys(names, Account())))
    path = tmp_path / "journal"
    journal.save(before)
    db = database(journal)
    (num_pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {num_pages + 2}")
    with pytest.raises(JournalError, match=f"{path} has no room left on its disk"):
        journal.save(large)
    assert journal.snapshot() == before
    journal.append([closed(0)])
    db.execute("PRAGMA max_page_count = 1000000")
    journal.save(large)
    assert journal.snapshot() == large
    assert list(journal.load()) == [OPENED, closed(0)]


def test_only_the_latest_snapshot_takes_room(path):
    """The bound is for the snapshots of all sessions together."""
    with closing(SqliteJournal(path)) as journal:
        for session_id in ("one", "two", "three"):
            opened = SessionOpened(session_id, rules(), 0.0)
            journal.append([Record(0.0, opened)])
            for _ in range(2):
                journal.save(Snapshot(1, 0.0, begin(opened), History()))
        snapshot = journal.snapshot()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM snapshot").fetchone() == (1,)
    assert snapshot.session.session_id == "three"


def test_a_disk_that_refuses_a_write(tmp_path):
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
def test_a_file_that_is_no_database_is_left_alone(tmp_path, content, path):
    path.write_bytes(content)
    with pytest.raises(JournalError, match=f"{path} is not a journal"):
        SqliteJournal(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("application_id", "version", "message"),
    [
        (APPLICATION_ID, FORMAT + 1, f"has format {FORMAT + 1}"),
        (0, 0, "another program"),
        (7, 1, "another program"),
    ],
)
def test_another_format_is_left_alone(tmp_path, application_id, version, message, path):
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


# --- torn writes ---


@dataclass(frozen=True)
class Killed:
    """The files of a journal whose process was killed, and all that was in it."""

    database: bytes
    log: bytes
    records: Sequence[Record]

    def put(self, folder: Path, database: bytes | None = None, log: bytes | None = None) -> Path:
        """Lay them down, or what became of them."""
        path = folder / "journal"
        path.write_bytes(self.database if database is None else database)
        (folder / "journal-wal").write_bytes(self.log if log is None else log)
        return path


@pytest.fixture(scope="module", params=["plain", "checkpoints"])
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    path = tmp_path_factory.mktemp("killed") / "journal"
    with start(TORN, path, request.param) as process:
        try:
            assert process.stdout.readline() == "written\n"
        finally:
            process.send_signal(signal.SIGKILL)
    records = [OPENED, *(Record(0.5, RoundClosed(n)) for n in range(48))]
    return Killed(path.read_bytes(), path.with_name("journal-wal").read_bytes(), records)


def goes_on(path: Path, records: Sequence[Record]) -> int:
    """The journal holds whole appends from the beginning, and no snapshot of anything else; it
    takes another one, and is opened again. Returns how many records it had."""
    with closing(SqliteJournal(path)) as journal:
        found = list(journal.load())
        assert found == records[: len(found)]
        assert len(found) == 0 or len(found) % 2 == 1, "half an append"
        snapshot = journal.snapshot()
        assert snapshot is None or snapshot.num_records <= len(found)
        added = [closed(7)] if found else [OPENED]
        journal.append(added)
    with closing(SqliteJournal(path)) as journal:
        assert list(journal.load()) == [*found, *added]
        assert journal.snapshot() == snapshot
    path.unlink()
    return len(found)


FRAME_BYTES = 4096 + 24  # a page and its header, after a header of 32 bytes
TORN_ENDS = {
    "cut": lambda log, offset, chance: log[:offset],
    "zeros": lambda log, offset, chance: log[:offset] + bytes(len(log) - offset),
    "garbage": lambda log, offset, chance: log[:offset] + chance.randbytes(len(log) - offset),
}


def flipped(content: bytes, offset: int, chance: Random) -> bytes:
    """The content with one bit of the byte at `place` changed."""
    bit = 1 << chance.randrange(8)
    return content[:offset] + bytes([content[offset] ^ bit]) + content[offset + 1 :]


def offsets_in(log: bytes, chance: Random) -> list[int]:
    """The borders of all frames, and some places at random."""
    frames = range(32, len(log), FRAME_BYTES)
    offsets = {0, 1, 16, 31, len(log) - 1}
    offsets |= {offset for frame in frames for offset in (frame, frame + 1, frame + 23, frame + 24)}
    return sorted(offsets | {chance.randrange(len(log)) for _ in range(60)})


@pytest.mark.parametrize("damage", TORN_ENDS)
def test_a_torn_log_is_as_if_the_last_appends_had_not_been(killed, damage, tmp_path):
    """Wherever a power cut or a bad disk leaves off: what is before it is there, whole append by
    whole append, and the session goes on from that."""
    chance = Random(damage)
    numbers = [
        goes_on(
            killed.put(tmp_path, log=TORN_ENDS[damage](killed.log, offset, chance)), killed.records
        )
        for offset in offsets_in(killed.log, chance)
    ]
    assert numbers == sorted(numbers), "what is torn later has kept less"
    assert numbers[0] < numbers[-1]
    assert goes_on(killed.put(tmp_path), killed.records) == len(killed.records)


def test_flipped_bit_in_the_log_is_named_unless_it_costs_the_last_append_only(killed, tmp_path):
    """SQLite drops all that follows the bit without a word. The error names the log and the place,
    and leaves the files as they are; a log that is cut there, as the error says, is read again."""
    chance = Random(10)
    num_named = 0
    for offset in offsets_in(killed.log, chance):
        log = flipped(killed.log, offset, chance)
        path = killed.put(tmp_path, log=log)
        try:
            with closing(SqliteJournal(path)) as journal:
                num_lost = len(killed.records) - len(list(journal.load()))
        except JournalError as error:
            message = str(error)
        else:
            assert num_lost <= 2
            continue
        assert path.with_name("journal-wal").read_bytes() == log
        found = re.search(
            rf"log {path}-wal is damaged at byte (\d+).*truncate -s (\d+) {path}", message
        )
        assert found is not None, message
        end = int(found[2])
        assert int(found[1]) == end <= offset
        os.truncate(f"{path}-wal", end)
        goes_on(path, killed.records)
        num_named += 1
    assert num_named > 60


def test_torn_end_in_any_order_of_writes_is_not_taken_for_damage(killed, tmp_path):
    """Before a transaction is synced, its frames reach the disk in any order: a power cut may leave
    the last ones without the first."""
    log = killed.log
    frames = [log[at : at + FRAME_BYTES] for at in range(32, len(log), FRAME_BYTES)]
    current = [n for n, frame in enumerate(frames) if frame[8:16] == log[16:24]]
    commits = [n for n in current if frames[n][4:8] != bytes(4)]
    last = range(commits[-2] + 1, commits[-1] + 1)
    for lost in last:
        torn = [bytes(FRAME_BYTES) if n == lost else frame for n, frame in enumerate(frames)]
        path = killed.put(tmp_path, log=log[:32] + b"".join(torn))
        assert goes_on(path, killed.records) == len(killed.records) - 2


def test_rest_of_a_killed_transaction_behind_a_torn_end_is_no_damage(tmp_path):
    """A kill leaves frames of a transaction without its end, and the next transaction overwrites
    the first of them only. A power cut that tears that one must not make the rest look like
    acknowledged records."""
    path, log = tmp_path / "journal", tmp_path / "journal-wal"
    with closing(SqliteJournal(path)) as journal:
        journal.append([OPENED])
        database, sound = path.read_bytes(), log.read_bytes()
        journal.append([closed(n) for n in range(1000)])
        killed = log.read_bytes()[:-FRAME_BYTES]
    path.write_bytes(database)
    log.write_bytes(killed)
    with closing(SqliteJournal(path)) as journal:
        assert list(journal.load()) == [OPENED]
        journal.append([closed(n) for n in range(200)])
        written = log.read_bytes()
    assert len(written) == len(killed), "the rest of the killed transaction is still there"
    path.write_bytes(database)
    torn = len(sound)
    log.write_bytes(written[:torn] + bytes(FRAME_BYTES) + written[torn + FRAME_BYTES :])
    with closing(SqliteJournal(path)) as journal:
        assert list(journal.load()) == [OPENED]


@pytest.mark.skipif(sys.platform == "win32", reason="measures the memory of a process")
def test_large_log_is_read_by_blocks(path):
    """After the transaction that brings a new format the log is as large as the journal."""
    with closing(SqliteJournal(path)) as journal:
        journal.append([OPENED])
        log = path.with_name("journal-wal").read_bytes()
    path.with_name("journal-wal").write_bytes(log + bytes(64 << 20))
    tracemalloc.start()
    try:
        require_sound_log(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 32 << 20


def test_a_torn_checkpoint_loses_nothing(killed, tmp_path):
    """Pages that are copied from the log into the database stay in the log until all of them are on
    the disk: wherever the copying stops, no record is lost."""
    path = killed.put(tmp_path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = path.read_bytes()
    before = killed.database.ljust(len(whole), b"\xa5")
    in_log = {
        int.from_bytes(killed.log[frame : frame + 4], "big") - 1
        for frame in range(32, len(killed.log), FRAME_BYTES)
        if killed.log[frame + 8 : frame + 16] == killed.log[16:24]  # not those of an earlier log
    }
    for offset in range(0, len(whole), 1023):
        torn = bytearray(before)
        for page in in_log:  # the copying goes by pages; some are there, one half, some not
            begin, end = page * 4096, min((page + 1) * 4096, offset)
            torn[begin:end] = whole[begin:end]
        path = killed.put(tmp_path, database=bytes(torn))
        assert goes_on(path, killed.records) == len(killed.records)


def read_or_told(path: Path, records: Sequence[Record]) -> str | None:
    """None if these records are in it, else what is said."""
    try:
        with closing(SqliteJournal(path)) as journal:
            assert list(journal.load()) == records
    except JournalError as error:
        return str(error)
    return None


@pytest.mark.parametrize("damage", ["cut", "zeros", "garbage"])
def test_a_torn_page_is_told_and_left_alone(tmp_path, damage, path):
    """In the database itself there is no second copy. Whatever is wrong with the rest of a page, or
    of the file, nothing else is taken for what was acknowledged, and whoever can repair the file
    finds it as it was."""
    records = [OPENED, *(closed(n) for n in range(600))]
    with closing(SqliteJournal(path)) as journal:
        for record in records:
            journal.append([record])
    content = path.read_bytes()
    chance = Random(damage)
    num_told = 0
    for offset in range(2, len(content), 151):  # one byte is an empty file to SQLite
        end = len(content) if damage == "cut" else offset // 4096 * 4096 + 4096
        torn = TORN_ENDS[damage](content[:end], offset, chance) + content[end:]
        path.write_bytes(torn)
        told = read_or_told(path, records)
        if told is not None:
            assert str(path) in told
            assert "restore" in told or "is not a journal" in told
            assert "\n" not in told
            assert path.read_bytes() == torn
            num_told += 1
    assert num_told > 200
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_file_is_a_new_journal(path):
    """A process may create the file and die before its first write."""
    path.touch()
    with closing(SqliteJournal(path)) as journal:
        assert list(journal.load()) == []


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DELETE FROM record WHERE seq = 1", "record 1 of session 1 is missing"),
        ("UPDATE record SET type = 'RoundSquared' WHERE seq = 1", "does not know events of type"),
        ("UPDATE record SET body = '{}' WHERE seq = 1", "a RoundClosed .* round: "),
        ("UPDATE record SET body = '{' WHERE seq = 1", "a RoundClosed .* body: "),
        ('UPDATE record SET body = \'{"round":1,"x":2}\' WHERE seq = 1', "a RoundClosed .* x: "),
        ("UPDATE record SET body = CAST(x'7bff' AS TEXT) WHERE seq = 1", "damaged: it has text"),
        ("UPDATE record SET at = 'noon' WHERE seq = 1", "record 1 of session 1 is missing"),
        ("UPDATE record SET seq = 'two' WHERE seq = 2", "its last record has no number"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(statement, message, path):
    """Never passed over: a session without one of its events is another session."""
    with closing(SqliteJournal(path)) as journal:
        journal.append([OPENED, closed(1), closed(2)])
    change(path, statement)
    if "CAST" not in statement:
        # With the right checksum: another version of the program may write what this one cannot
        # read.
        change(path, "UPDATE record SET digest = digest_of(session, seq, at, type, body)")
    with pytest.raises(JournalError, match=message), closing(SqliteJournal(path)) as journal:
        list(journal.load())


CHANGES = {
    "a digit of the body": "UPDATE record SET body = replace(body, '2', '3') WHERE seq = 2",
    "the time": "UPDATE record SET at = at + 0.5 WHERE seq = 2",
    "the type": "UPDATE record SET type = 'RoundResumed' WHERE seq = 2",
    "the checksum": "UPDATE record SET digest = zeroblob(8) WHERE seq = 2",
    "the place of another record": (
        "UPDATE record SET (at, type, body, digest) = "
        "(SELECT at, type, body, digest FROM record WHERE seq = 1) WHERE seq = 2"
    ),
}


@pytest.mark.parametrize("statement", CHANGES.values(), ids=CHANGES)
def test_changed_record_is_named_and_not_used(statement, path):
    """A flipped bit in a number would make another session of it without a word."""
    with closing(SqliteJournal(path)) as journal:
        journal.append([OPENED, closed(1), closed(2)])
    change(path, statement)
    with closing(SqliteJournal(path)) as journal:
        with pytest.raises(JournalError) as caught:
            list(journal.load())
        message = str(caught.value)
        assert f"{path} is damaged: record 2 of session 1" in message
        assert "--new-session" in message
        journal.append([OPENED])  # as --new-session does
        assert list(journal.load()) == [OPENED]


def test_changed_name_of_an_owner_is_damage_and_not_another_copy(path):
    with closing(SqliteJournal(path)) as journal:
        journal.note_owners("s", ["00000001.a", "00000002.b"])
    change(path, "UPDATE owner SET name = '00000002.c' WHERE name = '00000002.b'")
    told = pytest.raises(JournalError, match="owner, of session s, has changed")
    with closing(SqliteJournal(path)) as journal, told:
        journal.owners("s")


def test_damaged_snapshot_is_passed_over_for_the_records(path):
    with closing(SqliteJournal(path)) as journal:
        journal.append([OPENED])
        journal.save(Snapshot(1, 0.0, begin(OPENED.event), History()))
        assert journal.snapshot() is not None
    with closing(sqlite3.connect(path)) as db:
        ((body,),) = db.execute("SELECT body FROM snapshot").fetchall()
    change(path, "UPDATE snapshot SET body = ?", flipped(body, len(body) // 2, Random(1)))
    with closing(SqliteJournal(path)) as journal, capture_logs() as logs:
        restored = restore(journal)
    assert restored[0].num_records == 1
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("snapshot_ignored", "warning")
    ]


def test_any_flipped_bit_of_the_database_is_named_or_changes_nothing(path):
    records = [OPENED, *(closed(n) for n in range(120))]
    with closing(SqliteJournal(path)) as journal:
        for record in records:
            journal.append([record])
    content = path.read_bytes()
    chance = Random(10)
    num_told = 0
    for _ in range(150):
        offset = chance.randrange(100, len(content))
        path.write_bytes(flipped(content, offset, chance))
        num_told += read_or_told(path, records) is not None
    assert num_told > 30


def test_objects_beyond_the_memory_are_read_from_the_file(tmp_path):
    """Objects of an earlier process are, too."""
    path = tmp_path / "journal.sqlite"
    objects = {f"0/{name}.1/journal": name.encode() * 4 for name in "abc"}
    with closing(SqliteJournal(path)) as journal:
        journal.max_recent_bytes = 10
        journal.append([OPENED], objects)
        assert len(journal._recent) == 2
        assert {key: journal.read_object(key) for key in objects} == objects
    with closing(SqliteJournal(path)) as journal:
        assert {key: journal.read_object(key) for key in objects} == objects


def test_prepare_does_not_wait_for_another_thread(journal):
    """While a group is prepared, the next one is written when it is committed."""
    commits = [journal.prepare([Record(0.5, RoundClosed(n))]) for n in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(commit) for commit in commits]:
            done.result(timeout=60)
    assert [record.event for record in journal.load(1)] == [RoundClosed(0), RoundClosed(1)]


def test_prepare_leaves_large_records_to_the_commit(journal):
    """The caller is the event loop, which writes no megabytes."""
    large = Record(0.5, SessionFinished("x" * MAX_PREPARED_BYTES, 0.5))
    commit = journal.prepare([large])
    assert not database(journal).in_transaction
    commit()
    assert list(journal.load(1)) == [large]


def test_readers_at_the_end_of_a_session_do_not_search_all_records(tmp_path):
    """SQLite's steps are counted; readers of events ask several times a second."""
    num_records = 5000
    with closing(SqliteJournal(tmp_path / "journal.sqlite")) as journal:
        closed = [Record(0.5, RoundClosed(n)) for n in range(num_records - 1)]
        journal.append([Record(0.0, SessionOpened("old", rules(), 0.0)), *closed])
        assert journal.session_ids() == ["old"]
        journal.append([Record(0.0, SessionOpened("new", rules(), 0.0))])
        steps = Counter[str]()
        database(journal).set_progress_handler(lambda: steps.update(["100"]), 100)
        assert journal.session_ids() == ["old", "new"]
        for session_id, end in (("old", num_records), ("new", 1)):
            assert list(journal.records_of(session_id, end)) == []
        assert steps["100"] < 5


def test_copy_beside_appends_is_a_whole_journal(tmp_path):
    """Appends go on while pages are copied, and the copy has the records up to one of them, with
    their checksums. A copy that cannot be written leaves nothing and harms nothing."""
    copy = tmp_path / "copy.sqlite"
    with closing(SqliteJournal(tmp_path / "journal.sqlite")) as journal:
        journal.copied_pages = 1
        journal.append([OPENED, *map(closed, range(5000))])
        with ThreadPoolExecutor(1) as pool:
            copying = pool.submit(journal.copy_to, copy)
            num_beside = 0
            while not copying.done():
                journal.append([closed(5000 + num_beside)])
                num_beside += 1
            copying.result()
        assert num_beside > 10
        records = list(journal.load())
        with pytest.raises(JournalError):
            journal.copy_to(tmp_path / "no" / "folder")
        journal.append([closed(0)])
    with closing(SqliteJournal(copy)) as copied:
        assert copied.check()[0] == 1
        found = list(copied.load())
    assert found == records[: len(found)]
    assert len(found) > 5000


def test_close_ends_a_copy_under_way_and_frees_the_file(tmp_path):
    """Else a coordinator that opens its next session beside a backup would find the file locked."""
    path, copy = tmp_path / "journal.sqlite", tmp_path / "copy.sqlite"
    journal = SqliteJournal(path)
    journal.copied_pages = 1
    journal.append([OPENED, *map(closed, range(20_000))])
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(journal.copy_to, copy)
        while not copy.exists():
            time.sleep(0.001)  # a poll: it ends when the copy has begun
        journal.close()
        SqliteJournal(path).close()
        with pytest.raises(JournalError):
            copying.result()
    assert not copy.exists()
