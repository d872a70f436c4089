"""How long others wait for a worker that is gone."""

from hypothesis import given
from hypothesis import strategies as st

from xain_membership.registry import Registry
from xain_parameters.jobs.absences import Absences
from xain_parameters.scheduler.service import GRACE_S, LEASE_S, WORKER_LEASE_S


def held_up_s(renewed_at: float, dies_at: float, stream_ends_at: float | None) -> float:
    """How long after the death of a worker it is dead for others, by the clock of registry and
    absences, each of which looks when something is due.

    stream_ends_at: when the connection of the process ends; None: never.
    """
    registry = Registry(0.0, iter(range(1, 9)).__next__, lambda group: None, LEASE_S, 0.0, GRACE_S)
    me = registry.join("g", "worker", "w", "-", 0.0, None)
    registry.stream_begun("g", "w", me.incarnation, renewed_at, stream := object())
    absences = Absences[str](LEASE_S, WORKER_LEASE_S)
    if stream_ends_at is not None:
        registry.stream_ended("g", "w", me.incarnation, stream_ends_at, stream)
    now = registry.expire(renewed_at)
    while now is not None:
        registry.expire(now)
        members = {name: member.incarnation for name, member in registry.roster("g").items()}
        if absences.dead(now, {"w": ("w", me.incarnation)}, members):
            return now - dies_at
        now = absences.next_due(now)
    raise AssertionError("nothing is due, and the worker is still awaited")


@given(since_s=st.floats(0, LEASE_S / 2))
def test_silent_worker_holds_others_up_for_a_lease_at_most(since_s):
    """since_s: from its last heartbeat to its death."""
    held_s = held_up_s(10.0, 10.0 + since_s, None)
    assert WORKER_LEASE_S - LEASE_S / 2 - 1e-6 <= held_s <= WORKER_LEASE_S + 1e-6


@given(since_s=st.floats(0, LEASE_S / 2))
def test_killed_worker_holds_others_up_for_less_than_a_lease(since_s):
    """The connection of the process ends with the process."""
    dies_at = 10.0 + since_s
    assert held_up_s(10.0, dies_at, dies_at) <= WORKER_LEASE_S - LEASE_S + GRACE_S + 1e-6


def test_worker_that_is_back_in_time_is_not_dead():
    absences = Absences[str](1.0, 3.0)
    awaited = {"w": ("w", 1)}
    assert not absences.dead(0.0, awaited, {})
    assert absences.next_due(0.0) == 2.0
    assert not absences.dead(1.0, awaited, {"w": 1})
    assert absences.next_due(1.0) is None
    assert not absences.dead(2.5, awaited, {"w": 2}), "another process is another worker"
    assert absences.dead(4.5, awaited, {"w": 2}) == ["w"]
