"""Failed joins leave nothing behind."""

import threading
from functools import partial

import pytest

from support.discovery import NETWORKED, Peer, Service
from support.messaging import LEASE_S, PATIENCE_S, until
from xain_membership.errors import DiscoveryUnavailable


class Threads:
    """Threads of memberships. missing: numbers, from 1 on, for which the system has none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, missing: range) -> None:
        self.num_asked = 0
        start = threading.Thread.start

        def start_if_any(thread: threading.Thread) -> None:
            if thread.name == "membership":
                self.num_asked += 1
                if self.num_asked in missing:
                    raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_if_any)


def has_none_left(before: set[threading.Thread]) -> bool:
    """Whether no thread that keeps a membership is left."""
    return not any(
        thread.name == "membership" for thread in threading.enumerate() if thread not in before
    )


@pytest.mark.parametrize(("kind", "first"), [("coordinator", 1), ("coordinator", 2), ("redis", 1)])
def test_a_member_without_a_thread_is_none(kind, first, monkeypatch):
    """The program hears why, and its name is free before a lease could end."""
    before = set(threading.enumerate())
    with Service(kind, 2 * PATIENCE_S) as service:
        with monkeypatch.context() as patched:
            Threads(patched, range(first, 1000))
            with pytest.raises(DiscoveryUnavailable, match="thread") as caught:
                Peer(service.discovery, "anna", timeout_s=0.5)
        assert isinstance(caught.value.__cause__, RuntimeError)
        until(partial(has_none_left, before), "the threads to end")
        Peer(service.discovery, "anna").leave()


@pytest.mark.parametrize("kind", NETWORKED)
def test_a_member_waits_for_a_thread(kind, monkeypatch):
    """Where there is none for the moment."""
    with Service(kind, LEASE_S) as service:
        threads = Threads(monkeypatch, range(1, 3))
        anna = Peer(service.discovery, "anna", timeout_s=PATIENCE_S)
        assert threads.num_asked > 2
        assert anna.sees == {"anna": "here"}
        anna.leave()
