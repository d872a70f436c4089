"""How far apart workers may be, under BSP, SSP and ASP."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xain_foundation.clock_table import ClockTable


def table(*clocks: int, staleness: int | None = 0) -> ClockTable:
    return ClockTable({f"w{i}": clock for i, clock in enumerate(clocks)}, staleness)


@pytest.mark.parametrize(
    ("staleness", "admitted"), [(0, [0, 1, 2]), (1, [0, 1, 2, 3]), (3, [0, 1, 2, 3, 4, 5])]
)
def test_worker_within_the_staleness_may_work(staleness, admitted):
    """The bound counts from the slowest worker, here at clock 2, which may work too."""
    clocks = table(2, 4, 3, staleness=staleness)
    assert [clock for clock in range(10) if clocks.admits(clock)] == admitted


def test_without_a_limit_all_may_work():
    """ASP."""
    assert table(0, 10**9, staleness=None).admits(10**9 + 1)


def test_table_without_workers_waits_for_none():
    """The first to come may be anywhere."""
    assert table().slowest is None
    assert table().admits(7)


def test_the_slowest():
    """The slowest clock is that of the workers in the table, as they join, advance, leave and are
    rolled back."""
    clocks = table(1, 2).with_clock("late", 0)
    assert clocks.slowest == 0
    assert not clocks.admits(1)
    assert clocks.ticked("late").slowest == 1
    assert clocks.without("late").slowest == 1
    assert clocks.without("late").admits(1)
    assert clocks.without("w0").without("late").slowest == 2
    rolled_back = table(5, 5).with_clock("w1", 3)
    assert rolled_back.clocks == {"w0": 5, "w1": 3}
    assert not rolled_back.admits(5)


def test_a_table_never_changes():
    """A decision that was made with a table can be made again."""
    clocks = table(1, 2)
    clocks.ticked("w0")
    clocks.without("w0")
    clocks.with_clock("w2", 0)
    assert clocks == table(1, 2)


def test_unknown_worker_cannot_advance():
    """The removal of a worker may be repeated."""
    with pytest.raises(KeyError):
        table(1).ticked("w1")
    assert table(1).without("w1") == table(1)


def test_a_negative_staleness_is_refused():
    """Not even the slowest worker could work with it."""
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        table(staleness=-1)


@settings(derandomize=True, deadline=None)
@given(
    num_workers=st.integers(1, 6),
    staleness=st.integers(0, 4),
    steps=st.lists(st.integers(0, 5), max_size=80),
)
def test_staleness_bound_holds_in_any_order_of_workers(num_workers, staleness, steps):
    """A working worker sees all steps of all others before clock c - s, and one may always work.

    A worker that is admitted begins, and ends at its next step, as others go on in between.
    """
    clocks = table(*[0] * num_workers, staleness=staleness)
    working = set()
    for step in steps:
        worker = f"w{step % num_workers}"
        if worker in working:
            working.remove(worker)
            clocks = clocks.ticked(worker)
        elif clocks.admits(clocks.clocks[worker]):
            working.add(worker)
        least = min(clocks.clocks.values())
        assert clocks.slowest == least
        for name, clock in clocks.clocks.items():
            # One that has ended an iteration may be one further, and then waits.
            assert clock - least <= staleness + (name not in working)
        assert any(clocks.admits(clock) for clock in clocks.clocks.values())
