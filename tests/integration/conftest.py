"""Real coordinators with real files, inside the test's event loop or in a process of their own."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fault_proxy import FaultProxy
from support.process import CoordinatorProcess
from support.s3_servers import SeaweedFS
from support.wire import Member
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.server.guard import Guard
from xain_coordinator.telemetry.log_files import LatencyFile

Start = Callable[..., Awaitable[SessionCoordinator]]
Join = Callable[..., Member]


def config_for(folder: Path, **sections: dict[str, Any]) -> CoordinatorConfig:
    """Embedded stores below `folder`, a free port, and what the test wants otherwise.

    Without a workload, all participants make initial weights, unless the test wants another way.
    Members are not missed on a slow machine: many of them send no heartbeats.
    """
    if "workload" not in sections:
        sections["rounds"] = {"initial_weights": "average", **sections.get("rounds", {})}
    return CoordinatorConfig.model_validate(
        {
            "storage": {"path": str(folder / "weights")},
            "journal": {"path": str(folder / "journal.sqlite")},
            "metrics": {"path": str(folder / "metrics.jsonl")},
            "server": {
                "port": 0,
                "drain_s": 1.0,
                "heartbeat_timeout_s": 600.0,
                **sections.pop("server", {}),
            },
            **sections,
        }
    )


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start coordinators; all are stopped at the end."""
    running: list[SessionCoordinator] = []

    async def begin(
        *,
        resume: bool = True,
        new_session: bool = False,
        from_model: str = "",
        latencies: LatencyFile | None = None,
        guard: Guard | None = None,
        **sections: dict[str, Any],
    ) -> SessionCoordinator:
        coordinator = SessionCoordinator(
            config_for(tmp_path, **sections),
            resume=resume,
            new_session=new_session,
            from_model=from_model,
            latencies=latencies,
            guard=guard,
        )
        running.append(coordinator)
        await coordinator.start()
        return coordinator

    yield begin
    for coordinator in running:
        await coordinator.stop()


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[CoordinatorProcess]:
    """A coordinator of three participants in a process of its own; it serves."""
    coordinator = CoordinatorProcess(
        tmp_path,
        {"rounds.rounds": 3, "rounds.min_participants": 3, "rounds.start_timeout_s": 0},
    )
    await coordinator.start()
    yield coordinator
    await coordinator.end()


@pytest.fixture
async def join() -> AsyncIterator[Join]:
    """Members of a coordinator; their channels are closed at the end."""
    members: list[Member] = []

    def make(coordinator: SessionCoordinator, participant_id: str | None) -> Member:
        member = Member(coordinator.port, participant_id)
        members.append(member)
        return member

    yield make
    for member in members:
        await member.close()


@pytest.fixture(params=["files", "s3"])
def storage_settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, object]:
    """Settings of each store that a deployment may have, for a test that runs on all of them."""
    if request.param == "files":
        return {"path": str(tmp_path / "weights")}
    server: SeaweedFS = request.getfixturevalue("seaweedfs")
    return server.settings(server.new_bucket(), path=str(tmp_path / "spool"))


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    """A proxy whose upstream the test sets."""
    with FaultProxy() as proxy:
        yield proxy
