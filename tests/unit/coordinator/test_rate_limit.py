"""The rate limit admits calls at their reserved times, on a clock that the test keeps."""

from hypothesis import given
from hypothesis import strategies as st

from xain_coordinator.server.rate_limit import RESERVED_S, RateLimit


def call_until_admitted(
    rate_limit: RateLimit, names: list[str], asks_again_s: float | None = None
) -> list:
    """All callers call at 0, and again at their reserved time, or, whatever they are told, after
    `asks_again_s`. Returns (time, name) of each admitted call."""
    coming = [(0.0, name) for name in names]
    admitted = []
    while coming:
        now, name = coming.pop(0)
        wait_s = rate_limit.wait_s(name, now)
        if wait_s:
            coming.append((now + (asks_again_s or wait_s), name))
            coming.sort(key=lambda one: one[0])
        else:
            admitted.append((now, name))
    return admitted


NAMES = [f"site-{i}" for i in range(1000)]


def test_thousand_calls_at_one_instant_are_admitted_in_order():
    """Each caller calls twice at most; the order is that of the first calls."""
    admitted = call_until_admitted(RateLimit(per_s=128.0, burst=104, max_waiting=1000), NAMES)
    assert [name for _, name in admitted] == NAMES
    assert [at for at, _ in admitted] == [max(0.0, (n - 103) / 128) for n in range(1000)]


def test_caller_that_is_late_finds_its_reservation():
    """XAIN's participants ask every five seconds, whatever they are told."""
    admitted = call_until_admitted(RateLimit(128.0, 104, 1000), NAMES, asks_again_s=5.0)
    assert {at for at, _ in admitted} == {0.0, 5.0, 10.0}
    assert sorted(name for _, name in admitted) == sorted(NAMES)


def test_reservation_expires():
    """A caller that went away is not admitted at once an hour later."""
    rate_limit = RateLimit(per_s=1.0, burst=1, max_waiting=10)
    assert rate_limit.wait_s("a", 0.0) == 0.0
    assert rate_limit.wait_s("b", 0.0) == 1.0
    late = 1.0 + RESERVED_S + 1.0
    assert rate_limit.wait_s("a", late) == 0.0
    assert rate_limit.wait_s("b", late) == 1.0


def test_caller_has_one_reservation():
    """A caller that asks without a pause gains nothing and delays no other."""
    rate_limit = RateLimit(per_s=1.0, burst=1, max_waiting=10)
    assert rate_limit.wait_s("a", 0.0) == 0.0
    assert [rate_limit.wait_s("eager", 0.0) for _ in range(50)] == [1.0] * 50
    assert rate_limit.wait_s("eager", 0.5) == 0.5
    assert rate_limit.wait_s("b", 0.5) == 1.5


def test_burst_is_available_again_after_calm():
    rate_limit = RateLimit(per_s=10.0, burst=5, max_waiting=10)
    assert sum(rate_limit.wait_s(name, 0.0) == 0.0 for name in NAMES[:9]) == 5
    assert sum(rate_limit.wait_s(name, 100.0) == 0.0 for name in NAMES[9:18]) == 5


def test_reservations_are_bounded():
    """A caller without a reservation is told when the last one is due, and takes none."""
    rate_limit = RateLimit(per_s=1.0, burst=1, max_waiting=3)
    waits = [rate_limit.wait_s(name, 0.0) for name in NAMES[:6]]
    assert waits == [0.0, 1.0, 2.0, 3.0, 4.0, 4.0]
    assert rate_limit.wait_s(NAMES[1], 1.0) == 0.0
    assert rate_limit.wait_s(NAMES[9], 1.0) == 3.0


@given(
    st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(0, 30)), max_size=200),
    st.integers(1, 10),
    st.integers(1, 20),
)
def test_admitted_calls_never_exceed_rate_burst_and_late_callers(calls, burst, max_waiting):
    """In any time: the burst, the rate, and the reservations of callers that come late."""
    per_s = 8.0
    rate_limit = RateLimit(per_s, burst, max_waiting)
    now, admitted = 0.0, []
    for pause_s, who in calls:
        now += pause_s
        wait_s = rate_limit.wait_s(str(who), now)
        assert wait_s <= (max_waiting + 1) / per_s
        if not wait_s:
            admitted.append(now)
    late = min(max_waiting, per_s * RESERVED_S)
    for i, begin in enumerate(admitted):
        for j, end in enumerate(admitted[i:], 1):
            assert j <= burst + per_s * (end - begin) + late + 1e-6
