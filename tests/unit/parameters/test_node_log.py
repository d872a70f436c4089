"""The log of a server: what a later process finds of it."""

import os
import re
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from xain_parameters.errors import Damaged
from xain_parameters.keys import END
from xain_parameters.messages import Message, Pull, Push
from xain_parameters.node.copy import Copy
from xain_parameters.node.log import DiskLog
from xain_parameters.replica import Replica
from xain_parameters.specs import Plugin, RangeView, TableSpec

RANGE = RangeView(7, 0, END - 1, 1, ("s0",))
TABLE = TableSpec(1, "w", 8, 1, True, "float64", Plugin("add"), Plugin("zeros"), (8, 1))
PULL = Pull(0, (0, 0), 7, 1, 0, 0, 8)


def write(folder: Path, num_pushes: int) -> Path:
    """A log with so many pushes of ones, each forced to disk before the next."""
    synced: SimpleQueue[int] = SimpleQueue()
    log = DiskLog(
        folder, lambda number, segment, sequence: synced.put(sequence), lambda error: None
    )
    copy = Copy(RANGE, 1, Replica(RANGE, (TABLE,), 1), 0, log.open(7))
    copy.write_segment()
    for clock in range(num_pushes):
        push = Push(0, (0, 0), 7, 1, 0, clock, 0, False, start=0, stop=8)
        values = np.ones((8, 1))
        entry = copy.replica.prepare("w0", push, None, values)
        assert entry is not None
        copy.advance(Message(entry, None, values))
        while synced.get() < clock + 1:
            pass  # of what was written before
    log.close()
    (segment,) = (folder / "7").glob("*.log")
    return segment


def replay(folder: Path) -> list[float]:
    log = DiskLog(folder, lambda number, segment, sequence: None, lambda error: None)
    try:
        (recovered,) = log.replay()
    finally:
        log.close()
    assert recovered.replica.sequence == recovered.replica.pull(PULL, None)[0, 0]
    return recovered.replica.pull(PULL, None)[:, 0].tolist()


def test_replay_gives_the_written_records(tmp_path):
    write(tmp_path, 3)
    assert replay(tmp_path) == [3.0] * 8


def test_torn_end_is_dropped_with_a_warning(tmp_path, caplog):
    segment = write(tmp_path, 3)
    segment.write_bytes(segment.read_bytes()[:-5])
    assert replay(tmp_path) == [2.0] * 8
    assert f"log_end_cut file={str(segment)!r} byte={segment.stat().st_size} " in caplog.text
    caplog.clear()
    assert replay(tmp_path) == [2.0] * 8
    assert not caplog.text


@pytest.mark.parametrize("where", [0.0, 0.5], ids=["head", "entries"])
def test_damage_before_the_end_is_named(tmp_path, where):
    """The message has the segment's path once, for the record of its head as for any other."""
    segment = write(tmp_path, 5)
    data = bytearray(segment.read_bytes())
    data[int(len(data) * where)] ^= 1
    segment.write_bytes(data)
    start = f"{re.escape(str(segment))}: the record at byte"
    with pytest.raises(Damaged, match=rf"^{start} \d+ of \d+ is damaged"):
        replay(tmp_path)


def test_segment_that_is_not_whole_leaves_the_one_before(tmp_path):
    segment = write(tmp_path, 2)
    unfinished = segment.with_name("00000002.log")
    unfinished.write_bytes(segment.read_bytes()[:200])
    assert replay(tmp_path) == [2.0] * 8
    assert not unfinished.exists()


@pytest.fixture
def forced(monkeypatch) -> list[Path]:
    """Files and folders that were forced to disk, in order."""
    paths: list[Path] = []
    for name in ("fsync", "fdatasync"):
        call = getattr(os, name)

        def force(fd, call=call):
            paths.append(Path(f"/proc/self/fd/{fd}").readlink())
            call(fd)

        monkeypatch.setattr(os, name, force)
    return paths


def test_replayed_log_is_forced_to_disk_before_it_counts(tmp_path, forced):
    """The process before may have died between writing and fdatasync."""
    segment = write(tmp_path, 2)
    forced.clear()
    assert replay(tmp_path) == [2.0] * 8
    assert forced == [segment]


def test_folder_of_a_range_is_forced_to_disk_before_its_first_segment(tmp_path, forced):
    segment = write(tmp_path, 1)
    assert forced.index(tmp_path) < forced.index(segment) < forced.index(segment.parent)


def test_entries_of_an_earlier_segment_do_not_count_for_a_copy_that_was_filled(tmp_path, request):
    """The log thread may tell of the old segment after the new copy is whole."""
    log = DiskLog(tmp_path, lambda *_: None, lambda error: None)
    request.addfinalizer(log.close)
    old, new = log.open(7).begin(RANGE, 1), log.open(7).begin(RANGE, 1)
    copy = Copy(RANGE, 1, Replica(RANGE, (TABLE,), 1), 0, log.open(7), new)
    copy.advance_synced(old, 905)
    assert copy.synced == -1
    copy.advance_synced(new, 3)
    assert copy.synced == 3
