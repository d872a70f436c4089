"""The Membership service on a port of its own, for programs without a coordinator."""

from types import TracebackType
from typing import Self

import grpc

from xain_messaging import background
from xain_messaging.discovery.registry import LEASE_S, SETTLE_S
from xain_messaging.discovery.service import KEEPALIVE, MembershipService
from xain_proto.messaging.membership_pb2_grpc import add_MembershipServicer_to_server

STOP_S = 1.0
STOPPED_S = 5.0  # that stop() waits, whatever the event loop does meanwhile


class MembershipServer:
    """Serves from start() to stop(). Started again it knows no members, and is told by all.

    listen: "HOST:PORT", port 0 for one that is free; see target.
    lease_s, settle_s: see MembershipService. Where no members can have been before, newcomers need
        not wait: 0.
    credentials: of the port; without them it goes in the clear.
    Raises OSError from start() if nothing can listen there.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        lease_s: float = LEASE_S,
        settle_s: float = SETTLE_S,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self._host, _, port = listen.rpartition(":")
        self._port = int(port)
        self._lease_s = lease_s
        self.settle_s = settle_s
        self._credentials = credentials
        self._server: grpc.aio.Server | None = None
        self._service: MembershipService | None = None

    @property
    def target(self) -> str:
        """The address for CoordinatorDiscovery."""
        return f"{self._host}:{self._port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when it serves."""
        try:
            background.run(self._serve())
        except BaseException as error:  # an interrupt too: no server stays behind
            self.stop()
            if isinstance(error, RuntimeError):  # of gRPC: the port is taken, or not ours
                raise OSError(f"cannot listen on {self.target}: {error}") from None
            raise

    async def _serve(self) -> None:
        server = self._server = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), *KEEPALIVE.items()]
        )
        self._service = MembershipService(self._lease_s, self.settle_s)
        add_MembershipServicer_to_server(self._service, server)
        if self._credentials is None:
            self._port = server.add_insecure_port(self.target)
        else:
            self._port = server.add_secure_port(self.target, self._credentials)
        await server.start()

    def stop(self) -> None:
        """Returns when no member is served any more, after STOP_S at most. May be called again."""
        background.finish(self._stop(), STOPPED_S)

    async def _stop(self) -> None:
        server, self._server = self._server, None
        # First the calls that wait: gRPC reports an error to those it ends, and they print it.
        if self._service is not None:
            self._service.end()
        if server is not None:
            await server.stop(STOP_S)
