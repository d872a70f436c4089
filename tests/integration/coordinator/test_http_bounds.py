"""Bounds of the HTTP face, over real connections: half requests, slow ones, and too many of them.

The coordinator is a real one without participants, and its answers tell who is served.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from integration.conftest import config_for
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.assembly.sessions import Sessions
from xain_coordinator.http_face import admission, app
from xain_coordinator.http_face.connections import MAX_HEAD_BYTES
from xain_coordinator.http_face.server import open_listener, serving

PATIENCE_S = 60.0
MODEL_BYTES = 32 << 20  # more than the buffers of a connection hold
HEAD = b"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@asynccontextmanager
async def face(folder: Path, from_model: str = "", **bounds: Any) -> AsyncIterator[int]:
    """The port of an HTTP face with these bounds, of a coordinator with this model, if any."""
    workload = {} if from_model else {"name": "sgd"}
    config = config_for(folder, http={"port": 0}, workload=workload)
    coordinator = SessionCoordinator(config, resume=True, from_model=from_model)
    await coordinator.start()

    async def no_next(_: object) -> SessionCoordinator | None:
        return None

    sessions = Sessions(config, coordinator, no_next)
    try:
        with open_listener(config.http) as listener:
            async with serving(sessions, listener, **bounds):
                yield listener.getsockname()[1]
    finally:
        await sessions.close()
        await coordinator.stop()


class Peer:
    """A client that says what a test tells it to, and no more."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def saying(cls, port: int, said: bytes) -> "Peer":
        peer = cls(*await asyncio.open_connection("127.0.0.1", port))
        with suppress(ConnectionError):
            peer._writer.write(said)
            await peer._writer.drain()
        return peer

    async def says(self, more: bytes) -> None:
        self._writer.write(more)
        await self._writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """The HTTP status of one answer, and its body; the connection may go on."""
        async with asyncio.timeout(PATIENCE_S):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].split()[0]
            return int(head.split()[1]), await self._reader.readexactly(int(length))

    async def ends(self) -> bytes:
        """All that is answered until the end of the connection."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self._reader.read()
            except ConnectionError:
                return b""

    async def status(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return int((await self._reader.readline()).split()[1])

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


async def served(port: int) -> int:
    """The status of an honest client's question, on a connection of its own."""
    url = f"http://127.0.0.1:{port}/v1/status"
    async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
        return (await client.get(url)).status_code


MOST = 8
HALF: Mapping[str, bytes] = {
    "nothing": b"",
    "half a head": HEAD,
    "half a body": HEAD + b"content-length: 100\r\n\r\n{",
    "half a chunk": HEAD + b"transfer-encoding: chunked\r\n\r\n10\r\n{",
    "half a second request": b"GET /v1/status HTTP/1.1\r\nhost: localhost\r\n\r\n" + HEAD,
}


@pytest.mark.parametrize("said", HALF.values(), ids=HALF)
async def test_half_requests_keep_no_client_out(said, tmp_path):
    """The one that came first ends for each one too many."""
    async with face(tmp_path, max_connections=MOST) as port, AsyncExitStack() as at_end:
        peers = []
        for _ in range(3 * MOST):
            peers.append(await Peer.saying(port, said))
            at_end.push_async_callback(peers[-1].close)
            assert await served(port) == 200
        for peer in peers[: 2 * MOST]:
            await peer.ends()


@pytest.mark.parametrize("said", [HALF["nothing"], HALF["half a head"]])
async def test_head_that_does_not_come_ends_its_connection(said, tmp_path):
    async with face(tmp_path, head_s=0.2) as port:
        peer = await Peer.saying(port, said)
        assert await peer.ends() == b""
        await peer.close()


HEAD_S = 0.2
ASK = b"GET /v1/status HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def test_connection_outlasts_the_time_for_a_head_between_two_requests(tmp_path):
    async with face(tmp_path, head_s=HEAD_S) as port:
        peer = await Peer.saying(port, ASK)
        for _ in range(2):
            assert (await peer.answer())[0] == 200
            await asyncio.sleep(3 * HEAD_S)  # a client that has nothing to ask for a while
            await peer.says(ASK)
        assert (await peer.answer())[0] == 200
        await peer.close()


async def test_body_that_is_refused_before_it_has_come_may_come_slowly(tmp_path):
    """The connection is not reset below a client that still sends, and serves its next request."""
    pieces = 5
    size = config_for(tmp_path, http={"port": 0}).http.max_body_bytes + pieces
    async with face(tmp_path, head_s=HEAD_S) as port:
        peer = await Peer.saying(port, HEAD + b"content-length: %d\r\n\r\n" % size)
        for _ in range(pieces):
            await peer.says(b" " * (size // pieces))
            await asyncio.sleep(HEAD_S)  # a slow client
        await peer.says(b" " * (size % pieces) + ASK)
        status, body = await peer.answer()
        assert (status, b"TOO_LARGE" in body) == (413, True)
        assert (await peer.answer())[0] == 200
        await peer.close()


async def test_head_over_the_bound_is_refused(tmp_path):
    async with face(tmp_path) as port:
        peer = await Peer.saying(port, HEAD + b"x: " + b"a" * (2 * MAX_HEAD_BYTES))
        assert await peer.status() == 400
        await peer.close()


async def test_connection_beyond_those_that_are_answered_is_refused(tmp_path):
    """Readers of events have their answers; none of them ends for a newer client."""
    events = b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with face(tmp_path, max_connections=3) as port, AsyncExitStack() as at_end:
        readers = [await Peer.saying(port, events) for _ in range(3)]
        for reader in readers:
            at_end.push_async_callback(reader.close)
            assert await reader.status() == 200
        assert await served(port) == 503
        await readers[0].close()
        while await served(port) != 200:  # noqa: ASYNC110  # until the server has seen the end
            await asyncio.sleep(0.01)  # a poll, not a race: it ends when it is served


async def test_readers_of_events_leave_connections_to_others(tmp_path):
    events = b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with face(tmp_path) as port, AsyncExitStack() as at_end:
        statuses = Counter()
        for _ in range(app.MAX_OPEN["/events"] + 2):
            reader = await Peer.saying(port, events)
            at_end.push_async_callback(reader.close)
            statuses[await reader.status()] += 1
        assert statuses == {200: app.MAX_OPEN["/events"], 503: 2}
        assert await served(port) == 200


async def test_downloads_that_are_not_read_leave_connections_to_others(tmp_path):
    path = tmp_path / "model.npz"
    np.savez(path, w=np.zeros(MODEL_BYTES // 4, np.float32))
    download = b"GET /v1/models/0/download HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with face(tmp_path / "face", str(path)) as port, AsyncExitStack() as at_end:
        readers = []
        for _ in range(app.MAX_OPEN["/download"] + 2):
            readers.append(await Peer.saying(port, download))
            at_end.push_async_callback(readers[-1].close)
        statuses = Counter([await reader.status() for reader in readers])
        assert statuses == {200: app.MAX_OPEN["/download"], 503: 2}
        assert await served(port) == 200


async def test_body_with_too_many_rows_or_of_another_path_is_refused(tmp_path):
    rows = {"columns": ["a"], "rows": [[]] * (admission.MAX_LISTS + 1)}
    async with face(tmp_path) as port, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        url = f"http://127.0.0.1:{port}/v1"
        answer = await client.post(f"{url}/predict", json=rows)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "TOO_LARGE")
        settings = {"workload": {"options": {"x": "x" * app.MAX_SETTINGS_BYTES}}}
        answer = await client.post(f"{url}/fit", json=settings)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "TOO_LARGE")
