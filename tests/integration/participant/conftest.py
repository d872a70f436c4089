"""Scripted coordinators on free ports."""

from collections.abc import Callable, Iterator

import pytest

from integration.participant.scripted import Ledger, ScriptedCoordinator

Serve = Callable[..., ScriptedCoordinator]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start scripted coordinators; all are stopped at the end."""
    running: list[ScriptedCoordinator] = []

    def start(ledger: Ledger | None = None, port: int = 0) -> ScriptedCoordinator:
        running.append(ScriptedCoordinator(ledger, port))
        return running[-1]

    yield start
    for coordinator in running:
        coordinator.stop()
