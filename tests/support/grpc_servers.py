"""Servers of gRPC that answer a test, and stop with it."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc

from xain_coordinator.server.operators_socket import OperatorsSocket


@contextmanager
def serving(
    server: grpc.Server, credentials: grpc.ServerCredentials | None = None, host: str = "127.0.0.1"
) -> Iterator[int]:
    """Yields the port."""
    if credentials is None:
        port = server.add_insecure_port(f"{host}:0")
    else:
        port = server.add_secure_port(f"{host}:0", credentials)
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


@asynccontextmanager
async def serving_operators(server: grpc.aio.Server, folder: Path) -> AsyncIterator[None]:
    """Serve at the operators' socket of a journal in this folder."""
    operators_socket = OperatorsSocket(folder / "journal.sqlite")
    operators_socket.open(server.add_insecure_port)
    await server.start()
    try:
        yield
    finally:
        operators_socket.close()
        await server.stop(0)
