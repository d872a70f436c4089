"""Workers: models of the client that pull, compute, push and tick."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from simulation_parameters.clock import Clock, Process
from simulation_parameters.network import Connection, Network
from simulation_parameters.oracle import Oracle, PushOf, gradient, mark_keys, worker_name
from simulation_parameters.scenario import DENSE, MARKS, Scenario
from simulation_parameters.scheduler import SchedulerMachine
from xain_parameters.errors import Evicted, ParameterError, RolledBack
from xain_parameters.keys import owners
from xain_parameters.messages import (
    Done,
    Mark,
    Message,
    Pull,
    Push,
    Refused,
    Rows,
    Section,
    Several,
)
from xain_parameters.node.ports import Source
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler.state import Job
from xain_parameters.specs import RangeView, TableSpec, View

BEATS_S = 0.25
AGAIN_S = 0.03
STALLED_S = 0.2  # between two looks of a stalled worker

Request = Pull | Push | Mark


class _Part(NamedTuple):
    """A request for one range, and what is done with its answer."""

    message: Message
    answered: Callable[[Message], None]


@dataclass(slots=True, eq=False)
class _Asked:
    """The requests of a message: of one kind, for several ranges of a server, or only one."""

    parts: list[_Part]
    server: str = ""


class Worker:
    """A process of a worker."""

    def __init__(self, machine: "WorkerMachine", process: Process) -> None:
        self.process = process
        self._machine = machine
        self._scheduler = machine.scheduler
        self._oracle = machine.oracle
        self._job = machine.scenario.job
        self._clock = process.clock
        self._connections: dict[str, Connection] = {}
        self._asked: dict[int, _Asked] = {}
        self._last_request = 0
        self._view: View
        self._opened = 0
        self._at = 0  # the clock that it works on
        self._cut = 0  # the last that it has marked
        self._is_joined = False
        self._round = 0  # steps of an earlier one are void
        self._start()
        self._beat()

    def _start(self) -> None:
        self._join()

    # --- clocks ---

    def _join(self) -> None:
        self._round += 1
        self._asked.clear()
        self._is_joined = False
        name, incarnation = self.process.name, self.process.incarnation
        staleness = self._machine.scenario.staleness
        command = c.WorkerJoined(name, incarnation, staleness, job=self._job)

        def question() -> tuple[View, int, int]:
            self._scheduler.heard(name, incarnation)
            self._scheduler.decide(command)
            return self._status()

        self._ask(question, self._joined)

    def _status(self) -> tuple[View, int, int]:
        state = self._scheduler.state.jobs[self._job]
        return (
            self._scheduler.view(self._job),
            state.opened,
            state.workers[self.process.name].ticked,
        )

    def _joined(self, answer: tuple[View, int, int] | ParameterError) -> None:
        if isinstance(answer, ParameterError):
            assert isinstance(answer, Evicted), answer
            self.process.is_alive = False
            return
        self._is_joined = True
        self._view, self._opened, self._at = answer
        self.process.note(f"begins at clock {self._at}, generation {self._view.generation}")
        self._wait()

    def _wait(self) -> None:
        """Wait until the next clock may begin."""
        if self._at >= self._machine.scenario.num_clocks:
            self._leave()
            return
        name = self.process.name

        def question() -> tuple[bool, tuple[View, int, int]]:
            state = self._scheduler.state.jobs[self._job]
            known = state.workers.get(name)
            if known is None or not known.is_live:
                raise Evicted("gone")
            if known.incarnation != self.process.incarnation:
                raise Evicted("another process has the name")
            return self._may(state), self._status()

        self._ask(question, self._may_begin)

    def _may(self, job: Job) -> bool:
        return job.may_begin(self.process.name)

    def _may_begin(self, answer: tuple[bool, tuple[View, int, int]] | ParameterError) -> None:
        if isinstance(answer, ParameterError):
            self._evicted()
            return
        may, (view, opened, ticked) = answer
        if view.generation != self._view.generation:
            self._restart()
            return
        self._view, self._opened = max(view, self._view, key=lambda v: v.version), opened
        assert ticked == self._at, (ticked, self._at)
        if not may or not view.ranges or len(view.tables) < len(self._machine.scenario.tables):
            self._later(AGAIN_S, self._wait)
        else:
            self._begin_clock()

    def _begin_clock(self) -> None:
        self._pull()

    def _evicted(self) -> None:
        """The scheduler takes this process for dead."""
        self._join()

    def _pull(self) -> None:
        me, scenario = self._machine.index, self._machine.scenario
        required: set[PushOf] | None = None
        rows = np.zeros(DENSE.shape)
        keys = self._oracle.mark_keys()
        marks = np.zeros((len(keys), 1))
        ranges = self._view.ranges
        left = 0
        round_ = self._round

        def got(
            out: NDArray[np.float64], where: slice | NDArray[np.intp], message: Message
        ) -> None:
            nonlocal left
            values = np.frombuffer(message.values.tobytes(), np.float64)
            out[where] = values.reshape(-1, out.shape[1])
            left -= 1
            if left == 0:
                found = {int(key) for key, value in zip(keys, marks[:, 0], strict=True) if value}
                assert set(marks[:, 0].tolist()) <= {0.0, 1.0}, marks
                self._oracle.pulled(me, self._at, required, found)
                seconds = self._clock.chance.random() * scenario.compute_s
                self._later(seconds, partial(self._computed, rows))

        def pull_marks() -> None:
            nonlocal required
            required = self._oracle.required(me, self._at, self._view.generation)
            of_marks = []
            for index, range_ in enumerate(ranges):
                where = np.flatnonzero(mine == index)
                if len(where):
                    pull = Pull(0, (0, 0), range_.number, MARKS.number, self._opened)
                    of_marks.append(_Part(Message(pull, keys[where]), partial(got, marks, where)))
            self._request_all(of_marks)

        mine = owners(keys, [each.range for each in ranges])
        requests = []
        for range_ in ranges:
            low, high = range_.range.indices(DENSE.bound)
            if low < high:
                pull = Pull(0, (0, 0), range_.number, DENSE.number, self._opened, low, high)
                requests.append(_Part(Message(pull), partial(got, rows, slice(low, high))))
        left = len(requests) + len(np.unique(mine))
        self._request_all(requests)
        assert round_ == self._round
        self._when_opened(self._at - scenario.marks_bound, pull_marks)

    def _when_opened(self, clock: float, step: Callable[[], None]) -> None:
        """Do the step once all pushes below the clock count."""
        if self._opened >= clock:
            step()
            return

        def answered(answer: tuple[View, int, int]) -> None:
            view, opened, _ = answer
            if view.generation != self._view.generation:
                self._restart()
                return
            self._view, self._opened = max(view, self._view, key=lambda v: v.version), opened
            self._later(AGAIN_S, partial(self._when_opened, clock, step))

        self._ask(self._status, answered)

    def _computed(self, rows: NDArray[np.float64]) -> None:
        if self._machine.is_stalled:
            self._later(STALLED_S, partial(self._computed, rows))
        else:
            self._mark(rows)

    def _mark(self, rows: NDArray[np.float64]) -> None:
        cut = self._view.cut
        # A worker that has come since the checkpoint began marks it as well: its pushes are later.
        if cut is None or cut.number <= self._cut:
            self._push(rows)
            return
        self._cut = cut.number
        left = len(self._view.ranges)

        def done(message: Message) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._push(rows)

        for range_ in self._view.ranges:
            mark = Mark(0, (0, 0), range_.number, self._opened, cut.number, self._at)
            self._request(Message(mark), done)

    def _push(self, rows: NDArray[np.float64]) -> None:
        machine = self._machine
        values = gradient(machine.index, self._at, rows)
        keys = mark_keys(machine.index, self._at, machine.scenario.num_marks)
        marks = self._by_key(MARKS, keys, np.ones((len(keys), 1)))
        requests = []
        for range_ in self._view.ranges:
            low, high = range_.range.indices(DENSE.bound)
            if low < high:
                push = self._push_head(range_, DENSE.number)
                head = replace(push, start=low, stop=high)
                requests.append(Message(head, None, values[low:high].copy()))
            requests += [mark for mark in marks if _range_of(mark) == range_.number]
        self._push_all([*requests, *self._more_pushes()], self._pushed)

    def _more_pushes(self) -> list[Message]:
        return []

    def _pushed(self) -> None:
        """All pushes of the clock are acknowledged."""
        self._tick()

    def _push_all(self, messages: list[Message], then: Callable[[], None]) -> None:
        left = len(messages)

        def done(message: Message) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                then()

        self._request_all([_Part(message, done) for message in messages])

    def _by_key(
        self, table: TableSpec, keys: NDArray[np.uint64], values: NDArray[np.float64]
    ) -> list[Message]:
        """Pushes of rows, one for each range that has some of the keys."""
        ranges = self._view.ranges
        mine = owners(keys, [each.range for each in ranges])
        pushes = []
        for index, range_ in enumerate(ranges):
            if (at := mine == index).any():
                head = self._push_head(range_, table.number)
                pushes.append(Message(head, keys[at], values[at]))
        return pushes

    def _push_head(self, range_: RangeView, table: int) -> Push:
        scenario = self._machine.scenario
        return Push(
            0,
            (0, 0),
            range_.number,
            table,
            self._opened,
            self._at,
            part=0,
            is_held=(scenario.are_marks_held if table == MARKS.number else scenario.staleness == 0),
            incarnation=self.process.incarnation,
            cut=self._cut,
        )

    def _tick(self) -> None:
        name, incarnation = self.process.name, self.process.incarnation
        generation, clock = self._view.generation, self._at
        self._oracle.acknowledged(self._machine.index, clock, generation)
        command = c.Tick(name, incarnation, generation, clock, job=self._job)

        def question() -> tuple[View, int, int]:
            self._scheduler.decide(command)
            return self._status()

        def answered(answer: tuple[View, int, int] | ParameterError) -> None:
            if isinstance(answer, Evicted):
                self._evicted()
                return
            if isinstance(answer, RolledBack):
                self._join()
                return
            assert isinstance(answer, tuple), answer
            view, self._opened, ticked = answer
            if view.generation == self._view.generation:
                assert ticked == clock + 1
            self._view, self._at = view, ticked
            self._wait()

        self._ask(question, answered)

    def _leave(self) -> None:
        name, incarnation = self.process.name, self.process.incarnation
        command = c.WorkerLeft(name, incarnation, job=self._job)

        def question() -> int:
            self._scheduler.decide(command)
            return self._scheduler.state.jobs[self._job].workers[name].ticked

        def answered(ticked: int) -> None:
            if ticked < self._machine.scenario.num_clocks:
                self._join()  # rolled back at this moment
                return
            self._machine.is_done = True
            self._machine.kill(None)

        self._ask(question, answered)

    def leave_early(self) -> None:
        """End in the middle, as a worker without data does."""
        self._round += 1
        self._asked.clear()
        name, incarnation = self.process.name, self.process.incarnation
        command = c.WorkerLeft(name, incarnation, job=self._job)
        self._scheduler.ask(
            self.process, lambda: self._scheduler.decide(command), lambda _: self._machine.gone()
        )

    def _beat(self) -> None:
        name, incarnation = self.process.name, self.process.incarnation

        def question() -> None:
            if self._is_known(self._scheduler.state.jobs[self._job]):
                self._scheduler.heard(name, incarnation)

        self._scheduler.ask(
            self.process, question, lambda _: self.process.after(BEATS_S, self._beat)
        )

    def _is_known(self, job: Job) -> bool:
        known = job.workers.get(self.process.name)
        return known is not None and known.incarnation == self.process.incarnation

    def _ask(self, question: Callable[[], object], answered: Callable[..., None]) -> None:
        round_ = self._round

        def take(answer: object) -> None:
            if round_ == self._round:
                answered(answer)

        self._scheduler.ask(self.process, question, take)

    def _later(self, seconds: float, step: Callable[[], None]) -> None:
        round_ = self._round
        self.process.after(seconds, lambda: step() if round_ == self._round else None)

    # --- requests ---

    def _request(self, message: Message, answered: Callable[[Message], None]) -> None:
        self._send(_Asked([_Part(message, answered)]))

    def _request_all(self, parts: list[_Part]) -> None:
        """Make requests, as one for those of a table that go to one server where the scenario says
        so."""
        together: dict[object, list[_Part]] = {}
        for part in parts:
            head = part.message.head
            assert isinstance(head, Pull | Push)
            servers = self._range(head.range).servers
            is_alone = not self._machine.scenario.asks_together or not servers
            name = head.range if is_alone else servers[0]
            together.setdefault((type(head), head.table, name), []).append(part)
        for each in together.values():
            self._send(_Asked(each))

    def _range(self, number: int) -> RangeView:
        return next(each for each in self._view.ranges if each.number == number)

    def _send(self, asked: _Asked) -> None:
        first = asked.parts[0].message.head
        assert isinstance(first, Request)
        servers = self._range(first.range).servers
        if not servers:
            self._look_again(asked)
            return
        server = servers[0]
        connection = self._connections.get(server)
        if connection is None:
            connection = self._machine.network.connect(self, server)
            if connection is None:
                self._look_again(asked)
                return
            self._connections[server] = connection
        self._last_request += 1
        asked.server = server
        self._asked[self._last_request] = asked
        message = _together([part.message for part in asked.parts])
        head = message.head
        if isinstance(head, Several):
            each = replace(head.each, view=self._view.version)
            head = replace(head, request=self._last_request, each=each)
        else:
            assert isinstance(head, Request)
            head = replace(head, request=self._last_request, view=self._view.version)
        connection.send(self, Message(head, message.keys, message.values))

    def _look_again(self, asked: _Asked) -> None:
        """Ask once more, with the newest view."""
        generation = self._view.generation

        def take(view: View) -> None:
            if view.generation != generation:
                self._restart()
                return
            self._view = max(view, self._view, key=lambda each: each.version)
            if len(asked.parts) > 1:
                self._request_all(asked.parts)  # their servers may be others now
            else:
                self._send(asked)

        self._later(AGAIN_S, lambda: self._ask(lambda: self._scheduler.view(self._job), take))

    def _restart(self) -> None:
        """All is rolled back: go on with the clock that the scheduler says."""
        self._round += 1
        self._asked.clear()
        self._cut = 0
        self._join()

    def received(self, source: Source, message: Message) -> None:
        head = message.head
        assert isinstance(head, Rows | Done | Refused)
        asked = self._asked.pop(head.request, None)
        if asked is None:
            return
        if isinstance(head, Refused):
            assert head.why != "invalid", head
            if head.why == "rolled back":
                self._restart()
            elif head.why == "evicted":
                self._evicted()
            else:
                self._look_again(asked)
        elif len(asked.parts) == 1:
            asked.parts[0].answered(message)
        else:
            for part, values in zip(asked.parts, _values_of(asked.parts, message), strict=True):
                part.answered(Message(head, None, values))

    def asked(self, answer: Message) -> int | None:
        """The range of the request that an answer is for, while it is open; None for several: the
        answer to all comes when the last one is durable, and others may have moved by then."""
        assert isinstance(answer.head, Done | Rows)
        asked = self._asked.get(answer.head.request)
        if asked is None or len(asked.parts) > 1:
            return None
        return _range_of(asked.parts[0].message)

    def broke(self, peer: str, connection: int) -> None:
        known = self._connections.get(peer)
        if known is None or known.number != connection:
            return
        del self._connections[peer]
        for number, asked in list(self._asked.items()):
            if asked.server == peer:
                del self._asked[number]
                self._look_again(asked)


def _range_of(message: Message) -> int:
    assert isinstance(message.head, Request)
    return message.head.range


def _together(messages: list[Message]) -> Message:
    """The requests of one kind for several ranges as one; or the only one."""
    if len(messages) == 1:
        return messages[0]
    sections = []
    for message in messages:
        head, keys, values = message.head, message.keys, message.values
        assert isinstance(head, Pull | Push)
        num_keys = 0 if keys is None else len(keys)
        num_bytes = 0 if values is None else values.nbytes
        sections.append(Section(head.range, head.start, head.stop, num_keys, num_bytes))
    each = messages[0].head
    assert isinstance(each, Pull | Push)
    keys = [message.keys for message in messages if message.keys is not None]
    values = [message.values for message in messages if message.values is not None]
    return Message(
        Several(0, replace(each, range=0, start=0, stop=0), tuple(sections)),
        np.concatenate(keys) if keys else None,
        np.concatenate(values).reshape(-1).view(np.uint8) if values else None,
    )


def _values_of(parts: list[_Part], answer: Message) -> list[NDArray[np.uint8] | None]:
    """The values of each part in an answer to all."""
    if isinstance(answer.head, Done):
        return [None] * len(parts)
    bodies = [values for _, values in answer.bodies] or [answer.values]
    flat = np.concatenate([np.ascontiguousarray(each).reshape(-1) for each in bodies])
    nums = []
    for part in parts:
        head, keys = part.message.head, part.message.keys
        assert isinstance(head, Pull | Push)
        nums.append(head.stop - head.start if keys is None else len(keys))
    per_row = len(flat) // sum(nums)
    return np.split(flat, per_row * np.cumsum(nums)[:-1])


class WorkerMachine:
    """A worker by name: its processes, one after the other, of the class `made`.

    is_stalled: its processes live, and compute without an end.
    """

    def __init__(
        self,
        clock: Clock,
        network: Network,
        scheduler: SchedulerMachine,
        oracle: Oracle,
        index: int,
        scenario: Scenario,
        made: "type[Worker]",
    ) -> None:
        self.clock = clock
        self.network = network
        self.scheduler = scheduler
        self.oracle = oracle
        self.index = index
        self.name = worker_name(scenario, index)
        self.scenario = scenario
        self.worker: Worker | None = None
        self.is_done = False
        self.is_stalled = False
        self._incarnation = 0
        self._made = made

    def boot(self) -> None:
        if self.is_done or (self.worker is not None and self.worker.process.is_alive):
            return
        self._incarnation += 1
        process = Process(self.clock, self.name, self._incarnation)
        process.note("starts")
        self.worker = self._made(self, process)
        self.network.nodes[self.name] = self.worker

    def kill(self, down_s: float | None) -> None:
        if self.worker is not None and self.worker.process.is_alive:
            self.worker.process.note("ends")
            self.worker.process.is_alive = False
            self.network.break_all(self.name)
            if down_s is not None:
                self.clock.after(down_s, None, self.boot)

    def gone(self) -> None:
        self.is_done = True
        self.kill(None)
