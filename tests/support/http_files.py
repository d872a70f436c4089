"""Real HTTP servers of the files of a folder, in processes of their own."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from xain_foundation.net.sockets import free_ports

READY_S = 120.0
# Knows Range requests, and has a page of links for each folder. Further arguments are faults, each
# of one request for a range of bytes: a status that is answered, "cut" for half of the range, or
# "none".
WITH_RANGES = """
import sys
from aiohttp import web
faults = sys.argv[3:]

@web.middleware
async def failing(request, handler):
    asked = request.http_range
    num_bytes = (asked.stop or 0) - (asked.start or 0)
    # Ranges of one byte are looked at to know whether the server has ranges.
    fault = faults.pop(0) if num_bytes > 1 and faults else "none"
    if fault == "none":
        return await handler(request)
    if fault != "cut":
        return web.Response(status=int(fault))
    response = web.StreamResponse(status=206, headers={"Content-Length": str(num_bytes)})
    await response.prepare(request)
    await response.write(b"x" * (num_bytes // 2))
    request.transport.close()
    return response

app = web.Application(middlewares=[failing])
app.router.add_static("/", sys.argv[1], show_index=True)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None)
"""


class HttpFiles:
    """A server on loopback, of aiohttp with Range requests and of Python itself without.

    url: of the folder, "http://127.0.0.1:PORT".
    faults: of the server with Range requests; see WITH_RANGES.
    """

    def __init__(
        self, folder: Path, *, has_ranges: bool = True, faults: Sequence[str] = ()
    ) -> None:
        self._folder = folder
        self._has_ranges = has_ranges
        self._faults = faults
        (self._port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        port = str(self._port)
        command = ["-c", WITH_RANGES, str(self._folder), port, *self._faults]
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
