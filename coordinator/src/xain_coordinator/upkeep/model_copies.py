"""Copies of small models, from the journal to the store.

A small model is committed to the journal together with the updates that it was made of, so that a
round needs no object of the store (see Driver). Its participants have it from memory. The journal
keeps it until the store has it. The newest model is copied every second. While rounds are faster
than that, the models between wait for a second without a round, so that copies do not slow rounds.
"""

import asyncio
import contextlib
from collections.abc import Callable

from xain_coordinator.aggregation.publishing import publish
from xain_coordinator.core.vocabulary.errors import Unavailable
from xain_coordinator.core.vocabulary.keys import round_of
from xain_coordinator.driver.driver import Driver
from xain_coordinator.driver.outage import Outage
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import Fenced, StoreUnavailable, WeightsStore
from xain_coordinator.stores.journalled import JournalledStore
from xain_coordinator.stores.prefixed import PrefixedStore
from xain_coordinator.upkeep.fence import Fence, FencedStore
from xain_foundation.logs.logger import get_logger
from xain_foundation.threads import run_to_end

log = get_logger(__name__)

EVERY_S = 1.0

# Models that wait at most, however fast the rounds are.
MAX_WAITING = 500

# Models that are removed from the journal together.
GROUP_MODELS = 64


class ModelCopies:
    """outage: told when the store is away."""

    def __init__(self, store: JournalledStore, outage: Outage | None = None) -> None:
        self._store = store
        self._outage = outage if outage is not None else Outage()
        self._newest = -1  # round of the newest model at the last look

    async def watch(self, driver: Driver) -> None:
        """Copy models to the store at the start and whenever some wait, until the driver stops."""
        with contextlib.suppress(Unavailable):
            await self.copy_now(driver)
            while True:
                await asyncio.sleep(EVERY_S)  # one look for all models of that time
                while not self._store.models:
                    await driver.wait_for_change()
                await self._copy_in_thread(driver, self.copy_due)

    async def copy_now(self, driver: Driver) -> None:
        """Copy all models, in a thread. If the store is away, the next call tries again; other
        errors fail the driver."""
        await self._copy_in_thread(driver, self.copy)

    async def _copy_in_thread(self, driver: Driver, copy: Callable[[], None]) -> None:
        """Run copy() or copy_due() in a thread. A store that is away is logged; other errors fail
        the driver."""
        work = "copy models"
        try:
            await run_to_end(copy)
            self._outage.note_success(work)
        except StoreUnavailable as error:
            self._outage.note_failure(work, error, work=work, round=driver.session.round)
        except Exception as error:
            # Another coordinator has published other models, or the journal cannot be read. A watch
            # may come when the driver has closed the journal; the next start copies then.
            if not driver.is_closed:
                driver.fail(error)

    def copy(self) -> None:
        """Copy the models in the journal to the store, and remove them from the journal. Blocks.
        Raises JournalError, Fenced and the store's errors; some are copied then."""
        with self._store.copying:
            waiting = self._store.models
            for start in range(0, len(waiting), GROUP_MODELS):
                self._copy(waiting[start : start + GROUP_MODELS])

    def copy_due(self) -> None:
        """Copy the newest model, and the others if no model was made since the last call or
        MAX_WAITING wait. Blocks. Raises JournalError, Fenced and the store's errors."""
        models = self._store.models
        if not models:
            return
        before, self._newest = self._newest, round_of(models[-1])
        if self._newest > before and len(models) < MAX_WAITING:
            with self._store.copying:
                self._copy(models[-1:])
        else:
            self.copy()

    def is_copied(self, key: str) -> bool:
        """Whether no model of this key waits."""
        return not self._store.has_model(key)

    def _copy(self, keys: list[str]) -> None:
        """Copy these models to the store, and remove those that are copied from the journal, also
        after an error. Raises JournalError, Fenced and the store's errors."""
        copied: list[str] = []
        try:
            for key in keys:
                if (data := self._store.journal.read_object(key)) is None:
                    break  # it is not committed yet
                publish(self._store.store, key, [data])
                copied.append(key)
        finally:
            if copied:
                self._store.forget_models(copied)


def copy_latest(store: WeightsStore, journal: SqliteJournal) -> None:
    """Copy the models of the journal's latest session, before another one hides them. Blocks.

    If another coordinator has gone on with that session, its models count: a warning is logged, and
    nothing more is copied.

    store: of all sessions. Raises JournalError and the store's errors but Fenced.
    """
    for session_id in journal.session_ids()[-1:]:
        part = PrefixedStore(store, session_id)
        fence = Fence(part, journal, session_id, "the store")
        fenced = FencedStore(part, fence.require_known_owner)
        try:
            ModelCopies(JournalledStore(fenced, journal)).copy()
        except Fenced as error:
            log.warning("earlier_models_not_copied", round=0, error=str(error))
