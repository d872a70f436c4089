"""The status of a session from the files of a stopped coordinator."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import cast

from xain_coordinator.config import CoordinatorConfig
from xain_coordinator.core.session import Session
from xain_coordinator.driver import Driver
from xain_coordinator.history import History
from xain_coordinator.metrics.null import NullMetricsStore
from xain_coordinator.restore import open_stopped
from xain_coordinator.server.inspection_service import InspectionService
from xain_coordinator.status_view import Snapshot, ask_service


@dataclass(frozen=True, slots=True)
class _Stopped:
    """The part of a driver that the Inspection service reads."""

    session: Session
    history: History
    at: float
    num_late: int = 0

    @property
    def clock(self) -> "_Stopped":
        return self

    def now(self) -> float:
        """Session time of the last record."""
        return self.at


def snapshot_of_files(config: CoordinatorConfig) -> Snapshot:
    """The status, participants, rounds and models of the journal's latest session.

    Raises JournalError.
    """
    with open_stopped(config) as (_, last):
        driver = cast(Driver, _Stopped(last.session, last.history, last.at))
    service = InspectionService(driver, NullMetricsStore(), Counter())
    return asyncio.run(ask_service(service, everything=True))
