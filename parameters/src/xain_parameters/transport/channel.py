"""A connection between two nodes: sends without waiting, and receives in a thread of its own.

A thread that sends never waits for the other side: bytes that the kernel does not take go to a
queue that a second thread empties. So two servers that send much to each other cannot block each
other, and a slow worker cannot hold up a range. While more than QUEUE_BYTES wait in the queue,
nothing more is read from that connection; more than MAX_QUEUE_BYTES end it.
"""

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

from xain_foundation.logs.logger import get_logger
from xain_foundation.net.sockets import leave_unpaced
from xain_foundation.security.identity import NoIdentity, Role
from xain_foundation.security.tls import Certificates
from xain_parameters.errors import Invalid, Unavailable
from xain_parameters.messages import VERSION, AnyHead, Done, Hello, Message, Refused
from xain_parameters.transport.frames import Malformed, Receiver, Socket, Unsent, pieces_of
from xain_parameters.transport.sections import Sections
from xain_parameters.transport.tls import LockedTlsSocket, wait_readable

QUEUE_BYTES: Final = 64 << 20
MAX_QUEUE_BYTES: Final = 4 << 30
HELLO_TIMEOUT_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 5.0
SMALL_BYTES: Final = 32 << 10  # smaller messages go together

log = get_logger(__name__)


def require_nothing() -> None:
    """Take every message, as of a peer that shows no certificate."""


class Channel:
    """One connection, from either side, after its Hello.

    peer: the other side as it said Hello, or the Hello that was said to it.
    on_message: called in the channel's thread with each message, in their order. What it raises
        ends the connection.
    on_closed: called once, in the same thread, after the last message, with the reason.
    require: raises NoIdentity if the peer's certificate counts no more. No later message does.
    """

    def __init__(
        self,
        connection: Socket,
        peer: Hello,
        receiver: Receiver,
        on_message: "OnMessage",
        on_closed: "OnClosed",
        require: Callable[[], None] = require_nothing,
    ) -> None:
        self.peer = peer
        self._require = require
        self._socket = connection
        self._receiver = receiver
        receiver.before_wait = self._flush
        self._on_message = on_message
        self._on_closed = on_closed
        self._changed = threading.Condition(threading.Lock())
        self._unsent = Unsent()
        self._sections: Sections | None = None  # collects the answers to the last Several that came
        self._is_full = False  # the socket takes no more; the writer waits for it
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
        """The number of bytes that wait until the other side takes them."""
        return self._unsent.num_bytes

    def send(self, message: Message) -> bool:
        """Send a message, or queue it; never waits. Its arrays must not change until it has gone:
        rows of a table, say, that are changed in place meanwhile may go in either state.

        Small messages that on_message sends while others wait to be read go together, before the
        channel waits for another one.
        Returns False if the connection has ended. A message that was accepted may be lost with the
        connection.
        """
        pieces = pieces_of(message)
        with self._changed:
            if self._is_closed:
                return False
            self._unsent.add(pieces)
            if self._is_full:
                if self._unsent.num_bytes > MAX_QUEUE_BYTES:
                    self._end(OSError(f"{self._unsent.num_bytes} bytes wait to be sent"))
                return not self._is_closed
            if (
                self._unsent.num_bytes > SMALL_BYTES
                or not self._receiver.has_more
                or threading.get_ident() != self._reader.ident
            ):
                self._send()
            return not self._is_closed

    def answered_by(self, message: Message) -> "Channel | Sections":
        """The object whose send() takes the answer to a message. Called with each message, in the
        order of their arrival."""
        if message.several is None:
            return self
        if self._sections is None or self._sections.several is not message.several:
            self._sections = Sections(self.send, message.several)
        return self._sections

    def close(self) -> None:
        """End the connection. What is queued is dropped. Does not wait; see join."""
        with self._changed:
            self._end(None)

    def join(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until its threads have ended. Returns whether they have."""
        if self._reader is not threading.current_thread():
            self._reader.join(timeout_s)
        return not self._reader.is_alive()

    # --- under the lock ---

    def _send(self) -> None:
        """Send what the socket takes; the writer sends the rest."""
        was_full = self._is_full
        try:
            self._unsent.send(self._socket, socket.MSG_DONTWAIT)
            self._is_full = False
        except BlockingIOError:
            self._is_full = True
        except OSError as error:
            self._end(error)
        if self._is_full and self._writer is None:
            name = f"write {self.peer.name}"
            self._writer = threading.Thread(target=self._write_queued, name=name, daemon=True)
            self._writer.start()
        if was_full or self._is_full:
            self._changed.notify_all()

    def _end(self, error: OSError | None) -> None:
        """End the channel once: drop queued messages, and wake its threads."""
        if self._is_closed:
            return
        self._is_closed = True
        self._unsent.clear()
        if error is not None:
            log.info("connection_broken", peer=self.peer.name, error=str(error))
        # Both threads wake up; the descriptor is closed when the reader has ended.
        shut(self._socket)
        self._changed.notify_all()

    # --- in threads ---

    def _read(self) -> None:
        """Hand on message after message until the peer hangs up or breaks the rules; the thread
        that reads. It ends the channel."""
        why: Exception | None = None
        try:
            while True:
                try:
                    message = self._receiver.receive()
                except BlockingIOError:
                    wait_readable(self._socket)
                    continue
                except EOFError:
                    break
                self._require()
                self._on_message(self, message)
                del message  # its buffer can take the next one
                if self._unsent.num_bytes > QUEUE_BYTES:
                    with self._changed:
                        self._changed.wait_for(
                            lambda: self._unsent.num_bytes <= QUEUE_BYTES or self._is_closed
                        )
        except Malformed as error:
            why = error
            if not self._is_closed:
                log.warning("malformed_message", peer=self.peer.name, error=str(error))
        except OSError as error:
            why = error
        except NoIdentity as error:
            why = error
            log.warning("connection_refused", peer=self.peer.name, reason=str(error))
        except Exception as error:  # a defect of ours ends this channel only
            why = error
            log.exception("message_failed", peer=self.peer.name)
        with self._changed:
            self._end(None)
            writer = self._writer
        if writer is not None:
            writer.join()
        self._socket.close()
        self._on_closed(self, why)

    def _flush(self) -> None:
        """Send the small messages that on_message has sent."""
        if self._unsent and not self._is_full:
            with self._changed:
                if not self._is_full and not self._is_closed:
                    self._send()

    def _write_queued(self) -> None:
        """Send queued messages whenever the socket takes more, in a thread."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_WRITE)
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_full or self._is_closed)
                    if self._is_closed:
                        return
                selector.select()
                with self._changed:
                    if not self._is_closed:
                        self._send()


OnMessage: TypeAlias = Callable[[Channel, Message], None]
OnClosed: TypeAlias = Callable[[Channel, Exception | None], None]


def connect(
    address: str,
    hello: Hello,
    on_message: OnMessage,
    on_closed: OnClosed,
    *,
    timeout_s: float = HELLO_TIMEOUT_S,
    tls: Certificates | None = None,
    server: str = "",
) -> Channel:
    """Connect to "HOST:PORT" and say Hello; see say_hello(). The channel must be started."""
    connection, receiver = say_hello(address, hello, timeout_s, tls, server)
    return Channel(connection, hello, receiver, on_message, on_closed)


def say_hello(
    address: str, hello: Hello, timeout_s: float, tls: Certificates | None, server: str
) -> tuple[Socket, Receiver]:
    """Connect to "HOST:PORT", and exchange Hello. Returns the connection and its receiver.

    tls: None: no TLS. server: whose certificate the other side has to show; "": that of any node.
    Raises Unavailable if the other side does not answer in time, or shows another certificate, and
    Invalid if it refuses: it speaks another version of the protocol, or our name is not that in our
    certificate.
    """
    host, _, port = address.rpartition(":")
    try:
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    except (OSError, ValueError) as error:
        raise Unavailable(f"{address} cannot be reached: {error}") from None
    connection: Socket = plain
    try:
        tune(plain)
        if tls is not None:
            # Names in lists may stand for several programs: their certificates are for hosts too.
            context = tls.connects if tls.rules.roles else tls.connects_by_name
            wrapped = context.wrap_socket(plain, server_hostname=host.strip("[]"))
            connection = LockedTlsSocket(wrapped)
            shown = tls.callers.of_socket(wrapped).identity
            if not shown.speaks_for(server or shown.name, Role.NODE):
                raise NoIdentity(f"it shows the certificate of {shown}, not of node {server!r}")
        for piece in pieces_of(Message(hello)):
            connection.sendall(piece)
        receiver = Receiver(connection, _no_body)
        answer = receiver.receive().head
        connection.settimeout(None)
    except (OSError, EOFError, Malformed, NoIdentity) as error:
        connection.close()
        raise Unavailable(f"{address} does not answer: {error or 'it hung up'}") from None
    except BaseException:  # no other code has the socket
        connection.close()
        raise
    if isinstance(answer, Done):
        receiver.destination = None
        return connection, receiver
    connection.close()
    if isinstance(answer, Refused):
        raise Invalid(f"{address} refuses the connection: {answer.text}")
    raise Unavailable(f"{address} answers a Hello with {type(answer).__name__}")


def _no_body(head: AnyHead, num_keys: int, num_bytes: int) -> None:
    """Refuse the body of a message before the Hello is answered."""
    if num_keys or num_bytes:
        raise Malformed(f"{type(head).__name__} came before a Hello was answered")


def hello(name: str, role: str, incarnation: int) -> Hello:
    return Hello(VERSION, role, name, incarnation)


def tune(connection: socket.socket) -> None:
    """Set options of a connection: small messages go at once, and a host that is gone is noticed
    within about 15 s.

    The kernel sizes its buffers: it grows them to fit the network, and beyond the limit for a
    program.
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
    leave_unpaced(connection)


def shut(connection: Socket) -> None:
    """Wake all threads that wait for a socket. Its descriptor stays until it is closed."""
    with contextlib.suppress(OSError):  # the other side was first
        connection.shutdown(socket.SHUT_RDWR)
