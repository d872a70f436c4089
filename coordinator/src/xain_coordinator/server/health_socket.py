"""A Unix socket beside the journal that tells health checks on this machine whether it serves."""

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

SERVING, NOT_SERVING = b"SERVING\n", b"NOT_SERVING\n"


class HealthSocket:
    """Answer whoever connects with one line, SERVING or NOT_SERVING, and hang up.

    The socket is JOURNAL.sock beside JOURNAL.sqlite. Where that path is too long for a socket, some
    100 bytes, or the file system takes none, it lies in a folder of its own for temporary files.

    moved_to: where it is then; empty while it is beside the journal, or not open.
    """

    def __init__(self, journal: Path) -> None:
        self._beside = journal.with_suffix(".sock").absolute()
        self.moved_to = ""

    @contextlib.asynccontextmanager
    async def open(self, is_serving: Callable[[], bool]) -> AsyncIterator[None]:
        """Answer until the end of the block. Only the owner of the journal's lock may open it: the
        socket of a coordinator that was killed is replaced."""
        with contextlib.ExitStack() as at_end:
            try:
                listener, path = _listen(self._beside), self._beside
            except OSError:
                folder = Path(tempfile.mkdtemp(prefix="xain-"))
                at_end.callback(shutil.rmtree, folder, ignore_errors=True)
                path = folder / self._beside.name
                listener, self.moved_to = _listen(path), str(path)
            at_end.callback(path.unlink, missing_ok=True)

            async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(SERVING if is_serving() else NOT_SERVING)
                writer.close()

            async with await asyncio.start_unix_server(answer, sock=listener):
                yield


def _listen(path: Path) -> socket.socket:
    """Listen at a path with mode 0600. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)
        listener.bind(os.fspath(path))
        path.chmod(0o600)  # before anybody can connect
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
