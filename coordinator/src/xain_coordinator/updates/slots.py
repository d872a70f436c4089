"""Slots: what is there of each participant's updates, until they are handed in.

A slot stays while it is used or holds something: uploads that broke off, updates that are durable,
and work that reads one back from a store.
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from xain_coordinator.core.machine.needed import needed_by
from xain_coordinator.core.machine.questions import MayUpload
from xain_coordinator.core.vocabulary.errors import InvalidUpdate, Reason, Unavailable
from xain_coordinator.core.vocabulary.keys import base_key_of, update_key
from xain_coordinator.core.vocabulary.replies import AlreadyUploaded, Ticket
from xain_coordinator.core.vocabulary.values import GlobalModel, StoredWeights, WeightsRef
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import WeightsStore
from xain_coordinator.updates.announced import check_announced_size
from xain_coordinator.updates.background import Background
from xain_coordinator.updates.measured_upload import Announced, MeasuredUpload
from xain_coordinator.updates.measuring import BaseModel, Distance
from xain_foundation.threads import run_to_end

# Readings at a time of what lies in the store. Each may be of gigabytes, and takes a thread and a
# buffer; commits and the updates of others need threads, too.
NUM_READINGS = 4

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
        """Whether these weights are the update that the reference names: by its digest, or without
        one by the base key."""
        if self.digest is not None:
            return weights.ref.digest == self.digest
        return base_key_of(weights.ref.key) == update_key(round_, self.name)


@dataclass(frozen=True, slots=True)
class Reading:
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
    reading: Reading | None = None
    broken: MeasuredUpload | None = None
    stored: dict[int, StoredWeights] = field(default_factory=dict)


class Slots:
    """The slots of one session. Used from one event loop.

    max_update_bytes: larger updates are refused before a byte is written.
    max_update_norm: L2 norm that the difference to the model may have; None: any.
    """

    max_broken = 64  # participants whose broken uploads are kept: open files, as large as what came

    def __init__(
        self,
        driver: Driver,
        store: WeightsStore,
        max_update_bytes: int,
        max_update_norm: float | None = None,
    ) -> None:
        self.driver = driver
        self.store = store
        self.by_name: dict[str, Slot] = {}
        self.readings = asyncio.Semaphore(NUM_READINGS)
        self._max_update_bytes = max_update_bytes
        self._max_update_norm = max_update_norm
        self._round = -1  # when the slots were last looked through
        self._has_swept = False  # once: predecessors write nothing any more
        self._is_closing = False
        self._background = Background(store)

    @contextmanager
    def of(self, participant_id: str) -> Iterator[Slot]:
        """Yield the participant's slot, a new one if there is none. It stays while it is used or
        holds something."""
        slot = self.by_name.get(participant_id)
        if slot is None:
            slot = self.by_name[participant_id] = Slot()
        slot.num_calls += 1
        try:
            yield slot
        finally:
            slot.num_calls -= 1
            self._remove_if_empty(participant_id, slot)

    def _remove_if_empty(self, participant_id: str, slot: Slot) -> None:
        """Remove a participant's slot, unless it is used or holds something."""
        is_used = slot.num_calls or slot.reading or slot.broken or slot.stored
        if not is_used and self.by_name.get(participant_id) is slot:
            del self.by_name[participant_id]

    # --- may it come ---

    async def ask(
        self,
        participant_id: str,
        announced: Announced,
        *,
        is_inside: bool = False,
        is_there: bool = False,
    ) -> Ticket | AlreadyUploaded:
        """Ask the core whether an update may come. Raises TOO_LARGE, InvalidUpdate, and MayUpload's
        refusals.

        is_inside: as in MayUpload. is_there: no bytes are to come, and nothing hangs on the size
        that is announced.
        """
        size_bytes = announced.size_bytes
        if size_bytes > self._max_update_bytes:
            raise InvalidUpdate(
                f"an upload of {size_bytes} bytes; at most {self._max_update_bytes} are taken",
                Reason.TOO_LARGE,
            )
        digest, attempt = announced.digest or "", uuid.uuid4().hex
        question = MayUpload(participant_id, announced.round, digest, attempt, is_inside)
        answer = await self.driver.ask(question)
        if isinstance(answer, AlreadyUploaded):
            return answer
        assert isinstance(answer, Ticket), "so MayUpload is answered"
        if answer.model is not None and announced.digest is not None and not is_there:
            check_announced_size(answer.model, size_bytes, is_slice=answer.is_slice)
        return answer

    def distance(self, model: GlobalModel | None) -> Distance | None:
        """Measurement of an update's distance to its model, with the limit for it; None without a
        limit."""
        if self._max_update_norm is None or model is None:
            return None
        return Distance(BaseModel(self.store, model), self._max_update_norm)

    def is_to_be_read(self, round_: int) -> bool:
        """Whether an update of this round may still count, so that its bytes are to be read from
        the store. Raises Unavailable if the coordinator stops: the next one reads them."""
        if self._is_closing:
            raise Unavailable("the coordinator is stopping; ask the next one")
        return needed_by(self.driver.session).has_updates_of(round_)

    # --- durable updates ---

    def stored(self, slot: Slot, round_: int, reference: Reference) -> StoredWeights | None:
        """The durable update that the reference means, if this process has measured it, and it was
        not found to be damaged since."""
        stored = slot.stored.get(round_)
        if stored is None or self.is_damaged(stored.ref.key):
            return None
        return stored if reference.means(round_, stored) else None

    def stored_like(self, slot: Slot, announced: Announced) -> StoredWeights | None:
        """The same update, if an earlier call has stored it and its answer was lost."""
        return self.stored(slot, announced.round, Reference("", digest=announced.digest))

    def is_damaged(self, key: str) -> bool:
        """Whether the update under this key was accepted for the open round, and found damaged
        since."""
        round_ = self.driver.session.open_round
        return round_ is not None and key in round_.damaged.values()

    def keep(self, slot: Slot, round_: int, measured: StoredWeights) -> bool:
        """Keep this upload as the one that its sender hands in, in place of an earlier one. False
        if the round is over: the object is then removed here, since nothing else would remove
        it."""
        self.forget_earlier_rounds()
        if not needed_by(self.driver.session).has_updates_of(round_):
            self._background.delete(measured.ref.key)
            return False
        replaced = slot.stored.get(round_)
        slot.stored[round_] = measured
        if replaced is not None and replaced.ref.key != measured.ref.key:
            self._background.delete(replaced.ref.key)
        return True

    def forget_earlier_rounds(self) -> None:
        """Drop the uploads of rounds that are over, once a round; those that broke off are removed
        in the background, as is what predecessors have left of a round."""
        session = self.driver.session
        if session.round == self._round:
            return
        if self._round >= 0 and not self._has_swept:
            self._has_swept = True
            self._background.do(self.store.sweep)  # what predecessors have left of a round
        self._round = session.round
        for _, slot in self._unwanted():
            broken, slot.broken = slot.broken, None
            if broken is not None:
                self._background.do(broken.abort)
        needed = needed_by(session)
        for participant_id, slot in list(self.by_name.items()):
            slot.stored = {r: one for r, one in slot.stored.items() if needed.has_updates_of(r)}
            self._remove_if_empty(participant_id, slot)

    # --- readings and broken uploads ---

    async def read(
        self,
        slot: Slot,
        participant_id: str,
        what: object,
        work: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        """Do work that reads back what lies in a store, or join it if it is under way. One at a
        time for each participant."""
        await wait_until_read(slot, unless=what)
        if slot.reading is None:
            task = asyncio.ensure_future(work())
            slot.reading = Reading(what, task)

            def forget(ended: asyncio.Task[T]) -> None:
                """Take the reading that has ended out of its slot."""
                slot.reading = None
                self._remove_if_empty(participant_id, slot)
                if not ended.cancelled():
                    ended.exception()  # all callers may have gone

            task.add_done_callback(forget)
        result: T = await asyncio.shield(slot.reading.task)
        return result

    async def keep_broken(self, slot: Slot, participant_id: str, upload: MeasuredUpload) -> None:
        """Keep an upload that broke off: the latest of each participant, and max_broken in all."""
        upload.pause()
        # Before anything is waited for: a call that is cancelled here has kept it all the same.
        replaced, slot.broken = slot.broken, upload
        self.by_name[participant_id] = self.by_name.pop(participant_id, slot)  # at the end
        dropped = [] if replaced is None else [replaced]
        broken = [(name, one) for name, one in self.by_name.items() if one.broken is not None]
        for name, one in self._unwanted() + broken[: max(0, len(broken) - self.max_broken)]:
            if one.broken is not None:
                dropped.append(one.broken)
                one.broken = None
                self._remove_if_empty(name, one)
        if dropped:
            await run_to_end(_abort, dropped)

    def _unwanted(self) -> list[tuple[str, Slot]]:
        """Slots with a broken upload of a round that is over, or of a participant that has left."""
        members = self.driver.session.members
        needed = needed_by(self.driver.session)
        return [
            (participant_id, slot)
            for participant_id, slot in self.by_name.items()
            if slot.broken is not None
            and not (
                participant_id in members and needed.has_updates_of(slot.broken.announced.round)
            )
        ]

    async def close(self) -> None:
        """Cancel running uploads, wait for readings, then suspend the uploads that have broken off,
        for the next process where the store can. Unwanted ones are dropped."""
        self._is_closing = True
        slots = self.by_name.values()
        uploads = [slot.upload for slot in slots if slot.upload is not None]
        for upload in uploads:
            upload.cancel()  # its call may have ended, and what came of it not be kept yet
        if uploads:
            await asyncio.wait(uploads)
        while readings := [slot.reading.task for slot in slots if slot.reading is not None]:
            await asyncio.wait(readings)
        for _, slot in self._unwanted():
            await drop_broken(slot)
        for slot in list(slots):
            broken, slot.broken = slot.broken, None
            if broken is not None:
                await run_to_end(broken.suspend)
        await self._background.close()


async def wait_until_read(slot: Slot, unless: object = None) -> None:
    """Wait until no update is read back for the participant, except the one that `unless` names."""
    while slot.reading is not None and slot.reading.what != unless:
        await asyncio.wait([slot.reading.task])


def _abort(uploads: Sequence[MeasuredUpload]) -> None:
    """Remove the written parts of these uploads. Blocks."""
    for upload in uploads:
        upload.abort()


async def drop_broken(slot: Slot) -> None:
    """Remove the slot's upload that broke off, if there is one, with its written part."""
    broken, slot.broken = slot.broken, None
    if broken is not None:
        await run_to_end(broken.abort)
