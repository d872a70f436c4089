"""The scheduler as a worker sees it: clocks."""

import time
from collections.abc import Callable
from typing import NamedTuple

import grpc

from xain_foundation.logger import get_logger
from xain_parameters.certificates import Certificates
from xain_parameters.errors import Unavailable
from xain_parameters.scheduler.client import CALL_S, RETRY_S, SchedulerMember
from xain_parameters.scheduler.reports import decode_status
from xain_parameters.scheduler.service import WORKER
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


class WorkerScheduler(SchedulerMember):
    """The scheduler as one worker sees it, from any thread.

    A call with a timeout_s raises Unavailable after it; begin, tick and wait_opened have none, and
    log what they wait for. Any call raises Evicted. is_over: asked while a call waits; True: Closed
    is raised.
    """

    def __init__(self, target: str, name: str, tls: Certificates | None = None) -> None:
        super().__init__(target, WORKER, name, tls=tls)
        self._opened = (0, 0)

    def join(self, timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + timeout_s
        # Asked before the view comes, which so has all workers that ended before that clock.
        answer = self._ask(self._stub.Wait, pb.WaitRequest(), timeout_s, is_over)
        self._opened = (answer.generation, answer.opened)
        super().join(deadline - time.monotonic(), is_over)

    @property
    def opened(self) -> tuple[int, int]:
        """Generation and clock; all pushes of clocks below counted when this worker connected."""
        return self._opened

    def opened_now(self, timeout_s: float) -> tuple[int, int]:
        """Generation and clock, asked for now."""
        return self._opened_at(pb.WaitRequest(), timeout_s)

    def wait_opened(
        self, clock: int, generation: int, is_over: Callable[[], bool]
    ) -> tuple[int, int]:
        """Generation and clock, once all pushes below `clock` count; at once if the generation is
        another."""
        return self._opened_at(pb.WaitRequest(clock=clock, generation=generation), None, is_over)

    def _opened_at(
        self,
        request: pb.WaitRequest,
        timeout_s: float | None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> tuple[int, int]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        answer = self._ask(self._stub.Wait, request, timeout_s, is_over, self._say_waiting)
        self._see(answer, is_over, deadline)
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
    ) -> Progress:
        """Begin a loop over clocks, when there are num_workers, and wait until its first clock may
        begin. Raises Invalid for a new worker whose loop would end before that clock."""
        request = pb.TickRequest(
            name=self.name,
            incarnation=self.incarnation,
            begins=True,
            staleness=staleness,
            num_workers=num_workers,
            stop=stop,
        )
        return self._tick_once(request, is_over)

    def tick(
        self, clock: int, generation: int, is_over: Callable[[], bool] = lambda: False
    ) -> Progress:
        """Complete a clock, and wait until the next one may begin, which is an earlier one after a
        rollback."""
        request = pb.TickRequest(
            name=self.name, incarnation=self.incarnation, clock=clock, generation=generation
        )
        return self._tick_once(request, is_over)

    def end(self) -> None:
        """End the loop over clocks: nobody waits for this worker any more."""
        request = pb.EndRequest(name=self.name, incarnation=self.incarnation)
        self._ask(self._stub.End, request, CALL_S)

    def _tick_once(self, request: pb.TickRequest, is_over: Callable[[], bool]) -> Progress:
        answer = self._ask(
            self._stub.Tick,
            request,
            None,
            is_over,
            lambda: self._say_waiting(request.num_workers if request.begins else 0),
        )
        self._see(answer, is_over)
        return Progress(answer.clock, answer.opened, answer.cut, answer.generation)

    def _see(
        self,
        answer: pb.TickResponse | pb.WaitResponse,
        is_over: Callable[[], bool],
        deadline: float | None = None,
    ) -> None:
        """Wait for a view as new as an answer: servers that hear of a clock from this worker must
        know which workers had ended before it opened."""
        version = (answer.generation, answer.number)
        while self.view.version < version:
            self._check(is_over)
            if deadline is not None and time.monotonic() > deadline:
                raise Unavailable(f"the scheduler at {self.target} does not tell its view")
            self.newer_view(self.view.version, RETRY_S)

    def _say_waiting(self, num_workers: int = 0) -> None:
        """Log the workers that this one waits for. num_workers: that are to begin with it."""
        try:
            answer = self._stub.Status(pb.StatusRequest(), timeout=CALL_S)
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
            log.warning("scheduler_away", scheduler=self.target, error=str(error))
            return
        clocks = decode_status(answer.status).clocks
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
