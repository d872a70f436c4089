"""Ranks of workers in the group of a job."""

from xain_parameters.jobs.slots import (
    NO_RANK,
    Slot,
    Slots,
    ranked_anew,
    ranks_of,
    with_entered,
    with_gone,
)


def group(*names: str, size: int, may_replace: bool = True) -> Slots:
    slots: Slots = {}
    for incarnation, name in enumerate(names, 1):
        slots = with_entered(slots, size, name, incarnation, may_replace=may_replace)
    return slots


def test_ranks_are_given_in_the_order_of_coming_and_kept_under_a_name():
    slots = group("b", "a", "c", size=3)
    assert ranks_of(slots) == {"b": 0, "a": 1, "c": 2}
    slots = with_gone(slots, 3, "a", may_replace=True)
    assert ranks_of(slots) == {"b": 0, "c": 2}
    back = with_entered(slots, 3, "a", 9, may_replace=True)
    assert back["a"] == Slot(1, 9)


def test_rank_of_a_worker_that_is_gone_is_for_one_that_waits():
    slots = group("a", "b", "c", "d", size=2)
    assert [slots[name].rank for name in "cd"] == [NO_RANK, NO_RANK]
    slots = with_gone(slots, 2, "a", may_replace=True)
    assert ranks_of(slots) == {"c": 0, "b": 1}
    slots = with_entered(slots, 2, "a", 9, may_replace=True)
    assert [name for name, slot in slots.items() if slot.rank == NO_RANK] == ["d", "a"]
    assert "d" not in with_gone(slots, 2, "d", may_replace=True)


def test_rank_waits_for_its_worker_until_the_next_epoch():
    slots = group("a", "b", "c", "d", size=3, may_replace=False)
    slots = with_gone(slots, 3, "b", may_replace=False)
    assert ranks_of(slots) == {"a": 0, "c": 2}
    assert ranks_of(ranked_anew(slots)) == {"a": 0, "c": 1, "d": 2}
