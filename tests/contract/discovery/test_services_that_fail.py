"""Services over a network that are away, start again or hang."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from support.discovery import NETWORKED, Peer, Service, all_are_back
from support.fault_proxy import FaultProxy
from support.messaging import LEASE_S, PATIENCE_S, RedisServer, until
from xain_membership.coordinator import CoordinatorDiscovery
from xain_membership.errors import Closed, DiscoveryUnavailable, TimedOut
from xain_membership.ports import Discovery
from xain_membership.server import MembershipServer
from xain_messaging.discovery.redis import RedisDiscovery


@pytest.mark.parametrize("kind", NETWORKED)
def test_a_service_that_was_away_changes_nothing(kind):
    """Killed and started again with nothing, it knows all members as who they were, and none has
    been told meanwhile that another has gone."""
    with Service(kind, LEASE_S) as service:
        peers = [Peer(service.discovery, f"worker-{i}") for i in range(3)]
        until(lambda: all(len(peer.sees) == 3 for peer in peers), "all to know all")
        before = [peer.membership.member for peer in peers]
        told = [len(peer.rosters) for peer in peers]
        service.stop()
        with pytest.raises(DiscoveryUnavailable):
            Peer(service.discovery, "newcomer", timeout_s=0.5)
        service.start()
        newcomer = Peer(service.discovery, "newcomer", role="other")
        until(lambda: all(len(peer.sees) == 4 for peer in peers), "all to know the newcomer")
        until(lambda: len(newcomer.sees) == 4, "the newcomer to know all")
        assert [peer.membership.member for peer in peers] == before
        assert all(
            len(roster) >= 3
            for peer, number in zip(peers, told, strict=True)
            for roster in peer.rosters[number:]
        )
        assert not any(peer.lost for peer in peers)
        for peer in (*peers, newcomer):
            peer.leave()


@pytest.mark.parametrize("kind", NETWORKED)
def test_member_that_leaves_a_restarted_service_is_removed(kind):
    """The others hear of it at once, not a lease later."""
    with Service(kind, lease_s=3600.0) as service:
        peers = [Peer(service.discovery, f"worker-{i}") for i in range(3)]
        until(lambda: all(len(peer.sees) == 3 for peer in peers), "all to know all")
        for is_restarted in (False, True):
            if is_restarted:
                service.stop()
                service.start()
                all_are_back(peers)
                peers.append(Peer(service.discovery, "newcomer"))
                until(lambda: all(len(peer.sees) == 3 for peer in peers), "all to hear of it")
            peers.pop(1).leave()
            until(lambda: all(len(peer.sees) == 2 for peer in peers), "it to be gone")
        for peer in peers:
            peer.leave()


@contextmanager
def hangs(kind: str) -> Iterator[tuple[Discovery, Callable[[], None]]]:
    """A discovery, and what lets its service hang: it takes what is sent, and does not answer."""
    if kind == "redis":
        with RedisServer() as redis:
            discovery = RedisDiscovery(redis.url, LEASE_S, settle_s=0.0)
            try:
                yield discovery, lambda: redis.signal(signal.SIGSTOP)
            finally:
                redis.signal(signal.SIGCONT)
    else:
        with MembershipServer(settle_s=0.0) as server:
            port = int(server.target.rpartition(":")[2])
            with FaultProxy(port) as proxy:
                try:
                    yield CoordinatorDiscovery(f"127.0.0.1:{proxy.port}"), proxy.blackhole
                finally:
                    proxy.heal()


@pytest.mark.parametrize("kind", NETWORKED)
def test_times_hold_whatever_the_service_does(kind, monkeypatch):
    """A service that hangs keeps nobody for longer than the time that was given; to leave takes a
    moment."""
    monkeypatch.setattr("xain_membership.remote.CALL_TIMEOUT_S", 3600.0)
    home = "xain_messaging.discovery.redis" if kind == "redis" else "xain_membership.coordinator"
    monkeypatch.setattr(f"{home}.CALL_TIMEOUT_S", 3600.0)
    with ThreadPoolExecutor() as pool, hangs(kind) as (discovery, hang):
        anna = Peer(discovery, "anna")
        hang()
        barrier = pool.submit(anna.membership.barrier, "epoch", 2, 0.5)
        assert isinstance(barrier.exception(PATIENCE_S), TimedOut)
        joining = pool.submit(Peer, discovery, "ben", timeout_s=0.3)
        assert isinstance(joining.exception(PATIENCE_S), DiscoveryUnavailable)
        waiting = pool.submit(anna.membership.barrier, "epoch", 2, 7200.0)
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        pool.submit(anna.leave).result(PATIENCE_S)
        assert isinstance(waiting.exception(PATIENCE_S), Closed)
        until(lambda: "membership" not in {t.name for t in threading.enumerate()}, "the threads")
