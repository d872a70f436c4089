"""Weights in chunks: uploads go to disk as they come, downloads come from disk as they go.

Whoever uploads, an object is visible only when it is whole and measured, and an accepted one is
never touched again: the last look at the session and the commit happen under one lock per
participant, the same lock that EndTrainingRound holds.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from xain_coordinator.admission import CHUNK_BYTES, Inspector, measure
from xain_coordinator.core.commands import BeginUpload
from xain_coordinator.core.errors import InvalidUpdate, TooLarge, UnknownModel
from xain_coordinator.core.replies import AlreadyUploaded, UploadTo
from xain_coordinator.core.values import StoredWeights, WeightsRef
from xain_coordinator.driver import Driver
from xain_coordinator.ports import KeyNotFound, Upload, WeightsStore
from xain_proto.fl.coordinator_pb2 import PutWeightsRequest

SMALL_MODEL_BYTES = CHUNK_BYTES
# Up to here a model travels inside the answer to StartTrainingRound: the bytes cost less than the
# stream that would carry them.
INLINE_BYTES = 64 << 10


@dataclass(slots=True)
class Transfer:
    """Uploads and downloads of one session.

    max_update_bytes: larger uploads are refused before a byte is written.
    """

    driver: Driver
    store: WeightsStore
    max_update_bytes: int
    _locks: dict[str, tuple[asyncio.Lock, int]] = field(default_factory=dict)
    _measured: dict[str, StoredWeights] = field(default_factory=dict)
    _measured_round: int = -1
    _small_model: tuple[str, bytes] = ("", b"")

    @asynccontextmanager
    async def exclusive(self, participant_id: str) -> AsyncIterator[None]:
        """One at a time per participant. The lock goes away with its last user."""
        lock, users = self._locks.get(participant_id, (asyncio.Lock(), 0))
        self._locks[participant_id] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[participant_id]
            if users == 1:
                del self._locks[participant_id]
            else:
                self._locks[participant_id] = (lock, users - 1)

    # --- up ---

    async def receive(
        self, participant_id: str, requests: AsyncIterator[PutWeightsRequest]
    ) -> WeightsRef:
        """Take one upload. Returns when it is durable.

        Raises TooLarge, InvalidUpdate, and whatever BeginUpload refuses.
        """
        first = await anext(requests, None)
        if first is None or not first.HasField("header"):
            raise InvalidUpdate("the first message of an upload must carry its header")
        header = first.header
        begin = BeginUpload(participant_id, header.round, header.digest.hex())
        if header.size_bytes > self.max_update_bytes:
            raise _too_large(header.size_bytes, self.max_update_bytes)
        begun = await self.driver.submit(begin)
        if isinstance(begun, AlreadyUploaded):
            return begun.ref
        assert isinstance(begun, UploadTo)
        reception = _Reception(self.store, begun.key, header.size_bytes, header.digest.hex())
        try:
            reception.add(first.data)
            async for request in requests:
                reception.add(request.data)
                if reception.has_a_chunk:
                    await asyncio.to_thread(reception.flush)
            async with self.exclusive(participant_id):
                begun = await self.driver.submit(begin)  # much may have happened meanwhile
                if isinstance(begun, AlreadyUploaded):
                    return begun.ref
                measured = await asyncio.to_thread(reception.complete)
                self._remember(header.round, measured)
            return measured.ref
        finally:
            if reception.is_open:
                await asyncio.to_thread(reception.abort)

    async def take(self, participant_id: str, round_: int, data: bytes, digest: str) -> None:
        """Store an update that came inside its reference. The caller holds `exclusive`.

        Raises as `receive` does.
        """
        if len(data) > self.max_update_bytes:
            raise _too_large(len(data), self.max_update_bytes)
        begun = await self.driver.submit(BeginUpload(participant_id, round_, digest))
        if isinstance(begun, AlreadyUploaded):
            return
        assert isinstance(begun, UploadTo)
        reception = _Reception(self.store, begun.key, len(data), digest)
        reception.add(data)
        self._remember(round_, await asyncio.to_thread(reception.complete))

    def _remember(self, round_: int, measured: StoredWeights) -> None:
        if round_ != self._measured_round:
            self._measured.clear()  # those of older rounds are not asked for any more
            self._measured_round = round_
        self._measured[measured.ref.key] = measured

    async def stored(self, key: str) -> StoredWeights | None:
        """What lies under the key of an update; None if nothing does. Raises InvalidUpdate."""
        known = self._measured.get(key)
        if known is not None:
            return known
        try:
            return await asyncio.to_thread(measure, self.store, key)
        except KeyNotFound:
            return None

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
        reader = await asyncio.to_thread(self.store.open, key)
        try:
            while offset < ref.size_bytes:
                data = await asyncio.to_thread(reader.read, offset, CHUNK_BYTES)
                offset += len(data)
                yield ref, data
        finally:
            reader.close()

    async def inline(self, ref: WeightsRef) -> bytes:
        """The model's bytes if it is to travel inside its reference, else nothing."""
        return await self._small(ref) if ref.size_bytes <= INLINE_BYTES else b""

    async def _small(self, ref: WeightsRef) -> bytes:
        """A small model is asked for by everybody at once: keep the latest one at hand."""
        key, data = self._small_model
        if key != ref.key:
            data = await asyncio.to_thread(_read_all, self.store, ref)
            self._small_model = (ref.key, data)
        return data


def _read_all(store: WeightsStore, ref: WeightsRef) -> bytes:
    with store.open(ref.key) as reader:
        return reader.read(0, ref.size_bytes)


class _Reception:
    """One upload on its way to the store. Touched by one thread at a time."""

    def __init__(self, store: WeightsStore, key: str, size_bytes: int, digest: str) -> None:
        self._store = store
        self._key = key
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
            self._upload = self._store.upload(self._key)
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
            raise InvalidUpdate("the upload's digest is not the one announced; send it again")
        measured = self._inspector.result(self._key)
        # Until EndTrainingRound has accepted it, a participant may replace its own upload.
        self._upload.commit(overwrite=True)
        return measured

    def abort(self) -> None:
        """Harmless after a commit."""
        if self._upload is not None:
            self._upload.abort()
            self._upload = None


def _too_large(size_bytes: int, limit: int) -> TooLarge:
    return TooLarge(f"an upload of {size_bytes} bytes; at most {limit} are taken")
