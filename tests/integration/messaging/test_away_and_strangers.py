"""Peers who are away, are forgotten or come back, and those who have never been in the group."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.drivers import Arrived, Receiving
from support.logs import capture_logs
from support.lossy import JoinLossy, strangers, tags
from support.messaging import PATIENCE_S, until
from xain_messaging import endpoint as endpoint_module
from xain_messaging.codec import encode
from xain_messaging.drivers.in_process import InProcessDriver
from xain_messaging.links import MESSAGE, Bounds, Link, read_head
from xain_messaging.messages import Message, SessionMessage
from xain_messaging.ports import Member


def test_who_comes_back_after_it_was_forgotten_hears_what_is_new(
    lossy: JoinLossy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same process: it has heard of what was before, and drops that."""
    (a, _), (b, _) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers, "b")
    for tag in "123":
        a.isend(Message(tag, "a", "b"))
    assert tags(b, 3) == ["1", "2", "3"]
    endpoint = a.endpoint
    asked = SessionMessage("ask", "a", "b")
    endpoint.sessions.send(asked)
    with_b = endpoint.roster
    monkeypatch.setattr(endpoint_module, "FORGET_S", -1.0)
    endpoint._on_change({name: member for name, member in with_b.items() if name != "b"})
    assert "b" not in endpoint._links
    assert not endpoint.sessions.received(asked.reply())
    endpoint._on_change(with_b)
    for tag in "456":
        a.isend(Message(tag, "a", "b"))
    assert tags(b, 3) == ["4", "5", "6"]
    # What the other has sent meanwhile comes too, though the first of it is not its first.
    b.isend(Message("answer", "b", "a"))
    assert tags(a, 1) == ["answer"]


def test_what_is_taken_late_does_not_come_twice(
    lossy: JoinLossy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender was forgotten meanwhile, and is back."""
    (a, _), (b, line) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")
    b.isend(Message("1", "b", "a"))
    assert a.receive_by_id("none", 0.05).missing  # it waits
    with_b = a.endpoint.roster
    monkeypatch.setattr(endpoint_module, "FORGET_S", -1.0)
    a.endpoint._on_change({name: member for name, member in with_b.items() if name != "b"})
    a.endpoint._on_change(with_b)
    line.break_connection("a")
    b.isend(Message("2", "b", "a"))
    assert tags(a, 2) == ["1", "2"]
    assert a.receive_once(0.05) is None


def test_one_that_is_away_for_a_moment_keeps_its_sessions(
    lossy: JoinLossy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many names there are that have never been in the group: no more of those are heard
    than there is room for."""
    monkeypatch.setattr(endpoint_module, "MAX_STRANGERS", 2)
    a, _, _ = strangers(lossy, 5)
    b, _ = lossy("b")
    until(lambda: "peer" in a.peers, "b")
    session = a.isend(SessionMessage("ask", "a", "b"))
    asked = b.receive_once()
    assert asked is not None
    assert len(list(a.receive(0.1))) == 2

    def is_settled() -> bool:
        for proxy in (b, a):
            proxy.receive_by_id("none", 0.02)
        return a.endpoint._links["b"].is_settled

    until(is_settled, "the word that b has it")
    with_b = a.endpoint.roster
    a.endpoint._on_change({name: member for name, member in with_b.items() if name != "b"})
    assert a.endpoint._links.keys() == {"b", "stranger-0", "stranger-1"}
    a.endpoint._on_change(with_b)
    b.reply(asked, body=2)
    (answer,) = a.receive_by_id(session)
    assert answer.body == 2


def test_those_who_are_away_are_bounded(lossy: JoinLossy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to leave are forgotten sooner, but for those for whom something is kept."""
    monkeypatch.setattr(endpoint_module, "MAX_AWAY", 2)
    a, _ = lossy("a")
    alone = a.endpoint.roster
    for i in range(6):
        member = Member(f"b-{i}", "peer", 1, "in-process:99", 1)
        a.endpoint._on_change({**alone, member.name: member})
        if i in (1, 5):
            a.isend(Message("kept", "a", member.name))
        a.endpoint._on_change(alone)
    assert a.endpoint._links.keys() == {"b-1", "b-5"}


def test_close_names_peers_that_are_away_and_miss_messages(lossy: JoinLossy) -> None:
    (a, _), (b, _) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers, "b")
    b.close()
    until(lambda: "peer" not in a.peers, "b to be gone")
    for _ in range(3):
        a.isend(Message("kept", "a", "b"))
    with capture_logs() as logs:
        a.close()
    (line,) = [entry for entry in logs if entry["event"] == "not_delivered"]
    assert (line["log_level"], line["peer"], line["num_messages"]) == ("warning", "b", 3)


def test_close_waits_until_its_messages_are_heard(lossy: JoinLossy) -> None:
    """Messages that a line has lost go again, and need not be taken for the word to come."""
    (a, line), (b, _) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers, "b")
    line.lost.add("b")
    a.isend(Message("1", "a", "b"))
    line.lost.discard("b")  # nobody tells of the loss
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(a.close)
        assert b.receive_by_id("none", 0.5).missing  # it hears, and takes nothing
        closing.result(PATIENCE_S)
    assert tags(b, 1) == ["1"]


def test_strangers_are_forgotten(lossy: JoinLossy, monkeypatch: pytest.MonkeyPatch) -> None:
    """They and what was kept for them, though nobody comes or goes."""
    a, _, _ = strangers(lossy, 20)
    for message in a.receive(0.2):
        a.reply(message, body=b"x" * 300)
    outbox = a.endpoint._outbox
    assert (len(a.endpoint._links), outbox.num_messages) == (20, 20)
    monkeypatch.setattr(endpoint_module, "FORGET_S", -1.0)
    a.endpoint._forget_at = 0.0
    until(lambda: not a.endpoint._links, "them to be forgotten")
    assert (outbox.num_messages, outbox.num_bytes) == (0, 0)


def test_who_uses_the_name_of_another_does_not_keep_it_away(
    lossy: JoinLossy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a number that no process will ever have; and while that has only just come back."""
    (a, line), (b, _) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers, "b")
    b.isend(Message("1", "b", "a"))
    assert tags(a, 1) == ["1"]
    driver = InProcessDriver(line._switchboard)
    driver.connect("a", line.address)
    for incarnation in (10**9, 10**18):
        link = Link("b", incarnation, "a")
        link.connected()
        for tag in ("x", "y"):
            packet = link.send(MESSAGE, encode(Message(tag, "b", "a")))
            driver.send("a", packet or [])
    with capture_logs() as logs:
        assert a.receive_by_id("none", 0.02).missing
    assert [entry["event"] for entry in logs] == ["held_until_known"]
    b.isend(Message("2", "b", "a"))
    assert tags(a, 1) == ["2"]
    b.close()
    back, _ = lossy("b")
    back.isend(Message("3", "b", "a"))
    assert tags(a, 1) == ["3"]
    monkeypatch.setattr(endpoint_module, "HOLD_S", -1.0)
    with capture_logs() as logs:
        until(lambda: not a.endpoint._links["b"].is_holding, "it to be held no longer")
    assert [entry["event"] for entry in logs] == ["held_too_long"]


def test_what_comes_before_the_word_of_its_process_is_not_lost(lossy: JoinLossy) -> None:
    """The discovery may tell late who has come back. All of it comes then, in order, though its
    sender uses its proxy no more."""
    (a, _), (b, _) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers, "b")
    b.isend(Message("0", "b", "a"))
    assert tags(a, 1) == ["0"]
    on_change = a.endpoint._on_change
    b.close()
    discovery = a.endpoint.membership._discovery
    discovery._told["g", "a"].on_change = lambda roster: None
    back, _ = lossy("b")
    with_b = back.endpoint.roster
    for tag in "123":
        back.isend(Message(tag, "b", "a"))
    assert a.receive_once(0.05) is None
    on_change(with_b)
    assert tags(a, 3) == ["1", "2", "3"]


def test_held_messages_beyond_what_may_wait_come_when_there_is_room(lossy: JoinLossy) -> None:
    """The discovery's thread, which tells of their sender, goes on."""
    bounds = Bounds(max_messages=4)
    (a, _), (b, _) = lossy("a", bounds), lossy("b", bounds)
    until(lambda: "peer" in a.peers, "b")
    on_change = a.endpoint._on_change
    for number in range(4):
        b.isend(Message(f"{number}", "b", "a"))
    until(lambda: len(a.endpoint.inbox) == 4, "all")
    b.close(0.0)
    a.endpoint.membership._discovery._told["g", "a"].on_change = lambda roster: None
    back, _ = lossy("b", bounds)
    back.isend(Message("4", "b", "a"))
    until(lambda: a.endpoint._links["b"].is_holding, "it")
    on_change(back.endpoint.roster)
    found: list[str] = []

    def all_has_come() -> bool:
        found.extend(message.tag for message in a.receive(0.02))
        back.receive_by_id("none", 0.02)
        return len(found) >= 5

    until(all_has_come, "all")
    assert found == ["0", "1", "2", "3", "4"]


def test_what_comes_before_its_sender_is_known_is_not_lost(
    lossy: JoinLossy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if there are so many strangers that it is not heard: it is asked for when the discovery
    tells who that is."""
    monkeypatch.setattr(endpoint_module, "MAX_STRANGERS", 5)
    a, driver, links = strangers(lossy, 7)
    assert len(list(a.receive(0.1))) == 5
    member = Member("stranger-6", "peer", 9, driver.address, 1)
    a.endpoint._on_change({**a.endpoint.roster, "stranger-6": member})
    event = Receiving(driver).receive(PATIENCE_S)
    assert isinstance(event, Arrived)
    for packet in links[6].again(read_head(event.frames[0])):
        driver.send("a", packet)
    message = a.receive_once()
    assert message is not None
    assert message.source == "stranger-6"
