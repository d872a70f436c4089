"""A Unix socket beside the journal: it tells health checks on this machine whether the coordinator
serves, and lets `xain-coordinator backup` have a copy of the journal, which is locked."""

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import structlog

from xain_coordinator.ports import JournalError

SERVING, NOT_SERVING = b"SERVING\n", b"NOT_SERVING\n"
# Asked for in a line. The answer is COPIED and the name of the copy, in the journal's folder, which
# is there until the one who asks hangs up; or the reason why there is none.
COPY_JOURNAL, COPIED = b"COPY_JOURNAL\n", "COPIED "

_LISTENS_S = 10.0  # for a line; health checks hang up at once
_READ_BYTES = 64 << 10

log = structlog.get_logger(__name__)


class HealthSocket:
    """Answer whoever connects with one line, SERVING or NOT_SERVING.

    The socket is JOURNAL.sock beside JOURNAL.sqlite. Where that path is too long for a socket, some
    100 bytes, or the file system takes none, it lies in a folder of its own for temporary files,
    and JOURNAL.sock is a link to it.

    moved_to: where it is then; empty while it is beside the journal, or not open.
    """

    # A backup that lasts so long is told, and again each time. It is not ended: nothing that comes
    # from it shows whether it still copies.
    long_backup_s = 600.0

    def __init__(self, journal: Path) -> None:
        self._beside = socket_beside(journal)
        self.moved_to = ""

    @contextlib.asynccontextmanager
    async def open(
        self,
        is_serving: Callable[[], bool],
        journal_copied: Callable[[], AbstractAsyncContextManager[Path]],
    ) -> AsyncIterator[None]:
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
                with contextlib.suppress(OSError):  # a file system without links
                    self._beside.symlink_to(path)
                    at_end.callback(self._beside.unlink, missing_ok=True)
            at_end.callback(path.unlink, missing_ok=True)

            under_way: set[asyncio.Task[None]] = set()

            def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(SERVING if is_serving() else NOT_SERVING)
                task = asyncio.create_task(self._serve(reader, writer, journal_copied))
                under_way.add(task)
                task.add_done_callback(under_way.discard)

            async with await asyncio.start_unix_server(answer, sock=listener):
                try:
                    yield
                finally:
                    for task in under_way:
                        task.cancel()

    async def _serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        journal_copied: Callable[[], AbstractAsyncContextManager[Path]],
    ) -> None:
        """Do what the line asks for that the other side sends, if it sends one."""
        with contextlib.closing(writer), contextlib.suppress(TimeoutError, ValueError, OSError):
            async with asyncio.timeout(_LISTENS_S):
                line = await reader.readline()
            if line != COPY_JOURNAL:
                return
            async with contextlib.AsyncExitStack() as until_end:
                try:
                    copy = await until_end.enter_async_context(journal_copied())
                except (JournalError, OSError) as error:
                    writer.write(f"{error}\n".encode())
                else:
                    writer.write(f"{COPIED}{copy.name}\n".encode())
                    # Until the other side has copied the objects.
                    told = asyncio.create_task(self._tell_long_backup(copy, _pid_of(writer)))
                    until_end.callback(told.cancel)
                    while await reader.read(_READ_BYTES):
                        pass

    async def _tell_long_backup(self, copy: Path, pid: int | None) -> None:
        """Warn in intervals that a backup holds up the removal of objects."""
        lasted_s = 0.0
        while True:
            await asyncio.sleep(self.long_backup_s)  # the interval of the warnings
            lasted_s += self.long_backup_s
            log.warning("backup_holds_up_removal", pid=pid, copy=str(copy), lasted_s=lasted_s)


def _pid_of(writer: asyncio.StreamWriter) -> int | None:
    """Process at the other end of a Unix socket, where the system tells it."""
    if sys.platform != "linux":
        return None
    credentials = writer.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    pid, _, _ = struct.unpack("3i", credentials)
    return int(pid)


def socket_beside(journal: Path) -> Path:
    """Path of the socket of a journal's coordinator, unless it is too long for a socket."""
    return journal.with_suffix(".sock").absolute()


def socket_of(journal: Path) -> Path:
    """Path at which the socket of a journal's coordinator answers, if it runs."""
    beside = socket_beside(journal)
    return beside.readlink() if beside.is_symlink() else beside


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
