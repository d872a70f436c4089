"""Operator's Unix socket: beside the journal, the gRPC server listens on it too.

The user who may open the file is the operator, without a certificate: health checks, `status` and
`backup` on this machine need none. It is there from when the coordinator serves to the beginning
of its drain.
"""

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

# Bytes of the path of a socket, with the zero at its end: 104 on macOS, 108 on Linux.
MAX_PATH_BYTES = 103


class OperatorsSocket:
    """The socket JOURNAL.sock beside JOURNAL.sqlite, of mode 0600.

    Where that path is too long for a socket, or the file system takes none, it lies in a folder of
    its own for temporary files, and JOURNAL.sock is a link to it.

    moved_to: where it is then; empty while it is beside the journal, or not open.
    """

    def __init__(self, journal: Path) -> None:
        self._beside = socket_beside(journal)
        self._at_end = contextlib.ExitStack()
        self.moved_to = ""

    def open(self, listen: Callable[[str], object]) -> None:
        """Have a server listen at the socket or, if that fails, at one in a temporary folder, with
        a link to it. Only the owner of the journal's lock may: a killed coordinator's socket is
        replaced.

        listen: given an address as add_insecure_port() takes it. Raises OSError.
        """
        try:
            _listen(listen, self._beside)
            path = self._beside
        except (OSError, RuntimeError):
            folder = Path(tempfile.mkdtemp(prefix="xain-"))
            self._at_end.callback(shutil.rmtree, folder, ignore_errors=True)
            path = folder / self._beside.name
            try:
                _listen(listen, path)
            except RuntimeError as error:
                raise OSError(f"cannot listen on {path}: {error}") from None
            self.moved_to = str(path)
            with contextlib.suppress(OSError):  # a file system without links
                self._beside.unlink(missing_ok=True)
                self._beside.symlink_to(path)
                self._at_end.callback(self._beside.unlink, missing_ok=True)
        self._at_end.callback(path.unlink, missing_ok=True)

    def close(self) -> None:
        """Take the socket away. Connections that stand go on."""
        self._at_end.close()
        self.moved_to = ""


def _listen(listen: Callable[[str], object], path: Path) -> None:
    """Listen at a path with mode 0600. Raises OSError and RuntimeError."""
    # gRPC makes a socket with the mode that the umask leaves. In a folder that nobody else can
    # enter nobody connects before it has its own.
    folder = Path(tempfile.mkdtemp(prefix=".", dir=path.parent))
    try:
        made = folder / "s"
        if max(len(bytes(one)) for one in (made, path)) > MAX_PATH_BYTES:
            raise OSError(f"{path} is too long for a socket")
        listen(f"unix:{made}")
        made.chmod(0o600)
        made.rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def socket_beside(journal: Path) -> Path:
    """Path of the socket of a journal's coordinator, unless it is too long for a socket."""
    return journal.with_suffix(".sock").absolute()


def socket_of(journal: Path) -> Path:
    """Path at which the socket of a journal's coordinator answers, if it runs."""
    beside = socket_beside(journal)
    return beside.readlink() if beside.is_symlink() else beside


def socket_that_answers(journal: Path) -> Path | None:
    """The socket of the coordinator that runs on a journal; None if none does."""
    path = socket_of(journal)
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as tried:
        tried.connect(str(path))
        return path
    return None  # also the socket of one that was killed
