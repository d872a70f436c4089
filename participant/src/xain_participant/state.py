"""The folder of one participant: its name, and its latest result until that round is over.

    with StateDirectory(Path("/var/lib/ward-7")) as state:
        run(participant, "localhost:50051", state=state)

- `participant.json`: the name.
- `result.json`: which result is kept. It appears at once, when all else is on the disk, so a crash
  leaves the whole result or none.
- `result-*.npy`: its vector. One that result.json does not name is the rest of a crash.
- `lock`: held by the process that uses the folder.

A file that was read and cannot be used, because it is damaged or another participant's, is renamed
to `*.damaged` for people to look at, and never sent. Losing a result costs one training; sending a
wrong one costs a model. A file that cannot be read now stays as it is: the cause may pass.
"""

import errno
import json
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xain_foundation.durable import make_directory, sync_directory
from xain_foundation.logger import get_logger
from xain_foundation.names import why_not
from xain_participant.download import Damaged, Download
from xain_participant.identity import default_participant_id, new_instance_id
from xain_participant.metrics import MAX_JSON_BYTES
from xain_participant.participant import Evaluation
from xain_participant.result import NotKept, Result
from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.limits import MAX_INT32
from xain_proto.np import npy_header
from xain_workloads.model import Layout, TensorSpec

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_LOCK = "lock"
_IDENTITY = "participant.json"
_RESULT = "result.json"
_VECTOR_PATTERN = r"result-[0-9a-f]{16}\.npy"
_REST_OF_A_CRASH = re.compile(rf"{_VECTOR_PATTERN}(\.part)?|result\.json\.part")
_DAMAGED = ".damaged"
_DAMAGED_VECTOR = "result.npy.damaged"  # one at most, so that they do not pile up

_CHUNK_BYTES = 1 << 20
# The metrics, as JSON within JSON, and the layout of initial weights, of some 10,000 arrays.
_MAX_RECORD_BYTES = 4 * MAX_JSON_BYTES + (4 << 20)
_MAX_ROUND = 2**31 - 1  # an int32 on the wire

# Errors of a lock that another process holds, on all systems.
_TAKEN = frozenset((errno.EACCES, errno.EAGAIN, errno.EDEADLK))

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
    """A Keeper on disk, open in one process at a time. Safe to use from several threads.

    path: the folder, which is made if it does not exist.
    participant_id: None takes the name that is kept there, or makes one and keeps it.
    Raises StateError, and ValueError if participant_id cannot be a name.
    """

    def __init__(self, path: Path, participant_id: str | None = None) -> None:
        if participant_id is not None and (why := why_not(participant_id)) is not None:
            raise ValueError(f"participant_id is {participant_id!r}: {why}")
        self._path = path.absolute()
        self._log = get_logger(__name__)
        self._using = threading.Lock()
        try:
            make_directory(self._path, mode=0o700)
            self._lock: _FolderLock | None = _FolderLock(self._path)
            try:
                identity = self._identity(participant_id)
                self.participant_id = identity.participant_id
                self.instance_id = identity.instance_id
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
            try:
                kept, result = self._load()
            except (OSError, MemoryError) as error:
                self._log.warning("result_unreadable", round=-1, reason=_why(error))
                return None
            self._sweep(kept.vector if kept is not None and result is not None else "")
            return result

    def keep(self, result: Result) -> None:
        """Write a result durably. Raises NotKept; then no result is kept."""
        with self._using:
            if self._lock is None:
                raise NotKept("the state directory is closed")
            vector = f"result-{secrets.token_hex(8)}.npy"
            try:
                size_bytes, digest = write_durably(self._path / vector, _npy_pieces(result.vector))
                kept = _Kept(
                    format=1,
                    participant_id=self.participant_id,
                    session_id=result.session_id,
                    round=result.round,
                    num_samples=result.num_samples,
                    metrics=result.metrics_json,
                    vector=vector,
                    size_bytes=size_bytes,
                    digest=digest,
                    layout=_layout_text(result.layout),
                    evaluation=_evaluation_text(result.evaluation),
                )
                write_durably(self._path / _RESULT, [_sealed(kept)])
            except OSError as error:
                self._forget()  # half a result would take the space that others need
                raise NotKept(f"{self._path}: {error.strerror}") from None

    def forget(self) -> None:
        """Remove the result. Never raises: the coordinator refuses a result that stays, so the
        removal need not be durable either."""
        with self._using:
            if self._lock is not None:
                self._forget()

    def _forget(self) -> None:
        try:
            (self._path / _RESULT).unlink(missing_ok=True)
        except OSError as error:
            self._log.warning("result_stays", round=-1, reason=error.strerror)
            return  # or it would be damaged
        self._sweep("")

    def _load(self) -> "tuple[_Kept | None, Result | None]":
        """Raises OSError and MemoryError."""
        kept: _Kept | None = None
        try:
            kept = self._read(_RESULT, _Kept)
            if kept is None:
                return None, None
            if kept.participant_id != self.participant_id:
                raise _Unusable(f"it is that of participant {kept.participant_id!r}")
            vector = self._read_vector(kept)
            layout, evaluation = _layout_of(kept.layout), _evaluation_of(kept.evaluation)
        except _Unusable as unusable:
            self._set_aside(_RESULT, str(unusable), kept)
            return kept, None
        result = Result(
            kept.session_id,
            kept.round,
            vector,
            kept.num_samples,
            kept.metrics,
            layout=layout,
            evaluation=evaluation,
        )
        return kept, result

    def _read_vector(self, kept: "_Kept") -> NDArray[Any]:
        """Read the vector of a result, (d,), the only copy in memory. Raises _Unusable, OSError and
        MemoryError."""
        try:
            with (self._path / kept.vector).open("rb") as file:
                # Before there is memory for it: a wrong size may be any.
                if (size_bytes := os.fstat(file.fileno()).st_size) != kept.size_bytes:
                    raise _Unusable(f"its vector has {size_bytes} bytes, not {kept.size_bytes}")
                digest = bytes.fromhex(kept.digest)
                download = Download(pb.WeightsRef(size_bytes=size_bytes, digest=digest))
                while chunk := file.read(_CHUNK_BYTES):
                    download.add(chunk)
            return download.vector()
        except Damaged as damaged:
            raise _Unusable(f"its vector: {damaged}") from None
        except _WILL_NOT_PASS as error:
            raise _Unusable(f"its vector: {_why(error)}") from None

    # --- who it is ---

    def _identity(self, wanted: str | None) -> "_Identity":
        """Raises OSError, and StateError if another name is kept than is wanted."""
        kept = None
        try:
            kept = self._read(_IDENTITY, _Identity)
            if kept is not None and (why := why_not(kept.participant_id)) is not None:
                raise _Unusable(f"participant_id: {why}")
        except _Unusable as unusable:
            self._set_aside(_IDENTITY, str(unusable))
            kept = None
        if kept is None:
            participant_id = wanted or default_participant_id()
            kept = self._keep_identity(participant_id)
        if wanted not in (None, kept.participant_id):
            # Going on would throw away the other one's result, or send it as this participant's.
            raise StateError(
                self._path,
                f"it is that of participant {kept.participant_id!r}, not of {wanted!r}; "
                "give each participant its own, or remove it",
            )
        if not kept.instance_id:  # written by an earlier version
            kept = self._keep_identity(kept.participant_id)
        return kept

    def _keep_identity(self, participant_id: str) -> "_Identity":
        """Raises OSError."""
        kept = _Identity(format=1, participant_id=participant_id, instance_id=new_instance_id())
        write_durably(self._path / _IDENTITY, [_sealed(kept)])
        return kept

    # --- files ---

    def _read(self, name: str, kind: "type[_RecordT]") -> "_RecordT | None":
        """Read a record; None if there is no such file. Raises _Unusable and OSError."""
        try:
            with (self._path / name).open("rb") as file:
                data = file.read(_MAX_RECORD_BYTES + 1)
        except FileNotFoundError:
            return None
        except _WILL_NOT_PASS as error:
            raise _Unusable(_why(error)) from None
        if len(data) > _MAX_RECORD_BYTES:
            raise _Unusable(f"longer than {_MAX_RECORD_BYTES} bytes")
        return _unsealed(data, kind)

    def _set_aside(self, name: str, why: str, kept: "_Kept | None" = None) -> None:
        """Rename a file that cannot be used, over one that was set aside before."""
        self._log.warning(
            "state_set_aside",
            participant=kept.participant_id if kept is not None else "",
            round=kept.round if kept is not None else -1,
            file=str(self._path / name),
            reason=why,
        )
        # If it cannot be renamed it will be met again, and not be used again.
        with suppress(OSError):
            (self._path / name).replace(self._path / f"{name}{_DAMAGED}")
        if kept is not None:
            with suppress(OSError):
                (self._path / kept.vector).replace(self._path / _DAMAGED_VECTOR)

    def _sweep(self, vector: str) -> None:
        """Remove files that crashes have left, except this vector."""
        with suppress(OSError):
            for file in list(self._path.iterdir()):
                if file.name != vector and _REST_OF_A_CRASH.fullmatch(file.name):
                    file.unlink(missing_ok=True)


# --- what is written ---


class _Unusable(Exception):
    """A file cannot be used. The text says why."""


# Others may be over soon, as too many open files or a network file system that is away.
_WILL_NOT_PASS = (FileNotFoundError, IsADirectoryError)


def _why(error: OSError | MemoryError) -> str:
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    format: Literal[1]
    participant_id: str = Field(max_length=128)


class _Identity(_Record):
    """participant.json. instance_id: empty in one of an earlier version."""

    instance_id: str = Field(default="", max_length=64)


class _Kept(_Record):
    """result.json. metrics: JSON, as it travels. digest: xxh3-128 of the vector's file, in hex.
    layout, evaluation: JSON, empty if there is none."""

    session_id: str = Field(min_length=1)
    round: int = Field(ge=0, le=_MAX_ROUND)
    num_samples: int = Field(ge=0, le=MAX_INT32)
    metrics: str
    vector: str = Field(pattern=rf"^{_VECTOR_PATTERN}$")
    size_bytes: int = Field(ge=0)
    digest: str = Field(pattern=r"^[0-9a-f]{32}$")
    layout: str = ""
    evaluation: str = ""


def _layout_text(layout: Layout) -> str:
    return json.dumps([[s.name, s.shape, s.dtype, s.kind] for s in layout]) if layout else ""


def _layout_of(text: str) -> Layout:
    """Raises _Unusable."""
    try:
        entries = json.loads(text) if text else []
        return tuple(TensorSpec(n, tuple(shape), dtype, kind) for n, shape, dtype, kind in entries)
    except (ValueError, TypeError):
        raise _Unusable("its layout is not what a participant writes") from None


def _evaluation_text(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return ""
    return json.dumps([evaluation.num_samples, dict(evaluation.metrics)])


def _evaluation_of(text: str) -> Evaluation | None:
    """Raises _Unusable."""
    try:
        return Evaluation(*json.loads(text)) if text else None
    except (ValueError, TypeError):
        raise _Unusable("its evaluation is not what a participant writes") from None


_RecordT = TypeVar("_RecordT", bound=_Record)


def _sealed(record: _Record) -> bytes:
    """A record as JSON with a digest, which detects flipped digits."""
    content = record.model_dump()
    return json.dumps({"content": content, "digest": _digest(content)}, indent=1).encode()


def _unsealed(data: bytes, kind: type[_RecordT]) -> _RecordT:
    """Raises _Unusable."""
    try:
        sealed = json.loads(data)
        content, digest = sealed["content"], sealed["digest"]
        version = content["format"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _Unusable("not what a participant writes") from None
    if version != 1:
        raise _Unusable(f"format {version!r}; this version reads 1")
    if digest != _digest(content):
        raise _Unusable("another digest than it says")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise _Unusable(f"{key}: {first['msg']}") from None


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode()).hexdigest()


def _npy_pieces(vector: NDArray[Any]) -> Iterable[bytes | memoryview]:
    """The .npy file of a vector, from the array itself."""
    yield npy_header(vector.dtype, vector.shape)
    data = vector.view("u1").data
    for offset in range(0, len(data), _CHUNK_BYTES):
        yield data[offset : offset + _CHUNK_BYTES]


# --- what an operating system must be asked for ---


class _FolderLock:
    """Lock of a folder, which ends with the process, however that ends.

    Raises StateError if another process has it, OSError if the file system has no locks."""

    def __init__(self, folder: Path) -> None:
        status = folder.stat()
        self._folder = (status.st_dev, status.st_ino)
        with _opening:
            if self._folder in _open_here:
                raise StateError(folder, _IN_USE)
            self._fd = _open_private(str(folder / _LOCK), os.O_RDWR | os.O_CREAT)
            try:
                _lock(self._fd)
            except OSError as error:
                os.close(self._fd)
                if error.errno in _TAKEN:
                    raise StateError(folder, _IN_USE) from None
                raise
            _open_here.add(self._folder)

    def release(self) -> None:
        with _opening:
            os.close(self._fd)
            _open_here.discard(self._folder)


_IN_USE = "another process uses it; each participant needs one of its own"


if sys.platform == "win32":

    def _lock(fd: int) -> None:
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)

else:

    def _lock(fd: int) -> None:
        # Not flock(): processes that the participant's code forks, such as a data loader, would
        # inherit the lock, and might hold it for longer than this process lives.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Replace a file at once, such that it outlives a power cut, readable by its owner only.

    Returns the size and the xxh3-128, in hex. Raises OSError.
    """
    part = path.with_name(f"{path.name}.part")
    digest = xxhash.xxh3_128()
    size_bytes = 0
    with open(part, "wb", opener=_open_private) as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size_bytes += len(piece)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_directory(path.parent)
    return size_bytes, digest.hexdigest()


def _open_private(path: str, flags: int) -> int:
    """Open a file that only its owner can read: an update may reveal something of the data."""
    return os.open(path, flags, 0o600)
