"""A connection between two nodes: messages out without waiting, messages in by a thread of its own.

A thread that sends never waits for the other side: what the kernel does not take at once goes to a
queue, that a second thread empties. So two servers that send much to each other cannot block each
other, and a slow worker cannot hold up a range. While more than QUEUE_BYTES wait in the queue,
nothing more is read from that connection; more than MAX_QUEUE_BYTES end it.
"""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from xain_messaging.logger import get_logger
from xain_parameters.errors import Evicted, ParameterError, Unavailable
from xain_parameters.messages import VERSION, AnyHead, Done, Hello, Message, Refused
from xain_parameters.transport.frames import (
    HungUp,
    Malformed,
    Piece,
    Place,
    Receiver,
    after,
    pieces_of,
)

QUEUE_BYTES: Final = 64 << 20
MAX_QUEUE_BYTES: Final = 4 << 30
HELLO_TIMEOUT_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 5.0
MAX_PIECES: Final = 64  # in one system call

log = get_logger(__name__)


class Channel:
    """One connection, from either side, after its Hello.

    peer: the other side as it said Hello, or the Hello that was said to it.
    on_message: called in the channel's thread with each message, in their order. What it raises
        ends the connection.
    on_closed: called once, in the same thread, after the last message, with the reason.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: Hello,
        receiver: Receiver,
        on_message: "OnMessage",
        on_closed: "OnClosed",
    ) -> None:
        self.peer = peer
        self.address = _name_of(connection)
        self._socket = connection
        self._receiver = receiver
        self._on_message = on_message
        self._on_closed = on_closed
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[list[Piece]] = deque()
        self._queued_bytes = 0
        self._is_closed = False
        self._reader = threading.Thread(target=self._read, name=f"read {peer.name}", daemon=True)
        self._writer: threading.Thread | None = None

    def start(self) -> None:
        self._reader.start()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def queued_bytes(self) -> int:
        """What waits until the other side takes it."""
        return self._queued_bytes

    def send(self, message: Message) -> bool:
        """Send a message, or queue it; never waits. Its arrays must not change until it has gone:
        rows of a table, say, that are changed in place meanwhile may go in either state.

        Returns False if the connection has ended. A message that was accepted may be lost with the
        connection.
        """
        pieces = pieces_of(message)
        with self._changed:
            if self._is_closed:
                return False
            if not self._queue:
                try:
                    sent = self._socket.sendmsg(pieces, (), socket.MSG_DONTWAIT)
                except BlockingIOError:
                    sent = 0
                except OSError as error:
                    self._end(error)
                    return False
                pieces = after(pieces, sent)
                if not pieces:
                    return True
            self._queue.append(pieces)
            self._queued_bytes += sum(map(len, pieces))
            if self._queued_bytes > MAX_QUEUE_BYTES:
                self._end(OSError(f"{self._queued_bytes} bytes wait to be sent"))
                return False
            if self._writer is None:
                name = f"write {self.peer.name}"
                self._writer = threading.Thread(target=self._write, name=name, daemon=True)
                self._writer.start()
            self._changed.notify_all()
            return True

    def close(self) -> None:
        """End the connection. What is queued is dropped. Does not wait; see join."""
        with self._changed:
            self._end(None)

    def join(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until its threads have ended. Returns whether they have."""
        if self._reader is not threading.current_thread():
            self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def _end(self, error: OSError | None) -> None:
        """Under the lock."""
        if self._is_closed:
            return
        self._is_closed = True
        if error is not None:
            log.info("connection_broken", peer=self.peer.name, error=str(error))
        # Both threads wake up; the descriptor is closed when the reader has ended.
        shut(self._socket)
        self._changed.notify_all()

    # --- in threads ---

    def _read(self) -> None:
        why: Exception | None = None
        try:
            while True:
                message = self._receiver.receive()
                self._on_message(self, message)
                del message  # its buffer can take the next one
                if self._queued_bytes > QUEUE_BYTES:
                    with self._changed:
                        self._changed.wait_for(
                            lambda: self._queued_bytes <= QUEUE_BYTES or self._is_closed
                        )
        except HungUp:
            pass
        except Malformed as error:
            why = error
            if not self._is_closed:
                log.warning("malformed_message", peer=self.peer.name, error=str(error))
        except OSError as error:
            why = error
        except Exception as error:
            why = error
            log.exception("message_failed", peer=self.peer.name)
        with self._changed:
            self._end(None)
            writer = self._writer
        if writer is not None:
            writer.join()
        self._socket.close()
        self._on_closed(self, why)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if self._is_closed:
                    self._queue.clear()
                    self._queued_bytes = 0
                    return
                pieces = self._queue[0]
            size = sum(map(len, pieces))
            try:
                left = pieces
                while left:
                    left = after(left, self._socket.sendmsg(left[:MAX_PIECES]))
            except OSError as error:
                with self._changed:
                    self._end(error)
                continue
            del pieces, left  # the arrays of a message that has gone belong to their owners again
            with self._changed:
                self._queue.popleft()
                self._queued_bytes -= size
                self._changed.notify_all()


OnMessage: TypeAlias = Callable[[Channel, Message], None]
OnClosed: TypeAlias = Callable[[Channel, Exception | None], None]


def connect(
    address: str,
    hello: Hello,
    on_message: OnMessage,
    on_closed: OnClosed,
    *,
    timeout_s: float = HELLO_TIMEOUT_S,
    place: Place | None = None,
) -> Channel:
    """Connect to "HOST:PORT" and say Hello. The channel must be started.

    Raises Unavailable if nobody answers in time, Evicted if the other side refuses `hello`.
    """
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    except (OSError, ValueError) as error:
        raise Unavailable(f"{address} cannot be reached: {error}") from None
    try:
        connection.settimeout(timeout_s)
        tune(connection)
        for piece in pieces_of(Message(hello)):
            connection.sendall(piece)
        receiver = Receiver(connection, _no_body)
        answer = receiver.receive().head
        connection.settimeout(None)
    except (OSError, HungUp, Malformed) as error:
        connection.close()
        raise Unavailable(f"{address} does not answer: {error or 'it hung up'}") from None
    except BaseException:
        connection.close()
        raise
    if isinstance(answer, Done):
        receiver.place = place
        return Channel(connection, hello, receiver, on_message, on_closed)
    connection.close()
    raise _refusal(address, answer)


def _no_body(head: AnyHead, num_keys: int, num_bytes: int) -> None:
    """A place for greetings."""
    if num_keys or num_bytes:
        raise Malformed(f"{type(head).__name__} came before a Hello was answered")


def _refusal(address: str, answer: object) -> ParameterError:
    if isinstance(answer, Refused):
        text = f"{address} refuses the connection: {answer.text}"
        return Evicted(text) if answer.why == "evicted" else Unavailable(text)
    return Unavailable(f"{address} answers a Hello with {type(answer).__name__}")


def hello(name: str, role: str, incarnation: int) -> Hello:
    return Hello(VERSION, role, name, incarnation)


def tune(connection: socket.socket) -> None:
    """Small messages go at once, and a host that is gone is noticed within about 15 s.

    The sizes of the kernel's buffers stay its own: it grows them to the line by itself, and to more
    than a program may ask for.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 3),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 15_000),
    ):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def shut(connection: socket.socket) -> None:
    """Wake all threads that wait for a socket. Its descriptor stays until it is closed."""
    with contextlib.suppress(OSError):  # the other side was first
        connection.shutdown(socket.SHUT_RDWR)


def _name_of(connection: socket.socket) -> str:
    try:
        host, port = connection.getpeername()[:2]
    except OSError:
        return "?"
    return f"{host}:{port}"
