"""The state of a group in a Redis: its size, and how often it is written."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import redis

from support.discovery import Peer
from support.messaging import PATIENCE_S, RedisServer
from xain_messaging.discovery.redis import RedisDiscovery
from xain_messaging.discovery.registry import State
from xain_messaging.errors import DiscoveryUnavailable

KEY = "xain:{training}:state"


def test_barriers_that_have_opened_leave_nothing() -> None:
    """One barrier of each member stays until its next call or heartbeat."""
    with RedisServer() as server, ThreadPoolExecutor() as pool:
        discovery = RedisDiscovery(server.url, lease_s=3600.0, settle_s=0.0)
        peers = [Peer(discovery, f"worker-{i}") for i in range(2)]
        for i in range(5):
            calls = [
                pool.submit(peer.membership.barrier, f"round {i}", 2, PATIENCE_S) for peer in peers
            ]
            for call in calls:
                call.result()
        with redis.Redis.from_url(server.url) as client:
            text: Any = client.get(KEY)
        assert len(msgspec.json.decode(text, type=State).opened) <= 3
        for peer in peers:
            peer.leave()


def test_constant_changes_of_others_hold_up_no_call() -> None:
    """A decision ends with its time, as that of leave() does."""
    with RedisServer() as server, redis.Redis.from_url(server.url) as client:
        discovery = RedisDiscovery(server.url, lease_s=3600.0, settle_s=0.0)
        membership: Any = Peer(discovery, "anna").membership
        is_over = threading.Event()
        state: Any = client.get(KEY)

        def change(registry: Any, now: float) -> None:
            client.set(KEY, state)  # between the read and the write of each try
            registry.state.last_incarnation += 1
            if is_over.is_set():
                raise AssertionError("it goes on after its time")

        timer = threading.Timer(PATIENCE_S, is_over.set)
        timer.start()
        try:
            with pytest.raises(DiscoveryUnavailable, match="all the time"):
                membership._decide(change, 0.3)
        finally:
            timer.cancel()
