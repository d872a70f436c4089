"""An agent that is offered to fetch and put weights at a store, past the coordinator."""

import logging

import pytest

from integration.participant.agents import large
from integration.participant.conftest import Serve
from integration.participant.scripted import ScriptedCoordinator
from integration.participant.store import (
    SECRET,
    Fault,
    ScriptedStore,
    break_off,
    object_of,
    send,
    status,
)
from support.logs import capture_logs
from xain_participant import Agent
from xain_participant.wire import direct


@pytest.fixture
def offering(serve: Serve, store: ScriptedStore) -> ScriptedCoordinator:
    """A coordinator that offers to fetch and put weights at the store."""
    server = serve(large())
    server.store_url = store.url
    server.store_objects = store.objects
    return server


FAULTS: dict[str, Fault] = {
    "refused": status(403),
    "failing": status(503),
    "redirecting": status(307, Location=f"/x?{SECRET}"),
    "breaking off": break_off(0),
    "no HTTP": send(f"{SECRET}\n"),
    "malformed header": send(f"HTTP/1.1 403 {SECRET}\n: {SECRET}\n\n"),
    "other bytes": object_of(SECRET.encode()),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_store_that_fails_is_gone_around_and_its_url_is_told_to_nobody(
    offering, store, adder, launch, fault, caplog
):
    """The session goes on at once through the coordinator, and the host is left alone."""
    caplog.set_level(logging.DEBUG)
    store.faults.extend([fault] * 10)
    with capture_logs() as logs:
        running = launch(adder, offering.target)
        assert running.code() == 0
    assert adder.trained == [0, 1]
    assert (offering.calls["GetWeights"], offering.calls["PutWeights"]) == (2, 2)
    failed = [entry for entry in logs if entry["event"] == "offer_failed"]
    assert [(e["log_level"], e["round"], e["method"], e["host"]) for e in failed] == [
        ("warning", 0, "GET", store.host),
        ("warning", 0, "PUT", store.host),
    ]
    assert store.methods in (["GET", "PUT"], ["GET", "PUT", "PUT"])  # one may begin again
    assert SECRET not in f"{logs}{running.seen}{caplog.text}"


def test_a_failure_inside_a_transfer_does_not_tell_the_url(
    offering, store, adder, launch, monkeypatch, caplog
):
    """A bug of our own does not either, though its traceback is logged."""
    monkeypatch.setattr(direct._Target, "host", property(lambda target: 1 / 0))
    running = launch(adder, offering.target)
    assert running.code() == 1
    assert "ZeroDivisionError" in caplog.text
    assert SECRET not in f"{running.seen}{caplog.text}"


def test_without_direct_no_offer_is_used(offering, store, adder):
    """The operator of a site decides whether anything but the coordinator is spoken to."""
    assert Agent(adder, offering.target, "ward-7", direct=False).run() == 0
    assert store.methods == []
