"""Updates on their way in: they go to disk as they come, or are brought from where their sender has
put them.

An object is visible only when it is whole and measured, and every attempt has a key of its own. So
an accepted one is never touched again, not even by a request that everybody gave up and that
reaches a store far away in the end. An upload that goes on after it broke off is still the same
attempt: it is committed once, or never. The last look at the session and the commit happen under
one lock per participant, the same lock that EndTrainingRound holds.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from xain_coordinator.core.attempts import RULE as ASSEMBLE
from xain_coordinator.core.errors import InvalidUpdate, NotAMember, TooLarge, Unavailable
from xain_coordinator.core.keys import (
    incoming_key,
    is_journalled,
    journalled_key,
    piece_of,
    place_of,
    update_key,
)
from xain_coordinator.core.questions import MayUpload
from xain_coordinator.core.replies import AlreadyUploaded, UploadTo
from xain_coordinator.core.values import BYTES, GlobalModel, Phase, StoredWeights, WeightsRef
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import DirectAccess, KeyNotFound, WeightsStore
from xain_coordinator.server.adoptions import Adoptions
from xain_coordinator.server.downloads import INLINE_BYTES
from xain_coordinator.server.open_rounds import OpenRounds, new_attempt_at
from xain_coordinator.server.unfinished import UnfinishedUploads
from xain_coordinator.updates.background import Background
from xain_coordinator.updates.content import TreesCheck, check_announced_size
from xain_coordinator.updates.measuring import BaseModel, measure, measure_bytes
from xain_coordinator.updates.readings import Readings
from xain_coordinator.updates.reception import Announced, Decoder, Reception
from xain_coordinator.updates.streams import NUM_WRITES, Intake, Read
from xain_foundation.threads import run_to_end, wait_to_end
from xain_proto.fl.coordinator_pb2 import Encoding
from xain_proto.np import ENCODING_BITS
from xain_proto.np.codec import MAX_HEADER_BYTES

# Uploads at a time. Each takes some 25 KB, and its sender can make gRPC hold more.
MAX_UPLOADS = 500
# When there are so many, one that has waited for its sender for so long is ended for a new one.
MAX_WAIT_S = 5.0

# Of an update that comes inside its call: that of our participants, and its header.
MAX_INLINE_BYTES = INLINE_BYTES + MAX_HEADER_BYTES


T = TypeVar("T")


class Source(Protocol):
    """Where the bytes of an upload come from."""

    async def into(self, reception: Reception) -> None:
        """All that comes. Returns when it is written, though bytes may be missing. Raises
        Unavailable, and what Reception.flush raises."""


class Bucket(Protocol):
    """Where participants put updates under names of their own, as XAIN's do."""

    def fetch(self, round_: int, name: str, target: str) -> None:
        """Bring an update to the key `target` of the session's store. Raises KeyNotFound,
        InvalidUpdate, TooLarge and StoreUnavailable."""


@dataclass(frozen=True, slots=True)
class Received:
    """An update that is there. encoding: how it has travelled this time."""

    ref: WeightsRef
    encoding: "Encoding.ValueType"


@dataclass(slots=True)
class Uploads:
    """Of one session.

    max_update_bytes: larger uploads are refused before a byte is written.
    access: how participants reach the store themselves; None if they cannot.
    bucket: where those who say no more than a name have put their update; None: in the store.
    max_update_norm: L2 norm that the difference to the model may have; None: any.
    encoding: how large updates are wanted.
    receiving: who is uploading at the moment.
    """

    driver: Driver
    store: WeightsStore
    max_update_bytes: int
    access: DirectAccess | None = None
    bucket: Bucket | None = None
    max_update_norm: float | None = None
    encoding: "Encoding.ValueType" = Encoding.PLAIN
    receiving: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    _locks: dict[str, tuple[asyncio.Lock, int]] = field(default_factory=dict)
    # The latest of each place, which is "{round}/{name}", of rounds that may be handed in for.
    _measured: dict[str, StoredWeights] = field(default_factory=dict)
    _measured_round: int = -1
    _has_swept: bool = False  # once: predecessors write nothing any more
    # One at a time: parsed JSON takes many times the memory of its text.
    _parsing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _trees: TreesCheck = field(init=False)
    _intakes: dict[Intake, None] = field(default_factory=dict)
    _writes: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(NUM_WRITES))
    _readings: Readings = field(default_factory=Readings)
    _background: Background = field(init=False)
    _rounds: OpenRounds = field(init=False)
    _unfinished: UnfinishedUploads = field(init=False)
    _adoptions: Adoptions | None = field(init=False)

    def __post_init__(self) -> None:
        self._trees = TreesCheck(self.store)
        self._background = Background(self.store)
        self._rounds = OpenRounds(self.driver, self.store, self.max_update_norm)
        self._unfinished = UnfinishedUploads(
            self.driver, self.store, self._rounds, self._readings, self._background
        )
        self._adoptions = None
        if self.access is not None:
            self._adoptions = Adoptions(
                self.access, self.store, self._rounds, self._readings, self._background
            )

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

    async def receive(self, participant_id: str, read: Read) -> Received:
        """Take one upload. Returns when it is durable.

        A participant has one upload at a time: a new one ends the one before, whose sender has
        lost its connection or its patience. read: see Intake.
        Raises TooLarge, InvalidUpdate, Unavailable, and whatever MayUpload refuses.
        """
        return await self._in_turn(participant_id, lambda: self._receive(participant_id, read))

    async def receive_body(
        self, participant_id: str, announced: Announced, offset: int, body: Source
    ) -> WeightsRef:
        """Take one upload whose announcement has come, and whose bytes from `offset` on come from
        `body`; otherwise as `receive`."""
        return await self._in_turn(
            participant_id, lambda: self._receive_body(participant_id, announced, offset, body)
        )

    async def _receive_body(
        self, participant_id: str, announced: Announced, offset: int, body: Source
    ) -> WeightsRef:
        await self._unfinished.until_picked_up(participant_id)
        return await self._take_in(participant_id, announced, offset, Encoding.PLAIN, body)

    async def _in_turn(self, participant_id: str, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run an upload in place of the participant's earlier one."""
        session = self.driver.session
        # A stranger takes no place in memory, not even until its header is there. After the end the
        # answer is the same for all, and nobody is held up any more.
        if session.phase is not Phase.FINISHED and participant_id not in session.members:
            raise NotAMember(participant_id)
        if participant_id not in self.receiving:
            self._make_room()
        task = asyncio.ensure_future(begin())
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

    async def _receive(self, participant_id: str, read: Read) -> Received:
        # Before anything of this one is in memory: gigabytes may have to be read.
        await self._unfinished.until_picked_up(participant_id)
        intake = Intake(read, self._writes)
        self._intakes[intake] = None
        try:
            header = await intake.header()
            announced = Announced(header.round, header.size_bytes, header.digest.hex())
            ref = await self._take_in(
                participant_id, announced, header.offset, header.encoding, intake
            )
            return Received(ref, header.encoding)
        finally:
            del self._intakes[intake]

    def _make_room(self) -> None:
        """Admit one more upload: end the one that has waited longest. Raises Unavailable."""
        if len(self.receiving) < MAX_UPLOADS:
            return
        longest = max(self._intakes, key=lambda intake: intake.waited_s, default=None)
        if longest is None or longest.waited_s < MAX_WAIT_S:
            raise Unavailable(f"{MAX_UPLOADS} uploads are under way; come again in a moment")
        longest.end("the upload has waited for its sender, and others wait for its place")

    async def _take_in(
        self,
        participant_id: str,
        announced: Announced,
        offset: int,
        encoding: "Encoding.ValueType",
        source: Source,
    ) -> WeightsRef:
        place = await self._begin(participant_id, announced)
        if isinstance(place, WeightsRef):
            return place
        if self._holds(place, announced.digest):
            return self._measured[place].ref
        reception = await self._unfinished.reception(participant_id, place, announced, offset)
        is_broken = False  # what is wrong with the update is wrong the next time; a line is not
        try:
            self._decode(reception, encoding)
            await source.into(reception)
            if not reception.is_whole:
                raise Unavailable(
                    f"the upload ended after {reception.offset} of {announced.size_bytes} bytes; "
                    "FindUpload says where it can go on"
                )
            # Once it is whole, a line that breaks does not throw it away.
            return await wait_to_end(
                asyncio.ensure_future(self._commit(participant_id, place, reception))
            )
        except (asyncio.CancelledError, Unavailable):
            is_broken = True
            raise
        finally:
            if is_broken and reception.is_open and reception.offset:
                await self._unfinished.keep(participant_id, reception)
            elif reception.is_open:
                await run_to_end(reception.abort)

    async def _commit(self, participant_id: str, place: str, reception: Reception) -> WeightsRef:
        """Make what is whole durable, and the one that its sender hands in."""
        announced = reception.announced
        async with self.exclusive(participant_id):
            # Much may have happened meanwhile; this is the last look before the commit.
            latest = await self._begin(participant_id, announced)
            if isinstance(latest, WeightsRef):
                return latest
            measured = await run_to_end(reception.complete)
            if not self._keep(place, measured):
                await self._begin(participant_id, announced)  # tells its sender why
        return measured.ref

    def encoding_for(self, model: GlobalModel) -> "Encoding.ValueType":
        """How updates of this model are wanted."""
        return self.encoding if _has_differences(model) else Encoding.PLAIN

    async def find_unfinished(self, participant_id: str, announced: Announced) -> int:
        """How much of an upload that broke off is there to be gone on with: bytes of the object.
        All of them if nothing is missing; what comes next is then answered from its header.

        An upload of the participant that still seems to be under way ends: whoever asks has lost
        its connection. Raises as `receive` does.
        """
        place = await self._begin(participant_id, announced)
        if isinstance(place, WeightsRef):
            return announced.size_bytes
        earlier = self.receiving.get(participant_id)
        if earlier is not None and not self._holds(place, announced.digest):
            earlier.cancel()
            await asyncio.wait([earlier])
        if self._holds(place, announced.digest):
            return announced.size_bytes
        return await self._unfinished.find(participant_id, place, announced)

    def _decode(self, reception: Reception, encoding: "Encoding.ValueType") -> None:
        """Raises InvalidUpdate."""
        if encoding == Encoding.PLAIN:
            return
        bits = ENCODING_BITS.get(encoding)
        if bits is None:
            raise InvalidUpdate(f"no encoding of updates has the number {encoding}")
        model = self._rounds.model_of(reception.announced.round)
        if model is None or not _has_differences(model):
            raise InvalidUpdate(
                "only updates of a float32 model that there is can be encoded; send it as it is"
            )
        decoder = Decoder(bits, BaseModel(self.store, model))
        if reception.header is not None:
            decoder.go_on(reception.header, reception.offset)
        elif reception.offset:
            raise InvalidUpdate(f"no tile of the update begins at its byte {reception.offset}")
        reception.decoder = decoder

    async def close(self) -> None:
        """Let go of the uploads that have broken off. The next process goes on with them, where the
        store can. Nothing is received any more; what is being read is read to its end."""
        self._readings.end()
        receiving = list(self.receiving.values())
        for one in receiving:
            one.cancel()  # its call may have ended, and what came of it not be kept yet
        if receiving:
            await asyncio.wait(receiving)
        await self._unfinished.close()
        if self._adoptions is not None:
            await self._adoptions.close()
        await self._background.close()

    # --- updates that come in another way ---

    async def take(
        self, participant_id: str, round_: int, data: bytes, digest: str
    ) -> StoredWeights | None:
        """Measure an update that came inside its reference. The caller holds `exclusive`, and
        commits it to the journal under the key that is returned, together with its event.

        None if the session has accepted another update. Raises as `receive` does.
        """
        if len(data) > MAX_INLINE_BYTES:
            raise TooLarge(
                f"an update of {len(data)} bytes inside its call; at most {MAX_INLINE_BYTES} are "
                "taken so, larger ones by PutWeights"
            )
        place = await self._begin(participant_id, Announced(round_, len(data), digest))
        if isinstance(place, WeightsRef):
            return await self.find(participant_id, round_, place.key, digest)
        self._forget_earlier_rounds()
        key = journalled_key(place, uuid.uuid4().hex)
        distance = self._rounds.distance(round_)
        # Without a distance there is nothing to read, and a small object costs less than a thread.
        if distance is None:
            return measure_bytes(data, key, None, digest)
        return await run_to_end(measure_bytes, data, key, distance, digest)

    async def check_content(
        self,
        participant_id: str,
        round_: int,
        weights: StoredWeights | None,
        array: bytes = b"",
    ) -> None:
        """Refuse bytes that are no update of the round's model, before they count. An update of
        numbers has been checked while it came.

        array: the bytes, if they are not in the store. Raises InvalidUpdate and the store's errors.
        """
        model = self._rounds.model_of(round_)
        if weights is None or model is None or not model.dtype == weights.dtype == BYTES:
            return
        if self.driver.session.accepted(participant_id, round_) is not None:
            return
        epochs = self._rounds.epochs_of(round_)
        async with self._parsing:
            await run_to_end(self._trees.check, model, weights, epochs, array)

    async def adopt(self, participant_id: str, round_: int, size_bytes: int, digest: str) -> None:
        """Bring to its place what a participant has put into the store itself, checked against what
        it says that it put. The caller holds `exclusive`. There it stays until its round is over.

        Raises as `receive` does; does nothing if nothing is there.
        """
        place = await self._begin(participant_id, Announced(round_, size_bytes, digest))
        if isinstance(place, WeightsRef) or self._holds(place, digest) or self._adoptions is None:
            return
        source = incoming_key(round_, participant_id)
        measured = await self._adoptions.adopt(source, place, size_bytes, digest)
        if measured is not None:
            self._keep(place, measured)

    async def named(self, participant_id: str, round_: int, name: str) -> StoredWeights | None:
        """What a participant has put under a name of its own without saying more, as XAIN's do;
        None if there is nothing. The caller holds `exclusive`.

        Raises InvalidUpdate, TooLarge, StoreUnavailable, and what MayUpload refuses: no stranger
        makes us read a file.
        """
        place = update_key(round_, name)
        accepted = self.driver.session.accepted(participant_id, round_)
        if accepted is not None:
            # Without a digest there is no telling it from another one, but by its place.
            is_meant = place_of(accepted.weights.ref.key) == place
            return accepted.weights if is_meant else None
        if self.bucket is None and (known := self._known(place)) is not None:
            return known
        upload = MayUpload(participant_id, round_, digest="", upload_name=name)
        try:
            async with self._reading(upload):
                if self.bucket is None:
                    return await self._measure(place, round_)
                measured = await self._fetched(self.bucket, round_, name)
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
        measured = self._known(place)
        is_object = place_of(key) == place and piece_of(key) is None and not is_journalled(key)
        if measured is None and is_object and not self._is_damaged(key):
            # The update was uploaded to an earlier process; a small one comes with every call.
            with contextlib.suppress(KeyNotFound):
                async with self._reading(MayUpload(participant_id, round_, digest)):
                    measured = await self._measure(key, round_)
        return measured if measured is not None and measured.ref.digest == digest else None

    @asynccontextmanager
    async def _reading(self, upload: MayUpload) -> AsyncIterator[None]:
        """While an update is read that lies in the store. Raises Unavailable, and what MayUpload
        refuses."""
        await self.driver.ask(upload)  # nobody waits for what is not wanted
        async with self._readings.turn():
            await self.driver.ask(upload)  # nor is it read when it is not wanted any more
            yield

    async def _measure(self, key: str, round_: int) -> StoredWeights:
        """In a turn of reading."""
        measured = await run_to_end(measure, self.store, key, self._rounds.distance(round_))
        # Whoever wrote it may have died before it was durable, and it is about to count.
        await run_to_end(self.store.settle, key)
        return measured

    async def _fetched(self, bucket: Bucket, round_: int, name: str) -> StoredWeights:
        """A copy of what lies in the bucket. In a turn of reading."""
        key = new_attempt_at(update_key(round_, name))
        try:
            await run_to_end(bucket.fetch, round_, name, key)
            return await run_to_end(measure, self.store, key, self._rounds.distance(round_))
        except BaseException:  # whatever it is: nobody else knows of the copy
            self._background.delete(key)
            raise

    async def _begin(self, participant_id: str, announced: Announced) -> str | WeightsRef:
        """Where to write, or the reference if this very update has been accepted."""
        size_bytes = announced.size_bytes
        if size_bytes > self.max_update_bytes:
            raise TooLarge(
                f"an upload of {size_bytes} bytes; at most {self.max_update_bytes} are taken"
            )
        begun = await self.driver.ask(MayUpload(participant_id, announced.round, announced.digest))
        if isinstance(begun, AlreadyUploaded):
            return begun.ref
        model = self._rounds.model_of(announced.round)
        if model is not None:
            is_slice = self.driver.session.rules.aggregation == ASSEMBLE and not model.is_empty
            check_announced_size(model, size_bytes, is_slice=is_slice)
        assert isinstance(begun, UploadTo)
        return begun.key

    def _holds(self, place: str, digest: str) -> bool:
        """This very update was brought there before, by a call whose answer got lost."""
        known = self._known(place)
        return known is not None and known.ref.digest == digest

    def _known(self, place: str) -> StoredWeights | None:
        """The object under this key, unless it was found to be damaged since."""
        known = self._measured.get(place)
        return None if known is None or self._is_damaged(known.ref.key) else known

    def _is_damaged(self, key: str) -> bool:
        """Whether it was accepted for the open round, and found to be damaged since."""
        round_ = self.driver.session.open_round
        return round_ is not None and key in round_.damaged.values()

    def _keep(self, place: str, measured: StoredWeights) -> bool:
        """From now on this is what its sender hands in; what it uploaded before has no use. False
        if its round is over: nobody else would remove what was made durable after that."""
        self._forget_earlier_rounds()
        if not self._rounds.is_wanted(place):
            self._discard(measured)
            return False
        replaced = self._measured.get(place)
        self._measured[place] = measured
        if replaced is not None:
            self._discard(replaced)
        return True

    def _forget_earlier_rounds(self) -> None:
        """Let go of what was uploaded for rounds that are over."""
        if self.driver.session.round == self._measured_round:
            return
        if self._measured_round >= 0 and not self._has_swept:
            self._has_swept = True
            self._background.do(self.store.sweep)  # what predecessors have left of a round
        self._measured_round = self.driver.session.round
        wanted = self._rounds.wanted(self._measured)
        self._measured = {p: m for p, m in self._measured.items() if p in wanted}
        self._unfinished.drop_unwanted()

    def _discard(self, measured: StoredWeights) -> None:
        self._background.delete(measured.ref.key)


def _has_differences(model: GlobalModel) -> bool:
    """Whether the differences of its updates to it have an encoding."""
    return model.dtype == "float32" and not model.is_empty
