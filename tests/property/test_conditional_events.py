"""Conditional events against a slow, obvious evaluator: one list of messages for each event, looked
through from its beginning for every unit, every time."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from xain_foundation.conditional_events import EventTable, Fired, parse

NAMES = ["w1", "ipv4:127.0.0.1:50", "learner", "l1"]  # one is called as a type is
SOURCES = ["*", "worker", "learner", "nobody", *NAMES]
TAGS = ["a", "b"]

amounts = st.one_of(
    st.integers(1, 4).map(str), st.sampled_from(["1%", "34%", "50%", "67%", "100%"])
)
units = st.builds(
    "{}:{}:{}".format, st.sampled_from(SOURCES), st.sampled_from([*TAGS, "*"]), amounts
)
operators = st.sampled_from(["AND", "&&", "OR", "||"])
expressions = st.recursive(
    units,
    lambda parts: st.builds(
        lambda items, operator: (*items, operator),
        st.lists(parts, min_size=1, max_size=3),
        operators,
    ),
    max_leaves=6,
)
memberships = st.fixed_dictionaries(
    {
        "worker": st.sets(st.sampled_from(["w1", "ipv4:127.0.0.1:50", "learner"])),
        "learner": st.sets(st.sampled_from(["l1"])),
    }
)


@dataclass(frozen=True)
class Sent:
    source: str
    tag: str
    number: int


Peers = dict[str, set[str]]


class SlowEvent:
    """A list of (types of the sender when it came, message)."""

    def __init__(self, expression: Any) -> None:
        self.expression = expression
        self.held: list[tuple[set[str], Sent]] = []

    def units(self, part: Any) -> Iterator[str]:
        if isinstance(part, str):
            yield part
        else:
            for one in part[:-1]:
                yield from self.units(one)

    def matches(self, unit: str, types: set[str], message: Sent) -> bool:
        source, tag, _ = unit.rsplit(":", 2)
        return source in {"*", message.source, *types} and tag in ("*", message.tag)

    def take_in(self, types: set[str], message: Sent) -> None:
        if any(self.matches(unit, types, message) for unit in self.units(self.expression)):
            self.held.append((types, message))

    def taken_by(self, part: Any, peers: Peers) -> list[Sent]:
        """The messages that satisfy a part; none if it is not satisfied."""
        if isinstance(part, str):
            source, _, amount = part.rsplit(":", 2)
            if amount.endswith("%"):
                of = [n for kind, names in peers.items() for n in names if source in ("*", kind, n)]
                needed = max(1, ceil(len(of) * int(amount[:-1]) / 100))
            else:
                needed = int(amount)
            found = [m for types, m in self.held if self.matches(part, types, m)]
            return found[:needed] if len(found) >= needed else []
        *parts, operator = part
        taken = [self.taken_by(one, peers) for one in parts]
        if operator in ("AND", "&&"):
            return [m for messages in taken for m in messages] if all(taken) else []
        return next((messages for messages in taken if messages), [])

    def fire(self, peers: Peers) -> Iterator[list[Sent]]:
        while taken := self.taken_by(self.expression, peers):
            messages = [m for _, m in self.held if m in taken]
            self.held = [(types, m) for types, m in self.held if m not in taken]
            yield messages


messages = st.tuples(
    st.sampled_from([*NAMES, "unregistered"]), st.sampled_from([*TAGS, *TAGS, "c"])
)
# Many messages between two changes of who is there: else little comes together, and little fires.
steps_of_all_kinds = st.lists(
    st.one_of(st.lists(messages, min_size=4, max_size=16), memberships, st.just("clear")),
    min_size=2,
    max_size=12,
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(registered=st.lists(expressions, min_size=1, max_size=3), steps=steps_of_all_kinds)
def test_a_table_fires_as_the_slow_one_does(registered, steps):
    """The same events, with the same messages, in the same order, whichever peers come and go."""
    peers = {"worker": {"w1", "learner"}, "learner": {"l1"}}
    table = EventTable(lambda: peers)
    slow = [SlowEvent(expression) for expression in registered]
    for key, expression in enumerate(registered):
        table.register(expression, key)
    numbers = itertools.count()

    def agree(fired: list[Fired[int, Sent]]) -> None:
        assert fired == [
            (key, found) for key, event in enumerate(slow) for found in event.fire(peers)
        ]

    for step in steps:
        if step == "clear":
            table.clear()
            for event in slow:
                event.held.clear()
        elif isinstance(step, dict):
            peers = step
            agree(table.evaluate())
        else:
            for source, tag in step:
                message = Sent(source, tag, next(numbers))
                fired = table.push(message)
                types = {kind for kind, names in peers.items() if source in names}
                for event in slow:
                    event.take_in(types, message)
                agree(fired)


@settings(derandomize=True, deadline=None)
@given(expressions)
def test_parsed_condition_is_written_the_same(expression):
    """The canonical form parses to the same condition, and the shown form names its units."""
    condition = parse(expression)
    kept = condition.expression
    assert parse(kept) == condition
    assert hash(parse(kept)) == hash(condition)
    shown = str(condition).replace("(", "").replace(")", "").split()
    assert [word for word in shown if ":" in word] == [str(unit) for unit in condition.units]
