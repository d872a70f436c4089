"""Leases, as the oracle judges them from records and heartbeats."""

from random import Random

import pytest

from simulation.disk import StoreDisk
from simulation.hub import Hub, Trace
from simulation.oracle import Oracle
from simulation.scenario import Fault, Kind, Scenario
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.ports import Record

LEASE_S = 10.0
EXPIRED = e.ParticipantLeft("p0", "expired")


@pytest.fixture
def trace() -> Trace:
    """The first violation that the oracle finds, if there is one."""
    return Trace()


@pytest.fixture
def oracle(trace: Trace) -> Oracle:
    """An oracle of a run on a slow disk that has read the join of p0, at 1 s."""
    slow_disk = Fault(Kind.SLOW_DISK, at=0.0, seconds=60.0)
    scenario = Scenario(
        seed=0, heartbeat_time_s=4.0, heartbeat_timeout_s=LEASE_S - 4.0, faults=(slow_disk,)
    )
    oracle = Oracle(Hub(Random(0), trace), scenario, StoreDisk())
    opened = e.SessionOpened("session", scenario.rules(), 0.0)
    oracle.committed([Record(0.0, opened), Record(1.0, joined(1.0))])
    return oracle


def joined(at: float) -> e.ParticipantJoined:
    return e.ParticipantJoined("p0", None, at)


def test_heartbeat_after_an_expiry_does_not_prolong_the_lease_that_expired(
    oracle: Oracle, trace: Trace
) -> None:
    """On a slow disk the heartbeat of a second membership is answered before the expiry of the
    first one is durable."""
    oracle.answered("p0", "Heartbeat", 13.0)
    oracle.committed([Record(11.0, EXPIRED), Record(12.0, joined(12.0))])
    oracle.committed([Record(23.0, EXPIRED)])
    assert not trace.latest


@pytest.mark.parametrize("heard_later", [(), (16.0,)])
def test_expiry_within_the_lease_that_a_heartbeat_renewed_is_a_violation(
    oracle: Oracle, trace: Trace, heard_later: tuple[float, ...]
) -> None:
    for at in (5.0, *heard_later):
        oracle.answered("p0", "Heartbeat", at)
    oracle.committed([Record(14.0, EXPIRED)])
    (line,) = trace.latest
    assert "p0 has a lease until 14.99" in line


def test_heartbeat_renews_a_lease_whose_beginning_becomes_durable_later(
    oracle: Oracle, trace: Trace
) -> None:
    left = e.ParticipantLeft("p0", "left")
    oracle.answered("p0", "Heartbeat", 13.0)
    oracle.committed([Record(11.0, left), Record(12.0, joined(12.0))])
    oracle.committed([Record(22.5, EXPIRED)])
    (line,) = trace.latest
    assert "p0 has a lease until 22.99" in line
