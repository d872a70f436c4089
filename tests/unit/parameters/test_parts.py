"""Parts of a job's data: each is read once in each epoch, whoever comes and goes."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from xain_parameters.errors import Invalid
from xain_parameters.jobs.parts import MAX_OPEN_EPOCHS, Source
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler.decider import MAX_DATA, decide, has_part
from xain_parameters.scheduler.state import Job, State
from xain_parameters.specs import MAX_WORKERS

NAMES = st.sampled_from(["a", "b", "c", "d"])
NUM_EPOCHS = 6


class Workers(RuleBasedStateMachine):
    """Workers in a loop without a limit; what each has read is told with its next question."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State.first(1)
        self.incarnation = 0
        self.here: dict[str, int] = {}
        self.reading: dict[str, tuple[int, int]] = {}
        self.done: dict[str, tuple[int, int]] = {}
        self.num_read: Counter[tuple[int, int]] = Counter()
        self.num_parts: dict[int, int] = {}
        for name in "abc":
            self.come(name)

    @property
    def job(self) -> Job:
        return self.state.jobs["j"]

    def run(self, command: c.Command) -> None:
        _, self.state = decide(self.state, command)
        if not isinstance(command, c.WorkerGone | c.WorkerDied):
            assert decide(self.state, command).events == ()

    def wanted(self, name: str, clock: int = 0) -> c.PartWanted:
        source = Source(100, 7, NUM_EPOCHS)
        done = self.done.get(name)
        generation = self.job.generation
        return c.PartWanted(name, self.here[name], generation, clock, "x", source, done, job="j")

    @rule(name=NAMES)
    def come(self, name: str) -> None:
        """A process of a worker, the first or another one."""
        self.incarnation += 1
        self.here[name] = self.incarnation
        self.reading.pop(name, None)
        self.done.pop(name, None)
        self.run(c.WorkerEntered(name, self.incarnation, 3, job="j"))
        self.run(c.WorkerJoined(name, self.incarnation, None, job="j"))

    @rule(name=NAMES)
    def go(self, name: str) -> None:
        if len(self.here) > 1 and self.here.pop(name, None):
            self.reading.pop(name, None)
            self.done.pop(name, None)
            self.run(c.WorkerDied(name, job="j"))
            self.run(c.WorkerGone(name, job="j"))

    @rule(name=NAMES)
    def step(self, name: str) -> None:
        """Take a part, or read the one that was taken to its end."""
        if name not in self.here:
            return
        if name in self.reading:
            part = self.reading.pop(name)
            self.num_read[part] += 1
            self.done[name] = part
            return
        self.run(self.wanted(name))
        self.done.pop(name, None)
        data = self.job.data["x"]
        part_now = data.part_of(name)
        if part_now is not None:
            self.num_parts[part_now[0]] = data.parts_in(part_now[0])
            if self.num_read[part_now]:  # it was read by a process that could not tell
                self.done[name] = part_now
            else:
                self.reading[name] = part_now

    @invariant()
    def no_part_is_read_twice_or_by_two(self) -> None:
        assert all(times <= 1 for times in self.num_read.values())
        assert len(set(self.reading.values())) == len(self.reading)
        if "x" in self.job.data:
            data = self.job.data["x"]
            assert data.num_begun - data.num_done <= MAX_OPEN_EPOCHS

    def teardown(self) -> None:
        """The workers that are left read all of it."""
        for _ in range(300):
            for name in list(self.here):
                self.step(name)
            if "x" in self.job.data and self.job.data["x"].num_done == NUM_EPOCHS:
                break
        data = self.job.data["x"]
        assert data.num_done == NUM_EPOCHS
        parts = [(e, i) for e in range(NUM_EPOCHS) for i in range(data.parts_in(e))]
        assert sorted(self.num_read) == parts
        assert all(not has_part(self.job, self.wanted(name)) for name in self.here)


def test_number_of_workers_and_of_data_of_a_job_is_bounded() -> None:
    state = State.first(1)
    with pytest.raises(Invalid, match=f"1 to {MAX_WORKERS} workers, not {MAX_WORKERS + 1}"):
        decide(state, c.WorkerEntered("a", 1, MAX_WORKERS + 1, job="j"))
    state = decide(state, c.WorkerEntered("a", 1, MAX_WORKERS, job="j")).state
    for number in range(MAX_DATA + 1):
        wanted = c.PartWanted("a", 1, 1, -1, f"x{number}", Source(100, 7, 1), job="j")
        if number == MAX_DATA:
            with pytest.raises(Invalid, match=f"'j' has {MAX_DATA} data already"):
                decide(state, wanted)
        else:
            state = decide(state, wanted).state


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
