"""Retention: how long a session keeps objects that its next model does not need.

Updates are what participants have learnt from their data, and many times as large as the models: of
a session of weeks they would fill any disk. An optimiser's state is as large as an update or two.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import structlog

from xain_coordinator.core.errors import Unavailable
from xain_coordinator.core.keys import INCOMING, OPTIMIZER, is_model
from xain_coordinator.core.needed import Needed, needed_by
from xain_coordinator.core.session import Session
from xain_coordinator.core.values import Phase
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import StoreError, WeightsStore
from xain_foundation.backoff import Backoff
from xain_foundation.threads import run_to_end

log = structlog.get_logger(__name__)

# A round of a large model drops at once: uploads of the next one are written over the files.
LARGE_BYTES = 1 << 20

GROUP_SIZE = 64  # keys deleted at a time; in between it can be stopped


class Retention:
    """Drops objects that a session needs no more from its store; models stay.

    keep: of so many rounds that are over, the latest, updates and states stay; None: of all.
    """

    # Between two drops. There may be hundreds of small rounds a second: dropping each by itself
    # would cost a tenth of it.
    every_s = 1.0
    first_wait_s = 1.0  # after it a drop that failed is tried again, then after twice as long

    def __init__(self, store: WeightsStore, keep: int | None) -> None:
        self._store = store
        self._keep = keep
        self._stop = threading.Event()
        # First round of each folder that has not been looked through; rounds that were needed then
        # are looked through again.
        self._next: dict[str, int] = {}
        self._spared: dict[str, frozenset[int]] = {}

    async def watch(self, driver: Driver) -> None:
        """Drop objects at the start and after each model, until the driver stops. One thread at a
        time, however slow the store is: what more there is to drop then, is dropped next."""
        with contextlib.suppress(Unavailable):
            while True:
                session = driver.session
                await self._drop_at_last(driver, session)
                if session.model is None or session.model.ref.size_bytes < LARGE_BYTES:
                    await asyncio.sleep(self.every_s)
                while _when(driver.session) == _when(session):
                    await driver.changed()

    async def _drop_at_last(self, driver: Driver, session: Session) -> None:
        """Try to drop updates until they are gone or there are more to drop. Raises Unavailable."""
        backoff = Backoff(self.first_wait_s, 60.0)
        while True:
            try:
                return await run_to_end(self.drop, needed_by(session))
            except Exception as error:
                # No failure here, not even a defect of ours, may cost more than room in the store.
                if not backoff.has_failed:
                    trace = None if isinstance(error, StoreError) else error
                    reason = str(error)
                    log.warning(
                        "updates_not_dropped", round=session.round, error=reason, exc_info=trace
                    )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff.next_s()):
                    while _when(driver.session) == _when(session):
                        await driver.changed()
                    return None

    def stop(self) -> None:
        """Stop dropping. The next start drops the rest."""
        self._stop.set()

    def drop(self, needed: Needed) -> None:
        """Drop the objects that are not needed. Blocks. Raises the store's errors; the next call
        continues."""
        # Accepted updates are copies: no object of this folder counts any more.
        self._drop_before(needed.updates_from, INCOMING, needed.earlier)
        if self._keep is not None:
            self._drop_before(needed.updates_from - self._keep, "", needed.earlier)
            self._drop_before(needed.states_from - self._keep, OPTIMIZER)

    def _drop_before(self, end: int, folder: str, spared: frozenset[int] = frozenset()) -> None:
        group: list[str] = []
        for key in self._keys(folder, end, spared):
            if self._stop.is_set():
                return
            if not is_model(key):
                group.append(key)
            if len(group) == GROUP_SIZE:
                self._store.delete(*group)
                group.clear()
        if self._stop.is_set():
            return
        if group:
            self._store.delete(*group)
        self._next[folder] = max(end, self._next.get(folder, 0))
        self._spared[folder] = frozenset(round_ for round_ in spared if round_ < end)

    def _keys(self, folder: str, end: int, spared: frozenset[int]) -> Iterator[str]:
        """Keys of rounds before `end`. The first call lists all objects, and so finds those that
        earlier processes have left, under other settings too."""
        if self._stop.is_set():
            return
        if folder in self._next:
            new = {*self._spared[folder], *range(self._next[folder], end)}
            for round_ in sorted(new - spared):
                yield from self._store.keys(f"{folder}{round_}/")
            return
        for key in self._store.keys(folder):
            number, slash, _ = key.removeprefix(folder).partition("/")
            if slash and number.isdecimal() and int(number) < end and int(number) not in spared:
                yield key


def _when(session: Session) -> tuple[int, Phase]:
    """Round and phase of a session; while they stay the same there is nothing more to drop."""
    return -1 if session.model is None else session.model.round, session.phase
