"""URLs of the weights port in the hands of others: each is refused with its status, and neither
session nor journal changes."""

import asyncio
import http.client
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from support.closed_coordinator import MODEL, ClosedCoordinator
from support.process import PATIENCE_S
from support.wire import digest, npy
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import Certificates
from xain_wire.weights_port import DIGEST_HEADER

UPDATE = npy(MODEL + 7)


@dataclass(frozen=True, slots=True)
class Urls:
    """GET of the model and PUT of the update, as they were offered to ward-1."""

    get: str
    put: str


async def offered(at: ClosedCoordinator) -> Urls:
    await at.close_round()  # before that there is no model
    work = await at.sites[0].start()
    for url in (work.model.url, work.upload.url):
        at.secrets.add_text(urlsplit(url).path.rpartition(".")[2], "the signature of a URL")
    at.remember()
    return Urls(work.model.url, work.upload.url)


def ask(holder: Certificates | None, method: str, url: str, at: ClosedCoordinator) -> str:
    """The status of a request, or that there was no answer. holder: None for no certificate."""
    parsed = urlsplit(url)
    context = ssl.create_default_context(cadata=at.authority.certificate.decode())
    if holder is not None:
        context = holder.connects
    connection = http.client.HTTPSConnection(
        "127.0.0.1", parsed.port, context=context, timeout=PATIENCE_S
    )
    try:
        connection.putrequest(method, parsed.path)
        if method == "PUT":  # a refusal waits for no body, and would cut it off
            connection.putheader("Content-Length", str(len(UPDATE)))
            connection.putheader(DIGEST_HEADER, digest(UPDATE).hex())
        connection.endheaders()
        return str(connection.getresponse().status)
    except OSError:
        return "no connection"
    finally:
        connection.close()


def of(role: Role, name: str) -> Callable[[ClosedCoordinator], Certificates]:
    return lambda at: at.holder(*at.certificate(role, name))


def revoked(at: ClosedCoordinator) -> Certificates:
    certificate, key = at.signed(Role.PARTICIPANT, "ward-1")
    holder = at.holder(certificate, key)
    at.access.revoke(holder.own.serial, by="the test")
    return holder


def stale(at: ClosedCoordinator) -> Certificates:
    """A certificate that has expired since this program has loaded it."""
    holder = at.holder(*at.certificate(Role.PARTICIPANT, "ward-1"))
    at.pass_hours(2)
    return holder


HOLDERS: dict[str, tuple[Callable[[ClosedCoordinator], Certificates | None], str]] = {
    "no certificate": (lambda at: None, "no connection"),
    "another participant": (of(Role.PARTICIPANT, "mallory"), "403"),
    "an observer": (of(Role.OBSERVER, "ward-1"), "403"),
    "a token": (of(Role.JOINING, "ward-1"), "403"),
    "a node": (of(Role.NODE, "ward-1"), "403"),
    "revoked": (revoked, "403"),
    "expired": (stale, "403"),
}


@pytest.mark.parametrize("who", HOLDERS)
async def test_url_of_another_is_refused(closed, who):
    make, expected = HOLDERS[who]
    urls = await offered(closed)
    holder = make(closed)
    closed.remember()
    for method, url in (("GET", urls.get), ("PUT", urls.put)):
        assert await asyncio.to_thread(ask, holder, method, url, closed) == expected, method
    closed.require_unchanged()
    await closed.close_round(1)
