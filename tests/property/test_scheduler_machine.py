"""Servers and workers come, die, leave and come back in any order.

After every step the key space is covered exactly, nothing that rises falls, and each barrier is
open exactly when it should be; from every state the replicas are restored once enough servers live.
A second job comes, trains and is removed meanwhile: what is done in one job changes nothing in the
other but the places of its ranges.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from xain_parameters.errors import Evicted, Invalid, RolledBack
from xain_parameters.keys import is_cover
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler.decider import decide, is_saved
from xain_parameters.scheduler.placement import next_placement
from xain_parameters.scheduler.state import Event, Job, Settings, State, fold, view_of
from xain_parameters.specs import Plugin, TableSpec

SERVERS = st.sampled_from(["a", "b", "c", "d"])
WORKERS = st.sampled_from(["w1", "w2", "w3"])
OTHER = "other"
OTHER_WORKERS = st.sampled_from(["v1", "v2"])
TABLE = TableSpec(0, "w", 100, 4, True, "float32", Plugin("add"), Plugin("zeros"), (100, 4))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_replicas=st.integers(0, 2),
        has_log=st.booleans(),
        checkpoint_interval=st.sampled_from([0, 2]),
        max_learners=st.integers(1, 4),
    )
    def start(self, **chosen: int) -> None:
        self.first = self.state = State.first(1)
        self.events: list[Event] = []
        self.incarnation = 0
        self.primaries: dict[tuple[int, int, int], str] = {}
        self.processes: dict[str, int] = {}  # incarnation of each worker in a loop
        self.ticked: dict[str, int] = {}  # the book beside the scheduler's
        # The chosen settings are integers by name.
        self.run(c.Start(Settings(**chosen, checkpoints="cuts")))
        self.run(c.DeclareTable(TABLE))

    @property
    def job(self) -> Job:
        return self.state.jobs[""]

    def run(self, command: c.Command) -> None:
        before = self.state
        decision = decide(before, command)
        self.events += decision.events
        self.state = decision.state
        if isinstance(command, c.OfJob):
            for name in before.jobs.keys() & self.state.jobs.keys() - {command.job}:
                assert own(self.state.jobs[name]) == own(before.jobs[name])
        old, new = view_of(before), view_of(self.state)
        assert new.version >= old.version
        assert (new == old) or new.version > old.version, "a view changed under one number"
        if new.generation == old.generation:
            assert self.job.opened >= before.jobs[""].opened
        else:
            cut = before.jobs[""].cuts[-1] if before.jobs[""].cuts else None
            for name, worker in self.job.workers.items():
                start = 0 if cut is None else cut.clocks.get(name, cut.clock)
                assert worker.ticked == start
                self.ticked[name] = start
        epochs = {each.number: each.epoch for each in old.ranges}
        for each in new.ranges:
            assert each.epoch >= epochs.get(each.number, 0)
        again = decide(self.state, command) if not _makes_new(command) else None
        assert again is None or again.events == (), "the same command again changed something"

    # --- servers ---

    @rule(name=SERVERS)
    def join(self, name: str) -> None:
        self.incarnation += 1
        self.run(c.ServerJoined(name, f"{name}:{self.incarnation}", self.incarnation))

    @rule(name=SERVERS, has_log=st.booleans(), job=st.sampled_from(["", OTHER]))
    def return_with_log(self, name: str, has_log: bool, job: str) -> None:
        of_job = self.state.jobs.get(job, self.job)
        epochs = {each.number: each.epoch for each in of_job.ranges if not each.servers}
        has, lacks = (epochs, {}) if has_log else ({}, epochs)
        self.run(c.ServerReturned(name, of_job.generation, has, lacks))

    @rule(name=SERVERS)
    def die(self, name: str) -> None:
        held = [r.number for r in self.job.ranges if set(r.servers) == {name}]
        before = self.state
        self.run(c.ServerDied(name))
        if not held:
            assert self.job.num_rollbacks == before.jobs[""].num_rollbacks, "nothing was lost"
        if held and before.settings.has_log:
            assert all(self.job.lost[number] == name for number in held)

    @rule(name=SERVERS)
    def leave(self, name: str) -> None:
        held = {r.number for r in self.job.ranges if r.servers}
        self.run(c.ServerLeft(name))
        assert held <= {r.number for r in self.job.ranges if r.servers}, "a leaver took data along"

    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        learning = [each for each in self.state.ranges if each.learners]
        if learning:
            each = data.draw(st.sampled_from(learning))
            self.run(c.LearnerWhole(each.number, each.epoch, each.learners[0]))

    @rule()
    def give_up(self) -> None:
        self.run(c.GiveUpLost())

    # --- workers ---

    @rule(name=WORKERS, staleness=st.sampled_from([0, 2, None]))
    def begin(self, name: str, staleness: int | None) -> None:
        self.incarnation += 1
        known = self.job.workers.get(name)
        self.run(c.WorkerJoined(name, self.incarnation, staleness))
        clock = self.job.workers[name].ticked
        if known is not None and known.is_live:
            assert clock == self.ticked[name]
        else:
            assert clock == max(self.ticked.get(name, 0), self.job.opened)
        self.processes[name], self.ticked[name] = self.incarnation, clock

    @rule(name=WORKERS, lag=st.integers(0, 2))
    def tick(self, name: str, lag: int) -> None:
        """Only a worker that may work ticks; lag: an old tick comes again."""
        if name not in self.processes or (not lag and not self.job.may_begin(name)):
            return
        clock = self.ticked[name] - lag
        self.run(c.Tick(name, self.processes[name], self.job.generation, clock))
        self.ticked[name] += not lag

    @rule(staleness=st.sampled_from([0, 2, None]), ticks=st.lists(WORKERS, max_size=8))
    def work(self, staleness: int | None, ticks: list[str]) -> None:
        """All workers are in a loop, and tick in some order."""
        for name in ("w1", "w2", "w3"):
            if name not in self.processes:
                self.begin(name, staleness)
        for name in ticks:
            self.tick(name, 0)

    @rule(name=WORKERS)
    def tick_of_former_process(self, name: str) -> None:
        process = self.processes.get(name, self.incarnation + 1) - 1
        before = self.state
        try:
            decide(
                before, c.Tick(name, process, before.jobs[""].generation, self.ticked.get(name, 0))
            )
        except (Evicted, RolledBack):
            return
        raise AssertionError("a former process of a worker ticked")

    @rule(name=WORKERS)
    def end(self, name: str) -> None:
        if name in self.processes:
            self.run(c.WorkerLeft(name, self.processes.pop(name)))

    @rule(name=WORKERS)
    def worker_dies(self, name: str) -> None:
        self.run(c.WorkerDied(name))
        self.processes.pop(name, None)

    # --- the second job ---

    @rule()
    def declare_in_other(self) -> None:
        self.run(c.DeclareTable(TABLE, job=OTHER))

    @rule(name=OTHER_WORKERS, staleness=st.sampled_from([0, 2, None]))
    def begin_in_other(self, name: str, staleness: int | None) -> None:
        self.incarnation += 1
        self.run(c.WorkerJoined(name, self.incarnation, staleness, job=OTHER))

    @rule(name=OTHER_WORKERS)
    def tick_in_other(self, name: str) -> None:
        other = self.state.jobs.get(OTHER)
        known = None if other is None else other.workers.get(name)
        if other is not None and known is not None and known.is_live and other.may_begin(name):
            tick = c.Tick(name, known.incarnation, other.generation, known.ticked, job=OTHER)
            self.run(tick)

    @rule(name=OTHER_WORKERS, dies=st.booleans())
    def end_in_other(self, name: str, dies: bool) -> None:
        other = self.state.jobs.get(OTHER)
        known = None if other is None else other.workers.get(name)
        if known is not None:
            left = c.WorkerLeft(name, known.incarnation, job=OTHER)
            self.run(c.WorkerDied(name, job=OTHER) if dies else left)

    @rule()
    def checkpoint_of_other(self) -> None:
        try:
            self.run(c.CheckpointDue(job=OTHER))
        except (Evicted, Invalid):
            other = self.state.jobs.get(OTHER)
            assert other is None or not other.ranges or other.lost

    @rule()
    def remove_other(self) -> None:
        other = self.state.jobs.get(OTHER)
        try:
            self.run(c.RemoveJob(job=OTHER))
        except (Evicted, Invalid):
            assert other is None or other.clocks
        else:
            assert OTHER not in self.state.jobs

    # --- checkpoints ---

    @rule()
    def ask_for_checkpoint(self) -> None:
        try:
            self.run(c.CheckpointDue())
        except Invalid:
            assert not all(each.servers for each in self.job.ranges) or not self.job.ranges

    @precondition(lambda self: self.job.cut is not None)
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        assert self.job.cut is not None
        marked = [name for name in self.job.cut.workers if name in self.processes]
        clocks = {name: self.ticked[name] for name in marked}
        number = data.draw(st.sampled_from([each.number for each in self.job.ranges]))
        generation, cut = self.job.generation, self.job.cut.number
        self.run(c.RangeSaved(generation, cut, number, f"{number}", clocks))
        if is_saved(self.job):
            self.run(c.CutWritten(cut))
            assert self.job.cuts[-1].number == cut

    # --- what always holds ---

    @rule()
    def restart(self) -> None:
        before = view_of(self.state)
        self.run(c.Start(self.state.settings))
        assert view_of(self.state).version > before.version

    @invariant()
    def key_space_is_covered(self) -> None:
        ranges = self.job.ranges
        assert not ranges or is_cover([each.range for each in ranges])
        live = {name for name, server in self.state.servers.items() if server.is_live}
        for each in ranges:
            assert {*each.servers, *each.learners} <= live
            assert bool(each.servers) == (each.number not in self.job.lost)
            if each.servers:
                key = (self.job.generation, each.number, each.epoch)
                assert self.primaries.setdefault(key, each.servers[0]) == each.servers[0]
        learners = sum(len(each.learners) for each in self.state.ranges)
        assert learners <= self.state.settings.max_learners
        assert next_placement(self.state) is None

    @invariant()
    def barriers_are_right(self) -> None:
        live = {name: self.ticked[name] for name in self.processes}
        assert self.job.clocks == live
        for name, ticked in live.items():
            staleness = self.job.workers[name].staleness
            is_open = staleness is None or ticked - min(live.values()) <= staleness
            assert self.job.may_begin(name) == is_open
        if live:
            assert any(self.job.may_begin(name) for name in live), "all wait for each other"
            assert self.job.opened == min(live.values())

    @invariant()
    def journal_folds_to_the_state(self) -> None:
        assert fold(self.first, self.events) == self.state

    def teardown(self) -> None:
        """Enough servers live again: all ranges get their replicas, evenly."""
        if not hasattr(self, "state"):
            return
        for name in "abcd":
            self.run(c.ServerDied(name))
            self.join(name)
        self.give_up()
        for _ in range(1000):
            learning = [each for each in self.state.ranges if each.learners]
            if not learning:
                break
            each = learning[0]
            self.run(c.LearnerWhole(each.number, each.epoch, each.learners[0]))
        wanted = self.state.settings.num_replicas + 1
        assert all(len(each.servers) == wanted for each in self.state.ranges)
        primaries = [each.servers[0] for each in self.state.ranges]
        copies = [name for each in self.state.ranges for name in each.servers]
        for names in (primaries, copies):
            counts = [names.count(name) for name in "abcd"]
            assert max(counts) - min(counts) <= 1, counts


def own(job: Job) -> Job:
    """The part of a job that no other job may change. A move of ranges that makes room for those of
    another may end an open checkpoint, which is made again."""
    return replace(job, number=0, ranges=(), leaves={}, cut=None)


def _makes_new(command: c.Command) -> bool:
    return isinstance(command, c.Start | c.CheckpointDue | c.RemoveJob)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
