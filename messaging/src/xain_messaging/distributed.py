"""A class whose objects are driven by messages.

    def average(local: Model, proxy: Proxy, messages: list[Message]) -> None:
        local.average([message.body for message in messages])
        for message in messages:
            proxy.reply(message, body=local.weights)

    @dist(proxy, {"worker:update:60%": average})
    class Server(Model): ...

    Server().launch()

A handler is called whenever its conditional event is satisfied, with the messages that satisfied
it; see conditional_events.py. The peers that percentages are of are those who are here when a
message comes, and when somebody has come or gone.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import update_wrapper
from typing import Any, Final, Generic, TypeAlias, TypeVar

from xain_messaging.conditional_events import (
    ANY,
    MAX_HELD,
    EventTable,
    EventTableFull,
    Expression,
    Fired,
    parse,
)
from xain_messaging.messages import Message
from xain_messaging.ports import Roster
from xain_messaging.proxy import Proxy

T = TypeVar("T")

Handler: TypeAlias = Callable[[Any, Proxy, list[Message]], object]
Peers: TypeAlias = Mapping[str, Sequence[str]]  # see Proxy.peers

_OWN: Final = frozenset(
    {"local_instance", "proxy", "_table", "_fired", "_refused", "_has_room", "_roster", "_max_held"}
)

# The units that a message counts in, of all events.
_Kind: TypeAlias = frozenset[tuple[str, str]]


class _Refused:
    """Messages that have found no room, by what they count in: where there is none for one of a
    kind, there is none for the others. So a look for room takes as long for a thousand of them as
    for one."""

    def __init__(self, expressions: Iterable[Expression]) -> None:
        self._units = frozenset(
            (unit.source, unit.tag)
            for expression in expressions
            for unit in parse(expression).units
        )
        self._by_kind: dict[_Kind, deque[tuple[int, Message]]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return sum(len(messages) for messages in self._by_kind.values())

    def __iter__(self) -> Iterator[Message]:
        """The oldest first."""
        return (message for _, message in heapq.merge(*self._by_kind.values()))

    def add(self, message: Message, peers: Peers) -> None:
        sources = {ANY, message.source}
        sources |= {role for role, names in peers.items() if message.source in names}
        kind = self._units & {(source, tag) for source in sources for tag in (message.tag, ANY)}
        self._by_kind.setdefault(kind, deque()).append((next(self._numbers), message))

    def sort(self, peers: Peers) -> None:
        """Anew: what a message counts in depends on who its sender is."""
        messages = list(self)
        self._by_kind.clear()
        for message in messages:
            self.add(message, peers)

    def give(self, push: Callable[[Message], None]) -> None:
        """The oldest of each kind first, and of a kind as many as push() does not refuse."""
        heads = [(messages[0][0], kind) for kind, messages in self._by_kind.items()]
        heapq.heapify(heads)
        while heads:
            _, kind = heapq.heappop(heads)
            messages = self._by_kind[kind]
            try:
                push(messages[0][1])
            except EventTableFull:  # that has been told
                continue
            messages.popleft()
            if messages:
                heapq.heappush(heads, (messages[0][0], kind))
            else:
                del self._by_kind[kind]


class Distributed(Generic[T]):
    """An object, and the messages that drive it. What it has not itself, it has of the object; and
    what is set here is the object's.

    local_instance: the object. proxy: what it hears and speaks through.
    """

    local_instance: T
    proxy: Proxy

    def __init__(
        self,
        local_instance: T,
        proxy: Proxy,
        handlers: Mapping[Expression, Handler],
        stop_event: Expression | None,
        max_held: int,
    ) -> None:
        self.local_instance = local_instance
        self.proxy = proxy
        self._table: EventTable[Handler, Message] = EventTable(
            lambda: proxy.peers, max_held=max_held
        )
        events = list(handlers.items())
        if stop_event is not None:
            events.append((stop_event, _stop))
        for expression, handler in events:
            self._table.register(expression, handler)
        self._fired: deque[Fired[Handler, Message]] = deque()
        # Taken from the proxy, when the table was full.
        self._refused = _Refused(expression for expression, _ in events)
        self._has_room = False  # there may be some for them
        self._roster: Roster | None = None  # at the last look for it
        self._max_held = max_held

    def __getattr__(self, name: str) -> Any:
        # A copy asks before there is an object; and what Python asks for is for this one to have.
        if name == "local_instance" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.local_instance, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.local_instance, name, value)

    def launch(self, timeout_s: float | None = None) -> None:
        """Receive and call the handlers until stop(), the stop event, or for timeout_s in all; by
        default without end. What a handler raises comes out here; the messages that it had are
        taken, and what else has fired is called the next time.

        Raises EventTableFull if an event holds too many messages and is not satisfied. The message
        that found no room is kept, and finds its place before all that comes later when launch() is
        called again and there is room. When as many are kept as an event holds, launch() raises it
        before it receives anything: what comes later waits in the proxy.
        """
        events = self.proxy.events(timeout_s)
        self._look_at_peers()
        while True:
            while self._fired:
                fired = self._fired.popleft()
                if fired.key is _stop:
                    return
                fired.key(self.local_instance, self.proxy, fired.messages)
            if self._has_room:
                self._refused.give(self._push)
                self._has_room = bool(self._fired)  # not before: an interrupt has left some
                continue
            if len(self._refused) >= self._max_held:
                raise EventTableFull(
                    f"{len(self._refused)} messages have found no room, and no more are received; "
                    "make the handlers others, or raise max_held"
                )
            event = next(events, None)
            if event is None:
                return
            if not isinstance(event, Message):
                self._look_at_peers()
                continue
            try:
                self._push(event)
            except EventTableFull:
                self._refused.add(event, self.proxy.peers)
                raise

    def _look_at_peers(self) -> None:
        """What is held may be enough when somebody has gone, also since the last launch()."""
        self._note(self._table.evaluate())
        roster = self.proxy.endpoint.roster
        if roster is not self._roster:
            self._roster = roster
            self._refused.sort(self.proxy.peers)
            self._has_room = True

    def _push(self, message: Message) -> None:
        self._note(self._table.push(message))

    def _note(self, fired: list[Fired[Handler, Message]]) -> None:
        """Room comes of what fires, and of nothing else but other peers."""
        self._fired += fired
        self._has_room = self._has_room or bool(fired)

    def stop(self) -> None:
        """Let launch() end when what has come is handled. Safe in handlers and in other threads."""
        self.proxy.stop()


def dist(
    proxy: Proxy,
    handlers: Mapping[Expression, Handler],
    *,
    stop_event: Expression | None = None,
    max_held: int = MAX_HELD,
) -> Callable[[Callable[..., T]], Callable[..., Distributed[T]]]:
    """Turn a class into one whose objects are driven by what comes through `proxy`.

    handlers: by conditional event; each is called as (object, proxy, messages).
    stop_event: ends launch().
    max_held: messages that wait in the view of one event.
    Raises ConditionalEventError at the first object for an expression that is none.
    """

    def distribute(cls: Callable[..., T]) -> Callable[..., Distributed[T]]:
        def make(*args: Any, **kwargs: Any) -> Distributed[T]:
            return Distributed(cls(*args, **kwargs), proxy, handlers, stop_event, max_held)

        return update_wrapper(make, cls, updated=())

    return distribute


def _stop(local: object, proxy: Proxy, messages: list[Message]) -> None:
    """Stands for the stop event in the table."""
