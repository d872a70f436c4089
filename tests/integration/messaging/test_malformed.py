"""Messages that lead to something that nobody has thought of: they come from outside."""

import time
from dataclasses import replace
from functools import partial

import pytest

from support.logs import capture_logs
from support.lossy import tags, two
from support.messaging import until
from xain_messaging import endpoint as endpoint_module
from xain_messaging.endpoint import Endpoint
from xain_messaging.errors import CollectiveFailed
from xain_messaging.format.codec import encode
from xain_messaging.format.messages import Message
from xain_messaging.links import COLLECTIVE, Delivery
from xain_messaging.proxy import Proxy


def fail(*_: object) -> None:
    raise ValueError("The truth value of an array is ambiguous")


def fail_as_an_operation(message: Message, delivery: Delivery) -> None:
    raise CollectiveFailed("of another member", ())


def post(endpoint: Endpoint, message: Message) -> None:
    endpoint.post(message, COLLECTIVE, encode(message), time.monotonic())


def is_taken(a: Proxy, b: Proxy) -> bool:
    """All that the first has sent; the second has done what was due."""
    b.receive_by_id("none", 0.02)
    a.receive_by_id("none", 0.02)
    return not a.endpoint._links["b"].num_kept


@pytest.mark.parametrize("what", ["decode", "a handler", "an operation"])
def test_message_that_cannot_be_handled_is_dropped(lossy, monkeypatch, what):
    """The message is logged and counts as taken, so that its sender does not keep it. The receiver
    goes on with the messages behind it."""
    a, b, _ = two(lossy)
    if what == "decode":
        monkeypatch.setattr(endpoint_module, "decode", fail)
    elif what == "a handler":
        b.endpoint._on_collective = fail
    else:
        b.endpoint._on_collective = fail_as_an_operation
    with capture_logs() as logs:
        post(a.endpoint, Message("collective", "a", "b"))
        assert b.receive_by_id("none", 0.05).missing
    (line,) = [one for one in logs if one["event"] == "malformed_message"]
    assert line["peer"] == "a"
    monkeypatch.undo()
    a.isend(Message("after it", "a", "b"))
    assert tags(b, 1) == ["after it"]
    until(partial(is_taken, a, b), "it to be taken")


def test_message_that_cannot_be_handled_ends_no_membership(lossy):
    """The thread of the discovery handles messages that came before their sender was known."""
    a, b, _ = two(lossy)
    b.endpoint._on_collective = fail
    post(a.endpoint, Message("collective", "a", "b"))
    c, _ = lossy("c")
    until(lambda: len(b.peers["peer"]) == 2, "the third")
    c.isend(Message("hello", "c", "b"))
    assert tags(b, 1) == ["hello"]


def test_an_ack_behind_a_wake_is_heard_before_another_process(lossy):
    """Messages that a process has taken do not go to the one that replaces it."""
    a, b, _ = two(lossy)
    a.isend(Message("taken", "a", "b"))
    assert tags(b, 1) == ["taken"]
    a.endpoint.wake()
    assert b.receive_by_id("none", 0.05).missing  # it tells
    roster = dict(a.endpoint.roster)
    roster["b"] = replace(roster["b"], incarnation=roster["b"].incarnation + 1)
    a.endpoint._on_change(roster)
    assert not a.endpoint._links["b"].num_kept
