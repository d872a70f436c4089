"""The Coordinator service with rate limits on Rendezvous and Watch.

Thousands of participants that come at one instant would keep the process busy with their arrival
while others train. So Rendezvous and new Watch streams are admitted at the rate at which a fleet is
asked to come back. A call that comes too early is told when to come again: a Rendezvous by LATER,
which XAIN's participants know, a Watch by UNAVAILABLE with a RetryInfo. For streams and clients
that have not joined, this is decided before anything else and costs next to nothing; a member's
Rendezvous renews its lease.

Members, clients that have not joined, and streams have a limit each, of the same rate. So new
clients, however many, do not delay the return of members. A plain answer is never delayed: that the
session is finished, or that a Watch needs a rendezvous first. A member that is told to wait keeps
its lease and what it has said of itself.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc

from xain_coordinator.core import commands as c
from xain_coordinator.core import errors
from xain_coordinator.core.membership import RECONNECTS_PER_S, check_name
from xain_coordinator.core.values import Phase, Point
from xain_coordinator.driver.driver import Driver
from xain_coordinator.server.coordinator_service import CoordinatorService
from xain_coordinator.server.downloads import Downloads
from xain_coordinator.server.identity import instance_of, participant_of
from xain_coordinator.server.predictions import RemotePredictor
from xain_coordinator.server.rate_limit import RateLimit
from xain_coordinator.server.statuses import STATUSES, status_details
from xain_coordinator.updates.inbox import Inbox
from xain_proto.fl import coordinator_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]

# Measured by benchmarks/fleet.py: without the limit 2,000 participants on two cores were back 8.0 s
# after a kill instead of 5.7 s. 1,176 heartbeats, instead of none, took longer than an agent waits
# until it opens a second connection.
ADMISSIONS_PER_S = float(RECONNECTS_PER_S)
# Reservations of twenty seconds. Each is a name and a number.
MAX_WAITING = 10_000

# A wire that counts in milliseconds must not round a wait down to none.
MIN_WAIT_S = 0.001


class RateLimitedService(CoordinatorService):
    """The Coordinator service, which limits the rates of Rendezvous and Watch.

    counters: "asked_to_wait" counts the calls that came too early.
    The other arguments are those of CoordinatorService.
    """

    def __init__(
        self,
        driver: Driver,
        inbox: Inbox,
        downloads: Downloads,
        parse_points: Callable[[str, int, str], tuple[Point, ...]],
        counters: Counter[str],
        predictions: RemotePredictor,
    ) -> None:
        super().__init__(driver, inbox, downloads, parse_points, predictions)
        self._counters = counters
        self.limit(ADMISSIONS_PER_S, 300)  # a fleet of hundreds never notices a limit

    def limit(self, per_s: float, burst: int) -> None:
        """Begin to admit so many calls of each kind a second, after a burst."""
        limits = (RateLimit(per_s, burst, MAX_WAITING) for _ in range(3))
        # A reservation is a name, so that the two calls of a member cannot share a limit.
        self._newcomers, self._members, self._watches = limits

    async def Rendezvous(
        self, request: pb.RendezvousRequest, context: Context
    ) -> pb.RendezvousResponse:
        participant_id = participant_of(context)
        session = self._driver.session
        if session.phase is not Phase.FINISHED:
            try:
                check_name(participant_id)  # else a reservation would hold whatever is sent
            except errors.InvalidName as refusal:
                self.refused.note(participant_id, refusal)
                raise
            is_member = session.members.is_instance(participant_id, instance_of(context))
            wait_s = self._wait_s(self._members if is_member else self._newcomers, participant_id)
            if wait_s:
                if is_member:
                    await self._renew_lease(participant_id)
                return pb.RendezvousResponse(
                    reply=pb.LATER,
                    retry_after_ms=round(1000 * wait_s),
                    session_id=session.session_id,
                )
        return await super().Rendezvous(request, context)

    async def Watch(
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncIterator[pb.WatchResponse]:
        session = self._driver.session
        participant_id = participant_of(context)
        if participant_id in session.members and session.phase is not Phase.FINISHED:
            wait_s = self._wait_s(self._watches, participant_id)
            if wait_s:
                refusal = errors.Unavailable(
                    f"many participants come at once; come again in {wait_s:.3f} s"
                )
                await context.abort(
                    STATUSES[errors.Unavailable],
                    str(refusal),
                    (("grpc-status-details-bin", status_details(refusal, wait_s)),),
                )
        async for message in super().Watch(request, context):
            yield message

    async def _renew_lease(self, participant_id: str) -> None:
        heard = self._driver.session.members.heard.get(participant_id)
        sign = (
            c.Heartbeat(participant_id)
            if heard is None
            else c.Heartbeat(participant_id, heard.state, heard.round, heard.transfer)
        )
        # A participant that has left since is told so by its next call.
        with suppress(errors.NotAMember):
            await self._driver.submit(sign)

    def _wait_s(self, rate_limit: RateLimit, participant_id: str) -> float:
        wait_s = rate_limit.wait_s(participant_id, self._driver.clock.now())
        if wait_s:
            self._counters["asked_to_wait"] += 1
            return max(wait_s, MIN_WAIT_S)
        return 0.0
