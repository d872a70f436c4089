"""The process of a server: ServerNode between sockets, disk and scheduler."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from xain_foundation.logs.logger import get_logger
from xain_foundation.security.tls import Certificates
from xain_foundation.settings.fields import require_private
from xain_foundation.threads import num_processors
from xain_parameters.cut import Abandoned
from xain_parameters.cutfile import encoded
from xain_parameters.errors import Evicted, Invalid, ParameterError, Unavailable
from xain_parameters.handlers import Handler, HandlerThread, Reply, Request, answer_nothing
from xain_parameters.messages import Command, Message, Pull, Push, Refused, Said, Several
from xain_parameters.node.cuts import load
from xain_parameters.node.fair_slots import FairSlots
from xain_parameters.node.log import DiskLog
from xain_parameters.node.ports import RangeLog, Source
from xain_parameters.node.protocol import ServerNode
from xain_parameters.replica import Replica
from xain_parameters.scheduler.client import Among
from xain_parameters.scheduler.commands import LearnerWhole, RangeSaved, SaveFailed
from xain_parameters.scheduler.manifests import write_file
from xain_parameters.scheduler.reports import Load
from xain_parameters.scheduler.server_client import ServerScheduler
from xain_parameters.specs import RangeView, View, job_of
from xain_parameters.tables.part import Piece
from xain_parameters.transport.channel import SMALL_BYTES, Channel, connect, hello
from xain_parameters.transport.listener import Listener
from xain_parameters.transport.sections import Sections

TICK_S: Final = 0.05
CONNECT_S: Final = 1.0
RETRY_S: Final = 0.5
JOIN_S: Final = 30.0
FILES_AT_ONCE: Final = 4  # of a job

_CONNECTIONS: Final = (Channel, Sections)
_COUNTED: Final = (Pull, Push, Several)

log = get_logger(__name__)


class _OrFail:
    """End the server if the block raises. Its threads do not go on with half a state, and the group
    takes other servers when the lease is over."""

    def __init__(self, server: "ParameterServer") -> None:
        self._server = server

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        log.error("server_broken", server=self._server.name, exc_info=error)
        self._server._fail(error)
        return True


class ParameterServer:
    """A server of a group, from construction to close().

    scheduler: "HOST:PORT". address: "HOST:PORT" to listen on; port 0 takes a free one.
    advertised: host that others reach this one by; None: that of `address`.
    folder: for the log, which a group with `log = true` needs; a later process of the name finds
        its ranges there.
    tls: for the connections to scheduler, workers and other servers; None: nothing is encrypted.
    insecure: without tls also on a host that other machines reach.
    handler: answers users' own requests, see handlers.Handler. No error of it ends the server.

    Raises Unavailable if the scheduler cannot be reached, Evicted if another process has the name,
    Damaged, and ValueError for a host that other machines reach with neither tls nor insecure.
    """

    # Share of one core for the threads that write a checkpoint, while a worker has asked for
    # anything within idle_s: training goes on at nearly its speed, the checkpoint takes longer.
    save_share = 0.1
    idle_s = 1.0

    def __init__(
        self,
        scheduler: str,
        name: str,
        address: str = "127.0.0.1:0",
        *,
        advertised: str | None = None,
        folder: Path | None = None,
        tls: Certificates | None = None,
        insecure: bool = False,
        handler: Handler = answer_nothing,
        timeout_s: float = JOIN_S,
    ) -> None:
        host = address.rpartition(":")[0]
        require_private(host, is_encrypted=tls is not None, insecure=insecure)
        self.name = name
        self._handlers = HandlerThread(name, handler)
        self._lock = threading.Lock()
        self._channels: dict[str, tuple[str, Channel]] = {}  # to other servers, with the address
        self._connecting: set[str] = set()
        self._or_fail = _OrFail(self)
        self._node: ServerNode | None = None
        self._has_begun = threading.Event()
        self._log: DiskLog | None = None
        self._ended = threading.Event()
        self.why: Exception | None = None
        self._pulled: Counter[int] = Counter()  # rows, by job
        self._pushed: Counter[int] = Counter()
        self._counted: tuple[Counter[int], Counter[int]] = (
            Counter(),
            Counter(),
        )  # at the last report
        self._counted_at = time.monotonic()
        self._served_at = -math.inf  # time of the last request of a worker
        # Slots of the threads that serve requests. A small one is Python nearly all of its time,
        # which one thread at a time can run, and does not wait for the arrays of large ones.
        self._small_slots, self._large_slots = FairSlots(1), FairSlots(num_processors())
        self._num_saving = 0  # threads that write parts of a checkpoint
        # Threads for files, by job: they wait for marks of its workers, or for a file system.
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self._tls = tls
        self._listener = Listener(address, self._on_message, tls=tls)
        self.address = f"{advertised or host}:{self._listener.port}"
        self._scheduler = ServerScheduler(
            scheduler,
            name,
            self.address,
            self._take_view,
            on_jobs=self._keep_jobs,
            load=self._load_now,
            on_alive=self._renew,
            tls=tls,
            insecure=insecure,
        )
        try:
            self._begin(folder, timeout_s)
        except BaseException:  # no other code closes it
            self.close()
            raise
        self._ticker = threading.Thread(target=self._tick, name=f"tick {name}", daemon=True)
        self._ticker.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, folder: Path | None, timeout_s: float) -> None:
        """Join the group, replay the log, and begin to serve."""
        scheduler = self._scheduler
        deadline = time.monotonic() + timeout_s
        scheduler.join(timeout_s)
        # An earlier view names an earlier process of this name.
        while scheduler.view.addresses.get(self.name) != self.address:
            if time.monotonic() > deadline:
                raise Unavailable("the scheduler does not take this server in")
            scheduler.newer_view(scheduler.view.version, RETRY_S)
        node = ServerNode(self.name, self)
        if scheduler.view.has_log:
            if folder is None:
                raise Unavailable("this group keeps logs: start the server with a folder for them")
            self._log = DiskLog(folder, self._synced, self._fail)
            for recovered in self._log.replay():
                node.recovered(*recovered)
        with self._lock:
            self._node = node
        node.renew(scheduler.alive_until)
        scheduler.tell_again()
        self._has_begun.set()

    def leave(self, timeout_s: float) -> bool:
        """Have the ranges moved away, then close. Returns whether they were in this time."""
        has_moved = self._scheduler.leave(timeout_s)
        self.close()
        return has_moved

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the server has ended; returns whether it has. Raises why, if it failed."""
        has_ended = self._ended.wait(timeout_s)
        if has_ended and self.why is not None:
            raise self.why
        return has_ended

    def barrier(
        self, among: Among = "servers", *, job: str = "", timeout_s: float | None = None
    ) -> None:
        """Wait until all servers of the group wait here, or with "all" these and the workers of a
        job with a rank. Raises Invalid for other members or jobs, and Unavailable."""
        if among not in ("servers", "all"):
            raise Invalid(f"a server has no place at a barrier of {among!r}")

        def view() -> View:
            if among == "servers":
                return self._scheduler.view
            jobs = self._scheduler.status(JOIN_S).jobs
            if job not in jobs:
                raise Invalid(f"there is no job {job!r}; there are: {', '.join(jobs) or 'none'}")
            return jobs[job].view

        self._scheduler.wait_barrier(among, view, timeout_s, self._ended.is_set)

    def close(self) -> None:
        """End all connections and threads. A second call does nothing."""
        self._ended.set()
        self._has_begun.set()
        self._scheduler.close()
        self._handlers.close()
        self._listener.close()
        with self._lock:
            channels = list(self._channels.values())
        for _, channel in channels:
            channel.close()
            channel.join()
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            pool.shutdown(cancel_futures=True)
        if self._log is not None:
            self._log.close()

    def _fail(self, error: Exception) -> None:
        """Serve nothing any more: the group goes on without this server."""
        log.error("server_failed", server=self.name, error=str(error))
        if self._ended.is_set():
            return
        self.why = error
        self._ended.set()
        # Workers and servers notice at once; by a thread, since this one may be waited for.
        threading.Thread(target=self.close, name=f"close {self.name}", daemon=True).start()

    # --- the scheduler ---

    def _take_view(self, view: View) -> None:
        node = self._node
        if node is not None and not self._ended.is_set():
            self._close_moved(view)
            with self._or_fail:
                node.take_view(view, time.monotonic())

    def _keep_jobs(self, jobs: Collection[int]) -> None:
        if self._node is not None and not self._ended.is_set():
            with self._or_fail:
                self._node.keep_jobs(jobs)
            with self._lock:
                removed = [self._pools.pop(job) for job in [*self._pools] if job not in jobs]
            for pool in removed:
                pool.shutdown(wait=False, cancel_futures=True)

    def _renew(self, until: float) -> None:
        if self._node is not None:
            self._node.renew(until)

    def _tick(self) -> None:
        """Tick the node until the end, and fail once the scheduler has given this server up."""
        assert self._node is not None
        while not self._ended.wait(TICK_S):
            with self._or_fail:
                self._node.tick(time.monotonic())
            if self._scheduler.is_lost:
                self._fail(Evicted(f"the scheduler has taken the server {self.name!r} for dead"))

    def report_returned(self, generation: int, has: dict[int, int], lacks: dict[int, int]) -> None:
        self._scheduler.report_returned(generation, has, lacks)

    def report_whole(self, range_: int, epoch: int, server: str) -> None:
        self._scheduler.report(LearnerWhole(range_, epoch, server))

    def _load_now(self) -> dict[int, Load]:
        """Return the load by job since the last call."""
        now = time.monotonic()
        seconds = max(now - self._counted_at, 1e-3)
        # Copies, which are made in one step: other threads count meanwhile.
        counts = Counter(dict(self._pulled)), Counter(dict(self._pushed))
        pulled, pushed = (new - old for new, old in zip(counts, self._counted, strict=True))
        self._counted, self._counted_at = counts, now
        num_bytes = Counter[int]() if self._node is None else self._node.num_bytes
        return {
            job: Load(pulled[job] / seconds, pushed[job] / seconds, num_bytes[job])
            for job in pulled.keys() | pushed.keys() | num_bytes.keys()
        }

    # --- the network ---

    def emit(self, destination: Source | str, message: Message) -> None:
        """Send a message. One to a server without a connection is lost, and connects to it."""
        if isinstance(destination, Source):
            connection = destination.connection
            assert isinstance(connection, _CONNECTIONS)
            connection.send(message)
            return
        with self._lock:
            known = self._channels.get(destination)
            if known is None:
                if destination not in self._connecting and not self._ended.is_set():
                    self._connecting.add(destination)
                    # Not in a thread for files: these may wait for marks that wait for this.
                    name = f"connect {destination}"
                    threading.Thread(
                        target=self._connect, args=(destination,), name=name, daemon=True
                    ).start()
                return
        known[1].send(message)

    def _close_moved(self, view: View) -> None:
        """Close connections to servers that are gone, or that have another address: their hosts may
        not say so for a while."""
        with self._lock:
            moved = [
                self._channels.pop(server)
                for server, (address, _) in list(self._channels.items())
                if view.addresses.get(server) != address
            ]
        for _, channel in moved:
            channel.close()  # _note_closed() is called when its reader has ended

    def _connect(self, server: str) -> None:
        """Connect to another server; what was to be sent meanwhile is asked for again."""
        assert self._node is not None
        address = self._scheduler.view.addresses.get(server)
        channel = None
        if address is not None:
            greeting = hello(self.name, "server", self._scheduler.incarnation)
            with suppress(ParameterError):
                channel = connect(
                    address,
                    greeting,
                    # The other side is known by the name that it was connected by.
                    lambda made, message: self._handle_message(server, made, message),
                    lambda made, why: self._note_closed(server, made),
                    timeout_s=CONNECT_S,
                    tls=self._tls,
                    server=server,
                )
        with self._lock:
            self._connecting.discard(server)
            if channel is not None and address is not None:
                channel.start()  # under the lock: close() waits for its thread
                if self._ended.is_set():
                    channel.close()
                else:
                    self._channels[server] = (address, channel)
        self._node.lost(server)
        if channel is not None:
            self._node.tick(time.monotonic())

    def _note_closed(self, server: str, channel: Channel) -> None:
        with self._lock:
            if self._channels.get(server, (None, None))[1] is channel:
                del self._channels[server]
        if self._node is not None:
            self._node.lost(server)

    def _on_message(self, channel: Channel, message: Message) -> None:
        head = message.head
        if isinstance(head, Command):
            self._handle_command(channel, head)
            return
        if isinstance(head, _COUNTED):
            self._serve(channel, message, head)
        else:
            self._handle_message(channel.peer.name, channel, message)

    def _serve(self, channel: Channel, message: Message, head: Pull | Push | Several) -> None:
        """Serve a pull or push of a worker, in a slot that jobs have fair shares of."""
        each, parts = (head.each, head.sections) if isinstance(head, Several) else (head, (head,))
        keys = message.keys
        num_rows = sum(part.stop - part.start for part in parts) if keys is None else len(keys)
        range_ = parts[0].range
        job = job_of(range_)
        row_bytes = 0 if self._node is None else self._node.row_bytes(range_, each.table)
        is_small = num_rows * row_bytes <= SMALL_BYTES
        slots = self._small_slots if is_small else self._large_slots
        slots.enter(job, time.monotonic())
        began = self._served_at = time.monotonic()
        try:
            self._handle_message(channel.peer.name, channel, message)
        finally:
            now = time.monotonic()
            slots.leave(job, now - began, now)
            counts = self._pulled if isinstance(each, Pull) else self._pushed
            counts[job] += num_rows

    def _handle_message(self, name: str, channel: Channel, message: Message) -> None:
        """Pass a message to the node, after the server has begun."""
        # Primaries that hear of this server first probe it once for each connection.
        if not self._has_begun.is_set():
            self._has_begun.wait()
        node = self._node
        if node is not None and not self._ended.is_set():
            source = Source(name, channel.answered_by(message), channel.peer.incarnation)
            with self._or_fail:
                node.handle(source, message, time.monotonic())

    def _handle_command(self, channel: Channel, command: Command) -> None:
        sender = channel.peer

        def tell(reply: Reply) -> None:
            said = Said(command.request, reply.body)
            refused = Refused(command.request, "invalid", reply.error)
            channel.send(Message(refused if reply.error else said))

        if sender.role != "worker":
            tell(Reply(error="servers send no requests"))
            return
        key = sender.name, sender.incarnation, command.number
        self._handlers.put(key, Request(command.head, command.text, sender.name), tell)

    # --- files ---

    def open_log(self, range_: int) -> RangeLog | None:
        return None if self._log is None else self._log.open(range_)

    def _synced(self, range_: int, segment: int, sequence: int) -> None:
        if self._node is not None:
            with self._or_fail:
                self._node.synced(range_, segment, sequence, time.monotonic())

    def _start(self, work: Callable[..., None], job: int, *args: Any) -> None:
        """Begin to read or to write files of a job. The files of one that stalls, or whose file
        system does not answer, hold up those of no other."""
        with self._lock:
            if self._ended.is_set():
                return
            if job not in self._pools:
                self._pools[job] = ThreadPoolExecutor(FILES_AT_ONCE, f"job {job} of {self.name}")
            self._pools[job].submit(work, *args)

    def load(self, range_: RangeView, view: View) -> None:
        self._start(self._load, view.job, range_, view)

    def _load(self, range_: RangeView, view: View) -> None:
        """Load a range from the checkpoint, tried until it succeeds, and serve it."""
        assert self._node is not None
        while not self._ended.is_set():
            replica = Replica(range_, view.tables, view.generation)
            try:
                load(view.checkpoints, view.load_from, replica, range_)
            except Exception as error:  # a file system may raise anything
                log.error("checkpoint_not_read", range=range_.number, error=str(error))
                self._ended.wait(RETRY_S)
                continue
            with self._or_fail:
                self._node.loaded(range_.number, view.generation, replica, time.monotonic())
            return

    def save(self, range_: int, view: View) -> None:
        self._start(self._save, view.job, range_, view)

    def _save(self, range_: int, view: View) -> None:
        """Write the part of a checkpoint that one range makes, and report to the scheduler that it
        is saved or has failed; nothing if the checkpoint was abandoned."""
        assert self._node is not None
        assert view.cut is not None
        node, cut = self._node, view.cut.number
        clocks: dict[str, int] = {}

        def pieces() -> Iterator[Piece]:
            while not self._ended.is_set():
                began_s = time.thread_time()
                found = node.read_cut(range_, cut)
                if isinstance(found, Piece):
                    yield found  # and go on when it is written
                    self._yield_to_workers(time.thread_time() - began_s)
                elif isinstance(found, str):
                    self._ended.wait(TICK_S)
                else:
                    clocks.update(found)
                    return
            raise Abandoned(cut)

        name = f"range-{range_}.cut"
        with self._lock:
            self._num_saving += 1
        try:
            write_file(view.checkpoints, view.cut_folder, name, encoded(pieces()))
        except Abandoned:
            return
        except Exception as error:  # a file system may raise anything
            log.error("checkpoint_not_written", range=range_, cut=cut, error=str(error))
            self._scheduler.report(SaveFailed(view.generation, cut, range_, str(error)))
            return
        finally:
            with self._lock:
                self._num_saving -= 1
        self._scheduler.report(RangeSaved(view.generation, cut, range_, name, clocks))

    def _yield_to_workers(self, used_s: float) -> None:
        """Pause a thread that has used so much time of the processor for a checkpoint."""
        if time.monotonic() - self._served_at < self.idle_s:
            self._ended.wait(used_s * (self._num_saving / self.save_share - 1))
