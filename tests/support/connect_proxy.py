"""An HTTP proxy that connects to this machine, whatever host it is asked for."""

import re
import socket
import threading
from contextlib import ExitStack, suppress
from typing import Self


class ConnectProxy:
    """From `with` on. Every host name is this machine's.

    asked: the "HOST:PORT" of each CONNECT. status: of its answers; another one than 200 refuses.
    """

    def __init__(self, status: str = "200 Connection established") -> None:
        self.asked: list[str] = []
        self._status = status
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        for connection in (self._listening, *self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._accepting.join()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                connection = self._listening.accept()[0]
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), ExitStack() as at_end:
            at_end.callback(connection.close)
            head = b""
            while b"\r\n\r\n" not in head:
                if not (received := connection.recv(4096)):
                    return
                head += received
            asked = re.match(rb"CONNECT (\S+) ", head)
            assert asked, head
            self.asked.append(asked[1].decode())
            connection.sendall(f"HTTP/1.1 {self._status}\r\n\r\n".encode())
            if not self._status.startswith("200"):
                return
            port = int(self.asked[-1].rpartition(":")[2])
            there = at_end.enter_context(socket.create_connection(("127.0.0.1", port)))
            back = threading.Thread(target=_pump, args=(there, connection), daemon=True)
            back.start()
            _pump(connection, there)
            back.join()


def _pump(source: socket.socket, to: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            to.sendall(data)
    with suppress(OSError):
        to.shutdown(socket.SHUT_WR)
