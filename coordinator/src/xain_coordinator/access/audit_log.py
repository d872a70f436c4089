"""The audit log: a file of JSON lines, each with the SHA-256 of the line before.

    {"sequence":7,"previous":"SHA-256","at":TIME,"event":"NAME","by":"NAME","fields":{},"crc":"…"}

A line is on disk before anybody hears of what it says. The chain tells of a line that was changed,
removed or put in; "crc", a checksum of the line itself, of damage to the last one, which no other
line has the hash of. A line that its writer has not finished, because its machine stopped, is cut
off at the next start: nobody has heard of it.
"""

import errno
import fcntl
import json
import os
import time
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Final

from xain_coordinator.access.errors import AccessError
from xain_foundation.durable import make_directory, sync_directory
from xain_foundation.logs.logger import get_logger

log = get_logger(__name__)

NO_HASH: Final = "0" * 64  # in the first line
# A later version that cannot be read by this one writes another number.
FORMAT: Final = 1
BEGAN: Final = "log_began"
MAX_LINE_BYTES: Final = 256 << 10
_TAIL_BYTES: Final = len(b',"crc":"00000000"}\n')
_EVENT: Final = b',"event":"'
_EVENT_FROM: Final = len(NO_HASH)  # a number and the hash come before it
_LOOK_S: Final = 0.05


def damaged_line(path: Path, number: int, why: str) -> AccessError:
    """The error of a line that is not what was written. number: of the line, from 1."""
    return AccessError(
        f"line {number} of {path} is damaged: {why}. Without it nobody knows what was revoked: "
        "put back a copy of the file from a backup (`xain-coordinator audit verify` checks it)"
    )


@dataclass(frozen=True, slots=True)
class NewLine:
    """at: seconds since the epoch. by: who caused it. fields: as JSON takes them."""

    at: float
    event: str
    by: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line(NewLine):
    """sequence: number of the line, from 1. previous: SHA-256 of the line before."""

    sequence: int = 0
    previous: str = NO_HASH


class Chain:
    """Lines of a file, checked one after the other.

    num_lines, num_bytes, last_hash: as far as they were read. torn: bytes of an unfinished line
    behind them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_lines = 0
        self.num_bytes = 0
        self.last_hash = NO_HASH
        self.torn = 0

    def lines(self, file: BinaryIO) -> Iterator[bytes]:
        """The lines of a file from its beginning, each checked against the one before; num_lines,
        num_bytes and last_hash grow with them. An unfinished last line is not among them, and
        `torn` is its size. Raises AccessError."""
        previous = NO_HASH.encode()
        number = num_bytes = 0
        crc32, readline = zlib.crc32, file.readline
        while line := readline(MAX_LINE_BYTES):
            number += 1
            head = b'{"sequence":%d,"previous":"%b",' % (number, previous)
            tail = b',"crc":"%08x"}\n' % crc32(memoryview(line)[:-_TAIL_BYTES])
            if not (line.startswith(head) and line.endswith(tail)):
                self.torn = self._require_torn(line, number, head)
                return
            previous = sha256(line).hexdigest().encode()
            num_bytes += len(line)
            self.num_lines, self.num_bytes = number, num_bytes
            self.last_hash = previous.decode()
            yield line

    def extend(self, lines: Iterable[NewLine]) -> tuple[bytes, "Chain"]:
        """The bytes of further lines, and a chain that counts them too; this one stays as it is.
        Raises ValueError if a line cannot be written."""
        after = Chain(self._path)
        after.num_lines, after.num_bytes = self.num_lines, self.num_bytes
        after.last_hash = self.last_hash
        encoded = []
        for line in lines:
            after.num_lines += 1
            values = {
                "sequence": after.num_lines,
                "previous": after.last_hash,
                "at": line.at,
                "event": line.event,
                "by": line.by,
                "fields": line.fields,
            }
            body = json.dumps(values, separators=(",", ":"), allow_nan=False)[:-1].encode()
            encoded.append(b'%b,"crc":"%08x"}\n' % (body, zlib.crc32(body)))
            if len(encoded[-1]) > MAX_LINE_BYTES:
                raise ValueError(f"the line has {len(encoded[-1])} bytes: {body[:200]!r}")
            after.num_bytes += len(encoded[-1])
            after.last_hash = sha256(encoded[-1]).hexdigest()
        return b"".join(encoded), after

    def _require_torn(self, line: bytes, number: int, head: bytes) -> int:
        """The size in bytes of a last line that its writer has not finished. Raises AccessError if
        the line is damaged instead."""
        if line.endswith(b"\n") or len(line) == MAX_LINE_BYTES:
            why = "its checksum is not that of its text"
            if not line.startswith(head):
                why = "it does not follow from the line before"
            raise damaged_line(self._path, number, why)
        whole = line[:-1] + b"\n"
        if whole.endswith(b',"crc":"%08x"}\n' % zlib.crc32(whole[:-_TAIL_BYTES])):
            # The whole line was on disk, so it may have been acknowledged.
            raise damaged_line(self._path, number, "its end is not that of a line")
        return len(line)


@dataclass(frozen=True, slots=True)
class Verified:
    """num_torn_bytes: of an unfinished line at the end, which a running owner may be writing."""

    num_lines: int
    last_hash: str
    num_torn_bytes: int


def verify(path: Path) -> Verified:
    """Check the whole chain of a file. Raises AccessError, OSError."""
    chain = Chain(path)
    with path.open("rb", buffering=1 << 20) as file:
        for _ in chain.lines(file):
            pass
    return Verified(chain.num_lines, chain.last_hash, chain.torn)


def read(path: Path) -> Iterator[Line]:
    """The lines of a file, checked. Raises AccessError at the first one that is damaged,
    OSError."""
    chain = Chain(path)
    with path.open("rb", buffering=1 << 20) as file:
        for number, raw in enumerate(chain.lines(file), 1):
            yield _parsed(path, number, raw)


class AuditLog:
    """The audit log, open for its only writer. Not thread-safe.

    patience_s: how long open() waits for another process, such as a command of an operator.
    """

    patience_s = 2.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._chain = Chain(path)
        self._trouble = ""

    def open(self, now: Callable[[], float], kinds: Container[str] | None = None) -> Iterator[Line]:
        """Lock the file, and read the lines of these events, or all of them; the file is made with
        its folder if it is not there. An unfinished line at its end is cut off.

        Nothing may be appended before the last line was read. Raises AccessError.
        """
        try:
            make_directory(self.path.parent, 0o700)
            self._fd = self._open_locked()
            yield from self._read(kinds)
            if not self._chain.num_lines:
                self.append([NewLine(now(), BEGAN, "coordinator", {"format": FORMAT})])
        except OSError as error:
            raise AccessError(
                f"the audit log {self.path} cannot be opened: {error.strerror or error}"
            ) from error

    @property
    def num_lines(self) -> int:
        return self._chain.num_lines

    @property
    def last_hash(self) -> str:
        return self._chain.last_hash

    def append(self, lines: Iterable[NewLine]) -> None:
        """Write lines and sync them; either all of them are in the file then, or none. Raises
        OSError, and ValueError if a line cannot be written."""
        encoded, after = self._chain.extend(lines)
        if self._trouble:
            raise OSError(errno.EIO, self._trouble)
        self._require_same_file()
        try:
            view = memoryview(encoded)
            while view:
                view = view[os.write(self._fd, view) :]
            os.fsync(self._fd)
        except OSError as error:
            self._cut(f"it could not be written: {error.strerror}")
            raise
        self._chain = after

    def close(self) -> None:
        """Close the file, which gives up its lock. Harmless when repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open_locked(self) -> int:
        """Open the file and lock it, waiting up to patience_s for another process. Returns its
        descriptor. Raises AccessError."""
        ends_at = time.monotonic() + self.patience_s
        while True:
            is_new = not self.path.exists()
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                if is_new:
                    sync_directory(self.path.parent)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                if time.monotonic() > ends_at:
                    raise AccessError(
                        f"another process has {self.path} open; only one coordinator at a time "
                        "uses a data folder"
                    ) from None
                time.sleep(_LOOK_S)
            except BaseException:  # raised again
                os.close(fd)
                raise
            else:
                return fd

    def _read(self, kinds: Container[str] | None) -> Iterator[Line]:
        """The checked lines of the file whose events are in `kinds` (None: all). After the last one
        an unfinished line is cut off the file. Raises AccessError, OSError."""
        # A killed process may have written lines that are not on disk yet. What is read here
        # counts from now on.
        os.fsync(self._fd)
        with self.path.open("rb", buffering=1 << 20) as file:
            for number, raw in enumerate(self._chain.lines(file), 1):
                if number == 1:
                    self._require_format(raw)
                if kinds is None or _event_of(raw) in kinds:
                    yield _parsed(self.path, number, raw)
        if self._chain.torn:
            log.warning(
                "audit_log_line_cut_off",
                path=str(self.path),
                line=self._chain.num_lines + 1,
                bytes=self._chain.torn,
            )
            self._chain.torn = 0
            os.ftruncate(self._fd, self._chain.num_bytes)
            os.fsync(self._fd)

    def _require_format(self, raw: bytes) -> None:
        """Check that the first line names this version's format. Raises AccessError."""
        found = _parsed(self.path, 1, raw).fields.get("format")
        if found != FORMAT:
            raise AccessError(
                f"{self.path} is of the format {found}, and this version reads {FORMAT} alone; it "
                "was written by another version of this program"
            )

    def _require_same_file(self) -> None:
        """Check that the path still names the open file, with the size that was written: otherwise
        a line would be written where no start finds it. Raises OSError."""
        ours = os.fstat(self._fd)
        try:
            is_ours = os.path.samestat(ours, self.path.stat())
        except FileNotFoundError:
            is_ours = False
        if not is_ours or ours.st_size != self._chain.num_bytes:
            raise OSError(errno.EIO, "another program has moved or changed it; restart")

    def _cut(self, trouble: str) -> None:
        """Cut off lines that were not written in full, or not synced. If that fails too, each later
        append() raises OSError."""
        self._trouble = f"{trouble}; restart"
        with suppress(OSError):
            os.ftruncate(self._fd, self._chain.num_bytes)
            os.fsync(self._fd)
            self._trouble = ""


def _event_of(raw: bytes) -> str:
    """The event of a checked line, without reading the rest of it: refused identities may be most
    of a log, and a start skips them."""
    start = raw.find(_EVENT, _EVENT_FROM) + len(_EVENT)
    return raw[start : raw.find(b'"', start)].decode()


def _parsed(path: Path, number: int, raw: bytes) -> Line:
    """A checked line as a Line. Raises AccessError if its JSON lacks a key."""
    try:
        values = json.loads(raw)
        return Line(
            values["at"],
            values["event"],
            values["by"],
            values["fields"],
            values["sequence"],
            values["previous"],
        )
    except (ValueError, KeyError) as error:  # its writer was another program
        raise damaged_line(path, number, f"it cannot be read: {error!r}") from None
