"""Servers and workers come, die, leave and come back in any order.

After every step the key space is covered exactly, nothing that rises falls, and each barrier is
open exactly when it should be; from every state the replicas are restored once enough servers live.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from xain_parameters.errors import Evicted, Invalid, RolledBack
from xain_parameters.keys import is_cover
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler.decider import decide, is_saved
from xain_parameters.scheduler.placement import next_placement
from xain_parameters.scheduler.state import Event, Settings, State, fold, view_of
from xain_parameters.specs import Plugin, TableSpec

SERVERS = st.sampled_from(["a", "b", "c", "d"])
WORKERS = st.sampled_from(["w1", "w2", "w3"])
TABLE = TableSpec(0, "w", 100, 4, True, "float32", Plugin("add"), Plugin("zeros"), (100, 4))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_replicas=st.integers(0, 2),
        has_log=st.booleans(),
        checkpoint_interval=st.sampled_from([0, 2]),
        max_learners=st.integers(1, 4),
    )
    def start(self, **chosen: int) -> None:
        self.first = self.state = State(Settings(), generation=1)
        self.events: list[Event] = []
        self.incarnation = 0
        self.primaries: dict[tuple[int, int, int], str] = {}
        self.processes: dict[str, int] = {}  # incarnation of each worker in a loop
        self.ticked: dict[str, int] = {}  # the book beside the scheduler's
        # The chosen settings are integers by name.
        self.run(c.Start(Settings(**chosen, checkpoints="cuts")))  # type: ignore[arg-type]
        self.run(c.DeclareTable(TABLE))

    def run(self, command: c.Command) -> None:
        before = self.state
        decision = decide(before, command)
        self.events += decision.events
        self.state = decision.state
        old, new = view_of(before), view_of(self.state)
        assert new.version >= old.version
        assert (new == old) or new.version > old.version, "a view changed under one number"
        if new.generation == old.generation:
            assert self.state.opened >= before.opened
        else:
            cut = before.cuts[-1] if before.cuts else None
            for name, worker in self.state.workers.items():
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

    @rule(name=SERVERS, has_log=st.booleans())
    def return_with_log(self, name: str, has_log: bool) -> None:
        epochs = {each.number: each.epoch for each in self.state.ranges if not each.servers}
        has, lacks = (epochs, {}) if has_log else ({}, epochs)
        self.run(c.ServerReturned(name, self.state.generation, has, lacks))

    @rule(name=SERVERS)
    def die(self, name: str) -> None:
        held = [r.number for r in self.state.ranges if set(r.servers) == {name}]
        before = self.state
        self.run(c.ServerDied(name))
        if not held:
            assert self.state.num_rollbacks == before.num_rollbacks, "nothing was lost"
        if held and before.settings.has_log:
            assert all(self.state.lost[number] == name for number in held)

    @rule(name=SERVERS)
    def leave(self, name: str) -> None:
        held = {r.number for r in self.state.ranges if r.servers}
        self.run(c.ServerLeft(name))
        assert held <= {r.number for r in self.state.ranges if r.servers}, (
            "a leaver took data along"
        )

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
        known = self.state.workers.get(name)
        self.run(c.WorkerJoined(name, self.incarnation, staleness))
        clock = self.state.workers[name].ticked
        if known is not None and known.is_live:
            assert clock == self.ticked[name]
        else:
            assert clock == max(self.ticked.get(name, 0), self.state.opened)
        self.processes[name], self.ticked[name] = self.incarnation, clock

    @rule(name=WORKERS, lag=st.integers(0, 2))
    def tick(self, name: str, lag: int) -> None:
        """Only a worker that may work ticks; lag: an old tick comes again."""
        if name not in self.processes or (not lag and not self.state.may_begin(name)):
            return
        clock = self.ticked[name] - lag
        self.run(c.Tick(name, self.processes[name], self.state.generation, clock))
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
            decide(before, c.Tick(name, process, before.generation, self.ticked.get(name, 0)))
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

    # --- checkpoints ---

    @rule()
    def ask_for_checkpoint(self) -> None:
        try:
            self.run(c.CheckpointDue())
        except Invalid:
            assert not all(each.servers for each in self.state.ranges) or not self.state.ranges

    @precondition(lambda self: self.state.cut is not None)
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        assert self.state.cut is not None
        marked = [name for name in self.state.cut.workers if name in self.processes]
        clocks = {name: self.ticked[name] for name in marked}
        number = data.draw(st.sampled_from([each.number for each in self.state.ranges]))
        generation, cut = self.state.generation, self.state.cut.number
        self.run(c.RangeSaved(generation, cut, number, f"{number}", clocks))
        if is_saved(self.state):
            self.run(c.CutWritten(cut))
            assert self.state.cuts[-1].number == cut

    # --- what always holds ---

    @rule()
    def restart(self) -> None:
        before = view_of(self.state)
        self.run(c.Start(self.state.settings))
        assert view_of(self.state).version > before.version

    @invariant()
    def key_space_is_covered(self) -> None:
        ranges = self.state.ranges
        assert not ranges or is_cover([each.range for each in ranges])
        live = {name for name, server in self.state.servers.items() if server.is_live}
        for each in ranges:
            assert {*each.servers, *each.learners} <= live
            assert bool(each.servers) == (each.number not in self.state.lost)
            if each.servers:
                key = (self.state.generation, each.number, each.epoch)
                assert self.primaries.setdefault(key, each.servers[0]) == each.servers[0]
        assert sum(len(each.learners) for each in ranges) <= self.state.settings.max_learners
        assert next_placement(self.state) is None

    @invariant()
    def barriers_are_right(self) -> None:
        live = {name: self.ticked[name] for name in self.processes}
        assert self.state.clocks == live
        for name, ticked in live.items():
            staleness = self.state.workers[name].staleness
            is_open = staleness is None or ticked - min(live.values()) <= staleness
            assert self.state.may_begin(name) == is_open
        if live:
            assert any(self.state.may_begin(name) for name in live), "all wait for each other"
            assert self.state.opened == min(live.values())

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


def _makes_new(command: c.Command) -> bool:
    return isinstance(command, c.Start | c.CheckpointDue)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
