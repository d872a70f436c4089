"""Workers that divide the rows of their job: models of Batches.

The rows of a batch are pushed first, and then the note that they are read, both in the clock that
they are read in.
"""

from contextlib import suppress
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from simulation_parameters.oracle import row_keys
from simulation_parameters.scenario import PARTS, SEEN
from simulation_parameters.workers import AGAIN_S, Worker
from xain_parameters.client.batches import MAX_PARTS, RowNumbers
from xain_parameters.errors import ParameterError, RolledBack
from xain_parameters.jobs.parts import Data, Source
from xain_parameters.keys import owners
from xain_parameters.messages import Message, Pull
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler.decider import has_part
from xain_parameters.scheduler.state import Job

DATA = "rows"
BACK_S = 0.1  # until a process that was taken for dead is started again


def part_keys(data: Data) -> NDArray[np.uint64]:
    keys = [
        epoch * MAX_PARTS + index
        for epoch in range(data.num_begun)
        for index in range(data.parts_in(epoch))
    ]
    return np.array(keys, np.uint64)


class Reader(Worker):
    """A process of a worker that reads the parts that the scheduler hands it."""

    def _start(self) -> None:
        scenario = self._machine.scenario
        self._rows = RowNumbers(scenario.num_rows, scenario.batch_rows)
        self._source = Source(self._rows.size, self._rows.fingerprint, scenario.num_epochs)
        self._me = crc32(self.process.name.encode())
        self._is_new = False  # no epoch is under way: the loop begins with all others
        self._last = (0, -1)  # generation and clock of the batch before
        self._part: tuple[int, int, int] | None = None  # epoch, index, number of parts
        self._read = [0, 0, 0]  # batches, rows and size that are read of the part
        self._done: tuple[int, int] | None = None  # the part that was read last
        name, incarnation = self.process.name, self.process.incarnation
        command = c.WorkerEntered(name, incarnation, scenario.num_workers, job=self._job)

        def question() -> None:
            self._scheduler.heard(name, incarnation)
            self._scheduler.decide(command)

        self._ask(question, self._entered)

    def _entered(self, answer: ParameterError | None) -> None:
        if answer is not None:
            self._evicted()
        else:
            self._wait_part()

    def _evicted(self) -> None:
        self._machine.kill(BACK_S)

    def _is_known(self, job: Job) -> bool:
        slot = job.slots.get(self.process.name)
        has_slot = slot is not None and slot.incarnation == self.process.incarnation
        return has_slot or super()._is_known(job)

    # --- outside of the loop ---

    def _wait_part(self) -> None:
        command = self._wanted(0, -1)

        def question() -> tuple[bool, bool, bool]:
            self._scheduler.decide(command)
            job = self._scheduler.state.jobs[self._job]
            data = job.data[DATA]
            is_over = data.num_done >= self._source.num_epochs
            return is_over, has_part(job, command), data.num_done == data.num_begun

        def answered(answer: tuple[bool, bool, bool] | ParameterError) -> None:
            if isinstance(answer, ParameterError):
                self._evicted()
                return
            is_over, may_go, self._is_new = answer
            if is_over:
                self.process.note("all is read")
                self._machine.is_done = True
                self._machine.kill(None)
            elif may_go:
                self._join()
            else:
                self._later(AGAIN_S, self._wait_part)

        self._ask(question, answered)

    def _wanted(
        self, generation: int, clock: int, done: tuple[int, int] | None = None
    ) -> c.PartWanted:
        name, incarnation = self.process.name, self.process.incarnation
        return c.PartWanted(
            name, incarnation, generation, clock, DATA, self._source, done, job=self._job
        )

    def _leave_loop(self) -> None:
        self._round += 1
        self._asked.clear()
        command = c.WorkerLeft(self.process.name, self.process.incarnation, job=self._job)
        self._ask(lambda: self._scheduler.decide(command), lambda _: self._wait_part())

    # --- a clock ---

    def _may(self, job: Job) -> bool:
        return job.may_begin(self.process.name, all_here=self._is_new)

    def _begin_clock(self) -> None:
        self._is_new = False
        now = (self._view.generation, self._at)
        if now != (self._last[0], self._last[1] + 1):
            self._part = self._done = None
        self._last = now
        if self._part is None:
            self._seek()
        else:
            self._pull()

    def _seek(self) -> None:
        """Take the next part, and go on where the notes say."""
        generation = self._view.generation
        command = self._wanted(generation, self._at, self._done)
        self._done = None

        def question() -> tuple[int, tuple[int, int, int] | None]:
            with suppress(RolledBack):  # the answer has the generation
                self._scheduler.decide(command)
            job = self._scheduler.state.jobs[self._job]
            data = job.data[DATA]
            part = data.part_of(self.process.name) if job.generation == generation else None
            if part is None or part[0] >= self._source.num_epochs:
                return job.generation, None
            return job.generation, (*part, data.parts_in(part[0]))

        def answered(answer: tuple[int, tuple[int, int, int] | None] | ParameterError) -> None:
            if isinstance(answer, ParameterError):
                self._evicted()
                return
            now, part = answer
            if now != generation:
                self._restart()
            elif part is None:
                self._leave_loop()
            else:
                self._look_up(part)

        self._ask(question, answered)

    def _look_up(self, part: tuple[int, int, int]) -> None:
        """Pull the note of a part."""
        epoch, index, _ = part
        key = np.array([epoch * MAX_PARTS + index], np.uint64)
        ranges = self._view.ranges
        range_ = ranges[int(owners(key, [each.range for each in ranges])[0])]

        def got(message: Message) -> None:
            note = np.frombuffer(message.values.tobytes(), np.float64)
            comes_again = note[0] == self._at + 1 and note[1] == self._me
            if note[8] and not comes_again:
                self._done = (epoch, index)
                self._seek()
                return
            first = 2 if comes_again else 5
            self._read = [int(value) for value in note[first : first + 3]]
            self._part = part
            self.process.note(f"reads part {part} from batch {self._read[0]} on")
            self._pull()

        self._request(Message(Pull(0, (0, 0), range_.number, PARTS.number, self._opened), key), got)

    def _batch(self, number: int) -> NDArray[np.int64] | None:
        """The rows of a batch of the part."""
        assert self._part is not None
        _, index, num_parts = self._part
        piece = next(self._rows.read(index, num_parts, number), None)
        return None if piece is None else np.arange(piece.data.start, piece.data.stop)

    def _more_pushes(self) -> list[Message]:
        assert self._part is not None
        rows = self._batch(self._read[0])
        if rows is None:  # of a part without rows
            return []
        return self._by_key(SEEN, row_keys(self._part[0], rows), np.ones((len(rows), 1)))

    def _pushed(self) -> None:
        """Note that the batch is read, and end the clock."""
        assert self._part is not None
        epoch, index, _ = self._part
        rows = self._batch(self._read[0])
        num_rows = 0 if rows is None else len(rows)
        before = list(self._read)
        self._read = [before[0] + 1, before[1] + num_rows, before[2] + num_rows]
        is_end = self._batch(self._read[0]) is None
        note = np.array([[self._at + 1, self._me, *before, *self._read, is_end]], np.float64)
        key = np.array([epoch * MAX_PARTS + index], np.uint64)
        if is_end:
            self._done, self._part = (epoch, index), None
        self._push_all(self._by_key(PARTS, key, note), self._tick)
