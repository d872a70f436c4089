"""Requests to the servers of all ranges at once, sent again wherever a server fails or a range
moves."""

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xain_foundation.logs.logger import get_logger
from xain_foundation.net.backoff import Backoff
from xain_foundation.security.tls import Certificates
from xain_parameters.client.cuts import cut_keys, cut_rows
from xain_parameters.errors import Closed, Evicted, Invalid, RolledBack, Unavailable
from xain_parameters.handlers import Reply
from xain_parameters.keys import Keys
from xain_parameters.messages import (
    Body,
    Command,
    Pull,
    Push,
    Refused,
    Said,
    Section,
    Several,
)
from xain_parameters.scheduler.worker_client import WorkerScheduler
from xain_parameters.specs import RangeView, TableSpec, View
from xain_parameters.tables.part import put
from xain_parameters.transport.channel import hello
from xain_parameters.transport.connection import Connection, Request
from xain_parameters.transport.poller import Answer, Poller

LOOK_S: Final = (
    0.25  # between two looks at the view while an answer is awaited: a range may have moved
)
FIRST_PAUSE_S: Final = 0.01
LONGEST_PAUSE_S: Final = 0.5
NO_ANSWER: Final = "no answer"
_NEVER: Final = (-math.inf, "")
# The parts of a piece for several ranges of one server go with one message, up to these limits. The
# second one keeps its head far below MAX_HEAD_BYTES.
MESSAGE_BYTES: Final = 2 << 20
MAX_SECTIONS: Final = 1024
# Key lists whose cuts are kept, and the size of the largest one.
NUM_KEPT_KEYS: Final = 32
KEPT_KEYS_BYTES: Final = 32 << 10
_MAY_BE_TOGETHER: Final = (Pull, Push)

Array: TypeAlias = NDArray[Any]

log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class Piece:
    """A request, or what is left of it, before it is cut by range.

    part: number of the push. start, stop: rows of a dense array; otherwise keys, ascending.
    values: of a push, a row for each. out: of a pull, rows for each, C-contiguous; where `index` is
    given, the rows go to out[index] when they have come. known: the messages that
    the keys have gone by lately, if any.
    """

    part: int = 0
    start: int = 0
    stop: int = 0
    keys: Keys | None = None
    values: Array | None = None
    out: Array | None = None
    index: NDArray[np.intp] | None = None
    known: "KnownMessages | None" = None

    def chosen(self, rows: slice | NDArray[np.intp]) -> "Piece":
        """Return a piece with these rows of this one; a slice has a start and a stop."""
        if self.keys is None:
            assert isinstance(rows, slice)
            start, stop, keys = self.start + rows.start, self.start + rows.stop, None
        else:
            start, stop, keys = 0, 0, self.keys[rows]
        values = None if self.values is None else self.values[rows]
        out, index = self.out, self.index
        if index is not None:
            index = index[rows]
        elif out is not None and isinstance(rows, slice):
            out = out[rows]
        elif out is not None:
            index = rows  # type: ignore[assignment]  # a slice has gone the other way
        return Piece(self.part, start, stop, keys, values, out, index)


class Span(NamedTuple):
    """A range, and its rows [start, stop) of a message or piece."""

    range: RangeView
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class _Message:
    """The rows of a piece that go to one server together.

    server: its name; "": no server has these ranges.
    first: the number of the piece's first row in a dense array.
    order: the rows of the piece that `spans` count in; None: the piece's own. keys: of these rows.
    blocks: the rows of all spans.
    """

    server: str
    spans: list[Span]
    first: int = 0
    order: NDArray[np.intp] | None = None
    keys: Keys | None = None
    num_rows: int = field(init=False)
    blocks: list[slice] = field(init=False)
    _sections: dict[int, tuple[Section, ...]] = field(init=False, default_factory=dict)
    _inverse: NDArray[np.intp] | None = field(init=False, default=None)  # of order

    def __post_init__(self) -> None:
        spans = self.spans
        self.num_rows = sum(stop - start for _, start, stop in spans)
        self.blocks = [slice(spans[0].start, spans[-1].stop)]
        if self.num_rows < spans[-1].stop - spans[0].start:  # other servers have some between
            self.blocks = [slice(start, stop) for _, start, stop in spans]

    def rows(self, span: Span) -> tuple[int, int]:
        """Return the span's first and last row in a dense array; (0, 0) where keys name them."""
        if self.keys is not None:
            return 0, 0
        return self.first + span.start, self.first + span.stop

    def sections(self, row_bytes: int) -> tuple[Section, ...]:
        """Return the sections of the message. row_bytes: of its values; 0: none are sent."""
        sections = self._sections.get(row_bytes)
        if sections is None:
            has_keys = self.keys is not None
            sections = self._sections[row_bytes] = tuple(
                Section(
                    span.range.number,
                    *self.rows(span),
                    (span.stop - span.start) * has_keys,
                    (span.stop - span.start) * row_bytes,
                )
                for span in self.spans
            )
        return sections

    def rest(self, piece: Piece) -> Iterator[Piece]:
        """Yield the piece again for each range, or the piece itself if it has no rows."""
        if not self.num_rows:
            yield piece
            return
        for _, start, stop in self.spans:
            rows = slice(start, stop)
            yield piece.chosen(rows if self.order is None else self.order[rows])

    def put(self, piece: Piece, rows: Array) -> None:
        """Put the rows of the answer where they belong in piece.out."""
        out, index, order = piece.out, piece.index, self.order
        assert out is not None
        if order is None:
            assert index is not None, "the answer has gone to piece.out"
            index = np.concatenate([index[start:stop] for _, start, stop in self.spans])
        elif index is not None:
            index = index[order]
        elif len(order) == len(out):
            if self._inverse is None:
                self._inverse = np.empty_like(order)
                self._inverse[order] = np.arange(len(order))
            rows.take(self._inverse, axis=0, mode="clip", out=out)
            return
        else:
            index = order
        put(out, index, rows)


class KnownMessages(NamedTuple):
    """The messages that a list of keys, unique and ascending, has gone by under a view."""

    view: View
    messages: list[_Message]


class MakeHead(Protocol):
    """Makes the head of a request for rows [start, stop) of a range, or its keys, under a view."""

    def __call__(
        self, piece: Piece, view: View, range_: int, start: int, stop: int, /
    ) -> Request: ...


# The connection to a server, or None.
_Reach: TypeAlias = Callable[[View, str], Connection | None]


class _Messages:
    """The cuts of pieces into messages, under one view.

    A worker asks for the same rows of a dense array in each clock, and pushes to the keys that it
    has pulled: their cuts are kept.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self._ranges = [each.range for each in view.ranges]
        self._dense: dict[tuple[int, int, int], list[_Message]] = {}
        self._keyed: dict[tuple[int, bytes], KnownMessages] = {}

    def of(self, table: TableSpec, piece: Piece, row_bytes: int) -> Iterable[_Message]:
        """Return the messages of a piece; those of a list of keys are kept for the next time."""
        if piece.keys is None:
            rows = (table.number, piece.start, piece.stop)
            messages = self._dense.get(rows)
            if messages is None:
                messages = self._dense[rows] = list(self._of_rows(table, piece, row_bytes))
            return messages
        if piece.known is not None and piece.known.view is self.view:
            return piece.known.messages
        if piece.keys.nbytes > KEPT_KEYS_BYTES:
            return self._of_keys(table, piece.keys, row_bytes)
        if len(self._keyed) >= NUM_KEPT_KEYS:
            self._keyed.clear()  # nothing tells which of them come again
        # A copy: the caller may change its array before the list comes again.
        messages = list(self._of_keys(table, piece.keys.copy(), row_bytes))
        self._keyed[table.number, piece.keys.tobytes()] = KnownMessages(self.view, messages)
        return messages

    def known(self, table: TableSpec, keys: Keys) -> KnownMessages | None:
        if keys.nbytes > KEPT_KEYS_BYTES:
            return None
        return self._keyed.get((table.number, keys.tobytes()))

    def _of_rows(self, table: TableSpec, piece: Piece, row_bytes: int) -> Iterator[_Message]:
        """Yield the messages to servers for rows of a dense array."""
        assert table.bound is not None
        first = piece.start
        cuts = cut_rows(first, piece.stop, self._ranges, table.bound)
        spans = [(index, low - first, high - first) for index, low, high in cuts]
        for server, together in self._together(spans, row_bytes):
            yield _Message(server, together, first)

    def _of_keys(self, table: TableSpec, keys: Keys, row_bytes: int) -> Iterator[_Message]:
        """Yield the messages to servers for the rows of keys."""
        order, cuts = cut_keys(keys, self._ranges, table.bound)
        for server, spans in self._together(cuts, row_bytes):
            if order is None:
                yield _Message(server, spans, keys=keys)
                continue
            rows = order
            if sum(stop - start for _, start, stop in spans) < len(order):
                rows = np.concatenate([order[start:stop] for _, start, stop in spans])
            stops = itertools.accumulate(stop - start for _, start, stop in spans)
            moved = [
                Span(range_, end - (stop - start), end)
                for (range_, start, stop), end in zip(spans, stops, strict=True)
            ]
            yield _Message(server, moved, order=rows, keys=keys[rows])

    def _together(
        self, cuts: Iterable[tuple[int, int, int]], row_bytes: int
    ) -> Iterator[tuple[str, list[Span]]]:
        """The spans that go with one message to the server of their ranges. cuts: (index of a
        range, start, stop)."""
        messages: dict[str, list[Span]] = {}
        sizes: dict[str, int] = {}
        for index, start, stop in cuts:
            range_ = self.view.ranges[index]
            server = range_.servers[0] if range_.servers else ""
            message = messages.setdefault(server, [])
            message.append(Span(range_, start, stop))
            sizes[server] = sizes.get(server, 0) + row_bytes * (stop - start)
            if sizes[server] >= MESSAGE_BYTES or len(message) == MAX_SECTIONS:
                del sizes[server]
                yield server, messages.pop(server)
        yield from messages.items()


@dataclass(slots=True, eq=False)
class _Asked:
    piece: Piece
    message: _Message
    connection: Connection
    answer: Answer


class Requests:
    """Sends requests for one worker, from any thread.

    Raises of its methods: Unavailable, naming table and range, if a server did not answer within
    timeout_s; Invalid as the server says; RolledBack if the group was rolled back while
    `generation` was asked for; Evicted; Closed.
    """

    connect_timeout_s = 2.0

    def __init__(
        self, scheduler: WorkerScheduler, timeout_s: float, tls: Certificates | None = None
    ) -> None:
        self.scheduler = scheduler
        self.timeout_s = timeout_s
        self._tls = tls
        self._lock = threading.Lock()
        self._connecting: dict[str, threading.Lock] = {}
        self._connections: dict[str, Connection] = {}
        self._poller = Poller()
        self._messages = _Messages(scheduler.view)
        # Servers whose last connection failed: when, and why.
        self._failed: dict[str, tuple[float, str]] = {}
        self._is_closed = False

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()
        self._poller.close()

    def run(
        self,
        table: TableSpec,
        pieces: Iterable[Piece],
        head: MakeHead,
        *,
        generation: int | None = None,
    ) -> None:
        """Send the requests of all pieces, and return when all are answered.

        generation: the request has a meaning in this one only; None: in any.
        """
        row_bytes = table.row_bytes

        def ask(view: View, piece: Piece, reach: _Reach) -> Iterator[_Asked | Piece]:
            if not view.ranges:
                yield piece
                return
            for message in self._messages_under(view).of(table, piece, row_bytes):
                connection = reach(view, message.server)
                if connection is None:
                    yield from message.rest(piece)
                else:
                    yield self._ask(view, piece, message, head, row_bytes, connection)

        todo = list(pieces)
        now = time.monotonic()
        if len(todo) == 1 and self._ask_alone(table, todo[0], head, row_bytes, generation, now):
            return
        self._until_done(f"table {table.name!r}", todo, ask, generation, now, self.timeout_s)

    def known_messages(self, table: TableSpec, keys: Keys) -> KnownMessages | None:
        """Return the messages that a list of few keys has lately gone by, in which case the keys
        are unique and ascending; None: unknown."""
        return self._messages_under(self.scheduler.view).known(table, keys)

    def _messages_under(self, view: View) -> _Messages:
        messages = self._messages
        if messages.view is not view:
            messages = self._messages = _Messages(view)
        return messages

    def _ask_alone(
        self,
        table: TableSpec,
        piece: Piece,
        head: MakeHead,
        row_bytes: int,
        generation: int | None,
        now: float,
    ) -> bool:
        """Ask for a piece that goes with one message, which is most of the time of a small request;
        returns whether it is answered. If not, it is asked for like any other."""
        view = self.scheduler.view
        if not view.ranges or (generation is not None and view.generation != generation):
            return False
        messages = self._messages_under(view).of(table, piece, row_bytes)
        if not isinstance(messages, list) or len(messages) != 1:
            return False
        deadline = now + self.timeout_s
        connection = self.connection(view, messages[0].server, now, deadline)
        if connection is None:
            return False
        asked = self._ask(view, piece, messages[0], head, row_bytes, connection)
        try:
            return self._answer(asked, view, deadline) is None
        except BaseException:  # nobody takes the answer
            asked.connection.abandon(asked.answer)
            raise

    def run_ranges(
        self, head: MakeHead, *, generation: int | None = None, timeout_s: float | None = None
    ) -> None:
        """Send the same request to every range; if one has moved, all ranges are asked again."""

        def ask(view: View, piece: Piece, reach: _Reach) -> Iterator[_Asked | Piece]:
            for each in view.ranges:
                message = _Message(each.servers[0] if each.servers else "", [Span(each, 0, 0)])
                connection = reach(view, message.server)
                if connection is None:
                    yield piece
                else:
                    yield self._ask(view, piece, message, head, 0, connection)

        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self._until_done("all tables", [Piece()], ask, generation, time.monotonic(), timeout_s)

    def send(self, servers: Iterable[str], command: Command, timeout_s: float) -> dict[str, Reply]:
        """Send a user's own request to all of these servers at once; returns the reply of each. A
        server that has not answered within timeout_s, or has left, has an error in its place.

        The request is sent again after a broken connection; a server does it once, except one that
        was started again.
        """
        deadline = time.monotonic() + timeout_s
        unanswered = dict.fromkeys(servers, "")  # with why, so far
        replies: dict[str, Reply] = {}
        asked: dict[str, tuple[Connection, Answer]] = {}
        try:
            while unanswered:
                if self._is_closed:
                    raise Closed("the client was closed")
                view = self.scheduler.view
                since = time.monotonic()
                for server in unanswered.keys() - asked.keys():
                    if server not in view.addresses:
                        replies[server] = Reply(error="it has left the group, or was lost")
                        continue
                    connection = self.connection(view, server, since, deadline)
                    if connection is not None:
                        asked[server] = connection, connection.ask(command)
                    else:
                        _, unanswered[server] = self._failed.get(server, _NEVER)
                for server, (connection, answer) in list(asked.items()):
                    left = deadline - time.monotonic()
                    try:
                        head = answer.result(max(0.0, min(left, LOOK_S))).head
                    except ConnectionError as error:
                        unanswered[server] = str(error)
                        del asked[server]
                        continue
                    except TimeoutError:
                        # A server that is cut off does not answer; the view tells.
                        address = self.scheduler.view.addresses.get(server)
                        if address != connection.address:
                            connection.abandon(answer)
                            del asked[server]
                        continue
                    del asked[server]
                    assert isinstance(head, Said | Refused)
                    is_said = isinstance(head, Said)
                    replies[server] = Reply(head.text) if is_said else Reply(error=head.text)
                for server in replies.keys() & unanswered.keys():
                    del unanswered[server]
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                if unanswered.keys() - asked.keys():
                    self.scheduler.newer_view(view.version, min(LONGEST_PAUSE_S, left))
        finally:
            for connection, answer in asked.values():
                connection.abandon(answer)
        for server, why in unanswered.items():
            replies[server] = Reply(error=f"{why or 'no answer'}; given up after {timeout_s:g} s")
        return replies

    def _ask(
        self,
        view: View,
        piece: Piece,
        message: _Message,
        head: MakeHead,
        row_bytes: int,
        connection: Connection,
    ) -> _Asked:
        """Send a message of a piece. row_bytes: 0 where no rows are asked for."""
        order, keys, values = message.order, message.keys, piece.values
        span = message.spans[0]
        request = head(piece, view, span.range.number, *message.rows(span))
        if len(message.spans) > 1:
            assert isinstance(request, _MAY_BE_TOGETHER)
            sections = message.sections(0 if values is None else row_bytes)
            request = Several(0, request, sections)
        if values is not None and order is not None:
            values = values.take(order, axis=0)
        bodies: list[Body] = [
            (None if keys is None else keys[block], None if values is None else values[block])
            for block in message.blocks
        ]
        num_bytes = 0
        out: list[Array] = []
        if piece.out is not None:
            num_bytes = row_bytes * message.num_rows
            if order is None and piece.index is None:
                out = [piece.out[block] for block in message.blocks]
        answer = connection.ask(request, bodies=bodies, num_bytes=num_bytes, out=out)
        return _Asked(piece, message, connection, answer)

    def _until_done(
        self,
        what: str,
        todo: list[Piece],
        ask: "Callable[[View, Piece, _Reach], Iterator[_Asked | Piece]]",
        generation: int | None,
        now: float,
        timeout_s: float,
    ) -> None:
        """Ask for pieces until each was answered; refused ones are asked for again with a newer
        view. Raises Unavailable after timeout_s, RolledBack, and Closed."""
        deadline = now + timeout_s
        backoff = None
        why, where = "no server has it", ""
        while todo:
            if self._is_closed:
                raise Closed("the client was closed")
            view = self.scheduler.view
            if generation is not None and view.generation != generation:
                raise RolledBack("the group was rolled back")
            # Pieces by identity: one that several ranges need is asked once.
            again: dict[int, Piece] = {}
            asked: list[_Asked] = []
            reach = functools.partial(self.connection, since=now, deadline=deadline)
            try:
                for piece in todo:
                    for each in ask(view, piece, reach):
                        if isinstance(each, _Asked):
                            asked.append(each)
                        else:
                            again[id(each)] = each
                # The last answer first: most others are there by then. But rows that are still to
                # be copied are copied while the next ones come.
                if len(asked) > 1 and all(
                    each.answer.out or not each.answer.num_bytes for each in asked
                ):
                    asked.reverse()
                for each in asked:
                    refused = self._answer(each, view, deadline)
                    if refused is not None:
                        again |= {id(piece): piece for piece in each.message.rest(each.piece)}
                        if refused != NO_ANSWER or not where:
                            why = refused
                        where = f", {_names(each.message)} at {each.message.server!r}"
            except BaseException:  # nobody takes the other answers
                for each in asked:
                    each.connection.abandon(each.answer)
                raise
            todo = list(again.values())
            if todo:
                now = time.monotonic()
                left = deadline - now
                if left <= 0:
                    unreached = self._unreached(view, deadline - timeout_s)
                    if unreached:
                        why = f"{why}; {unreached}" if where else unreached
                    raise Unavailable(f"{what}{where}: {why}; given up after {timeout_s:g} s")
                backoff = backoff or Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
                self.scheduler.newer_view(view.version, min(backoff.next_s(), left))
                now = time.monotonic()

    def _answer(self, asked: _Asked, view: View, deadline: float) -> str | None:
        """Wait for an answer and take its rows. Returns why to ask again, or None."""
        while True:
            left = deadline - time.monotonic()
            try:
                message = asked.answer.result(max(0.0, min(left, LOOK_S)))
                break
            except ConnectionError as error:
                return str(error)
            except TimeoutError:
                # A server that is cut off does not answer; its ranges get other servers.
                if left <= 0 or self._is_closed or not _has(self.scheduler.view, asked, view):
                    asked.connection.abandon(asked.answer)
                    return NO_ANSWER
        head = message.head
        if not isinstance(head, Refused):
            out = asked.piece.out
            if out is not None and message.values is not None:
                rows = message.values.view(out.dtype).reshape(-1, out.shape[1])
                asked.message.put(asked.piece, rows)
            return None
        match head.why:
            case "invalid":
                raise Invalid(head.text)
            case "evicted":
                raise Evicted(head.text)
            case _:  # "moved", "busy", "rolled back": the next view tells
                return head.text or head.why

    def _unreached(self, view: View, since: float) -> str:
        """Why a connection to a server with ranges has failed since then; "" if none has."""
        failed = (self._failed.get(each.servers[0], _NEVER) for each in view.ranges if each.servers)
        return next((why for at, why in failed if at >= since), "")

    def connection(
        self, view: View, server: str, since: float, deadline: float
    ) -> Connection | None:
        """The connection to a server; None if it cannot be reached now.

        since, deadline: monotonic times. A server that another attempt after `since` has not
        reached is not tried again, so one that does not answer costs a round of requests its
        connect_timeout_s once, not once for each piece or thread.
        """
        address = view.addresses.get(server)
        if address is None:
            return None
        known = self._connections.get(server)
        if known is not None and not known.is_broken and known.address == address:
            return known
        with self._lock:
            if self._is_closed:
                raise Closed("the client was closed")
            connecting = self._connecting.setdefault(server, threading.Lock())
        with connecting:
            with self._lock:
                known = self._connections.get(server)
            if known is not None:
                if not known.is_broken and known.address == address:
                    return known
                known.close()
            if self._failed.get(server, _NEVER)[0] >= since:
                return None
            scheduler = self.scheduler
            timeout_s = max(0.01, min(self.connect_timeout_s, deadline - time.monotonic()))
            greeting = hello(scheduler.worker, "worker", scheduler.incarnation)
            try:
                made = Connection(
                    address,
                    greeting,
                    timeout_s=timeout_s,
                    poller=self._poller,
                    tls=self._tls,
                    server=server,
                )
            except Unavailable as error:
                why = str(error)
                if timeout_s < LONGEST_PAUSE_S and server in self._failed:
                    # The deadline cut it short: the reason of the attempt before tells more.
                    _, why = self._failed[server]
                self._failed[server] = (time.monotonic(), why)
                log.debug("server_unreachable", server=server, error=str(error))
                return None
            self._failed.pop(server, None)
            with self._lock:
                if not self._is_closed:
                    self._connections[server] = made
                    return made
            made.close()
            raise Closed("the client was closed")


def _has(view: View, asked: _Asked, before: View) -> bool:
    """Tell whether the server that was asked still has these ranges."""
    if view.generation != before.generation:
        return False
    server = asked.message.server
    has = {each.number for each in view.ranges if each.servers[:1] == (server,)}
    address = view.addresses.get(server)
    asked_for = {each.range.number for each in asked.message.spans}
    return address == asked.connection.address and has >= asked_for


def _names(message: _Message) -> str:
    numbers = ", ".join(str(range_.number) for range_, _, _ in message.spans)
    return f"range{'s' * (len(message.spans) > 1)} {numbers}"
