"""The HTTP face on its port: uvicorn in a thread with an event loop of its own.

Parsing a large body, or a slow reader, does not hold up the event loop of the gRPC server, which
answers the heartbeats of the participants.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING

from xain_coordinator.config.sections.http import HttpSettings
from xain_coordinator.server.guard import Guard
from xain_foundation.logs.logger import get_logger
from xain_foundation.wheels import pip_install

if TYPE_CHECKING:
    from xain_coordinator.assembly.sessions import Sessions

log = get_logger(__name__)

STOP_S = 3  # for answers that are under way


def open_listener(settings: HttpSettings) -> socket.socket:
    """Take the port; who connects before `serving` waits. Raises OSError with one line for the
    operator."""
    try:
        import fastapi  # noqa: F401  # to say so now, and not when the coordinator has begun
        import uvicorn  # noqa: F401  # as above
    except ModuleNotFoundError as missing:
        raise OSError(
            f"http.port needs {missing.name}: {pip_install('xain-coordinator', 'http')}"
        ) from None
    assert settings.port is not None, "it is on"
    host = settings.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # "::" takes connections by IPv4, too.
    dualstack = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, settings.port), family=family, dualstack_ipv6=dualstack)
    except OSError as error:
        raise OSError(f"cannot listen on {settings.url(settings.port)}: {error}") from None


@contextlib.asynccontextmanager
async def serving(
    sessions: "Sessions",
    listener: socket.socket,
    *,
    guard: Guard | None = None,
    max_connections: int | None = None,
    head_s: float | None = None,
) -> AsyncIterator[None]:
    """Serve HTTP in a thread of its own while this context is open.

    sessions: of the event loop that runs, which fail when the server ends early.
    guard: by default that of an open coordinator. max_connections, head_s: bounds of connections
    and of the time for a head.
    """
    import uvicorn

    from xain_coordinator.http_face.app import make_app
    from xain_coordinator.http_face.callers import HttpCallers
    from xain_coordinator.http_face.connections import (
        HEAD_S,
        MAX_CONNECTIONS,
        MAX_HEAD_BYTES,
        Connection,
        Connections,
        Handshake,
    )
    from xain_coordinator.http_face.fits import Fits

    loop = asyncio.get_running_loop()
    fits = Fits(sessions, loop)
    settings = sessions.config.http
    guard = Guard() if guard is None else guard
    callers: HttpCallers | None = None
    if guard.is_closed:
        callers = HttpCallers(
            guard.require_access().bearer,
            lambda peer, reason: loop.call_soon_threadsafe(guard.note_refused, peer, reason),
        )
        guard.on_ended.append(callers.end)

    connections = Connections(max_connections or MAX_CONNECTIONS, head_s or HEAD_S)
    protocol: Callable[..., asyncio.BaseProtocol] = partial(Connection, connections)
    if guard.certificates is not None:
        protocol = partial(Handshake, connections, guard.certificates)
    config = uvicorn.Config(
        make_app(fits, settings, callers=callers, any_host=sessions.config.server.insecure),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http=protocol,  # type: ignore[arg-type]  # it makes protocols
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        server_header=False,
        proxy_headers=False,  # the address in the audit log is that of the connection
        timeout_graceful_shutdown=STOP_S,
    )
    server = uvicorn.Server(config)

    def serve() -> None:
        """Run the server; if it fails, the sessions fail."""
        try:
            asyncio.run(server.serve(sockets=[listener]))
        except BaseException as error:  # SystemExit, too, which a thread ignores
            log.error("http_failed", round=sessions.session.round, exc_info=error)
            loop.call_soon_threadsafe(sessions.fail, error)

    # Not as a daemon: predictions that are under way would be cut off in the middle of numpy.
    thread = threading.Thread(target=serve, name="http")
    thread.start()
    url = settings.url(listener.getsockname()[1], is_encrypted=guard.is_closed)
    log.info("serving_http", url=url, round=sessions.session.round)
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.to_thread(thread.join)
        if callers is not None:
            guard.on_ended.remove(callers.end)
        fits.close()
