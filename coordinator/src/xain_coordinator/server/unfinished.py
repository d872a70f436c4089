"""Uploads that have broken off, to be gone on with.

What came of them is kept as it was written: the latest of each participant, of a round that is
open. What a process before this one has left is read again when its sender asks for it. So what is
kept here has been measured as far as it goes.
"""

import asyncio
from dataclasses import astuple

import xxhash

from xain_coordinator.core.errors import InvalidUpdate, UploadMissing
from xain_coordinator.core.keys import update_key
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import WeightsStore
from xain_coordinator.server.open_rounds import OpenRounds, new_attempt_at
from xain_coordinator.updates.background import Background
from xain_coordinator.updates.readings import Readings
from xain_coordinator.updates.reception import Announced, Reception
from xain_foundation.threads import run_to_end

# What came of broken uploads is kept of so many participants. Each is a file as large as what came,
# open, and some KiB of memory.
MAX_BROKEN = 64


class UnfinishedUploads:
    """Of one session. Used from one event loop.

    A reception belongs to whoever has it from reception() or begin(), until it is given to keep().
    """

    def __init__(
        self,
        driver: Driver,
        store: WeightsStore,
        rounds: OpenRounds,
        readings: Readings,
        background: Background,
    ) -> None:
        self._driver = driver
        self._store = store
        self._rounds = rounds
        self._readings = readings
        self._background = background
        # By participant, the latest at the end.
        self._broken: dict[str, Reception] = {}
        # What is being read again of what a predecessor has received, by participant. It belongs to
        # nobody's call: who gives up a question leaves its answer to the next one.
        self._picking_up: dict[str, asyncio.Task[None]] = {}

    async def find(self, participant_id: str, place: str, announced: Announced) -> int:
        """How much of an upload is there to be gone on with: bytes of the object.

        Raises Unavailable and the store's errors.
        """
        if participant_id not in self._broken:
            await self._picked_up(participant_id, place, announced)
        kept = self._broken.get(participant_id)
        return kept.offset if kept is not None and kept.announced == announced else 0

    async def reception(
        self, participant_id: str, place: str, announced: Announced, offset: int
    ) -> Reception:
        """A new one, or the one that is to go on at this offset. Raises UploadMissing."""
        await self.until_picked_up(participant_id)
        kept = self._broken.get(participant_id)
        if offset:
            if kept is None or kept.announced != announced or kept.offset != offset:
                raise UploadMissing(
                    f"there is no upload that could go on at byte {offset}; begin again at 0"
                )
            return self._broken.pop(participant_id)
        await self._drop(participant_id)
        return self.begin(participant_id, place, announced)

    def begin(self, participant_id: str, place: str, announced: Announced) -> Reception:
        label = self._label(participant_id, announced)
        inspector = self._rounds.inspector(announced.round)
        return Reception(self._store, new_attempt_at(place), announced, inspector, label)

    def _label(self, participant_id: str, announced: Announced) -> str:
        """The same for whoever goes on with this upload in this session."""
        what = (self._driver.session.session_id, participant_id, *astuple(announced))
        return xxhash.xxh3_128(repr(what).encode()).hexdigest()

    async def until_picked_up(self, participant_id: str) -> None:
        """Wait for what is being read again for this participant."""
        picking_up = self._picking_up.get(participant_id)
        if picking_up is not None:
            await asyncio.wait([picking_up])

    async def _picked_up(self, participant_id: str, place: str, announced: Announced) -> None:
        """What our predecessor has received of it is among the broken ones. Raises as find does."""
        picking_up = self._picking_up.get(participant_id)
        if picking_up is None:
            picking_up = asyncio.ensure_future(self._pick_up(participant_id, place, announced))
            self._picking_up[participant_id] = picking_up

            def forget(ended: asyncio.Task[None]) -> None:
                del self._picking_up[participant_id]
                if not ended.cancelled():
                    ended.exception()  # all who asked may have gone

            picking_up.add_done_callback(forget)
        await asyncio.shield(picking_up)

    async def _pick_up(self, participant_id: str, place: str, announced: Announced) -> None:
        reception = self.begin(participant_id, place, announced)
        is_untouched, is_kept = True, False
        try:
            # Mostly there is nothing, and nobody need wait for a turn to hear that.
            if not await run_to_end(reception.look):
                return
            async with self._readings.turn():
                is_untouched = False
                is_wanted = self._rounds.is_wanted(place)
                is_there = is_wanted and await run_to_end(reception.pick_up)
            if is_there:
                is_kept = True  # from here on others may have let go of it already
                await self.keep(participant_id, reception)
        except InvalidUpdate:
            pass  # it is not ours to blame on the sender: a disk may have lost it
        finally:
            if is_untouched:
                await run_to_end(reception.suspend)
            elif not is_kept:
                await run_to_end(reception.abort)

    async def keep(self, participant_id: str, reception: Reception) -> None:
        """The latest of each participant, and of all no more than MAX_BROKEN."""
        reception.pause()
        # Before anything is waited for: whoever is cancelled here has kept it all the same.
        replaced = self._broken.pop(participant_id, None)
        self._broken[participant_id] = reception
        if replaced is not None:
            await run_to_end(replaced.abort)
        for other in self._unwanted():
            await self._drop(other)
        while len(self._broken) > MAX_BROKEN:
            await self._drop(next(iter(self._broken)))

    def drop_unwanted(self) -> None:
        """Let go of what nobody will go on with; it is removed in the background."""
        for participant_id in self._unwanted():
            self._background.do(self._broken.pop(participant_id).abort)

    def _unwanted(self) -> list[str]:
        """Participants that have left, and those whose broken upload is of a round that is over."""
        members = self._driver.session.members
        places = {p: update_key(r.announced.round, p) for p, r in self._broken.items()}
        wanted = self._rounds.wanted(places.values())
        return [p for p, place in places.items() if p not in members or place not in wanted]

    async def _drop(self, participant_id: str) -> None:
        reception = self._broken.pop(participant_id, None)
        if reception is not None:
            await run_to_end(reception.abort)

    async def close(self) -> None:
        """Let go of what is kept. The next process goes on with it, where the store can."""
        if picking_up := list(self._picking_up.values()):
            await asyncio.wait(picking_up)
        for participant_id in self._unwanted():
            await self._drop(participant_id)
        while self._broken:
            _, reception = self._broken.popitem()
            await run_to_end(reception.suspend)
