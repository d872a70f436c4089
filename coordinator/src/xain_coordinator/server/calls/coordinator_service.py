"""The Coordinator service: messages in, commands to the driver, replies out.

Thousands of participants that come at one instant would keep the process busy with their arrival
while others train. So Rendezvous and new Watch streams are admitted at the rate at which a fleet is
asked to come back. A call that comes too early is told when to come again: a Rendezvous by LATER,
which XAIN's participants know, a Watch by UNAVAILABLE with a RetryInfo.

Members, clients that have not joined, and streams have a limit each, so new clients, however many,
do not delay the return of members. A member that is told to wait keeps its lease and what it has
said of itself.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Self

import grpc
import xxhash

from xain_coordinator.access.errors import Unauthenticated
from xain_coordinator.core.machine.answers import MAX_REASON
from xain_coordinator.core.machine.questions import AssignmentFor, ask
from xain_coordinator.core.parts.membership import RECONNECTS_PER_S, check_name, reconnect_spread_s
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.errors import ProfileMismatch
from xain_coordinator.core.vocabulary.values import (
    Finding,
    ParticipantState,
    Phase,
    Point,
    WeightsRef,
)
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import StoreError
from xain_coordinator.server.calls.assignments import Assignments
from xain_coordinator.server.calls.translate import (
    division_message,
    division_of,
    evaluation_of,
    group_address,
    layout_of,
    profile_of,
    ref_message,
    transfer_of,
    wire_state,
)
from xain_coordinator.server.calls.waiting import MAX_LINES, WaitingParticipants
from xain_coordinator.server.identity import (
    CALLER,
    SENDER,
    WAITED_S,
    certified_site,
    participant_of,
)
from xain_coordinator.server.predictions import RemotePredictor
from xain_coordinator.server.rate_limit import RateLimit
from xain_coordinator.server.statuses import message_of
from xain_coordinator.server.weights.downloads import Downloads
from xain_coordinator.telemetry.points import newest_metrics
from xain_coordinator.updates.inbox import Inbox, Obtained
from xain_coordinator.updates.measured_upload import Announced
from xain_coordinator.updates.slots import Reference
from xain_coordinator.updates.upload_stream import UploadStream
from xain_coordinator.updates.uploads import Uploads
from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog
from xain_foundation.names import shortened
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import coordinator_pb2_grpc as pb_grpc

log = get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

NEWS_S = 1.0  # how long news waits for the work that it could bring along

# Measured by benchmarks/fleet.py: without the limit 2,000 participants on two cores were back 8.0 s
# after a kill instead of 5.7 s. 1,176 heartbeats, instead of none, took longer than an agent waits
# until it opens a second connection.
ADMISSIONS_PER_S = float(RECONNECTS_PER_S)
# Calls that are admitted at once: a fleet of hundreds never notices a limit.
ADMISSION_BURST = 300
# Reservations of twenty seconds. Each is a name and a number.
MAX_WAITING = 10_000
# A wire that counts in milliseconds must not round a wait down to none.
MIN_WAIT_S = 0.001

# READY is what a client sends that waits; STANDBY and ROUND are the coordinator's words, but a
# client that uses them is alive all the same.
_PARTICIPANT_STATES = {
    pb.TRAINING: ParticipantState.TRAINING,
    pb.FINISHED: ParticipantState.FINISHED,
}

MAX_FINDINGS_TOLD = 20  # to one participant


@dataclass(frozen=True, slots=True)
class _NewsWithWork:
    """A message to watchers, and what it is made of."""

    message: pb.WatchResponse
    work: pb.StartTrainingRoundResponse
    whole: pb.WatchResponse


@dataclass(frozen=True, slots=True)
class _Findings:
    """Findings as a participant is told of them, and their digest; empty without any."""

    texts: tuple[str, ...]
    digest: bytes

    @classmethod
    def of(cls, findings: Sequence[Finding]) -> Self:
        """The first MAX_FINDINGS_TOLD findings as texts, with the digest of these."""
        texts = tuple(f"{one.level}: {one}" for one in findings[:MAX_FINDINGS_TOLD])
        return cls(texts, xxhash.xxh3_64_digest("\n".join(texts).encode()) if texts else b"")


class CoordinatorService(pb_grpc.CoordinatorServicer):
    """parse_points: participant, round and metrics JSON to points; counts what it drops.
    counters: "asked_to_wait" counts the calls that came too early.
    waiting: participants that were asked to come again later.
    """

    # How long the answer to an update waits for the next round. Rounds that last longer gain
    # nothing from it, and their participants hear soon that their updates count.
    next_round_s = 0.1
    few_participants = 50  # among more, the calls that wait take more than they save

    def __init__(
        self,
        driver: Driver,
        inbox: Inbox,
        uploads: Uploads,
        downloads: Downloads,
        parse_points: Callable[[str, int, str], tuple[Point, ...]],
        counters: Counter[str],
        predictions: RemotePredictor,
    ) -> None:
        self._driver = driver
        self._counters = counters
        self.limit(ADMISSIONS_PER_S, ADMISSION_BURST)
        self._predictions = predictions
        self._inbox = inbox
        self._uploads = uploads
        self._downloads = downloads
        self._parse_points = parse_points
        self._evaluation_dropped = RateLimitedLog(log.warning, "evaluation_dropped")
        self._assignments = Assignments(driver, downloads, uploads.encoding_for)
        self._news: tuple[r.Advertisement, pb.WatchResponse] | None = None
        self._news_with_work: _NewsWithWork | None = None
        # Findings of the session, and what each site that has some is told; "": all others.
        self._found: tuple[Sequence[Finding], Mapping[str, _Findings]] | None = None
        # The next round as the answer to a participant's latest update tells it, by participant.
        self._next_rounds: dict[str, asyncio.Future[pb.WatchResponse | None]] = {}
        self._refused = RateLimitedLog(log.warning, "rendezvous_refused", burst=MAX_LINES)
        self.waiting = WaitingParticipants(driver.session.rules.lease_s)
        self._id_in_use = RateLimitedLog(log.warning, "participant_id_in_use")

    def limit(self, per_s: float, burst: int) -> None:
        """Admit per_s calls a second after a burst: newcomers, members and watches each."""
        limits = (RateLimit(per_s, burst, MAX_WAITING) for _ in range(3))
        # A reservation is a name, so that the two calls of a member cannot share a limit.
        self._newcomers, self._members, self._watches = limits

    def _wait_s(self, rate_limit: RateLimit, participant_id: str) -> float:
        """Seconds after which a participant is to come again, which is counted; 0: admitted."""
        session = self._driver.session
        if session.phase is Phase.FINISHED:
            return 0.0
        wait_s = rate_limit.wait_s(participant_id, self._driver.clock.now())
        if not wait_s:
            return 0.0
        self._counters["asked_to_wait"] += 1
        return max(wait_s, MIN_WAIT_S)

    async def _renew_lease(self, participant_id: str) -> None:
        """Renew the lease of a participant as a heartbeat does that repeats what its last one
        said."""
        heard = self._driver.session.members.heard.get(participant_id)
        sign = c.Heartbeat(participant_id)
        if heard is not None:
            sign = c.Heartbeat(participant_id, heard.state, heard.round, heard.transfer)
        # A participant that has left since is told so by its next call.
        with suppress(errors.NotAMember):
            await self._driver.submit(sign)

    async def Rendezvous(
        self, request: pb.RendezvousRequest, context: Context
    ) -> pb.RendezvousResponse:
        """Let a participant into the session, or ask it to come again later or to divide its rows
        first. A refusal is logged and kept for the report."""
        participant_id = self._certified(context)
        session = self._driver.session
        is_member = session.members.is_instance(participant_id, SENDER.get().instance_id)
        try:
            check_name(participant_id)  # else a reservation would hold whatever is sent
            wait_s = self._wait_s(self._members if is_member else self._newcomers, participant_id)
            if wait_s:
                if is_member:
                    await self._renew_lease(participant_id)
                return pb.RendezvousResponse(
                    reply=pb.LATER,
                    retry_after_ms=round(1000 * wait_s),
                    session_id=session.session_id,
                )
            profile = profile_of(request.profile) if request.HasField("profile") else None
            reply = await self._driver.submit(
                c.Rendezvous(
                    participant_id,
                    profile,
                    dict(request.tags),
                    request.can_evaluate,
                    SENDER.get().instance_id,
                    context.peer(),
                    not request.cannot_initialise,
                    group_address(request.process_group_address, context.peer()),
                    request.can_divide,
                    division_of(request),
                    certified_site() is not None,
                )
            )
        except errors.Refusal as refusal:
            if refusal.code in ("INVALID_NAME", "INVALID_TAGS", "PROFILE_MISMATCH"):
                await self._note_refused(participant_id, refusal)
            raise
        if isinstance(reply, r.IdInUse):
            raise self._refused_instance(participant_id, reply, context)
        session_id = self._driver.session.session_id
        if isinstance(reply, r.Divide):
            return pb.RendezvousResponse(
                reply=pb.LATER, session_id=session_id, division=division_message(reply.division)
            )
        if isinstance(reply, r.Later):
            if reply.why:
                if session.members.not_admitted.get(participant_id) != reply.why:
                    name, code = shortened(participant_id), ProfileMismatch.code
                    self._refused(participant=name, code=code, reason=reply.why)
            else:
                limit = self._driver.session.rules.max_participants
                self.waiting.note(participant_id, self._driver.clock.now(), limit)
            return pb.RendezvousResponse(
                reply=pb.LATER,
                retry_after_ms=round(reply.retry_after_s * 1000),
                session_id=session_id,
                why=reply.why,
            )
        assert isinstance(reply, r.Accepted)
        self.waiting.forget(participant_id)
        return pb.RendezvousResponse(
            reply=pb.ACCEPT,
            heartbeat_interval_ms=round(reply.heartbeat_time_s * 1000),
            session_id=session_id,
            reconnect_spread_ms=self._reconnect_spread_ms(),
            stays=self._driver.session.rules.step is not None,
        )

    async def _note_refused(self, participant_id: str, refusal: errors.Refusal) -> None:
        """Log a refused rendezvous and keep it for status and report."""
        name, reason = shortened(participant_id), message_of(refusal)
        self._refused(participant=name, code=refusal.code, reason=reason)
        why = reason.removeprefix(f"participant {name!r}: ")
        await self._driver.submit(c.NoteRefusedParticipant(name, why))

    def _refused_instance(
        self, participant_id: str, reply: r.IdInUse, context: Context
    ) -> errors.Refusal:
        """The refusal of a process whose participant id another process has; it is logged if both
        go on."""
        what = f"another process is connected as {participant_id}"
        if reply.retry_after_s is None:
            self._id_in_use(
                round=self._driver.session.round, participant=participant_id, second=context.peer()
            )
            what += f" and goes on: it was heard {reply.heard_s:.1f} s ago"
        else:
            what += (
                f", heard {reply.heard_s:.1f} s ago; if it has ended, this one takes its slot in "
                f"{reply.lease_s:.1f} s at the latest"
            )
        return errors.Refusal(
            errors.Reason.DUPLICATE_INSTANCE,
            f"{what}. Give each process a participant id of its own",
            # None: the process has been heard since the sender asked first.
            retry_after_s=reply.retry_after_s,
        )

    def _certified(self, context: Context) -> str:
        """The participant that calls. Raises Unauthenticated if it has a certificate and a name
        that has shown an instance id, and the call has none."""
        participant_id = participant_of(context)
        if CALLER.get() is not None and not SENDER.get().instance_id:
            member = self._driver.session.members.get(participant_id)
            if member is not None and member.instance_id:
                raise Unauthenticated(
                    f"{participant_id} has shown an instance id, and this call has none: another "
                    "process calls under its name"
                )
        return participant_id

    def _caller(self, context: Context) -> str:
        """The participant that calls. Raises NotAMember if another process has its id, and
        Unauthenticated."""
        participant_id = self._certified(context)
        session = self._driver.session
        member = session.members.by_name.get(participant_id)
        instance_id = SENDER.get().instance_id
        if member is None or member.instance_id == instance_id:
            return participant_id
        if not member.is_instance(instance_id) and session.phase is not Phase.FINISHED:
            raise errors.NotAMember(participant_id)
        return participant_id

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: Context
    ) -> pb.HeartbeatResponse:
        """Renew a participant's lease, and tell it the state as it was before this sign of life,
        the findings in its data, and after the end whether it counted."""
        participant_id = self._caller(context)
        state = _PARTICIPANT_STATES.get(request.state, ParticipantState.READY)
        transfer = transfer_of(request)
        command = c.Heartbeat(participant_id, state, request.round, transfer, WAITED_S.get())
        seen = self._driver.advertise(participant_id)  # before this sign of life counts
        reply = await self._driver.submit(command)
        if isinstance(reply, r.Heard):
            reply = seen
        assert isinstance(reply, r.Advertisement)
        findings = self._findings(participant_id)
        is_over = reply.phase is Phase.FINISHED
        return pb.HeartbeatResponse(
            state=wire_state(reply.phase),
            round=reply.round,
            update_accepted=reply.update_accepted,
            session_id=self._driver.session.session_id,
            cause=self._cause,
            reconnect_spread_ms=self._reconnect_spread_ms(),
            update_damaged=reply.update_damaged,
            warning=reply.warning,
            findings=() if request.known_findings == findings.digest else findings.texts,
            findings_digest=findings.digest,
            attempt=reply.attempt,
            rounds_contributed=self._rounds_contributed(participant_id) if is_over else None,
            no_better=self._no_better() if is_over else "",
        )

    @property
    def _cause(self) -> str:
        """Why the session ended, as its participants are told; "" before that."""
        session = self._driver.session
        return session.short_cause if session.cause else ""

    def _rounds_contributed(self, participant_id: str) -> int | None:
        """Rounds that a participant counted in, once the session is over. None for one of whom
        nothing is known: it never was a member, or left long ago and is forgotten."""
        session = self._driver.session
        if session.rules.step is not None and participant_id in self._driver.took_part:
            return 1  # in an earlier session of the study
        if session.rules.rounds == 0:  # it describes or measures, and trains nothing
            last = session.evaluation.last_round
            return int(
                participant_id in session.requested_of
                or (last is not None and participant_id in last.evaluations)
            )
        account = self._driver.history.accounts.by_name.get(participant_id)
        return None if account is None else account.num_counted

    def _no_better(self) -> str:
        """A sentence that the last model is no better than the best constant prediction; "" if it
        is, or the session trains nothing."""
        session = self._driver.session
        return session.evaluation.no_better if session.rules.rounds > 0 else ""

    def _findings(self, participant_id: str) -> _Findings:
        """Texts and digest of the findings in a participant's data and in all data."""
        session = self._driver.session
        if self._found is None or self._found[0] is not session.findings:
            sites = {"", *(one.site for one in session.findings)}
            told = {site: _Findings.of(session.findings_of(site)) for site in sites}
            self._found = session.findings, told
        of_site = self._found[1]
        return of_site.get(participant_id) or of_site[""]

    def _reconnect_spread_ms(self) -> int:
        """Milliseconds over which participants spread their calls when the connection breaks
        off."""
        session = self._driver.session
        return round(1000 * reconnect_spread_s(len(session.members.by_name), session.rules.lease_s))

    async def StartTrainingRound(
        self, request: pb.StartTrainingRoundRequest, context: Context
    ) -> pb.StartTrainingRoundResponse:
        """Tell a participant its work in the open round. A model that it found damaged is verified
        first."""
        participant_id = self._caller(context)
        digest = request.damaged_model_digest.hex()
        is_member = participant_id in self._driver.session.members
        if digest and is_member and self._downloads.note_damaged(digest):
            self._assignments.forget()  # small models travel in them
            self._news_with_work = None
        return await self._assignments.message(participant_id, request.known_metadata)

    async def EndTrainingRound(
        self, request: pb.EndTrainingRoundRequest, context: Context
    ) -> pb.EndTrainingRoundResponse:
        """Take an update or an evaluation: obtain the weights, check them and submit the command.
        The reply to a small update may bring the next round."""
        participant_id = self._caller(context)
        if certified_site() is not None:
            self._require_own(participant_id, request)
        if request.participant_id != participant_id:
            check_name(request.participant_id)
        session = self._driver.session
        number = request.round
        if not request.HasField("round"):
            number = session.round_of_call(participant_id, has_upload=True)
        try:
            reference = self._reference(participant_id, number, request)
            async with self._inbox.obtained(participant_id, number, reference) as obtained:
                await self._hand_in(participant_id, number, request, obtained)
        except errors.InvalidUpdate as refusal:
            await self._note_refusal(participant_id, number, refusal)
            raise
        except errors.Refusal as refusal:
            if refusal.code == "SLICE_MISMATCH":
                await self._driver.submit(
                    c.NoteGroupBroken(participant_id, number, request.attempt, str(refusal))
                )
            raise
        if request.takes_next_round and request.update.data:
            return pb.EndTrainingRoundResponse(
                next_round=await self._next_round(participant_id, number, request.known_metadata)
            )
        return pb.EndTrainingRoundResponse()

    def _require_own(self, participant_id: str, request: pb.EndTrainingRoundRequest) -> None:
        """Take an update without a name for the caller's, as its certificate says. Raises
        Unauthenticated if the update names another participant.

        Participants of XAIN choose the names of their uploads, but not those of other members.
        """
        said = request.participant_id = request.participant_id or participant_id
        if said == participant_id:
            return
        if self._inbox.names_are_chosen and said not in self._driver.session.members:
            return
        raise Unauthenticated(
            f"the certificate is that of participant {participant_id!r}, and the update says that "
            f"it is of {shortened(said)!r}"
        )

    async def _hand_in(
        self,
        participant_id: str,
        number: int,
        request: pb.EndTrainingRoundRequest,
        obtained: Obtained,
    ) -> None:
        """Submit what a participant brings for a round: update, metrics and evaluation. An invalid
        evaluation is logged and dropped."""
        if obtained.weights is None and not request.HasField("round"):
            number = self._driver.session.round_of_call(participant_id, has_upload=False)
        points: tuple[Point, ...] = ()
        if request.metrics:
            points = self._parse_points(participant_id, number, request.metrics)
        evaluation = None
        if request.HasField("evaluation"):
            try:
                evaluation = evaluation_of(request.evaluation, self._driver.session, number)
            except ValueError as error:  # it is dropped; the update counts
                reason = shortened(str(error), MAX_REASON)
                self._evaluation_dropped(participant=participant_id, round=number, reason=reason)
        await self._driver.submit(
            c.EndTrainingRound(
                participant_id=participant_id,
                round=number,
                num_samples=request.number_samples,
                weights=obtained.weights,
                metrics=points,
                training=newest_metrics(points, evaluation) if points else {},
                evaluation=evaluation,
                layout=layout_of(request.layout),
                attempt=request.attempt,
                is_bounded=certified_site() is not None,
            ),
            obtained.data,
        )

    async def _next_round(
        self, participant_id: str, round_: int, known_metadata: bytes
    ) -> pb.WatchResponse | None:
        """Wait for the round after `round_`, and return what Watch would say of it. None if the
        round does not open within next_round_s, or the session ends or has many participants."""
        if len(self._driver.session.members) > self.few_participants:
            return None
        told = asyncio.get_running_loop().create_future()
        if participant_id in self._next_rounds:
            self._next_rounds[participant_id] = told
        message = None
        try:
            seen = self._driver.advertise(participant_id)
            # Few wait: most updates are committed with the last one.
            if seen.round == round_ or self._driver.session.waits_for_script:
                async with asyncio.timeout(self.next_round_s):
                    while seen.round == round_ or self._driver.session.waits_for_script:
                        await self._driver.wait_for_change()
                        seen = self._driver.advertise(participant_id)
            if seen.phase is Phase.COLLECTING:
                message = self._news_of(seen)
                return await self._with_work(message, participant_id, known_metadata)
        except (TimeoutError, errors.Refusal):
            pass
        finally:
            told.set_result(message)
        return None

    def _reference(
        self, participant_id: str, round_: int, request: pb.EndTrainingRoundRequest
    ) -> Reference | None:
        """The update that a call describes; None in the round that evaluates the last model."""
        if self._driver.session.evaluates_last(round_):
            return None  # nothing is trained in it
        if not request.HasField("update"):
            return Reference(request.participant_id)
        ref = request.update
        return Reference(participant_id, ref.key, ref.size_bytes, ref.digest.hex(), ref.data)

    async def Watch(
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncIterator[pb.WatchResponse]:
        """Stream what a participant is told of the session, from now to the end. Many that come at
        once are asked to wait."""
        participant_id, instance_id = self._certified(context), SENDER.get().instance_id
        if participant_id in self._driver.session.members:
            wait_s = self._wait_s(self._watches, participant_id)
            if wait_s:
                refusal = errors.Unavailable(
                    f"many participants come at once; come again in {wait_s:.3f} s"
                )
                refusal.retry_after_s = wait_s
                raise refusal
        self._next_rounds[participant_id] = asyncio.get_running_loop().create_future()
        self._next_rounds[participant_id].set_result(None)
        try:
            async for message in self._messages(participant_id, instance_id, request):
                yield message
        finally:
            self._next_rounds.pop(participant_id, None)

    async def _messages(
        self, participant_id: str, instance_id: str, request: pb.WatchRequest
    ) -> AsyncIterator[pb.WatchResponse]:
        """Messages of a watch: each change of what the participant is told, with its work once it
        may train. A message that the answer to its update has carried is left out."""
        last: pb.WatchResponse | None = None
        known_metadata = known_findings = b""  # sent by this stream
        async for seen in self._driver.watch(participant_id, instance_id):
            message = self._news_of(seen)
            if seen.phase is Phase.FINISHED:
                own = pb.WatchResponse(
                    rounds_contributed=self._rounds_contributed(participant_id),
                    no_better=self._no_better(),
                )
                own.MergeFrom(message)
                message = own
            findings = self._findings(participant_id)
            has_new = findings.digest != known_findings
            if message == last and not has_new:
                continue  # the core tells phases apart that are one state on the wire
            is_told = last is not None and _accepts_update(last, message)
            is_next = last is not None and last.round != message.round
            if is_next and await self._is_overtaken(participant_id, message):
                continue
            last = message
            if not has_new and (
                is_told or (is_next and await self._is_told(participant_id, message))
            ):
                continue
            if seen.phase is Phase.COLLECTING and not seen.update_accepted:
                message = await self._with_work(message, participant_id, known_metadata)
                if request.keeps_metadata and message.HasField("work"):
                    known_metadata = message.work.metadata_digest
            if has_new:
                known_findings = findings.digest
                own = pb.WatchResponse(findings=findings.texts, findings_digest=findings.digest)
                own.MergeFrom(message)
                message = own
            yield message

    async def _is_overtaken(self, participant_id: str, message: pb.WatchResponse) -> bool:
        """Whether a message says that the next round is not open yet, and the answer to the
        participant's update carried that it is."""
        told = self._next_rounds.get(participant_id)
        if told is None or message.state != pb.STANDBY:
            return False
        carried = told.result() if told.done() else await asyncio.shield(told)
        return carried is not None and carried.round == message.round

    async def _is_told(self, participant_id: str, message: pb.WatchResponse) -> bool:
        """Whether the answer to the participant's update carried this message about the next
        round."""
        told = self._next_rounds.get(participant_id)
        if told is None:
            return False
        return (told.result() if told.done() else await asyncio.shield(told)) == message

    def _news_of(self, seen: r.Advertisement) -> pb.WatchResponse:
        """The message of an advertisement, made once for all watchers that are told the same."""
        if self._news is not None and self._news[0] == seen:
            return self._news[1]
        session = self._driver.session
        message = pb.WatchResponse(
            state=wire_state(seen.phase),
            round=seen.round,
            update_accepted=seen.update_accepted,
            session_id=session.session_id,
            cause=self._cause,  # of the end, which changes the phase too
            update_damaged=seen.update_damaged,
            warning=seen.warning,
            attempt=seen.attempt,
        )
        self._news = (seen, message)
        return message

    async def _with_work(
        self, message: pb.WatchResponse, participant_id: str, known_metadata: bytes
    ) -> pb.WatchResponse:
        """The same message with the participant's assignment; without it if the round has moved on
        or the store does not answer within NEWS_S."""
        try:
            # The durable session has the assignment: its message is durable as well.
            reply = ask(self._driver.session, AssignmentFor(participant_id))
            work = self._assignments.made(reply, known_metadata)
            if work is None:
                async with asyncio.timeout(NEWS_S):
                    work = await self._assignments.message(participant_id, known_metadata)
        except (errors.Refusal, StoreError, TimeoutError):
            # The round has moved on, or the store is away: the news goes out all the same, and
            # a participant that wants the work asks for it.
            return message
        if work.round != message.round:
            return message
        known = self._news_with_work
        if known is not None and known.message is message and known.work is work:
            return known.whole
        whole = pb.WatchResponse(work=work)
        whole.MergeFrom(message)
        self._news_with_work = _NewsWithWork(message, work, whole)
        return whole

    # No generator: its consumer would keep each message until the next one is yielded.
    async def GetWeights(  # type: ignore[override]
        self, request: pb.GetWeightsRequest, context: Context
    ) -> None:
        """Stream a global model from an offset on."""
        is_first = True

        async def write(ref: WeightsRef, data: bytes) -> None:
            """Send data; the first message has the reference, too."""
            nonlocal is_first
            message = ref_message(ref) if is_first else None
            is_first = False
            await context.write(pb.GetWeightsResponse(data=data, ref=message))

        self._caller(context)
        await self._downloads.send(request.key, request.offset, write, request.num_bytes)

    async def PutWeights(
        self, request_iterator: AsyncIterator[pb.PutWeightsRequest], context: Context
    ) -> pb.PutWeightsResponse:
        """Receive an update, or a part of one. Returns its reference when it is whole, else the
        offset reached."""
        participant_id = self._caller(context)
        trained = self._driver.session.trained_by(participant_id)

        async def read() -> Any:
            return await anext(request_iterator, grpc.aio.EOF)

        try:
            stream = UploadStream(read)
            received = await self._uploads.receive(participant_id, stream)
        except errors.InvalidUpdate as refusal:
            await self._note_refusal(participant_id, trained, refusal)
            raise
        if isinstance(received, int):
            return pb.PutWeightsResponse(offset=received)
        ref = ref_message(received)
        ref.encoding = stream.encoding
        return pb.PutWeightsResponse(ref=ref)

    async def FindUpload(
        self, request: pb.FindUploadRequest, context: Context
    ) -> pb.FindUploadResponse:
        """Tell how many bytes of an upload that broke off are there."""
        announced = Announced(request.round, request.size_bytes, request.digest.hex())
        offset = await self._uploads.find_unfinished(self._caller(context), announced)
        return pb.FindUploadResponse(offset=offset)

    async def ReportFailure(
        self, request: pb.ReportFailureRequest, context: Context
    ) -> pb.ReportFailureResponse:
        """Note that a participant's code has failed, or that its process group broke."""
        participant_id = self._caller(context)
        if request.HasField("attempt"):
            await self._driver.submit(
                c.NoteGroupBroken(participant_id, request.round, request.attempt, request.message)
            )
            return pb.ReportFailureResponse()
        await self._driver.submit(
            c.NoteFailure(
                participant_id,
                request.round,
                request.kind,
                request.message,
                request.traceback,
            )
        )
        return pb.ReportFailureResponse()

    async def Predict(
        self, request_iterator: AsyncIterator[pb.PredictionAnswer], context: Context
    ) -> AsyncIterator[pb.PredictionQuestion]:
        """Stream questions for predictions to a participant that keeps estimators, and take its
        answers."""
        participant_id = self._caller(context)
        if not is_known(self._driver, participant_id):
            raise errors.NotAMember(participant_id)
        async with aclosing(self._predictions.serve(participant_id, request_iterator)) as questions:
            async for question in questions:
                yield question

    async def _note_refusal(
        self, participant_id: str, round_: int, refusal: errors.InvalidUpdate
    ) -> None:
        """Count an unusable update before its sender gets the refusal, so that a crash forgets no
        refusal that a participant has received.

        round_: that the participant trained when it began to send.
        """
        await self._driver.submit(c.NoteRefusedUpdate(participant_id, round_, str(refusal)))


def is_known(driver: Driver, participant_id: str) -> bool:
    """Whether a participant is a member; after the end, whether it has ever been one."""
    session = driver.session
    if participant_id in session.members.by_name:
        return True
    return session.phase is Phase.FINISHED and participant_id in driver.history.accounts.by_name


def _accepts_update(before: pb.WatchResponse, message: pb.WatchResponse) -> bool:
    """Whether the update of this participant was accepted, and nothing else is new. The answer to
    its EndTrainingRound tells the participant, and heartbeats do; a message for each update would
    be every second message of a small round."""
    if not message.update_accepted:
        return False
    accepted = pb.WatchResponse(update_accepted=True)
    accepted.MergeFrom(before)
    return message == accepted
