"""The scheduler as a worker sees it: clocks."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import grpc

from xain_foundation.logs.logger import get_logger
from xain_foundation.net.grpc_calls import Cancellable
from xain_foundation.security.tls import Certificates
from xain_parameters.errors import Closed, Invalid, ParameterError, Unavailable
from xain_parameters.handlers import (
    SCHEDULER,
    Handler,
    HandlerThread,
    Key,
    Reply,
    Request,
    answer_nothing,
)
from xain_parameters.jobs.parts import Source
from xain_parameters.scheduler.client import (
    AGAIN,
    CALL_S,
    ERRORS,
    RETRY_S,
    Among,
    SchedulerMember,
)
from xain_parameters.scheduler.permissions import WORKER
from xain_parameters.scheduler.reports import decode_divisions, decode_status
from xain_parameters.specs import TableSpec, decode_table, encoded
from xain_wire.parameters import scheduler_pb2 as pb

log = get_logger(__name__)


class Progress(NamedTuple):
    """The position of a worker in its loop over clocks.

    clock: the clock that it may begin. opened: all pushes of clocks below count by now.
    cut: the checkpoint that is being made, whose mark the worker has to pass; 0: none.
    generation: the group's. A clock of another generation is over, and its pushes are dropped.
    """

    clock: int
    opened: int
    cut: int
    generation: int


class Taken(NamedTuple):
    """part: epoch, index and number of parts; None: there is none now. is_void: all was rolled
    back, and the next tick tells the clock to go on from."""

    part: tuple[int, int, int] | None
    is_void: bool = False


class Waited(NamedTuple):
    """is_over: all parts of all epochs are read. is_new: none is under way. divisions: see
    jobs.parts.Data."""

    is_over: bool
    is_new: bool
    divisions: tuple[tuple[int, int], ...]


class WorkerScheduler(SchedulerMember):
    """The scheduler as one worker sees it, from any thread.

    A call with a timeout_s raises Unavailable after it; begin, tick and wait_opened have none, and
    log what they wait for. Any call raises Evicted. is_over: asked while a call waits; True: Closed
    is raised.
    """

    def __init__(
        self,
        target: str,
        name: str,
        tls: Certificates | None = None,
        job: str | None = "",
        *,
        num_workers: int | None = None,
        rank: int | None = None,
        insecure: bool = False,
        handler: Handler = answer_nothing,
    ) -> None:
        """job: None: that of the first table that the worker declares or finds. num_workers: the
        size of the job's group, in which this worker has a rank; None: it has none. rank: the
        one that it asks for. handler: answers requests of other workers' users."""
        super().__init__(target, WORKER, name, tls=tls, job=job or "", insecure=insecure)
        self._handlers = HandlerThread(name, handler)
        self._has_job = job is not None
        self._num_workers = num_workers
        self._rank = rank
        self._slotting = threading.Lock()  # held while this worker takes its slot
        self._has_slot = num_workers is None
        self._entering = threading.Lock()  # held while the job is being found
        self._opened = (0, 0)

    def join(self, timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Join the group, with the open clock from before the view, and take the slot."""
        deadline = time.monotonic() + timeout_s
        # Asked before the view comes, which so has all workers that ended before that clock.
        answer = self._ask("Wait", pb.WaitRequest(job=self.job), timeout_s, is_over)
        self._opened = (answer.generation, answer.opened)
        super().join(deadline - time.monotonic(), is_over)
        if self._has_job:
            self._take_slot(deadline, is_over)

    def _take_slot(
        self, deadline: float | None = None, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Take part in the job's group, once. Raises Invalid where it has another size."""
        with self._slotting:
            if self._has_slot:
                return
            assert self._num_workers is not None
            request = pb.EnterRequest(
                name=self.name,
                incarnation=self.incarnation,
                job=self.job,
                num_workers=self._num_workers,
                rank=self._rank,
            )
            left_s = None if deadline is None else deadline - time.monotonic()
            answer = self._ask("Enter", request, left_s, is_over)
            self._await_view(answer, is_over, deadline)
            self._has_slot = True

    def barrier(
        self, among: Among, timeout_s: float | None, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until all of the job's group wait. Raises Invalid where this worker is not of it."""
        self.enter()
        if among not in ("workers", "all") or self.name not in self.view.ranks:
            raise Invalid(
                f"the worker {self.name!r} has no rank, or no place at a barrier of {among!r}: "
                'connect(..., workers=N), and barrier("workers") or barrier("all")'
            )
        self.wait_barrier(among, lambda: self.view, timeout_s, is_over)

    def close(self) -> None:
        self._handlers.close()
        super().close()

    def _wanted(self) -> pb.ViewsRequest:
        return pb.ViewsRequest(job=self.job, name=self.name, incarnation=self.incarnation)

    def _on_response(self, response: pb.ViewsResponse, job: str) -> None:
        """Give a request in a response to the handlers, or keep the view in it."""
        if not response.HasField("request"):
            super()._on_response(response, job)
            return
        passed = response.request
        key = passed.sender, passed.incarnation, passed.number
        request = Request(passed.head, passed.body, passed.sender)
        self._handlers.put(key, request, partial(self._send_answer, key))

    def _send_answer(self, key: Key, reply: Reply) -> None:
        sender, incarnation, number = key
        request = pb.AnswerRequest(
            name=self.name,
            incarnation=self.incarnation,
            request=pb.PassedRequest(sender=sender, incarnation=incarnation, number=number),
            body=reply.body,
            error=reply.error,
        )
        try:
            self._ask("Answer", request, CALL_S)
        except ParameterError as error:  # if the sender still waits, it asks the next scheduler
            log.info("answer_not_sent", worker=self.name, sender=sender, error=str(error))

    def send(
        self, number: int, to: str, head: int, body: str, timeout_s: float
    ) -> dict[str, Reply]:
        """Send a user's own request to the scheduler, to workers of the job, or to both; returns
        the reply of each. One that has not answered within timeout_s has an error in its place.

        number: with this worker's name and incarnation it names the request. to: "scheduler",
        "workers", "all", or the name of a worker. Raises Invalid if there is no such worker.
        """
        deadline = time.monotonic() + timeout_s
        passed = pb.PassedRequest(
            sender=self.name,
            incarnation=self.incarnation,
            number=number,
            head=head,
            body=body,
        )
        request = pb.SendRequest(job=self.job, to=to, request=passed)
        replies: dict[str, Reply] = {}
        asked: list[str] = []
        while True:
            self._check(lambda: False)
            left_s = max(0.1, deadline - time.monotonic())
            try:
                with self._channel.stub() as stub:
                    call = Cancellable(stub.Send(request, timeout=left_s))
                    try:
                        for response in call.call:
                            asked = list(response.asked) or asked
                            if response.name:
                                replies[response.name] = Reply(response.body, response.error)
                    except BaseException:  # an interrupt too
                        call.cancel()
                        raise
                return {name: replies[name] for name in asked}
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
                failed: Any = error
            self._check(lambda: False)
            if not isinstance(failed, grpc.RpcError):
                raise Closed("the connection to the scheduler was closed")
            code, why = failed.code(), failed.details() or ""
            if code not in AGAIN:
                raise ERRORS.get(code, Unavailable)(why)
            if time.monotonic() + RETRY_S > deadline:
                break
            self._ended.wait(RETRY_S)
        is_silent = asked and code is grpc.StatusCode.DEADLINE_EXCEEDED
        reason = "no answer" if is_silent else self._why_away(why)
        nothing = Reply(error=f"{reason}; given up after {timeout_s:g} s")
        return {name: replies.get(name, nothing) for name in asked or [SCHEDULER]}

    def declare(self, table: TableSpec, timeout_s: float) -> TableSpec:
        """The table with its number; the view has it. Raises TableConflict, Invalid."""
        return self._table(pb.DeclareRequest(table=encoded(table)), timeout_s)

    def find(self, name: str, timeout_s: float) -> TableSpec:
        """Return the table of this name. Raises Invalid if there is none."""
        if not self._has_job:  # it enters the job of the table
            return self._table(pb.DeclareRequest(find=name), timeout_s)
        tables = {table.name: table for table in self.view.tables}
        if name in tables:
            return tables[name]
        raise Invalid(f"there is no table {name!r}; there are: {', '.join(tables) or 'none'}")

    def enter(self) -> None:
        """Enter the job of workers that name none and have no table, unless this one has one."""
        with self._entering:
            self._has_job = True
        self._take_slot()

    def checkpoint(self, timeout_s: float, job: str | None = None) -> int:
        """Make a checkpoint of this worker's job."""
        return super().checkpoint(timeout_s, self.job if self._has_job else job)

    def _table(self, request: pb.DeclareRequest, timeout_s: float) -> TableSpec:
        """Declare a table, and wait until the view has it. The first declaration makes the worker's
        job. Raises Unavailable."""
        deadline = time.monotonic() + timeout_s
        with nullcontext() if self._has_job else self._entering:
            if self._has_job:
                request.job = self.job
            answer = self._ask("Declare", request, timeout_s)
            if not self._has_job and answer.job != self.job:
                # Asked before the view comes; see join().
                opened = self._ask("Wait", pb.WaitRequest(job=answer.job), timeout_s)
                self._opened = (opened.generation, opened.opened)
                with self._changed:
                    self.job = answer.job
                if self._stream is not None:
                    self._stream.cancel()  # the next one is that of the job
            self._has_job = True
        self._take_slot(deadline)
        declared = decode_table(answer.table)
        with self._changed:
            has_come = self._changed.wait_for(
                lambda: (
                    (self._view_job == self.job and self.view.table(declared.number) is not None)
                    or self._ended.is_set()
                ),
                max(0.1, deadline - time.monotonic()),
            )
        self._check(lambda: False)
        if not has_come:
            raise Unavailable(f"the scheduler at {self.target} does not tell its view")
        return declared

    @property
    def opened(self) -> tuple[int, int]:
        """Generation and clock; all pushes of clocks below counted when this worker connected."""
        return self._opened

    def opened_now(self, timeout_s: float) -> tuple[int, int]:
        """Generation and clock, asked for now."""
        return self._ask_opened(pb.WaitRequest(job=self.job), timeout_s)

    def wait_opened(
        self, clock: int, generation: int, is_over: Callable[[], bool]
    ) -> tuple[int, int]:
        """Wait until pushes below `clock` count, or a rollback. Returns generation and clock."""
        request = pb.WaitRequest(clock=clock, generation=generation, job=self.job)
        return self._ask_opened(request, None, is_over)

    def _ask_opened(
        self,
        request: pb.WaitRequest,
        timeout_s: float | None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> tuple[int, int]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        answer = self._ask("Wait", request, timeout_s, is_over, self._say_waiting)
        self._await_view(answer, is_over, deadline)
        return answer.generation, answer.opened

    @property
    def worker(self) -> str:
        return self.name

    def begin(
        self,
        staleness: int | None,
        num_workers: int = 1,
        is_over: Callable[[], bool] = lambda: False,
        stop: int | None = None,
        *,
        all_here: bool = False,
    ) -> Progress:
        """Begin a loop over clocks, when there are num_workers, or all of the job's group that are
        there, and wait until its first clock may
        begin. Raises Invalid for a new worker whose loop would end before that clock."""
        self.enter()
        request = pb.TickRequest(
            name=self.name,
            incarnation=self.incarnation,
            job=self.job,
            begins=True,
            staleness=staleness,
            num_workers=num_workers,
            stop=stop,
            all_here=all_here,
        )
        return self._tick_once(request, is_over)

    def tick(
        self, clock: int, generation: int, is_over: Callable[[], bool] = lambda: False
    ) -> Progress:
        """Complete a clock, and wait until the next may begin: an earlier one after a rollback."""
        request = pb.TickRequest(
            name=self.name,
            incarnation=self.incarnation,
            job=self.job,
            clock=clock,
            generation=generation,
        )
        return self._tick_once(request, is_over)

    def end(self) -> None:
        """End the loop over clocks: nobody waits for this worker any more."""
        request = pb.EndRequest(name=self.name, incarnation=self.incarnation, job=self.job)
        self._ask("End", request, CALL_S)

    def take(
        self,
        data: str,
        source: Source,
        clock: int,
        generation: int,
        done: tuple[int, int] | None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Taken:
        """Take the next part of the job's data, at a clock of a loop. done: the part that was read
        last, in complete clocks. Raises Invalid where other workers have other data."""
        request = self._take_request(data, source)
        request.clock, request.generation = clock, generation
        if done is not None:
            request.has_done = True
            request.done_epoch, request.done_index = done
        answer = self._ask("Take", request, None, is_over)
        part = (answer.epoch, answer.index, answer.num_parts) if answer.num_parts else None
        return Taken(part, is_void=answer.generation != generation)

    def wait_part(
        self, data: str, source: Source, is_over: Callable[[], bool] = lambda: False
    ) -> Waited:
        """Wait, in no loop, until there is a part to take, or all are read."""
        self.enter()
        with self._slotting:
            if self._num_workers is None:
                self._num_workers, self._has_slot = 1, False
        self._take_slot()
        request = self._take_request(data, source)
        request.waits = True
        answer = self._ask("Take", request, None, is_over, self._say_waiting)
        divisions = decode_divisions(answer.divisions)
        return Waited(answer.is_over, answer.is_new, divisions)

    def _take_request(self, data: str, source: Source) -> pb.TakeRequest:
        return pb.TakeRequest(
            name=self.name,
            incarnation=self.incarnation,
            job=self.job,
            data=data,
            source=encoded(source),
        )

    def _tick_once(self, request: pb.TickRequest, is_over: Callable[[], bool]) -> Progress:
        """Tell a clock or a begin, and wait until the next clock may begin."""
        answer = self._ask(
            "Tick",
            request,
            None,
            is_over,
            lambda: self._say_waiting(request.num_workers, begins=request.begins),
        )
        self._await_view(answer, is_over)
        return Progress(answer.clock, answer.opened, answer.cut, answer.generation)

    def _await_view(
        self,
        answer: pb.TickResponse | pb.WaitResponse | pb.EnterResponse,
        is_over: Callable[[], bool],
        deadline: float | None = None,
    ) -> None:
        """Wait for a view as new as an answer: servers that hear of a clock from this worker must
        know which workers had ended before it opened."""
        version = (answer.generation, answer.number)
        while self._view_job != self.job or self.view.version < version:
            self._check(is_over)
            if deadline is not None and time.monotonic() > deadline:
                raise Unavailable(f"the scheduler at {self.target} does not tell its view")
            self.newer_view(self.view.version, RETRY_S)

    def _say_waiting(self, num_workers: int = 0, *, begins: bool = False) -> None:
        """Log the workers that this one waits for. num_workers: that are to begin with it."""
        try:
            with self._channel.stub() as stub:
                answer = stub.Status(pb.StatusRequest(), timeout=CALL_S)
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
            log.warning("scheduler_away", scheduler=self.target, error=str(error))
            return
        job = decode_status(answer.status).jobs.get(self.job)
        clocks = {} if job is None else job.clocks
        if begins and job is not None and not job.opened:
            num_workers = max(num_workers, job.view.num_workers)
        if len(clocks) < num_workers:
            there = f"{len(clocks)} of {num_workers}"
            log.info("waiting_for_workers", worker=self.name, there=there)
        elif clocks:
            slowest = min(clocks, key=clocks.__getitem__)
            log.info(
                "waiting_for_workers",
                worker=self.name,
                clock=clocks.get(self.name),
                slowest=slowest,
                slowest_clock=clocks[slowest],
            )
