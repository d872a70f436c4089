"""Ports of the coordinator, as protocols: stores, journal, metrics.

Adapters live in stores/, journal/ and metrics/; one contract suite per port runs on every adapter.

Stores and journals block; the driver calls them from threads. Nothing here is shared between
processes except what a store holds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.view.history import History
from xain_coordinator.core.vocabulary.events import DurableEvent
from xain_coordinator.core.vocabulary.values import Point


class StoreError(Exception):
    """A store has failed to carry out a call."""


class StoreUnavailable(StoreError):
    """The store is away, full, or refuses the coordinator. Trying again later may help."""


class KeyNotFound(StoreError):
    """No object lies under this key."""

    def __init__(self, key: str) -> None:
        super().__init__(f"there are no weights under {key!r}")


class KeyExists(StoreError):
    """The key is taken and was to be written only once."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the weights under {key!r} are there already and never change")


def object_changed(key: str) -> StoreUnavailable:
    """The error of a reader whose key holds another object meanwhile, or none."""
    return StoreUnavailable(f"the weights under {key!r} were replaced while they were being read")


class KeyClaimed(StoreError):
    """Another writer has claimed the key for other content, and may have died before it wrote.

    claim: where a store that does not lock has noted this.
    """

    def __init__(self, key: str, claim: str) -> None:
        super().__init__(
            f"another coordinator has claimed {key!r} for other weights than this one's; if none "
            f"is running, it died before it wrote them: delete {claim} and start again"
        )


class Fenced(StoreError):
    """Another coordinator owns this session."""


class Reader(Protocol):
    """An open object, never a mixture of two. Reads from several threads at once are allowed."""

    size: int  # bytes of the object

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset`, less than 2 GiB; fewer only at the end of the object.

        If the key is overwritten or deleted meanwhile, a reader goes on with the old object, or
        raises StoreUnavailable where the store does not keep it, or is away.
        """

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill a writable buffer of bytes, as `read` does without its copy of them.

        Returns how many there are; fewer than the buffer takes only at the end of the object. What
        the buffer holds after an error is undefined. A reader that inherits this one copies.
        """
        data = self.read(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Upload(Protocol):
    """An object that is being written, and becomes visible with commit."""

    def write(self, chunk: bytes | memoryview) -> None:
        """Append bytes. The buffer is the caller's again on return. Raises StoreUnavailable."""

    def commit(self, *, overwrite: bool) -> None:
        """Make the object visible, whole and durable, at once.

        Raises KeyExists if the key is taken and `overwrite` is False (the key's object is then
        untouched), KeyClaimed if it may be about to be, StoreUnavailable if it could not be made
        durable.
        """

    def abort(self) -> None:
        """Leave nothing behind. Harmless after commit and when repeated."""

    def suspend(self) -> None:
        """Leave what is written for `WeightsStore.find_unfinished`, where there is such a thing;
        else the same as abort."""


class Unfinished(Protocol):
    """Part of an upload that an ended process has written. It has one holder at a time."""

    @property
    def size(self) -> int:
        """Number of written bytes. After a power cut their content need not be what was written."""

    def read(self, offset: int, length: int) -> bytes:
        """Read as Reader.read does."""

    def resume(self, size: int) -> Upload:
        """Continue the upload after its first `size` bytes, at most what is there. Raises
        StoreUnavailable."""

    def abort(self) -> None:
        """Remove the written part. Not to be called after resume."""


class WeightsStore(Protocol):
    """Objects under keys such as "3/global". Keys are relative to the store's own prefix, except in
    the texts of errors.

    No key should be the folder of another, as "3" is of "3/global": some S3 servers keep objects as
    files and cannot hold both.
    """

    @property
    def num_parallel(self) -> int:
        """Number of readers that a caller had better use at the same time: 1 where the objects are
        on this machine, more where each read takes a while, however little it brings."""

    def open(self, key: str, start: int = 0, length: int | None = None) -> Reader:
        """Open an object to read. Raises KeyNotFound or StoreUnavailable.

        start, length: what will be read first, so that a store far away may bring it with the
        opening. Where nothing is said of the length, the store brings what it thinks fit. Neither
        changes what can be read.
        """

    def upload(self, key: str, label: str = "", size_bytes: int = 0) -> Upload:
        """Begin to write an object. Raises StoreUnavailable.

        size_bytes: about what the object will have; 0 if that is not known.
        label: of letters and digits; `find_unfinished` finds the upload by it, should this process
        end before the upload does, where the store can do such a thing.
        """

    def find_unfinished(self, key: str, label: str) -> Unfinished | None:
        """The unfinished upload with this label, which no process writes any more, to be continued
        under `key`; None if there is none. Raises StoreUnavailable."""

    def sweep(self) -> None:
        """Remove unfinished uploads of ended processes that no process will resume."""

    def put(self, objects: Mapping[str, bytes]) -> None:
        """Write small objects together; each replaces the object under its key.

        All are visible, whole and durable when this returns; one call for many costs a store far
        less than many uploads. Raises StoreUnavailable; each of them may be there then, or not.
        """

    def settle(self, key: str) -> None:
        """Make durable what is visible under the key, though another process may have committed it
        and died before it was. Raises KeyNotFound or StoreUnavailable."""

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Keys that begin with `prefix`, in no particular order. Unfinished uploads have none."""

    def delete(self, *keys: str) -> None:
        """Remove objects; nothing happens where there is none. Many at a time may cost less. Raises
        StoreUnavailable; each of them may be there then, or not."""


@runtime_checkable
class DirectAccess(Protocol):
    """Objects that participants read and write themselves, by URLs that the store has signed.

    The holder of an upload's URL may use it again until it expires: only a copy is accepted.
    """

    def download_url(self, key: str) -> str:
        """Signed URL for GET. Raises StoreUnavailable."""

    def upload_url(self, key: str) -> str:
        """Signed URL for PUT, which replaces an object. Raises StoreUnavailable."""

    def copy(self, source: str, target: str, size_bytes: int) -> int:
        """Copy the object under `source` to `target`, replacing what is there, within the store.
        Returns the size of the source.

        size_bytes: what the source must have; nothing is copied of an object of another size.
        Raises KeyNotFound, and StoreUnavailable, also if the source is replaced meanwhile.
        """


class JournalError(Exception):
    """The journal cannot be read or written. Its message says what to do; nothing was destroyed.

    why: "in use" by another process, "damaged", or "full" for its disk; "" for all else.
    """

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why


@dataclass(frozen=True, slots=True)
class Record:
    """A durable event and the session time at which it was decided."""

    at: float
    event: DurableEvent


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fold of the first `num_records` records of a session.

    at: session time of the last of them.
    session: its soft state is not kept.
    """

    num_records: int
    at: float
    session: Session
    history: History


class Journal(Protocol):
    """An append-only list of records, grouped in sessions. One process writes at a time.

    A snapshot is a cache: the records that it covers stay, and without it the session is the same.
    """

    def load(self, after: int = 0) -> Iterable[Record]:
        """The records of the latest session without the first `after`, oldest first; empty if there
        are none. They may be read while they are iterated over; none is added to them.

        Raises JournalError, while iterating too.
        """

    def has_session(self) -> bool:
        """Whether there are any records."""

    def session_ids(self) -> list[str]:
        """The sessions whose records can be read, oldest first. Raises JournalError."""

    def records_of(self, session_id: str, after: int = 0) -> Iterator[Record] | None:
        """The records of one of the sessions without the first `after`, oldest first; None if there
        is no such session. Raises JournalError, while iterating too."""

    def append(self, records: Sequence[Record], objects: Mapping[str, bytes] | None = None) -> None:
        """Add all records or none, durably. A SessionOpened begins a new session.

        objects: small updates and models that the records speak of, by key; added with them.
        Raises JournalError.
        """

    def prepare(
        self, records: Sequence[Record], objects: Mapping[str, bytes] | None = None
    ) -> Callable[[], None]:
        """Write what `append` would, but do not make it durable and do not wait. Returns what makes
        it durable, which blocks, may be called in any thread, and must be called.

        A thread needs the interpreter's lock between any two statements, and gets each late while
        the event loop is busy. So the event loop writes small groups itself, and the thread waits
        for the disk. Both raise JournalError.
        """

    def read_object(self, key: str) -> bytes | None:
        """A small update or model of the latest session; None if there is none under this key.
        Raises JournalError."""

    def recent_object(self, key: str) -> bytes | None:
        """Small update or model of the latest session if it is in memory, else None. Does not
        block."""

    def object_keys(self, prefix: str = "") -> Sequence[str]:
        """Keys of the latest session's small updates and models that begin with `prefix`. Raises
        JournalError."""

    def delete_objects(self, keys: Sequence[str]) -> None:
        """Remove small updates and models of the latest session; nothing happens where there is
        none. Raises JournalError."""

    def snapshot(self) -> Snapshot | None:
        """The last one saved of the latest session; None if there is none, or none that this
        version of the program can use. Raises JournalError."""

    def save(self, snapshot: Snapshot) -> None:
        """Store a snapshot of the latest session; it replaces the one before. May run beside
        append. Raises JournalError; the one before is still there then."""

    def close(self) -> None: ...


class MetricsStore(Protocol):
    """Store of metric points. Calls never block, raise or retry."""

    @property
    def num_lost(self) -> int:
        """Points that could not be written."""

    def write(self, points: Sequence[Point]) -> None: ...

    def close(self) -> None:
        """Write the waiting points, within a bounded time."""


class Clock(Protocol):
    """Source of `now`."""

    def now(self) -> float:
        """Session time in seconds: monotonic, and it goes on where it stood after a restart."""

    def wall_ns(self) -> int:
        """Nanoseconds since 1970, for the timestamps of metrics only."""
