"""Uploads that are on their way, in chunks: streams of gRPC and bodies of the weights port.

An object is visible only when it is whole and measured, and every attempt has a key of its own. So
an accepted update is never written again, not even by a request that was given up and reaches a
remote store late. An upload that goes on after it broke off is still the same attempt: it is
committed once, or never.
"""

import asyncio
from dataclasses import astuple
from functools import partial
from typing import Protocol

import xxhash

from xain_coordinator.core.machine.needed import needed_by
from xain_coordinator.core.vocabulary.errors import (
    InvalidUpdate,
    NotAMember,
    Reason,
    Refusal,
    Unavailable,
)
from xain_coordinator.core.vocabulary.replies import AlreadyUploaded, Ticket
from xain_coordinator.core.vocabulary.values import GlobalModel, Phase, WeightsRef
from xain_coordinator.updates.measured_upload import Announced, Decoder, Header, MeasuredUpload
from xain_coordinator.updates.measuring import BaseModel, Inspector
from xain_coordinator.updates.slots import Slot, Slots, drop_broken, wait_until_read
from xain_foundation.threads import run_to_end, wait_to_end
from xain_wire.fl.coordinator_pb2 import Encoding
from xain_workloads.model import control_size


class Source(Protocol):
    """Source of the bytes of one upload, a connection. It ends an upload whose sender is silent for
    too long."""

    async def header(self) -> Header:
        """The description of the upload. Raises InvalidUpdate and Unavailable."""

    async def into(self, upload: MeasuredUpload) -> None:
        """Write all bytes that come. Returns when they are written, though some may be missing.
        Raises Unavailable, and what MeasuredUpload.write raises."""


class Uploads:
    """The uploads of one session. Used from one event loop. encoding: how they are wanted."""

    # Uploads at a time. Each takes some 25 KB, and its sender can make gRPC hold more.
    max_uploads = 500

    def __init__(self, slots: Slots, encoding: "Encoding.ValueType" = Encoding.PLAIN) -> None:
        self._slots = slots
        self._driver = slots.driver
        self._store = slots.store
        self._encoding = encoding
        self.num_uploads = 0

    def encoding_for(self, model: GlobalModel) -> "Encoding.ValueType":
        """Encoding of updates of this model."""
        return self._encoding if _has_differences(model) else Encoding.PLAIN

    async def receive(self, participant_id: str, source: Source) -> WeightsRef | int:
        """Take one upload. Returns when it is durable; for a part of one, when it is written, the
        number of bytes that are there now.

        A participant has one upload at a time: a new one ends the one before, whose sender has
        lost its connection or its patience.
        Raises TOO_LARGE, InvalidUpdate, Unavailable, and MayUpload's refusals.
        """
        session = self._driver.session
        # An unregistered client takes no slot in memory, not even until its header is there. After
        # the end the answer is the same for all, and no member is held up any more.
        if session.phase is not Phase.FINISHED and participant_id not in session.members:
            raise NotAMember(participant_id)
        with self._slots.of(participant_id) as slot:
            if slot.upload is None and self.num_uploads >= self.max_uploads:
                raise Unavailable(
                    f"{self.max_uploads} uploads are under way; come again in a moment"
                )
            earlier = slot.upload
            slot.upload = task = asyncio.ensure_future(self._receive(slot, participant_id, source))
            if earlier is None:
                self.num_uploads += 1
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
                    self.num_uploads -= 1

    async def _receive(self, slot: Slot, participant_id: str, source: Source) -> WeightsRef | int:
        """Receive one upload, new or continued, and make it durable. An update that is accepted or
        stored already is answered from its header. What broke off is kept in the slot; a wrong
        update is removed. Returns its reference, or of a part the number of bytes that are
        there."""
        # Before anything of this one is in memory: gigabytes may have to be read.
        await wait_until_read(slot)
        header = await source.header()
        announced = header.announced
        ticket = await self._slots.ask(participant_id, announced)
        if isinstance(ticket, AlreadyUploaded):
            return ticket.weights.ref
        if (stored := self._slots.stored_like(slot, announced)) is not None:
            return stored.ref
        await wait_until_read(slot)
        upload = await self._continued_or_new(slot, participant_id, ticket, header)
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
                await self._slots.keep_broken(slot, participant_id, upload)
            elif upload.is_open:
                await run_to_end(upload.abort)

    async def _commit(self, slot: Slot, participant_id: str, upload: MeasuredUpload) -> WeightsRef:
        """Make a whole upload durable, and keep it as the one that its sender hands in. Returns its
        reference. Raises MayUpload's refusals if another was accepted or the round is over."""
        announced = upload.announced
        async with slot.lock:
            # Another update may have been accepted meanwhile, and the round may be over.
            session = self._driver.session
            is_needed = needed_by(session).has_updates_of(announced.round)
            is_accepted = session.accepted(participant_id, announced.round) is not None
            if announced.round in slot.stored or is_accepted or not is_needed:
                latest = await self._slots.ask(participant_id, announced)
                if isinstance(latest, AlreadyUploaded):
                    return latest.weights.ref
            measured = await run_to_end(upload.complete)
            if not self._slots.keep(slot, announced.round, measured):
                await self._slots.ask(participant_id, announced)  # tells its sender why
        return measured.ref

    def _decode(
        self, upload: MeasuredUpload, model: GlobalModel | None, encoding: "Encoding.ValueType"
    ) -> None:
        """Set the decoder of an encoded upload. Raises InvalidUpdate."""
        if encoding == Encoding.PLAIN:
            return
        if encoding != Encoding.FLOAT16:
            raise InvalidUpdate(f"no encoding of updates has the number {encoding}")
        if model is None or not _has_differences(model):
            raise InvalidUpdate(
                "only updates of a float32 model that there is, and that has no control variate, "
                "can be encoded; send it as it is"
            )
        decoder = Decoder(BaseModel(self._store, model))
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
        connection. Raises TOO_LARGE, InvalidUpdate and MayUpload's refusals.
        """
        ticket = await self._slots.ask(participant_id, announced)
        if isinstance(ticket, AlreadyUploaded):
            return announced.size_bytes
        with self._slots.of(participant_id) as slot:
            if slot.upload is not None and self._slots.stored_like(slot, announced) is None:
                slot.upload.cancel()
                await asyncio.wait([slot.upload])
            if self._slots.stored_like(slot, announced) is not None:
                return announced.size_bytes
            if slot.broken is None:
                work = partial(self._pick_up, slot, participant_id, ticket, announced)
                await self._slots.read(slot, participant_id, announced, work)
            kept = slot.broken
            return kept.offset if kept is not None and kept.announced == announced else 0

    async def _continued_or_new(
        self, slot: Slot, participant_id: str, ticket: Ticket, header: Header
    ) -> MeasuredUpload:
        """The upload that a header continues, taken out of the slot, or a new one, for which a
        broken one is dropped. Raises UPLOAD_MISSING if there is none to continue at the header's
        offset."""
        kept = slot.broken
        if header.offset:
            is_meant = kept is not None and kept.announced == header.announced
            if kept is None or not is_meant or kept.offset != header.offset:
                raise Refusal(
                    Reason.UPLOAD_MISSING,
                    f"there is no upload to go on with at byte {header.offset}; begin again at 0",
                )
            slot.broken = None
            return kept
        await drop_broken(slot)
        return self._begin(participant_id, ticket, header.announced)

    def _begin(self, participant_id: str, ticket: Ticket, announced: Announced) -> MeasuredUpload:
        """A new upload, of which nothing is in the store yet. Its label is the same in any process
        that goes on with it in this session."""
        inspector = Inspector(self._slots.distance(ticket.model))
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
        async with self._slots.readings:
            try:
                is_needed = self._slots.is_to_be_read(announced.round)
            except Unavailable:
                await run_to_end(unfinished.resume(unfinished.size).suspend)
                raise
            if not is_needed:
                await run_to_end(unfinished.abort)
                return
            is_good = await run_to_end(upload.pick_up, unfinished)
        if is_good:
            await self._slots.keep_broken(slot, participant_id, upload)


def _has_differences(model: GlobalModel) -> bool:
    """Whether the differences of its updates to it have an encoding. Rounding would add up to a
    difference between a control variate and the mean of those at the sites."""
    return model.dtype == "float32" and not model.is_empty and not control_size(model.layout)
