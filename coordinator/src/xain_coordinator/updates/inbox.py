"""The inbox: updates as they are handed in.

An update comes in one of four ways: inside the call that hands it in; as a body of the weights port
or a stream of gRPC (uploads.py); as an object that the participant has put into the store; or as an
object of another bucket, which a gateway (xain06/) translates. They differ only in how the bytes
come. All bytes pass one Inspector, once.

The core is asked once before the bytes are taken in, and decides once when the update is handed in.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from xain_coordinator.core.vocabulary.errors import InvalidUpdate, Reason
from xain_coordinator.core.vocabulary.keys import (
    attempt_key,
    base_key_of,
    incoming_key,
    is_attempt,
    is_journalled,
    update_key,
)
from xain_coordinator.core.vocabulary.replies import AlreadyUploaded, Ticket
from xain_coordinator.core.vocabulary.values import StoredWeights
from xain_coordinator.ports import DirectAccess, KeyNotFound
from xain_coordinator.updates.announced import has_content
from xain_coordinator.updates.measured_upload import Announced
from xain_coordinator.updates.measuring import Distance, measure_bytes
from xain_coordinator.updates.slots import Reference, Slot, Slots, wait_until_read
from xain_coordinator.updates.sources import (
    Bucket,
    copy_and_measure,
    fetch_and_measure,
    measure_stored,
)
from xain_foundation.threads import run_to_end
from xain_wire.limits import MAX_INLINE_BYTES
from xain_wire.np.codec import MAX_HEADER_BYTES

if TYPE_CHECKING:
    from xain_coordinator.updates.content import ContentCheck

# An update inside its call: as large as those of our participants, with its header.
MAX_INLINE_UPDATE_BYTES = MAX_INLINE_BYTES + MAX_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Obtained:
    """An update that is handed in. weights: None if there is none.

    data: of a small update, which is to be committed to the journal under its key, together with
        its event.
    """

    weights: StoredWeights | None = None
    data: bytes = b""


NOTHING = Obtained()


class Inbox:
    """The updates of one session that are handed in. Used from one event loop.

    access: how participants reach the store themselves; None if they cannot.
    bucket: where updates lie of which only a name is said; None: in the store.
    """

    def __init__(
        self, slots: Slots, access: DirectAccess | None = None, bucket: Bucket | None = None
    ) -> None:
        self._slots = slots
        self._driver = slots.driver
        self._store = slots.store
        self._access = access
        self._bucket = bucket
        # One at a time: parsed JSON takes many times the memory of its text.
        self._parsing = asyncio.Lock()

    @cached_property
    def _content(self) -> "ContentCheck":
        """Checker of updates that are bytes or sums, made when the first of them comes."""
        from xain_coordinator.updates.content import ContentCheck  # most models are numbers alone

        return ContentCheck(self._slots.store)

    @property
    def names_are_chosen(self) -> bool:
        """Whether participants choose the names of their uploads, as those of XAIN do."""
        return self._bucket is not None

    @asynccontextmanager
    async def obtained(
        self, participant_id: str, round_: int, reference: Reference | None
    ) -> AsyncIterator[Obtained]:
        """Give the measured update that a participant hands in for a round; NOTHING if there is
        none. No other call stores or hands in an update of the participant meanwhile.

        reference: None if the participant brings none.
        Raises InvalidUpdate, TOO_LARGE, Unavailable, the store's errors, and MayUpload's refusals.
        """
        with self._slots.of(participant_id) as slot:
            async with slot.lock:
                if reference is None:
                    yield NOTHING
                else:
                    yield await self._obtain(slot, participant_id, round_, reference)

    async def _obtain(
        self, slot: Slot, participant_id: str, round_: int, reference: Reference
    ) -> Obtained:
        """The measured update that a reference means, wherever its bytes are: accepted before,
        stored by an earlier call, inside this one, or in a store, from which it is read. NOTHING if
        there is none. Raises InvalidUpdate, TOO_LARGE, Unavailable, the store's errors, and
        MayUpload's refusals."""
        # A name may mean another object now.
        what = object() if reference.digest is None else reference
        if slot.reading is not None:
            await wait_until_read(slot, unless=what)
        if reference.digest is None:
            accepted = self._driver.session.accepted(participant_id, round_)
            if accepted is not None:
                is_meant = reference.means(round_, accepted.weights)
                return Obtained(accepted.weights) if is_meant else NOTHING
        # A bucket may hold another one now.
        is_sure = reference.digest is not None or self._bucket is None
        weights = self._slots.stored(slot, round_, reference) if slot.stored and is_sure else None
        data = b"" if weights is not None else reference.data
        announced = Announced(round_, len(data) or reference.size_bytes, reference.digest)
        bring = None
        if weights is None and not data:
            bring = self._bringer(participant_id, reference, announced)
        ticket = await self._slots.ask(
            participant_id,
            announced,
            is_inside=bool(data),
            is_there=not data and bring is None,
        )
        if isinstance(ticket, AlreadyUploaded):
            return Obtained(ticket.weights)
        if data:
            self._slots.forget_earlier_rounds()
            weights = await self._measured(ticket, announced, data)
        elif bring is not None:
            bring = partial(bring, self._slots.distance(ticket.model))
            work = partial(self._bring, slot, round_, bring)
            weights = await self._slots.read(slot, participant_id, what, work)
            if weights is not None and not reference.means(round_, weights):
                return NOTHING  # another object lies under the key
        if weights is None:
            return NOTHING
        # Bytes and sums that are no update of the model; numbers were checked while they came.
        model = ticket.model
        if model is not None and model.dtype == weights.dtype and has_content(model):
            async with self._parsing:
                check = self._content.check
                await run_to_end(check, model, weights, ticket.epochs, data)
        return Obtained(weights, data)

    async def _measured(self, ticket: Ticket, announced: Announced, data: bytes) -> StoredWeights:
        """Measure an update that came inside its call; in a thread if a model must be read for its
        distance. Raises TOO_LARGE, InvalidUpdate and the store's errors."""
        if len(data) > MAX_INLINE_UPDATE_BYTES:
            raise InvalidUpdate(
                f"an update of {len(data)} bytes inside its call; at most "
                f"{MAX_INLINE_UPDATE_BYTES} are taken so, larger ones by PutWeights",
                Reason.TOO_LARGE,
            )
        distance = self._slots.distance(ticket.model)
        # Without a distance there is nothing to read, and a small object costs less than a thread.
        if distance is None:
            return measure_bytes(data, ticket.key, None, announced.digest)
        return await run_to_end(measure_bytes, data, ticket.key, distance, announced.digest)

    def _bringer(
        self, participant_id: str, reference: Reference, announced: Announced
    ) -> Callable[[Distance | None], StoredWeights] | None:
        """The function that reads and measures the object that a reference means, by where it lies;
        None if it means none, or one that was found damaged."""
        store, key, round_ = self._store, reference.key, announced.round
        base_key = update_key(round_, reference.name)
        if reference.data:
            return None
        if reference.digest is None:
            if is_attempt(base_key):
                return None  # a participant names its own object, never a copy of the coordinator
            if self._bucket is None:
                return partial(measure_stored, store, base_key)
            target = _new_attempt_at(base_key)
            return partial(fetch_and_measure, self._bucket, store, round_, reference.name, target)
        if self._access is not None and key == incoming_key(round_, participant_id):
            return partial(
                copy_and_measure, self._access, store, key, _new_attempt_at(base_key), announced
            )
        # An update that was uploaded to an earlier process; a small one comes with every call.
        is_object = base_key_of(key) == base_key and not is_journalled(key)
        is_known = round_ in self._slots.by_name[participant_id].stored
        if not is_object or is_known or self._slots.is_damaged(key):
            return None
        return partial(measure_stored, store, key)

    async def _bring(
        self, slot: Slot, round_: int, bring: Callable[[], StoredWeights]
    ) -> StoredWeights | None:
        """Read an object once fewer than NUM_READINGS others are being read. None if nothing is
        there, or the round is over. Raises what `bring` raises, and Unavailable."""
        async with self._slots.readings:
            if not self._slots.is_to_be_read(round_):
                return None
            try:
                measured = await run_to_end(bring)
            except KeyNotFound:
                return None
        # An object without an attempt in its key is the participant's, which may write it again.
        is_ours = is_attempt(measured.ref.key)
        return measured if not is_ours or self._slots.keep(slot, round_, measured) else None


def _new_attempt_at(base_key: str) -> str:
    """A key of its own for one attempt to store an update."""
    return attempt_key(base_key, uuid.uuid4().hex)
