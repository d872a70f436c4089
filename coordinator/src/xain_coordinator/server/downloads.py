"""Global models on their way to participants: inside an answer, in a stream, or past us.

Whoever is no member may have them, too, as operators' tools do that watch a session. But of what
members share it takes nothing: all strangers together have one small chunk at a time.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from xain_coordinator.admission import CHUNK_BYTES
from xain_coordinator.core.errors import Unavailable, UnknownModel
from xain_coordinator.core.keys import incoming_key
from xain_coordinator.core.values import WeightsRef
from xain_coordinator.driver import Driver
from xain_coordinator.ports import (
    DirectAccess,
    Reader,
    StoreError,
    StoreUnavailable,
    WeightsStore,
)
from xain_coordinator.server.places import SMALL_BYTES, Line, Place, Places
from xain_coordinator.threads import run_to_end
from xain_coordinator.turns import Turn
from xain_messaging.names import shortened

log = structlog.get_logger(__name__)

SMALL_MODEL_BYTES = CHUNK_BYTES
BLOCK_BYTES = 2 * CHUNK_BYTES  # of a larger model in a read
MAX_BLOCKS = 8
NUM_CHUNKS = 4  # being sent at a time; gRPC holds three copies of each until the line has taken it
NUM_SLOW_CHUNKS = 8  # beside them, over lines that have become slow meanwhile
SLOW_CHUNK_BYTES = SMALL_BYTES  # in a message over a line that is slow, or not known yet
# Downloads of those who are no members. They wait for each other, and each is a call that is open.
MAX_STRANGERS = 32
# Up to here a model travels inside the answer to StartTrainingRound: the bytes cost less than the
# stream that would carry them.
INLINE_BYTES = 64 << 10

Write = Callable[[WeightsRef, bytes], Awaitable[None]]

_GO_ON = "go on with the next offset"


@dataclass(frozen=True, slots=True)
class Offer:
    """How a participant can reach the store itself."""

    download_url: str
    upload_key: str
    upload_url: str


@dataclass(slots=True)
class Downloads:
    """access: how participants reach the store themselves; None if they cannot.

    verify: begins to compare the model with its digest; False if that was done just now.
    made: the bytes of the model under this key if it is small and was made just now, else nothing.
    """

    driver: Driver
    store: WeightsStore
    access: DirectAccess | None = None
    verify: Callable[[], bool] = lambda: False
    made: Callable[[str], bytes] = lambda key: b""
    # The latest small model, or its reading: everybody asks for it at once.
    _small_model: tuple[str, asyncio.Future[bytes]] | None = field(default=None)
    # Parts of larger ones, by key and offset, the one that was longest not asked for first. Those
    # who have been told of a round at the same time read its model at about the same pace.
    _blocks: dict[tuple[str, int], asyncio.Future[list[bytes]]] = field(default_factory=dict)
    _places: Places = field(default_factory=lambda: Places(NUM_CHUNKS, NUM_SLOW_CHUNKS))
    _strangers: Places = field(default_factory=lambda: Places(1, 0))
    _num_strangers: int = 0
    _is_suspect: bool = False  # what is in memory of the model

    async def send(
        self,
        key: str,
        offset: int,
        write: Write,
        turn: Turn,
        is_stranger: Callable[[], bool] = lambda: False,
    ) -> None:
        """A global model from an offset, in chunks.

        write: given each chunk, and the reference of the whole; returns when the line has taken it.
        turn: to be waited for before each chunk.
        is_stranger: whether it has no part in what members share. Asked before each chunk: a lease
        may run out meanwhile, and whoever has lost it may come back.
        Raises UnknownModel, and Unavailable if the line is stalled, or has become slow while many
        others are, or if there are too many transfers: the rest is to be had from its offset on.
        """
        model = self.driver.history.models.get(key)
        if model is None:
            raise UnknownModel(f"there is no global model under {shortened(key)!r}")
        ref = model.ref
        is_small = ref.size_bytes <= SMALL_MODEL_BYTES
        # Only one of them is kept, which a stranger could choose.
        small = await self._small(ref) if is_small and not is_stranger() else b""
        # In small chunks until it has shown that it is fast: there may be many that are not.
        line = Line(self._places, _GO_ON, is_slow=True)
        goes_on = offset > 0

        async def send_chunk(place: Place | None, *, is_apart: bool = False) -> int:
            """Returns how much it was. Nothing of it is held when this has returned.

            is_apart: see _chunk.
            """
            length = SLOW_CHUNK_BYTES if place is None else CHUNK_BYTES
            if small:
                chunk = small[offset : offset + length]
            else:
                # A line that is slow keeps to itself, and so does one that goes on somewhere: it
                # would push blocks out that others are about to read.
                is_alone = is_apart or (line.is_slow and (line.is_known or goes_on))
                chunk = await self._chunk(ref, offset, length, is_alone=is_alone, is_apart=is_apart)
            await turn(len(chunk))
            with line.passing(place):
                await write(ref, chunk)
                line.count(len(chunk))
            return len(chunk)

        place: Place | None = None  # a small chunk need not wait for one
        try:
            while offset < ref.size_bytes:
                if is_stranger():
                    if place is not None:
                        place.give_back()
                        place = None
                    async with self._turn_of_a_stranger():
                        offset += await send_chunk(None, is_apart=True)
                    continue
                if place is None and not line.is_slow:
                    place = await line.take()
                offset += await send_chunk(place)
                # A block may be gone by the time that it is our turn again.
                if place is not None and (line.is_slow or offset % BLOCK_BYTES == 0):
                    place.give_back()
                    place = None
        finally:
            if place is not None:
                place.give_back()

    @asynccontextmanager
    async def _turn_of_a_stranger(self) -> AsyncIterator[None]:
        """For one chunk. They come in the order in which they asked. Raises Unavailable."""
        if self._num_strangers >= MAX_STRANGERS:
            raise Unavailable(
                f"{MAX_STRANGERS} others who are no members download at the moment; come again "
                "later, or rendezvous first"
            )
        self._num_strangers += 1
        try:
            place = await Line(self._strangers, _GO_ON).take()
            try:
                yield
            finally:
                place.give_back()
        finally:
            self._num_strangers -= 1

    async def _chunk(
        self, ref: WeightsRef, offset: int, length: int, *, is_alone: bool, is_apart: bool
    ) -> bytes:
        """Up to `length` bytes from an offset, to the next border of chunks at most.

        is_alone: not read for others, too.
        is_apart: nor does a block stay longer because of it; alone as well.
        """
        length = min(length, CHUNK_BYTES - offset % CHUNK_BYTES, ref.size_bytes - offset)
        start = offset - offset % BLOCK_BYTES
        block = self._blocks.get((ref.key, start))
        if is_alone and block is None:
            return await run_to_end(_read, self.store, ref.key, offset, length)
        if block is None or not is_apart:
            block = self._block(ref, start)
        is_last = offset - start >= BLOCK_BYTES - CHUNK_BYTES
        # While others wait it would be gone again before its turn.
        is_next_soon = not is_alone and not self._places.fast.is_wanted
        if is_last and is_next_soon and start + BLOCK_BYTES < ref.size_bytes:
            self._block(ref, start + BLOCK_BYTES)  # read while the rest of this one is sent
        number, at = divmod(offset - start, CHUNK_BYTES)
        chunk = (await asyncio.shield(block))[number]
        return chunk if at == 0 and length == len(chunk) else chunk[at : at + length]

    def _block(self, ref: WeightsRef, start: int) -> asyncio.Future[list[bytes]]:
        """In chunks. Read once for all who are there at about the same time."""
        place = (ref.key, start)
        block = self._blocks.pop(place, None)
        if block is None:
            length = min(BLOCK_BYTES, ref.size_bytes - start)
            work = run_to_end(_read_chunks, self.store, ref.key, start, length)
            block = asyncio.ensure_future(work)
            block.add_done_callback(lambda read: self._forget_failed_block(place, read))
        self._blocks[place] = block  # at the end
        while len(self._blocks) > MAX_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return block

    def _forget_failed_block(
        self, place: tuple[str, int], read: asyncio.Future[list[bytes]]
    ) -> None:
        if (read.cancelled() or read.exception() is not None) and self._blocks.get(place) is read:
            del self._blocks[place]

    def note_damaged(self, digest: str) -> bool:
        """Have the model with this digest verified, because a participant found it damaged.

        Raises Unavailable until that has ended. What is in memory of the model is dropped once
        after that; returns whether it was.
        """
        model = self.driver.session.model
        if model is None or model.ref.digest != digest:
            return False
        if self.verify():
            self._is_suspect = True
            raise Unavailable(f"{model.ref.key} is being compared with its digest; come again soon")
        is_suspect, self._is_suspect = self._is_suspect, False
        if is_suspect:
            self._small_model = None
            self._blocks.clear()
        return is_suspect

    async def offer(self, participant_id: str, round_: int, ref: WeightsRef) -> Offer | None:
        """How to fetch this model and put the update of this round past us; None if it cannot be
        done. It is an offer only, so a store that cannot sign at the moment holds nobody up."""
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
        return Offer(access.download_url(model), upload, access.upload_url(upload))

    async def inline(self, ref: WeightsRef) -> bytes:
        """The model's bytes if it is to travel inside its reference, else nothing."""
        if ref.size_bytes > INLINE_BYTES:
            return b""
        return self.made(ref.key) or await self._small(ref)

    async def _small(self, ref: WeightsRef) -> bytes:
        """Read once for all who ask. Whoever is cancelled does not wait for the store."""
        if self._small_model is None or self._small_model[0] != ref.key:
            work = asyncio.to_thread(_read, self.store, ref.key, 0, ref.size_bytes)
            reading = asyncio.ensure_future(work)
            self._small_model = (ref.key, reading)
            reading.add_done_callback(self._forget_failure)
        return await asyncio.shield(self._small_model[1])

    def _forget_failure(self, reading: asyncio.Future[bytes]) -> None:
        failed = reading.cancelled() or reading.exception() is not None
        if failed and self._small_model is not None and self._small_model[1] is reading:
            self._small_model = None


def _read(store: WeightsStore, key: str, offset: int, length: int) -> bytes:
    # Opened anew each time, so that nobody who goes away leaves a file open.
    with store.open(key, offset, length) as reader:
        return _piece(reader, key, offset, length)


def _read_chunks(store: WeightsStore, key: str, offset: int, length: int) -> list[bytes]:
    with store.open(key, offset, length) as reader:
        return [
            _piece(reader, key, start, min(CHUNK_BYTES, offset + length - start))
            for start in range(offset, offset + length, CHUNK_BYTES)
        ]


def _piece(reader: Reader, key: str, offset: int, length: int) -> bytes:
    data = reader.read(offset, length)
    if len(data) < length:
        raise StoreUnavailable(f"{key!r} is shorter in the store than in the journal")
    return data
