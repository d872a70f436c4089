"""Requests of users to the members of a group, and the handlers that answer them.

A request is a number, its head, and a text, its body; the answer is a text: the requests of
ps-lite's SimpleApp. Other than there, a request that comes twice is done once, an error of a
handler is told to the sender, and all that waits has a bound.
"""

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from typing import Final, NamedTuple, TypeAlias

from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog
from xain_foundation.names import shortened
from xain_parameters.errors import Invalid
from xain_parameters.messages import MAX_TEXT_BYTES

# Words for groups of members, in the place of a name.
SERVERS: Final = "servers"
WORKERS: Final = "workers"
SCHEDULER: Final = "scheduler"
ALL: Final = "all"
GROUPS: Final = (SERVERS, WORKERS, SCHEDULER, ALL)

MAX_WAITING: Final = 64  # requests that wait for the handler of one member
MAX_KEPT: Final = 64  # replies that are kept for requests that come again
MAX_ERROR_CHARACTERS: Final = 1000

log = get_logger(__name__)


class Request(NamedTuple):
    """A request as a handler gets it: plain values.

    head, body: a number and a text; the user says what they mean. sender: the worker's name.
    """

    head: int
    body: str
    sender: str


class Reply(NamedTuple):
    """The answer to a request, or the error in its place; "": there is none."""

    body: str = ""
    error: str = ""


# A function that answers requests; None answers with an empty text. Called in a thread, one call at
# a time.
Handler: TypeAlias = Callable[[Request], str | None]
# The sender of a request, the incarnation of its process, and the number of the request there.
Key: TypeAlias = tuple[str, int, int]


def answer_nothing(request: Request) -> str:
    """Answer a request with an empty text, as a member without a handler does."""
    return ""


def check_request(head: int, body: str) -> None:
    """Raises Invalid for a head or a body that cannot be sent."""
    if not -(1 << 63) <= head < 1 << 63:
        raise Invalid(f"the head of a request is a number of 64 bits, not {head}")
    try:
        num_bytes = len(body.encode())
    except UnicodeEncodeError as error:
        raise Invalid(f"the body of a request is no text: {error}") from None
    if num_bytes > MAX_TEXT_BYTES:
        raise Invalid(f"a request has a body of {num_bytes} bytes; at most {MAX_TEXT_BYTES} go")


def check_member_name(name: str) -> None:
    """Raises Invalid for a name that stands for several members."""
    if name in GROUPS:
        raise Invalid(f"{name!r} names a group of members, and no member can have it")


def load_handler(path: str) -> Handler:
    """The function at an import path, "package.module:function". Raises ValueError, in one line."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"{path!r} is no function; write package.module:function")
    try:
        found = import_module(module_name)
    except (Exception, SystemExit) as error:  # a module may raise anything
        text = " ".join(_text_of(error).split())
        raise ValueError(f"module {module_name!r} cannot be imported: {text}") from None
    handler = getattr(found, name, None)
    if handler is None:
        raise ValueError(f"module {module_name!r} has no function {name!r}")
    if not callable(handler) or inspect.iscoroutinefunction(handler):
        kind = "a coroutine function" if callable(handler) else type(handler).__name__
        raise ValueError(f"{path!r} is {kind}; a handler is a plain function")
    return handler  # type: ignore[no-any-return]  # what it takes shows when it is called


class HandlerThread:
    """Calls a handler, in a thread of its own, for one request after the other as they come.

    member: whose handler it is. The thread begins with the first request.
    """

    def __init__(self, member: str, handler: Handler) -> None:
        self._member = member
        self._handler = handler
        self._changed = threading.Condition()
        # The first of these is the one that the handler is at.
        self._waiting: OrderedDict[Key, tuple[Request, Callable[[Reply], None]]] = OrderedDict()
        self._kept: OrderedDict[Key, Reply] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._failed = RateLimitedLog(log.warning, "handler_failed")  # any worker can cause it

    def put(self, key: Key, request: Request, tell: Callable[[Reply], None]) -> None:
        """Queue a request for the handler; never waits. The same request again is done once, and
        its reply is told to the last one that has put it.

        tell: called with the reply, in the handler's thread or in this one.
        """
        with self._changed:
            reply = self._kept.get(key)
            if reply is None and key not in self._waiting:
                if self._is_closed:
                    reply = Reply(error="it is being stopped")
                elif len(self._waiting) >= MAX_WAITING:
                    reply = Reply(error=f"{MAX_WAITING} requests wait for its handler already")
            if reply is None:
                self._waiting[key] = request, tell
                if self._thread is None:
                    name = f"handler {self._member}"
                    self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                    self._thread.start()
                self._changed.notify()
        if reply is not None:
            tell(reply)

    def close(self) -> None:
        """Begin no request any more. Does not wait for the one that the handler is at."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._is_closed)
                if self._is_closed:
                    return
                key, (request, _) = next(iter(self._waiting.items()))
            reply = self._reply(request)
            with self._changed:
                _, tell = self._waiting.pop(key)
                self._kept[key] = reply
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            tell(reply)

    def _reply(self, request: Request) -> Reply:
        """Call the handler; its error is logged and becomes the reply."""
        try:
            body = self._handler(request)
            if body is None:
                return Reply()
            if not isinstance(body, str):
                raise TypeError(f"the handler returned {type(body).__name__}, and no text")
            num_bytes = len(body.encode())
            if num_bytes > MAX_TEXT_BYTES:
                raise ValueError(f"an answer of {num_bytes} bytes; at most {MAX_TEXT_BYTES} go")
        except BaseException as error:  # the member goes on, whatever its handler raises
            text = _text_of(error)
            fields = {"member": self._member, "sender": request.sender, "head": request.head}
            self._failed(**fields, error=text, exc_info=error)
            return Reply(error=text)
        return Reply(body)


def _text_of(error: BaseException) -> str:
    """The kind and text of an error, as UTF-8 can have it."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # of an error's own __str__
        text = type(error).__name__
    return text[:MAX_ERROR_CHARACTERS].encode(errors="replace").decode()


def shown_names(names: list[str], most: int = 10) -> str:
    """Names in the text of an error."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shortened(name) for name in names[:most]) + more
