"""The status of a session from the files of a stopped coordinator."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.pacing import WantedUpdates
from xain_coordinator.core.selection import ControllerFailed, Uniform
from xain_coordinator.core.strategy import Strategy
from xain_coordinator.extensions.strategies import strategy_of_session
from xain_coordinator.journal.restore import open_stopped
from xain_coordinator.metrics.null import NullMetricsStore
from xain_coordinator.server.inspection_client import Snapshot, ask_service
from xain_coordinator.server.inspection_service import InspectionService


def snapshot_of_files(config: CoordinatorConfig) -> Snapshot:
    """The status, participants, rounds and models of the journal's latest session.

    Raises JournalError.
    """
    with open_stopped(config.journal.path) as (_, last):
        try:
            strategy = strategy_of_session(last.session.rules)
        except (
            ControllerFailed
        ):  # a plug-in that is not installed here; it only words what is awaited
            strategy = Strategy(Uniform(), WantedUpdates())
        # The part of a driver that the service reads. The time is that of the last record.
        clock = SimpleNamespace(now=lambda: last.at)
        driver: Any = SimpleNamespace(
            session=last.session,
            history=last.history,
            clock=clock,
            num_late=0,
            strategy=strategy,
        )
    service = InspectionService(driver, NullMetricsStore(), Counter())
    return asyncio.run(ask_service(service, everything=True))
