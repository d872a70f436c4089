"""Server processes around ServerNode, each with a disk that a crash leaves the written part of."""

from collections.abc import Callable
from functools import partial

from simulation_parameters.clock import Clock, Process
from simulation_parameters.network import Connection, Network
from simulation_parameters.oracle import Oracle
from simulation_parameters.scheduler import LEASE_S, SchedulerMachine
from simulation_parameters.workers import Worker
from xain_parameters.cut import Abandoned
from xain_parameters.errors import Evicted
from xain_parameters.messages import Done, Entry, Message, Rows, Whole
from xain_parameters.node.log import Recovered, replayed
from xain_parameters.node.ports import Source
from xain_parameters.node.protocol import ServerNode
from xain_parameters.replica import Replica
from xain_parameters.scheduler import commands as c
from xain_parameters.specs import RangeView, View, job_of
from xain_parameters.tables.part import Piece
from xain_parameters.transport.sections import Sections

BEATS_S = 0.25
TICKS_S = 0.05
SEGMENT_ENTRIES = 12  # after which the log begins a new segment

Views = tuple[int, list[View]]  # of all jobs, and the number of the state that they are of


class Disk:
    """The log of one range: records that are on disk, and steps that are not yet."""

    def __init__(self) -> None:
        self.current: list[object] | None = None
        self.next: list[object] | None = None


class SimulatedLog:
    """See ports.RangeLog."""

    def __init__(self, server: "Server", number: int, disk: Disk) -> None:
        self._server = server
        self._number = number
        self._disk = disk
        self._num_entries = 0
        self._last = 0  # number of the last segment
        self._begun = self._segment = 0  # numbers of the next and of the current one
        self._sequence = -1

    def append(self, message: Message) -> None:
        self._num_entries += 1
        self._put(partial(self._append, message))

    def begin(self, range_: RangeView, generation: int) -> int:
        self._last += 1
        self._put(partial(self._begin, self._last, (range_, generation)))
        return self._last

    def append_next(self, message: Message) -> None:
        self._put(partial(self._append_next, message))

    def abandon(self) -> None:
        self._put(partial(setattr, self._disk, "next", None))

    def finish(self, message: Message) -> None:
        self._num_entries = 0
        self._put(partial(self._finish, message))

    def wants_new_segment(self) -> bool:
        return self._num_entries > SEGMENT_ENTRIES

    def drop(self) -> None:
        self._put(self._drop)

    def _put(self, step: Callable[[], None]) -> None:
        self._server.write(self._number, step, lambda: (self._segment, self._sequence))

    def _begin(self, number: int, head: object) -> None:
        self._disk.next = [head]
        self._begun = number

    def _append(self, message: Message) -> None:
        for segment in (self._disk.current, self._disk.next):
            if segment is not None:
                segment.append(message)
        if self._disk.current is not None and isinstance(message.head, Entry):
            self._sequence = message.head.sequence

    def _append_next(self, message: Message) -> None:
        self._disk.next.append(message)

    def _finish(self, message: Message) -> None:
        assert self._disk.next is not None
        assert isinstance(message.head, Whole)
        self._disk.current, self._disk.next = [*self._disk.next, message], None
        self._segment, self._sequence = self._begun, message.head.sequence

    def _drop(self) -> None:
        self._disk.current = self._disk.next = None
        self._sequence = -1


class Server:
    """A process; see ports.Host. `received` and `broke` are of network.Node."""

    def __init__(self, machine: "ServerMachine", process: Process) -> None:
        self.process = process
        self._machine = machine
        self._scheduler = machine.scheduler
        self._clock = process.clock
        self._connections: dict[str, Connection] = {}  # made by this process
        self._accepted: dict[int, Connection] = {}
        self._logs: dict[int, SimulatedLog] = {}
        self._steps: list[tuple[int, Callable[[], None], Callable[[], tuple[int, int]]]] = []
        self._is_member = False
        self._is_leaving = False
        self._returned: dict[int, c.ServerReturned] = {}  # to be told with the next beat
        self._listed = (0, frozenset[int]())  # the last list of jobs: when it was made, its numbers
        self.node = ServerNode(process.name, self)
        for recovered in machine.replay():
            self.node.recovered(*recovered)
        self.join()
        self._tick()

    # --- with the scheduler ---

    def join(self) -> None:
        name, incarnation = self.process.name, self.process.incarnation
        scheduler = self._scheduler

        def question() -> Views:
            scheduler.heard(name)
            scheduler.decide(c.ServerJoined(name, name, incarnation))
            return self._all_views()

        scheduler.ask(self.process, question, self._joined)

    def _all_views(self) -> Views:
        return self._scheduler.state.number, [*self._scheduler.views().values()]

    def _joined(self, answer: Views | Exception) -> None:
        if isinstance(answer, Evicted):
            self._clock.note(self.process.name, "an older process ends")
            self.process.is_alive = False
            return
        assert isinstance(answer, tuple)
        # No view from before it joined: it would name an earlier process.
        self._is_member = True
        self._take_views(answer)
        self._beat()

    def report_returned(self, generation: int, has: dict[int, int], lacks: dict[int, int]) -> None:
        job = job_of(min(has | lacks))
        self._returned[job] = c.ServerReturned(self.process.name, generation, has, lacks)

    def _beat(self) -> None:
        sent_at = self._clock.now
        returned, self._returned = self._returned, {}
        name, incarnation = self.process.name, self.process.incarnation
        scheduler = self._scheduler

        def question() -> Views | None:
            known = scheduler.state.servers.get(name)
            if known is None or not known.is_live or known.incarnation != incarnation:
                return None
            scheduler.heard(name)
            for each in returned.values():
                scheduler.decide(each)
            return self._all_views()

        def answered(views: Views | Exception | None) -> None:
            if views is None:
                self.process.note("was taken for dead")
                self._returned = {**returned, **self._returned}  # they have not come
                self.join()
                return
            assert isinstance(views, tuple)
            self._take_views(views)
            self.node.renew(sent_at + LEASE_S)
            self.process.after(BEATS_S, self._beat)

        scheduler.ask(self.process, question, answered)

    def take_view(self, view: View) -> None:
        # The list of jobs and their views come in one stream: none of a removed job after the list.
        _, jobs = self._listed
        if not self._is_member or (view.job not in jobs and view.job <= max(jobs, default=-1)):
            return
        self.node.take_view(view, self._clock.now)
        is_newest = view.version >= self.node.version(view.job)
        if self._is_leaving and is_newest and self._scheduler.state.may_go(self.process.name):
            self._machine.left()

    def _take_views(self, answer: Views) -> None:
        number, views = answer
        if number < self._listed[0]:
            return
        for view in views:
            self.take_view(view)
        jobs = frozenset(view.job for view in views)
        self._listed = (number, jobs)
        self.node.keep_jobs(jobs)

    def leave(self) -> None:
        self._is_leaving = True
        command = c.ServerLeft(self.process.name)
        self._scheduler.ask(
            self.process,
            lambda: (self._scheduler.decide(command), self._all_views())[1],
            lambda views: self._take_views(views) if isinstance(views, tuple) else None,
        )

    def report_whole(self, range_: int, epoch: int, server: str) -> None:
        command = c.LearnerWhole(range_, epoch, server)
        self._scheduler.ask(self.process, lambda: self._scheduler.decide(command), lambda _: None)

    # --- with the network ---

    def emit(self, destination: Source | str, message: Message) -> None:
        # As a sender thread does: later, and outside of the locks.
        if isinstance(destination, Source):
            if isinstance(destination.connection, Sections):
                destination.connection.send(message)
                return
            if isinstance(message.head, Done | Rows):
                self._machine.oracle(self.asked(destination, message)).answered(
                    self, destination, message
                )
            connection = self._accepted.get(int(str(destination.connection)))
        else:
            connection = self._connections.get(destination)
            if connection is None:
                connection = self._machine.network.connect(self, destination)
                if connection is None:
                    self.process.after(0.01, partial(self.node.lost, destination))
                    return
                self._connections[destination] = connection
        if connection is not None:
            connection.send(self, message)

    def received(self, source: Source, message: Message) -> None:
        number = int(str(source.connection))
        for connection in self._connections.values():
            if connection.number == number:
                break
        else:
            connection = self._machine.network.find(number)
            self._accepted[number] = connection
        self.node.handle(source, message, self._clock.now)

    def broke(self, peer: str, connection: int) -> None:
        self._accepted.pop(connection, None)
        known = self._connections.get(peer)
        if known is not None and known.number == connection:
            del self._connections[peer]
            self.node.lost(peer)

    def asked(self, destination: Source, message: Message) -> int | None:
        """The range of a worker's request that is answered."""
        return self._machine.asked(destination.name, message)

    def _tick(self) -> None:
        self.node.tick(self._clock.now)
        self.process.after(TICKS_S, self._tick)

    # --- with the disk ---

    def load(self, range_: RangeView, view: View) -> None:
        def read() -> None:
            replica = Replica(range_, view.tables, view.generation)
            replica.load(self._machine.oracle(range_.number).parts(view, range_))
            self.node.loaded(range_.number, view.generation, replica, self._clock.now)

        self.process.after(self._clock.between(0.001, 0.2), read)

    def save(self, range_: int, view: View) -> None:
        cut, pieces = view.cut.number, []

        def step() -> None:
            try:
                found = self.node.read_cut(range_, cut)
            except Abandoned:
                return
            if isinstance(found, dict):
                # Names of another process of the same range differ, so no file is overwritten.
                path = f"{range_}-{self.process.name}"
                self._machine.oracle(range_).saved(view, path, pieces)
                command = c.RangeSaved(view.generation, cut, range_, path, found)
                self._scheduler.ask(
                    self.process, lambda: self._scheduler.decide(command), lambda _: None
                )
                return
            if isinstance(found, Piece):
                pieces.append(found)
            self.process.after(self._clock.between(0.0005, 0.02), step)

        self.process.after(0.001, step)

    def open_log(self, range_: int) -> SimulatedLog | None:
        if not self._machine.has_log:
            return None
        if range_ not in self._logs:
            self._logs[range_] = SimulatedLog(self, range_, self._machine.disk(range_))
        return self._logs[range_]

    def write(
        self, number: int, step: Callable[[], None], reached: Callable[[], tuple[int, int]]
    ) -> None:
        if not self._steps:
            self.process.after(self._clock.between(*self._machine.sync_s), self._sync)
        self._steps.append((number, step, reached))

    def _sync(self) -> None:
        steps, self._steps = self._steps, []
        touched = {}
        for number, step, reached in steps:
            step()
            touched[number] = reached
        for number, reached in touched.items():
            segment, sequence = reached()
            if sequence >= 0:
                self.node.synced(number, segment, sequence, self._clock.now)


class ServerMachine:
    """A server by name: its processes, one after the other, and its disk."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        scheduler: SchedulerMachine,
        oracles: dict[str, Oracle],
        name: str,
        *,
        has_log: bool,
        sync_s: tuple[float, float],
    ) -> None:
        self.clock = clock
        self.network = network
        self.scheduler = scheduler
        self._oracles = oracles  # by job
        self.name = name
        self.has_log = has_log
        self.sync_s = sync_s
        self.server: Server | None = None
        self._disks: dict[int, Disk] = {}
        self._incarnation = 0
        self.is_gone = False

    def oracle(self, range_: int | None) -> Oracle:
        """The oracle of the job of a range. None: the range of an answer that nobody waits for,
        which the oracle ignores."""
        return self._oracles["" if range_ is None else self.scheduler.names[job_of(range_)]]

    def boot(self) -> None:
        if self.is_gone or (self.server is not None and self.server.process.is_alive):
            return
        self._incarnation += 1
        process = Process(self.clock, self.name, self._incarnation)
        process.note("starts")
        self.server = Server(self, process)
        self.network.nodes[self.name] = self.server

    def kill(self, down_s: float) -> None:
        if self.server is not None and self.server.process.is_alive:
            self.server.process.note("dies")
            self.server.process.is_alive = False
            self.network.break_all(self.name)
            self.clock.after(down_s, None, self.boot)

    def left(self) -> None:
        self.kill(0.0)
        self.is_gone = True

    def asked(self, worker: str, message: Message) -> int | None:
        node = self.network.nodes.get(worker)
        return node.asked(message) if isinstance(node, Worker) else None

    def disk(self, range_: int) -> Disk:
        return self._disks.setdefault(range_, Disk())

    def replay(self) -> list[Recovered]:
        found = []
        for disk in self._disks.values():
            disk.next = None
            if disk.current is not None:
                (range_, generation), *messages = disk.current
                recovered = replayed(range_, generation, messages)
                assert recovered is not None
                found.append(recovered)
        return found
