"""Updates that participants have put into the store themselves, brought to their place.

What counts is a copy: a participant can write to its own key until its URL expires.
"""

import asyncio
import contextlib
from dataclasses import dataclass

from xain_coordinator.core.errors import InvalidUpdate
from xain_coordinator.core.keys import round_of
from xain_coordinator.core.values import StoredWeights
from xain_coordinator.ports import DirectAccess, KeyNotFound, StoreError, WeightsStore, WrongSize
from xain_coordinator.server.open_rounds import OpenRounds, new_attempt_at
from xain_coordinator.updates.background import Background
from xain_coordinator.updates.measuring import measure
from xain_coordinator.updates.readings import Readings
from xain_foundation.threads import run_to_end


@dataclass(slots=True)
class _Adoption:
    """A copy that is being made and measured, or is there.

    It belongs to nobody's call: a caller that loses its patience finds it done, or joins it, when
    it comes again. While a call waits for it, is_awaited, nobody else forgets it.
    """

    digest: str
    task: asyncio.Task[StoredWeights | None]
    is_awaited: bool = False

    async def wait(self) -> None:
        self.is_awaited = True
        try:
            await asyncio.wait([self.task])
        finally:
            self.is_awaited = False

    @property
    def measured(self) -> StoredWeights | None:
        """What came of it; None as long as there is nothing, or if nothing ever will be."""
        if not self.task.done() or self.task.cancelled() or self.task.exception() is not None:
            return None
        return self.task.result()


class Adoptions:
    """Of one session. Used from one event loop."""

    def __init__(
        self,
        access: DirectAccess,
        store: WeightsStore,
        rounds: OpenRounds,
        readings: Readings,
        background: Background,
    ) -> None:
        self._access = access
        self._store = store
        self._rounds = rounds
        self._readings = readings
        self._background = background
        self._adoptions: dict[str, _Adoption] = {}  # by place

    async def adopt(
        self, source: str, place: str, size_bytes: int, digest: str
    ) -> StoredWeights | None:
        """The copy of what lies under `source`, which must have this size and digest; None if
        nothing is there, or its round is over by then. One call at a time of each place.

        Raises InvalidUpdate, Unavailable, and the store's errors.
        """
        adoption = self._adoptions.get(place)
        if adoption is not None and adoption.digest != digest:
            await adoption.wait()  # it is of another update; one at a time
            self._forget(place)
            adoption = None
        elif adoption is not None and adoption.task.done() and adoption.measured is None:
            self._forget(place)  # something else may have been put there since
            adoption = None
        if adoption is None:
            wanted = self._rounds.wanted(self._adoptions)
            for other, old in list(self._adoptions.items()):
                if other not in wanted and old.task.done() and not old.is_awaited:
                    self._forget(other)
            work = self._adopt(source, place, size_bytes, digest)
            adoption = _Adoption(digest, asyncio.ensure_future(work))
            self._adoptions[place] = adoption
        await adoption.wait()
        del self._adoptions[place]
        return adoption.task.result()

    async def _adopt(
        self, source: str, place: str, size_bytes: int, digest: str
    ) -> StoredWeights | None:
        key = new_attempt_at(place)
        async with self._readings.turn():
            if not self._rounds.is_wanted(place):
                return None
            try:
                await run_to_end(self._access.copy, source, key, size_bytes)
                distance = self._rounds.distance(round_of(place))
                measured = await run_to_end(measure, self._store, key, distance, size_bytes, digest)
            except KeyNotFound:
                return None
            except WrongSize as error:
                # Now: its sender may put the right one there as soon as it hears of this.
                with contextlib.suppress(StoreError):
                    await run_to_end(self._store.delete, source)
                raise InvalidUpdate(
                    f"the upload has {error.size} bytes, {size_bytes} were announced"
                ) from None
            except BaseException:  # whatever it is, nobody hears of this copy
                self._background.delete(key)
                raise
        if not self._rounds.is_wanted(place):
            # Nobody need come back for it, and what its round has left may have gone already.
            self._background.delete(key)
            return None
        return measured

    def _forget(self, place: str) -> None:
        """One that has ended and that nobody came back for."""
        measured = self._adoptions.pop(place).measured
        if measured is not None:
            self._background.delete(measured.ref.key)

    async def close(self) -> None:
        """Wait for those that have begun. What nobody came back for goes with its round: the next
        process makes a copy of its own."""
        under_way = [adoption.task for adoption in self._adoptions.values()]
        await asyncio.gather(*under_way, return_exceptions=True)
