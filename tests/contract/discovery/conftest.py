"""Discoveries of each kind, and members who have left in the end."""

from collections.abc import Iterator
from typing import Any

import pytest

from support.discovery import Peer
from support.messaging import DISCOVERIES, discovery_of
from xain_membership.ports import Discovery
from xain_membership.registry import Registry


@pytest.fixture(params=DISCOVERIES)
def discovery(request: pytest.FixtureRequest) -> Iterator[Discovery]:
    with discovery_of(request.param) as discovery:
        yield discovery


@pytest.fixture(autouse=True)
def everybody_leaves() -> Iterator[None]:
    """Let all peers leave, also those of a test that has failed."""
    yield
    while Peer.made:
        Peer.made.pop().leave()


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Names and calls that come to a barrier of a registry in this process or of a Redis."""
    arrivals = []
    arrive = Registry.arrive

    def note_arrival(
        registry: Registry, group: str, barrier: str, name: str, num: int, call: int, *rest: Any
    ) -> bool:
        is_open = arrive(registry, group, barrier, name, num, call, *rest)
        arrivals.append((name, call))
        return is_open

    monkeypatch.setattr(Registry, "arrive", note_arrival)
    return arrivals
