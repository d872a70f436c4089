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

from collections import deque
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any, Final, Generic, TypeAlias, TypeVar

from xain_foundation.conditional_events import (
    MAX_HELD,
    EventTable,
    Expression,
    Fired,
)
from xain_messaging.format.messages import Message
from xain_messaging.proxy import Proxy

T = TypeVar("T")

Handler: TypeAlias = Callable[[Any, Proxy, list[Message]], object]

_OWN: Final = frozenset({"local_instance", "proxy", "_table", "_fired"})


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

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the object that is driven."""
        # copy.copy() looks up names before __init__() has run; special names are this class's.
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

        Raises EventTableFull if an event holds too many messages and is not satisfied; the error
        has the message that found no room.
        """
        events = self.proxy.events(timeout_s)
        self._fired += self._table.evaluate()  # peers may have gone since the last launch()
        while True:
            while self._fired:
                fired = self._fired.popleft()
                if fired.key is _stop:
                    return
                fired.key(self.local_instance, self.proxy, fired.messages)
            event = next(events, None)
            if event is None:
                return
            if isinstance(event, Message):
                self._fired += self._table.push(event)
            else:  # what is held may be enough when a peer has gone
                self._fired += self._table.evaluate()

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
    Raises ValueError at the first object for an expression that is none.
    """

    def distribute(cls: Callable[..., T]) -> Callable[..., Distributed[T]]:
        def make(*args: Any, **kwargs: Any) -> Distributed[T]:
            return Distributed(cls(*args, **kwargs), proxy, handlers, stop_event, max_held)

        return update_wrapper(make, cls, updated=())

    return distribute


def _stop(local: object, proxy: Proxy, messages: list[Message]) -> None:
    """Stands for the stop event in the table."""
