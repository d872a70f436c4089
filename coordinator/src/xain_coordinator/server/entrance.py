"""The Coordinator service, which lets participants in at a pace.

Thousands who come at one instant would keep the process busy with their arrival while others train.
So Rendezvous and new Watch streams are let in at the pace at which a fleet is asked to come back.
Whoever comes too early hears when its turn is: LATER, which XAIN's participants know, or, to Watch,
UNAVAILABLE with a RetryInfo. To strangers and streams that is said before anything is decided, and
costs next to nothing; of a member's Rendezvous it is noted that it came.

Members and strangers have a queue each, and streams have one, too, all of the same pace. So however
many strangers come, who was here before is not kept waiting by them. Nobody waits for a plain
answer: that the session is finished, or, to a stranger's Watch, that a rendezvous comes first. Nor
does a member lose its lease while it waits: that it came is a sign of life, and what it has said of
itself stays.
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
from xain_coordinator.server.pace import Pace
from xain_coordinator.server.predictions import RemotePredictor
from xain_coordinator.server.statuses import STATUSES, status_details
from xain_coordinator.updates.inbox import Inbox
from xain_proto.fl import coordinator_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]

ADMISSIONS_PER_S = float(RECONNECTS_PER_S)
# So many may come at once: a fleet of hundreds never notices that there is a pace.
BURST = 300
# Twenty seconds' worth. A place is a name and a number.
MAX_WAITING = 10_000

# A wire that counts in milliseconds must not round a wait down to none.
MIN_WAIT_S = 0.001


class Entrance(CoordinatorService):
    """counters: "asked_to_wait" counts the calls that came too early.

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
        self._strangers = Pace(ADMISSIONS_PER_S, BURST, MAX_WAITING)
        # A place is a name, so that the two calls of a member cannot share a queue.
        self._members = Pace(ADMISSIONS_PER_S, BURST, MAX_WAITING)
        self._watches = Pace(ADMISSIONS_PER_S, BURST, MAX_WAITING)

    async def Rendezvous(
        self, request: pb.RendezvousRequest, context: Context
    ) -> pb.RendezvousResponse:
        participant_id = participant_of(context)
        session = self._driver.session
        if session.phase is not Phase.FINISHED:
            try:
                check_name(participant_id)  # else the queue would hold whatever is sent
            except errors.InvalidName as refusal:
                self.refused.note(participant_id, refusal)
                raise
            is_member = session.is_member(participant_id, instance_of(context))
            wait_s = self._wait_s(self._members if is_member else self._strangers, participant_id)
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
                    f"many participants come at once; it is your turn in {wait_s:.3f} s"
                )
                await context.abort(
                    STATUSES[errors.Unavailable],
                    str(refusal),
                    (("grpc-status-details-bin", status_details(refusal, wait_s)),),
                )
        async for message in super().Watch(request, context):
            yield message

    async def _renew_lease(self, participant_id: str) -> None:
        heard = self._driver.session.heard.get(participant_id)
        sign = (
            c.Heartbeat(participant_id)
            if heard is None
            else c.Heartbeat(participant_id, heard.state, heard.round, heard.transfer)
        )
        # A participant that has left since hears so with its next call.
        with suppress(errors.NotAMember):
            await self._driver.submit(sign)

    def _wait_s(self, pace: Pace, participant_id: str) -> float:
        wait_s = pace.wait_s(participant_id, self._driver.clock.now())
        if wait_s:
            self._counters["asked_to_wait"] += 1
            return max(wait_s, MIN_WAIT_S)
        return 0.0
