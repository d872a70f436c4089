"""A disk that is full while updates are uploaded, with real processes."""

import resource
import sys
from typing import Any

import pytest

from support.process import CoordinatorProcess, ParticipantProcess
from support.waiting import until

SIZE = 500_000  # float32: an update is larger than LIMIT, all else is smaller
LIMIT = 1 << 20
REFUSALS = 4
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def refused_uploads(coordinator: CoordinatorProcess) -> list[dict[str, Any]]:
    return [line for line in coordinator.events("refused") if "PutWeights" in line["method"]]


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit")
async def test_full_disk_has_one_warning_and_a_line_when_it_is_over(keep, tmp_path):
    """The round goes on when there is room again, and every participant ends with 0."""
    settings = {
        "rounds.rounds": 2,
        "rounds.min_participants": 2,
        "server.heartbeat_time_s": 0.1,
        "server.heartbeat_timeout_s": 60,
        "logging.level": "debug",
    }
    coordinator = keep(CoordinatorProcess(tmp_path / "coordinator", settings))
    await coordinator.start()
    gates = tmp_path / "gates"
    gates.mkdir()
    target = f"127.0.0.1:{coordinator.port}"
    participants = [
        keep(
            ParticipantProcess(tmp_path / name, name, target, f"--size={SIZE}", f"--gates={gates}")
        )
        for name in ("a", "b")
    ]
    gate = gates / "a-1"
    gate.touch()
    for participant in participants:
        await participant.start()
    await until(lambda: ("handed_in", 1) in participants[1].book())
    resource.prlimit(coordinator.pid, resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
    gate.unlink()
    await until(lambda: len(refused_uploads(coordinator)) >= REFUSALS)
    resource.prlimit(coordinator.pid, resource.RLIMIT_FSIZE, NO_LIMIT)
    assert [await one.died() for one in participants] == [0, 0]
    (warning,) = coordinator.events("store_unavailable")
    assert warning["level"] == "warning"
    (over,) = coordinator.events("store_available")
    assert over["num_refused"] == len(refused_uploads(coordinator)) >= REFUSALS
