"""The Scheduler service: the decider and its journal behind gRPC, beside a Membership service.

Servers and workers are members of the group GROUP. Each change of the group's registry becomes a
command. A server that leaves the registry is dead at once. A worker is waited for a while longer,
and a new process under its name goes on at its clock.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn

import grpc
import msgspec

from xain_foundation.logger import get_logger
from xain_messaging.discovery.server import ServiceServer
from xain_messaging.discovery.service import MembershipService
from xain_parameters.certificates import Certificates
from xain_parameters.errors import (
    Evicted,
    Invalid,
    ParameterError,
    RolledBack,
    TableConflict,
)
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler import reports
from xain_parameters.scheduler.decider import decide, is_saved
from xain_parameters.scheduler.journal import Journal
from xain_parameters.scheduler.manifests import delete_cut, delete_unfinished, write_manifest
from xain_parameters.scheduler.state import Cut, Settings, State, Worker, manifest_of, view_of
from xain_parameters.specs import MAX_SPEC_BYTES, View, cut_folder, decode_table, encoded
from xain_parameters.tables.part import plugins_of
from xain_wire.parameters import scheduler_pb2 as pb
from xain_wire.parameters.scheduler_pb2_grpc import (
    SchedulerServicer,
    add_SchedulerServicer_to_server,
)

log = get_logger(__name__)

GROUP: Final = "parameters"
SERVER, WORKER = "server", "worker"

# A killed process breaks its Watch stream, and is taken for dead when it is not back after GRACE_S;
# a silent process, when its lease is over.
LEASE_S = 2.5
GRACE_S = 0.7
# The lease of a worker: others wait this long for a worker that is gone.
WORKER_LEASE_S = 10.0

RETRY_S = 2.0
DELETE_ATTEMPTS = 3

# New tables are written to disk one by one, and each makes a view for every member.
NEW_TABLES_AT_ONCE = 64
NEW_TABLES_PER_S = 20.0

_STATUSES: Final = {
    TableConflict: grpc.StatusCode.ALREADY_EXISTS,
    Invalid: grpc.StatusCode.INVALID_ARGUMENT,
    Evicted: grpc.StatusCode.ABORTED,
}

Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerService(SchedulerServicer):
    """Add it and its `membership` to a server with add_to(). One event loop has it.

    journal: is closed by its owner, after end().
    worker_lease_s: how long others wait for a worker that is gone.
    """

    def __init__(
        self,
        journal: Journal,
        settings: Settings,
        *,
        lease_s: float = LEASE_S,
        grace_s: float = GRACE_S,
        worker_lease_s: float = WORKER_LEASE_S,
    ) -> None:
        self._journal = journal
        # The first scheduler of a group has no earlier members to wait for.
        settle_s = 0.0 if journal.is_new else lease_s
        self.membership = MembershipService(lease_s, settle_s, grace_s, self._members_changed)
        # When all members of an earlier scheduler have had the time to come back.
        self._settled_at = 0.0 if journal.is_new else self.membership.settled_at
        self._extra_s = max(0.0, worker_lease_s - lease_s)
        self._state = journal.state
        self._changed = asyncio.Event()
        self._view = view_of(self._state)
        self._loads: dict[str, reports.Load] = {}
        self._missing: dict[str, float] = {}  # workers that are gone, since when
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = 0  # the checkpoint whose manifest is being written
        self._why_given_up = (0, "")  # the last checkpoint that failed
        self._new = _Tokens(NEW_TABLES_AT_ONCE, NEW_TABLES_PER_S)
        self._has_ended = False
        self._run(c.Start(settings))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, self._settled_at - time.monotonic()), self._look)

    def add_to(self, server: grpc.aio.Server) -> None:
        self.membership.add_to(server)
        add_SchedulerServicer_to_server(self, server)

    def end(self) -> None:
        """The server is about to stop. Servers and workers find the next one."""
        self._has_ended = True
        self._timer.cancel()
        self.membership.end()
        self._wake()
        for task in self._tasks:
            task.cancel()

    # --- decisions ---

    def _run(self, command: c.Command) -> State:
        """Decide, write down, and tell. Raises ParameterError; then nothing has changed."""
        before = self._state
        events, state = decide(before, command)
        if not events:
            return state
        self._journal.append(events, state)
        self._state = state
        if (state.generation, state.number) != self._view.version:
            self._view = view_of(state)
        if state.generation != before.generation:
            log.warning(
                "rolled_back",
                checkpoint=state.rolled_back_to,
                clock=state.opened,
                generation=state.generation,
            )
        for number, holder in state.lost.items():
            if number not in before.lost:
                log.warning("range_lost", range=number, waits_for=holder or "any server")
        self._write_manifest()
        # Notified after a while, not with each tick: each waiting call would look for each worker.
        if state.gate != before.gate:
            self._wake()
        return state

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _when(self, context: Context, is_so: Callable[[], bool]) -> None:
        """Wait until is_so(). Refuses the call if the service ends before."""
        while not self._has_ended and not is_so():
            await self._changed.wait()
        if self._has_ended:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, "the scheduler is being stopped")

    def _write_manifest(self) -> None:
        """Once all parts of a checkpoint are written: its manifest, then what is too old goes."""
        cut = self._state.cut
        if cut is None or not is_saved(self._state) or self._writing == cut.number:
            return
        self._writing = cut.number
        self._start(self._make_whole(manifest_of(self._state, cut)))

    async def _make_whole(self, cut: Cut) -> None:
        url = self._state.settings.checkpoints
        while self._state.cut is not None and self._state.cut.number == cut.number:
            if self._state.generation != cut.generation:
                return
            try:
                await asyncio.to_thread(write_manifest, url, cut)
            except Exception as error:  # a file system may raise anything
                log.warning("manifest_not_written", checkpoint=cut.number, error=str(error))
                await asyncio.sleep(RETRY_S)  # before it is tried again
                continue
            before = self._state.cuts
            self._run(c.CutWritten(cut.number))
            log.info("checkpoint_whole", checkpoint=cut.number, clock=cut.clock)
            for old in before:
                if old not in self._state.cuts:
                    await self._delete(url, old.folder)
            # Given up for a part that could not be written, or for a server that was lost: servers
            # may have written parts since.
            try:
                await asyncio.to_thread(delete_unfinished, url, self._state)
            except Exception as error:  # a file system may raise anything
                log.warning("given_up_checkpoints_not_deleted", error=str(error))

    def _give_up_cut(self, server: str, failed: c.SaveFailed) -> None:
        """End the open checkpoint, a part of which cannot be written, and remove its folder."""
        before = self._state
        state = self._run(failed)
        if before.cut is None or state.cut == before.cut:
            return  # it has ended before
        log.error(
            "checkpoint_given_up",
            checkpoint=failed.cut,
            range=failed.range,
            server=server,
            error=failed.why,
        )
        self._why_given_up = (failed.cut, f"range {failed.range} at {server!r}: {failed.why}")
        folder = cut_folder(failed.generation, failed.cut)
        self._start(self._delete(state.settings.checkpoints, folder))

    async def _delete(self, url: str, folder: str) -> None:
        for _ in range(DELETE_ATTEMPTS):
            try:
                await asyncio.to_thread(delete_cut, url, folder)
            except Exception as error:  # a server may still be writing a part into the folder
                log.warning("old_checkpoint_not_deleted", folder=folder, error=str(error))
                await asyncio.sleep(RETRY_S)  # before it is tried again
            else:
                return

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- members ---

    def _members_changed(self, group: str) -> None:
        if group == GROUP:
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Make commands of what the registry knows; comes again when something is due."""
        self._timer.cancel()
        if self._has_ended:
            return
        now = time.monotonic()
        roster = self.membership.roster(GROUP)
        for member in roster.values():
            if member.role == SERVER:
                with suppress(Evicted):
                    self._run(c.ServerJoined(member.name, member.address, member.incarnation))
        due = [self._settled_at] if now < self._settled_at else []
        for name, server in self._state.servers.items():
            if not server.is_live or (name in roster and roster[name].role == SERVER):
                continue
            has_left = server.is_leaving and self._state.may_go(name)
            if due and not has_left:
                continue  # it may be on its way back
            if has_left:
                log.info("server_left", server=name)
            else:
                log.warning("server_gone", server=name)
            self._run(c.ServerDied(name))
            self._loads.pop(name, None)
        if not due:
            missing = {}
            for name, worker in self._state.workers.items():
                member_now = roster.get(name)
                if not worker.is_live or (
                    member_now is not None and member_now.incarnation == worker.incarnation
                ):
                    continue
                missing[name] = self._missing.get(name, now)
                if missing[name] + self._extra_s <= now:
                    log.warning("worker_gone", worker=name, clock=worker.ticked)
                    self._run(c.WorkerDied(name))
                    del missing[name]
            self._missing = missing
            due = [since + self._extra_s for since in missing.values()]
        if due:
            left_s = max(0.0, min(due) - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)

    async def _check_member(self, context: Context, role: str, request: Any) -> None:
        member = self.membership.roster(GROUP).get(request.name)
        if member is None and time.monotonic() < self._settled_at:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, "members are coming back")
        if member is None or (member.role, member.incarnation) != (role, request.incarnation):
            await _refuse(
                context,
                grpc.StatusCode.ABORTED,
                f"{request.name!r} is no {role} of this group, or not any more",
            )
        self.membership.on_accepted(context.peer(), (GROUP, request.name))

    # --- the calls ---

    async def Views(
        self, request: pb.ViewsRequest, context: Context
    ) -> AsyncIterator[pb.ViewsResponse]:
        told: View | None = None
        while not self._has_ended:
            changed = self._changed
            if self._view is not told:
                told = self._view
                yield pb.ViewsResponse(view=encoded(told))
                continue  # it may have changed while that went out
            await changed.wait()

    async def Declare(self, request: pb.DeclareRequest, context: Context) -> pb.DeclareResponse:
        if len(request.table) > MAX_SPEC_BYTES:
            text = f"a declaration has {MAX_SPEC_BYTES} bytes at most, not {len(request.table)}"
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, text)
        try:
            table = decode_table(request.table)
            if all(each.name != table.name for each in self._state.tables):
                plugins_of(table)  # one that is refused takes no token from others
                if not self._new.take():
                    text = f"new tables are declared faster than {NEW_TABLES_PER_S:g} in a second"
                    await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            state = self._run(c.DeclareTable(table))
        except msgspec.MsgspecError as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"no table: {error}")
        except ParameterError as error:
            await _refuse_as(context, error)
        known = next(each for each in state.tables if each.name == table.name)
        return pb.DeclareResponse(table=encoded(known))

    async def Tick(self, request: pb.TickRequest, context: Context) -> pb.TickResponse:
        if request.begins:
            await self._check_member(context, WORKER, request)
            staleness = request.staleness if request.HasField("staleness") else None
            stop = request.stop if request.HasField("stop") else None
            command: c.Command = c.WorkerJoined(request.name, request.incarnation, staleness, stop)
        else:
            command = c.Tick(request.name, request.incarnation, request.generation, request.clock)
        if request.HasField("staleness") and request.staleness < 0:
            text = f"the staleness must not be negative, got {request.staleness}"
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, text)
        try:
            self._run(command)
        except RolledBack:
            pass  # the tick does not count; the answer has the clock to go on from
        except ParameterError as error:
            await _refuse_as(context, error)

        def living() -> Worker | None:
            worker = self._state.workers.get(request.name)
            is_same = worker is not None and worker.incarnation == request.incarnation
            return worker if worker is not None and worker.is_live and is_same else None

        # After a rollback too: the others may be behind in the checkpoint.
        await self._when(
            context,
            lambda: living() is None or self._state.may_begin(request.name, request.num_workers),
        )
        worker = living()
        if worker is None:
            await _refuse_as(context, Evicted(f"{request.name!r} was taken for dead"))
        state = self._state
        return pb.TickResponse(
            clock=worker.ticked,
            opened=state.opened,
            generation=state.generation,
            number=state.number,
            cut=0 if state.cut is None else state.cut.number,
        )

    async def End(self, request: pb.EndRequest, context: Context) -> pb.EndResponse:
        with suppress(Evicted):
            self._run(c.WorkerLeft(request.name, request.incarnation))
        return pb.EndResponse()

    async def Wait(self, request: pb.WaitRequest, context: Context) -> pb.WaitResponse:
        def is_over() -> bool:
            is_other = request.generation not in (0, self._state.generation)
            return is_other or self._state.opened >= request.clock

        await self._when(context, is_over)
        state = self._state
        return pb.WaitResponse(
            opened=state.opened, generation=state.generation, number=state.number
        )

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:
        await self._check_member(context, SERVER, request)
        lease_s = self.membership.renew(GROUP, request.name, request.incarnation)
        self._look()  # it may have joined a moment ago
        try:
            report = reports.decode_report(request.report)
        except msgspec.MsgspecError as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"no report: {error}")
        if report.returned is not None:
            returned = report.returned
            self._run(
                c.ServerReturned(request.name, returned.generation, returned.has, returned.lacks)
            )
        for news in report.news:
            if isinstance(news, c.SaveFailed):
                self._give_up_cut(request.name, news)
            else:
                self._run(news)
        if report.is_leaving:
            self._run(c.ServerLeft(request.name))
        if report.load is not None:
            self._loads[request.name] = report.load
        state = self._state
        return pb.ReportResponse(
            may_go=state.may_go(request.name),
            lease_ms=int(1000 * lease_s),
        )

    async def Checkpoint(
        self, request: pb.CheckpointRequest, context: Context
    ) -> pb.CheckpointResponse:
        if not self._state.settings.checkpoints:
            text = "the scheduler was started without --checkpoints"
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, text)
        try:
            state = self._run(c.CheckpointDue())
        except Invalid as error:
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        assert state.cut is not None
        number = state.cut.number
        await self._when(
            context, lambda: self._state.cut is None or self._state.cut.number != number
        )
        cut = next((cut for cut in self._state.cuts if cut.number == number), None)
        if cut is None:
            given_up, why = self._why_given_up
            if given_up != number:
                why = "a server was lost while it was made"
            text = f"checkpoint {number} was given up: {why}"
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, text)
        return pb.CheckpointResponse(cut=number, folder=cut.folder)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        return pb.StatusResponse(status=encoded(self.status()))

    async def RollBack(self, request: pb.RollBackRequest, context: Context) -> pb.RollBackResponse:
        self._run(c.GiveUpLost())
        return pb.RollBackResponse()

    def status(self) -> reports.Status:
        state = self._state
        slowest = min(state.clocks.values(), default=0)
        return reports.Status(
            view=self._view,
            opened=state.opened,
            clocks=state.clocks,
            staleness=dict(Counter(clock - slowest for clock in state.clocks.values())),
            loads=self._loads,
            leaving=tuple(name for name, server in state.servers.items() if server.is_leaving),
            lost=state.lost,
            cuts=tuple(cut.number for cut in state.cuts),
            num_rollbacks=state.num_rollbacks,
        )


class _Tokens:
    """A bucket that holds `most` tokens at the beginning, and gets `per_s` in a second."""

    def __init__(self, most: float, per_s: float) -> None:
        self._most = self._left = most
        self._per_s = per_s
        self._at = time.monotonic()

    def take(self) -> bool:
        """Take a token; False if there is none."""
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class SchedulerServer(ServiceServer[SchedulerService]):
    """The service on a port of its own, from start() to stop(), which closes the journal.

    listen: "HOST:PORT", port 0 for one that is free; see target. tls: None: nothing is encrypted.
    times: lease_s, grace_s and worker_lease_s of SchedulerService.
    start() raises OSError if the port is taken, JournalError, and Invalid for settings that
    contradict each other.
    """

    def __init__(
        self,
        journal: Journal,
        settings: Settings,
        listen: str = "127.0.0.1:0",
        tls: Certificates | None = None,
        **times: float,
    ) -> None:
        credentials = None if tls is None else tls.of_server()
        make = partial(SchedulerService, journal, settings, **times)
        super().__init__(make, listen, credentials)
        self._journal = journal

    def status(self) -> reports.Status:
        """The state of the group. Safe for any thread, once started."""
        assert self._service is not None, "start() comes first"
        return self._service.status()

    def stop(self) -> None:
        super().stop()
        self._journal.close()


async def _refuse_as(context: Context, error: ParameterError) -> NoReturn:
    await _refuse(context, _STATUSES[type(error)], str(error))


async def _refuse(context: Context, code: grpc.StatusCode, why: str) -> NoReturn:
    await context.abort(code, why)
    raise AssertionError("abort() raises")
