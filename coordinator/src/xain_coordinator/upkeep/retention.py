"""Retention: how long a session keeps objects that its next model does not need.

Updates are what participants have learnt from their data, and many times as large as the models: of
a session of weeks they would fill any disk. An optimiser's state is as large as an update or two.
Models stay unless the operator bounds their number; that one is removed is journalled before it is,
so that a start after a crash removes the rest, and no reader takes a removed model for a lost one.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Set

from xain_coordinator.core.machine.needed import Needed, models_in_use, needed_by
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.vocabulary.commands import RemoveModels
from xain_coordinator.core.vocabulary.errors import Unavailable
from xain_coordinator.core.vocabulary.keys import INCOMING, OPTIMIZER, is_model, model_key, round_of
from xain_coordinator.core.vocabulary.values import Phase
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import StoreError, WeightsStore
from xain_foundation.logs.logger import get_logger
from xain_foundation.net.backoff import Backoff
from xain_foundation.threads import run_to_end

log = get_logger(__name__)

# A round of a large model drops at once: uploads of the next one are written over the files.
LARGE_BYTES = 1 << 20

GROUP_SIZE = 64  # keys deleted at a time; in between it can be stopped


class Retention:
    """Drops objects that a session needs no more from its store.

    keep: of so many rounds that are over, the latest, updates and states stay; None: of all.
    keep_models: so many models, the latest, stay, and those in use; None: all.
    on_removed: called with the rounds of models that were removed, in the thread that did it.
    """

    # Between two drops. There may be hundreds of small rounds a second: dropping each by itself
    # would cost a tenth of it.
    every_s = 1.0
    first_wait_s = 1.0  # after it a drop that failed is tried again, then after twice as long

    def __init__(
        self,
        store: WeightsStore,
        keep: int | None,
        keep_models: int | None = None,
        on_removed: Callable[[Collection[int]], None] = lambda rounds: None,
    ) -> None:
        self._store = store
        self._keep = keep
        self._keep_models = keep_models
        self._on_removed = on_removed
        self._removed: set[int] | None = None  # rounds whose models are gone; None: not known yet
        self._stop = threading.Event()
        # While a caller holds the lock, no object that the journal names is removed.
        self.pause = asyncio.Lock()
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
                await self._note_removals(driver)
                await self._drop_at_last(driver, session)
                if session.model is None or session.model.ref.size_bytes < LARGE_BYTES:
                    await asyncio.sleep(self.every_s)  # one drop for many small rounds
                while _progress(driver.session) == _progress(session):
                    await driver.wait_for_change()

    async def _note_removals(self, driver: Driver) -> None:
        """Note in the journal which models are to be removed: all but the latest and those in use.
        Raises Unavailable."""
        if self._keep_models is None:
            return
        rounds = sorted(model.round for model in driver.history.models.values())
        unused = {*rounds[: -self._keep_models]} - models_in_use(driver.session)
        if unused:
            await driver.submit(RemoveModels(tuple(sorted(unused))))

    async def _drop_at_last(self, driver: Driver, session: Session) -> None:
        """Try to drop updates until they are gone or there are more to drop. Raises Unavailable."""
        backoff = Backoff(self.first_wait_s, 60.0)
        while True:
            try:
                async with self.pause:
                    removed = frozenset(driver.history.removed)
                    return await run_to_end(self.drop, needed_by(session), removed)
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
                    while _progress(driver.session) == _progress(session):
                        await driver.wait_for_change()
                    return None

    def stop(self) -> None:
        """Stop dropping. The next start drops the rest."""
        self._stop.set()

    def drop(self, needed: Needed, removed: Set[int] = frozenset()) -> None:
        """Drop the objects that are not needed, and the models of the rounds in `removed`. Blocks.
        Raises the store's errors; the next call continues."""
        # Accepted updates are copies: no object of this folder counts any more.
        self._drop_before(needed.updates_from, INCOMING, needed.earlier)
        if self._keep is not None:
            self._drop_before(needed.updates_from - self._keep, "", needed.earlier)
            self._drop_before(needed.states_from - self._keep, OPTIMIZER)
        if removed:
            self._remove_models(removed)

    def _remove_models(self, removed: Set[int]) -> None:
        """Remove the models of these rounds from the store, those that an earlier process did not
        come to remove among them. Models that are known to be gone are not asked for again. Raises
        the store's errors."""
        if self._removed is None:
            there = {round_of(key) for key in self._store.keys("") if is_model(key)}
            self._removed = {*removed} - there
        left = sorted(removed - self._removed)
        for start in range(0, len(left), GROUP_SIZE):
            if self._stop.is_set():
                return
            group = left[start : start + GROUP_SIZE]
            self._store.delete(*map(model_key, group))
            self._on_removed(group)
            self._removed.update(group)

    def _drop_before(self, end: int, folder: str, spared: frozenset[int] = frozenset()) -> None:
        """Remove all objects but models of the rounds before `end` from a folder; stops early after
        stop(). spared: rounds whose objects stay for now. Raises the store's errors."""
        if self._stop.is_set():
            return
        group: list[str] = []
        keys = self._keys_of_passed_rounds if folder in self._next else self._keys_listed
        for key in keys(folder, end, spared):
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

    def _keys_of_passed_rounds(
        self, folder: str, end: int, spared: frozenset[int]
    ) -> Iterator[str]:
        """Keys of rounds before `end` that the call before has not dropped."""
        passed = {*self._spared[folder], *range(self._next[folder], end)}
        for round_ in sorted(passed - spared):
            yield from self._store.keys(f"{folder}{round_}/")

    def _keys_listed(self, folder: str, end: int, spared: frozenset[int]) -> Iterator[str]:
        """Keys of rounds before `end` among all objects, those that earlier processes have left
        under other settings too."""
        for key in self._store.keys(folder):
            number, slash, _ = key.removeprefix(folder).partition("/")
            if slash and number.isdecimal() and int(number) < end and int(number) not in spared:
                yield key


def _progress(session: Session) -> tuple[int, Phase]:
    """Round and phase of a session; while they stay the same there is nothing more to drop."""
    return -1 if session.model is None else session.model.round, session.phase
