"""The HTTP face of a closed coordinator: TLS, and bearer tokens by role."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.conftest import config_for
from xain_coordinator.access.control import AccessControl, initialise
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.assembly.sessions import Sessions
from xain_coordinator.http_face.server import open_listener, serving
from xain_coordinator.server.guard import Guard
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import AUTHORITY, CERTIFICATE
from xain_foundation.security.tls_settings import TlsSettings

PATIENCE_S = 60.0


class Face:
    """A closed coordinator's HTTP face."""

    def __init__(self, port: int, guard: Guard, folder: Path) -> None:
        self.port, self.guard, self.folder = port, guard, folder
        self.access: AccessControl = guard.require_access()
        self.context = ssl.create_default_context(cafile=folder / "tls" / AUTHORITY)

    def token(self, name: str, role: Role, ttl_s: float = 3600.0) -> tuple[str, str]:
        text, serial, _ = self.access.create_bearer(name, role, ttl_s, by="test")
        return text, serial

    def client(self, token: str = "") -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"https://localhost:{self.port}",
            verify=self.context,
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=PATIENCE_S,
            trust_env=False,
        )

    async def ask(self, method: str, path: str, token: str = "", **of: Any) -> tuple[int, str]:
        async with self.client(token) as client:
            answer = await client.request(method, path, **of)
        code = ""
        with suppress(ValueError, KeyError, TypeError):
            code = answer.json()["error"]["code"]
        return answer.status_code, code


@asynccontextmanager
async def face_of(folder: Path, **bounds: Any) -> AsyncIterator[Face]:
    access = folder / "access"
    initialise(access, ["localhost"])
    guard = Guard.open(TlsSettings(), access / "tls", access)
    config = config_for(folder, http={"port": 0}, workload={"name": "sgd"})
    coordinator = SessionCoordinator(config, resume=True, guard=guard)
    await coordinator.start()

    async def no_next(_: object) -> SessionCoordinator | None:
        return None

    sessions = Sessions(config, coordinator, no_next)
    watching = asyncio.create_task(guard.watch())
    try:
        with open_listener(config.http) as listener:
            async with serving(sessions, listener, guard=guard, **bounds):
                yield Face(listener.getsockname()[1], guard, access)
    finally:
        watching.cancel()
        await sessions.close()
        await coordinator.stop()
        guard.close()


@pytest.fixture
async def face(tmp_path: Path) -> AsyncIterator[Face]:
    async with face_of(tmp_path) as face:
        yield face


READ = ("GET", "/v1/status")
CHANGE = ("POST", "/v1/fit/cancel")
PREDICT = ("POST", "/v1/predict")


async def test_roles_by_request(face):
    """An observer reads and predicts, an operator changes something, others do neither."""
    observer, operator = face.token("o", Role.OBSERVER)[0], face.token("p", Role.OPERATOR)[0]
    rows = {"json": {"columns": ["a"], "rows": [[1]]}}
    for token in (observer, operator):
        assert await face.ask(*READ, token) == (200, "")
        assert await face.ask(*PREDICT, token, **rows) == (409, "NOT_FITTED")
    assert await face.ask(*CHANGE, operator) == (409, "NOT_FITTING")
    assert await face.ask(*CHANGE, observer) == (403, "NOT_PERMITTED")
    assert await face.ask("PUT", "/v1/unknown", observer) == (403, "NOT_PERMITTED")
    chimera = await face.ask("POST", "/v1/chimera/parameter-server/fit", observer)
    assert chimera[0] == 403


@pytest.mark.parametrize("said", ["", "Bearer", "Bearer x", "Basic eDp5", "Bearer \xe4"])
async def test_request_without_a_token_of_this_coordinator_is_refused(face, said):
    async with face.client() as client:
        headers = [(b"authorization", said.encode("latin-1"))] if said else []
        answer = await client.get("/v1/status", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "UNAUTHENTICATED")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/v1/docs")).status_code == 200, "says the same everywhere"


async def test_revoked_and_expired_tokens_are_refused(face):
    token, serial = face.token("o", Role.OBSERVER)
    await asyncio.to_thread(face.access.revoke, serial, by="test")
    assert await face.ask(*READ, token) == (401, "UNAUTHENTICATED")


async def test_revocation_ends_answers_under_way(face):
    token, serial = face.token("o", Role.OBSERVER)
    kept, _ = face.token("p", Role.OBSERVER)
    async with (
        face.client(token) as client,
        face.client(kept) as other,
        client.stream("GET", "/v1/events") as events,
        other.stream("GET", "/v1/events") as others,
    ):
        ends, goes_on = events.aiter_raw(), others.aiter_raw()
        assert await anext(ends)
        assert await anext(goes_on)
        await asyncio.to_thread(face.access.revoke, serial, by="test")
        async with asyncio.timeout(PATIENCE_S):
            with suppress(httpx.HTTPError):
                async for _ in ends:
                    pass
        async with asyncio.timeout(PATIENCE_S):
            assert await anext(goes_on), "a line every 15 s"


async def test_changed_certificate_counts_for_the_next_connection(face):
    def shown() -> str:
        return ssl.get_server_certificate(("localhost", face.port))

    before = await asyncio.to_thread(shown)
    await asyncio.to_thread(face.access.renew_own, [], face.folder / "tls")
    await asyncio.to_thread(face.guard.certificates.refresh)
    after = await asyncio.to_thread(shown)
    assert before != after
    assert after == (face.folder / "tls" / CERTIFICATE).read_text()
    token, _ = face.token("o", Role.OBSERVER)
    assert await face.ask(*READ, token) == (200, "")


async def test_plaintext_and_old_tls_get_no_answer(face):
    reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
    writer.write(b"GET /v1/status HTTP/1.1\r\nhost: localhost\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionError):
            assert b"HTTP" not in await reader.read()
    writer.close()
    old = ssl.create_default_context(cafile=face.folder / "tls" / AUTHORITY)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError):  # noqa: PT011  # an alert, or a reset that was faster
        await asyncio.open_connection("localhost", face.port, ssl=old)


async def test_silent_handshakes_have_a_bound(tmp_path):
    """The oldest one ends for a new one, and honest clients are served."""
    async with face_of(tmp_path, max_connections=4, head_s=PATIENCE_S) as face:
        silent = [socket.create_connection(("127.0.0.1", face.port)) for _ in range(12)]
        token, _ = face.token("o", Role.OBSERVER)
        assert await face.ask(*READ, token) == (200, "")
        for each in silent[:8]:
            each.settimeout(PATIENCE_S)
            with suppress(ConnectionError):
                assert await asyncio.to_thread(each.recv, 1) == b""
        for each in silent:
            each.close()
