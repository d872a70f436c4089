"""Real HTTP servers of the files of a folder, in processes of their own."""

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from xain_foundation.sockets import free_ports

READY_S = 120.0
# Knows Range requests, and has a page of links for each folder.
WITH_RANGES = """
import sys
from aiohttp import web
app = web.Application()
app.router.add_static("/", sys.argv[1], show_index=True)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None)
"""


class HttpFiles:
    """A server on loopback, of aiohttp with Range requests and of Python itself without.

    url: of the folder, "http://127.0.0.1:PORT".
    """

    def __init__(self, folder: Path, *, has_ranges: bool = True) -> None:
        self._folder = folder
        self._has_ranges = has_ranges
        (self._port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        port = str(self._port)
        command = ["-c", WITH_RANGES, str(self._folder), port]
        if not self._has_ranges:
            command = ["-m", "http.server", f"--directory={self._folder}", "--bind=127.0.0.1", port]
        self._process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
                return self
            assert self._process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.05)  # a poll, not a race

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
