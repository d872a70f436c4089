"""Files that lines are appended to by a thread."""

import os
import sys
from pathlib import Path

import pytest

from support.logs import capture_logs
from xain_foundation.logs.line_file import AppendedFile, LineFile, why_unwritable
from xain_foundation.logs.logger import get_logger

log = get_logger("xain_coordinator.lines")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="files in use cannot be renamed")


def test_lines_are_appended_in_order(tmp_path):
    """Missing folders are made, and what is there stays."""
    path = tmp_path / "new" / "lines"
    for start in (0, 500):
        file = LineFile(path, str, log)
        for number in range(start, start + 500):
            file.append(number)
        file.close()
    assert path.read_text().split() == list(map(str, range(1000)))


@pytest.mark.parametrize("is_renamed", [True, False])
def test_lines_go_to_a_new_file_once_the_old_one_is_moved(tmp_path, is_renamed):
    path, old = tmp_path / "lines", tmp_path / "lines.1"
    file = LineFile(path, str, log)
    if is_renamed:
        path.rename(old)
        path.write_text("of another\n")
    else:
        path.unlink()
    file.append("new")
    file.close()
    assert path.read_text() == ("of another\nnew\n" if is_renamed else "new\n")
    assert not is_renamed or old.read_text() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_full_disk_loses_lines_and_says_how_many(tmp_path):
    """The next lines are written when there is room again."""
    path = tmp_path / "lines"
    path.symlink_to("/dev/full")
    with capture_logs() as entries:
        file = LineFile(path, str, log)
        file.append(1)
        file.append(2)
        file.close()
    (entry,) = entries
    assert (entry["event"], entry["lines"], entry["path"]) == ("log_lines_lost", 2, str(path))
    assert "No space left" in entry["error"]


def test_lines_that_do_not_fit_whole_are_taken_back(tmp_path):
    """A disk that was full within a line has room again."""
    resource = pytest.importorskip("resource")
    file = AppendedFile(tmp_path / "lines")
    file.append(b"1\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            file.append(b"22222\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.append(b"3\n")
    file.close()
    assert (tmp_path / "lines").read_text() == "1\n3\n"


def test_lines_beyond_the_bound_are_lost(tmp_path):
    """While a disk hangs, memory is bounded."""

    class Short(LineFile):
        max_waiting = 10

    reading, writing = os.pipe()
    with capture_logs() as entries:
        # The thread hangs until the pipe has a byte.
        file = Short(tmp_path / "lines", lambda item: f"{item}{os.read(reading, 1)!r}", log)
        for number in range(1000):
            file.append(number)
        os.write(writing, b"x" * 1000)
        file.close()
    os.close(reading)
    os.close(writing)
    num_lost = sum(entry["lines"] for entry in entries)
    assert num_lost >= 900
    assert len((tmp_path / "lines").read_text().splitlines()) == 1000 - num_lost


def test_reason_why_a_path_is_unwritable_is_told_without_making_a_file(tmp_path):
    (tmp_path / "file").touch()
    assert why_unwritable(tmp_path / "file") == ""
    assert why_unwritable(tmp_path / "a" / "b") == ""
    assert why_unwritable(tmp_path) == "it is a folder"
    assert why_unwritable(tmp_path / "file" / "b") == f"{tmp_path / 'file'} is no folder"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
