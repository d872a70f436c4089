"""The scheduler as a server sees it: reports, and the lease that each renews."""

import threading
import time
from collections.abc import Callable, Collection

import grpc
from msgspec.structs import replace

from xain_foundation.logs.logger import get_logger
from xain_foundation.security.tls import Certificates
from xain_parameters.scheduler.client import CALL_S, RETRY_S, SchedulerMember
from xain_parameters.scheduler.commands import LearnerWhole, RangeSaved, SaveFailed
from xain_parameters.scheduler.permissions import SERVER
from xain_parameters.scheduler.reports import Load, Report, Returned
from xain_parameters.specs import View, decode_view, encoded, job_of
from xain_wire.parameters import scheduler_pb2 as pb

REPORT_S = 0.5
GONE_S = 5.0  # longer than the lease of a member that the scheduler could not hear leaving

log = get_logger(__name__)


class ServerScheduler(SchedulerMember):
    """The scheduler as a server sees it. What is reported is sent from a thread, until it has come.

    view: the last one that has come, of any job: all have the addresses of the servers.
    on_jobs: called with the numbers of all jobs, after their views, when there are others than
        before. load: by job, asked for before each report. on_alive: called with `alive_until`
        after each.
    """

    def __init__(
        self,
        target: str,
        name: str,
        address: str,
        on_view: Callable[[View], None],
        *,
        on_jobs: Callable[[Collection[int]], None] = lambda jobs: None,
        load: Callable[[], dict[int, Load]] | None = None,
        on_alive: Callable[[float], None] = lambda until: None,
        tls: Certificates | None = None,
        insecure: bool = False,
    ) -> None:
        super().__init__(target, SERVER, name, address, on_view, tls, insecure=insecure)
        self.alive_until = 0.0  # monotonic; the scheduler takes us for alive until then
        self._on_jobs = on_jobs
        self._telling = threading.Lock()  # views and jobs are told in the order that they came in
        self._has_all = False  # views of all jobs have come
        self._by_job: dict[int, View] = {}
        self._load = load
        self._on_alive = on_alive
        self._lock = threading.Lock()
        self._waiting = Report()
        self._returned: dict[int, Returned] = {}  # to be reported, by job
        self._has_news = threading.Event()
        self._may_go = threading.Event()

    def join(self, timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        super().join(timeout_s, is_over)
        self._start(self._report)

    def tell_again(self) -> None:
        """Call on_view and on_jobs with what has come so far."""
        with self._telling:
            for view in self._by_job.values():
                if self._on_view is not None:
                    self._on_view(view)
            if self._has_all:
                self._on_jobs(frozenset(self._by_job))

    def _wanted(self) -> pb.ViewsRequest:
        return pb.ViewsRequest(all=True)

    def _on_response(self, response: pb.ViewsResponse, job: str) -> None:
        """Keep a newer view or the jobs in a response, and call on_view or on_jobs."""
        with self._telling:
            if response.jobs:
                jobs = frozenset(response.jobs)
                self._by_job = {n: view for n, view in self._by_job.items() if n in jobs}
                self._has_all = True
                self._on_jobs(jobs)
                return
            view = decode_view(response.view)
            known = self._by_job.get(view.job)
            if known is not None and view.version <= known.version:
                return
            self._by_job[view.job] = view
            with self._changed:
                self._view = view
                self._changed.notify_all()
            if self._on_view is not None:
                self._on_view(view)

    def report(self, news: LearnerWhole | RangeSaved | SaveFailed) -> None:
        with self._lock:
            self._waiting = replace(self._waiting, news=(*self._waiting.news, news))
        self._has_news.set()

    def report_returned(self, generation: int, has: dict[int, int], lacks: dict[int, int]) -> None:
        """Report which ranges of a job that have no server this server has, and which not."""
        with self._lock:
            job = job_of(min(has | lacks))
            self._returned[job] = Returned(generation, has, lacks)
        self._has_news.set()

    def leave(self, timeout_s: float) -> bool:
        """Have the ranges moved away, leave the group, and wait for GONE_S at most until the
        scheduler lists this server no more; then close(). Returns whether the ranges were moved in
        timeout_s. The only server does not wait for that."""
        is_alone = not self.view.addresses.keys() - {self.name}
        with self._lock:
            self._waiting = replace(self._waiting, is_leaving=True)
        self._may_go.clear()
        self._has_news.set()
        has_moved = self._may_go.wait(0 if is_alone else timeout_s)
        if self._membership is not None:
            self._membership.leave()
            with self._changed:
                self._changed.wait_for(
                    lambda: self.name not in self.view.addresses or self._ended.is_set(), GONE_S
                )
        self.close()
        return has_moved

    def close(self) -> None:
        self._ended.set()
        self._has_news.set()
        super().close()

    def _report(self) -> None:
        """Tell the scheduler what has changed and that the server is alive, until it ends; the
        thread of the reports. What could not be sent is sent with the next report."""
        while not self._ended.is_set():
            self._has_news.clear()
            with self._lock:
                returned, self._returned = self._returned, {}
                sent = replace(self._waiting, returned=tuple(returned.values()))
                # Each report of a leaving server says so: the scheduler may be another one by now.
                self._waiting = Report(is_leaving=sent.is_leaving)
            if self._load is not None:
                sent = replace(sent, loads=self._load())
            began = time.monotonic()
            try:
                request = pb.ReportRequest(
                    name=self.name, incarnation=self.incarnation, report=encoded(sent)
                )
                with self._channel.stub() as stub:
                    answer = stub.Report(request, timeout=CALL_S)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
                log.debug("report_not_sent", scheduler=self.target, error=str(error))
                with self._lock:
                    self._waiting = _merged(sent, self._waiting)
                    self._returned = {**returned, **self._returned}
                self._ended.wait(RETRY_S)
                continue
            self.alive_until = began + answer.lease_ms / 1000
            self._on_alive(self.alive_until)
            if sent.is_leaving and answer.may_go:
                self._may_go.set()
            self._has_news.wait(RETRY_S if sent.is_leaving else REPORT_S)


def _merged(sent: Report, newer: Report) -> Report:
    """The next report: a report that was not delivered, and the news since then."""
    return Report(
        news=(*sent.news, *newer.news),
        is_leaving=sent.is_leaving or newer.is_leaving,
    )
