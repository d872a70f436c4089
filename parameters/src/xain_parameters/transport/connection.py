"""The client's side: numbered requests to one server, pipelined."""

import itertools
import selectors
import threading
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from xain_foundation.security.tls import Certificates
from xain_parameters.errors import Unavailable
from xain_parameters.keys import Keys
from xain_parameters.messages import (
    AnyHead,
    Body,
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
    Several,
    Values,
)
from xain_parameters.transport.channel import HELLO_TIMEOUT_S, SMALL_BYTES, say_hello, shut
from xain_parameters.transport.frames import Malformed, Unsent, bytes_of, pieces_of
from xain_parameters.transport.poller import Answer, Poller

Request: TypeAlias = Pull | Push | Mark | Several | Command
_ANSWERS: Final = (Rows, Done, Said, Refused)


class Connection:
    """A connection to one server, for any number of threads.

    poller: the poller of all connections of a client; None: the connection makes its own. tls,
        server: see channel.say_hello.
    Raises Invalid and Unavailable, see channel.say_hello; Unavailable also if the poller is closed.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        timeout_s: float = HELLO_TIMEOUT_S,
        poller: Poller | None = None,
        tls: Certificates | None = None,
        server: str = "",
    ) -> None:
        self.address = address
        self._socket, self._receiver = say_hello(address, hello, timeout_s, tls, server)
        self._socket.settimeout(0.0)
        self._receiver.destination = self._destination
        self._lock = threading.Lock()  # guards requests and their sending; one thread receives
        self._numbers = itertools.count(1)
        self._asked: dict[int, Answer] = {}
        self._unsent = Unsent()
        self._is_full = False  # the socket takes no more; the poller waits for it
        self._why: ConnectionError | None = None
        self._has_own_poller = poller is None
        self._poller = Poller() if poller is None else poller
        try:
            self._poller.add(self)
        except Unavailable:
            self._socket.close()
            raise

    @property
    def is_broken(self) -> bool:
        return self._why is not None

    def fileno(self) -> int:
        return self._socket.fileno()

    def ask(
        self,
        head: Request,
        keys: Keys | None = None,
        values: Values | None = None,
        *,
        bodies: Sequence[Body] = (),
        num_bytes: int = 0,
        out: Sequence[NDArray[np.generic]] = (),
    ) -> Answer:
        """Make a request; never waits. `head.request` is set here.

        It is sent and answered while a thread waits for an answer, this one or another.
        bodies: keys and values of each section of a Several.
        num_bytes: the size of the rows in the answer; any other size breaks the connection.
        out: C-contiguous arrays of as many bytes together that the rows are received into; by
            default they come with the message. They may be written to until the answer has come.
        """
        memories = [bytes_of(each) for each in out]
        answer = Answer(self._poller, num_bytes, memories or None)
        with self._lock:
            if self._why is not None:
                answer.error, answer.is_done = self._why, True
                return answer
            number = next(self._numbers)
            self._asked[number] = answer
            head = msgspec.structs.replace(head, request=number)
            self._unsent.add(pieces_of(Message(head, keys, values, bodies)))
            if not self._is_full:
                # Small requests go together. But a server that has nothing to do begins with a
                # large answer while the next requests are made.
                is_first = num_bytes > SMALL_BYTES and len(self._asked) == 1
                if is_first or self._unsent.num_bytes > SMALL_BYTES:
                    self._send()
                else:
                    self._poller.unsent.add(self)
        return answer

    def abandon(self, answer: Answer) -> None:
        """Give up waiting for an answer. Its `out` is not written to any more, except by an answer
        that is being received at this moment."""
        answer.out = None
        with self._lock:
            # Arrays of the request may change from now on.
            if not answer.is_done and self._unsent:
                self._give_up()

    def close(self) -> None:
        with self._lock:
            if self._why is None:
                shut(self._socket)
        self._poller.end(self)
        if self._has_own_poller:
            self._poller.close()

    def flush(self) -> None:
        """Send the requests that were kept to go together."""
        with self._lock:
            if self._why is None and not self._is_full:
                self._send()

    def _send(self) -> None:
        """Send as much as the socket takes. Called under the lock."""
        was_full = self._is_full
        try:
            self._unsent.send(self._socket)
            self._is_full = False
        except BlockingIOError:
            self._is_full = True
        except OSError:
            self._give_up()
            return
        except BaseException:  # an interrupt, say: the number of bytes sent is not known
            self._give_up()
            raise
        if self._is_full != was_full:
            self._poller.await_writable(self, self._is_full)

    def _give_up(self) -> None:
        """End the connection; the poller will notice. Called under the lock."""
        self._unsent.clear()
        shut(self._socket)

    # --- in the thread that polls ---

    def on_ready(self, events: int) -> None:
        """Send and receive what the socket takes and has; an error ends the connection."""
        if self._why is not None:
            return
        try:
            if events & selectors.EVENT_WRITE:
                with self._lock:
                    self._send()
            if events & selectors.EVENT_READ:
                while True:
                    message = self._receiver.receive()
                    head = message.head
                    assert isinstance(head, _ANSWERS)
                    with self._lock:
                        answer = self._asked.pop(head.request)
                    self._poller.finish(answer, message)
                    if not self._asked:  # it would ask the socket in vain
                        return
        except BlockingIOError:
            pass
        except (EOFError, Malformed, OSError) as error:
            self.end(None if isinstance(error, EOFError) else error)
        except BaseException:  # an interrupt, say: a part of a message may be lost
            self.end(None)
            raise

    def end(self, why: Exception | None) -> None:
        """End the connection, once: close its socket. Open requests fail with ConnectionError."""
        with self._lock:
            if self._why is not None:
                return
            reason = f": {why}" if why is not None else ""
            self._why = ConnectionError(f"the connection to {self.address} has ended{reason}")
            asked, self._asked = self._asked, {}
            self._unsent.clear()
            self._poller.remove(self)
            self._socket.close()
        for each in asked.values():
            self._poller.finish(each, None, self._why)

    def _destination(
        self, head: AnyHead, num_keys: int, num_bytes: int
    ) -> Sequence[memoryview] | None:
        """Return the memory for an answer's rows; None: a buffer. Raises Malformed."""
        if not isinstance(head, _ANSWERS):
            raise Malformed(f"{type(head).__name__} is no answer")
        asked = self._asked.get(head.request)
        if asked is None:
            raise Malformed(f"an answer to request {head.request}, which is not open")
        if isinstance(head, Rows):
            if num_keys or num_bytes != asked.num_bytes:
                raise Malformed(f"{num_bytes} bytes of rows, asked for {asked.num_bytes}")
            if num_bytes:
                return asked.out
        return None
