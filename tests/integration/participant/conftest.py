"""Scripted coordinators and stores on free ports, agents for them, and for a real coordinator."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from integration.participant.agents import Adder, Running
from integration.participant.scripted import Ledger, ScriptedCoordinator
from integration.participant.store import ScriptedStore
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_participant import Agent, Participant

Serve = Callable[..., ScriptedCoordinator]
Launch = Callable[..., Running]
TakePart = Callable[[SessionCoordinator, dict[str, Participant]], Awaitable[dict[str, int]]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start scripted coordinators; all are stopped at the end."""
    running = []

    def start(ledger: Ledger | None = None, port: int = 0) -> ScriptedCoordinator:
        running.append(ScriptedCoordinator(ledger, port))
        return running[-1]

    yield start
    for coordinator in running:
        coordinator.stop()


@pytest.fixture
def store(without_proxies: None) -> Iterator[ScriptedStore]:
    """Stopped at the end. Without a proxy between, whatever this machine has."""
    store = ScriptedStore()
    yield store
    store.stop()


@pytest.fixture
def adder() -> Iterator[Adder]:
    adder = Adder()
    yield adder
    adder.may_finish.set()  # whatever went wrong, its thread comes to an end


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Run agents in threads; all have come to an end when the test has."""
    running = []

    def start(participant: Participant, target: str, **options: Any) -> Running:
        running.append(Running(participant, target, **options))
        return running[-1]

    yield start
    for one in running:
        one.agent.stop()
        one.code()


@pytest.fixture
async def take_part() -> AsyncIterator[TakePart]:
    """Run participants by name until all have ended; returns the exit status of each."""
    agents = {}

    async def run(
        coordinator: SessionCoordinator, participants: dict[str, Participant]
    ) -> dict[str, int]:
        target = f"127.0.0.1:{coordinator.port}"
        agents.update((name, Agent(one, target, name)) for name, one in participants.items())
        ends = await asyncio.gather(*(asyncio.to_thread(a.run) for a in agents.values()))
        return dict(zip(agents, ends, strict=True))

    yield run
    for agent in agents.values():
        agent.stop()  # in a test that fails they would go on
