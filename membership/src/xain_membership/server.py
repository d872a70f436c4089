"""The Membership service on a port of its own, for programs without a coordinator."""

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, Self, TypeVar

import grpc

from xain_foundation.net.connection_limit import ConnectionLimit, max_connections
from xain_foundation.security.tls import Certificates
from xain_foundation.settings.fields import require_private
from xain_membership import background
from xain_membership.permissions import OF_MEMBERSHIP, Permissions, Roles, names_of
from xain_membership.registry import LEASE_S, SETTLE_S
from xain_membership.service import KEEPALIVE, MAX_MEMBERS, MembershipService

STOP_S = 1.0
HANDSHAKE_MS = 20_000
# One for its membership, one for other calls, and as many that have died unnoticed.
CONNECTIONS_PER_MEMBER = 4
STOPPED_S = 5.0  # that stop() waits, whatever the event loop does meanwhile


class Service(Protocol):
    """A gRPC service in an event loop.

    membership: knows the members, and tells whose calls are accepted.
    """

    @property
    def membership(self) -> MembershipService: ...

    def add_to(self, server: grpc.aio.Server) -> None: ...

    def end(self) -> None:
        """End the calls that wait: gRPC reports an error to those it ends, and they print it."""
        ...


S = TypeVar("S", bound=Service)


class ServiceServer(Generic[S]):
    """A service on a port of its own, from start() to stop().

    make: makes the service, in the event loop, at each start.
    listen: "HOST:PORT", port 0 for one that is free; see target.
    tls: None: all goes in the clear. insecure: also on a host that other machines reach.
    roles: of callers, by method; what is not in it is refused. Counts with `tls`.
    Raises ValueError for such a host with neither tls nor insecure. start() raises OSError if
    nothing can listen there, and what `make` raises.
    """

    def __init__(
        self,
        make: Callable[[], S],
        listen: str = "127.0.0.1:0",
        tls: Certificates | None = None,
        *,
        insecure: bool = False,
        roles: Roles = OF_MEMBERSHIP,
    ) -> None:
        self._make = make
        self._host, _, port = listen.rpartition(":")
        require_private(self._host, is_encrypted=tls is not None, insecure=insecure)
        self._port = int(port)
        self._tls = tls
        self._roles = roles
        self._server: grpc.aio.Server | None = None
        self._service: S | None = None
        self._limit: ConnectionLimit | None = None

    @property
    def target(self) -> str:
        """The address for clients."""
        return f"{self._host}:{self._port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, and return when it serves. Raises OSError if it cannot listen."""
        try:
            background.run(self._serve())
        except BaseException as error:  # an interrupt too: no server stays behind
            self.stop()
            if isinstance(error, RuntimeError):  # of gRPC: the port is taken, or not ours
                raise OSError(f"cannot listen on {self.target}: {error}") from None
            raise

    async def _serve(self) -> None:
        """Start the service and listen."""
        # Before the port, which gRPC frees for a server only that was started.
        self._service = self._make()
        tls = self._tls
        server = self._server = grpc.aio.server(
            interceptors=[] if tls is None else [Permissions(tls, self._roles)],
            options=[
                ("grpc.so_reuseport", 0),
                (
                    "grpc.max_allowed_incoming_connections",
                    max_connections(CONNECTIONS_PER_MEMBER * MAX_MEMBERS),
                ),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                *KEEPALIVE.items(),
            ],
        )
        self._service.add_to(server)
        if tls is None:
            self._port = server.add_insecure_port(self.target)
        else:
            self._port = server.add_secure_port(self.target, tls.of_server())
        await server.start()
        limit = self._limit = ConnectionLimit(
            self._port,
            max_owners=MAX_MEMBERS,
            per_owner=CONNECTIONS_PER_MEMBER,
            num_newcomers=MAX_MEMBERS,
        )
        self._service.membership.on_accepted = limit.keep

    def stop(self) -> None:
        """Returns when no client is served any more, after STOP_S at most. May be called again."""
        with suppress(TimeoutError):
            background.run(self._stop(), STOPPED_S)

    async def _stop(self) -> None:
        server, self._server = self._server, None
        if self._limit is not None:
            self._limit.stop()
        if self._service is not None:
            self._service.end()
        if server is not None:
            await server.stop(STOP_S)


class MembershipServer(ServiceServer[MembershipService]):
    """A MembershipService on a port of its own. Started again it knows no members, and is told by
    all.

    lease_s, settle_s: see MembershipService. Where no members can have been before, newcomers need
        not wait: 0.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        lease_s: float = LEASE_S,
        settle_s: float = SETTLE_S,
        tls: Certificates | None = None,
        *,
        insecure: bool = False,
    ) -> None:
        super().__init__(self._made, listen, tls, insecure=insecure)
        self._lease_s = lease_s
        self.settle_s = settle_s

    def _made(self) -> MembershipService:
        return MembershipService(self._lease_s, self.settle_s, name_of=names_of(self._tls))
