"""Real coordinators with real files, inside the test's event loop or in a process of their own."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fault_proxy import FaultProxy
from support.process import CoordinatorProcess, Keep
from support.wire import Member
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_foundation.net.proxies import PROXIES, WITHOUT
from xain_wire.fl import coordinator_pb2 as pb

Start = Callable[..., Awaitable[SessionCoordinator]]
Join = Callable[..., Member]
Enter = Callable[..., Awaitable[list[Member]]]
InRound = Callable[..., Awaitable[tuple[Any, ...]]]  # a coordinator, and its members


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


def plug_in(site: Path, group: str, entry: str, code: str) -> Path:
    """Install a distribution of one module and one entry point, "name = module:Class"."""
    module = entry.partition(" = ")[2].partition(":")[0]
    info = site / f"{module}-0.1.dist-info"
    info.mkdir(parents=True)
    name = module.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[xain.{group}]\n{entry}\n")
    (site / f"{module}.py").write_text(code)
    return site


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start coordinators; all are stopped at the end."""
    running = []

    async def begin(**options: Any) -> SessionCoordinator:
        others = ("resume", "new_session", "from_model", "latencies", "guard")
        own = {key: options.pop(key) for key in others if key in options}
        config = config_for(tmp_path, **options)
        coordinator = SessionCoordinator(config, **{"resume": True, **own})
        running.append(coordinator)
        await coordinator.start()
        return coordinator

    yield begin
    for coordinator in running:
        await coordinator.stop()


@pytest.fixture
async def process(keep: Keep, tmp_path: Path) -> CoordinatorProcess:
    """A coordinator of three participants in a process of its own; it serves."""
    settings = {"rounds.rounds": 3, "rounds.min_participants": 3, "rounds.start_timeout_s": 0}
    coordinator = keep(CoordinatorProcess(tmp_path, settings))
    await coordinator.start()
    return coordinator


@pytest.fixture
async def join() -> AsyncIterator[Join]:
    """Members of a coordinator; their channels are closed at the end."""
    members = []

    def make(coordinator: Any, participant_id: str | None) -> Member:
        members.append(Member(coordinator.port, participant_id))
        return members[-1]

    yield make
    for member in members:
        await member.close()


@pytest.fixture
def enter(join: Join) -> Enter:
    """Members after their rendezvous, and, if a round is named, once it is open."""

    async def come(at: Any, *names: str | None, round_: int | None = None) -> list[Member]:
        members = [join(at, name) for name in names]
        for member in members:
            await member.rendezvous()
        if round_ is not None:
            await members[0].until(pb.ROUND, round_)
        return members

    return come


@pytest.fixture
def in_round(start: Start, enter: Enter) -> InRound:
    """Start a coordinator, and return it with members whose round 0 is open.

    As many participants as there are names are needed, unless the test wants another number.
    """

    async def begin(*names: str | None, **options: Any) -> tuple[Any, ...]:
        rounds = options.pop("rounds", {})
        if "start_participants" not in rounds:
            rounds = {"min_participants": len(names), **rounds}
        coordinator = await start(rounds=rounds, **options)
        return coordinator, *await enter(coordinator, *names, round_=0)

    return begin


@pytest.fixture(params=["files", "s3"])
def storage_settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, object]:
    """Settings of each store that a deployment may have, for a test that runs on all of them."""
    if request.param == "files":
        return {"path": str(tmp_path / "weights")}
    server = request.getfixturevalue("seaweedfs")
    return server.settings(server.new_bucket(), path=str(tmp_path / "spool"))


@pytest.fixture
def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the proxies of this machine."""
    for name in (*PROXIES, *WITHOUT):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    """A proxy whose upstream the test sets."""
    with FaultProxy() as proxy:
        yield proxy
