"""Commands in, events and state out."""

import pytest
from msgspec.structs import replace

from xain_parameters.errors import Evicted, Invalid, RolledBack, TableConflict
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler import state as e
from xain_parameters.scheduler.decider import MAX_JOBS, decide, is_saved
from xain_parameters.scheduler.state import Job, Settings, State, fold, view_of
from xain_parameters.specs import Gap, Plugin, TableSpec, View, openings

TABLE = TableSpec(0, "w", 100, 4, True, "float32", Plugin("add"), Plugin("zeros"), (100, 4))


class Group:
    """A scheduler's state, and the events that led to it."""

    def __init__(self, **settings: object) -> None:
        self.first = State.first(7)
        self.state = self.first
        self.events: list[e.AnyEvent] = []
        self.incarnation = 0
        self(c.Start(Settings(**settings)))

    @property
    def job(self) -> Job:
        return self.state.jobs[""]

    def __call__(self, command: c.Command) -> tuple[e.AnyEvent, ...]:
        events, state = decide(self.state, command)
        assert fold(self.state, events) == state
        assert view_of(state).version >= view_of(self.state).version
        self.events += events
        self.state = state
        return events

    def join(self, *names: str) -> None:
        for name in names:
            self.incarnation += 1
            self(c.ServerJoined(name, f"{name}:1", self.incarnation))

    def fill(self) -> None:
        """All learners become whole."""
        while learning := [each for each in self.job.ranges if each.learners]:
            each = learning[0]
            self(c.LearnerWhole(each.number, each.epoch, each.learners[0]))

    def begin(self, name: str, staleness: int | None = 0, incarnation: int = 1) -> None:
        self(c.WorkerJoined(name, incarnation, staleness))

    def tick(self, name: str, clock: int, incarnation: int = 1) -> None:
        self(c.Tick(name, incarnation, self.job.generation, clock))

    def save(self, clocks: dict[str, int] | None = None) -> None:
        """All ranges save their part of the open checkpoint, and the manifest is written."""
        assert self.job.cut is not None
        cut = self.job.cut.number
        for each in self.job.ranges:
            path = f"{each.number}.part"
            saved = c.RangeSaved(self.job.generation, cut, each.number, path, clocks or {})
            self(saved)
        assert is_saved(self.job)
        self(c.CutWritten(cut))

    def primaries(self) -> list[str]:
        return sorted(each.servers[0] for each in self.job.ranges if each.servers)


def make_group(*servers: str, **settings: object) -> Group:
    """With a table, so that there are ranges: four, unless settings say another number."""
    group = Group(**{"num_ranges": 4, **settings})
    group.join(*servers)
    group(c.DeclareTable(TABLE))
    group.fill()
    return group


# --- placement ---


def test_first_table_spreads_ranges_evenly_over_servers():
    assert make_group("a", "b", num_ranges=0).primaries() == [*"aaaabbbb"]
    assert make_group("a", "b", "c", num_ranges=0).primaries() == [*"aaabbbccc"]
    assert len(make_group("a", num_ranges=7).state.ranges) == 7


@pytest.mark.parametrize("num_servers", range(1, 10))
def test_number_of_servers_can_double_and_each_has_a_range(num_servers):
    names = [f"s{index:02}" for index in range(max(8, 2 * num_servers))]
    group = make_group(*names[:num_servers], num_ranges=0)
    group.join(*names[num_servers:])
    group.fill()
    assert set(group.primaries()) == set(names)


def test_leaving_server_keeps_its_ranges_until_they_have_moved():
    group = make_group("a", "b")
    group(c.ServerLeft("a"))
    assert not group.state.may_go("a")
    assert group.primaries() == ["a", "a", "b", "b"]
    group.fill()
    assert group.state.may_go("a")
    assert group.primaries() == ["b"] * 4
    group(c.ServerDied("a"))
    assert group.job.num_rollbacks == 0


def test_leaving_server_with_a_backup_and_nowhere_to_move_goes_at_once():
    group = make_group("a", "b", num_replicas=1)
    group(c.ServerLeft("a"))
    assert group.state.may_go("a")
    assert group.primaries() == ["b"] * 4


@pytest.fixture
def group() -> Group:
    """One server has all four ranges."""
    return make_group("a")


def test_only_server_that_leaves_stays_until_another_joins(group):
    group(c.ServerLeft("a"))
    assert not group.state.may_go("a")
    group.join("b")
    group.fill()
    assert group.state.may_go("a")
    assert group.primaries() == ["b"] * 4


def test_new_process_under_a_live_name_does_not_inherit_ranges():
    group = make_group("a", "b", num_replicas=1)
    group.join("a")  # its death was not noticed
    assert all(each.servers == ("b",) for each in group.job.ranges)
    with pytest.raises(Evicted):
        group(c.ServerJoined("a", "a:1", 1))


# --- loss ---


def test_lost_range_without_log_rolls_all_back_once_a_server_is_there():
    group = make_group("a", "b")
    generation = group.job.generation
    group(c.ServerDied("a"))
    assert group.job.generation == generation + 1
    assert group.primaries() == ["b"] * 4
    assert group.job.rolled_back_to is None
    group(c.ServerDied("b"))
    assert group.job.generation == generation + 1
    assert group.primaries() == []
    group.join("c")
    assert group.job.generation == generation + 2
    assert group.primaries() == ["c"] * 4


def test_lost_range_with_log_waits_for_its_server():
    group = make_group("a", "b", has_log=True)
    lost = [each.number for each in group.job.ranges if each.servers == ("a",)]
    generation = group.job.generation
    group(c.ServerDied("a"))
    group.join("a")
    assert group.primaries() == ["b", "b"]
    before = {each.number: each.epoch for each in group.job.ranges}
    early = {number: before[number] - 1 for number in lost}
    assert group(c.ServerReturned("a", generation, {}, early)) == ()
    assert group(c.ServerReturned("a", generation - 1, {}, before)) == ()
    group(c.ServerReturned("a", generation, {number: before[number] for number in lost}))
    assert group.primaries() == ["a", "a", "b", "b"]
    assert group.job.generation == generation


def test_server_that_returns_without_its_log_rolls_back():
    group = make_group("a", "b", has_log=True)
    generation = group.job.generation
    group(c.ServerDied("a"))
    group.join("a")
    epochs = {each.number: each.epoch for each in group.job.ranges if not each.servers}
    group(c.ServerReturned("a", generation, {}, epochs))
    assert group.job.generation == generation + 1
    assert not group.job.lost


def test_operator_gives_up_a_server_with_a_log():
    group = make_group("a", "b", has_log=True)
    group(c.ServerDied("a"))
    group(c.GiveUpLost())
    assert group.job.num_rollbacks == 1
    assert group.primaries() == ["b"] * 4


# --- tables ---


def test_table_is_declared_once_by_name(group):
    assert group(c.DeclareTable(TABLE)) == ()
    assert [table.number for table in group.job.tables] == [1]
    with pytest.raises(TableConflict, match=r"'w' already, which is shape \(100, 4\)"):
        # The fields by name are of several types.
        group(c.DeclareTable(TableSpec(**{**fields(TABLE), "shape": (50, 8)})))


def fields(table: TableSpec) -> dict[str, object]:
    return {name: getattr(table, name) for name in table.__struct_fields__}


# --- clocks ---


def test_tick_after_ticks_that_a_power_cut_took_counts(group):
    group.begin("w1")
    group.tick("w1", 4)
    assert group.job.workers["w1"].ticked == 5


def test_worker_that_comes_back_too_late_leaves_a_gap(group):
    group.begin("w1")
    group.begin("w2")
    group(c.WorkerDied("w2"))
    group.tick("w1", 0)
    group.tick("w1", 1)
    group.begin("w2", incarnation=2)
    assert group.job.workers["w2"].ticked == 2
    assert group.job.gaps == (Gap("w2", 0, 2),)


def test_loop_waits_for_workers_and_counts_those_that_have_left(group):
    group.begin("w1")
    group.begin("w2")
    assert not group.job.may_begin("w1", num_workers=3)
    group(c.WorkerLeft("w2", 1))  # without data
    assert not group.job.may_begin("w1", num_workers=3)
    group.begin("w3")
    assert group.job.may_begin("w1", num_workers=3)


def test_start_barrier_does_not_count_a_dead_worker(group):
    group.begin("w1")
    group(c.WorkerDied("w1"))
    group.begin("w2")
    assert not group.job.may_begin("w2", num_workers=2)


def test_start_barrier_counts_anew_when_all_have_left(group):
    group.begin("w1")
    group.begin("w2")
    group(c.WorkerLeft("w1", 1))
    group(c.WorkerLeft("w2", 1))
    group.begin("w1")
    assert not group.job.may_begin("w1", num_workers=2)


def test_all_pushes_count_when_all_workers_have_left(group):
    group.begin("w1", None)
    group.begin("w2", None)
    group.tick("w1", 0)
    group.tick("w1", 1)
    group(c.WorkerLeft("w1", 1))
    group.tick("w2", 0)
    group(c.WorkerLeft("w2", 1))
    assert group.job.opened == 2


# --- checkpoints ---


def test_checkpoint_begins_with_every_interval():
    group = make_group("a", checkpoint_interval=2, checkpoints="cuts")
    group.begin("w1")
    group.tick("w1", 0)
    assert group.job.cut is None
    group.tick("w1", 1)
    assert group.job.cut.workers == ("w1",)
    for clock in range(2, 7):  # the next one waits for this one
        group.tick("w1", clock)
    assert group.job.last_cut == 1
    group.save({"w1": 2})
    assert group.job.last_cut == 2
    assert [cut.number for cut in group.job.cuts] == [1]


def test_next_checkpoint_comes_when_it_is_due_after_one_that_failed():
    group = make_group("a", checkpoint_interval=2, checkpoints="cuts")
    group.begin("w1")
    group.tick("w1", 0)
    group.tick("w1", 1)
    group.save({"w1": 2})
    group.tick("w1", 2)
    group.tick("w1", 3)
    failed = c.SaveFailed(group.job.generation, 2, 3, "full")
    group(failed)
    assert group.job.cut is None
    assert [cut.number for cut in group.job.cuts] == [1]
    group.tick("w1", 4)
    assert group.job.cut is None
    group.tick("w1", 5)
    assert group(failed) == ()  # reported twice
    group.save({"w1": 6})
    assert [cut.number for cut in group.job.cuts] == [1, 3]


def test_rollback_goes_to_the_last_whole_checkpoint(group):
    group.begin("w1", 3)
    group.begin("w2", 3)
    for clock in range(4):
        group.tick("w1", clock)
    group.tick("w2", 0)
    group(c.CheckpointDue())
    group.save({"w1": 4, "w2": 2})
    group.tick("w2", 1)
    group(c.CheckpointDue())  # in the middle of this one the server is lost
    old = group.job.generation
    group.join("b")
    group(c.ServerDied("a"))
    assert group.job.rolled_back_to == 1
    assert group.job.cut is None
    assert group.job.clocks == {"w1": 4, "w2": 2}
    assert group.job.opened == 2
    with pytest.raises(RolledBack):
        group(c.Tick("w2", 1, old, 2))
    group.tick("w2", 2)


def test_worker_that_died_before_its_mark_is_in_the_checkpoint_with_its_clocks(group):
    group.begin("w1", None)
    group.begin("w2", None)
    group.tick("w2", 0)
    group(c.CheckpointDue())
    group(c.WorkerDied("w2"))
    group.save({"w1": 1})
    (cut,) = group.job.cuts
    assert cut.clocks == {"w1": 1, "w2": 1}
    assert cut.clock == 1


def test_checkpoint_of_nothing_is_refused():
    with pytest.raises(Invalid, match="nothing to save"):
        Group()(c.CheckpointDue())


# --- what servers make of a view ---


def test_openings_keep_the_pushes_after_a_gap():
    view = View(1, 1, (), (), {}, ended={"dead": 7}, gaps=(Gap("w1", 8, 9), Gap("w2", 5, 12)))
    assert list(openings(view, 8, 14)) == [
        (9, {"dead": 7, "w1": 8, "w2": 5}),
        (12, {"dead": 7, "w2": 5}),
        (14, {"dead": 7}),
    ]
    assert list(openings(view, 14, 14)) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"bound": 1 << 60, "dim": 64}, "more than"),
        ({"bound": None, "dim": 1 << 40}, "a row of"),
        ({"update": Plugin("nosuch")}, "no update rule 'nosuch'"),
        ({"update": Plugin("sgd", {"learning_rate": -1.0})}, "must be positive"),
        ({"init": Plugin("nosuch")}, "no initialiser 'nosuch'"),
        ({"dtype": "int8"}, "no values of dtype int8"),
        ({"bound": 0}, "at least one row"),
        ({"staleness": -1}, "staleness must not be negative"),
    ],
)
def test_table_that_no_server_can_have_is_refused(changes, why, group):
    before = group.state
    with pytest.raises(Invalid, match=why):
        group(c.DeclareTable(replace(TABLE, name="bad", **changes)))
    assert group.state == before


def test_worker_that_came_back_during_a_checkpoint_goes_on_where_its_pushes_end(group):
    """The worker died in clock 7, others went on, and it came back at 8 and passed the mark there:
    the pushes of clock 7 that the checkpoint has of it do not count after a roll-back."""
    for name in ("v", "w"):
        group.begin(name)
    for clock in range(7):
        for name in ("v", "w"):
            group.tick(name, clock)
    group(c.CheckpointDue())
    group.begin("x")  # passes the mark at 7
    group(c.WorkerDied("w"))
    for name in ("v", "x"):
        group.tick(name, 7)
    group.begin("w", incarnation=2)
    assert group.job.clocks == {"v": 8, "w": 8, "x": 8}
    group.save({"v": 8, "w": 8, "x": 7})
    assert group.job.cuts[-1].clocks == {"v": 8, "w": 7, "x": 7}
    group(c.ServerDied("a"))
    group.join("b")
    assert dict(openings(view_of(group.state), 7, 8))[8]["w"] == 7


# --- jobs ---


def with_two_jobs(**settings: object) -> Group:
    """A worker in the loop of each, one clock on."""
    group = make_group("a", "b", **settings)
    group(c.DeclareTable(TABLE, job="two"))
    for job, name in (("", "w1"), ("two", "w2")):
        group(c.WorkerJoined(name, 1, 0, job=job))
        group(c.Tick(name, 1, 7, 0, job=job))
    return group


def test_ranges_have_numbers_of_the_group_and_servers_are_balanced_over_all_jobs():
    group = with_two_jobs(num_ranges=3)
    ranges = group.state.ranges
    assert [each.number for each in ranges] == [1, 2, 3, 10_001, 10_002, 10_003]
    assert sorted(each.servers[0] for each in ranges) == [*"aaabbb"]
    group(c.DeclareTable(TABLE, job="three"))
    assert sorted(each.servers[0] for each in group.state.ranges) == [*"aaaaabbbb"]


def test_job_that_is_removed_begins_anew_under_other_numbers():
    group = with_two_jobs()
    with pytest.raises(Invalid, match="'two' has workers in its loop: w2"):
        group(c.RemoveJob(job="two"))
    group(c.WorkerLeft("w2", 1, job="two"))
    group(c.RemoveJob(job="two"))
    assert group.state.ranges == group.job.ranges
    group(c.DeclareTable(TABLE, job="two"))
    again = group.state.jobs["two"]
    assert (again.job, again.opened, again.workers) == (2, 0, {})
    assert again.ranges[0].number == 20_001


def test_number_of_jobs_is_bounded():
    state = State.first(7)
    for number in range(MAX_JOBS):
        state = decide(state, c.DeclareTable(TABLE, job=f"job-{number}")).state
    with pytest.raises(Invalid, match=f"'more': the group has {MAX_JOBS} jobs"):
        decide(state, c.DeclareTable(TABLE, job="more"))
    assert decide(state, c.DeclareTable(TABLE, job="job-0")).events == ()
    with pytest.raises(Invalid, match="not 'a/b'"):
        decide(State.first(7), c.WorkerJoined("w", 1, 0, job="a/b"))


def test_job_without_tables_or_workers_makes_room_for_another():
    group = Group()
    for number in range(MAX_JOBS):
        group(c.WorkerJoined("w", 1, 0, job=f"job-{number}"))
    with pytest.raises(Invalid, match=f"'more': the group has {MAX_JOBS} jobs"):
        group(c.WorkerJoined("w", 1, 0, job="more"))
    group(c.WorkerDied("w", job="job-3"))
    group(c.WorkerLeft("w", 1, job="job-5"))
    group(c.DeclareTable(TABLE, job="more"))
    assert "job-3" not in group.state.jobs
    assert {"job-5", "more"} < group.state.jobs.keys()
    assert len(group.state.jobs) == MAX_JOBS + 1
