"""Weights in chunks: uploads go to disk as they come, downloads come from disk as they go.

Whoever uploads, an object is visible only when it is whole and measured, and an accepted one is
never touched again: the last look at the session and the commit happen under one lock per
participant, the same lock that EndTrainingRound holds.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from xain_coordinator.admission import CHUNK_BYTES, Inspector, measure
from xain_coordinator.core.commands import BeginUpload
from xain_coordinator.core.errors import InvalidUpdate, TooLarge, Unavailable, UnknownModel
from xain_coordinator.core.keys import incoming_key, update_key
from xain_coordinator.core.replies import AlreadyUploaded, UploadTo
from xain_coordinator.core.values import StoredWeights, WeightsRef
from xain_coordinator.driver import Driver
from xain_coordinator.ports import (
    DirectAccess,
    KeyNotFound,
    StoreError,
    StoreUnavailable,
    Upload,
    WeightsStore,
)
from xain_coordinator.server.group_writer import GroupWriter
from xain_coordinator.threads import run_to_end
from xain_proto.fl.coordinator_pb2 import PutWeightsRequest

log = structlog.get_logger(__name__)

SMALL_MODEL_BYTES = CHUNK_BYTES
# Up to here a model travels inside the answer to StartTrainingRound: the bytes cost less than the
# stream that would carry them.
INLINE_BYTES = 64 << 10


class Bucket(Protocol):
    """Where participants put updates under names of their own, as XAIN's do."""

    def fetch(self, round_: int, name: str) -> None:
        """Bring an update to update_key(round_, name). Raises KeyNotFound, InvalidUpdate, TooLarge
        and StoreUnavailable."""


@dataclass(frozen=True, slots=True)
class Offer:
    """How a participant can reach the store itself."""

    download_url: str
    upload_key: str
    upload_url: str


@dataclass(slots=True)
class Transfer:
    """Uploads and downloads of one session.

    max_update_bytes: larger uploads are refused before a byte is written.
    access: how participants reach the store itself; None if they cannot.
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
    _measured: dict[str, StoredWeights] = field(default_factory=dict)
    _measured_round: int = -1
    _small_model: tuple[str, bytes] = ("", b"")
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

    # --- up ---

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
        key = await self._begin(participant_id, header.round, digest, header.size_bytes)
        if isinstance(key, WeightsRef):
            return key
        reception = _Reception(self.store, key, header.size_bytes, digest)
        try:
            reception.add(first.data)
            async for request in requests:
                reception.add(request.data)
                if reception.has_a_chunk:
                    await run_to_end(reception.flush)
            async with self.exclusive(participant_id):
                # Much may have happened meanwhile; this is the last look before the commit.
                key = await self._begin(participant_id, header.round, digest, header.size_bytes)
                if isinstance(key, WeightsRef):
                    return key
                return await self._complete(header.round, reception)
        finally:
            if reception.is_open:
                await run_to_end(reception.abort)

    async def take(self, participant_id: str, round_: int, data: bytes, digest: str) -> None:
        """Store an update that came inside its reference. The caller holds `exclusive`.

        Raises as `receive` does.
        """
        key = await self._begin(participant_id, round_, digest, len(data))
        if isinstance(key, WeightsRef):
            return
        inspector = Inspector()
        inspector.feed(data)
        _check_digest(inspector, digest)
        measured = inspector.result(key)
        self._measured.pop(key, None)
        await self._small_uploads.put(key, data)
        self._keep_measured(round_, measured)

    async def adopt(self, participant_id: str, round_: int, size_bytes: int, digest: str) -> None:
        """Bring to its place what a participant has put into the store itself, checked against what
        it says that it put. The caller holds `exclusive`.

        What counts is a copy: the participant can write to its own place until its URL expires.
        Raises as `receive` does; does nothing if nothing is there.
        """
        key = await self._begin(participant_id, round_, digest, size_bytes)
        if isinstance(key, WeightsRef) or self.access is None:
            return
        self._measured.pop(key, None)
        source = incoming_key(round_, participant_id)
        try:
            await run_to_end(self.access.copy, source, key)
        except KeyNotFound:
            return
        measured = await run_to_end(measure, self.store, key, size_bytes)
        if measured.ref.digest != digest:
            raise _wrong_digest()
        self._keep_measured(round_, measured)

    def discard(self, participant_id: str, round_: int) -> None:
        """Remove what `adopt` has copied, some time. What stays is of no harm."""

        def remove() -> None:
            with contextlib.suppress(StoreError):
                self.store.delete(incoming_key(round_, participant_id))

        asyncio.get_running_loop().run_in_executor(None, remove)

    async def _begin(
        self, participant_id: str, round_: int, digest: str, size_bytes: int
    ) -> str | WeightsRef:
        """The key to write under, or the reference if this very update has been accepted."""
        if size_bytes > self.max_update_bytes:
            raise TooLarge(
                f"an upload of {size_bytes} bytes; at most {self.max_update_bytes} are taken"
            )
        begun = await self.driver.submit(BeginUpload(participant_id, round_, digest, size_bytes))
        if isinstance(begun, AlreadyUploaded):
            return begun.ref
        assert isinstance(begun, UploadTo)
        return begun.key

    async def _complete(self, round_: int, reception: "_Reception") -> WeightsRef:
        # If this fails half-way, nobody knows what lies there: then it is to be measured again.
        self._measured.pop(reception.key, None)
        measured = await run_to_end(reception.complete)
        self._keep_measured(round_, measured)
        return measured.ref

    def _keep_measured(self, round_: int, measured: StoredWeights) -> None:
        if round_ != self._measured_round:
            self._measured.clear()  # those of other rounds are not asked for any more
            self._measured_round = round_
        self._measured[measured.ref.key] = measured

    async def stored(self, participant_id: str, round_: int, name: str) -> StoredWeights | None:
        """What lies where this participant's update of this round ought to; None if nothing does.

        Raises InvalidUpdate, and what BeginUpload refuses: no stranger makes us read a file.
        """
        key = update_key(round_, name)
        known = self._measured.get(key)
        if known is not None:
            return known
        if self.driver.session.accepted(participant_id, round_) is None:
            await self.driver.submit(BeginUpload(participant_id, round_, digest=""))
        try:
            return await run_to_end(self._measure, key)
        except KeyNotFound:
            return None

    async def named(self, participant_id: str, round_: int, name: str) -> StoredWeights | None:
        """What a participant has put under a name of its own without saying more, as XAIN's do;
        None if there is nothing. The caller holds `exclusive`.

        Raises as `stored` does, and TooLarge.
        """
        if self.bucket is not None and self.driver.session.accepted(participant_id, round_) is None:
            # Nobody makes us write over what lies under another's name.
            await self.driver.submit(
                BeginUpload(participant_id, round_, digest="", upload_name=name)
            )
            self._measured.pop(update_key(round_, name), None)
            try:
                await run_to_end(self.bucket.fetch, round_, name)
            except KeyNotFound:
                return None
        return await self.stored(participant_id, round_, name)

    def _measure(self, key: str) -> StoredWeights:
        measured = measure(self.store, key)
        # Whoever wrote it may have died before it was durable, and it is about to count.
        self.store.settle(key)
        return measured

    # --- down ---

    async def send(self, key: str, offset: int) -> AsyncIterator[tuple[WeightsRef, bytes]]:
        """A global model from an offset, in chunks, each with the reference of the whole.

        Raises UnknownModel.
        """
        model = self.driver.history.models.get(key)
        if model is None:
            raise UnknownModel(f"there is no global model under {key!r}")
        ref = model.ref
        if ref.size_bytes <= SMALL_MODEL_BYTES:
            data = await self._small(ref)
            yield ref, data[offset:]
            return
        while offset < ref.size_bytes:
            # Opened for each chunk: a client that reads slowly, or not at all, holds no file.
            data = await run_to_end(_read, self.store, key, offset)
            if not data:
                raise StoreUnavailable(f"{key!r} is shorter in the store than in the journal")
            offset += len(data)
            yield ref, data

    async def offer(self, participant_id: str, round_: int, ref: WeightsRef) -> Offer | None:
        """How to fetch this model and put the update of this round past us; None if it cannot be
        done. It is an offer only, so a store that cannot sign at the moment holds nobody up."""
        if self.access is None:
            return None
        key = incoming_key(round_, participant_id)
        try:
            # In a thread: the credentials to sign with may have to be renewed.
            return await run_to_end(self._sign, self.access, ref.key, key)
        except StoreError as error:
            log.warning("cannot_sign", participant=participant_id, round=round_, error=str(error))
            return None

    @staticmethod
    def _sign(access: DirectAccess, model: str, upload: str) -> Offer:
        return Offer(access.download_url(model), upload, access.upload_url(upload))

    async def inline(self, ref: WeightsRef) -> bytes:
        """The model's bytes if it is to travel inside its reference, else nothing."""
        return await self._small(ref) if ref.size_bytes <= INLINE_BYTES else b""

    async def _small(self, ref: WeightsRef) -> bytes:
        """A small model is asked for by everybody at once: keep the latest one at hand."""
        key, data = self._small_model
        if key != ref.key:
            data = await run_to_end(_read, self.store, ref.key, 0)
            self._small_model = (ref.key, data)
        return data


def _read(store: WeightsStore, key: str, offset: int) -> bytes:
    with store.open(key) as reader:
        return reader.read(offset, CHUNK_BYTES)


def _check_digest(inspector: Inspector, announced: str) -> None:
    if inspector.digest != announced:
        raise _wrong_digest()


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
        _check_digest(self._inspector, self._digest)
        measured = self._inspector.result(self.key)
        # Until EndTrainingRound has accepted it, a participant may replace its own upload.
        self._upload.commit(overwrite=True)
        return measured

    def abort(self) -> None:
        """Harmless after a commit."""
        if self._upload is not None:
            self._upload.abort()
            self._upload = None
