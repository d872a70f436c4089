"""The rounds that updates are wanted of, and what these are held against."""

import uuid
from collections.abc import Iterable

from xain_coordinator.core.keys import attempt_key, round_of
from xain_coordinator.core.values import GlobalModel, Phase
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import WeightsStore
from xain_coordinator.updates.measuring import BaseModel, Distance, Inspector


class OpenRounds:
    """Rounds of a session that take updates at the moment.

    max_update_norm: L2 norm that an update's difference to its model may have; None: any.
    """

    def __init__(self, driver: Driver, store: WeightsStore, max_update_norm: float | None) -> None:
        self._driver = driver
        self._store = store
        self._max_update_norm = max_update_norm

    def wanted(self, places: Iterable[str]) -> set[str]:
        """The places of rounds for which updates are still taken."""
        session = self._driver.session
        if session.phase is Phase.FINISHED:
            return set()
        newest, earlier = session.round, session.earlier_rounds
        return {p for p in places if round_of(p) >= newest or round_of(p) in earlier}

    def is_wanted(self, place: str) -> bool:
        return place in self.wanted([place])

    def model_of(self, round_: int) -> GlobalModel | None:
        """The model that the updates of a round are trained from; None if there is none yet."""
        session = self._driver.session
        base = session.bases.get(round_)
        model = session.model if base is None else base.model
        return None if model is None or model.is_empty or model.round != round_ else model

    def epochs_of(self, round_: int) -> int:
        """Epochs that the updates of a round are trained for."""
        session = self._driver.session
        base = session.bases.get(round_)
        return session.rules.epochs if base is None else base.epochs

    def distance(self, round_: int) -> Distance | None:
        """Largest distance of an update of this round to its model; None if there is no limit."""
        model = self.model_of(round_)
        if self._max_update_norm is None or model is None:
            return None
        return Distance(BaseModel(self._store, model), self._max_update_norm)

    def inspector(self, round_: int) -> Inspector:
        return Inspector(self.distance(round_))


def new_attempt_at(place: str) -> str:
    """A key that nobody else writes, for an update that is to lie there."""
    return attempt_key(place, uuid.uuid4().hex)
