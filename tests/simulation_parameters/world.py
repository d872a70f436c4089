"""One run from beginning to end."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random

import msgspec
import numpy as np
from numpy.typing import NDArray

from simulation_parameters.clock import Clock, Violation
from simulation_parameters.network import Network
from simulation_parameters.oracle import Oracle
from simulation_parameters.readers import DATA, Reader, part_keys
from simulation_parameters.scenario import (
    DENSE,
    MARKS,
    MAX_SERVERS,
    MAX_WORKERS,
    PARTS,
    SEEN,
    Event,
    Fault,
    Scenario,
)
from simulation_parameters.scheduler import LEASE_S, NAME, RETRY_S, VIEW_S, SchedulerMachine
from simulation_parameters.servers import ServerMachine
from simulation_parameters.workers import Worker, WorkerMachine
from xain_parameters.errors import Invalid
from xain_parameters.keys import owners
from xain_parameters.messages import Pull
from xain_parameters.replica import Replica
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler.decider import can_cut
from xain_parameters.specs import RangeView, TableSpec, View, openings

BOUND_S = 60.0  # of the time to the end after the last fault


@dataclass(frozen=True, slots=True)
class Outcome:
    """num_rollbacks: by job. trained_s: when the last worker was done."""

    num_steps: int
    took_s: float
    num_rollbacks: dict[str, int]
    num_pulls: int
    trained_s: float


class Failed(AssertionError):
    """Something happened that must never happen; the text has all it takes to see it again."""

    def __init__(self, scenario: Scenario, what: str, clock: Clock) -> None:
        lines = "\n".join(clock.latest)
        super().__init__(
            f"{what}\n\n{scenario}\n\n{lines}\n\n"
            f"again, with everything: python -m simulation_parameters --seed {scenario.seed}"
        )
        self.what = what


def simulate(scenario: Scenario, show: Callable[[str], None] | None = None) -> Outcome:
    """Run a scenario to its end. show: for each line of what happens. Raises Failed."""
    clock = Clock(Random(scenario.seed), show)
    try:
        return _World(clock, scenario).run()
    except Violation as violation:
        raise Failed(scenario, str(violation), clock) from violation
    except Exception as error:  # whatever the code under test does
        raise Failed(scenario, repr(error), clock) from error


class _World:
    def __init__(self, clock: Clock, scenario: Scenario) -> None:
        self._clock = clock
        self._scenario = scenario
        self._oracles = {each.job: Oracle(clock, each) for each in scenario.jobs}
        self._network = Network(clock, scenario.loss)
        self._scheduler = SchedulerMachine(clock, self._network, scenario, self._oracles)
        self._scheduler.on_view = self._tell
        self._servers: list[ServerMachine] = []
        self._workers: list[WorkerMachine] = []
        self._trained_s = 0.0
        self._faults: dict[Fault, Callable[[Event], None]] = {
            Fault.KILL_SERVER: self._kill_server,
            Fault.KILL_WORKER: self._kill_worker,
            Fault.KILL_SCHEDULER: lambda event: self._scheduler.kill(event.seconds),
            Fault.PARTITION: self._partition,
            Fault.BREAK: lambda event: self._network.break_all(self._server(event).name),
            Fault.ADD_SERVER: lambda event: self._add_server(),
            Fault.LEAVE_SERVER: self._leave_server,
            Fault.ADD_WORKER: lambda event: self._add_worker(self._job(event)),
            Fault.LEAVE_WORKER: self._leave_worker,
            Fault.CHECKPOINT: self._checkpoint,
            Fault.STALL_JOB: self._stall_job,
            Fault.REMOVE_JOB: self._remove_job,
        }
        self._removing: set[str] = set()  # jobs that are, or will be, removed
        self._removed: list[int] = []  # ranges of jobs that were removed

    def run(self) -> Outcome:
        clock, scenario = self._clock, self._scenario
        self._scheduler.boot()
        for _ in range(scenario.num_servers):
            self._add_server()
        for job in scenario.jobs:
            for _ in range(job.num_workers):
                self._add_worker(job)
            for table in job.tables:
                self._scheduler.decide(c.DeclareTable(table, job=job.job))
        for event in scenario.events:
            clock.after(event.at, None, partial(self._befall, event))
        clock.after(scenario.quiet_at, None, self._quieten)
        if not clock.run(scenario.quiet_at + BOUND_S, self._is_over):
            left = [worker.name for worker in self._workers if not worker.is_done]
            self._oracles[""].fail(f"no end {BOUND_S} s after the last fault: {left} still work")
        for name, oracle in self._oracles.items():
            if name not in self._removing:
                self._check(name, oracle)
        num_rollbacks = {name: each.num_rollbacks for name, each in self._oracles.items()}
        num_pulls = sum(each.num_pulls for each in self._oracles.values())
        return Outcome(clock.num_steps, clock.now, num_rollbacks, num_pulls, self._trained_s)

    def _is_over(self) -> bool:
        left = [worker for worker in self._workers if not worker.is_done]
        if left:
            if all(worker.scenario.job for worker in left):  # the first job is over
                for worker in left:
                    worker.is_stalled = False
            return False
        if self._start_reading():
            return False
        self._trained_s = self._trained_s or self._clock.now
        if self._clock.now < self._scenario.quiet_at:
            return False
        state = self._scheduler.state
        if not all(each.servers and not each.learners for each in state.ranges):
            return False
        if self._removing & {*state.jobs} or not self._are_removed():
            return False
        # Every server has taken the last view.
        # Every server has everything.
        for each in state.ranges:
            replicas = [self._replica(name, each) for name in each.servers]
            sequences = {None if each is None else each.sequence for each in replicas}
            if len(sequences) != 1 or None in sequences:
                return False
        return True

    def _start_reading(self) -> bool:
        """Start workers again that have left rows, or that a rollback took rows back from after
        their end. Returns whether there is such a job."""
        for job in self._scenario.jobs:
            data = self._scheduler.state.jobs[job.job].data.get(DATA) if job.num_epochs else None
            if data is not None and data.num_done < job.num_epochs:
                # A first clock waits for as many.
                for machine in [w for w in self._workers if w.scenario is job][: job.num_workers]:
                    machine.is_done = False
                    machine.boot()
                return True
        return False

    def _are_removed(self) -> bool:
        """Tell whether no server has a range of a removed job any more."""
        servers = [each.server for each in self._servers if each.server is not None]
        nodes = [each.node for each in servers if each.process.is_alive]
        return all(node.view_of(number) is None for node in nodes for number in self._removed)

    def _replica(self, name: str, range_: RangeView) -> Replica | None:
        """The server's replica of a range; None: the server does not know its last epoch yet."""
        server = next(each.server for each in self._servers if each.name == name)
        if server is None or not server.process.is_alive:
            return None
        view = server.node.view_of(range_.number)
        if view is None or view.epoch != range_.epoch:
            return None
        return server.node.replica_of(range_.number)

    def _check(self, job: str, oracle: Oracle) -> None:
        """The final model of a job, and that all servers of a range have the same bits."""
        rows = np.zeros(DENSE.shape)
        marks: set[int] = set()
        view = self._scheduler.view(job)
        for index, each in enumerate(view.ranges):
            digests = []
            for name in each.servers:
                replica = self._replica(name, each)
                for clock, ended in openings(
                    view, replica.opened, self._scheduler.state.jobs[job].opened
                ):
                    entry = replica.open(clock, ended)
                    assert entry is not None
                    replica.apply(entry)
                digests.append(digest(replica))
            if len(set(digests)) != 1:
                oracle.fail(f"the servers {each.servers} of range {each.number} differ")
            low, high = each.range.indices(DENSE.bound or 0)
            if low < high:
                pull = Pull(0, (0, 0), each.number, DENSE.number, 0, low, high)
                rows[low:high] = replica.pull(pull, None)
            keys = oracle.mark_keys()
            keys = keys[owners(keys, [r.range for r in view.ranges]) == index]
            pull = Pull(0, (0, 0), each.number, MARKS.number, 0)
            found = replica.pull(pull, keys)[:, 0]
            if not set(found.tolist()) <= {0.0, 1.0}:
                oracle.fail(f"a push was applied twice: {found}")
            marks |= {int(key) for key in keys[found == 1]}
        oracle.ended(rows, marks)
        data = self._scheduler.state.jobs[job].data.get(DATA)
        if data is not None:
            counts = self._pulled(view, SEEN, oracle.seen_keys())[:, 0]
            keys = part_keys(data)
            notes = self._pulled(view, PARTS, keys)
            oracle.read(data, counts, dict(zip(keys.tolist(), notes, strict=True)))

    def _pulled(
        self, view: View, table: TableSpec, keys: NDArray[np.uint64]
    ) -> NDArray[np.float64]:
        """Rows of a table by key, from the first server of each range."""
        rows = np.zeros((len(keys), table.dim))
        mine = owners(keys, [each.range for each in view.ranges])
        for index, each in enumerate(view.ranges):
            if (mine == index).any():
                replica = self._replica(each.servers[0], each)
                pull = Pull(0, (0, 0), each.number, table.number, 0)
                rows[mine == index] = replica.pull(pull, keys[mine == index])
        return rows

    # --- faults ---

    def _befall(self, event: Event) -> None:
        self._clock.note("fault", f"{event.fault} {event.index} {event.seconds:.2f}")
        self._faults[event.fault](event)

    def _kill_server(self, event: Event) -> None:
        self._server(event).kill(event.seconds)

    def _kill_worker(self, event: Event) -> None:
        self._worker(event).kill(event.seconds)

    def _partition(self, event: Event) -> None:
        names = [NAME, *(each.name for each in (*self._servers, *self._workers))]
        one, other = names[event.index % len(names)], names[event.other % len(names)]
        if one != other:
            self._network.partition(one, other, event.seconds)

    def _add_server(self) -> None:
        if len(self._servers) < MAX_SERVERS:
            machine = ServerMachine(
                self._clock,
                self._network,
                self._scheduler,
                self._oracles,
                f"s{len(self._servers)}",
                has_log=self._scenario.has_log,
                sync_s=self._scenario.sync_s,
            )
            self._servers.append(machine)
            machine.boot()

    def _leave_server(self, event: Event) -> None:
        staying = [each for each in self._servers if not each.is_gone]
        if len(staying) > 1:
            machine = staying[event.index % len(staying)]
            if machine.server is not None and machine.server.process.is_alive:
                machine.server.leave()

    def _add_worker(self, job: Scenario) -> None:
        if job.job in self._removing:
            return
        number = sum(each.scenario.job == job.job for each in self._workers)
        if number < MAX_WORKERS:
            machine = WorkerMachine(
                self._clock,
                self._network,
                self._scheduler,
                self._oracles[job.job],
                number,
                job,
                Reader if job.num_epochs else Worker,
            )
            self._workers.append(machine)
            machine.boot()

    def _leave_worker(self, event: Event) -> None:
        machine = self._worker(event)
        worker = machine.worker
        if worker is None or not worker.process.is_alive or len(self._workers) == 1:
            return
        job = self._scheduler.state.jobs[machine.scenario.job]
        if job.opened or not machine.scenario.num_epochs:  # a first clock waits for all
            worker.leave_early()

    def _checkpoint(self, event: Event) -> None:
        process = self._scheduler.process
        name = self._job(event).job
        state = self._scheduler.state.jobs.get(name)
        if process is not None and process.is_alive and state is not None and can_cut(state):
            self._scheduler.decide(c.CheckpointDue(job=name))

    def _stall_job(self, event: Event) -> None:
        """A worker of the second job computes until the first job is over."""
        workers = [each for each in self._workers if each.scenario.job]
        workers[event.index % len(workers)].is_stalled = True

    def _remove_job(self, event: Event) -> None:
        """All workers of the second job end, and when their leases are over it is removed."""
        name = self._scenario.jobs[1].job
        self._removing.add(name)
        for worker in self._workers:
            if worker.scenario.job == name:
                worker.gone()
        self._clock.after(LEASE_S, None, partial(self._try_to_remove, name))

    def _try_to_remove(self, name: str) -> None:
        process = self._scheduler.process
        ranges = [each.number for each in self._scheduler.state.jobs[name].ranges]
        if process is not None and process.is_alive:
            with suppress(Invalid):  # workers are in its loop still
                self._scheduler.decide(c.RemoveJob(job=name))
                self._removed += ranges
                return
        self._clock.after(RETRY_S, None, partial(self._try_to_remove, name))

    def _quieten(self) -> None:
        self._clock.note("fault", "no more")
        self._network.loss = 0.0
        self._start_reading()

    def _server(self, event: Event) -> ServerMachine:
        return self._servers[event.index % len(self._servers)]

    def _job(self, event: Event) -> Scenario:
        jobs = self._scenario.jobs
        return jobs[event.other % len(jobs)]

    def _worker(self, event: Event) -> WorkerMachine:
        return self._workers[event.index % len(self._workers)]

    # --- the view ---

    def _tell(self, view: View) -> None:
        """Servers hear of a view when it is there, each after a while, and not all of them."""
        for machine in self._servers:
            server = machine.server
            if server is None or self._network.delay(NAME, machine.name) > 0:
                continue
            if self._clock.chance.random() < 0.9:
                seconds = self._clock.between(*VIEW_S)
                self._clock.after(seconds, server.process, partial(server.take_view, view))


def digest(replica: Replica) -> str:
    """The bits of a replica, whatever the order of its rows and held pushes."""
    pieces = []
    for tile, keys, body in replica.tiles():
        if tile.name == "state":
            state = msgspec.msgpack.decode(body.tobytes())
            for known in state["known"].values():
                for name in ("parts", "loose"):
                    known[name] = sorted(known[name])
            state["known"] = sorted(state["known"].items())
            pieces.append(repr(sorted(state.items())))
        elif tile.name == "held":
            where = "" if keys is None else keys.tobytes().hex()
            pieces.append(f"{tile.meta!r} {where} {body.tobytes().hex()}")
    for table in replica.tables:
        for keys, fields in replica.rows(table.number):
            for row, key in enumerate(keys):
                values = [fields[name][row].tobytes().hex() for name in sorted(fields)]
                pieces.append(f"{table.number} {key} {values}")
    return hashlib.sha256("\n".join(sorted(pieces)).encode()).hexdigest()
