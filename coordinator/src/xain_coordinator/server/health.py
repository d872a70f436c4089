"""The health service (grpc.health.v1): which services are serving.

grpc_health's own holds a lock while it writes to a watcher, so one that does not read keeps the
status of a service from changing, and the coordinator from stopping.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer

Context = grpc.aio.ServicerContext[Any, Any]


class Health(HealthServicer):
    """Health of each service, "" for the whole server. Used from one event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {}
        self._changed = asyncio.Event()

    def set(self, service: str, status: Any) -> None:
        """Set the status of a service and send it to all watchers."""
        self._statuses[service] = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return pb.HealthCheckResponse(status=status)

    async def Watch(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> AsyncIterator[pb.HealthCheckResponse]:
        last = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, pb.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != last:
                last = status
                yield pb.HealthCheckResponse(status=status)
            else:
                await changed.wait()
