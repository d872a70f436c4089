"""The audit log: what it survives, what it tells of, and whom it keeps out."""

import errno
import os
import stat
from hashlib import sha256
from pathlib import Path

import pytest

from xain_coordinator.access import audit_log
from xain_coordinator.access.audit_log import (
    MAX_LINE_BYTES,
    NO_HASH,
    AuditLog,
    Line,
    NewLine,
    read,
    verify,
)
from xain_coordinator.access.errors import AccessError

NOTES = [
    NewLine(1_800_000_000.5, "session_opened", "alice", {"session": "s1", "rounds": 3}),
    NewLine(1_800_000_001.0, "participant_removed", "alice", {"name": "ward-7"}),
    NewLine(1_800_000_002.125, "session_finished", "bob", {"reason": "done\nwith ü"}),
]


def opened(path: Path) -> tuple[AuditLog, list[Line]]:
    log = AuditLog(path)
    log.patience_s = 0.0
    try:
        return log, list(log.open(lambda: 1_799_999_999.0))
    except AccessError:
        log.close()
        raise


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of four lines, whose first says how the others are written."""
    path = tmp_path / "access" / "audit.log"
    log, lines = opened(path)
    assert not lines
    log.append(NOTES[:2])
    log.append(NOTES[2:])
    log.close()
    return path


def notes(lines: list[Line]) -> list[NewLine]:
    return [NewLine(line.at, line.event, line.by, line.fields) for line in lines[1:]]


def test_lines_are_read_as_they_were_written(path):
    log, lines = opened(path)
    assert notes(lines) == NOTES
    assert [line.sequence for line in lines] == [1, 2, 3, 4]
    assert lines[0].previous == NO_HASH
    assert (log.num_lines, log.last_hash) == (4, verify(path).last_hash)
    log.append([NewLine(1.0, "x", "y")])
    assert verify(path).num_lines == 5
    log.close()


def test_start_reads_the_lines_that_it_wants_and_checks_all(path):
    log = AuditLog(path)
    lines = list(log.open(lambda: 0.0, {"participant_removed"}))
    assert notes([lines[0], *lines]) == [NOTES[1]]
    assert log.num_lines == 4
    log.close()


def test_each_line_has_the_hash_of_the_line_before(path):
    """The hash is that of sha256sum, so that the chain can be checked without this program."""
    raw = path.read_bytes().splitlines(keepends=True)
    lines = list(read(path))
    for before, line in zip(raw, lines[1:], strict=False):
        assert line.previous == sha256(before).hexdigest()
    assert verify(path).last_hash == sha256(raw[-1]).hexdigest()


def test_folder_and_file_are_for_their_owner_alone(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_torn_line_is_cut_off_wherever_it_ends(path, monkeypatch):
    """The lines before it count, and the next one follows them."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # 3,000 of them would take 12 s
    whole = path.read_bytes()
    ends = [0]
    for line in whole.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        num_whole = sum(end <= size for end in ends) - 1
        assert verify(path).num_lines == num_whole
        assert verify(path).num_torn_bytes == size - ends[num_whole]
        log, lines = opened(path)
        assert notes(lines) == NOTES[: max(0, num_whole - 1)], size
        assert log.num_lines == max(1, num_whole)
        log.append(NOTES[:1])
        assert notes(list(read(path)))[-1] == NOTES[0]
        log.close()
        assert verify(path).num_torn_bytes == 0


@pytest.mark.parametrize("change", [0x01, 0x80, None], ids=["a bit", "another", "line end"])
def test_damage_at_any_byte_ends_the_start_with_the_line(path, change, monkeypatch):
    """No damage is taken for a torn line, not even that of the last byte."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    whole = path.read_bytes()
    number = 1
    for at, byte in enumerate(whole):
        damaged = bytearray(whole)
        damaged[at] = ord("\n") if change is None else byte ^ change
        if damaged != whole:
            path.write_bytes(damaged)
            for reading in (verify, opened):
                with pytest.raises(AccessError, match=f"line {number} of .*audit.log"):
                    reading(path)
            assert path.read_bytes() == damaged, "a damaged file is evidence"
        number += byte == ord("\n")


def test_removed_and_exchanged_lines_are_noticed(path):
    lines = path.read_bytes().splitlines(keepends=True)
    for wrong, number in (
        (lines[:1] + lines[2:], 2),
        (lines[1:], 1),
        ([*lines[:1], lines[2], lines[1], *lines[3:]], 2),
        (lines + lines[-1:], 5),
    ):
        path.write_bytes(b"".join(wrong))
        with pytest.raises(AccessError, match=f"line {number} of .*: it does not follow"):
            verify(path)


def test_reading_shows_the_lines_before_the_damage(path):
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 1
    path.write_bytes(whole)
    lines = read(path)
    assert [next(lines).event for _ in range(3)][-1] == "participant_removed"
    with pytest.raises(AccessError, match="is damaged"):
        next(lines)


def test_log_has_one_owner(path):
    """The second one is told, and readers are let in."""
    log, _ = opened(path)
    with pytest.raises(AccessError, match=r"another process has .*audit.log open"):
        opened(path)
    assert verify(path).num_lines == 4
    log.close()
    opened(path)[0].close()


def test_log_of_another_format_is_refused(path):
    first, _ = audit_log.Chain(path).extend([NewLine(1.0, "log_began", "x", {"format": 2})])
    path.write_bytes(first)
    with pytest.raises(AccessError, match="of the format 2"):
        opened(path)


def test_lines_of_any_size_or_kind_that_cannot_be_written_leave_the_log_as_it_was(path):
    log, _ = opened(path)
    before = path.read_bytes()
    for fields in ({"text": "x" * MAX_LINE_BYTES}, {"number": float("nan")}):
        with pytest.raises(ValueError, match=r"bytes|JSON"):
            log.append([NOTES[0], NewLine(1.0, "x", "y", fields)])
    assert path.read_bytes() == before
    log.append(NOTES[:1])
    log.close()
    assert verify(path).num_lines == 5


@pytest.mark.parametrize("step", ["write", "fsync"])
def test_full_disk_leaves_no_part_of_a_line(path, monkeypatch, step):
    """The lines are refused, and those after them are written once there is room again."""
    log, _ = opened(path)
    write, fsync = os.write, os.fsync
    fails = True

    def writes(fd, data):
        if not fails or step != "write":
            return write(fd, data)
        if len(data) < 200:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, bytes(data)[:100])

    def syncs(fd):
        nonlocal fails
        if fails and step == "fsync":
            fails = False  # cutting the lines off succeeds
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "write", writes)
    monkeypatch.setattr(os, "fsync", syncs)
    before = path.read_bytes()
    with pytest.raises(OSError, match=r"No space|Input/output"):
        log.append(NOTES[:1])
    assert path.read_bytes() == before
    fails = False
    log.append(NOTES[:1])
    log.close()
    assert verify(path).num_lines == 5


def test_log_whose_disk_has_failed_is_not_written_again(path, monkeypatch):
    """The content of the disk is unknown after a failed sync that could not be undone."""
    log, _ = opened(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(OSError, match="broken"):
            log.append(NOTES[:1])
    with pytest.raises(OSError, match="restart"):
        log.append(NOTES[:1])
    log.close()


def test_log_that_was_moved_or_changed_takes_no_line(path):
    """A line in a file that no start reads would not count."""
    log, _ = opened(path)
    moved = path.rename(path.with_name("moved"))
    with pytest.raises(OSError, match="has moved or changed it"):
        log.append(NOTES[:1])
    moved.rename(path)
    log.append(NOTES[:1])
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(OSError, match="has moved or changed it"):
        log.append(NOTES[:1])
    log.close()


def test_unreadable_log_is_named(tmp_path):
    (tmp_path / "audit.log").mkdir()
    with pytest.raises(AccessError, match=r"audit.log cannot be opened: Is a directory"):
        opened(tmp_path / "audit.log")
