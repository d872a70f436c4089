"""Which messages satisfy an expression, which ones an event takes, and what is said of a wrong
one."""

import gc
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from xain_foundation.conditional_events import (
    MAX_DEPTH,
    MAX_UNITS,
    EventTable,
    EventTableFull,
    Group,
    Unit,
    parse,
)


@dataclass(frozen=True)
class Sent:
    """A message; number tells two of them apart."""

    source: str
    tag: str
    number: int = 0


def is_met(
    expression: object,
    counts: Mapping[tuple[str, str], int],
    peers: Mapping[str, int] | None = None,
) -> bool:
    """counts: messages by (source, tag), 0 where nothing is said."""
    return parse(expression).is_met(
        lambda source, tag: counts.get((source, tag), 0), lambda source: (peers or {})[source]
    )


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("worker:update:3", Unit("worker", "update", 3)),
        ("*:*:1", Unit("*", "*", 1)),
        ("worker:update:80%", Unit("worker", "update", percent=80)),
        ("worker:update:100%", Unit("worker", "update", percent=100)),
        ("worker-7:a tag:1", Unit("worker-7", "a tag", 1)),
        ("worker:update:007", Unit("worker", "update", 7)),
        ("ipv4:127.0.0.1:50:update:3", Unit("ipv4:127.0.0.1:50", "update", 3)),
        ("ipv6:%5B::1%5D:50051:*:50%", Unit("ipv6:%5B::1%5D:50051", "*", percent=50)),
        ("worker:update:999999999", Unit("worker", "update", 999_999_999)),
    ],
)
def test_a_unit(text, unit):
    """Read from its right, since the name of a peer may have colons."""
    assert parse(text) == unit
    assert parse(unit.expression) == unit
    assert parse(str(unit)) == unit


def test_a_group():
    """The operator comes last, in either spelling, and groups stand in groups."""
    expression = ["a:x:1", ["b:x:2", ("c:x:3", "&&"), "||"], "AND"]
    condition = parse(expression)
    assert condition == Group(
        "AND",
        (Unit("a", "x", 1), Group("OR", (Unit("b", "x", 2), Group("AND", (Unit("c", "x", 3),))))),
    )
    assert condition.expression == ("a:x:1", ("b:x:2", ("c:x:3", "AND"), "OR"), "AND")
    assert parse(condition.expression) == condition
    assert hash(parse(condition.expression)) == hash(condition)
    assert str(condition) == "a:x:1 AND (b:x:2 OR (c:x:3))"
    assert [str(unit) for unit in condition.units] == ["a:x:1", "b:x:2", "c:x:3"]


AMOUNT = "a whole number from 1 to 999999999, or a percentage from 1% to 100%"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("worker:update", "event 'worker:update': it must be \"source:tag:amount\""),
        ("", "event '': it must be \"source:tag:amount\""),
        (":update:1", 'its source is empty; write "*" for any'),
        ("worker::1", 'its tag is empty; write "*" for any'),
        ("worker :update:1", "its source begins or ends with a blank"),
        ("worker: update:1", "its tag begins or ends with a blank"),
        ("worker:update:", "its amount is ''; it must be " + AMOUNT),
        ("worker:update:x", "its amount is 'x'"),
        ("worker:update:%", "its amount is '%'"),
        ("worker:update:0", "its amount is '0'"),
        ("worker:update:0%", "its amount is '0%'"),
        ("worker:update:-1", "its amount is '-1'"),
        ("worker:update:+1", "its amount is '+1'"),
        ("worker:update:1.5", "its amount is '1.5'"),
        ("worker:update:1_0", "its amount is '1_0'"),
        ("worker:update: 1", "its amount is ' 1'"),
        ("worker:update:1\n", "its amount is '1\\n'"),
        ("worker:update:٣", "its amount is '٣'"),
        ("worker:update:12.5%", "its amount is '12.5%'"),
        ("worker:update:101%", "its amount is '101%'"),
        ("worker:update:1000000000", "its amount is '1000000000'"),
        ("AND", "event 'AND': an operator stands at the end of its list"),
        (7, "event 7: it must be text"),
        (None, "event None: it must be text"),
        ({"a:b:1": "AND"}, "it must be text"),
        (b"a:b:1", "it must be text"),
        ([], "event a list of 0: it is empty"),
        (["AND"], "event a list of 1: there must be something before 'AND'"),
        (["a:b:1"], "it ends in 'a:b:1'; it must end in one of AND, &&, OR, ||"),
        (["a:b:1", "and"], "it ends in 'and'"),
        (["a:b:1", 3], "it ends in 3"),
        (["a:b:1", ["OR"]], "it ends in a list of 1"),
        (["a:b:1", "AND", "b:b:1"], "it ends in 'b:b:1'"),
        (["a:b:1", "AND", "b:b:1", "AND"], "event 'AND' at [1]: an operator stands at the end"),
        (["a:b:1", ["a:b:0", "OR"], "AND"], "event 'a:b:0' at [1][0]: its amount is '0'"),
        (["a:b:1", [["b:b:1", "OR"], 7, "OR"], "AND"], "event 7 at [1][1]: it must be text"),
        (["a:b:1", ["b:b:1"], "AND"], "event a list of 1 at [1]: it ends in 'b:b:1'"),
        ("x" * 10_000, "'" + "x" * 79 + "...: it must be"),
    ],
)
def test_a_wrong_expression(expression, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse(expression)
    assert str(caught.value).startswith("conditional event ")


def test_an_expression_may_be_as_deep_and_as_long_as_is_said():
    """An expression that contains itself comes to an end."""

    def nested(depth):
        return [nested(depth - 1), "OR"] if depth else "a:b:1"

    parse(nested(MAX_DEPTH))
    with pytest.raises(ValueError, match="nested 32 deep, not more"):
        parse(nested(MAX_DEPTH + 1))
    parse(["a:b:1"] * MAX_UNITS + ["OR"])
    with pytest.raises(ValueError, match=r"at \[1024\]: there are more than 1024 units"):
        parse(["a:b:1"] * (MAX_UNITS + 1) + ["OR"])
    endless = ["a:b:1", "a:b:1"]
    endless[1:1] = [endless, endless, "a:b:1"]
    endless[-1] = "OR"
    with pytest.raises(ValueError, match="nested 32 deep"):
        parse(endless)


# --- being satisfied ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("percent", "num_peers", "needed"),
    [
        (80, 5, 4),
        (80, 6, 5),
        (60, 5, 3),
        (10, 5, 1),
        (1, 1000, 10),
        (1, 1001, 11),
        (7, 100, 7),
        (29, 100, 29),
        (100, 7, 7),
        (1, 1, 1),
        (50, 0, 1),
    ],
)
def test_a_percentage_is_rounded_up_and_at_least_one(percent, num_peers, needed):
    """In whole numbers: no 29.000000000000004 is rounded up to 30."""
    text, peers = f"worker:update:{percent}%", {"worker": num_peers}
    assert is_met(text, {("worker", "update"): needed}, peers)
    assert not is_met(text, {("worker", "update"): needed - 1}, peers)


def test_a_count_is_not_limited_by_the_number_of_peers():
    """The peers are not asked for."""
    assert not is_met("worker:update:10", {("worker", "update"): 9})
    assert is_met("worker:update:10", {("worker", "update"): 10})


@pytest.mark.parametrize(
    ("expression", "met_by"),
    [
        (["a:x:1", "b:x:1", "AND"], ["ab", "abc"]),
        (["a:x:1", "b:x:1", "&&"], ["ab", "abc"]),
        (["a:x:1", "b:x:1", "OR"], ["a", "b", "ab", "ac", "bc", "abc"]),
        (["a:x:1", "b:x:1", "||"], ["a", "b", "ab", "ac", "bc", "abc"]),
        (["a:x:1", ["b:x:1", "c:x:1", "OR"], "AND"], ["ab", "ac", "abc"]),
        (["a:x:1", ["b:x:1", "c:x:1", "AND"], "OR"], ["a", "ab", "ac", "bc", "abc"]),
        (["a:x:1", "AND"], ["a", "ab", "ac", "abc"]),
    ],
)
def test_and_or_and_nesting(expression, met_by):
    """Each set of sources that have sent something, tried."""
    sets = ["", "a", "b", "c", "ab", "ac", "bc", "abc"]
    assert [s for s in sets if is_met(expression, {(source, "x"): 1 for source in s})] == met_by


# --- the table ------------------------------------------------------------------------------------

PEERS = {"worker": ["w1", "w2", "w3", "ipv4:127.0.0.1:50"], "learner": ["l1"]}


def table(*expressions: object, max_held: int = 100) -> EventTable[int, Sent]:
    """Events, each with its index for a key."""
    made: EventTable[int, Sent] = EventTable(lambda: PEERS, max_held=max_held)
    for key, expression in enumerate(expressions):
        made.register(expression, key)
    return made


def push(made: EventTable[int, Sent], *sources: str, tag: str = "u") -> list[tuple[int, list[int]]]:
    """Messages with numbers from 0 on. Returns what fired: (key, numbers of the messages)."""
    return [
        (key, [message.number for message in messages])
        for number, source in enumerate(sources)
        for key, messages in made.push(Sent(source, tag, number))
    ]


@pytest.mark.parametrize(
    ("source", "matching"),
    [
        ("*", ["w1", "l1", "ipv4:127.0.0.1:50", "stranger", "worker", "w"]),
        ("worker", ["w1", "ipv4:127.0.0.1:50", "worker"]),
        ("w1", ["w1"]),
        ("w", ["w"]),
        ("ipv4:127.0.0.1:50", ["ipv4:127.0.0.1:50"]),
        ("stranger", ["stranger"]),
    ],
)
def test_source_is_any_peer_a_type_or_a_name(source, matching):
    """The whole source is compared: "w" is not w1. An unknown sender counts for its name."""
    senders = ["w1", "l1", "ipv4:127.0.0.1:50", "stranger", "worker", "w"]
    made = table(f"{source}:u:1")
    assert [sender for sender in senders if push(made, sender)] == matching


def test_a_tag_is_equal_or_any():
    made = table("*:up:1", "*:*:1")
    assert push(made, "w1", tag="update") == [(1, [0])]
    assert push(made, "w1", tag="up") == [(0, [0]), (1, [0])]


@pytest.mark.parametrize(
    ("expression", "senders", "taken"),
    [
        pytest.param("worker:u:3", "w1 w1 l1 w1", [[0, 1, 3]], id="three of one sender count"),
        pytest.param("worker:u:75%", "w1 w2 w3", [[0, 1, 2]], id="percentage of four workers"),
        pytest.param("*:u:61%", "w1 w2 w3 l1", [[0, 1, 2, 3]], id="percentage of five peers"),
        pytest.param("w1:u:100%", "w1", [[0]], id="percentage of one name"),
        pytest.param("w1:u:2", "w1 w1 w1 w1 w1", [[0, 1], [2, 3]], id="fires anew"),
        (["worker:u:2", "learner:u:1", "AND"], "w1 w2 w3 l1 l1 w1", [[0, 1, 3], [2, 4, 5]]),
        (["w1:u:1", "l1:u:2", "OR"], "l1 w1 l1", [[1], [0, 2]]),
        (["l1:u:1", ["w1:u:1", "w2:u:1", "OR"], "AND"], "w2 w1 l1 l1", [[1, 2], [0, 3]]),
        (["*:u:2", "w1:u:1", "AND"], "w1 w1 w2 w2 w1", [[0, 1], [2, 3, 4]]),
        (["*:u:1", "w1:u:2", "OR"], "w1 w1 w1", [[0], [1], [2]]),
        (["w1:u:2", "w1:u:3", "AND"], "w1 w1 w1 w1", [[0, 1, 2]]),
    ],
)
def test_event_takes_the_first_messages_that_satisfy_it(expression, senders, taken):
    """Messages of a part that was not needed stay for the next time; one that several units count
    is taken once."""
    assert [numbers for _, numbers in push(table(expression), *senders.split())] == taken


def test_a_percentage_counts_a_peer_that_is_called_as_a_type_is():
    """The peer matches, so it is one of those whose messages are waited for."""
    made = EventTable(lambda: {"learner": ["l1"], "worker": ["learner"]})
    made.register("learner:u:100%", 0)
    assert push(made, "l1", "learner") == [(0, [0, 1])]


def test_percentages_follow_membership():
    """When peers have left, what is held may be enough, with the next message or at once."""
    peers = {"worker": ["w1", "w2", "w3", "w4"]}
    made = EventTable(lambda: peers)
    made.register("worker:u:100%", "all")
    assert [made.push(Sent(name, "u")) for name in ("w1", "w2")] == [[], []]
    assert made.evaluate() == []
    peers["worker"] = ["w1", "w2"]
    (fired,) = made.evaluate()
    assert fired.key == "all"
    assert fired.messages == [Sent("w1", "u"), Sent("w2", "u")]
    assert made.evaluate() == []
    peers["worker"] = ["w1", "w2", "w3"]
    assert made.push(Sent("w1", "u")) == []
    peers["worker"] = ["w1"]
    assert [one.messages for one in made.push(Sent("w1", "u", 1))] == [
        [Sent("w1", "u")],
        [Sent("w1", "u", 1)],
    ]


def test_or_goes_by_the_order_in_which_its_parts_are_written():
    """The number of messages that a part needs does not matter."""
    held = [["*:a:1", "*:b:1", "AND"], ["*:b:1", "*:c:1", "AND"], "OR"]
    made = table(held)
    for tag in "ac":
        assert push(made, "w1", tag=tag) == []
    (fired,) = made.push(Sent("w1", "b"))
    assert [message.tag for message in fired.messages] == ["a", "b"]


def test_every_event_has_its_own_view():
    """Messages that one event takes stay for the others."""
    made = table("*:u:1", "worker:u:2", "w1:u:3")
    assert push(made, "w1", "w1", "w1") == [
        (0, [0]),
        (0, [1]),
        (1, [0, 1]),
        (0, [2]),
        (2, [0, 1, 2]),
    ]


def test_event_sees_messages_pushed_after_its_registration():
    made = table("*:u:2")
    push(made, "w1")
    made.register("*:u:2", 1)
    assert push(made, "w1") == [(0, [0, 0])]


def test_clear_forgets_messages_and_keeps_events():
    """The room that the messages took is free."""
    made = table(["w1:u:2", "w2:u:1", "AND"], max_held=2)
    push(made, "w1", "w1")
    made.clear()
    assert push(made, "w2", "w1", "w1") == [(0, [0, 1, 2])]


# --- bounds ---------------------------------------------------------------------------------------


def test_full_event_refuses_messages_that_do_not_let_it_fire():
    """No message is dropped without a word, no other event has half of it, and the awaited message
    still comes in."""
    made = table("*:u:3", ["w1:u:2", "w2:u:1", "AND"], max_held=3)
    assert push(made, "w1", "w1") == []
    assert push(made, "w1") == [(0, [0, 1, 0])]
    with pytest.raises(EventTableFull) as caught:
        made.push(Sent("w1", "u", 4))
    for part in ("w1:u:2 AND w2:u:1", "holds 3 messages", "'w1' with tag 'u'"):
        assert part in str(caught.value)
    assert push(made, "w3", "l1") == [], "the other event has taken nothing of it"
    assert push(made, "w2") == [(0, [0, 1, 0]), (1, [0, 1, 0])]
    assert push(made, "w1", "w1") == [], "there is room again"


def test_a_message_that_no_event_wants_is_not_held():
    """However many of them come."""
    made = table("w1:u:2", max_held=2)
    assert push(made, *["w2"] * 10) == []
    assert push(made, "w1", "w1") == [(0, [0, 1])]


def test_an_event_that_could_never_fire_is_refused():
    """The event needs more messages than it may hold."""
    with pytest.raises(ValueError, match=r"w1:u:4 never fires, .* at most 3 messages"):
        table(["w2:u:1", "w1:u:4", "OR"], max_held=3)
    table(["w2:u:1", "w1:u:3", "OR"], max_held=3)


@pytest.mark.parametrize("taken", ["first", "middle"])
def test_taken_message_leaves_nothing_behind(taken):
    """The message may lie at the front of the held ones or in the middle."""
    made = table(["w1:*:9", "w1:u:1", "OR"])
    if taken == "middle":
        assert push(made, "w1", tag="v") == []
    pushed = []
    for number in range(100):
        message = Sent("w1", "u", number)
        pushed.append(weakref.ref(message))
        assert made.push(message) == [(0, [message])]
        del message
    gc.collect()
    assert [alive() for alive in pushed if alive() is not None] == []
