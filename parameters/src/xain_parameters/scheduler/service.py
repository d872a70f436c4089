"""The Scheduler service: the decider and its journal behind gRPC, beside a Membership service.

Servers and workers are members of the group GROUP. Each change of the group's registry becomes a
command. A server that leaves the registry is dead at once. A worker is waited for a while longer,
and a new process under its name goes on at its clock.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Final, NoReturn

import grpc
import msgspec

from xain_foundation.logs.logger import get_logger
from xain_foundation.names import shortened
from xain_foundation.security.callers import Callers
from xain_foundation.security.tls import Certificates
from xain_foundation.settings.fields import is_loopback
from xain_membership.permissions import names_of
from xain_membership.server import ServiceServer
from xain_membership.service import MembershipService
from xain_parameters.errors import (
    Evicted,
    Invalid,
    ParameterError,
    RolledBack,
    TableConflict,
    Unavailable,
)
from xain_parameters.handlers import (
    ALL,
    SCHEDULER,
    WORKERS,
    Handler,
    HandlerThread,
    Key,
    Reply,
    Request,
    answer_nothing,
    check_request,
    shown_names,
)
from xain_parameters.jobs.absences import Absences
from xain_parameters.jobs.parts import Data
from xain_parameters.jobs.slots import NO_RANK
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler import reports
from xain_parameters.scheduler.decider import decide, has_part, is_saved, job_with
from xain_parameters.scheduler.journal import Journal
from xain_parameters.scheduler.manifests import delete_cut, delete_unfinished, write_manifest
from xain_parameters.scheduler.permissions import GROUP, ROLE_OF, ROLES, SERVER, WORKER
from xain_parameters.scheduler.relay import Receiver, Relay
from xain_parameters.scheduler.state import Cut, Job, Settings, State, manifest_of, view_of
from xain_parameters.specs import (
    MAX_SPEC_BYTES,
    View,
    cut_folder,
    decode_table,
    encoded,
    is_unnamed,
)
from xain_parameters.tables.part import plugins_of
from xain_wire.messaging import membership_pb2 as mpb
from xain_wire.parameters import scheduler_pb2 as pb
from xain_wire.parameters.scheduler_pb2_grpc import (
    SchedulerServicer,
    add_SchedulerServicer_to_server,
)

log = get_logger(__name__)


# A killed process breaks its Watch stream, and is taken for dead when it is not back after GRACE_S;
# a silent process, when its lease is over.
LEASE_S = 2.5
GRACE_S = 0.7
# The lease of a worker: others wait this long for a worker that is gone.
WORKER_LEASE_S = 10.0

# Waits for a worker: that it ticks, and that it comes back to its rank.
_LOOP, _SLOT = "loop", "slot"

RETRY_S = 2.0
DELETE_ATTEMPTS = 3

# New tables, and jobs that begin without one, are written to disk one by one, and each makes a view
# for every member.
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
    tls: of its port: members act in the names that their certificates say.
    handler: answers requests of workers' users, see handlers.Handler.
    """

    def __init__(
        self,
        journal: Journal,
        settings: Settings,
        *,
        lease_s: float = LEASE_S,
        grace_s: float = GRACE_S,
        worker_lease_s: float = WORKER_LEASE_S,
        tls: Certificates | None = None,
        handler: Handler = answer_nothing,
    ) -> None:
        self._journal = journal
        self._callers = None if tls is None else tls.callers
        self.address = ""  # that the port listens on; for the status
        # The first scheduler of a group has no earlier members to wait for.
        settle_s = 0.0 if journal.is_new else lease_s
        self.membership = _Members(lease_s, settle_s, grace_s, self._members_changed, tls)
        # When all members of an earlier scheduler have had the time to come back.
        self._settled_at = 0.0 if journal.is_new else self.membership.settled_at
        # Workers in a loop, or with a slot: (what, job, name).
        self._absences = Absences[tuple[str, str, str]](lease_s, worker_lease_s)
        self._state = journal.state
        self._changed = asyncio.Event()
        self._views: dict[str, View] = {}  # the newest of each job
        self._loads: dict[str, dict[int, reports.Load]] = {}  # by server and job
        self._tasks: set[asyncio.Task[None]] = set()
        # The checkpoint whose manifest is being written, and the last one that failed, by number of
        # the job.
        self._writing: dict[int, int] = {}
        self._why_given_up: dict[int, tuple[int, str]] = {}
        self._new = _Tokens(NEW_TABLES_AT_ONCE, NEW_TABLES_PER_S)
        self._handlers = HandlerThread(SCHEDULER, handler)
        self._relay = Relay(self._wake)
        self._has_ended = False
        self._run(c.Start(settings))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, self._settled_at - time.monotonic()), self._run_due)

    def add_to(self, server: grpc.aio.Server) -> None:
        self.membership.add_to(server)
        add_SchedulerServicer_to_server(self, server)

    def end(self) -> None:
        """End the service before its server stops: calls that wait are refused."""
        self._has_ended = True
        self._timer.cancel()
        self.membership.end()
        self._handlers.close()
        self._relay.end()
        self._wake()
        for task in self._tasks:
            task.cancel()

    # --- decisions ---

    def _run(self, command: c.Command) -> State:
        """Decide a command, journal its events, and wake calls that wait. Raises ParameterError;
        then nothing has changed."""
        before = self._state
        events, state = decide(before, command)
        if not events:
            return state
        self._journal.append(events, state)
        self._state = state
        is_open = False  # a worker that waits may go on
        for name, job in state.jobs.items():
            old = before.jobs.get(name)
            if job is not old:
                # Told after a while, not with each tick: each waiting call would look for each
                # worker.
                is_open |= old is None or job.gate != old.gate
                self._tell(name, job, old)
        if is_open or len(state.jobs) != len(before.jobs):
            self._wake()
        return state

    def _tell(self, name: str, job: Job, before: Job | None) -> None:
        """Log rollbacks and lost ranges of a job, and finish its checkpoint."""
        if before is not None and job.generation != before.generation:
            log.warning(
                "rolled_back",
                job=name,
                checkpoint=job.rolled_back_to,
                clock=job.opened,
                generation=job.generation,
            )
        for number, holder in job.lost.items():
            if before is None or number not in before.lost:
                waits_for = holder or "any server"
                log.warning("range_lost", job=name, range=number, waits_for=waits_for)
        self._write_manifest(name, job)

    def _view(self, name: str) -> View:
        """The newest view of a job, kept until another is newer; of no job, a new one each time."""
        known, job = self._views.get(name), self._state.jobs.get(name)
        if job is None:
            self._views.pop(name, None)
            return view_of(self._state, name)
        if known is None or (known.job, known.version) != (job.job, (job.generation, job.number)):
            known = self._views[name] = view_of(self._state, name)
        return known

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _when(self, context: Context, is_so: Callable[[], bool]) -> None:
        """Wait until is_so(). Refuses the call if the service ends before."""
        while not self._has_ended and not is_so():
            await self._changed.wait()
        if self._has_ended:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, "the scheduler is being stopped")

    def _write_manifest(self, name: str, job: Job) -> None:
        """Begin to write the manifest of a checkpoint all of whose parts are saved."""
        cut = job.cut
        if cut is None or not is_saved(job) or self._writing.get(job.job) == cut.number:
            return
        self._writing[job.job] = cut.number
        self._start(self._make_whole(name, manifest_of(job, cut)))

    async def _make_whole(self, name: str, cut: Cut) -> None:
        """Write the manifest of a checkpoint whose parts are all saved, and delete older
        checkpoints and unfinished ones."""
        url = self._state.settings.checkpoints
        while (job := self._job_making(name, cut)) is not None:
            try:
                await asyncio.to_thread(write_manifest, url, cut)
            except Exception as error:  # a file system may raise anything
                log.warning("manifest_not_written", checkpoint=cut.number, error=str(error))
                await asyncio.sleep(RETRY_S)  # before it is tried again
                continue
            if self._job_making(name, cut) is None:
                return
            after = self._run(c.CutWritten(cut.number, job=name)).jobs[name]
            log.info("checkpoint_whole", job=name, checkpoint=cut.number, clock=cut.clock)
            for old in job.cuts:
                if old not in after.cuts:
                    await self._delete_checkpoint(url, old.folder)
            # Given up for a part that could not be written, or for a server that was lost: servers
            # may have written parts since.
            try:
                await asyncio.to_thread(delete_unfinished, url, after)
            except Exception as error:  # a file system may raise anything
                log.warning("given_up_checkpoints_not_deleted", error=str(error))

    def _job_making(self, name: str, cut: Cut) -> Job | None:
        """Return the job while it makes this checkpoint, else None."""
        job = self._state.jobs.get(name)
        if job is None or job.cut is None:
            return None
        made = (job.job, job.generation, job.cut.number)
        return job if made == (cut.job, cut.generation, cut.number) else None

    def _give_up_cut(self, server: str, failed: c.SaveFailed) -> None:
        """End the open checkpoint, a part of which cannot be written, and remove its folder."""
        name = self._state.name_of(failed.range)
        if name is None:
            return
        before = self._state.jobs[name]
        state = self._run(failed)
        if before.cut is None or state.jobs[name].cut == before.cut:
            return  # it has ended before
        log.error(
            "checkpoint_given_up",
            job=name,
            checkpoint=failed.cut,
            range=failed.range,
            server=server,
            error=failed.why,
        )
        why = f"range {failed.range} at {server!r}: {failed.why}"
        self._why_given_up[before.job] = (failed.cut, why)
        folder = cut_folder(failed.generation, failed.cut, before.job)
        self._start(self._delete_checkpoint(state.settings.checkpoints, folder))

    async def _delete_checkpoint(self, url: str, folder: str) -> None:
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
            asyncio.get_running_loop().call_soon(self._run_due)
            # A worker that came back gets its requests again.
            asyncio.get_running_loop().call_soon(self._wake)

    def _run_due(self) -> None:
        """Decide about members that came or are gone; a timer repeats it when one is due."""
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
            members = {name: member.incarnation for name, member in roster.items()}
            for what, job_name, name in self._absences.dead(now, self._awaited(), members):
                if what == _LOOP:
                    clock = self._state.jobs[job_name].workers[name].ticked
                    log.warning("worker_gone", worker=name, job=job_name, clock=clock)
                    self._run(c.WorkerDied(name, job=job_name))
                else:
                    self._run(c.WorkerGone(name, job=job_name))
            self._relay.keep({member.name: member.incarnation for member in roster.values()})
            next_due = self._absences.next_due(now)
            due = [] if next_due is None else [next_due]
        if due:
            left_s = max(0.0, min(due) - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(left_s, self._run_due)

    def _awaited(self) -> dict[tuple[str, str, str], tuple[str, int]]:
        """The processes of workers whose ends matter: name and incarnation."""
        awaited = {}
        for job_name, job in self._state.jobs.items():
            for name, worker in job.workers.items():
                if worker.is_live:
                    awaited[_LOOP, job_name, name] = (name, worker.incarnation)
            for name, slot in job.slots.items():
                if not slot.is_gone:
                    awaited[_SLOT, job_name, name] = (name, slot.incarnation)
        return awaited

    async def _require_name(self, context: Context, role: str, name: str) -> None:
        """Refuse a call in a name that is not the caller's."""
        if self._callers is not None:
            await _require_name(self._callers, context, role, name)

    async def _check_member(self, context: Context, role: str, name: str, incarnation: int) -> None:
        """Refuse a call of one that is no member, and keep a member's connection."""
        member = self.membership.roster(GROUP).get(name)
        if member is None and time.monotonic() < self._settled_at:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, "members are coming back")
        if member is None or (member.role, member.incarnation) != (role, incarnation):
            await _refuse(
                context,
                grpc.StatusCode.ABORTED,
                f"{name!r} is no {role} of this group, or not any more",
            )
        self.membership.on_accepted(context.peer(), (GROUP, name))

    # --- the calls ---

    async def Views(
        self, request: pb.ViewsRequest, context: Context
    ) -> AsyncIterator[pb.ViewsResponse]:
        """Tell the view of a job now and after each change, and pass requests to a worker."""
        told: dict[str, View] = {}
        told_jobs: set[int] = set()
        has_begun = False
        receiver: Receiver | None = None
        sent: dict[Key, pb.PassedRequest] = {}
        if request.name:
            await self._require_name(context, WORKER, request.name)
            receiver = self._receiver(request)
        while not self._has_ended:
            changed = self._changed
            if request.name and (receiver is None or not self._relay.knows(receiver)):
                receiver = self._receiver(request)  # it was gone, and may be a member again
            # The names are taken at one moment: sending the views below may wait for the receiver.
            names = [*self._state.jobs] if request.all else [request.job]
            is_there = request.job in self._state.jobs
            if has_begun and not is_there:
                text = f"the job {request.job!r} was removed"
                await _refuse(context, grpc.StatusCode.NOT_FOUND, text)
            has_begun = is_there
            views = {name: self._view(name) for name in names}
            newer = [view for name, view in views.items() if _is_newer(view, told.get(name))]
            told = views
            for view in newer:
                yield pb.ViewsResponse(view=encoded(view))
            passed = [] if receiver is None else receiver.unsent(sent)
            for each in passed:
                yield pb.ViewsResponse(request=each)
            jobs = {view.job for view in views.values()}
            if request.all and jobs != told_jobs:
                told_jobs = jobs
                yield pb.ViewsResponse(jobs=sorted(jobs))
            elif not newer and not passed:  # else it may have changed while that went out
                await changed.wait()

    def _receiver(self, request: pb.ViewsRequest) -> Receiver | None:
        """The worker that gets requests with these views; None for one that is no member."""
        member = self.membership.roster(GROUP).get(request.name)
        known = None if member is None else (member.role, member.incarnation)
        if known != (WORKER, request.incarnation) and time.monotonic() >= self._settled_at:
            return None
        return self._relay.receiver(request.name, request.incarnation, request.job)

    async def Send(
        self, request: pb.SendRequest, context: Context
    ) -> AsyncIterator[pb.SendResponse]:
        """Pass a user's request on to those it names, and stream their replies."""
        passed = request.request
        await self._require_name(context, WORKER, passed.sender)
        await self._check_member(context, WORKER, passed.sender, passed.incarnation)
        if time.monotonic() < self._settled_at:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, "members are coming back")
        workers = self._relay.workers(request.job)
        is_asked = request.to in (SCHEDULER, ALL)  # this scheduler
        try:
            check_request(passed.head, passed.body)
            if request.to == SCHEDULER:
                workers = []
            elif request.to not in (WORKERS, ALL):
                if request.to not in workers:
                    text = shown_names(workers) or "none"
                    raise Invalid(
                        f"there is no server and no worker {shortened(request.to)!r} in the job; "
                        f"its workers are: {text}"
                    )
                workers = [request.to]
        except Invalid as error:
            await _refuse_as(context, error)
        others = [SCHEDULER] if is_asked else []
        yield pb.SendResponse(asked=[*others, *workers])
        key = passed.sender, passed.incarnation, passed.number
        if is_asked:
            self._handlers.put(
                key,
                Request(passed.head, passed.body, passed.sender),
                partial(self._answered, asyncio.get_running_loop(), key),
            )
        try:
            async with aclosing(self._relay.send(key, passed, workers, others)) as replies:
                async for name, reply in replies:
                    yield pb.SendResponse(name=name, body=reply.body, error=reply.error)
        except Unavailable as error:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, str(error))

    def _answered(self, loop: asyncio.AbstractEventLoop, key: Key, reply: Reply) -> None:
        """Take the reply of the scheduler's handler, from its thread."""
        with suppress(RuntimeError):  # the loop is closed: the sender asks the next scheduler
            loop.call_soon_threadsafe(self._relay.answered, key, SCHEDULER, reply)

    async def Answer(self, request: pb.AnswerRequest, context: Context) -> pb.AnswerResponse:
        """Take the reply of a worker to a request that Views has brought."""
        await self._require_name(context, WORKER, request.name)
        await self._check_member(context, WORKER, request.name, request.incarnation)
        try:
            check_request(0, request.body)
            check_request(0, request.error)
        except Invalid as error:
            await _refuse_as(context, error)
        passed = request.request
        key = passed.sender, passed.incarnation, passed.number
        self._relay.answered(key, request.name, Reply(request.body, request.error))
        return pb.AnswerResponse()

    async def Declare(self, request: pb.DeclareRequest, context: Context) -> pb.DeclareResponse:
        """Make a table, or find it."""
        if len(request.table) > MAX_SPEC_BYTES:
            text = f"a declaration has {MAX_SPEC_BYTES} bytes at most, not {len(request.table)}"
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, text)
        if request.find:
            # A worker may have entered a job since it asked for the table of any.
            has_job = request.HasField("job")
            name = request.job if has_job else job_with(self._state, request.find)
            job = self._state.jobs.get(name)
            tables = () if job is None else job.tables
            found = next((each for each in tables if each.name == request.find), None)
            if found is None:
                if not has_job:
                    jobs = (job for other, job in self._state.jobs.items() if is_unnamed(other))
                    tables = tuple(each for job in jobs for each in job.tables)
                there = ", ".join(each.name for each in tables) or "none"
                text = f"there is no table {shortened(request.find)!r}; there are: {there}"
                await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, text)
            return pb.DeclareResponse(table=encoded(found), job=name)
        try:
            table = decode_table(request.table)
            has_job = request.HasField("job")
            name = request.job if has_job else job_with(self._state, table.name)
            job = self._state.jobs.get(name)
            if job is None or all(each.name != table.name for each in job.tables):
                plugins_of(table)  # one that is refused takes no token from others
                await self._take_token(context)
            state = self._run(c.DeclareTable(table, job=name))
        except msgspec.MsgspecError as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"no table: {error}")
        except ParameterError as error:
            await _refuse_as(context, error)
        known = next(each for each in state.jobs[name].tables if each.name == table.name)
        return pb.DeclareResponse(table=encoded(known), job=name)

    async def _take_token(self, context: Context) -> None:
        """Refuse a new table or job, if there were too many in a moment."""
        if not self._new.take():
            text = f"new tables and jobs come faster than {NEW_TABLES_PER_S:g} in a second"
            await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, text)

    async def Enter(self, request: pb.EnterRequest, context: Context) -> pb.EnterResponse:
        """Give a worker its slot in the group of its job."""
        await self._require_name(context, WORKER, request.name)
        await self._check_member(context, WORKER, request.name, request.incarnation)
        command = c.WorkerEntered(
            request.name,
            request.incarnation,
            request.num_workers,
            request.rank if request.HasField("rank") else NO_RANK,
            job=request.job,
        )
        try:
            if request.job not in self._state.jobs:
                decide(self._state, command)  # one that is refused takes no token from others
                await self._take_token(context)
            job = self._run(command).jobs[request.job]
        except ParameterError as error:
            await _refuse_as(context, error)
        return pb.EnterResponse(generation=job.generation, number=job.number)

    async def Take(self, request: pb.TakeRequest, context: Context) -> pb.TakeResponse:
        """Give a worker the next part of the job's data, waiting for one if it asks to."""
        await self._require_name(context, WORKER, request.name)
        try:
            source = reports.decode_source(request.source)
        except msgspec.MsgspecError as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"no data: {error}")
        done = (request.done_epoch, request.done_index) if request.has_done else None
        command = c.PartWanted(
            request.name,
            request.incarnation,
            request.generation,
            -1 if request.waits else request.clock,
            request.data,
            source,
            done,
            job=request.job,
        )
        try:
            self._run(command)
        except RolledBack:
            pass  # the answer has the generation
        except ParameterError as error:
            await _refuse_as(context, error)

        def job() -> Job | None:
            job = self._state.jobs.get(request.job)
            return None if job is None or request.data not in job.data else job

        def may_go() -> bool:
            now = job()
            if now is None or has_part(now, command):
                return True
            return now.data[request.data].num_done >= source.num_epochs

        if request.waits:
            await self._when(context, may_go)
        now = job()
        if now is None:
            await _refuse_as(context, Evicted(f"the job {request.job!r} was removed"))
        data = now.data[request.data]
        part = data.part_of(request.name) if request.generation == now.generation else None
        answer = pb.TakeResponse(
            generation=now.generation,
            is_over=data.num_done >= source.num_epochs,
            is_new=data.num_done == data.num_begun,
            divisions=encoded(data.divisions) if request.waits else b"",
        )
        if part is not None and part[0] < source.num_epochs:
            answer.epoch, answer.index = part
            answer.num_parts = data.parts_in(part[0])
        return answer

    async def Tick(self, request: pb.TickRequest, context: Context) -> pb.TickResponse:
        """Note that a worker has completed a clock; answer when it may begin the next one."""
        await self._require_name(context, WORKER, request.name)
        if request.begins:
            await self._check_member(context, WORKER, request.name, request.incarnation)
            staleness = request.staleness if request.HasField("staleness") else None
            stop = request.stop if request.HasField("stop") else None
            command: c.Command = c.WorkerJoined(
                request.name, request.incarnation, staleness, stop, job=request.job
            )
        else:
            command = c.Tick(
                request.name,
                request.incarnation,
                request.generation,
                request.clock,
                job=request.job,
            )
        if request.HasField("staleness") and request.staleness < 0:
            text = f"the staleness must not be negative, got {request.staleness}"
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, text)
        try:
            if request.begins and request.job not in self._state.jobs:
                decide(self._state, command)  # one that is refused takes no token from others
                await self._take_token(context)
            self._run(command)
        except RolledBack:
            pass  # the tick does not count; the answer has the clock to go on from
        except ParameterError as error:
            await _refuse_as(context, error)

        def living() -> Job | None:
            """The job, while the worker is in its loop."""
            job = self._state.jobs.get(request.job)
            worker = None if job is None else job.workers.get(request.name)
            is_same = worker is not None and worker.incarnation == request.incarnation
            return job if worker is not None and worker.is_live and is_same else None

        def may_begin() -> bool:
            job = living()
            return job is None or job.may_begin(
                request.name, request.num_workers, all_here=request.all_here
            )

        # After a rollback too: the others may be behind in the checkpoint.
        await self._when(context, may_begin)
        job = living()
        if job is None:
            await _refuse_as(context, Evicted(f"{request.name!r} was taken for dead"))
        return pb.TickResponse(
            clock=job.workers[request.name].ticked,
            opened=job.opened,
            generation=job.generation,
            number=job.number,
            cut=0 if job.cut is None else job.cut.number,
        )

    async def End(self, request: pb.EndRequest, context: Context) -> pb.EndResponse:
        """Note that a worker has ended its loop: nobody waits for it any more."""
        await self._require_name(context, WORKER, request.name)
        with suppress(Evicted):
            self._run(c.WorkerLeft(request.name, request.incarnation, job=request.job))
        return pb.EndResponse()

    async def Wait(self, request: pb.WaitRequest, context: Context) -> pb.WaitResponse:
        """Answer when all pushes below a clock count."""

        def job() -> Job:
            # One that has not begun, or was removed: its view tells.
            return self._state.jobs.get(request.job) or self._state.new_job

        def is_over() -> bool:
            is_other = request.generation not in (0, job().generation)
            return is_other or job().opened >= request.clock

        await self._when(context, is_over)
        now = job()
        return pb.WaitResponse(opened=now.opened, generation=now.generation, number=now.number)

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:
        """Take a server's heartbeat and the work that it has done; tell it whether it may go."""
        await self._require_name(context, SERVER, request.name)
        await self._check_member(context, SERVER, request.name, request.incarnation)
        lease_s = self.membership.renew(GROUP, request.name, request.incarnation)
        self._run_due()  # it may have joined a moment ago
        try:
            report = reports.decode_report(request.report)
        except msgspec.MsgspecError as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"no report: {error}")
        for returned in report.returned:
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
        if report.loads is not None:
            self._loads[request.name] = report.loads
        state = self._state
        return pb.ReportResponse(
            may_go=state.may_go(request.name),
            lease_ms=int(1000 * lease_s),
        )

    async def Checkpoint(
        self, request: pb.CheckpointRequest, context: Context
    ) -> pb.CheckpointResponse:
        """Make a checkpoint; answer when it is whole."""
        if not self._state.settings.checkpoints:
            text = "the scheduler was started without --checkpoints"
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, text)
        jobs = [name for name, job in self._state.jobs.items() if job.tables]
        if not request.HasField("job") and len(jobs) > 1:
            text = f"name a job; there are {', '.join(map(reports.shown, jobs))}"
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, text)
        name = request.job if request.HasField("job") else (jobs or [""])[0]
        try:
            job = self._run(c.CheckpointDue(job=name)).jobs[name]
        except (Invalid, Evicted) as error:
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        assert job.cut is not None
        made, number = job.job, job.cut.number

        def making() -> Job | None:
            job = self._state.jobs.get(name)
            return None if job is None or job.job != made else job

        def is_over() -> bool:
            job = making()
            return job is None or job.cut is None or job.cut.number != number

        await self._when(context, is_over)
        after = making()
        cuts = () if after is None else after.cuts
        cut = next((cut for cut in cuts if cut.number == number), None)
        if cut is None:
            given_up, why = self._why_given_up.get(made, (0, ""))
            if given_up != number:
                why = "a server was lost while it was made"
            text = f"checkpoint {number} was given up: {why}"
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, text)
        return pb.CheckpointResponse(cut=number, folder=cut.folder)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        """Tell the state of the group."""
        return pb.StatusResponse(status=encoded(self.status()))

    async def RollBack(self, request: pb.RollBackRequest, context: Context) -> pb.RollBackResponse:
        """Roll back to the last checkpoint, and wait no longer for servers with a log."""
        self._run(c.GiveUpLost())
        return pb.RollBackResponse()

    async def RemoveJob(
        self, request: pb.RemoveJobRequest, context: Context
    ) -> pb.RemoveJobResponse:
        """Remove a job that no worker is in, with its tables; its checkpoints stay."""
        try:
            self._run(c.RemoveJob(job=request.job))
        except (Invalid, Evicted) as error:
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        log.info("job_removed", job=request.job)
        return pb.RemoveJobResponse()

    def status(self) -> reports.Status:
        state = self._state
        return reports.Status(
            jobs={
                name: self._job_status(name, job)
                for name, job in state.jobs.items()
                if job.tables or job.clocks or job.slots
            },
            addresses=self._view("").addresses,
            loads={name: reports.total(loads.values()) for name, loads in self._loads.items()},
            leaving=tuple(name for name, server in state.servers.items() if server.is_leaving),
            num_replicas=state.settings.num_replicas,
            has_log=state.settings.has_log,
            in_clear=() if self._callers is not None else self._reached_by_others(),
        )

    def _job_status(self, name: str, job: Job) -> reports.JobStatus:
        slowest = min(job.clocks.values(), default=0)
        loads = (loads[job.job] for loads in self._loads.values() if job.job in loads)
        return reports.JobStatus(
            view=self._view(name),
            opened=job.opened,
            clocks=job.clocks,
            staleness=dict(Counter(clock - slowest for clock in job.clocks.values())),
            load=reports.total(loads),
            lost=job.lost,
            cuts=tuple(cut.number for cut in job.cuts),
            num_rollbacks=job.num_rollbacks,
            data={name: _data_status(data) for name, data in job.data.items()},
        )

    def _reached_by_others(self) -> tuple[str, ...]:
        """Addresses of the group that are not this machine's alone."""
        addresses = [self.address, *self._view("").addresses.values()]
        hosts = [address.rpartition(":")[0] for address in addresses]
        return tuple(
            address
            for address, host in zip(addresses, hosts, strict=True)
            if not is_loopback(host or "localhost")
        )


def _data_status(data: Data) -> reports.DataStatus:
    last = data.epochs.get(data.num_begun - 1, ())
    return reports.DataStatus(
        data.num_done,
        data.num_begun,
        data.source.num_epochs,
        tuple("" if part.is_done else part.holder for part in last),
    )


class _Members(MembershipService):
    """The members of a group, in the roles that their certificates allow."""

    def __init__(
        self,
        lease_s: float,
        settle_s: float,
        grace_s: float,
        on_change: Callable[[str], None],
        tls: Certificates | None,
    ) -> None:
        super().__init__(lease_s, settle_s, grace_s, on_change, names_of(tls))
        self._callers = None if tls is None else tls.callers

    async def Join(self, request: mpb.JoinRequest, context: Context) -> mpb.JoinResponse:
        if self._callers is not None and request.role in (SERVER, WORKER):
            await _require_name(self._callers, context, request.role, request.name)
        return await super().Join(request, context)


async def _require_name(callers: Callers, context: Context, role: str, name: str) -> None:
    identity = callers.of_call(context).identity
    if not identity.speaks_for(name, ROLE_OF[role]):
        why = (
            f"the certificate is that of {identity}, which may not act as the {shortened(role)} "
            f"{shortened(name)!r}"
        )
        await _refuse(context, grpc.StatusCode.UNAUTHENTICATED, why)


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
    insecure: without tls also on a host that other machines reach.
    Raises ValueError for such a host with neither.
    handler: see SchedulerService.
    times: lease_s, grace_s and worker_lease_s of SchedulerService.
    start() raises OSError if the port is taken or the journal unusable, and Invalid for settings
    that contradict each other.
    """

    def __init__(
        self,
        journal: Journal,
        settings: Settings,
        listen: str = "127.0.0.1:0",
        tls: Certificates | None = None,
        *,
        insecure: bool = False,
        handler: Handler = answer_nothing,
        **times: float,
    ) -> None:
        make = partial(SchedulerService, journal, settings, tls=tls, handler=handler, **times)
        super().__init__(make, listen, tls, insecure=insecure, roles=ROLES)
        self._journal = journal

    def status(self) -> reports.Status:
        """The state of the group. Safe for any thread, once started."""
        assert self._service is not None, "start() comes first"
        return self._service.status()

    def start(self) -> None:
        super().start()
        assert self._service is not None
        self._service.address = self.target

    def stop(self) -> None:
        super().stop()
        self._journal.close()


def _is_newer(view: View, told: View | None) -> bool:
    return told is None or (view.job, view.version) != (told.job, told.version)


async def _refuse_as(context: Context, error: ParameterError) -> NoReturn:
    await _refuse(context, _STATUSES[type(error)], str(error))


async def _refuse(context: Context, code: grpc.StatusCode, why: str) -> NoReturn:
    await context.abort(code, why)
    raise AssertionError("abort() raises")
