"""The log of a server: what it has acknowledged, on disk.

Each range has a folder with one segment, a file of records: its head, its state as tiles, Whole,
and then the entries. When a segment has grown, a new one is begun; the old one is removed when the
new one is whole. One thread writes the records of all ranges and forces each batch to disk with one
fdatasync a file: the more there is to write, the more entries share one.

A record is, little-endian:

    u32 magic | u64 bytes of the frame | u64 bytes of the file that were on disk before | u32 CRC-32

and a frame as on the wire, see messages. A crash tears the end of a file off, which nobody was
told of; a record that was on disk and cannot be read is damage, and is told with its place.
"""

import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import numpy as np

from xain_foundation.durable import make_directory, sync_directory
from xain_foundation.logs.group_commit import GroupCommit
from xain_foundation.logs.logger import get_logger
from xain_parameters.errors import Damaged, ParameterError
from xain_parameters.messages import Declare, Entry, Message, Tile, Whole, decode_head
from xain_parameters.replica import Replica
from xain_parameters.specs import RangeView, decode_table
from xain_parameters.transport.frames import pieces_of

logger = get_logger(__name__)

MAGIC = 0x4C505831
_HEAD = struct.Struct("<IQQI")
_SIZES = struct.Struct("<IIQ")
# A segment is replaced when its entries are larger than this and than its tiles.
MIN_SEGMENT_BYTES = 64 << 20


class _SegmentHead(msgspec.Struct, frozen=True):
    range: RangeView
    generation: int


class Recovered(NamedTuple):
    range: RangeView
    generation: int
    replica: Replica
    made_in: int


class _Segment:
    """A segment file that is open for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self.num_bytes = self._file.tell()
        self._num_durable = self.num_bytes
        self.is_dirty = False

    def write(self, pieces: list[bytes | memoryview]) -> None:
        crc = 0
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
        size = sum(len(piece) for piece in pieces)
        for piece in (_HEAD.pack(MAGIC, size, self._num_durable, crc), *pieces):
            view = memoryview(piece)
            while view:
                view = view[self._file.write(view) :]
        self.num_bytes += _HEAD.size + size
        self.is_dirty = True

    def sync(self) -> None:
        os.fdatasync(self._file.fileno())
        self._num_durable = self.num_bytes
        self.is_dirty = False

    def close(self) -> None:
        self._file.close()


class DiskRangeLog:
    """The log of one range on disk; see ports.RangeLog. Methods put operations into the queue of
    the log's thread."""

    def __init__(self, log: "DiskLog", number: int, folder: Path) -> None:
        self._log = log
        self._number = number
        self._folder = folder
        # Used by callers, under the lock of the range:
        self._num_entry_bytes = self._num_next_bytes = self._num_base_bytes = 0
        self._last = 0  # the number of the last segment
        # Used by the thread of the log:
        self._current: _Segment | None = None
        self._next: _Segment | None = None
        self._sequence = -1  # the last entry in the current segment

    def resume(self, path: Path, sequence: int) -> None:
        """Go on with a segment that was replayed. What was read of it may not be on disk yet: the
        process before this one may have died between writing and fdatasync."""
        self._current = _Segment(path)
        self._current.sync()
        self._last = int(path.stem)
        self._sequence = sequence
        self._num_base_bytes = self._current.num_bytes

    # --- of callers, under the lock of the range ---

    def append(self, message: Message) -> None:
        self._num_entry_bytes += _num_bytes(message)
        self._log.put(self, lambda: self._write(message, (self._current, self._next)))

    def begin(self, range_: RangeView, generation: int) -> int:
        """Queue the beginning of a new segment. Returns its number."""
        self._num_next_bytes = 0
        self._last += 1
        number = self._last
        head = msgspec.msgpack.encode(_SegmentHead(range_, generation))
        self._log.put(self, lambda: self._begin(number, head))
        return number

    def append_next(self, message: Message) -> None:
        self._num_next_bytes += _num_bytes(message)
        self._log.put(self, lambda: self._write(message, (self._next,)))

    def abandon(self) -> None:
        self._log.put(self, self._abandon)

    def finish(self, message: Message) -> None:
        self._num_entry_bytes, self._num_base_bytes = 0, self._num_next_bytes
        self._log.put(self, lambda: self._finish(message))

    def wants_new_segment(self) -> bool:
        return self._num_entry_bytes > max(MIN_SEGMENT_BYTES, self._num_base_bytes)

    def drop(self) -> None:
        self._log.put(self, self._delete)

    # --- of the thread ---

    def _write(self, message: Message, segments: Iterable[_Segment | None]) -> None:
        pieces = pieces_of(message)
        for segment in segments:
            if segment is not None:
                segment.write(pieces)
                if segment is self._current and isinstance(message.head, Entry):
                    self._sequence = message.head.sequence

    def _begin(self, number: int, head: bytes) -> None:
        self._abandon()
        make_directory(self._folder)
        self._next = _Segment(self._folder / f"{number:08d}.log")
        self._next.write([head])

    def _abandon(self) -> None:
        if self._next is not None:
            self._next.close()
            self._next.path.unlink()
            self._next = None

    def _finish(self, message: Message) -> None:
        """Write the end of the new segment, and delete the segment that it replaces."""
        assert self._next is not None
        assert isinstance(message.head, Whole)
        self._next.write(pieces_of(message))
        self._next.sync()
        sync_directory(self._folder)
        if self._current is not None:
            self._current.close()
            self._current.path.unlink()
        self._current, self._next = self._next, None
        self._sequence = message.head.sequence

    def _delete(self) -> None:
        self._abandon()
        if self._current is not None:
            self._current.close()
            self._current.path.unlink()
            self._current = None
            self._sequence = -1
        if self._folder.exists():
            for path in self._folder.glob("*.log"):
                path.unlink()
            self._folder.rmdir()

    def sync(self) -> tuple[int, int]:
        """Force to disk what was written. Returns the current segment's number and last entry."""
        for segment in (self._current, self._next):
            if segment is not None and segment.is_dirty:
                segment.sync()
        return 0 if self._current is None else int(self._current.path.stem), self._sequence

    def close(self) -> None:
        for segment in (self._current, self._next):
            if segment is not None:
                segment.close()


_Step = tuple[DiskRangeLog, Callable[[], None]]


class DiskLog:
    """The logs of a server's ranges, below `folder`, and the thread that writes them.

    on_synced: called in that thread with the range, the number of its segment, and the last entry
        of the segment on disk.
    on_failed: called once when the disk refuses; nothing is written after that.
    Raises ParameterError if another server has its log there.
    """

    def __init__(
        self,
        folder: Path,
        on_synced: Callable[[int, int, int], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._folder = folder
        self._on_synced = on_synced
        self._on_failed = on_failed
        self._ranges: dict[int, DiskRangeLog] = {}
        self._lock = threading.Lock()  # of the ranges
        self._has_failed = False
        make_directory(folder)
        self._lock_file = (folder / "lock").open("ab")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock_file.close()
            raise ParameterError(f"another server has its log in {folder}") from error
        self._steps: GroupCommit[_Step] = GroupCommit(self._write_group, name="log")

    def replay(self) -> list[Recovered]:
        """Read what an earlier process has written, before anything is put. Raises Damaged."""
        found = []
        for folder in sorted(path for path in self._folder.iterdir() if path.is_dir()):
            newest: tuple[Path, Recovered] | None = None
            paths = sorted(folder.glob("*.log"))
            for path in paths:
                recovered = _replay_segment(path)
                if recovered is not None:
                    newest = (path, recovered)
            for path in paths:
                if newest is None or path != newest[0]:
                    path.unlink()
            if newest is not None:
                path, recovered = newest
                self.open(int(folder.name)).resume(path, recovered.replica.sequence)
                found.append(recovered)
        return found

    def open(self, number: int) -> DiskRangeLog:
        with self._lock:
            if number not in self._ranges:
                self._ranges[number] = DiskRangeLog(self, number, self._folder / str(number))
            return self._ranges[number]

    def put(self, range_: DiskRangeLog, step: Callable[[], None]) -> None:
        self._steps.put((range_, step))

    def close(self) -> None:
        """Write what is queued, and end the thread."""
        self._steps.close()
        for each in self._ranges.values():
            each.close()
        self._lock_file.close()

    def _write_group(self, steps: list[_Step]) -> int:
        """Run queued steps, force them to disk, and report it. After a failure nothing is run."""
        if self._has_failed:
            return len(steps)
        self._has_failed = True  # until all of the group is on disk: no later entry without it
        touched = dict.fromkeys(range_ for range_, _ in steps)
        try:
            for _, step in steps:
                step()
            synced = [(range_._number, range_.sync()) for range_ in touched]
            for number, (segment, sequence) in synced:
                if sequence >= 0:
                    self._on_synced(number, segment, sequence)
        except Exception as error:  # nothing more may be acknowledged, whatever has failed
            self._on_failed(error)
            return len(steps)
        self._has_failed = False
        return 0


def _decode_frame(frame: memoryview) -> Message:
    head_bytes, num_keys, size = _SIZES.unpack_from(frame)
    start = _SIZES.size + head_bytes
    head = decode_head(frame[_SIZES.size : start])
    # A copy, so that keys are aligned.
    body = np.frombuffer(frame[start:], np.uint8).copy()
    keys = body[: num_keys * 8].view(np.uint64) if num_keys else None
    return Message(head, keys, body[num_keys * 8 :] if size else None)


def _num_bytes(message: Message) -> int:
    return 64 + sum(0 if each is None else each.nbytes for each in (message.keys, message.values))


def _replay_segment(path: Path) -> Recovered | None:
    frames = read_frames(path)
    try:
        first = next(frames, None)
        if first is None:
            return None
        head = msgspec.msgpack.decode(first, type=_SegmentHead)
        return replayed(head.range, head.generation, map(_decode_frame, frames))
    except Damaged as error:
        raise Damaged(f"{path}: {error}") from error


def replayed(range_: RangeView, generation: int, messages: Iterable[Message]) -> Recovered | None:
    """The state at the end of a segment; None if it is not whole."""
    replica = Replica(range_, (), generation, is_whole=False)
    made_in, is_whole = 0, False
    for message in messages:
        match message.head:
            case Declare(spec=spec):
                replica.declare(decode_table(spec))
            case Tile() as tile:
                replica.take(tile, message.keys, message.values)
            case Entry() as entry:
                replica.apply(entry, message.keys, message.values)
                made_in = entry.epoch
            case Whole() as whole:
                is_whole, made_in = True, whole.made_in
    return Recovered(range_, generation, replica, made_in) if is_whole else None


def read_frames(path: Path) -> Iterator[memoryview]:
    """The frames of a segment. A torn end is cut off. Raises Damaged."""
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        at = 0
        while at < size:
            record = _record(file, at, size)
            if record is None:
                if any(durable > at for durable in _later(file, at, size)):
                    raise Damaged(
                        f"the record at byte {at} of {size} is damaged, and was on disk "
                        f"before later ones. Remove {path.parent} to have the range copied from "
                        f"another server, or rolled back to the last checkpoint."
                    )
                logger.warning("log_end_cut", file=str(path), byte=at, num_bytes=size - at)
                file.truncate(at)
                return
            frame, _ = record
            yield frame
            at += _HEAD.size + len(frame)


def _record(file: IO[bytes], at: int, size: int) -> tuple[memoryview, int] | None:
    """Return the frame of the record at a position, and how much of the file was on disk before it;
    None: it is damaged."""
    file.seek(at)
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    magic, num_bytes, durable, crc = _HEAD.unpack(head)
    if magic != MAGIC or at + _HEAD.size + num_bytes > size:
        return None
    frame = file.read(num_bytes)
    return (memoryview(frame), durable) if zlib.crc32(frame) == crc else None


def _later(file: IO[bytes], at: int, size: int) -> Iterator[int]:
    """The number of bytes that were on disk before each readable record behind a position."""
    magic = struct.pack("<I", MAGIC)
    file.seek(at + 1)
    rest = file.read()
    found = rest.find(magic)
    while found >= 0:
        record = _record(file, at + 1 + found, size)
        if record is not None:
            yield record[1]
        found = rest.find(magic, found + 1)
