"""Calls to the scheduler, and members of its group: synchronous, safe for several threads.

A member keeps its membership of the group, and the newest view. Calls go on over a restart of the
scheduler: they are asked again until their time is over, and none does anything twice.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, Self, TypeAlias

import grpc

from xain_foundation.logs.logger import get_logger
from xain_foundation.net.channels import require_private_way, why_unreachable
from xain_foundation.net.current_channel import CurrentChannel
from xain_foundation.net.errors import MessagingError
from xain_foundation.net.grpc_calls import Cancellable
from xain_foundation.security.identity import SCHEDULER
from xain_foundation.security.tls import Certificates
from xain_membership.coordinator import CoordinatorDiscovery
from xain_membership.errors import DiscoveryUnavailable, MembershipLost, NameTaken, TimedOut
from xain_parameters.errors import Closed, Evicted, Invalid, TableConflict, Unavailable
from xain_parameters.handlers import check_member_name
from xain_parameters.scheduler.permissions import GROUP
from xain_parameters.scheduler.reports import Status, decode_status
from xain_parameters.specs import View, decode_view
from xain_wire.parameters import scheduler_pb2 as pb
from xain_wire.parameters.scheduler_pb2_grpc import SchedulerStub

log = get_logger(__name__)

RETRY_S = 0.2
BARRIER_S = 2.0  # of a call at a barrier; then it is made again, for the members that there are
CALL_S = 5.0  # limit of a call that does not wait for others

_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.use_local_subchannel_pool", 1),
)
AGAIN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # too many new tables in a moment
    }
)
ERRORS = {
    grpc.StatusCode.ALREADY_EXISTS: TableConflict,
    grpc.StatusCode.INVALID_ARGUMENT: Invalid,
    grpc.StatusCode.FAILED_PRECONDITION: Unavailable,
    grpc.StatusCode.NOT_FOUND: Evicted,
    grpc.StatusCode.ABORTED: Evicted,
}


# Members that wait at a barrier: the workers of a job that have a rank, the servers of the group,
# or both.
Among: TypeAlias = Literal["workers", "servers", "all"]


class SchedulerCalls:
    """Calls to a scheduler. The caller need not be a member of the group.

    target: "HOST:PORT". tls: None: nothing is encrypted. insecure: without `tls` also on another
    machine. Raises ValueError for another machine with neither.
    """

    wait_s = 5.0  # limit of a call that waits for others; then it is made again
    say_s = 5.0  # between two log records about a scheduler that does not answer

    def __init__(
        self, target: str, tls: Certificates | None = None, *, insecure: bool = False
    ) -> None:
        require_private_way(target, tls, insecure=insecure)
        self.target = target
        self._ended = threading.Event()
        self._lost: Exception | None = None
        self._tls = tls
        self._channel = CurrentChannel[Any](target, _OPTIONS, tls, SchedulerStub, node=SCHEDULER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection to the scheduler. A second call does nothing."""
        self._ended.set()
        self._channel.close()

    def status(self, timeout_s: float) -> Status:
        """Ask for the state of the group. Raises Unavailable, as all calls do, after timeout_s."""
        answer = self._ask("Status", pb.StatusRequest(), timeout_s)
        return decode_status(answer.status)

    def checkpoint(self, timeout_s: float, job: str | None = None) -> int:
        """Make a checkpoint; returns its number when it is whole. job: None for the only one."""
        return int(self._ask("Checkpoint", pb.CheckpointRequest(job=job), timeout_s).cut)

    def remove_job(self, job: str, timeout_s: float) -> None:
        """Remove a job that no worker is in, and its tables."""
        self._ask("RemoveJob", pb.RemoveJobRequest(job=job), timeout_s)

    def roll_back(self, timeout_s: float) -> None:
        """Wait no longer for servers that have ranges in their logs."""
        self._ask("RollBack", pb.RollBackRequest(), timeout_s)

    def _ask(
        self,
        method: str,
        request: Any,
        timeout_s: float | None,
        is_over: Callable[[], bool] = lambda: False,
        say_waiting: Callable[[], None] = lambda: None,
    ) -> Any:
        """Call the scheduler until it answers. timeout_s: None for no end. is_over: asked
        meanwhile. say_waiting: called when a call that waits for others has waited for wait_s."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        told = time.monotonic()
        while True:
            self._check(is_over)
            left_s = self.wait_s if deadline is None else max(0.1, deadline - time.monotonic())
            try:
                with self._channel.stub() as stub:
                    call = getattr(stub, method)
                    asked = Cancellable(call.future(request, timeout=min(self.wait_s, left_s)))
                    try:
                        while not _is_done(asked.call, RETRY_S):
                            if is_over() or self._ended.is_set():
                                self._check(is_over)
                                raise Closed("the connection to the scheduler was closed")
                        return asked.call.result()
                    except BaseException:  # an interrupt too
                        asked.cancel()
                        raise
            except (grpc.RpcError, grpc.FutureCancelledError, ValueError) as error:
                failed: Any = error  # ValueError: the channel is closed
            self._check(is_over)
            if not isinstance(failed, grpc.RpcError):
                raise Closed("the connection to the scheduler was closed")
            code, why = failed.code(), failed.details() or ""
            if code not in AGAIN:
                raise ERRORS.get(code, Unavailable)(why)
            if deadline is not None and time.monotonic() + RETRY_S > deadline:
                raise Unavailable(
                    f"the scheduler at {self.target} does not answer: {self._why_away(why)}"
                )
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                say_waiting()
                continue
            if time.monotonic() - told >= self.say_s:
                told = time.monotonic()
                log.warning("scheduler_away", scheduler=self.target, error=self._why_away(why))
            self._ended.wait(RETRY_S)

    def _why_away(self, details: str) -> str:
        """details: gRPC's, for a scheduler that answers by now."""
        return why_unreachable(self.target, tls=self._tls, node=SCHEDULER) or details

    def _check(self, is_over: Callable[[], bool]) -> None:
        if self._lost is not None:
            raise Evicted(str(self._lost))
        if self._ended.is_set() or is_over():
            raise Closed("the connection to the scheduler was closed")


class SchedulerMember(SchedulerCalls):
    """A member of the group, with the newest view, from join() to close().

    name: one that names a group of members raises Invalid.
    job: whose view it has.
    address: where others reach it; a worker listens nowhere and has any text.
    on_view: called with each newer view, from a thread, one call at a time.
    """

    def __init__(
        self,
        target: str,
        role: str,
        name: str,
        address: str = "-",
        on_view: Callable[[View], None] | None = None,
        tls: Certificates | None = None,
        job: str = "",
        *,
        insecure: bool = False,
    ) -> None:
        check_member_name(name)
        super().__init__(target, tls, insecure=insecure)
        self.name = name
        self.job = job
        self._role = role
        self._address = address
        self._on_view = on_view
        self._discovery = CoordinatorDiscovery(target, tls, insecure=insecure, node=SCHEDULER)
        self._membership: Any = None
        self._view: View | None = None
        self._view_job = job  # the job of the view
        self._changed = threading.Condition()
        self._stream: Cancellable | None = None
        self._threads: list[threading.Thread] = []

    def join(self, timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Become a member, and have a view. Raises Unavailable, and Evicted where another process
        that lives has the name. is_over: asked meanwhile; True: Closed is raised, after CALL_S at
        the latest."""
        deadline = time.monotonic() + timeout_s
        taken: NameTaken | None = None
        while self._membership is None:
            left_s = max(0.1, deadline - time.monotonic())
            try:
                self._check(is_over)
                self._membership = self._discovery.join(
                    GROUP,
                    self._role,
                    self.name,
                    self._address,
                    timeout_s=min(left_s, CALL_S),
                    on_change=lambda roster: None,  # members are in the views
                    on_lost=self._lose,
                )
            except (NameTaken, DiscoveryUnavailable) as error:
                taken = error if isinstance(error, NameTaken) else taken
                if time.monotonic() + RETRY_S > deadline:
                    self.close()
                    if taken is not None:
                        raise Evicted(str(taken)) from None
                    raise Unavailable(str(error)) from None
            except MessagingError as error:
                self.close()
                kind = Evicted if isinstance(error, MembershipLost) else Unavailable
                raise kind(str(error)) from None
        self._start(self._watch_views)
        with self._changed:
            self._changed.wait_for(
                lambda: self._view is not None, max(0.1, deadline - time.monotonic())
            )
        if self._view is None:
            self.close()
            raise Unavailable(f"the scheduler at {self.target} does not tell its view")

    def close(self) -> None:
        """Leave the group at once. May be called again."""
        self._ended.set()
        if self._stream is not None:
            self._stream.cancel()
        if self._membership is not None:
            self._membership.leave()
        super().close()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CALL_S)

    def wait_barrier(
        self,
        among: Among,
        view: Callable[[], View],
        timeout_s: float | None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until all of a job's workers, of the servers, or of both wait at the barrier of
        them. view: of the job; asked again now and then, since members come and go.

        timeout_s: None: without end. Raises Unavailable after it, Evicted and Closed.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        call = self._membership.next_call()
        while True:
            self._check(is_over)
            newest = view()
            num_workers = newest.num_workers - newest.num_gone
            num_servers = len(newest.addresses)
            counts = {"workers": num_workers, "servers": num_servers}
            num_members = counts.get(among, num_workers + num_servers)
            name = among if among == "servers" else f"{among} of job {newest.job}"
            left_s = max(0.1, deadline - time.monotonic())
            try:
                self._membership.barrier(name, max(1, num_members), min(BARRIER_S, left_s), call)
                return
            except TimedOut:
                if time.monotonic() >= deadline:
                    text = f"waited {timeout_s:g} s at the barrier for {num_members} {among}"
                    raise Unavailable(text) from None
                log.info("waiting_at_barrier", member=self.name, among=among, awaited=num_members)
            except DiscoveryUnavailable as error:
                if time.monotonic() + RETRY_S > deadline:
                    raise Unavailable(str(error)) from None
                self._ended.wait(RETRY_S)
            except MessagingError as error:
                self._check(is_over)
                raise Invalid(str(error)) from None

    @property
    def incarnation(self) -> int:
        """Tells the processes of one name apart: a later one has a higher number."""
        return int(self._membership.member.incarnation)

    @property
    def is_lost(self) -> bool:
        """True once the scheduler has taken this member for dead."""
        return self._lost is not None

    @property
    def view(self) -> View:
        """The newest that has come."""
        assert self._view is not None, "join() comes first"
        return self._view

    def newer_view(self, version: tuple[int, int], timeout_s: float) -> View:
        """Wait for a view above `version`, for timeout_s at most. Returns the newest view."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.view.version > version or self._ended.is_set(), timeout_s
            )
        return self.view

    def _lose(self, error: Exception) -> None:
        """End the membership against its will: all calls raise Evicted."""
        self._lost = error
        self._ended.set()
        if self._stream is not None:
            self._stream.cancel()
        with self._changed:
            self._changed.notify_all()

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=f"scheduler-{work.__name__}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _watch_views(self) -> None:
        """Read views from streams until the end."""
        while not self._ended.is_set():
            request = self._wanted()
            try:
                with self._channel.stub() as stub:
                    self._stream = Cancellable(stub.Views(request))
                    if request != self._wanted():
                        self._stream.cancel()  # the change of the job ended the stream before
                    for response in self._stream.call:
                        self._on_response(response, request.job)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
                log.debug("no_views", scheduler=self.target, error=str(error))
                if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.NOT_FOUND:
                    self._lose(Evicted(error.details() or ""))
            if request == self._wanted():
                self._ended.wait(RETRY_S)

    def _wanted(self) -> pb.ViewsRequest:
        return pb.ViewsRequest(job=self.job)

    def _on_response(self, response: pb.ViewsResponse, job: str) -> None:
        """Keep the view in a response if it is newer, and call on_view."""
        view = decode_view(response.view)
        with self._changed:
            known = self._view if self._view_job == job else None
            if job != self.job or (known is not None and view.version <= known.version):
                return  # the stream was ended
            self._view, self._view_job = view, job
            self._changed.notify_all()
        if known is not None and known.job not in (-1, view.job):
            self._lose(Evicted(f"the job {job!r} was removed"))
        if self._on_view is not None:
            self._on_view(view)


def _is_done(call: Any, timeout_s: float) -> bool:
    """Wait for a call; returns whether it has ended within timeout_s."""
    try:
        call.exception(timeout=timeout_s)
    except grpc.FutureTimeoutError:
        return False
    except grpc.FutureCancelledError:
        pass
    return True
