"""Requests that the HTTP face refuses before it looks at their paths."""

import asyncio
import socket
from asyncio import timeout
from types import SimpleNamespace

import httpx
import pytest

from xain_coordinator.config.sections.http import HttpSettings
from xain_coordinator.http_face.app import _Guarded, make_app
from xain_coordinator.http_face.errors import HttpError
from xain_coordinator.http_face.server import open_listener


async def post(
    settings: HttpSettings, *, any_host: bool = False, **headers: str
) -> tuple[int, str]:
    """Status and code of a request that knows no session: 404 tells that it was let in."""
    app = make_app(None, settings, any_host=any_host)  # type: ignore[arg-type]  # no path that asks it
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:80") as client:
        answer = await client.post("/v1/nothing", headers=headers)
    return answer.status_code, answer.json()["error"]["code"]


FOREIGN, LET_IN = (403, "FOREIGN_SITE"), (404, "NO_SUCH_PATH")


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"host": "attacker.example:8080"}, FOREIGN),
        ({"host": "127.0.0.1.attacker.example"}, FOREIGN),
        ({"host": "10.0.0.7:8080"}, FOREIGN),
        ({"host": "["}, FOREIGN),
        ({"host": "localhost:8080", "origin": "http://attacker.example"}, FOREIGN),
        ({"host": "localhost:8080", "origin": "http://localhost:9000"}, FOREIGN),
        ({"host": "localhost:8080", "origin": "null"}, FOREIGN),
        ({"host": "localhost:8080"}, LET_IN),
        ({"host": "127.0.0.1:8080", "origin": "http://127.0.0.1:8080"}, LET_IN),
        ({"host": "[::1]:8080", "origin": "http://[::1]:8080"}, LET_IN),
    ],
)
async def test_requests_of_foreign_sites_are_refused(headers, told):
    assert await post(HttpSettings(port=8080), **headers) == told


async def test_insecure_face_takes_every_host_and_refuses_foreign_pages():
    settings = HttpSettings(port=8080, host="0.0.0.0")
    told = await post(settings, any_host=True, host="ward-7:8080")
    assert told == (404, "NO_SUCH_PATH")
    foreign = {"host": "ward-7:8080", "origin": "http://attacker.example"}
    assert await post(settings, any_host=True, **foreign) == (403, "FOREIGN_SITE")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="IPv4 and IPv6 are apart here")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_face_on_all_addresses_is_reached_by_either_protocol(address):
    settings = HttpSettings(port=0, host="::")
    with open_listener(settings) as listener:
        socket.create_connection((address, listener.getsockname()[1])).close()


async def test_body_that_grows_too_large_is_refused_before_its_request_is_answered():
    sent = []

    async def app(scope, receive, send):
        raise AssertionError("it was not to be asked")

    async def receive():
        return {"type": "http.request", "body": bytes(1 << 17), "more_body": True}

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost:8080")]
    scope = {"type": "http", "headers": headers, "path": "/v1/events", "query_string": b""}
    await _Guarded(app, HttpSettings(port=8080))(scope, receive, send)
    starts = [one["status"] for one in sent if one["type"] == "http.response.start"]
    assert starts == [413]


class Fitting:
    """A fit that does not end, and nothing to predict with."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.sessions = SimpleNamespace(
            config=SimpleNamespace(workload=SimpleNamespace(name="bagging"))
        )

    async def fit(self, request: object) -> None:
        self.began.set()

    async def ended(self, fitting: object) -> None:
        await asyncio.Event().wait()

    async def predictor(self, which: str) -> None:
        raise HttpError("NO_MODEL", "there is none yet")


@pytest.mark.parametrize("path", ["/v1/fit", "/v1/chimera/aggregation/fit"])
async def test_request_that_waits_for_a_fit_holds_up_no_body(path):
    """Even one of the largest size is answered while the fit goes on."""
    fits, settings = Fitting(), HttpSettings(port=8080, max_body_bytes=1024)
    # The stand-in has what these paths ask for.
    transport = httpx.ASGITransport(make_app(fits, settings))  # type: ignore[arg-type]
    url = "http://127.0.0.1:8080"
    async with httpx.AsyncClient(transport=transport, base_url=url) as client, timeout(60):
        waiting = asyncio.create_task(client.post(path, json={"wait": True}))
        await fits.began.wait()
        body = b'{"columns": ["a"], "rows": [[1]]}'.ljust(1024)
        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/predict", content=body, headers=headers)
        assert answer.json()["error"]["code"] == "NO_MODEL"
        waiting.cancel()
