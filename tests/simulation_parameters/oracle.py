"""Invariants of every run, judged from outside of the code under test.

Each worker pushes for each of its clocks a gradient to a dense table and a mark to a sparse one, or
several: rows of its own, so that whoever pulls knows which pushes are there. Workers that divide
rows push a one for each row that they have read, and note how far the part is.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simulation_parameters.clock import Clock, Violation
from simulation_parameters.scenario import DENSE, MARKS, MAX_WORKERS, ROWS, Scenario
from xain_parameters.client.batches import MAX_PARTS
from xain_parameters.jobs.parts import Data
from xain_parameters.keys import END
from xain_parameters.messages import Done, Message, Pull, Push
from xain_parameters.node.ports import Source
from xain_parameters.replica import Replica
from xain_parameters.scheduler import state as e
from xain_parameters.specs import RangeView, View, job_of
from xain_parameters.tables.part import Piece

if TYPE_CHECKING:
    from simulation_parameters.servers import Server

CLOCKS_PER_WORKER = 1000
KEYS_PER_MARK = MAX_WORKERS * CLOCKS_PER_WORKER  # of all workers

ROWS_PER_EPOCH = 1000

PushOf = tuple[int, int]  # index of the worker, clock


def mark_keys(worker: int, clock: int, num_marks: int) -> NDArray[np.uint64]:
    first = worker * CLOCKS_PER_WORKER + clock
    return (first + KEYS_PER_MARK * np.arange(num_marks)).astype(np.uint64)


def row_keys(epoch: int, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    return (epoch * ROWS_PER_EPOCH + rows).astype(np.uint64)


def gradient(worker: int, clock: int, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Depends on what was pulled, so one wrong bit is seen in all that follows."""
    return np.cos(rows * (worker + 1) + clock) + worker


class Oracle:
    """ticked: pushes of clocks that the scheduler counts, since the last rollback.
    acknowledged: pushes that all servers have acknowledged. tried: pushes that may have arrived.
    """

    def __init__(self, clock: Clock, scenario: Scenario) -> None:
        self._clock = clock
        self._scenario = scenario
        self._generation = 1
        self._ticked: set[PushOf] = set()
        self._acknowledged: set[PushOf] = set()
        self._cuts: dict[str, e.Cut] = {}
        self._files: dict[tuple[str, str], list[Piece]] = {}
        self._gone: set[int] = set()
        self._epochs: dict[tuple[int, int], int] = {}
        self.num_rollbacks = 0
        self.num_pulls = 0

    def fail(self, text: str) -> None:
        raise Violation(text)

    # --- what happens ---

    def decided(self, state: e.Job, event: e.AnyEvent) -> None:
        """An event of the scheduler, and the state before it."""
        match event:
            case e.Ticked(name, clocks):
                self._ticked.add((_index(name), clocks - 1))
            case e.WorkerBegan(name):
                self._gone.discard(_index(name))
            case e.WorkerEnded(name):
                self._gone.add(_index(name))
            case e.CutWhole():
                assert state.cut is not None
                cut = e.manifest_of(state, state.cut)
                self._cuts[cut.folder] = cut
            case e.RolledBack():
                self._roll_back(state)

    def _roll_back(self, state: e.Job) -> None:
        if self._scenario.has_log and self._acknowledged:
            self.fail("rolled back though the servers have logs")
        self._clock.note("oracle", f"rolled back to {state.cuts[-1] if state.cuts else 'nothing'}")
        clock = state.cuts[-1].clock if state.cuts else 0
        if clock < self._scenario.least_cut:
            self.fail(f"rolled back to clock {clock}: there must be a later checkpoint")
        clocks = state.cuts[-1].clocks if state.cuts else {}
        in_cut = {w: clocks.get(worker_name(self._scenario, w), 0) for w in range(MAX_WORKERS)}
        self._ticked = {(w, c) for w, c in self._ticked if c < in_cut[w]}
        self._acknowledged = {(w, c) for w, c in self._acknowledged if c < in_cut[w]}
        self._generation = state.generation + 1
        self.num_rollbacks += 1

    def acknowledged(self, worker: int, clock: int, generation: int) -> None:
        if generation == self._generation:
            self._acknowledged.add((worker, clock))

    def answered(self, server: "Server", destination: Source, message: Message) -> None:
        """A server answers a worker: never after a later primary of the range has."""
        asked = server.asked(destination, message)
        if asked is None or not isinstance(message.head, Done):
            return
        view = server.node.view_of(asked)
        if view is None:
            self.fail(f"{server.process.name} acknowledges for range {asked}, which it has left")
            return
        generation, epoch = server.node.version(job_of(asked))[0], view.epoch
        if epoch < self._epochs.get((generation, asked), 0):
            self.fail(f"range {asked} is answered in epoch {epoch} after a later one")
        self._epochs[generation, asked] = epoch

    # --- checkpoints ---

    def saved(self, view: View, path: str, pieces: list[Piece]) -> None:
        self._files[view.cut_folder, path] = list(pieces)

    def parts(self, view: View, range_: RangeView) -> list[list[Piece]]:
        cut = self._cuts[view.load_from]
        return [
            self._files[view.load_from, path]
            for each, path in cut.ranges
            if each.start < range_.stop and range_.start < each.stop
        ]

    # --- pulls ---

    def mark_keys(self) -> NDArray[np.uint64]:
        return np.concatenate(
            [
                mark_keys(worker, clock, self._scenario.num_marks)
                for worker in range(MAX_WORKERS)
                for clock in range(self._scenario.num_clocks)
            ]
        )

    def _found(self, keys: set[int]) -> list[set[PushOf]]:
        """The pushes whose first, second, ... mark is there."""
        found: list[set[PushOf]] = [set() for _ in range(self._scenario.num_marks)]
        for key in keys:
            number, first = divmod(key, KEYS_PER_MARK)
            found[number].add(divmod(first, CLOCKS_PER_WORKER))
        return found

    def required(self, worker: int, clock: int, generation: int) -> set[PushOf] | None:
        """Pushes that a pull of this worker at this clock must see; None: it cannot be told, since
        the worker does not know of a rollback yet."""
        if generation != self._generation:
            return None
        scenario = self._scenario
        seen = {(w, c) for w, c in self._ticked if c < clock - scenario.marks_bound}
        if not scenario.are_marks_held:
            seen |= {(w, c) for w, c in self._acknowledged if w == worker}
        return seen

    def pulled(self, worker: int, clock: int, required: set[PushOf] | None, keys: set[int]) -> None:
        # A worker that was taken for dead and does not know it yet: no other waits for it.
        if required is None or worker in self._gone:
            return
        self.num_pulls += 1
        for found in self._found(keys):
            if missing := required - found:
                self.fail(f"w{worker} pulls at clock {clock} and does not see {sorted(missing)}")
            if self._scenario.are_marks_held and found != required:
                extra = sorted(found - required)
                self.fail(f"w{worker} pulls at clock {clock} and sees {extra} already")

    # --- the end ---

    def ended(self, rows: NDArray[np.float64], keys: set[int]) -> None:
        """The final model. Under BSP it is that of an undisturbed run, bit for bit."""
        if self._scenario.staleness == 0:
            expected = self._undisturbed(self._ticked)
            if not np.array_equal(rows, expected):
                self.fail(f"the final model differs by {np.abs(rows - expected).max()}")
        for found in self._found(keys):
            if self._scenario.are_marks_held:
                if found != self._ticked:
                    self.fail(f"the final marks differ: {sorted(found ^ self._ticked)}")
            elif missing := self._acknowledged - found:
                self.fail(f"acknowledged pushes are lost: {sorted(missing)}")

    def seen_keys(self) -> NDArray[np.uint64]:
        """A key for each row of each epoch."""
        return np.concatenate(
            [
                row_keys(epoch, np.arange(self._scenario.num_rows))
                for epoch in range(self._scenario.num_epochs)
            ]
        )

    def read(
        self, data: Data, counts: NDArray[np.float64], notes: dict[int, NDArray[np.float64]]
    ) -> None:
        """Each row was read once in each epoch, by the notes of the workers, and under BSP by the
        model. counts: by seen_keys(). notes: by the key of a part."""
        scenario = self._scenario
        for epoch in range(scenario.num_epochs):
            keys = [epoch * MAX_PARTS + index for index in range(data.parts_in(epoch))]
            num_rows = sum(notes[key][6] for key in keys)
            if num_rows != scenario.num_rows or not all(notes[key][8] for key in keys):
                noted = {key - keys[0]: notes[key].tolist() for key in keys}
                self.fail(f"epoch {epoch} has {num_rows:g} of {scenario.num_rows} rows: {noted}")
        # Without barriers a batch of a worker that died counts again when another one repeats it.
        is_wrong = counts != 1 if scenario.staleness == 0 else counts < 1
        if is_wrong.any():
            self.fail(f"rows were not read once: {counts.reshape(scenario.num_epochs, -1)}")

    def _undisturbed(self, pushes: set[PushOf]) -> NDArray[np.float64]:
        """The dense table after these pushes in one process, without faults."""
        replica = _whole_replica()
        for clock in range(self._scenario.num_clocks):
            rows = _rows(replica)
            for worker in sorted(w for w, c in pushes if c == clock):
                push = Push(0, (0, 0), 1, DENSE.number, 0, clock, 0, False, start=0, stop=ROWS)
                values = gradient(worker, clock, rows)
                entry = replica.prepare(worker_name(self._scenario, worker), push, None, values)
                assert entry is not None
                replica.apply(entry, None, values)
        return _rows(replica)


def _whole_replica() -> Replica:
    return Replica(RangeView(1, 0, END - 1, 1, ("s0",)), (DENSE, MARKS), 1)


def _rows(replica: Replica) -> NDArray[np.float64]:
    pull = Pull(0, (0, 0), 1, DENSE.number, 0, 0, ROWS)
    return replica.pull(pull, None).copy()


def worker_name(scenario: Scenario, index: int) -> str:
    """Names of workers are unique in the group."""
    return f"{scenario.job[:1] or 'w'}{index}"


def _index(worker: str) -> int:
    return int(worker[1:])
