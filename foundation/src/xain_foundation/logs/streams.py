"""Standard streams that hold up no program.

A write to a full pipe, or to a terminal that was stopped, waits for a reader, and an event loop or
a training would wait with it. After unblock() a thread writes what a program prints and logs. What
nobody reads is lost, and a line says how many lines were.
"""

import atexit
import contextlib
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

MAX_WAITING_BYTES = 1 << 20  # a pipe holds 64 KiB besides
GROUP_BYTES = 1 << 16
# A reader that is alive takes some of a full queue within this time. A program stands still for so
# long once, when a reader stops.
PATIENCE_S = 0.5
CLOSE_S = 2.0  # for what waits at the end of the process


def _plain_notice(num_lost: int) -> str:
    return f"({num_lost} lines are missing here: nobody read them in time)"


class Descriptor:
    """A file descriptor, the queue of what is written to it, and the thread that writes.

    notice: makes the line, without its end, that says how many entries of the queue were lost.
    """

    def __init__(self, fd: int) -> None:
        from xain_foundation.logs.group_commit import GroupCommit  # --help does not wait for it

        self.fd = fd
        self.notice: Callable[[int], str] = _plain_notice
        self._num_told = 0  # of the entries that were lost
        self._is_direct = False  # whether put() writes itself
        self._entries = GroupCommit[bytes](
            self._write_group,
            name=f"stream {fd}",
            max_group=GROUP_BYTES,
            max_waiting=MAX_WAITING_BYTES,
            patience_s=PATIENCE_S,
        )

    @property
    def num_lost(self) -> int:
        """Entries that were lost since the beginning."""
        return self._entries.num_lost

    def put(self, entry: bytes) -> None:
        """Queue an entry for the thread; after close() write it now, or lose it."""
        if self._is_direct:
            with contextlib.suppress(OSError):
                self._write_while_read(entry)
        else:
            self._entries.put(entry, len(entry))

    def close(self, timeout_s: float) -> None:
        """Write what waits, for timeout_s at most. What comes later is written by its caller if a
        reader has taken all until now, and else lost. May be called again."""
        # Not in a forked process: a thread that it does not have may hold the lock of the queue.
        self._is_direct = self._is_direct or self._entries.close(timeout_s)

    def forked(self) -> None:
        """Go on in a forked process, which has no thread."""
        self._is_direct = True

    def _write_group(self, entries: list[bytes]) -> int:
        """Write a line about lost entries, then entries. Returns how many of them are lost."""
        num_lost = self._entries.num_lost - self._num_told
        told = f"{self.notice(num_lost)}\n".encode() if num_lost else b""
        try:
            self._write(told + b"".join(entries))
        except OSError:  # a reader that is gone, a disk that is full
            return len(entries)
        self._num_told += num_lost
        return 0

    def _write_while_read(self, entry: bytes) -> None:
        """Write without a thread. What the reader does not take in PATIENCE_S is lost."""
        view = memoryview(entry)
        while view and select.select([], [self.fd], [], PATIENCE_S)[1]:
            # A pipe that is ready takes so many bytes at once, and may wait with more.
            view = view[os.write(self.fd, view[: select.PIPE_BUF]) :]

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:  # O_NONBLOCK is set by another process that has the pipe
                select.select([], [self.fd], [])


class _Stream(io.RawIOBase):
    """Bytes for a Descriptor; an entry ends with a line, or with flush()."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.descriptor = descriptor
        self._entry = bytearray()
        self._lock = threading.RLock()  # a signal handler may print

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.descriptor.fd

    def isatty(self) -> bool:
        return os.isatty(self.descriptor.fd)

    def write(self, data: Any) -> int:
        """Collect bytes, and queue them as an entry when a line ends."""
        with self._lock:
            self._entry += data
            is_whole = self._entry.endswith(b"\n") or len(self._entry) >= GROUP_BYTES
        if is_whole:
            self.flush()
        return len(data)

    def flush(self) -> None:
        with self._lock:
            entry, self._entry = bytes(self._entry), bytearray()
        if entry:
            self.descriptor.put(entry)

    def forked(self) -> None:
        self._lock = threading.RLock()  # another thread of the parent may have held the old one
        self.descriptor.forked()


def open_stream(descriptor: Descriptor, encoding: str = "utf-8") -> TextIO:
    """A text stream for a Descriptor. Its writes return at once, and no character is refused."""
    return io.TextIOWrapper(  # type: ignore[type-var]  # as `python -u` does
        _Stream(descriptor), encoding, "backslashreplace", write_through=True
    )


def set_notice(stream: Any, notice: Callable[[int], str]) -> None:
    """Choose the line that says how many lines were lost; see Descriptor. No effect on a stream
    that is not of this module."""
    raw = getattr(stream, "buffer", None)
    if isinstance(raw, _Stream):
        raw.descriptor.notice = notice


_descriptors: list[Descriptor] = []  # of the process


def fill() -> None:
    """Put /dev/null in the place of standard streams that the process has not been given.

    Otherwise the next file that is opened, such as a journal, would get the number of the stream,
    and what other programs print would be written into it.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest number
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # stays open


def unblock() -> None:
    """Let a thread write what this process prints and logs. May be called again.

    For programs that do something beside printing: what a command prints for a pager is to wait for
    the pager. Streams that were replaced, as by a test, stay as they are.
    """
    fill()
    for name in ("stdout", "stderr"):
        before = getattr(sys, name)
        if before is not getattr(sys, f"__{name}__"):
            continue
        before.flush()
        stream = open_stream(_descriptor_of(before.fileno()), before.encoding)
        os.register_at_fork(after_in_child=stream.buffer.forked)  # type: ignore[attr-defined]  # ours
        setattr(sys, name, stream)


def _descriptor_of(fd: int) -> Descriptor:
    """Return the Descriptor of a pipe or file, one for all its streams: it keeps their order."""
    for other in _descriptors:
        if os.path.samestat(os.fstat(other.fd), os.fstat(fd)):
            return other
    if not _descriptors:
        atexit.register(close)
    _descriptors.append(Descriptor(fd))
    return _descriptors[-1]


def close(timeout_s: float = CLOSE_S) -> None:
    """Write what all streams have queued, for timeout_s at most: os._exit() does not do it."""
    deadline = time.monotonic() + timeout_s
    for descriptor in _descriptors:
        descriptor.close(max(0.0, deadline - time.monotonic()))
