"""A coordinator process whose HTTP face gets the largest bodies that it takes, many at a time."""

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import httpx
import pytest

from support.process import PATIENCE_S, CoordinatorProcess, Keep
from support.wire import Member
from xain_coordinator.http_face.connections import MAX_CONNECTIONS
from xain_foundation.net.sockets import free_ports
from xain_wire.fl import coordinator_pb2 as pb

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

MAX_RESIDENT_MIB = 200
MAX_BODY_BYTES = 4 << 20  # [http] max_body_bytes
AT_A_TIME = 16
JSON = {"content-type": "application/json"}


def body_of(row: bytes) -> bytes:
    """The largest body with this row, as often as there is room."""
    head, end = b'{"columns": ["a"], "rows": [', b"]}"
    times = (MAX_BODY_BYTES - len(head) - len(end)) // (len(row) + 1)
    return head + b",".join([row] * times) + end


BODIES: Mapping[str, bytes] = {
    "numbers": body_of(b"[" + b"1.5," * 11 + b"1.5]"),
    "texts": body_of(b"[" + b'"ab",' * 40 + b'"ab"]'),
    "mistakes": body_of(b"[" + b"1e999," * 11 + b"1e999]"),
    "empty rows": body_of(b"[]"),
    "objects": body_of(b"{}"),
    "blanks": b" " * (MAX_BODY_BYTES - 2) + b"{}",
}
HEAD = b"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HALF: Mapping[str, bytes] = {
    "half heads": HEAD,
    "half bodies": HEAD + b"content-length: 4000000\r\n\r\n" + b" " * 300_000,
}


@pytest.fixture
async def flooded(keep: Keep, tmp_path: Path) -> tuple[CoordinatorProcess, str]:
    """A coordinator, and the URL of its face."""
    (port,) = free_ports(1)
    settings = {"http.port": port, "workload.name": "sgd", "rounds.min_participants": 2}
    coordinator = keep(CoordinatorProcess(tmp_path, settings))
    await coordinator.start()
    return coordinator, f"http://127.0.0.1:{port}"


async def ask(client: httpx.AsyncClient, url: str) -> None:
    """Ask for the status. While others open connections, one that says nothing yet may be ended
    for a newer one, and its client comes again."""
    for _ in range(20):
        with suppress(httpx.TransportError):
            assert (await client.get(f"{url}/v1/status")).status_code == 200
            return
    raise AssertionError("no try was answered")


async def honest(coordinator: CoordinatorProcess, url: str, ends: asyncio.Event) -> int:
    """Ask the face, and beat at the gRPC port, one after the other. Returns how often."""
    times = 0
    member = Member(coordinator.port, "honest")
    async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
        while True:
            await ask(client, url)
            beat = member.stub.Heartbeat(
                pb.HeartbeatRequest(), metadata=member.metadata, timeout=PATIENCE_S
            )
            with suppress(Exception):  # it is no member; the answer counts
                await beat
            assert (await beat.code()).name == "PERMISSION_DENIED"
            times += 1
            if ends.is_set():
                await member.close()
                return times


async def test_floods_leave_memory_below_200_mib_and_others_served(flooded):
    coordinator, url = flooded
    port = int(url.rpartition(":")[2])
    ends = asyncio.Event()
    served = asyncio.create_task(honest(coordinator, url, ends))
    async with httpx.AsyncClient(timeout=2 * PATIENCE_S, trust_env=False) as client:
        for name, body in BODIES.items():
            posts = [
                client.post(f"{url}/v1/predict", content=body, headers=JSON)
                for _ in range(AT_A_TIME)
            ]
            codes = Counter(answer.status_code for answer in await asyncio.gather(*posts))
            assert codes.keys() <= {409, 413, 422, 503}, (name, codes)
            assert codes.total() > codes[503], f"some of the bodies of {name} are answered"
            assert coordinator.peak_mib() < MAX_RESIDENT_MIB, name
    for name, said in HALF.items():
        async with AsyncExitStack() as at_end:
            for _ in range(MAX_CONNECTIONS + 50):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                at_end.callback(writer.close)
                writer.write(said)
            before = coordinator.peak_mib()
            async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
                await ask(client, url)
            assert before < MAX_RESIDENT_MIB, name
            assert coordinator.peak_mib() < MAX_RESIDENT_MIB, name
    ends.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await served > 0
    assert coordinator.status is None
    assert "Traceback" not in coordinator.log()
    assert len(coordinator.log()) < 100_000
