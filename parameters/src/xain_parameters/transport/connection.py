"""The client's side: numbered requests to one server, each answered by a future, pipelined."""

import itertools
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from xain_parameters.keys import Keys
from xain_parameters.messages import (
    AnyHead,
    Command,
    Done,
    Hello,
    Mark,
    Message,
    Pull,
    Push,
    Refused,
    Rows,
    Said,
    Values,
)
from xain_parameters.transport.channel import HELLO_TIMEOUT_S, Channel, connect
from xain_parameters.transport.frames import Malformed

Request: TypeAlias = Pull | Push | Mark | Command
Answer: TypeAlias = Rows | Done | Said | Refused


class Broken(Exception):
    """The connection ended before the answer came. The server may have done what was asked."""


@dataclass(slots=True, eq=False)
class _Asked:
    future: "Future[Message]"
    num_bytes: int  # of the values of the answer
    out: memoryview | None


class Connection:
    """A connection to one server, for any number of threads.

    Raises Unavailable or Evicted, see channel.connect.
    """

    def __init__(self, address: str, hello: Hello, *, timeout_s: float = HELLO_TIMEOUT_S) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._why: Exception | None = None
        self._channel = connect(
            address,
            hello,
            self._hear,
            self._end,
            timeout_s=timeout_s,
            place=self._place,
        )
        self.address = address
        self._channel.start()

    @property
    def is_broken(self) -> bool:
        return self._channel.is_closed

    def ask(
        self,
        head: Request,
        keys: Keys | None = None,
        values: Values | None = None,
        *,
        num_bytes: int = 0,
        out: NDArray[np.generic] | None = None,
    ) -> "Future[Message]":
        """Send a request; never waits. `head.request` is set here.

        num_bytes: of the rows in the answer; any other size breaks the connection.
        out: C-contiguous array of as many bytes that the rows are received into; by default they
            come with the message. It may be written to until the future is done.
        The future's result is the answer, which may be Refused; it raises Broken if the connection
        ends before.
        """
        number = next(self._numbers)
        future: Future[Message] = Future()
        place = None if out is None else out.reshape(-1).view(np.uint8).data
        asked = _Asked(future, num_bytes, place)
        with self._lock:
            if self._why is not None:
                future.set_exception(self._why)
                return future
            self._asked[number] = asked
        message = Message(msgspec.structs.replace(head, request=number), keys, values)
        self._channel.send(message)  # if it cannot, _end tells the future
        return future

    def abandon(self, future: "Future[Message]") -> None:
        """Nobody waits for it any more: its `out` is written to no longer, but by an answer that is
        being received at this moment."""
        with self._lock:
            for asked in self._asked.values():
                if asked.future is future:
                    asked.out = None

    def close(self) -> None:
        self._channel.close()
        self._channel.join()

    # --- in the thread of the channel ---

    def _place(self, head: AnyHead, num_keys: int, num_bytes: int) -> memoryview | None:
        if not isinstance(head, Answer):
            raise Malformed(f"{type(head).__name__} is no answer")
        with self._lock:
            asked = self._asked.get(head.request)
            if asked is None:
                raise Malformed(f"an answer to request {head.request}, which is not open")
            if isinstance(head, Rows):
                if num_keys or num_bytes != asked.num_bytes:
                    raise Malformed(f"{num_bytes} bytes of rows, asked for {asked.num_bytes}")
                if num_bytes:
                    return asked.out
        return None

    def _hear(self, channel: Channel, message: Message) -> None:
        head = message.head
        assert isinstance(head, Answer)
        with self._lock:
            asked = self._asked.pop(head.request)
        asked.future.set_result(message)

    def _end(self, channel: Channel, why: Exception | None) -> None:
        with self._lock:
            reason = f": {why}" if why is not None else ""
            self._why = Broken(f"the connection to {self.address} has ended{reason}")
            asked, self._asked = self._asked, {}
        for each in asked.values():
            each.future.set_exception(self._why)
