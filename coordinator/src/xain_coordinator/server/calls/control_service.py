"""The Control service: commands of an operator."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc

from xain_coordinator.core.machine.scripted import require_session
from xain_coordinator.core.vocabulary.commands import EndScript, FinishSession, RemoveParticipant
from xain_coordinator.core.vocabulary.errors import Unavailable
from xain_coordinator.core.vocabulary.values import Task
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import JournalError
from xain_coordinator.server.calls.round_messages import round_messages
from xain_coordinator.server.calls.script_messages import configuration, evaluation, script_status
from xain_coordinator.server.guard import Guard
from xain_coordinator.server.identity import caller_said
from xain_foundation.logs.logger import get_logger
from xain_foundation.threads import run_to_end
from xain_wire.fl import access_pb2 as pb
from xain_wire.fl import access_pb2_grpc as pb_grpc

log = get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class ControlService(pb_grpc.ControlServicer):
    """guard: of this process. driver: of the session.
    address: that a site connects to, where an operator names none.
    journal_copied: a copy of the journal until the end of a block.
    """

    # A backup that lasts so long is told, and again each time. It is not ended: nothing that comes
    # from it shows whether it still copies.
    long_backup_s = 600.0

    def __init__(
        self,
        guard: Guard,
        driver: Driver,
        address: Callable[[], str],
        journal_copied: Callable[[], AbstractAsyncContextManager[Path]],
    ) -> None:
        self._guard, self._driver, self._address = guard, driver, address
        self._journal_copied = journal_copied
        self._ended = asyncio.Event()

    def end(self) -> None:
        """End the backups under way, which would hold up the server's stop."""
        self._ended.set()

    # --- certificates ---

    async def CreateToken(
        self, request: pb.CreateTokenRequest, context: Context
    ) -> pb.CreateTokenResponse:
        """Make a token to join with, or a bearer token for the HTTP face."""
        access, by = self._guard.require_access(), caller_said()
        if request.bearer:
            token, serial, expires_at = await run_to_end(
                access.create_bearer, request.name, request.role, request.ttl_s, by=by
            )
        else:
            token, serial, expires_at = await run_to_end(
                access.create_token,
                request.name,
                request.role,
                request.ttl_s,
                request.address or self._address(),
                reusable=request.reusable,
                by=by,
            )
        return pb.CreateTokenResponse(token=token, serial=serial, expires_at=expires_at)

    async def Sign(self, request: pb.SignRequest, context: Context) -> pb.SignResponse:
        """Sign a certificate request for a name and role. Returns certificate and authority."""
        access = self._guard.require_access()
        certificate = await run_to_end(
            access.sign, request.request, request.name, request.role, by=caller_said()
        )
        return pb.SignResponse(certificate=certificate, authority=access.authority)

    async def ListCertificates(
        self, request: pb.ListCertificatesRequest, context: Context
    ) -> pb.ListCertificatesResponse:
        """List issued certificates and tokens, with length and last hash of the audit log."""
        access = self._guard.require_access()
        entries = [
            pb.ListCertificatesResponse.Entry(
                serial=one.serial,
                name=one.name,
                role=one.role or "",
                kind=one.kind,
                issued_at=one.issued_at,
                expires_at=one.expires_at,
                revoked=one.revoked,
                used=one.used,
                reusable=one.reusable,
            )
            for one in access.entries()
        ]
        return pb.ListCertificatesResponse(
            entries=entries, num_lines=access.num_lines, last_hash=access.last_hash
        )

    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeResponse:
        """Revoke a certificate, or all that a name has."""
        access = self._guard.require_access()
        revoked = await run_to_end(access.revoke, request.which, by=caller_said())
        return pb.RevokeResponse(
            serials=revoked.serials, made=revoked.made, is_foreign=revoked.is_foreign
        )

    # --- the session ---

    async def RemoveParticipant(
        self, request: pb.RemoveParticipantRequest, context: Context
    ) -> pb.RemoveParticipantResponse:
        """Remove a participant from the session for good, with a line in the audit log."""
        await self._driver.submit(RemoveParticipant(request.name))
        await self._note("participant_removed", participant=request.name)
        return pb.RemoveParticipantResponse()

    async def FinishSession(
        self, request: pb.FinishSessionRequest, context: Context
    ) -> pb.FinishSessionResponse:
        """Finish the session with its last model, with a line in the audit log."""
        await self._driver.submit(FinishSession(request.reason))
        await self._note("session_finish_requested", reason=request.reason)
        return pb.FinishSessionResponse()

    async def FollowScript(
        self, request: pb.FollowScriptRequest, context: Context
    ) -> AsyncIterator[pb.FollowScriptResponse]:
        """Tell a script of the session's status, at once and after each change, until it is
        finished."""
        require_session(self._driver.session, request.session_id)
        session_id, last = self._driver.session.session_id, None
        await self._note("script_follows")
        # A session that is over may be followed by another one before this is told of its end.
        while (session := self._driver.session).session_id == session_id:
            status = script_status(session)
            if status != last:
                last = status
                yield self._script_status()  # with the position, which each event moves
                if status.is_finished:
                    return
            else:
                await self._driver.wait_for_change()

    async def ConfigureRound(
        self, request: pb.ConfigureRoundRequest, context: Context
    ) -> pb.ConfigureRoundResponse:
        """Submit a script's decisions about a round, audit them, and return the status."""
        await self._driver.submit(configuration(request))
        await self._note("round_configured", round=request.round)
        return pb.ConfigureRoundResponse(status=self._script_status())

    async def RecordEvaluation(
        self, request: pb.RecordEvaluationRequest, context: Context
    ) -> pb.RecordEvaluationResponse:
        """Submit a script's evaluation of a model, audit it, and return the status."""
        await self._driver.submit(evaluation(request))
        await self._note("model_evaluated", model=request.model)
        return pb.RecordEvaluationResponse(status=self._script_status())

    async def EndScript(
        self, request: pb.EndScriptRequest, context: Context
    ) -> pb.EndScriptResponse:
        """Note that the script has ended its loop or failed; audit it, and return the status."""
        await self._driver.submit(EndScript(request.failure, request.session_id))
        # The audit log is about who did what; the traceback is in the journal.
        await self._note("script_ended", failed=bool(request.failure))
        return pb.EndScriptResponse(status=self._script_status())

    def _script_status(self) -> pb.FollowScriptResponse:
        """The session's status for its script, with the position in the journal and the last round
        that trained."""
        status = script_status(self._driver.session)
        status.position = self._driver.num_records
        records = reversed(self._driver.history.rounds)
        trained = next(
            (one for one in records if one.round == status.model - 1 and one.task is Task.TRAIN),
            None,
        )
        if trained is not None:
            ((message, _),) = round_messages(self._driver, [trained])
            status.last_round.CopyFrom(message)
        return status

    async def _note(self, event: str, **fields: object) -> None:
        """Have the audit log tell what the caller has done. Raises NOT_RECORDED."""
        session_id = self._driver.session.session_id
        await self._guard.note(event, by=caller_said(), session=session_id, **fields)

    async def CopyJournal(
        self, request: pb.CopyJournalRequest, context: Context
    ) -> AsyncIterator[pb.CopyJournalResponse]:
        """Copy the journal, answer with the path of the copy, and keep the objects that it names
        until the caller ends the call."""
        async with contextlib.AsyncExitStack() as until_end:
            try:
                copy = await until_end.enter_async_context(self._journal_copied())
            except (JournalError, OSError) as error:
                raise Unavailable(str(error)) from None
            told = asyncio.create_task(self._tell_long_backup(copy, context.peer()))
            until_end.callback(told.cancel)
            yield pb.CopyJournalResponse(path=str(copy))
            await self._ended.wait()  # or the other side copies the objects, and ends the call

    async def _tell_long_backup(self, copy: Path, peer: str) -> None:
        """Warn every long_backup_s that a backup holds up the removal of objects."""
        lasted_s = 0.0
        while True:
            await asyncio.sleep(self.long_backup_s)  # the interval of the warnings
            lasted_s += self.long_backup_s
            log.warning("backup_holds_up_removal", peer=peer, copy=str(copy), lasted_s=lasted_s)
