"""How many are let in when, in a time that the test keeps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xain_coordinator.server.pace import KEPT_S, Pace


def come_until_let_in(pace: Pace, names: list[str], asks_again_s: float | None = None) -> list:
    """All come at 0, and again when it is their turn, or, whatever they are told, after so long.
    Returns (when, who) of those who are let in."""
    coming = [(0.0, name) for name in names]
    let_in = []
    while coming:
        now, name = coming.pop(0)
        wait_s = pace.wait_s(name, now)
        if wait_s:
            coming.append((now + (asks_again_s or wait_s), name))
            coming.sort(key=lambda one: one[0])
        else:
            let_in.append((now, name))
    return let_in


NAMES = [f"site-{i}" for i in range(1000)]


def test_few_never_wait():
    pace = Pace(per_s=1.0, burst=8, max_waiting=10)
    assert [pace.wait_s(name, 0.0) for name in NAMES[:8]] == [0.0] * 8


def test_the_ninth_waits_for_its_turn():
    pace = Pace(per_s=4.0, burst=8, max_waiting=10)
    waits = [pace.wait_s(name, 0.0) for name in NAMES[:11]]
    assert waits == [0.0] * 8 + [0.25, 0.5, 0.75]


def test_a_thousand_at_one_instant_are_let_in_one_after_another():
    """Each comes twice at most, and in the order of the first time."""
    let_in = come_until_let_in(Pace(per_s=128.0, burst=104, max_waiting=1000), NAMES)
    assert [name for _, name in let_in] == NAMES
    assert [at for at, _ in let_in] == [max(0.0, (n - 103) / 128) for n in range(1000)]


def test_who_comes_when_it_likes_finds_its_place_kept():
    """XAIN's participants ask every five seconds, whatever they are told."""
    let_in = come_until_let_in(Pace(128.0, 104, 1000), NAMES, asks_again_s=5.0)
    assert {at for at, _ in let_in} == {0.0, 5.0, 10.0}
    assert sorted(name for _, name in let_in) == sorted(NAMES)


def test_a_place_is_not_kept_for_ever():
    """One who went away does not come in unasked an hour later."""
    pace = Pace(per_s=1.0, burst=1, max_waiting=10)
    assert pace.wait_s("a", 0.0) == 0.0
    assert pace.wait_s("b", 0.0) == 1.0
    late = 1.0 + KEPT_S + 1.0
    assert pace.wait_s("a", late) == 0.0
    assert pace.wait_s("b", late) == 1.0


def test_nobody_has_two_places():
    """Whoever asks without a pause gets no further, and takes nothing from others."""
    pace = Pace(per_s=1.0, burst=1, max_waiting=10)
    assert pace.wait_s("a", 0.0) == 0.0
    assert [pace.wait_s("eager", 0.0) for _ in range(50)] == [1.0] * 50
    assert pace.wait_s("eager", 0.5) == 0.5
    assert pace.wait_s("b", 0.5) == 1.5


def test_calm_brings_the_burst_back():
    pace = Pace(per_s=10.0, burst=5, max_waiting=10)
    assert sum(pace.wait_s(name, 0.0) == 0.0 for name in NAMES[:9]) == 5
    assert sum(pace.wait_s(name, 100.0) == 0.0 for name in NAMES[9:18]) == 5


def test_the_queue_is_bounded():
    """Who finds no place is told when the queue has passed, and takes nobody's."""
    pace = Pace(per_s=1.0, burst=1, max_waiting=3)
    waits = [pace.wait_s(name, 0.0) for name in NAMES[:6]]
    assert waits == [0.0, 1.0, 2.0, 3.0, 4.0, 4.0]
    assert pace.wait_s(NAMES[1], 1.0) == 0.0
    assert pace.wait_s(NAMES[9], 1.0) == 3.0


@given(
    st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(0, 30)), max_size=200),
    st.integers(1, 10),
    st.integers(1, 20),
)
@pytest.mark.timeout(120)
def test_never_more_than_the_pace_and_those_who_are_late(calls, burst, max_waiting):
    """In any time: the burst, what the pace allows, and the places of those who come late."""
    per_s = 8.0
    pace = Pace(per_s, burst, max_waiting)
    now, let_in = 0.0, []
    for pause_s, who in calls:
        now += pause_s
        wait_s = pace.wait_s(str(who), now)
        assert wait_s <= (max_waiting + 1) / per_s
        if not wait_s:
            let_in.append(now)
    late = min(max_waiting, per_s * KEPT_S)
    for i, begin in enumerate(let_in):
        for j, end in enumerate(let_in[i:], 1):
            assert j <= burst + per_s * (end - begin) + late + 1e-6
