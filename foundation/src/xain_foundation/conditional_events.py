"""Conditional events: which messages must have come before something is to be done.

An expression is one unit, "source:tag:amount", or a list of expressions that ends in an operator:

    "worker:update:80%"
    ["learner:model:1", ["worker:update:3", "worker-7:stop:1", "OR"], "AND"]

A source is the type of a peer, the name of a peer, or "*" for everybody; a tag is that of the
message, or "*" for any. Both are equal or not: a part of a name is no match. Names may contain
colons, as addresses do, so a unit is read from its right; tags cannot.

An amount is of messages, whoever of the source has sent them: three of one worker satisfy
"worker:update:3". A count may be larger than the number of peers. A percentage is of the peers of
the source at the time of evaluation, rounded up, and of at least one message: of nobody, or as
little as 1 % of a few, it is one message and not none. It ends at 100 %, since beyond that one
message of each peer would never do; whoever means more messages than peers writes a count.

AND or && is satisfied when all that stands before it is, OR or || when one of it is. Every unit
counts for itself, so one message can count in several of them.

Consumption, in an EventTable: every event that is registered has its own view of the messages, with
those that one of its units matches. When it is satisfied it fires, and what satisfied it is taken
from its view: of a unit the first messages, as many as its amount says; of AND what all its parts
take; of OR what the first satisfied part takes, in the order in which they are written. All others
stay for the next time. A message that several units take is handed over once, and is gone for all
units of that event. What one event takes, the others still have. An event fires as long as it is
satisfied.
"""

import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from typing_extensions import TypeAliasType

from xain_foundation.net.errors import MessagingError

MAX_DEPTH = 32  # of lists in lists; reading and evaluating them recurses
MAX_UNITS = 1024  # of one expression; all of them may be looked at for each message
MAX_HELD = 65_536  # messages in the view of one event

ANY: Final = "*"

# More digits than this are a mistake.
_AMOUNT = re.compile(r"([0-9]{1,9})(%?)")

_OPERATORS: Mapping[str, Literal["AND", "OR"]] = {
    "AND": "AND",
    "&&": "AND",
    "OR": "OR",
    "||": "OR",
}

# With a name of its own, by which pydantic finds its way through the recursion.
Expression = TypeAliasType("Expression", "str | tuple[Expression, ...]")
Count: TypeAlias = Callable[[str, str], int]  # messages of (source, tag)
NumPeers: TypeAlias = Callable[[str], int]  # peers of a source, now


class EventTableFull(MessagingError):
    """An event holds as many messages as it may, and is not satisfied. Nothing has changed.

    refused: the message that found no room.
    """

    def __init__(self, message: str, refused: "TaggedMessage") -> None:
        super().__init__(message)
        self.refused = refused


# --- conditions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """A number of messages of a source, with a tag. One of count and percent is None."""

    source: str
    tag: str
    count: int | None = None
    percent: int | None = None

    @property
    def amount(self) -> str:
        """The amount as it is written: "3" or "80%"."""
        return f"{self.percent}%" if self.count is None else str(self.count)

    @property
    def expression(self) -> str:
        """The expression that parses to this condition."""
        return f"{self.source}:{self.tag}:{self.amount}"

    @property
    def units(self) -> "Iterator[Unit]":
        """The unit itself, the only one of the condition."""
        yield self

    def num_needed(self, num_peers: NumPeers) -> int:
        """The number of messages that satisfy the unit. num_peers is asked for percentages only."""
        if self.percent is None:
            assert self.count is not None
            return self.count
        return max(1, -(-self.percent * num_peers(self.source) // 100))

    def satisfied(self, count: Count, num_peers: NumPeers) -> "list[Unit]":
        """The unit in a list, if enough messages are there; else an empty list."""
        is_met = count(self.source, self.tag) >= self.num_needed(num_peers)
        return [self] if is_met else []

    def is_met(self, count: Count, num_peers: NumPeers) -> bool:
        """Whether enough messages are there."""
        return bool(self.satisfied(count, num_peers))

    def __str__(self) -> str:
        return self.expression


@dataclass(frozen=True, slots=True)
class Group:
    """A condition of at least one part: all parts must be met (AND), or one of them (OR)."""

    operator: Literal["AND", "OR"]
    parts: "tuple[Condition, ...]"

    @property
    def expression(self) -> Expression:
        """The expression that parses to this condition."""
        return (*(part.expression for part in self.parts), self.operator)

    @property
    def units(self) -> Iterator[Unit]:
        """The units of all parts, in the order in which they are written."""
        for part in self.parts:
            yield from part.units

    def satisfied(self, count: Count, num_peers: NumPeers) -> list[Unit]:
        """Units that satisfy the group: of all its parts, or of the first that is satisfied; none
        if it is not satisfied."""
        found: list[Unit] = []
        for part in self.parts:
            units = part.satisfied(count, num_peers)
            if self.operator == "OR" and units:
                return units
            if self.operator == "AND" and not units:
                return []
            found += units
        return found

    def is_met(self, count: Count, num_peers: NumPeers) -> bool:
        """Whether the messages that are there satisfy the group.

        count: how many messages there are, by source and tag as they stand in the units.
        num_peers: how many peers of a source there are; asked for percentages only.
        """
        return bool(self.satisfied(count, num_peers))

    def __str__(self) -> str:
        parts = (f"({part})" if isinstance(part, Group) else str(part) for part in self.parts)
        return f" {self.operator} ".join(parts)


Condition: TypeAlias = Unit | Group


# --- reading --------------------------------------------------------------------------------------


def parse(expression: object) -> Condition:
    """Read an expression: text, or a list or tuple of expressions and an operator.

    Raises ValueError, whose text shows the path to what is wrong.
    """
    return _parse(expression, (), itertools.count())


def _parse(item: object, path: tuple[int, ...], numbers: Iterator[int]) -> Condition:
    """Parse an expression, or the part at `path`, to a Unit or Group. numbers: count its units."""
    if isinstance(item, str):
        if next(numbers) == MAX_UNITS:
            raise _error(item, path, f"there are more than {MAX_UNITS} units")
        return _parse_unit(item, path)
    if not isinstance(item, list | tuple):
        raise _error(item, path, 'it must be text, "source:tag:amount", or a list')
    if len(path) == MAX_DEPTH:
        raise _error(item, path, f"lists may be nested {MAX_DEPTH} deep, not more")
    if not item:
        raise _error(item, path, "it is empty")
    *parts, operator = item
    if not isinstance(operator, str) or operator not in _OPERATORS:
        known = ", ".join(_OPERATORS)
        raise _error(item, path, f"it ends in {_shown(operator)}; it must end in one of {known}")
    if not parts:
        raise _error(item, path, f"there must be something before {operator!r}")
    return Group(
        _OPERATORS[operator],
        tuple(_parse(part, (*path, i), numbers) for i, part in enumerate(parts)),
    )


def _parse_unit(text: str, path: tuple[int, ...]) -> Unit:
    """Parse "source:tag:amount". Raises the error that names it by its path in the expression."""
    if text in _OPERATORS:
        raise _error(text, path, "an operator stands at the end of its list, and only there")
    parts = text.rsplit(":", 2)
    if len(parts) != 3:
        raise _error(text, path, 'it must be "source:tag:amount", such as "worker:update:80%"')
    source, tag, amount = parts
    for name, part in (("source", source), ("tag", tag)):
        if not part:
            raise _error(text, path, f'its {name} is empty; write "*" for any')
        if part != part.strip():
            raise _error(text, path, f"its {name} begins or ends with a blank")
    match = _AMOUNT.fullmatch(amount)
    number = int(match[1]) if match else 0
    if match is None or number == 0 or (match[2] and number > 100):
        raise _error(
            text,
            path,
            f"its amount is {_shown(amount)}; it must be a whole number from 1 to 999999999, or a "
            "percentage from 1% to 100%",
        )
    return Unit(source, tag, percent=number) if match[2] else Unit(source, tag, number)


def _error(item: object, path: tuple[int, ...], why: str) -> ValueError:
    at = "".join(f"[{i}]" for i in path)
    return ValueError(f"conditional event {_shown(item)}{' at ' if at else ''}{at}: {why}")


def _shown(item: object) -> str:
    """Return short text for an item, whatever it is; a list may contain itself."""
    if isinstance(item, list | tuple):
        return f"a list of {len(item)}"
    text = repr(item)
    return text if len(text) <= 80 else f"{text[:80]}..."


# --- the table ------------------------------------------------------------------------------------


class TaggedMessage(Protocol):
    """The part of a message that a table has to know. source: the name of the peer that sent it."""

    @property
    def source(self) -> str: ...

    @property
    def tag(self) -> str: ...


Key = TypeVar("Key")
Message = TypeVar("Message", bound=TaggedMessage)


class Fired(NamedTuple, Generic[Key, Message]):
    """An event that was satisfied. messages: what it took, in the order of arrival."""

    key: Key
    messages: list[Message]


class _View(Generic[Key, Message]):
    """An event and the messages that it holds.

    They stand under their numbers in one queue for each (source, tag) of the units, in several of
    them if several match. A message is taken out of all of them at once, and this may be in their
    middle; an OrderedDict does that, and gives its first items, without looking at the others.
    """

    def __init__(self, condition: Condition, key: Key) -> None:
        self.condition = condition
        self.key = key
        self.num_held = 0
        self._queues: dict[tuple[str, str], OrderedDict[int, Message]] = {
            (unit.source, unit.tag): OrderedDict() for unit in condition.units
        }

    def matching(self, sources: Collection[str], tag: str) -> list[tuple[str, str]]:
        """The queues for a message of these sources."""
        wanted = ((source, t) for source in sources for t in {tag, ANY})
        return [queue for queue in wanted if queue in self._queues]

    def would_fire(self, queues: Collection[tuple[str, str]], num_peers: NumPeers) -> bool:
        """Whether one more message in these queues satisfies the event."""
        return self.condition.is_met(
            lambda *queue: len(self._queues[queue]) + (queue in queues), num_peers
        )

    def add(self, number: int, message: Message, queues: Collection[tuple[str, str]]) -> None:
        for queue in queues:
            self._queues[queue][number] = message
        self.num_held += 1

    def fire(self, num_peers: NumPeers) -> Iterator[Fired[Key, Message]]:
        """Yield the event as often as it is satisfied, each time with the messages it takes."""
        while units := self.condition.satisfied(lambda *queue: len(self._queues[queue]), num_peers):
            taken: dict[int, Message] = {}
            for unit in units:
                queue = self._queues[unit.source, unit.tag]
                taken.update(itertools.islice(queue.items(), unit.num_needed(num_peers)))
            for number in taken:
                for queue in self._queues.values():
                    queue.pop(number, None)
            self.num_held -= len(taken)
            yield Fired(self.key, [taken[number] for number in sorted(taken)])

    def clear(self) -> None:
        for queue in self._queues.values():
            queue.clear()
        self.num_held = 0


class EventTable(Generic[Key, Message]):
    """Which registered events fire as messages come. Not for several threads.

    What a push costs does not depend on how many messages are held: each is put into the views that
    it concerns, and taken out of them once.

    peers: the names of the peers by their type, now; asked in every push. A message counts for the
        types that its sender has when it is pushed; for its name and "*" even if nobody knows it.
    max_held: messages in the view of one event. Beyond it a message is refused, unless it lets the
        event fire: dropping one that was taken in would lose it without a word.
    """

    def __init__(
        self, peers: Callable[[], Mapping[str, Collection[str]]], *, max_held: int = MAX_HELD
    ) -> None:
        self._peers = peers
        self._max_held = max_held
        self._views: list[_View[Key, Message]] = []
        self._num_pushed = 0

    def register(self, expression: object, key: Key) -> None:
        """Register an event, which sees what is pushed from now on. key: stands for it when it
        fires, such as a handler or its name.

        Raises ValueError, also for a count that the table cannot hold.
        """
        condition = parse(expression)
        for unit in condition.units:
            if unit.count is not None and unit.count > self._max_held:
                raise ValueError(
                    f"conditional event {condition}: {unit} never fires, because an event holds "
                    f"at most {self._max_held} messages; lower the count or raise max_held"
                )
        self._views.append(_View(condition, key))

    def push(self, message: Message) -> list[Fired[Key, Message]]:
        """Add a message to its events. Returns the events that fire, in the order of registration.

        Raises EventTableFull; then no event has taken the message in.
        """
        peers = self._peers()
        num_peers = _counter(peers)
        sources = {ANY, message.source}
        sources |= {kind for kind, names in peers.items() if message.source in names}
        concerned = []
        for view in self._views:
            queues = view.matching(sources, message.tag)
            if not queues:
                continue
            if view.num_held >= self._max_held and not view.would_fire(queues, num_peers):
                raise EventTableFull(
                    f"the event {view.condition} holds {view.num_held} messages and still waits "
                    f"for others, so that one of {message.source!r} with tag {message.tag!r} finds "
                    "no room; raise max_held, or clear() the table",
                    message,
                )
            concerned.append((view, queues))
        self._num_pushed += 1
        for view, queues in concerned:
            view.add(self._num_pushed, message, queues)
        return [fired for view, _ in concerned for fired in view.fire(num_peers)]

    def evaluate(self) -> list[Fired[Key, Message]]:
        """The events that fire without a message: after peers have left, a percentage may be of
        fewer messages than are held."""
        num_peers = _counter(self._peers())
        return [fired for view in self._views for fired in view.fire(num_peers)]

    def clear(self) -> None:
        """Forget all messages. The events stay registered."""
        for view in self._views:
            view.clear()


def _counter(peers: Mapping[str, Collection[str]]) -> NumPeers:
    """Make the function that counts the peers of a source."""

    def num_peers(source: str) -> int:
        return sum(
            len(names) if source in (ANY, kind) else source in names
            for kind, names in peers.items()
        )

    return num_peers
