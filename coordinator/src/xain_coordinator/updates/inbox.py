"""The inbox: uploads and stored updates of each participant, until they are handed in.

An update comes in one of four ways: inside the call that hands it in; as a body of the weights port
or a stream of gRPC; as an object that the participant has put into the store; or as an object of
another bucket, which a gateway (xain06/) translates. They differ only in how the bytes come. All
bytes pass one Inspector, once.

An object is visible only when it is whole and measured, and every attempt has a key of its own. So
an accepted update is never written again, not even by a request that was given up and reaches a
remote store late. An upload that goes on after it broke off is still the same attempt: it is
committed once, or never.

The core is asked once before the bytes are taken in, and decides once when the update is handed in.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import xxhash

from xain_coordinator.core.errors import (
    InvalidUpdate,
    NotAMember,
    TooLarge,
    Unavailable,
    UploadMissing,
)
from xain_coordinator.core.keys import (
    attempt_key,
    base_key_of,
    incoming_key,
    is_attempt,
    is_journalled,
    update_key,
)
from xain_coordinator.core.needed import needed_by
from xain_coordinator.core.questions import MayUpload
from xain_coordinator.core.replies import AlreadyUploaded, Ticket
from xain_coordinator.core.values import GlobalModel, Phase, StoredWeights, WeightsRef
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import DirectAccess, KeyNotFound, WeightsStore
from xain_coordinator.updates.background import Background
from xain_coordinator.updates.content import ContentCheck, check_announced_size, has_content
from xain_coordinator.updates.measured_upload import Announced, Decoder, Header, MeasuredUpload
from xain_coordinator.updates.measuring import BaseModel, Distance, Inspector, measure_bytes
from xain_coordinator.updates.sources import Bucket, copied, fetched, in_place
from xain_foundation.threads import run_to_end, wait_to_end
from xain_wire.fl.coordinator_pb2 import Encoding
from xain_wire.limits import MAX_INLINE_BYTES
from xain_wire.np import ENCODING_BITS
from xain_wire.np.codec import MAX_HEADER_BYTES
from xain_workloads.model import control_size

# Readings at a time of what lies in the store. Each may be of gigabytes, and takes a thread and a
# buffer; commits and the updates of others need threads, too.
NUM_READINGS = 4

# An update inside its call: as large as those of our participants, with its header.
MAX_INLINE_UPDATE_BYTES = MAX_INLINE_BYTES + MAX_HEADER_BYTES

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reference:
    """An update as the participant that hands it in describes it.

    name: the participant's id, or the upload name that it has chosen. key, size_bytes, digest: as
    told by the upload; where the sender names none of them, digest is None. data: the whole update,
    if it is small.
    """

    name: str
    key: str = ""
    size_bytes: int = 0
    digest: str | None = None
    data: bytes = b""

    def means(self, round_: int, weights: StoredWeights) -> bool:
        """Whether these weights are the update. Without a digest the base key tells."""
        if self.digest is not None:
            return weights.ref.digest == self.digest
        return base_key_of(weights.ref.key) == update_key(round_, self.name)


@dataclass(frozen=True, slots=True)
class Obtained:
    """An update that is handed in. weights: None if there is none.

    data: of a small update, which is to be committed to the journal under its key, together with
        its event.
    """

    weights: StoredWeights | None = None
    data: bytes = b""


NOTHING = Obtained()


class Source(Protocol):
    """Source of the bytes of one upload, a connection. It ends an upload whose sender is silent for
    too long."""

    async def header(self) -> Header:
        """The description of the upload. Raises InvalidUpdate and Unavailable."""

    async def into(self, upload: MeasuredUpload) -> None:
        """Write all bytes that come. Returns when they are written, though some may be missing.
        Raises Unavailable, and what MeasuredUpload.write raises."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """Work that reads an update back from a store. It belongs to no call: a caller that is
    cancelled finds it done, or joins it, when it calls again.

    what: a Reference or an Announced; the same for callers that may share the result.
    """

    what: object
    task: asyncio.Task[Any]


@dataclass(slots=True)
class Slot:
    """Slot of one participant: its uploads, readings and stored updates.

    num_calls: calls that use the slot. lock: held while an update becomes durable or is handed in.
    upload: the task of the upload whose bytes come in.
    broken: the latest upload that broke off, measured as far as it came.
    stored: the latest durable update of each round.
    """

    num_calls: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    upload: asyncio.Task[WeightsRef | int] | None = None
    reading: _Reading | None = None
    broken: MeasuredUpload | None = None
    stored: dict[int, StoredWeights] = field(default_factory=dict)


class Inbox:
    """The updates that arrive for one session. Used from one event loop.

    max_update_bytes: larger uploads are refused before a byte is written.
    access: how participants reach the store themselves; None if they cannot.
    bucket: where updates lie of which only a name is said; None: in the store.
    max_update_norm: L2 norm that the difference to the model may have; None: any.
    encoding: how large updates are wanted.
    """

    # Uploads at a time. Each takes some 25 KB, and its sender can make gRPC hold more.
    max_uploads = 500
    max_broken = 64  # participants whose broken uploads are kept: open files, as large as what came

    def __init__(
        self,
        driver: Driver,
        store: WeightsStore,
        max_update_bytes: int,
        access: DirectAccess | None = None,
        bucket: Bucket | None = None,
        max_update_norm: float | None = None,
        encoding: "Encoding.ValueType" = Encoding.PLAIN,
    ) -> None:
        self._driver = driver
        self._store = store
        self._max_update_bytes = max_update_bytes
        self._access = access
        self._bucket = bucket
        self._max_update_norm = max_update_norm
        self._encoding = encoding
        self._slots: dict[str, Slot] = {}
        self._num_uploads = 0
        self._round = -1  # when the slots were last looked through
        self._has_swept = False  # once: predecessors write nothing any more
        self.readings = asyncio.Semaphore(NUM_READINGS)
        self._is_closing = False
        self._background = Background(store)
        self._content = ContentCheck(store)
        # One at a time: parsed JSON takes many times the memory of its text.
        self._parsing = asyncio.Lock()

    # --- handing in ---

    @property
    def names_are_chosen(self) -> bool:
        """Whether participants choose the names of their uploads, as those of XAIN do."""
        return self._bucket is not None

    @asynccontextmanager
    async def obtained(
        self, participant_id: str, round_: int, reference: Reference | None
    ) -> AsyncIterator[Obtained]:
        """The measured update that a participant hands in for a round. No other call stores or
        hands in an update of the participant meanwhile.

        reference: None if the participant brings none.
        Raises InvalidUpdate, TooLarge, Unavailable, the store's errors, and MayUpload's refusals.
        """
        with self.slot(participant_id) as slot:
            async with slot.lock:
                if reference is None:
                    yield NOTHING
                else:
                    yield await self._obtain(slot, participant_id, round_, reference)

    async def _obtain(
        self, slot: Slot, participant_id: str, round_: int, reference: Reference
    ) -> Obtained:
        # A name may mean another object now.
        what = object() if reference.digest is None else reference
        if slot.reading is not None:
            await _until_read(slot, unless=what)
        if reference.digest is None:
            accepted = self._driver.session.accepted(participant_id, round_)
            if accepted is not None:
                is_meant = reference.means(round_, accepted.weights)
                return Obtained(accepted.weights) if is_meant else NOTHING
        data = reference.data
        announced = Announced(round_, len(data) or reference.size_bytes, reference.digest)
        ticket = await self._ask(participant_id, announced, is_inside=bool(data))
        if isinstance(ticket, AlreadyUploaded):
            return Obtained(ticket.weights)
        weights = self._stored(slot, round_, reference) if slot.stored else None
        if weights is not None:
            data = b""  # it is in the store
        elif data:
            weights = await self._measured(ticket, announced, data)
        else:
            bring = self._bringer(participant_id, reference, announced)
            if bring is None:
                return NOTHING
            work = partial(self._bring, slot, round_, partial(bring, self._distance(ticket.model)))
            weights = await self._read(slot, participant_id, what, work)
            if weights is None or not reference.means(round_, weights):
                return NOTHING  # another object lies under the key
        if ticket.model is not None and has_content(ticket.model):
            await self._check_content(ticket, weights, data)
        return Obtained(weights, data)

    def _stored(self, slot: Slot, round_: int, reference: Reference) -> StoredWeights | None:
        """The durable update that the reference means, if this process has measured it, and it was
        not found to be damaged since."""
        stored = slot.stored.get(round_)
        if stored is None or self._is_damaged(stored.ref.key):
            return None
        if reference.digest is None and self._bucket is not None:
            return None  # the bucket may hold another one now
        return stored if reference.means(round_, stored) else None

    async def _measured(self, ticket: Ticket, announced: Announced, data: bytes) -> StoredWeights:
        if len(data) > MAX_INLINE_UPDATE_BYTES:
            raise TooLarge(
                f"an update of {len(data)} bytes inside its call; at most "
                f"{MAX_INLINE_UPDATE_BYTES} are taken so, larger ones by PutWeights"
            )
        self._forget_earlier_rounds()
        distance = self._distance(ticket.model)
        # Without a distance there is nothing to read, and a small object costs less than a thread.
        if distance is None:
            return measure_bytes(data, ticket.key, None, announced.digest)
        return await run_to_end(measure_bytes, data, ticket.key, distance, announced.digest)

    def _bringer(
        self, participant_id: str, reference: Reference, announced: Announced
    ) -> Callable[[Distance | None], StoredWeights] | None:
        """Reading and measuring of the object that a reference means; None if it means none."""
        store, key, round_ = self._store, reference.key, announced.round
        base_key = update_key(round_, reference.name)
        if reference.data:
            return None
        if reference.digest is None:
            if is_attempt(base_key):
                return None  # a participant names its own object, never a copy of the coordinator
            if self._bucket is None:
                return partial(in_place, store, base_key)
            target = _new_attempt_at(base_key)
            return partial(fetched, self._bucket, store, round_, reference.name, target)
        if self._access is not None and key == incoming_key(round_, participant_id):
            return partial(copied, self._access, store, key, _new_attempt_at(base_key), announced)
        # An update that was uploaded to an earlier process; a small one comes with every call.
        is_object = base_key_of(key) == base_key and not is_journalled(key)
        is_known = round_ in self._slots[participant_id].stored
        if not is_object or is_known or self._is_damaged(key):
            return None
        return partial(in_place, store, key)

    async def _bring(
        self, slot: Slot, round_: int, bring: Callable[[], StoredWeights]
    ) -> StoredWeights | None:
        """Read an object when it is its turn; None if nothing is there, or the round is over."""
        async with self.readings:
            if not self._is_to_be_read(round_):
                return None
            try:
                measured = await run_to_end(bring)
            except KeyNotFound:
                return None
        # An object without an attempt in its key is the participant's, which may write it again.
        is_ours = is_attempt(measured.ref.key)
        return measured if not is_ours or self._keep(slot, round_, measured) else None

    def _is_to_be_read(self, round_: int) -> bool:
        """Whether bytes in the store still matter when they may be read. Raises Unavailable if the
        coordinator stops: the next one reads them."""
        if self._is_closing:
            raise Unavailable("the coordinator is stopping; ask the next one")
        return needed_by(self._driver.session).has_updates_of(round_)

    async def _check_content(self, ticket: Ticket, weights: StoredWeights, array: bytes) -> None:
        """Refuse bytes or sums that are no update of the round's model, before they count. Any
        other update of numbers has been checked while it came.

        array: the bytes, if they are not in the store. Raises InvalidUpdate and the store's errors.
        """
        model = ticket.model
        if model is None or model.dtype != weights.dtype:
            return
        async with self._parsing:
            await run_to_end(self._content.check, model, weights, ticket.epochs, array)

    # --- uploads ---

    def encoding_for(self, model: GlobalModel) -> "Encoding.ValueType":
        """Encoding of updates of this model."""
        return self._encoding if _has_differences(model) else Encoding.PLAIN

    async def receive(self, participant_id: str, source: Source) -> WeightsRef | int:
        """Take one upload. Returns when it is durable; for a part of one, when it is written, the
        number of bytes that are there now.

        A participant has one upload at a time: a new one ends the one before, whose sender has
        lost its connection or its patience.
        Raises TooLarge, InvalidUpdate, Unavailable, and MayUpload's refusals.
        """
        session = self._driver.session
        # An unregistered client takes no slot in memory, not even until its header is there. After
        # the end the answer is the same for all, and no member is held up any more.
        if session.phase is not Phase.FINISHED and participant_id not in session.members:
            raise NotAMember(participant_id)
        with self.slot(participant_id) as slot:
            if slot.upload is None and self._num_uploads >= self.max_uploads:
                raise Unavailable(
                    f"{self.max_uploads} uploads are under way; come again in a moment"
                )
            earlier = slot.upload
            slot.upload = task = asyncio.ensure_future(self._receive(slot, participant_id, source))
            if earlier is None:
                self._num_uploads += 1
            else:
                earlier.cancel()
            try:
                return await task
            except asyncio.CancelledError:
                caller = asyncio.current_task()
                if caller is None or caller.cancelling():
                    raise  # it was our own caller who went away
                reason = "a newer upload of the same participant has replaced it"
                raise Unavailable(reason) from None
            finally:
                if slot.upload is task:
                    slot.upload = None
                    self._num_uploads -= 1

    async def _receive(self, slot: Slot, participant_id: str, source: Source) -> WeightsRef | int:
        # Before anything of this one is in memory: gigabytes may have to be read.
        await _until_read(slot)
        header = await source.header()
        announced = header.announced
        ticket = await self._ask(participant_id, announced)
        if isinstance(ticket, AlreadyUploaded):
            return ticket.weights.ref
        if (stored := self._stored_like(slot, announced)) is not None:
            return stored.ref
        await _until_read(slot)
        upload = await self._upload(slot, participant_id, ticket, header)
        is_broken = False  # a wrong update is wrong the next time; a connection is not
        try:
            self._decode(upload, ticket.model, header.encoding)
            await source.into(upload)
            if header.is_part and not upload.is_whole:
                is_broken = True  # kept in the same way
                return upload.offset
            if not upload.is_whole:
                raise Unavailable(
                    f"the upload ended after {upload.offset} of {announced.size_bytes} bytes; "
                    "FindUpload says where it can go on"
                )
            # Once it is whole, a connection that breaks does not throw it away.
            return await wait_to_end(
                asyncio.ensure_future(self._commit(slot, participant_id, upload))
            )
        except (asyncio.CancelledError, Unavailable):
            is_broken = True
            raise
        finally:
            if is_broken and upload.is_open and upload.offset:
                await self._keep_broken(slot, participant_id, upload)
            elif upload.is_open:
                await run_to_end(upload.abort)

    async def _commit(self, slot: Slot, participant_id: str, upload: MeasuredUpload) -> WeightsRef:
        """Make a whole upload durable: it is the one that its sender hands in."""
        announced = upload.announced
        async with slot.lock:
            # Another update may have been accepted meanwhile, and the round may be over.
            session = self._driver.session
            is_needed = needed_by(session).has_updates_of(announced.round)
            is_accepted = session.accepted(participant_id, announced.round) is not None
            if announced.round in slot.stored or is_accepted or not is_needed:
                latest = await self._ask(participant_id, announced)
                if isinstance(latest, AlreadyUploaded):
                    return latest.weights.ref
            measured = await run_to_end(upload.complete)
            if not self._keep(slot, announced.round, measured):
                await self._ask(participant_id, announced)  # tells its sender why
        return measured.ref

    def _decode(
        self, upload: MeasuredUpload, model: GlobalModel | None, encoding: "Encoding.ValueType"
    ) -> None:
        """Set the decoder of an encoded upload. Raises InvalidUpdate."""
        if encoding == Encoding.PLAIN:
            return
        bits = ENCODING_BITS.get(encoding)
        if bits is None:
            raise InvalidUpdate(f"no encoding of updates has the number {encoding}")
        if model is None or not _has_differences(model):
            raise InvalidUpdate(
                "only updates of a float32 model that there is, and that has no control variate, "
                "can be encoded; send it as it is"
            )
        decoder = Decoder(bits, BaseModel(self._store, model))
        if upload.header is not None:
            decoder.resume(upload.header, upload.offset)
        elif upload.offset:
            raise InvalidUpdate(f"no tile of the update begins at its byte {upload.offset}")
        upload.decoder = decoder

    # --- uploads that broke off ---

    async def find_unfinished(self, participant_id: str, announced: Announced) -> int:
        """Number of bytes of an upload that the coordinator has, and that its sender need not send
        again. All bytes if none is missing; the next upload is then answered from its header.

        An upload of the participant that still seems to be under way ends: its sender has lost the
        connection. Raises as `receive` does.
        """
        ticket = await self._ask(participant_id, announced)
        if isinstance(ticket, AlreadyUploaded):
            return announced.size_bytes
        with self.slot(participant_id) as slot:
            if slot.upload is not None and self._stored_like(slot, announced) is None:
                slot.upload.cancel()
                await asyncio.wait([slot.upload])
            if self._stored_like(slot, announced) is not None:
                return announced.size_bytes
            if slot.broken is None:
                work = partial(self._pick_up, slot, participant_id, ticket, announced)
                await self._read(slot, participant_id, announced, work)
            kept = slot.broken
            return kept.offset if kept is not None and kept.announced == announced else 0

    async def _upload(
        self, slot: Slot, participant_id: str, ticket: Ticket, header: Header
    ) -> MeasuredUpload:
        """A new upload, or the broken one that continues at the header's offset. Raises
        UploadMissing."""
        kept = slot.broken
        if header.offset:
            is_meant = kept is not None and kept.announced == header.announced
            if kept is None or not is_meant or kept.offset != header.offset:
                raise UploadMissing(
                    f"there is no upload that could go on at byte {header.offset}; begin again at 0"
                )
            slot.broken = None
            return kept
        await _drop_broken(slot)
        return self._begin(participant_id, ticket, header.announced)

    def _begin(self, participant_id: str, ticket: Ticket, announced: Announced) -> MeasuredUpload:
        inspector = Inspector(self._distance(ticket.model))
        # The same for any process that goes on with this upload in this session.
        what = (self._driver.session.session_id, participant_id, *astuple(announced))
        label = xxhash.xxh3_128(repr(what).encode()).hexdigest()
        return MeasuredUpload(self._store, ticket.key, announced, inspector, label)

    async def _pick_up(
        self, slot: Slot, participant_id: str, ticket: Ticket, announced: Announced
    ) -> None:
        """Measure what an earlier process has received of an upload, and keep it as broken. Raises
        Unavailable and the store's errors."""
        upload = self._begin(participant_id, ticket, announced)
        # Mostly there is nothing, and the answer waits for no slot.
        unfinished = await run_to_end(self._store.find_unfinished, upload.key, upload.label)
        if unfinished is None:
            return
        async with self.readings:
            try:
                is_needed = self._is_to_be_read(announced.round)
            except Unavailable:
                await run_to_end(unfinished.resume(unfinished.size).suspend)
                raise
            if not is_needed:
                await run_to_end(unfinished.abort)
                return
            is_good = await run_to_end(upload.pick_up, unfinished)
        if is_good:
            await self._keep_broken(slot, participant_id, upload)

    async def _keep_broken(self, slot: Slot, participant_id: str, upload: MeasuredUpload) -> None:
        """Keep an upload that broke off: the latest of each participant, and max_broken in all."""
        upload.pause()
        # Before anything is waited for: a call that is cancelled here has kept it all the same.
        replaced, slot.broken = slot.broken, upload
        self._slots[participant_id] = self._slots.pop(participant_id, slot)  # at the end
        dropped = [] if replaced is None else [replaced]
        broken = [(name, one) for name, one in self._slots.items() if one.broken is not None]
        for name, one in self._unwanted() + broken[: max(0, len(broken) - self.max_broken)]:
            if one.broken is not None:
                dropped.append(one.broken)
                one.broken = None
                self._remove_if_empty(name, one)
        if dropped:
            await run_to_end(_abort, dropped)

    def _unwanted(self) -> list[tuple[str, Slot]]:
        """Slots with a broken upload of a round that is over, or of a participant that has left."""
        members = self._driver.session.members
        needed = needed_by(self._driver.session)
        return [
            (participant_id, slot)
            for participant_id, slot in self._slots.items()
            if slot.broken is not None
            and not (
                participant_id in members and needed.has_updates_of(slot.broken.announced.round)
            )
        ]

    # --- the table ---

    @contextmanager
    def slot(self, participant_id: str) -> Iterator[Slot]:
        """The participant's slot, which stays while it is used or holds something."""
        slot = self._slots.get(participant_id)
        if slot is None:
            slot = self._slots[participant_id] = Slot()
        slot.num_calls += 1
        try:
            yield slot
        finally:
            slot.num_calls -= 1
            self._remove_if_empty(participant_id, slot)

    def _remove_if_empty(self, participant_id: str, slot: Slot) -> None:
        is_used = slot.num_calls or slot.reading or slot.broken or slot.stored
        if not is_used and self._slots.get(participant_id) is slot:
            del self._slots[participant_id]

    async def _read(
        self,
        slot: Slot,
        participant_id: str,
        what: object,
        work: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        """Do work that reads back what lies in a store, or join it if it is under way. One at a
        time for each participant."""
        await _until_read(slot, unless=what)
        if slot.reading is None:
            task = asyncio.ensure_future(work())
            slot.reading = _Reading(what, task)

            def forget(ended: asyncio.Task[T]) -> None:
                slot.reading = None
                self._remove_if_empty(participant_id, slot)
                if not ended.cancelled():
                    ended.exception()  # all callers may have gone

            task.add_done_callback(forget)
        result: T = await asyncio.shield(slot.reading.task)
        return result

    def _keep(self, slot: Slot, round_: int, measured: StoredWeights) -> bool:
        """Keep this upload as the one that its sender hands in, in place of an earlier one. False
        if the round is over: the object is then removed here, since nothing else would remove
        it."""
        self._forget_earlier_rounds()
        if not needed_by(self._driver.session).has_updates_of(round_):
            self._background.delete(measured.ref.key)
            return False
        replaced = slot.stored.get(round_)
        slot.stored[round_] = measured
        if replaced is not None and replaced.ref.key != measured.ref.key:
            self._background.delete(replaced.ref.key)
        return True

    def _forget_earlier_rounds(self) -> None:
        """Drop the uploads of rounds that are over; their objects are removed in the background."""
        session = self._driver.session
        if session.round == self._round:
            return
        if self._round >= 0 and not self._has_swept:
            self._has_swept = True
            self._background.do(self._store.sweep)  # what predecessors have left of a round
        self._round = session.round
        for _, slot in self._unwanted():
            broken, slot.broken = slot.broken, None
            if broken is not None:
                self._background.do(broken.abort)
        needed = needed_by(session)
        for participant_id, slot in list(self._slots.items()):
            slot.stored = {r: one for r, one in slot.stored.items() if needed.has_updates_of(r)}
            self._remove_if_empty(participant_id, slot)

    async def _ask(
        self, participant_id: str, announced: Announced, *, is_inside: bool = False
    ) -> Ticket | AlreadyUploaded:
        """Ask the core whether an update may come. Raises TooLarge, InvalidUpdate, and MayUpload's
        refusals."""
        size_bytes = announced.size_bytes
        if size_bytes > self._max_update_bytes:
            raise TooLarge(
                f"an upload of {size_bytes} bytes; at most {self._max_update_bytes} are taken"
            )
        digest, attempt = announced.digest or "", uuid.uuid4().hex
        question = MayUpload(participant_id, announced.round, digest, attempt, is_inside)
        answer = await self._driver.ask(question)
        if isinstance(answer, AlreadyUploaded):
            return answer
        assert isinstance(answer, Ticket), "so MayUpload is answered"
        if answer.model is not None and announced.digest is not None:
            check_announced_size(answer.model, size_bytes, is_slice=answer.is_slice)
        return answer

    def _stored_like(self, slot: Slot, announced: Announced) -> StoredWeights | None:
        """The same update, if an earlier call has stored it and its answer was lost."""
        return self._stored(slot, announced.round, Reference("", digest=announced.digest))

    def _distance(self, model: GlobalModel | None) -> Distance | None:
        """Limit of an update's distance to its model; None without a limit."""
        if self._max_update_norm is None or model is None:
            return None
        return Distance(BaseModel(self._store, model), self._max_update_norm)

    def _is_damaged(self, key: str) -> bool:
        """Whether the update under this key was accepted for the open round, and found damaged
        since."""
        round_ = self._driver.session.open_round
        return round_ is not None and key in round_.damaged.values()

    async def close(self) -> None:
        """Suspend the uploads that have broken off, for the next process where the store can. No
        more is received; readings under way end normally."""
        self._is_closing = True
        slots = self._slots.values()
        uploads = [slot.upload for slot in slots if slot.upload is not None]
        for upload in uploads:
            upload.cancel()  # its call may have ended, and what came of it not be kept yet
        if uploads:
            await asyncio.wait(uploads)
        while readings := [slot.reading.task for slot in slots if slot.reading is not None]:
            await asyncio.wait(readings)
        for _, slot in self._unwanted():
            await _drop_broken(slot)
        for slot in list(slots):
            broken, slot.broken = slot.broken, None
            if broken is not None:
                await run_to_end(broken.suspend)
        await self._background.close()


async def _until_read(slot: Slot, unless: object = None) -> None:
    """Wait until no update is read back for the participant, except the one that `unless` names."""
    while slot.reading is not None and slot.reading.what != unless:
        await asyncio.wait([slot.reading.task])


def _abort(uploads: Sequence[MeasuredUpload]) -> None:
    for upload in uploads:
        upload.abort()


async def _drop_broken(slot: Slot) -> None:
    broken, slot.broken = slot.broken, None
    if broken is not None:
        await run_to_end(broken.abort)


def _new_attempt_at(base_key: str) -> str:
    """A key of its own for one attempt to store an update."""
    return attempt_key(base_key, uuid.uuid4().hex)


def _has_differences(model: GlobalModel) -> bool:
    """Whether the differences of its updates to it have an encoding. Rounding would add up to a
    difference between a control variate and the mean of those at the sites."""
    return model.dtype == "float32" and not model.is_empty and not control_size(model.layout)
