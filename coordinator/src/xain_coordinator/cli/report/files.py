"""The report of a session, from the files of a stopped coordinator or from one that runs."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from xain_coordinator.cli.gains import Gains, gains
from xain_coordinator.cli.report.about import metadata_of
from xain_coordinator.cli.report.page import page
from xain_coordinator.cli.study import table_of
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.machine.strategy import Strategy
from xain_coordinator.core.rules.pacing import WantedUpdates
from xain_coordinator.core.rules.selection import PluginFailed, Uniform
from xain_coordinator.export.describing import table_one
from xain_coordinator.export.trained import ask, open_files
from xain_coordinator.extensions.strategies import strategy_of_session
from xain_coordinator.inspection import client as inspection_client
from xain_coordinator.inspection.client import NoStatus, Snapshot, ask_service
from xain_coordinator.journal.restore import open_stopped
from xain_coordinator.ports import StoreError
from xain_coordinator.server.calls.inspection_service import InspectionService
from xain_coordinator.telemetry.null import NullMetricsStore
from xain_wire.fl.inspection_pb2 import ColumnImportances
from xain_workloads.errors import NoModel
from xain_workloads.linear.glm.coefficients import Coefficients, coefficients_of
from xain_workloads.linear.glm.options import NAME as GLM


@dataclass(frozen=True, slots=True)
class Report:
    """session_id: of the session that the page is about. trouble: why table one, or coefficients,
    are not on the page though there may be some; empty if they are, or there are none."""

    session_id: str
    html: str
    trouble: str = ""


def report(config: CoordinatorConfig, address: str | None) -> Report:
    """The report of the latest session. address: of a coordinator that runs; None: of the files.
    Raises NoStatus and JournalError."""
    asked = None if address is None else inspection_client.fetch(address, everything=True)
    snapshot = asked or snapshot_of_files(config)
    described, trouble = None, ""
    try:
        described = table_one(config, address)
    except NoModel:
        pass
    except (NoStatus, StoreError) as error:  # the first from a coordinator of an earlier version
        trouble = f"without table one: {error}"
    study = None
    if snapshot.status.study:
        study = table_of(config, address)
    coefficients = None
    if metadata_of(snapshot).get("workload") == GLM:
        try:
            coefficients = _coefficients(config, address)
        except (NoModel, StoreError) as error:
            trouble = trouble or f"without coefficients: {error}"
    html = page(snapshot, described, datetime.now(UTC), study, coefficients)
    return Report(snapshot.status.session_id, html, trouble)


def _coefficients(config: CoordinatorConfig, address: str | None) -> Coefficients | None:
    """The coefficients of the last model; None before the first step. Raises NoModel and
    StoreError."""
    with open_files(config) if address is None else ask(address) as trained:
        if trained.last == 0:
            return None
        return coefficients_of(trained.load(trained.entries[trained.last].model))


def gains_of(config: CoordinatorConfig, address: str | None) -> Gains:
    """Gains of the sites in the latest session. address: of a coordinator that runs; None: of the
    files. Raises NoModel, NoStatus and JournalError."""
    asked = None if address is None else inspection_client.fetch(address, everything=True)
    snapshot = asked or snapshot_of_files(config)
    found = gains(snapshot.status, snapshot.rounds.rounds)
    if found is None:
        raise NoModel(
            "no local models are known: the sites train them at the end of a training by a"
            " workload, unless evaluate.local is false, or it is a session of a study"
        )
    return found


def importance_of(config: CoordinatorConfig, address: str | None) -> ColumnImportances:
    """The importance of the columns in the latest session. address: of a coordinator that runs;
    None: of the files. Raises NoModel, NoStatus and JournalError."""
    asked = None if address is None else inspection_client.fetch(address, everything=True)
    status = (asked or snapshot_of_files(config)).status
    if not status.HasField("importance"):
        raise NoModel(
            "no importance of columns is known: the sites measure it at the end of a training,"
            " unless evaluate.importance is false, or fitted estimators stay at the sites"
        )
    return status.importance


def snapshot_of_files(config: CoordinatorConfig) -> Snapshot:
    """The status, participants, rounds and models of the journal's latest session. Raises
    JournalError."""
    with open_stopped(config.journal.path) as (_, last):
        try:
            strategy = strategy_of_session(last.session.rules)
        except PluginFailed:  # a plug-in that is not installed here; it only words what is awaited
            strategy = Strategy(Uniform(), WantedUpdates())
        # The part of a driver that the service reads. The time is that of the last record.
        clock = SimpleNamespace(now=lambda: last.at)
        driver: Any = SimpleNamespace(
            session=last.session,
            history=last.history,
            clock=clock,
            num_late=0,
            strategy=strategy,
            goes_on=lambda: False,
        )
    service = InspectionService(driver, NullMetricsStore(), Counter())
    return asyncio.run(ask_service(service, everything=True))
