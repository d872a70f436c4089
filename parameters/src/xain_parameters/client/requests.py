"""Requests to the servers of all ranges at once, sent again wherever a server fails or a range
moves."""

import functools
import math
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from xain_foundation.backoff import Backoff
from xain_foundation.logger import get_logger
from xain_parameters.client.cuts import cut_keys, cut_rows
from xain_parameters.errors import Closed, Evicted, Invalid, RolledBack, Unavailable
from xain_parameters.keys import Keys, Range
from xain_parameters.messages import (
    MAX_TEXT_BYTES,
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
from xain_parameters.transport.channel import hello
from xain_parameters.transport.connection import Broken, Connection, Request
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

Array: TypeAlias = NDArray[Any]

log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class Piece:
    """A request, or what is left of it, before it is cut by range.

    part: number of the push. start, stop: rows of a dense array; otherwise keys, ascending.
    values: of a push, a row for each. out: of a pull, rows for each, C-contiguous; where `target`
    is given instead, the rows go to target[index] when they have come.
    """

    part: int = 0
    start: int = 0
    stop: int = 0
    keys: Keys | None = None
    values: Array | None = None
    out: Array | None = None
    target: Array | None = None
    index: NDArray[np.intp] | None = None

    def rows(self, start: int, stop: int) -> "Piece":
        """Some rows of a piece of a dense array."""
        part = slice(start - self.start, stop - self.start)
        values, out = self.values, self.out
        return Piece(
            self.part,
            start,
            stop,
            values=None if values is None else values[part],
            out=None if out is None else out[part],
        )

    def cut(self, table: TableSpec, ranges: Sequence[Range]) -> "Iterator[tuple[int, Piece]]":
        """(index of a range, the keys of the piece that lie in it)."""
        assert self.keys is not None
        values, out = self.values, self.out
        for number, chosen in cut_keys(self.keys, ranges, table.bound):
            piece = Piece(
                self.part,
                keys=self.keys[chosen],
                values=None if values is None else values[chosen],
                target=self.target,
            )
            if isinstance(chosen, slice):
                piece.out = None if out is None else out[chosen]
                piece.index = None if self.index is None else self.index[chosen]
            elif out is not None:
                piece.target, piece.index = out, chosen
            else:
                piece.index = chosen if self.index is None else self.index[chosen]
            yield number, piece

    @property
    def num_rows(self) -> int:
        return self.stop - self.start if self.keys is None else len(self.keys)


# The head of a request for a piece of a range, under a view.
MakeHead: TypeAlias = Callable[[Piece, RangeView, View], Request]
# Rows [start, stop) of a dense array, or a piece.
_Part = TypeVar("_Part", tuple[int, int], Piece)
# The server of a message and its parts, each with its range.
_Message: TypeAlias = tuple[str, list[tuple[RangeView, _Part]]]
# The connection to a server, or None.
_Reach: TypeAlias = Callable[[View, str], Connection | None]
# The pieces of one message to one server, each with its range.
_Together: TypeAlias = list[tuple[RangeView, Piece]]


class _Messages:
    """The cuts of pieces into messages, under one view.

    A worker asks for the same rows of a dense array in each clock: their cuts are kept.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self._ranges = [each.range for each in view.ranges]
        self._dense: dict[tuple[int, int, int], list[_Message[tuple[int, int]]]] = {}

    def of(self, table: TableSpec, piece: Piece) -> Iterator[_Message[Piece]]:
        """(server, the parts of the piece that go to it with one message). Server "": none has
        these ranges."""
        row_bytes = table.dim * np.dtype(table.dtype).itemsize
        if piece.keys is not None:
            parts = (
                (number, each, row_bytes * each.num_rows)
                for number, each in piece.cut(table, self._ranges)
            )
            yield from self._together(parts)
            return
        rows = (table.number, piece.start, piece.stop)
        messages = self._dense.get(rows)
        if messages is None:
            assert table.bound is not None
            cuts = cut_rows(piece.start, piece.stop, self._ranges, table.bound)
            sized = ((number, (low, high), row_bytes * (high - low)) for number, low, high in cuts)
            messages = self._dense[rows] = list(self._together(sized))
        for server, together in messages:
            yield server, [(range_, piece.rows(low, high)) for range_, (low, high) in together]

    def _together(self, parts: Iterable[tuple[int, _Part, int]]) -> Iterator[_Message[_Part]]:
        """parts: (index of a range, part, bytes of its rows)."""
        messages: dict[str, list[tuple[RangeView, _Part]]] = {}
        sizes: dict[str, int] = {}
        for number, part, num_bytes in parts:
            range_ = self.view.ranges[number]
            server = range_.servers[0] if range_.servers else ""
            message = messages.setdefault(server, [])
            message.append((range_, part))
            sizes[server] = sizes.get(server, 0) + num_bytes
            if sizes[server] >= MESSAGE_BYTES or len(message) == MAX_SECTIONS:
                del sizes[server]
                yield server, messages.pop(server)
        yield from messages.items()


@dataclass(slots=True, eq=False)
class _Asked:
    parts: _Together
    server: str
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
        self, scheduler: WorkerScheduler, timeout_s: float, tls: ssl.SSLContext | None = None
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
        """Ask for all pieces, and return when all are answered.

        generation: the request has a meaning in this one only; None: in any.
        """
        row_bytes = table.dim * np.dtype(table.dtype).itemsize

        def ask(view: View, piece: Piece, reach: _Reach) -> Iterator[_Asked | Piece]:
            if not view.ranges:
                yield piece
                return
            messages = self._messages
            if messages.view is not view:
                messages = self._messages = _Messages(view)
            for server, parts in messages.of(table, piece):
                yield from self._ask(view, server, parts, head, row_bytes, reach)

        self._until_done(f"table {table.name!r}", list(pieces), ask, generation)

    def run_ranges(
        self, head: MakeHead, *, generation: int | None = None, timeout_s: float | None = None
    ) -> None:
        """Send the same request to every range; if one has moved, all ranges are asked again."""

        def ask(view: View, piece: Piece, reach: _Reach) -> Iterator[_Asked | Piece]:
            for each in view.ranges:
                server = each.servers[0] if each.servers else ""
                yield from self._ask(view, server, [(each, piece)], head, 0, reach)

        self._until_done("all tables", [Piece()], ask, generation, timeout_s)

    def command(self, server: str, number: int, text: str) -> str:
        """Send a user's own request to one server; returns its answer. The request is sent again
        after a broken connection, so the server may do it twice. Raises Invalid for a text of more
        than MAX_TEXT_BYTES, and if the server refuses."""
        num_bytes = len(text.encode())
        if num_bytes > MAX_TEXT_BYTES:
            raise Invalid(f"a command has {num_bytes} bytes; at most {MAX_TEXT_BYTES} go at once")
        deadline = time.monotonic() + self.timeout_s
        while True:
            view = self.scheduler.view
            if server not in view.addresses:
                raise Unavailable(f"there is no server {server!r}")
            connection = self.connection(view, server, time.monotonic(), deadline)
            left = deadline - time.monotonic()
            if connection is not None:
                try:
                    head = connection.ask(Command(0, number, text)).result(max(0.0, left)).head
                    break
                except (Broken, TimeoutError):
                    pass
            if left <= 0:
                _, why = self._failed.get(server, (0.0, "it did not answer"))
                raise Unavailable(f"server {server!r}: {why}; given up after {self.timeout_s:g} s")
            self.scheduler.newer_view(view.version, min(LONGEST_PAUSE_S, left))
        if isinstance(head, Refused):
            raise Invalid(f"server {server!r}: {head.text}")
        assert isinstance(head, Said)
        return head.text

    def _ask(
        self,
        view: View,
        server: str,
        parts: _Together,
        head: MakeHead,
        row_bytes: int,
        reach: "_Reach",
    ) -> "Iterator[_Asked | Piece]":
        """server: the primary of all parts, or "". row_bytes: 0 where no rows are asked for."""
        connection = reach(view, server) if server else None
        if connection is None:
            for _, piece in parts:
                yield piece
            return
        range_, piece = parts[0]
        request = head(piece, range_, view)
        bodies = [(each.keys, _contiguous(each.values)) for _, each in parts]
        if len(parts) > 1:
            assert isinstance(request, Pull | Push)
            request = Several(0, request, _sections(parts, bodies))
        num_bytes = 0
        out = []
        if piece.values is None:
            num_bytes = row_bytes * sum(each.num_rows for _, each in parts)
            out = [each.out for _, each in parts if each.out is not None]
        answer = connection.ask(request, bodies=bodies, num_bytes=num_bytes, out=out)
        yield _Asked(parts, server, connection, answer)

    def _until_done(
        self,
        what: str,
        todo: list[Piece],
        ask: "Callable[[View, Piece, _Reach], Iterator[_Asked | Piece]]",
        generation: int | None,
        timeout_s: float | None = None,
    ) -> None:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        why, where = "no server has it", ""
        while todo:
            if self._is_closed:
                raise Closed("the client was closed")
            view = self.scheduler.view
            if generation is not None and view.generation != generation:
                raise RolledBack("the group was rolled back")
            again: dict[
                int, Piece
            ] = {}  # by identity: a piece that several ranges need is asked once
            asked: list[_Asked] = []
            reach = functools.partial(self.connection, since=time.monotonic(), deadline=deadline)
            try:
                for piece in todo:
                    for each in ask(view, piece, reach):
                        if isinstance(each, _Asked):
                            asked.append(each)
                        else:
                            again[id(each)] = each
                # The last answer first: most others are there by then. But rows that are still to
                # be copied are copied while the next ones come.
                if not any(piece.target is not None for each in asked for _, piece in each.parts):
                    asked.reverse()
                for each in asked:
                    refused = self._answer(each, view, deadline)
                    if refused is not None:
                        again |= {id(piece): piece for _, piece in each.parts}
                        if refused != NO_ANSWER or not where:
                            why = refused
                        where = f", {_names(each.parts)} at {each.server!r}"
            except BaseException:  # nobody takes the other answers
                for each in asked:
                    each.connection.abandon(each.answer)
                raise
            todo = list(again.values())
            if todo:
                left = deadline - time.monotonic()
                if left <= 0:
                    unreached = self._unreached(view, deadline - timeout_s)
                    if unreached:
                        why = f"{why}; {unreached}" if where else unreached
                    raise Unavailable(f"{what}{where}: {why}; given up after {timeout_s:g} s")
                self.scheduler.newer_view(view.version, min(backoff.next_s(), left))

    def _answer(self, asked: _Asked, view: View, deadline: float) -> str | None:
        """Take the answer; returns why the piece has to be asked for again, or None."""
        while True:
            left = deadline - time.monotonic()
            try:
                message = asked.answer.result(max(0.0, min(left, LOOK_S)))
                break
            except Broken as error:
                return str(error)
            except TimeoutError:
                # A server that is cut off does not answer; its ranges get other servers.
                if left <= 0 or self._is_closed or not _has(self.scheduler.view, asked, view):
                    asked.connection.abandon(asked.answer)
                    return NO_ANSWER
        head = message.head
        if not isinstance(head, Refused):
            at = 0
            for _, piece in asked.parts:
                if piece.target is not None and message.values is not None:
                    size = piece.num_rows * piece.target.shape[1] * piece.target.itemsize
                    rows = message.values[at : at + size].view(piece.target.dtype)
                    piece.target[piece.index] = rows.reshape(-1, piece.target.shape[1])
                    at += size
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
                    address, greeting, timeout_s=timeout_s, poller=self._poller, tls=self._tls
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
    has = {each.number for each in view.ranges if each.servers[:1] == (asked.server,)}
    address = view.addresses.get(asked.server)
    return address == asked.connection.address and has >= {each.number for each, _ in asked.parts}


def _names(parts: _Together) -> str:
    numbers = ", ".join(str(range_.number) for range_, _ in parts)
    return f"range{'s' * (len(parts) > 1)} {numbers}"


def _contiguous(values: Array | None) -> Array | None:
    return None if values is None else np.ascontiguousarray(values)


def _sections(parts: _Together, bodies: Sequence[Body]) -> tuple[Section, ...]:
    return tuple(
        Section(
            range_.number,
            piece.start,
            piece.stop,
            0 if keys is None else len(keys),
            0 if values is None else values.nbytes,
        )
        for (range_, piece), (keys, values) in zip(parts, bodies, strict=True)
    )
