"""The members of a group, by every discovery."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.discovery import Peer, is_refused
from support.messaging import PATIENCE_S, until
from xain_foundation.net.errors import MessagingError
from xain_membership.coordinator import CoordinatorDiscovery
from xain_membership.errors import DiscoveryUnavailable, NameTaken
from xain_membership.ports import Discovery
from xain_messaging.discovery.redis import RedisDiscovery


def test_a_newcomer_knows_all_and_is_known_to_all(discovery):
    """A new member hears of the others before join() returns, and they hear of it."""
    first = Peer(discovery, "anna", address="there")
    second = Peer(discovery, "ben")
    assert second.sees == {"anna": "there", "ben": "here"}
    until(lambda: first.sees == {"anna": "there", "ben": "here"}, "anna to hear of ben")
    second.leave()
    until(lambda: first.sees == {"anna": "there"}, "anna to hear that ben has left")
    first.leave()
    assert not first.lost
    assert not second.lost


def test_groups_do_not_know_each_other(discovery):
    """The same name may be in two groups."""
    one = Peer(discovery, "anna", group="one")
    two = Peer(discovery, "anna", group="two")
    assert one.sees == two.sees == {"anna": "here"}
    one.leave()
    two.leave()


def test_join_without_a_timeout_waits_for_the_name(discovery, monkeypatch):
    """The name may stay taken for longer than any one wait."""
    monkeypatch.setattr("xain_foundation.waits.LONGEST_S", 0.2)
    first = Peer(discovery, "anna")
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(Peer, discovery, "anna", address="there", timeout_s=math.inf)
        with pytest.raises(TimeoutError):
            joining.result(0.5)
        first.leave()
        assert joining.result(PATIENCE_S).sees == {"anna": "there"}


def test_a_later_process_has_a_higher_incarnation(discovery):
    """Messages of the older process are never taken for the newer one's."""
    before = Peer(discovery, "anna")
    before.leave()
    after = Peer(discovery, "anna")
    assert after.membership.member.incarnation > before.membership.member.incarnation
    after.leave()


def test_a_name_is_one_processs_for_as_long_as_that_lives(discovery):
    """A second one is refused, and gets the name when the first has left."""
    first = Peer(discovery, "anna")
    is_refused(NameTaken, "anna", lambda time_s: Peer(discovery, "anna", timeout_s=time_s))
    with ThreadPoolExecutor() as pool:
        second = pool.submit(Peer, discovery, "anna", address="elsewhere")
        first.leave()
        assert second.result(PATIENCE_S).sees == {"anna": "elsewhere"}
        second.result().leave()


def test_member_that_has_left_is_no_member_whatever_it_calls(discovery):
    """leave() of an old member does not remove the one that has its name now."""
    first = Peer(discovery, "anna")
    first.leave()
    second = Peer(discovery, "anna")
    first.leave()
    third = Peer(discovery, "ben")
    assert third.sees.keys() == {"anna", "ben"}
    second.leave()
    third.leave()


def test_many_join_at_once(discovery):
    """Each has a rank of its own, and in the end all know all."""
    number = 12
    with ThreadPoolExecutor(number) as pool:
        peers = list(pool.map(lambda i: Peer(discovery, f"worker-{i}"), range(number)))
    assert sorted(peer.rank for peer in peers) == list(range(number))
    until(lambda: all(len(peer.sees) == number for peer in peers), "all to know all")
    with ThreadPoolExecutor(number) as pool:
        list(pool.map(Peer.leave, peers))


@pytest.mark.parametrize("target", ["127.0.0.1:1", "redis://127.0.0.1:1"])
def test_discovery_that_is_away(target):
    """A discovery that does not answer is named in the error."""
    discovery: Discovery
    discovery = (
        RedisDiscovery(target) if target.startswith("redis") else CoordinatorDiscovery(target)
    )
    with pytest.raises(DiscoveryUnavailable, match=r"127\.0\.0\.1:1\b"):
        Peer(discovery, "anna", timeout_s=0.3)


@pytest.mark.parametrize(
    "member", [{"name": "a/b"}, {"role": ""}, {"group": "g/h"}, {"address": "x" * 257}]
)
def test_member_that_no_registry_takes_is_refused(discovery, member):
    """Every discovery has the same names and addresses."""
    with pytest.raises(MessagingError):
        Peer(discovery, **{"name": "anna", **member})
    Peer(discovery, "anna").leave()
