"""Peers that are away, are forgotten or come back, and peers that are not known yet."""

from concurrent.futures import ThreadPoolExecutor

from support.logs import capture_logs
from support.lossy import tags, two
from support.messaging import PATIENCE_S, until
from xain_membership.ports import Member
from xain_messaging.format.messages import Message, SessionMessage


def test_forgotten_peer_that_comes_back_hears_new_messages(lossy):
    """The same process: it has heard of what was before, and drops that."""
    a, b, _ = two(lossy)
    for tag in "123":
        a.isend(Message(tag, "a", "b"))
    assert tags(b, 3) == ["1", "2", "3"]
    endpoint = a.endpoint
    asked = SessionMessage("ask", "a", "b")
    endpoint.sessions.send(asked)
    with_b = endpoint.roster
    endpoint.forget_s = -1.0
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


def test_message_that_is_taken_late_comes_once(lossy):
    """The sender was forgotten meanwhile, and is back."""
    a, b, driver = two(lossy)
    b.isend(Message("1", "b", "a"))
    assert a.receive_by_id("none", 0.05).missing  # it waits
    with_b = a.endpoint.roster
    a.endpoint.forget_s = -1.0
    a.endpoint._on_change({name: member for name, member in with_b.items() if name != "b"})
    a.endpoint._on_change(with_b)
    driver.break_connection("a")
    b.isend(Message("2", "b", "a"))
    assert tags(a, 2) == ["1", "2"]
    assert a.receive_once(0.05) is None


def test_peers_that_are_away_are_bounded(lossy):
    """The first to leave are forgotten sooner, but for those for whom something is kept."""
    a, _ = lossy("a")
    a.endpoint.max_away = 2
    alone = a.endpoint.roster
    for i in range(6):
        member = Member(f"b-{i}", "peer", 1, "in-process:99", 1)
        a.endpoint._on_change({**alone, member.name: member})
        if i in (1, 5):
            a.isend(Message("kept", "a", member.name))
        a.endpoint._on_change(alone)
    assert a.endpoint._links.keys() == {"b-1", "b-5"}


def test_close_names_peers_that_are_away_and_miss_messages(lossy):
    a, b, _ = two(lossy)
    b.close()
    until(lambda: "peer" not in a.peers, "b to be gone")
    for _ in range(3):
        a.isend(Message("kept", "a", "b"))
    with capture_logs() as logs:
        a.close()
    (line,) = [entry for entry in logs if entry["event"] == "not_delivered"]
    assert (line["log_level"], line["peer"], line["num_messages"]) == ("warning", "b", 3)


def test_close_waits_until_its_messages_are_heard(lossy):
    """Messages that a connection has lost go again, and need not be taken for the word to come."""
    (a, driver), (b, _) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers, "b")
    driver.lost.add("b")
    a.isend(Message("1", "a", "b"))
    driver.lost.discard("b")  # the loss is not told
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(a.close)
        assert b.receive_by_id("none", 0.5).missing  # it hears, and takes nothing
        closing.result(PATIENCE_S)
    assert tags(b, 1) == ["1"]


def test_messages_before_the_news_of_their_process_are_not_lost(lossy):
    """The discovery may tell late that a process has come back. All of its messages come then, in
    order, though it uses its proxy no more."""
    a, b, _ = two(lossy)
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


def test_messages_of_a_sender_that_is_not_known_yet_are_not_lost(lossy):
    """The discovery tells late of a new name. Its messages are asked for then."""
    a, _ = lossy("a")
    on_change = a.endpoint._on_change
    discovery = a.endpoint.membership._discovery
    discovery._told["g", "a"].on_change = lambda roster: None
    b, _ = lossy("b")
    for tag in "12":
        b.isend(Message(tag, "b", "a"))
    assert a.receive_once(0.05) is None
    on_change(b.endpoint.roster)
    assert tags(a, 2) == ["1", "2"]
