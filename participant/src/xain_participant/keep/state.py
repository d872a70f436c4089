"""The folder of one participant: its name, and its latest result until that round is over.

    with StateDirectory(Path("/var/lib/ward-7")) as state:
        run(participant, "localhost:50051", state=state)

- `participant.json`: the name.
- `result.bin`: the result, see sealed.py; its body is the vector.
- `lock`: held by the process that uses the folder.

A file that was read and cannot be used, because it is damaged or another participant's, is renamed
to `*.damaged` for people to look at, and never sent. Losing a result costs one training; sending a
wrong one costs a model. A file that cannot be read now stays as it is: the cause may pass.
"""

import fcntl
import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from xain_foundation.durable import make_directory, replace_file
from xain_foundation.logs.logger import get_logger
from xain_foundation.names import why_not
from xain_participant.keep.result import Result
from xain_participant.sdk import sealed
from xain_participant.sdk.evaluations import from_json, to_json
from xain_participant.sdk.identity import default_participant_id, new_instance_id
from xain_workloads.model import TensorSpec

_LOCK = "lock"
_IDENTITY = "participant.json"
_RESULT = "result.bin"
_MAGIC = b"XAIN result 1\n"

# Folders that this process has open, by device and number: a lock of a process does not hold off
# the process itself.
_open_here: set[tuple[int, int]] = set()
_opening = threading.Lock()


class StateError(Exception):
    """The folder cannot be used. why: reason, as the end of "the folder is ...: "."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"state directory {path}: {why}")
        self.why = why


class StateDirectory:
    """The folder, open in one process at a time. Safe to use from several threads.

    path: the folder, which is made if it does not exist.
    participant_id, instance_id: None takes what is kept there, or makes one and keeps it.
    Raises StateError, and ValueError if participant_id or instance_id cannot be a name.
    """

    def __init__(
        self, path: Path, participant_id: str | None = None, instance_id: str | None = None
    ) -> None:
        """Make and lock the folder, and read or choose the two names. Raises StateError."""
        given = {"participant_id": participant_id, "instance_id": instance_id}
        for what, name in given.items():
            if name is not None and (why := why_not(name)) is not None:
                raise ValueError(f"{what} is {name!r}: {why}")
        self._path = path.absolute()
        self._log = get_logger(__name__)
        self._using = threading.Lock()
        try:
            make_directory(self._path, mode=0o700)
            self._lock: _FolderLock | None = _FolderLock(self._path)
            try:
                self.participant_id, self.instance_id = self._identity(participant_id, instance_id)
            except BaseException:  # the lock must not outlive a failed start
                self.close()
                raise
        except OSError as error:
            raise StateError(path, f"it cannot be used: {error.strerror}") from None
        self._log = self._log.bind(participant=self.participant_id)

    def close(self) -> None:
        """Release the folder's lock, after a keep() that is under way."""
        with self._using:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the result ---

    def load(self) -> Result | None:
        """The kept result. None if the file cannot be used, and is set aside, or cannot be read
        now. Raises ValueError once the directory is closed."""
        with self._using:
            if self._lock is None:
                raise ValueError(f"state directory {self._path}: it is closed")
            with suppress(OSError):
                (self._path / f"{_RESULT}.part").unlink()  # the rest of a crash
            try:
                head, body = sealed.read(self._path / _RESULT, _MAGIC)
            except FileNotFoundError:
                return None
            except sealed.Damaged as damaged:
                self._set_aside(_RESULT, str(damaged))
                return None
            except (OSError, MemoryError) as error:
                reason = getattr(error, "strerror", None) or type(error).__name__
                self._log.warning("result_unreadable", reason=reason)
                return None
            if (sender := head["participant_id"]) != self.participant_id:
                self._set_aside(_RESULT, f"it is that of participant {sender!r}", head["round"])
                return None
        evaluation = head["evaluation"]
        return Result(
            head["session_id"],
            head["round"],
            body.view(head["dtype"]),
            head["num_samples"],
            head["metrics"],
            layout=tuple(
                TensorSpec(name, tuple(shape), dtype, kind)
                for name, shape, dtype, kind in head["layout"]
            ),
            evaluation=None if evaluation is None else from_json(evaluation),
        )

    def keep(self, result: Result) -> None:
        """Write a result durably. Raises OSError; then no result is kept."""
        evaluation = result.evaluation
        head: dict[str, Any] = {
            "participant_id": self.participant_id,
            "session_id": result.session_id,
            "round": result.round,
            "num_samples": result.num_samples,
            "metrics": result.metrics_json,
            "dtype": result.vector.dtype.str,
            "layout": [[s.name, s.shape, s.dtype, s.kind] for s in result.layout],
            "evaluation": None if evaluation is None else to_json(evaluation),
        }
        with self._using:
            if self._lock is None:
                raise OSError("the state directory is closed")
            try:
                body = result.vector.view("u1").data
                sealed.write(self._path / _RESULT, _MAGIC, head, body)
            except OSError as error:
                self._forget()
                raise OSError(f"{self._path}: {error.strerror}") from None

    def forget(self) -> None:
        """Remove the result. Never raises: the coordinator refuses a result that stays, so the
        removal need not be durable either."""
        with self._using:
            if self._lock is not None:
                self._forget()

    def _forget(self) -> None:
        """Remove the result, while the lock is held; a failure is logged."""
        try:
            (self._path / _RESULT).unlink(missing_ok=True)
        except OSError as error:
            self._log.warning("result_stays", reason=error.strerror)

    # --- who it is ---

    def _identity(self, wanted: str | None, wanted_instance: str | None) -> tuple[str, str]:
        """Names of the participant and of its instance, kept or new.

        Raises OSError, and StateError if others are kept than are wanted."""
        path = self._path / _IDENTITY
        try:
            content = json.loads(path.read_bytes())["content"]
            kept, instance_id = content["participant_id"], content["instance_id"]
            if why := why_not(kept) or why_not(instance_id):
                raise ValueError(why)
        except (FileNotFoundError, ValueError, LookupError, TypeError) as error:
            if not isinstance(error, FileNotFoundError):
                self._set_aside(_IDENTITY, f"not what a participant writes ({error})")
            kept = wanted or default_participant_id()
            instance_id = wanted_instance or new_instance_id()
            content = {"participant_id": kept, "instance_id": instance_id}
            text = json.dumps({"content": content}, indent=1)
            replace_file(path, [text.encode()], sealed.MODE)
        if wanted not in (None, kept):
            # Going on would throw away the other one's result, or send it as this participant's.
            raise StateError(
                self._path,
                f"it is that of participant {kept!r}, not of {wanted!r}; "
                "give each participant its own, or remove it",
            )
        if wanted_instance not in (None, instance_id):
            # Which of two processes is the participant must not depend on what somebody meant.
            raise StateError(
                self._path,
                f"it is that of the instance {instance_id!r}, not of {wanted_instance!r}; leave "
                "participant.instance_id out, which the folder keeps",
            )
        return kept, instance_id

    def _set_aside(self, name: str, why: str, round_: int = -1) -> None:
        """Rename a file that cannot be used, over one that was set aside before."""
        path = self._path / name
        self._log.warning("state_set_aside", round=round_, file=str(path), reason=why)
        # If it cannot be renamed it will be met again, and not be used again.
        with suppress(OSError):
            path.replace(self._path / f"{name}.damaged")


class _FolderLock:
    """Lock of a folder, which ends with the process, however that ends.

    Raises StateError if another process has it, OSError if the file system has no locks."""

    def __init__(self, folder: Path) -> None:
        """Take the lock, without waiting. Raises StateError and OSError."""
        status = folder.stat()
        self._folder = (status.st_dev, status.st_ino)
        with _opening:
            if self._folder in _open_here:
                raise StateError(folder, _IN_USE)
            self._fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, sealed.MODE)
            try:
                # Not flock(): processes that the participant's code forks, such as a data loader,
                # would inherit the lock, and might hold it for longer than this process lives.
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._fd)
                # Systems say either of a lock that another process holds.
                if isinstance(error, BlockingIOError | PermissionError):
                    raise StateError(folder, _IN_USE) from None
                raise
            _open_here.add(self._folder)

    def release(self) -> None:
        """Give up the lock."""
        with _opening:
            os.close(self._fd)
            _open_here.discard(self._folder)


_IN_USE = "another process uses it; each participant needs one of its own"
