"""The gRPC server: the services on a port."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.vocabulary.commands import NoteRevoked
from xain_coordinator.core.vocabulary.errors import Refusal
from xain_coordinator.core.vocabulary.values import Point
from xain_coordinator.driver.driver import Driver
from xain_coordinator.driver.effects import StoreWorker
from xain_coordinator.ports import DirectAccess, MetricsStore, WeightsStore
from xain_coordinator.server.calls.access_service import AccessService
from xain_coordinator.server.calls.admission_control import (
    CALLS_PER_MEMBER,
    UNREGISTERED_CALLS,
    AdmissionControl,
)
from xain_coordinator.server.calls.control_service import ControlService
from xain_coordinator.server.calls.coordinator_service import CoordinatorService, is_known
from xain_coordinator.server.calls.inspection_service import InspectionService
from xain_coordinator.server.calls.interceptor import RefusalInterceptor
from xain_coordinator.server.guard import Guard
from xain_coordinator.server.identity import CALLER
from xain_coordinator.server.operators_socket import OperatorsSocket
from xain_coordinator.server.predictions import RemotePredictor
from xain_coordinator.server.weights.downloads import Downloads
from xain_coordinator.server.weights.weights_port import WeightsPort
from xain_coordinator.telemetry.log_files import LatencyFile
from xain_coordinator.updates.inbox import Inbox
from xain_coordinator.updates.slots import Slots
from xain_coordinator.updates.sources import Bucket
from xain_coordinator.updates.uploads import Uploads
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.net.connection_limit import ConnectionLimit, max_connections
from xain_foundation.security.identity import Role
from xain_membership.service import (
    KEEPALIVE,
    MAX_MEMBERS,
    MembershipService,
)
from xain_wire.fl import (
    access_pb2,
    access_pb2_grpc,
    coordinator_pb2,
    coordinator_pb2_grpc,
    inspection_pb2,
    inspection_pb2_grpc,
)
from xain_wire.messaging import membership_pb2

COORDINATOR = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name
INSPECTION = inspection_pb2.DESCRIPTOR.services_by_name["Inspection"].full_name
ACCESS = access_pb2.DESCRIPTOR.services_by_name["Access"].full_name
CONTROL = access_pb2.DESCRIPTOR.services_by_name["Control"].full_name
MEMBERSHIP = membership_pb2.DESCRIPTOR.services_by_name["Membership"].full_name
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
SERVICES = (COORDINATOR, INSPECTION, MEMBERSHIP, ACCESS, CONTROL)
# A name for health checks that restart what hangs: it is serving for as long as the process
# answers, also while the others are not serving any more.
LIVENESS = "liveness"
# A name that is serving beside the coordinator if there is a weights port; unknown without one.
WEIGHTS_PORT = "weights-port"

MAX_MESSAGE_BYTES = 4 << 20  # weights travel in pieces of 1 MiB
MIN_PENDING = 1000  # 20 KB each
# A participant has six calls open at most, a peer of Membership seven. A proxy that merges the
# connections of many opens another one, or needs more: [server] grpc_options.
STREAMS_PER_CONNECTION = 250
# No proxy merges the connections of holders of certificates. More than a holder may have open, so
# that the first call too many is refused in words, and does not wait at its sender.
STREAMS_OF_HOLDER = 2 * CALLS_PER_MEMBER
# A participant has two, and its latest two may have died without being noticed yet.
CONNECTIONS_PER_PARTICIPANT = 4
CONNECTIONS_PER_MEMBER = 2
HEALTH_CONNECTIONS = 500  # of the port for health checks alone
IDLE_MS = 300_000  # a participant has a Watch stream or a heartbeat every few seconds
HANDSHAKE_MS = 20_000


class GrpcServer:
    """The gRPC face of one driver.

    config: [server] and [predict] of it; a port of 0 picks a free one, see `port`.
    worker: makes and verifies the models. latencies: told how long each call took.
    guard: says who calls; by default nobody is asked.
    access, bucket, weights_port: other ways of weights, see Inbox and Downloads.
    operators_socket: for operators of this machine. journal_copied: see ControlService.
    parameters, study: see InspectionService.
    """

    def __init__(
        self,
        driver: Driver,
        store: WeightsStore,
        metrics: MetricsStore,
        parse_points: Callable[[str, int, str], tuple[Point, ...]],
        config: CoordinatorConfig,
        worker: StoreWorker,
        counters: Counter[str],
        *,
        latencies: LatencyFile | None,
        access: DirectAccess | None,
        bucket: Bucket | None,
        parameters: Callable[[], str],
        operators_socket: OperatorsSocket,
        journal_copied: Callable[[], AbstractAsyncContextManager[Path]],
        study: Callable[[], str],
        weights_port: WeightsPort | None,
        guard: Guard | None = None,
    ) -> None:
        """Make the services and take the ports; nothing is served before start()."""
        self._guard = guard = guard if guard is not None else Guard()
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_lost_answer)
        self._driver = driver
        server, predict = config.server, config.predict
        max_connected = driver.session.rules.max_connected
        max_pending = max(6 * max_connected, MIN_PENDING)
        settings: dict[str, int | str] = {
            # Two coordinators must never share a port without noticing.
            "grpc.so_reuseport": 0,
            "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
            "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
            # Participants ping after 8 s of silence, and are not hung up on; who has vanished
            # without a word is noticed although it streams nothing.
            **KEEPALIVE,
            # Bytes that a stream may send ahead, beside the message that is being read. By default
            # gRPC lets them grow with the bandwidth, to more than 8 MiB for each upload.
            "grpc.http2.bdp_probe": 0,
            "grpc.http2.lookahead_bytes": 256 << 10,
            # Calls that have come, and that Python has not taken up yet. Beyond it gRPC cancels
            # them, some from 1,000 on unless told otherwise: of a fleet that comes back at once
            # many would have to come again.
            "grpc.server.max_pending_requests": max_pending,
            "grpc.server.max_pending_requests_hard_limit": max_pending,
            # A connection and a call take little memory, but an unregistered client opens any
            # number.
            "grpc.max_concurrent_streams": (
                STREAMS_OF_HOLDER if guard.is_closed else STREAMS_PER_CONNECTION
            ),
            "grpc.max_allowed_incoming_connections": max_connections(
                CONNECTIONS_PER_PARTICIPANT * max_connected + CONNECTIONS_PER_MEMBER * MAX_MEMBERS
            ),
            "grpc.max_connection_idle_ms": IDLE_MS,
            "grpc.server_handshake_timeout_ms": HANDSHAKE_MS,
            **server.grpc_options,
        }
        # For programs that use messaging; it knows nothing of the session.
        self._membership = MembershipService(name_of=_name_of)
        self.admission = AdmissionControl(
            partial(is_known, driver),
            lambda method, request: (
                self._membership.member_of(request, _name_of(None))
                if method.startswith(f"/{MEMBERSHIP}/")
                else None
            ),
            # A fleet that comes for the first time consists of unregistered clients.
            UNREGISTERED_CALLS + max_connected,
            server.max_calls_per_s,
        )
        self._max_connected = max_connected
        self._server = grpc.aio.server(
            interceptors=[
                RefusalInterceptor(counters, self.admission, worker.outage, latencies, guard)
            ],
            options=list(settings.items()),
        )
        self.slots = Slots(driver, store, server.max_update_bytes, server.max_update_norm)
        encoding = coordinator_pb2.Encoding.Value(server.update_encoding.upper())
        self.uploads = Uploads(self.slots, encoding)
        self.predictions = RemotePredictor(
            driver, store, timeout_s=predict.timeout_s, max_retries=predict.max_retries
        )
        self.service = service = CoordinatorService(
            driver,
            Inbox(self.slots, access, bucket),
            self.uploads,
            Downloads(
                driver,
                store,
                access,
                worker.verify,
                worker.made_model,
                weights_port,
                server.max_update_bytes,
            ),
            parse_points,
            counters,
            self.predictions,
        )
        services = cast(grpc.aio.Server, _ByGenericHandlers(self._server))
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, services)
        self.inspection = InspectionService(
            driver,
            metrics,
            counters,
            lambda: worker.trouble,
            service.waiting.num,
            self.predictions,
            parameters,
            lambda: operators_socket.moved_to,
            worker.description,
            study,
            guard,
            config.in_the_clear,
        )
        inspection_pb2_grpc.add_InspectionServicer_to_server(self.inspection, services)
        self.control = ControlService(
            guard, driver, lambda: guard.advertised(server.host, self.port), journal_copied
        )
        access_pb2_grpc.add_AccessServicer_to_server(AccessService(guard), services)
        access_pb2_grpc.add_ControlServicer_to_server(self.control, services)
        self._membership.add_to(services)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, services)
        self._server.add_generic_rpc_handlers((_Reflection(),))
        self._weights_port = weights_port
        self._operators_socket = operators_socket
        self._is_started = False
        self._leaving: set[asyncio.Task[None]] = set()
        self._limit: ConnectionLimit | None = None
        self.port = _listen(
            server.address,
            self._server.add_insecure_port
            if guard.certificates is None
            else partial(
                self._server.add_secure_port, server_credentials=guard.certificates.of_server()
            ),
        )
        self._plain: grpc.aio.Server | None = None
        self.health_port: int | None = None
        if server.health_port is not None:
            self._plain = _of_health_alone(self._health)
            address = server.address_at(server.health_port)
            self.health_port = _listen(address, self._plain.add_insecure_port)

    async def start(self) -> None:
        """Serve on all ports and on the operator's socket; health checks say SERVING."""
        self._is_started = True
        if self._weights_port is not None:
            # Refusals are not counted: the sender takes PutWeights then, and is refused there.
            self._weights_port.start(self.uploads.receive, self.uploads.find_unfinished)
            self._guard.on_ended.append(self._weights_port.end)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._say_serving(True)
        self._operators_socket.open(self._server.add_insecure_port)
        await self._server.start()
        if self._plain is not None:
            await self._plain.start()
        limit = self._limit = ConnectionLimit(
            self.port,
            max_owners=self._max_connected + MAX_MEMBERS,
            per_owner=CONNECTIONS_PER_PARTICIPANT,
            num_newcomers=self._max_connected,
        )
        self._guard.on_ended.append(self.admission.end_calls)
        self._guard.on_left.append(self._leave)
        self.admission.on_accepted = self._membership.on_accepted = limit.keep

    async def stop(self, drain_s: float) -> None:
        """Stop serving: calls under way may finish within drain_s, then the port is free."""
        self._operators_socket.close()
        self.control.end()
        if self.admission.end_calls in self._guard.on_ended:
            self._guard.on_ended.remove(self.admission.end_calls)
            self._guard.on_left.remove(self._leave)
        # A watcher of the health service that does not read holds this up until the server stops.
        telling = asyncio.create_task(self._say_serving(False))
        self._driver.end_watches()
        self.predictions.end()
        self._membership.end()
        if not self._is_started:
            # gRPC frees the port of a started server only. The driver has not begun, so a call that
            # comes in between is refused.
            await self._server.start()
            drain_s = 0.0
        ports = [self._server.stop(drain_s)]
        if self._plain is not None:
            await self._plain.start()  # as above; if it has started, that is nothing
            ports.append(self._plain.stop(0.0))
        if self._weights_port is not None:
            ports.append(self._weights_port.stop(drain_s))
        await asyncio.gather(*ports, telling)
        if self._weights_port is not None and self._weights_port.end in self._guard.on_ended:
            self._guard.on_ended.remove(self._weights_port.end)
        if self._limit is not None:
            self._limit.stop()
        await self.slots.close()

    def _leave(self, participant_id: str) -> None:
        """Have the session drop a participant that has no certificate any more."""

        async def leave() -> None:
            with suppress(Refusal):  # the process stops
                await self._driver.submit(NoteRevoked(participant_id))

        task = asyncio.ensure_future(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _say_serving(self, serving: bool) -> None:
        """Have health checks say of every service whether it serves."""
        response = health_pb2.HealthCheckResponse
        services = ("", *SERVICES, *([WEIGHTS_PORT] if self._weights_port is not None else []))
        status = response.SERVING if serving else response.NOT_SERVING
        await asyncio.gather(*(self._health.set(service, status) for service in services))


def _name_of(_: object) -> str | None:
    """The name that the present call may speak for; None for any, as MembershipService has it."""
    caller = CALLER.get()
    if caller is None or caller.identity.role is Role.OPERATOR:
        return None
    return caller.identity.name


def _listen(address: str, add_port: Callable[[str], int]) -> int:
    """Have a server take the port of an address. Returns its number. Raises CommandFailed."""
    try:
        return add_port(address)
    except RuntimeError:
        raise CommandFailed(
            f"cannot listen on {address}: another program uses the port, "
            "or the address is not this machine's"
        ) from None


class _Reflection(grpc.GenericRpcHandler):
    """The service that tells grpcurl and its like what the others are. Its modules are imported
    when it is asked: no participant does."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of ServerReflectionInfo; None for any other method."""
        if handler_call_details.method != f"/{REFLECTION}/ServerReflectionInfo":
            return None
        from grpc_reflection.v1alpha import reflection, reflection_pb2

        servicer = reflection.aio.ReflectionServicer((*SERVICES, HEALTH, REFLECTION))
        return grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )


def _of_health_alone(servicer: health.aio.HealthServicer) -> grpc.aio.Server:
    """A server for health checks in the clear, which knows nothing else."""
    admission = AdmissionControl(lambda name: False)
    server = grpc.aio.server(
        interceptors=[RefusalInterceptor(Counter(), admission)],
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
            ("grpc.max_allowed_incoming_connections", HEALTH_CONNECTIONS),
            ("grpc.max_connection_idle_ms", IDLE_MS),
        ],
    )
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return server


class _ByGenericHandlers:
    """A server that takes services by their generic handlers only.

    Generated code registers each method as well. gRPC then waits for the calls of a registered
    method in a task of its own, and each call of any method adds a callback to the tasks of all
    methods and removes it again: 17 us of the 236 us that a bare call takes a server of 24 methods.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, object]) -> None:
        """Leave the methods to their generic handlers."""


def _is_no_lost_answer(record: logging.LogRecord) -> bool:
    """Filter for gRPC's log. It logs an error, with a traceback, for each answer that it cannot
    send because the client has gone; any client can cause that as often as it likes."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, grpc.aio.InternalError)
