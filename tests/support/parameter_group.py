"""A small parameter server for tests of its client: real sockets and replicas, ranges that a test
moves, refuses or rolls back as it likes. No replication, no log, no leases."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from xain_foundation.clock_table import ClockTable
from xain_parameters.client.core import Core
from xain_parameters.client.sync import Server
from xain_parameters.errors import Closed, Invalid, TableConflict
from xain_parameters.keys import even
from xain_parameters.messages import (
    Done,
    Mark,
    Message,
    Pull,
    Push,
    Refused,
    Rows,
    Several,
    parts_of,
)
from xain_parameters.replica import Replica
from xain_parameters.scheduler.worker_client import Progress
from xain_parameters.specs import RangeView, TableSpec, View
from xain_parameters.tables.part import plugins_of
from xain_parameters.transport.channel import Channel
from xain_parameters.transport.listener import Listener
from xain_parameters.transport.sections import Sections

PATIENCE_S = 60.0


@dataclass
class Worker:
    staleness: int | None
    ticked: int
    is_live: bool = True


class Group:
    """num_servers: s0, s1, ..., with num_ranges ranges, the first at s0, the second at s1, ...

    refuse: asked before each request; an answer is sent instead of doing it.
    heard: requests that were done, as (server, worker, head).
    """

    def __init__(self, num_servers: int = 2, num_ranges: int = 4) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.listeners = {
            f"s{i}": Listener("127.0.0.1:0", self._hear_at(f"s{i}")) for i in range(num_servers)
        }
        ranges = tuple(
            RangeView(number, start, stop - 1, 1, (f"s{(number - 1) % num_servers}",))
            for number, (start, stop) in enumerate(even(num_ranges), 1)
        )
        addresses = {n: f"127.0.0.1:{each.port}" for n, each in self.listeners.items()}
        self.view = View(1, 1, (), ranges, addresses)
        self.replicas = {each.number: Replica(each, (), 1) for each in ranges}
        self.workers: dict[str, Worker] = {}
        self.cut = 0
        self.refuse: Callable[[str, Any], Refused | None] = lambda server, head: None
        self.heard: list[tuple[str, str, Any]] = []

    def close(self) -> None:
        for listener in self.listeners.values():
            listener.close()

    # --- as a test likes ---

    def change(self, **fields: Any) -> None:
        with self.lock:
            self.view = replace(self.view, number=self.view.number + 1, **fields)
            self.lock.notify_all()

    def move(self, number: int, servers: tuple[str, ...]) -> None:
        with self.lock:
            ranges = tuple(
                replace(each, servers=servers, epoch=each.epoch + 1)
                if each.number == number
                else each
                for each in self.view.ranges
            )
            self.change(ranges=ranges)

    def split(self, number: int) -> None:
        """Give the upper half of the keys, empty, to a new range. For ranges without rows yet."""
        with self.lock:
            old = next(each for each in self.view.ranges if each.number == number)
            middle = (old.start + old.stop) // 2
            new = max(self.replicas) + 1
            halves = (
                replace(old, number=new, last=middle - 1, epoch=1),
                replace(old, number=new + 1, start=middle, epoch=1),
            )
            del self.replicas[number]
            for each in halves:
                self.replicas[each.number] = Replica(each, self.view.tables, self.view.generation)
            ranges = []
            for each in self.view.ranges:
                ranges += halves if each.number == number else (each,)
            self.change(ranges=tuple(ranges))

    # --- servers ---

    def _hear_at(self, server: str) -> Callable[[Channel, Message], None]:
        def hear(channel: Channel, message: Message) -> None:
            if isinstance(message.head, Several):
                together = Sections(channel.send, message.head)
                for part in parts_of(message):
                    together.send(self._answer(server, channel.peer.name, part))
                return
            answer = self._answer(server, channel.peer.name, message)
            channel.answered_by(message).send(answer)

        return hear

    def _answer(self, server: str, worker: str, message: Message) -> Message:
        head: Any = message.head
        with self.lock:
            refused = self.refuse(server, head)
            if refused is not None:
                return Message(replace(refused, request=head.request))
            if head.view[0] < self.view.generation:
                return Message(Refused(head.request, "rolled back", "an older generation"))
            view = next((each for each in self.view.ranges if each.number == head.range), None)
            if view is None or view.servers[:1] != (server,):
                return Message(Refused(head.request, "moved", "not here"))
            self.heard.append((server, worker, head))
            replica = self.replicas[head.range]
            try:
                return self._done(replica, worker, message)
            except Invalid as error:
                return Message(Refused(head.request, "invalid", str(error)))

    def _done(self, replica: Replica, worker: str, message: Message) -> Message:
        head: Any = message.head
        ended = {n: w.ticked for n, w in self.workers.items() if not w.is_live}
        entry = replica.open(head.opened, ended)
        if entry is not None:
            replica.apply(entry)
        match head:
            case Pull():
                return Message(Rows(head.request), values=replica.pull(head, message.keys).copy())
            case Push():
                entry = replica.prepare(worker, head, message.keys, message.values)
                if entry is not None:
                    replica.apply(entry, message.keys, message.values)
                return Message(Done(head.request))
            case Mark():
                return Message(Done(head.request))
        raise AssertionError(head)

    # --- workers ---

    @contextmanager
    def worker(
        self, name: str = "w0", *, timeout_s: float = PATIENCE_S, incarnation: int = 1
    ) -> Iterator[Server]:
        with closing(Server(Core(self.scheduler(name, incarnation), timeout_s))) as server:
            yield server

    def scheduler(self, name: str = "w0", incarnation: int = 1) -> "GroupScheduler":
        return GroupScheduler(self, name, incarnation)

    @property
    def opened(self) -> int:
        live = [worker.ticked for worker in self.workers.values() if worker.is_live]
        all_ticked = [worker.ticked for worker in self.workers.values()]
        return min(live) if live else max(all_ticked, default=0)


class GroupScheduler:
    """See client.ports.Scheduler."""

    def __init__(self, group: Group, worker: str, incarnation: int) -> None:
        self.group = group
        self.worker = worker
        self.incarnation = incarnation
        self.opened = (group.view.generation, group.opened)
        self.job = ""

    def enter(self) -> None:
        pass

    def find(self, name: str, timeout_s: float) -> TableSpec:
        found = next((each for each in self.view.tables if each.name == name), None)
        if found is None:
            raise Invalid(f"there is no table {name!r}")
        return found

    @property
    def view(self) -> View:
        return self.group.view

    def newer_view(self, version: tuple[int, int], timeout_s: float) -> View:
        with self.group.lock:
            self.group.lock.wait_for(lambda: self.group.view.version > version, timeout_s)
            return self.group.view

    def declare(self, table: TableSpec, timeout_s: float) -> TableSpec:
        group = self.group
        with group.lock:
            for known in group.view.tables:
                if known.name == table.name:
                    if replace(known, number=table.number) != table:
                        raise TableConflict(f"there is another table {table.name!r}")
                    return known
            plugins_of(table)  # refused as the scheduler refuses it
            made = replace(table, number=len(group.view.tables) + 1)
            for replica in group.replicas.values():
                replica.declare(made)
            group.change(tables=(*group.view.tables, made))
            return made

    def opened_now(self, timeout_s: float) -> tuple[int, int]:
        with self.group.lock:
            return self.group.view.generation, self.group.opened

    def begin(
        self,
        staleness: int | None,
        num_workers: int,
        is_over: Callable[[], bool],
        stop: int | None = None,
        *,
        all_here: bool = False,
    ) -> Progress:
        group = self.group
        with group.lock:
            known = group.workers.get(self.worker)
            ticked = group.opened if known is None else max(known.ticked, group.opened)
            group.workers[self.worker] = Worker(staleness, ticked)
            group.lock.notify_all()
            return self._wait(is_over, num_workers)

    def _wait(self, is_over: Callable[[], bool], num_workers: int = 1) -> Progress:
        group = self.group
        deadline = time.monotonic() + PATIENCE_S
        while not (self._may_go() and len(group.workers) >= num_workers):
            group.lock.wait(0.05)
            if is_over():
                raise Closed("over")
            assert time.monotonic() < deadline
        ticked = group.workers[self.worker].ticked
        return Progress(ticked, group.opened, group.cut, group.view.generation)

    def _may_go(self) -> bool:
        me = self.group.workers[self.worker]
        clocks = {n: w.ticked for n, w in self.group.workers.items() if w.is_live}
        return ClockTable(clocks, me.staleness).admits(me.ticked)

    def tick(self, clock: int, generation: int, is_over: Callable[[], bool]) -> Progress:
        with self.group.lock:
            if generation == self.group.view.generation:
                me = self.group.workers[self.worker]
                assert me.ticked == clock
                me.ticked += 1
                self.group.lock.notify_all()
            return self._wait(is_over)

    def end(self) -> None:
        with self.group.lock:
            self.group.workers[self.worker].is_live = False
            self.group.lock.notify_all()

    def checkpoint(self, timeout_s: float) -> int:
        with self.group.lock:
            self.group.cut += 1
            return self.group.cut

    def close(self) -> None:
        pass
