"""Two processes with one participant id: the instance id tells them apart."""

import re

import pytest
from tests.unit.core.bench import HEARTBEAT_TIME_S, LEASE_S, PROFILE, Bench, make_rules

from xain_coordinator.core.parts.membership import CONTENDER_KEPT_S, MAX_CONTENDERS
from xain_coordinator.core.view.history import History
from xain_coordinator.core.view.view import warnings
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import replies as r

TIMEOUT_S = LEASE_S - HEARTBEAT_TIME_S  # how late a heartbeat may be


def rendezvous(bench: Bench, instance_id: str) -> r.Reply:
    return bench.send(
        c.Rendezvous("a", PROFILE, {}, instance_id=instance_id, origin="10.0.0.2:5")
    ).reply


@pytest.fixture
def bench() -> Bench:
    """Participant a has joined as instance one, and is heard at 1 s."""
    bench = Bench(make_rules(min_participants=3))
    assert isinstance(rendezvous(bench, "one"), r.Accepted)
    bench.heartbeat("a", at=1.0)
    return bench


def test_second_live_instance_is_asked_to_come_again_within_the_lease(bench):
    journal, session = list(bench.journal), bench.session
    bench.now = 4.0
    assert rendezvous(bench, "two") == r.IdInUse(3.0, LEASE_S - 3.0, HEARTBEAT_TIME_S)
    bench.now = 12.0
    assert rendezvous(bench, "two") == r.IdInUse(11.0, 4.0, 4.0), "when the lease is over"
    assert (bench.journal, bench.session) == (journal, session)
    assert bench.session.members.is_instance("a", "one")
    assert not bench.session.members.is_instance("a", "two")


def test_second_instance_is_refused_for_good_once_the_first_one_is_heard_again(bench):
    bench.now = 4.0
    rendezvous(bench, "two")
    assert bench.session.members.conflict("a", bench.session.rules) is None, (
        "the first one may have been killed"
    )
    bench.heartbeat("a", at=10.0)
    bench.now = 12.0
    assert rendezvous(bench, "two") == r.IdInUse(2.0, LEASE_S - 2.0, None)
    conflict = bench.session.members.conflict("a", bench.session.rules)
    assert conflict.origin == "10.0.0.2:5"
    assert isinstance(rendezvous(bench, "three"), r.IdInUse), "each is judged by its own attempts"
    assert rendezvous(bench, "three") != r.IdInUse(2.0, LEASE_S - 2.0, None)


def test_late_call_of_a_killed_instance_is_no_sign_of_life(bench):
    """The process of instance one was killed; its last heartbeat was on its way for a while."""
    bench.now = 2.0
    rendezvous(bench, "two")
    bench.heartbeat("a", at=2.0 + TIMEOUT_S)
    reply = rendezvous(bench, "two")
    assert isinstance(reply, r.IdInUse)
    assert reply.retry_after_s is not None, "instance two is asked to come again"
    assert bench.session.members.conflict("a", bench.session.rules) is None
    bench.tick(at=2.0 + TIMEOUT_S + LEASE_S)
    assert isinstance(rendezvous(bench, "two"), r.Accepted)


def test_first_instance_is_warned_for_as_long_as_the_second_one_asks(bench):
    rendezvous(bench, "two")
    assert bench.heartbeat("a", at=2.0 + TIMEOUT_S).warning == "", "until it is heard well after it"
    warning = bench.heartbeat("a", at=3.0 + TIMEOUT_S).warning
    assert re.search(r"10\.0\.0\.2:5, .* as a\b", warning)
    bench.heartbeat("a", at=1.0 + CONTENDER_KEPT_S)
    assert bench.heartbeat("a", at=1.1 + CONTENDER_KEPT_S).warning == warning
    assert bench.heartbeat("a", at=1.2 + CONTENDER_KEPT_S).warning == ""


def test_restart_without_the_instance_id_takes_over_after_the_lease(bench):
    bench.now = 2.0
    rendezvous(bench, "two")
    bench.tick(at=1.0 + LEASE_S)
    assert isinstance(rendezvous(bench, "two"), r.Accepted)
    assert bench.session.members.is_instance("a", "two")
    assert bench.session.members.conflict("a", bench.session.rules) is None


def test_restart_with_the_instance_id_takes_over_at_once(bench):
    assert isinstance(rendezvous(bench, "one"), r.Accepted)


def test_instance_is_known_after_a_restart_of_the_coordinator(bench):
    rendezvous(bench, "two")
    bench.restart()
    assert isinstance(rendezvous(bench, "two"), r.IdInUse)
    assert isinstance(rendezvous(bench, "one"), r.Accepted)


def test_contenders_that_are_remembered_have_a_bound(bench):
    for number in range(3 * MAX_CONTENDERS):
        rendezvous(bench, f"i{number}")
    assert len(bench.session.members.heard["a"].contenders) == MAX_CONTENDERS


def test_instance_id_must_be_a_name(bench):
    for name in ("a", "b"):
        bench.refuses(c.Rendezvous(name, PROFILE, {}, instance_id="x" * 1000), "INVALID_NAME")


def test_conflict_is_no_warning_after_the_end(bench):
    """A finished session refuses no process."""
    rendezvous(bench, "two")
    bench.heartbeat("a", at=3.0 + TIMEOUT_S)
    assert warnings(bench.session, History())
    bench.send(c.EffectFailed("the disk is full"))
    assert isinstance(rendezvous(bench, "two"), r.Accepted)
    assert warnings(bench.session, History()) == []
