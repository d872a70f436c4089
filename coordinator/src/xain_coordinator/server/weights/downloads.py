"""Global models on their way to participants and to operators' tools: inside an answer, in a
stream, or past gRPC."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from xain_coordinator.core.vocabulary.errors import Reason, Refusal, Unavailable
from xain_coordinator.core.vocabulary.keys import incoming_key, is_model, round_of, update_key
from xain_coordinator.core.vocabulary.values import BYTES, GlobalModel, WeightsRef
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import (
    DirectAccess,
    StoreError,
    StoreUnavailable,
    WeightsStore,
)
from xain_coordinator.server.weights.weights_port import WeightsPort
from xain_foundation.logs.logger import get_logger
from xain_foundation.names import shortened
from xain_foundation.threads import run_to_end
from xain_wire.limits import MAX_INLINE_BYTES, STALLED_S
from xain_wire.np.codec import MAX_HEADER_BYTES

log = get_logger(__name__)

LEAST_MESSAGE_BYTES = 4 << 10

Write = Callable[[WeightsRef, bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Offer:
    """URLs by which a participant moves weights past gRPC. upload_key: what it hands in, unless the
    answer to its PUT names another key."""

    download_url: str
    upload_key: str
    upload_url: str


@dataclass(slots=True)
class Downloads:
    """access: how participants reach the store themselves; None if they cannot.
    port: the weights port; None without one.
    max_update_bytes: the most that an update may have.
    max_blocks: of the models in memory. stalled_s: limit of sending one message.

    verify: begins to compare the model with its digest; False if that was done just now.
    made: the bytes of the model under this key if it is small and was made just now, else nothing.
    """

    max_inline_bytes = MAX_INLINE_BYTES
    # A message of a download has so many bytes of weights. gRPC holds three copies of each message
    # until the connection has taken it.
    message_bytes = 64 << 10
    # A read of the store has so many bytes. All downloads that are about as far share a block.
    block_bytes = 256 << 10

    driver: Driver
    store: WeightsStore
    access: DirectAccess | None = None
    verify: Callable[[], bool] = lambda: False
    made: Callable[[str], bytes] = lambda key: b""
    port: WeightsPort | None = None
    max_update_bytes: int = 0
    max_blocks: int = 64
    stalled_s: float = STALLED_S
    # Parts of models, by key and offset, the least recently used first. Participants that have been
    # told of a round at the same time read its model at about the same speed; a small model is one
    # part, which all ask for at once.
    _blocks: dict[tuple[str, int], asyncio.Future[bytes]] = field(default_factory=dict)
    _is_suspect: bool = False  # what is in memory of the model

    async def send(self, key: str, offset: int, write: Write, num_bytes: int = 0) -> None:
        """Send a global model from an offset on.

        num_bytes: that the receiver asks for; 0: all. On a slow line it asks for few, and gets them
        in small messages, since what is not whole when a call ends is lost.
        write: given the data of each message, and the reference of the whole; returns when the
        connection has taken it.
        Raises UNKNOWN_MODEL, and Unavailable if the receiver takes nothing: the rest can be had
        from its offset on.
        """
        model = self.driver.history.models.get(key)
        if model is None:
            if is_model(key) and round_of(key) in self.driver.history.removed:
                raise Refusal(
                    Reason.UNKNOWN_MODEL, f"the model {key!r} was removed by [storage] keep_models"
                )
            raise Refusal(
                Reason.UNKNOWN_MODEL, f"there is no global model under {shortened(key)!r}"
            )
        ref = model.ref
        end, message_bytes = ref.size_bytes, self.message_bytes
        if num_bytes:
            end = min(end, offset + num_bytes)
            message_bytes = min(message_bytes, max(LEAST_MESSAGE_BYTES, num_bytes // 4))
        while offset < end:
            start = offset - offset % self.block_bytes
            block = await asyncio.shield(self._block(ref, start))
            data = block[offset - start : min(end, offset + message_bytes) - start]
            del block
            try:
                async with asyncio.timeout(self.stalled_s):
                    await write(ref, data)
            except TimeoutError:
                raise Unavailable(
                    f"the receiver took less than {len(data)} bytes in {self.stalled_s:g} s; go on "
                    "with the next offset"
                ) from None
            offset += len(data)

    def _block(self, ref: WeightsRef, start: int) -> asyncio.Future[bytes]:
        """Read a block once for all downloads that are there at about the same time."""
        block_key = (ref.key, start)
        block = self._blocks.pop(block_key, None)
        if block is None:
            length = min(self.block_bytes, ref.size_bytes - start)
            block = asyncio.ensure_future(run_to_end(_read, self.store, ref.key, start, length))
            block.add_done_callback(lambda read: self._forget_failed_block(block_key, read))
        self._blocks[block_key] = block  # at the end
        while len(self._blocks) > self.max_blocks:
            del self._blocks[next(iter(self._blocks))]
        return block

    def _forget_failed_block(self, block_key: tuple[str, int], read: asyncio.Future[bytes]) -> None:
        """Drop a block whose read has failed, so that the next download reads it again."""
        if (read.cancelled() or read.exception() is not None) and self._blocks.get(
            block_key
        ) is read:
            del self._blocks[block_key]

    def note_damaged(self, digest: str) -> bool:
        """Have the model with this digest verified, because a participant found it damaged. Raises
        Unavailable until that has ended; the next call drops the blocks in memory and returns True,
        others return False."""
        model = self.driver.session.model
        if model is None or model.ref.digest != digest:
            return False
        if self.verify():
            self._is_suspect = True
            raise Unavailable(f"{model.ref.key} is being compared with its digest; come again soon")
        is_suspect, self._is_suspect = self._is_suspect, False
        if is_suspect:
            self._blocks.clear()
        return is_suspect

    @property
    def has_offers(self) -> bool:
        """Whether participants may move weights past gRPC."""
        return self.access is not None or self.port is not None

    async def offer(self, participant_id: str, round_: int, model: GlobalModel) -> Offer | None:
        """Signed URLs to fetch this model and to put the update of this round; None if the store
        cannot sign at the moment: participants then move weights through gRPC."""
        ref = model.ref
        if self.port is not None:
            key = update_key(round_, participant_id)
            is_known = model.dtype != BYTES and not model.is_empty
            most = ref.size_bytes + MAX_HEADER_BYTES if is_known else self.max_update_bytes
            return Offer(
                self.port.url("GET", participant_id, round_, ref.key, ref.size_bytes),
                key,
                self.port.url("PUT", participant_id, round_, key, most),
            )
        if self.access is None:
            return None
        key = incoming_key(round_, participant_id)
        try:
            # In a thread: the credentials to sign with may have to be renewed.
            return await asyncio.to_thread(self._sign, self.access, ref.key, key)
        except StoreError as error:
            log.warning("cannot_sign", participant=participant_id, round=round_, error=str(error))
            return None

    @staticmethod
    def _sign(access: DirectAccess, model: str, upload: str) -> Offer:
        """URLs that the store signs. model, upload: keys."""
        return Offer(access.download_url(model), upload, access.upload_url(upload))

    async def inline(self, ref: WeightsRef) -> bytes:
        """The model's bytes if it is to travel inside its reference, else nothing. A cancelled
        caller does not wait for the store."""
        if ref.size_bytes > self.max_inline_bytes:
            return b""
        return self.made(ref.key) or await asyncio.shield(self._block(ref, 0))


def _read(store: WeightsStore, key: str, offset: int, length: int) -> bytes:
    """Read a part of a stored object. Blocks. Raises StoreError, also if the object is too
    short."""
    # Opened anew each time, so that a cancelled download leaves no file open.
    with store.open(key, offset, length) as reader:
        data = reader.read(offset, length)
    if len(data) < length:
        raise StoreUnavailable(f"{key!r} is shorter in the store than in the journal")
    return data
