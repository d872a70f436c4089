"""Updates on their way in: they go to disk as they come, or are brought from where their sender has
put them.

An object is visible only when it is whole and measured, and every attempt has a key of its own. So
an accepted one is never touched again, not even by a request that everybody gave up and that
reaches a store far away in the end. The last look at the session and the commit happen under one
lock per participant, the same lock that EndTrainingRound holds.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from xain_coordinator.admission import CHUNK_BYTES, Inspector, measure
from xain_coordinator.core.commands import BeginUpload
from xain_coordinator.core.errors import InvalidUpdate, TooLarge, Unavailable
from xain_coordinator.core.keys import attempt_key, incoming_key, place_of, round_of, update_key
from xain_coordinator.core.replies import AlreadyUploaded, UploadTo
from xain_coordinator.core.values import StoredWeights, WeightsRef
from xain_coordinator.driver import Driver
from xain_coordinator.ports import (
    DirectAccess,
    KeyNotFound,
    StoreError,
    Upload,
    WeightsStore,
    WrongSize,
)
from xain_coordinator.server.group_writer import GroupWriter
from xain_coordinator.threads import run_to_end
from xain_proto.fl.coordinator_pb2 import PutWeightsRequest

# Copies within the store, and their measuring, at a time: more would only share the same line.
NUM_ADOPTIONS = 4


class Bucket(Protocol):
    """Where participants put updates under names of their own, as XAIN's do."""

    def fetch(self, round_: int, name: str, target: str) -> None:
        """Bring an update to the key `target` of the session's store. Raises KeyNotFound,
        InvalidUpdate, TooLarge and StoreUnavailable."""


@dataclass(slots=True)
class _Adoption:
    """A copy of what a participant has put into the store itself, being made and measured.

    It belongs to nobody's call: a caller that loses its patience finds it done, or joins it, when
    it comes again.
    """

    digest: str
    task: asyncio.Task[StoredWeights | None]


@dataclass(slots=True)
class Uploads:
    """Of one session.

    max_update_bytes: larger uploads are refused before a byte is written.
    access: how participants reach the store themselves; None if they cannot.
    bucket: where those who say no more than a name have put their update; None: in the store.
    receiving: who is uploading at the moment.
    """

    driver: Driver
    store: WeightsStore
    max_update_bytes: int
    access: DirectAccess | None = None
    bucket: Bucket | None = None
    receiving: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    _locks: dict[str, tuple[asyncio.Lock, int]] = field(default_factory=dict)
    # The latest of each place, which is "{round}/{name}", of rounds that may be handed in for.
    _measured: dict[str, StoredWeights] = field(default_factory=dict)
    _measured_round: int = -1
    _adoptions: dict[str, _Adoption] = field(default_factory=dict)
    _adopting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(NUM_ADOPTIONS))
    _small_uploads: GroupWriter = field(init=False)

    def __post_init__(self) -> None:
        self._small_uploads = GroupWriter(self.store)

    @asynccontextmanager
    async def exclusive(self, *names: str) -> AsyncIterator[None]:
        """One at a time per name, which is a participant's or its upload's: what is accepted under
        a name must not be written by another call that began before.

        Several are taken in one order, so that nobody waits in a circle.
        """
        async with AsyncExitStack() as stack:
            for name in sorted(set(names)):
                await stack.enter_async_context(self._one(name))
            yield

    @asynccontextmanager
    async def _one(self, name: str) -> AsyncIterator[None]:
        """The lock goes away with its last user."""
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[name]
            if users == 1:
                del self._locks[name]
            else:
                self._locks[name] = (lock, users - 1)

    async def receive(
        self, participant_id: str, requests: AsyncIterator[PutWeightsRequest]
    ) -> WeightsRef:
        """Take one upload. Returns when it is durable.

        A participant has one upload at a time: a new one ends the one before, whose sender has
        lost its connection or its patience.
        Raises TooLarge, InvalidUpdate, Unavailable, and whatever BeginUpload refuses.
        """
        task = asyncio.ensure_future(self._receive(participant_id, requests))
        earlier = self.receiving.get(participant_id)
        self.receiving[participant_id] = task
        if earlier is not None:
            earlier.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise  # it was our own caller who went away
            raise Unavailable("a newer upload of the same participant has replaced it") from None
        finally:
            if self.receiving.get(participant_id) is task:
                del self.receiving[participant_id]

    async def _receive(
        self, participant_id: str, requests: AsyncIterator[PutWeightsRequest]
    ) -> WeightsRef:
        first = await anext(requests, None)
        if first is None or not first.HasField("header"):
            raise InvalidUpdate("the first message of an upload must carry its header")
        header = first.header
        digest = header.digest.hex()
        place = await self._begin(participant_id, header.round, digest, header.size_bytes)
        if isinstance(place, WeightsRef):
            return place
        reception = _Reception(self.store, _attempt_at(place), header.size_bytes, digest)
        try:
            reception.add(first.data)
            async for request in requests:
                reception.add(request.data)
                if reception.has_a_chunk:
                    await run_to_end(reception.flush)
            async with self.exclusive(participant_id):
                # Much may have happened meanwhile; this is the last look before the commit.
                place = await self._begin(participant_id, header.round, digest, header.size_bytes)
                if isinstance(place, WeightsRef):
                    return place
                measured = await run_to_end(reception.complete)
                self._keep(place, measured)
                return measured.ref
        finally:
            if reception.is_open:
                await run_to_end(reception.abort)

    async def take(self, participant_id: str, round_: int, data: bytes, digest: str) -> None:
        """Store an update that came inside its reference. The caller holds `exclusive`.

        Raises as `receive` does.
        """
        place = await self._begin(participant_id, round_, digest, len(data))
        if isinstance(place, WeightsRef) or self._holds(place, digest):
            return
        inspector = Inspector()
        inspector.feed(data)
        if inspector.digest != digest:
            raise _wrong_digest()
        measured = inspector.result(_attempt_at(place))
        await self._small_uploads.put(measured.ref.key, data)
        self._keep(place, measured)

    async def adopt(self, participant_id: str, round_: int, size_bytes: int, digest: str) -> None:
        """Bring to its place what a participant has put into the store itself, checked against what
        it says that it put. The caller holds `exclusive`.

        What counts is a copy: the participant can write to its own key until its URL expires.
        Raises as `receive` does; does nothing if nothing is there.
        """
        place = await self._begin(participant_id, round_, digest, size_bytes)
        if isinstance(place, WeightsRef) or self._holds(place, digest) or self.access is None:
            return
        adoption = self._adoptions.get(place)
        if adoption is not None and adoption.digest != digest:
            await asyncio.wait([adoption.task])  # it is of another update; one at a time
            self._forget(place, adoption)
            adoption = None
        if adoption is None:
            wanted = self._wanted(self._adoptions)
            for other, old in list(self._adoptions.items()):
                if other not in wanted and old.task.done():
                    self._forget(other, old)
            source = incoming_key(round_, participant_id)
            work = self._adopt(self.access, source, place, size_bytes, digest)
            adoption = _Adoption(digest, asyncio.ensure_future(work))
            self._adoptions[place] = adoption
        await asyncio.wait([adoption.task])
        del self._adoptions[place]
        measured = adoption.task.result()
        if measured is not None:
            self._keep(place, measured)

    async def _adopt(
        self, access: DirectAccess, source: str, place: str, size_bytes: int, digest: str
    ) -> StoredWeights | None:
        key = _attempt_at(place)
        async with self._adopting:
            try:
                await run_to_end(access.copy, source, key, size_bytes)
            except KeyNotFound:
                return None
            except WrongSize as error:
                self._discard(source)
                raise InvalidUpdate(
                    f"the upload has {error.size} bytes, {size_bytes} were announced"
                ) from None
            try:
                measured = await run_to_end(measure, self.store, key, size_bytes)
                if measured.ref.digest != digest:
                    raise _wrong_digest()
            except InvalidUpdate:
                self._discard(key)
                raise
        return measured

    def _forget(self, place: str, adoption: _Adoption) -> None:
        """An adoption that has ended and that nobody came back for."""
        del self._adoptions[place]
        if not adoption.task.cancelled() and adoption.task.exception() is None:
            measured = adoption.task.result()
            if measured is not None:
                self._discard(measured.ref.key)

    async def named(self, participant_id: str, round_: int, name: str) -> StoredWeights | None:
        """What a participant has put under a name of its own without saying more, as XAIN's do;
        None if there is nothing. The caller holds `exclusive`.

        Raises InvalidUpdate, TooLarge, StoreUnavailable, and what BeginUpload refuses: no stranger
        makes us read a file.
        """
        place = update_key(round_, name)
        accepted = self.driver.session.accepted(participant_id, round_)
        if accepted is not None:
            # Without a digest there is no telling it from another one, but by its place.
            is_meant = place_of(accepted.weights.ref.key) == place
            return accepted.weights if is_meant else None
        if self.bucket is None and place in self._measured:
            return self._measured[place]
        await self.driver.submit(BeginUpload(participant_id, round_, digest="", upload_name=name))
        try:
            if self.bucket is None:
                return await run_to_end(self._measure, place)
            key = _attempt_at(place)
            await run_to_end(self.bucket.fetch, round_, name, key)
            measured = await run_to_end(measure, self.store, key)
        except KeyNotFound:
            return None
        self._keep(place, measured)
        return measured

    async def find(
        self, participant_id: str, round_: int, key: str, digest: str
    ) -> StoredWeights | None:
        """The update of this digest that the participant has uploaded for this round; None if there
        is none. The caller holds `exclusive`.

        key: where it lies, as `receive` has told. Raises as `named` does.
        """
        accepted = self.driver.session.accepted(participant_id, round_)
        if accepted is not None:
            return accepted.weights if accepted.weights.ref.digest == digest else None
        place = update_key(round_, participant_id)
        measured = self._measured.get(place)
        if measured is None and place_of(key) == place:
            # It was uploaded to our predecessor.
            await self.driver.submit(BeginUpload(participant_id, round_, digest))
            with contextlib.suppress(KeyNotFound):
                measured = await run_to_end(self._measure, key)
        return measured if measured is not None and measured.ref.digest == digest else None

    def _measure(self, key: str) -> StoredWeights:
        measured = measure(self.store, key)
        # Whoever wrote it may have died before it was durable, and it is about to count.
        self.store.settle(key)
        return measured

    async def _begin(
        self, participant_id: str, round_: int, digest: str, size_bytes: int
    ) -> str | WeightsRef:
        """Where to write, or the reference if this very update has been accepted."""
        if size_bytes > self.max_update_bytes:
            raise TooLarge(
                f"an upload of {size_bytes} bytes; at most {self.max_update_bytes} are taken"
            )
        begun = await self.driver.submit(BeginUpload(participant_id, round_, digest, size_bytes))
        if isinstance(begun, AlreadyUploaded):
            return begun.ref
        assert isinstance(begun, UploadTo)
        return begun.key

    def _holds(self, place: str, digest: str) -> bool:
        """This very update was brought there before, by a call whose answer got lost."""
        known = self._measured.get(place)
        return known is not None and known.ref.digest == digest

    def _keep(self, place: str, measured: StoredWeights) -> None:
        """From now on this is what its sender hands in; what it uploaded before has no use."""
        if self.driver.session.round != self._measured_round:
            self._measured_round = self.driver.session.round
            wanted = self._wanted(self._measured)
            self._measured = {p: m for p, m in self._measured.items() if p in wanted}
        replaced = self._measured.get(place)
        self._measured[place] = measured
        if replaced is not None and replaced.ref.key != measured.ref.key:
            self._discard(replaced.ref.key)

    def _wanted(self, places: Iterable[str]) -> set[str]:
        """Those of rounds that somebody may still hand in for."""
        newest, earlier = self.driver.session.round, self.driver.session.earlier_rounds
        return {p for p in places if round_of(p) >= newest or round_of(p) in earlier}

    def discard_incoming(self, participant_id: str, round_: int) -> None:
        """Remove what was adopted from where its sender had put it."""
        self._discard(incoming_key(round_, participant_id))

    def _discard(self, key: str) -> None:
        """Remove an object some time. What stays is of no harm."""

        def remove() -> None:
            with contextlib.suppress(StoreError):
                self.store.delete(key)

        with contextlib.suppress(RuntimeError):  # the process is ending
            asyncio.get_running_loop().run_in_executor(None, remove)


def _attempt_at(place: str) -> str:
    return attempt_key(place, uuid.uuid4().hex)


def _wrong_digest() -> InvalidUpdate:
    return InvalidUpdate("the upload's digest is not the one announced; send it again")


class _Reception:
    """One upload on its way to the store. Touched by one thread at a time."""

    def __init__(self, store: WeightsStore, key: str, size_bytes: int, digest: str) -> None:
        self.key = key
        self._store = store
        self._size_bytes = size_bytes
        self._digest = digest
        self._received = 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._inspector = Inspector()
        self._upload: Upload | None = None

    def add(self, data: bytes) -> None:
        self._received += len(data)
        if self._received > self._size_bytes:
            raise InvalidUpdate(f"the upload is longer than the {self._size_bytes} bytes announced")
        if data:
            self._waiting.append(data)
            self._waiting_bytes += len(data)

    @property
    def has_a_chunk(self) -> bool:
        """Worth a trip to a thread."""
        return self._waiting_bytes >= CHUNK_BYTES

    def flush(self) -> None:
        """Measure and write what is waiting."""
        if self._upload is None:
            self._upload = self._store.upload(self.key)
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for data in waiting:
            self._inspector.feed(data)
            self._upload.write(data)

    @property
    def is_open(self) -> bool:
        """There may be something to abort."""
        return self._upload is not None

    def complete(self) -> StoredWeights:
        """Write the rest, check the whole, make it durable. Leaves nothing behind if it fails."""
        try:
            return self._complete()
        finally:
            self.abort()

    def _complete(self) -> StoredWeights:
        if self._received != self._size_bytes:
            raise InvalidUpdate(
                f"the upload ended after {self._received} of {self._size_bytes} bytes"
            )
        self.flush()
        assert self._upload is not None
        if self._inspector.digest != self._digest:
            raise _wrong_digest()
        measured = self._inspector.result(self.key)
        # Until EndTrainingRound has accepted it, a participant may replace its own upload.
        self._upload.commit(overwrite=True)
        return measured

    def abort(self) -> None:
        """Harmless after a commit."""
        if self._upload is not None:
            self._upload.abort()
            self._upload = None
