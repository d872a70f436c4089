"""State that outlives a process: a coordinator's journal and store, a participant's state
directory.

A crash comes before or after each thing that is done to them, or in its middle: a transaction of
the journal is there or not, an object of the store may be visible without being durable, and after
a power cut it may be gone again.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from simulation.hub import Hub, Process
from simulation.threads import sleep
from support.memory_journal import MemoryJournal
from xain_coordinator.ports import (
    JournalError,
    KeyExists,
    KeyNotFound,
    Reader,
    Record,
    Snapshot,
    StoreUnavailable,
    Unfinished,
    Upload,
)
from xain_coordinator.stores.memory import MemoryReader
from xain_participant.keep.result import Result


@dataclass(slots=True)
class Trouble:
    """The faults of the moment.

    journal_fails: the disk under the journal is full or broken. store_down: the store is away, or
    its answers are. slow_s: what each piece of blocking work takes besides.
    """

    journal_fails: bool = False
    store_down: bool = False
    slow_s: float = 0.0


@dataclass(slots=True)
class JournalDisk:
    """committed: told of every transaction, the moment that it is durable. owners: by session."""

    committed: Callable[[Sequence[Record]], None]
    file: MemoryJournal = field(default_factory=MemoryJournal)
    owners: dict[str, frozenset[str]] = field(default_factory=dict)

    @property
    def keys(self) -> Sequence[str]:
        """Keys of small updates and models."""
        return self.file.object_keys()

    def copy(self, committed: Callable[[Sequence[Record]], None]) -> "JournalDisk":
        """Another one that goes on from here."""
        file = MemoryJournal()
        if records := self.file.load():
            file.append(records, {key: self.file.read_object(key) or b"" for key in self.keys})
        if snapshot := self.file.snapshot():
            file.save(snapshot)
        return JournalDisk(committed, file, dict(self.owners))


class SimulatedJournal:
    """A Journal on a JournalDisk, opened by one process."""

    def __init__(self, hub: Hub, process: Process, disk: JournalDisk, trouble: Trouble) -> None:
        self._hub = hub
        self._process = process
        self._disk = disk
        self._trouble = trouble
        self._closed = False

    def load(self, after: int = 0) -> Sequence[Record]:
        self._process.touch()
        return self._disk.file.load(after)

    def append(self, records: Sequence[Record], objects: Mapping[str, bytes] | None = None) -> None:
        self._begin_writing()
        if self._trouble.journal_fails:
            # An error of the disk does not say whether the transaction will be there.
            if self._hub.chance.random() < 0.3:
                self._commit(records, objects)
            raise self._excused("the journal's disk is full")
        self._commit(records, objects)
        self._process.touch()

    def session_ids(self) -> list[str]:
        self._process.touch()
        return self._disk.file.session_ids()

    def read_object(self, key: str) -> bytes | None:
        self._process.touch()
        return self._disk.file.read_object(key)

    def prepare(
        self, records: Sequence[Record], objects: Mapping[str, bytes] | None = None
    ) -> Callable[[], None]:
        return partial(self.append, records, objects)

    def recent_object(self, key: str) -> bytes | None:
        return self._disk.file.read_object(key)

    def object_keys(self, prefix: str = "") -> Sequence[str]:
        self._process.touch()
        return self._disk.file.object_keys(prefix)

    def delete_objects(self, keys: Sequence[str]) -> None:
        self._begin_writing()
        if self._trouble.journal_fails:
            raise self._excused("the journal's disk is full")
        self._disk.file.delete_objects(keys)
        self._hub.note(self._process.name, f"journal: delete {' '.join(keys)}")
        self._process.touch()

    def _commit(self, records: Sequence[Record], objects: Mapping[str, bytes] | None) -> None:
        self._disk.file.append(records, objects)
        names = " ".join(type(record.event).__name__ for record in records)
        self._hub.note(self._process.name, f"journal: {names}")
        self._disk.committed(records)

    def snapshot(self) -> Snapshot | None:
        self._process.touch()
        return self._disk.file.snapshot()

    def save(self, snapshot: Snapshot) -> None:
        self._begin_writing()
        if self._trouble.journal_fails:
            raise self._excused("the journal's disk is full")
        self._disk.file.save(snapshot)
        self._hub.note(self._process.name, f"journal: snapshot of {snapshot.num_records}")
        self._process.touch()

    def owners(self, session_id: str) -> Collection[str]:
        self._process.touch()
        return self._disk.owners.get(session_id, frozenset())

    def note_owners(self, session_id: str, names: Collection[str]) -> None:
        self._begin_writing()
        if self._trouble.journal_fails:
            raise self._excused("the journal's disk is full")
        self._disk.owners[session_id] = frozenset(names)
        self._process.touch()

    def close(self) -> None:
        self._closed = True

    def _begin_writing(self) -> None:
        self._process.touch()
        if self._closed:
            raise JournalError("the journal is closed")

    def _excused(self, text: str) -> JournalError:
        self._process.excuse = text
        return JournalError(text)


@dataclass(eq=False, slots=True)
class Part:
    """The written part of an upload. writer: the living process that goes on with it."""

    label: str
    writer: Process
    data: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class StoreDisk:
    """visible: what is seen under each key. durable: what is there after a power cut.

    shown: told of every object that has come to be visible.
    parts: of uploads that have not been committed; none, where the store does not keep them.
    """

    visible: dict[str, bytes] = field(default_factory=dict)
    durable: dict[str, bytes] = field(default_factory=dict)
    shown: Callable[[str, bytes], None] = lambda key, data: None
    parts: list[Part] = field(default_factory=list)

    def put(self, key: str, data: bytes) -> None:
        """Visible and durable at once."""
        self.show(key, data)
        self.durable[key] = data

    def show(self, key: str, data: bytes) -> None:
        self.visible[key] = data
        self.shown(key, data)

    def cut_power(self, hub: Hub) -> None:
        """Objects that were not durable may be gone, and deleted ones may be back."""
        for key in sorted({*self.visible, *self.durable}):
            if self.visible.get(key) != self.durable.get(key):
                if hub.chance.random() < 0.5:
                    hub.note("store", f"power cut: {key} is as it was")
                    self._restore(key)
                elif key in self.visible:
                    self.durable[key] = self.visible[key]
                else:
                    del self.durable[key]

        for part in self.parts:
            chance = hub.chance.random()
            if chance < 0.3:
                del part.data[int(hub.chance.random() * len(part.data)) :]
            elif chance < 0.6:  # the file is as long as it was, and a block of it was not written
                first = int(hub.chance.random() * len(part.data))
                part.data[first:] = bytes(len(part.data) - first)

    def _restore(self, key: str) -> None:
        if key in self.durable:
            self.visible[key] = self.durable[key]
        else:
            del self.visible[key]


class SimulatedStore:
    """A WeightsStore on a StoreDisk, used by one process."""

    num_parallel = 1

    def __init__(
        self, hub: Hub, process: Process, disk: StoreDisk, trouble: Trouble, *, keeps_parts: bool
    ) -> None:
        self._hub = hub
        self._process = process
        self._keeps_parts = keeps_parts
        self.disk = disk
        self._trouble = trouble

    def open(self, key: str, start: int = 0, length: int | None = None) -> Reader:
        self._ask("open", key)
        if key not in self.disk.visible:
            raise KeyNotFound(key)
        return MemoryReader(self.disk.visible[key])

    def upload(self, key: str, label: str = "", size_bytes: int = 0) -> Upload:
        self._ask("upload", key)
        part = Part(label, self._process)
        if self._keeps_parts and label:
            self.disk.parts.append(part)
        return _Upload(self, key, part)

    def find_unfinished(self, key: str, label: str) -> Unfinished | None:
        self._ask("look for an upload of", key)
        for part in self._left():
            if part.label == label:
                part.writer = self._process
                return _Unfinished(self, key, part)
        return None

    def _left(self) -> list[Part]:
        """Parts without a living writer."""
        return [part for part in self.disk.parts if not part.writer.is_alive]

    def resume(self, key: str, part: Part, size: int) -> Upload:
        self._ask("go on with", key)
        del part.data[size:]
        self._hub.note(self._process.name, f"store: goes on with {key} at {size}")
        return _Upload(self, key, part)

    def drop(self, part: Part) -> None:
        if part in self.disk.parts:
            self.disk.parts.remove(part)

    def leave(self, part: Part) -> None:
        """Give the part up to its next finder."""
        part.writer = _NOBODY

    def sweep(self) -> None:
        self._process.touch()
        for part in self._left():
            self.drop(part)

    def put(self, objects: Mapping[str, bytes]) -> None:
        self._process.touch()
        names = " ".join(objects)
        is_down = self._is_down()
        for key, data in objects.items():
            if is_down and self._hub.chance.random() < 0.5:
                continue
            self.disk.show(key, data)
            self._process.touch()
        if is_down:
            raise StoreUnavailable(f"cannot put {names}")
        self._hub.note(self._process.name, f"store: put {names}")
        for key in objects:
            self.disk.durable[key] = objects[key]
        self._process.touch()

    def settle(self, key: str) -> None:
        self._ask("settle", key)
        if key not in self.disk.visible:
            raise KeyNotFound(key)
        self.disk.durable[key] = self.disk.visible[key]
        self._process.touch()

    def keys(self, prefix: str = "") -> Iterator[str]:
        self._ask("list", prefix)
        return iter([key for key in self.disk.visible if key.startswith(prefix)])

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._ask("delete", key)
            self.disk.visible.pop(key, None)  # durable only some time later
            self._hub.note(self._process.name, f"store: delete {key}")

    def commit(self, key: str, data: bytes, *, overwrite: bool) -> None:
        self._process.touch()
        is_down = self._is_down()
        if is_down and self._hub.chance.random() < 0.5:
            raise StoreUnavailable(f"cannot commit {key}")
        if key in self.disk.visible and not overwrite:
            # A writer that hears that it is there must be able to rely on it.
            self.disk.durable[key] = self.disk.visible[key]
            raise KeyExists(key)
        self.disk.show(key, data)
        self._hub.note(self._process.name, f"store: commit {key}")
        self._process.touch()
        if is_down:
            raise StoreUnavailable(f"cannot sync {key}")
        self.disk.durable[key] = data
        self._process.touch()

    def _ask(self, verb: str, key: str) -> None:
        self._process.touch()
        if self._is_down():
            raise StoreUnavailable(f"cannot {verb} {key}")

    def _is_down(self) -> bool:
        return self._trouble.store_down

    def touch(self) -> None:
        self._process.touch()


_NOBODY = Process("nobody")
_NOBODY.is_alive = False


class _Upload:
    def __init__(self, store: SimulatedStore, key: str, part: Part) -> None:
        self._store = store
        self._key = key
        self._part: Part | None = part

    def write(self, chunk: bytes | memoryview) -> None:
        self._store.touch()
        assert self._part is not None, f"the upload of {self._key!r} is over"
        self._part.data += chunk

    def commit(self, *, overwrite: bool) -> None:
        assert self._part is not None, f"the upload of {self._key!r} is over"
        part, self._part = self._part, None
        self._store.commit(self._key, bytes(part.data), overwrite=overwrite)
        self._store.drop(part)

    def abort(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            self._store.touch()
            self._store.drop(part)

    def suspend(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            self._store.touch()
            self._store.leave(part)


class _Unfinished:
    def __init__(self, store: SimulatedStore, key: str, part: Part) -> None:
        self._store = store
        self._key = key
        self._part = part
        self.size = len(part.data)

    def read(self, offset: int, length: int) -> bytes:
        self._store.touch()
        return bytes(self._part.data[offset : offset + length])

    def resume(self, size: int) -> Upload:
        return self._store.resume(self._key, self._part, size)

    def abort(self) -> None:
        self._store.touch()
        self._store.drop(self._part)


@dataclass(slots=True)
class StateDisk:
    """kept: what a participant found, if it were started now. durable: after a power cut."""

    kept: Result | None = None
    durable: Result | None = None

    def cut_power(self, hub: Hub) -> None:
        """A result that was not durable may be gone, and one that was removed may be back."""
        if hub.chance.random() < 0.5:
            self.kept = self.durable
        self.durable = self.kept


class SimulatedKeeper:
    """A Keeper on a StateDisk, used by one process."""

    def __init__(self, hub: Hub, process: Process, disk: StateDisk, participant_id: str) -> None:
        self.participant_id = participant_id
        self.instance_id = f"{participant_id}-state"
        self._hub = hub
        self._process = process
        self._disk = disk

    def load(self) -> Result | None:
        self._process.touch()
        return self._disk.kept

    def keep(self, result: Result) -> None:
        sleep(0.05 * self._hub.chance.random())  # what a disk takes, in virtual time
        self._process.touch()
        kept = replace(result, vector=result.vector.copy(), metrics={}, encoded=None)
        self._disk.kept = kept
        self._hub.note(self.participant_id, f"keeps its result of round {result.round}")
        sleep(0.05 * self._hub.chance.random())  # as above, until it is told so
        self._process.touch()
        self._disk.durable = kept
        self._process.touch()

    def forget(self) -> None:
        self._process.touch()
        self._disk.kept = None  # durable only some time later
