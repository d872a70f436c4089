"""A tunnel for clients without TLS: it listens on this machine, and carries each connection to the
coordinator under this site's certificate.

XAIN's SDK and `grpcurl -plaintext` connect to it as they would to a coordinator; who calls is the
site.
"""

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog
from xain_foundation.net.channels import connect, find_cause
from xain_foundation.security.tls import Certificates
from xain_participant.tables.advice import advised

MAX_CONNECTIONS: Final = 100
CONNECT_S: Final = 10.0
# Bytes that are read ahead of the slower side; each connection has two of these at most.
_BUFFERED: Final = 256 << 10

log = get_logger(__name__)


class Tunnel:
    """Connections of clients, each with one of its own to the coordinator.

    address: HOST:PORT of the coordinator. host, port: where clients connect; 0 for a free port.
    on_ready: told the port.
    """

    max_connections = MAX_CONNECTIONS

    def __init__(
        self,
        tls: Certificates,
        address: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        on_ready: Callable[[int], None] = lambda port: None,
    ) -> None:
        self._tls = tls
        self._address = address
        self._hostname = address.rpartition(":")[0].strip("[]")
        self._host, self._port = host, port
        self._on_ready = on_ready
        self._open: set[asyncio.Task[None]] = set()
        self._full = RateLimitedLog(log.warning, "tunnel_full")
        self._away = RateLimitedLog(log.warning, "tunnel_broken")

    async def run(self) -> None:
        """Carry connections until the task is cancelled. Raises OSError if the port is taken."""
        server = await asyncio.start_server(self._accept, self._host, self._port, limit=_BUFFERED)
        try:
            self._on_ready(server.sockets[0].getsockname()[1])
            await asyncio.Event().wait()
        finally:
            server.close()
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)
            await asyncio.sleep(0)  # what follows their ends

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a new connection in a task of its own; one above max_connections is closed."""
        if len(self._open) >= self.max_connections:
            self._full(num_connections=len(self._open))
            writer.close()
            return
        # Not the server's own task, whose cancellation asyncio logs as an error.
        task = asyncio.create_task(self._carry(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        task.add_done_callback(lambda _: writer.close())

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect to the coordinator, and copy both ways until one side ends."""
        try:
            async with asyncio.timeout(CONNECT_S):
                raw = await asyncio.to_thread(connect, self._address, CONNECT_S / 2)
                raw.setblocking(False)
                their_reader, their_writer = await asyncio.open_connection(
                    sock=raw,
                    ssl=self._tls.connects_http2,
                    server_hostname=self._hostname,
                    limit=_BUFFERED,
                )
        except (OSError, UnicodeError):
            cause = await asyncio.to_thread(find_cause, self._address, tls=self._tls)
            self._away(coordinator=self._address, cause=advised(cause))
            return
        try:
            both = [
                asyncio.create_task(_copy(reader, their_writer)),
                asyncio.create_task(_copy(their_reader, writer)),
            ]
            try:
                # When one side has ended its stream, HTTP/2 has nothing to say to the other.
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in both:
                    one.cancel()
                await asyncio.gather(*both, return_exceptions=True)
        finally:
            their_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy a stream until its end, or that of the connection."""
    with suppress(OSError):  # the connection is over
        while piece := await reader.read(_BUFFERED):
            writer.write(piece)
            await writer.drain()


def run_until_stopped(tunnel: Tunnel) -> None:
    """Run a tunnel until SIGINT or SIGTERM. Raises OSError if the port is taken."""

    async def run() -> None:
        running = asyncio.create_task(tunnel.run())
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, running.cancel)
        with suppress(asyncio.CancelledError):
            await running

    asyncio.run(run())
