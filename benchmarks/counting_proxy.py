"""A TCP proxy on loopback that counts what goes through it."""

import socket
import threading
from contextlib import suppress
from typing import Self

PIECE_BYTES = 256 << 10


class CountingProxy:
    """Passes connections on to a port of this machine; a port without a listener resets them.

    num_bytes_up: passed on to the upstream so far, protocol and all. num_bytes_down: the other way.
    """

    def __init__(self, upstream: int) -> None:
        self.num_bytes_up = 0
        self.num_bytes_down = 0
        self._upstream = upstream
        self._counting = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """No new connections. Those that there are end with either of their sides."""
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._upstream))
        except OSError:
            client.close()
            return
        for side in (client, server):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=self._pass, args=(server, client, False), daemon=True)
        back.start()
        self._pass(client, server, True)
        back.join()
        client.close()
        server.close()

    def _pass(self, source: socket.socket, target: socket.socket, is_up: bool) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        with suppress(OSError):  # either side has hung up
            while count := source.recv_into(buffer):
                target.sendall(buffer[:count])
                with self._counting:
                    if is_up:
                        self.num_bytes_up += count
                    else:
                        self.num_bytes_down += count
        # The other side reads all bytes sent before it sees the end.
        for side in (source, target):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
