"""An unregistered client that opens thousands of calls and says nothing, while participants
train."""

import asyncio
from contextlib import ExitStack, suppress
from pathlib import Path

from support.process import CoordinatorProcess, ParticipantProcess
from support.silent import SilentConnection
from support.waiting import until

ROUNDS = 12
SILENT = (
    ("/xain_proto.fl.Coordinator/Heartbeat", None),
    ("/grpc.health.v1.Health/Watch", b""),
    ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", None),
    ("/xain_proto.fl.Coordinator/PutWeights", None),
    ("/xain_proto.messaging.Membership/Watch", None),
)
MAX_RSS_MIB = 200


def rss_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024


def num_published(coordinator: CoordinatorProcess) -> int:
    """How many models were published."""
    return sum(line["event"] == "model_published" for line in coordinator.events())


async def test_thousands_of_silent_streams_end_no_participant(keep, tmp_path):
    """Three connections open 9,000 calls, and 40 more connections as many as each may have. Rounds
    go on, the coordinator stays small, and every participant ends with 0."""
    settings = {"rounds.rounds": ROUNDS, "rounds.min_participants": 3, "logging.level": "debug"}
    coordinator = keep(CoordinatorProcess(tmp_path / "coordinator", settings))
    await coordinator.start()
    target = f"127.0.0.1:{coordinator.port}"
    flags = ("--size", "1000", "--training-s", "0.2")
    participants = [
        keep(ParticipantProcess(tmp_path / name, name, target, *flags)) for name in ("a", "b", "c")
    ]
    for participant in participants:
        await participant.start()
    await until(lambda: num_published(coordinator))
    with ExitStack() as stack:
        for num_calls in (*[600] * 3, *[50] * 40):
            connection = stack.enter_context(SilentConnection(coordinator.port))
            with suppress(ConnectionError):  # the server may hang up on the greedy ones
                for method, message in SILENT:
                    connection.open_calls(method, num_calls, message)
        statuses = await asyncio.gather(*(one.died() for one in participants))
        assert rss_mib(coordinator.pid) < MAX_RSS_MIB
    assert statuses == [0, 0, 0]
    assert num_published(coordinator) >= ROUNDS
    await coordinator.stop()
    assert not [line for line in coordinator.events() if line["level"] in ("error", "critical")]
    for word in ("Traceback", "INTERNAL", "UNKNOWN"):
        assert word not in coordinator.log()
