"""What a script keeps at the participant from round to round: round.state.

Two versions are kept, each with the number of the round that wrote it. A round begins with the
newest version of an earlier round. So a round that is trained again, because the process was killed
between round.submit() and the acknowledgement, begins with the state that it began with before, and
a result that is handed in after a restart finds the state that belongs to it.
"""

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xain.weights import is_tensor, to_tensor
from xain_messaging.logger import get_logger
from xain_messaging.process.durable import sync_directory

_FILES = ("script-state-0.bin", "script-state-1.bin")
_MAGIC = b"XAIN script state 1\n"
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Version:
    """The state that one round has left. counters: integer tensors of the script's model."""

    session_id: str
    round: int
    data: bytes


class ScriptState:
    """The versions of one participant. folder: None keeps them in memory."""

    def __init__(self, folder: Path | None, participant_id: str) -> None:
        self._folder = folder
        self._log = get_logger(__name__).bind(participant=participant_id)
        self._versions: list[Version | None] = [self._read(i) for i in range(len(_FILES))]

    def close(self) -> None:
        """Write no more: another process may use the folder."""
        self._folder = None

    def load(self, session_id: str, round_: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """The state that a round begins with, and the counters; empty if there is none."""
        earlier = [
            v for v in self._versions if v and v.session_id == session_id and v.round < round_
        ]
        if not earlier:
            return {}, {}
        return _decode(max(earlier, key=lambda version: version.round).data)

    def save(
        self,
        session_id: str,
        round_: int,
        values: Mapping[str, Any],
        counters: Mapping[str, NDArray[Any]],
    ) -> None:
        """Returns when it outlives a kill, if there is a folder.

        Raises TypeError for a value that is neither an array nor JSON, with its name.
        """
        if not values and not counters and not any(self._versions):
            return
        version = Version(session_id, round_, _encode(values, counters))
        slot = self._slot(session_id, round_)
        self._versions[slot] = version
        if self._folder is None:
            return
        head = json.dumps({"session_id": session_id, "round": round_}).encode()
        body = head + b"\n" + version.data
        digest = xxhash.xxh3_128(body).digest()
        try:
            _write(self._folder / _FILES[slot], _MAGIC + digest + body)
        except OSError as error:
            # As with a result that is not kept: the training goes on, and the memory has it.
            self._log.warning("state_not_kept", round=round_, reason=error.strerror)

    def _slot(self, session_id: str, round_: int) -> int:
        """Where a version of this round replaces none that this round may begin with again."""
        ages = []
        for slot, version in enumerate(self._versions):
            if version is None or version.session_id != session_id or version.round >= round_:
                return slot
            ages.append((version.round, slot))
        return min(ages)[1]

    def _read(self, slot: int) -> Version | None:
        if self._folder is None:
            return None
        path = self._folder / _FILES[slot]
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._log.warning("state_unreadable", round=-1, file=str(path), reason=error.strerror)
            return None
        start = len(_MAGIC) + _DIGEST_BYTES
        digest, body = data[len(_MAGIC) : start], data[start:]
        if not data.startswith(_MAGIC) or digest != xxhash.xxh3_128(body).digest():
            self._log.warning("state_damaged", round=-1, file=str(path))
            return None
        head, _, rest = body.partition(b"\n")
        fields = json.loads(head)
        return Version(fields["session_id"], fields["round"], rest)


def _encode(values: Mapping[str, Any], counters: Mapping[str, NDArray[Any]]) -> bytes:
    arrays: list[NDArray[Any]] = []
    text = json.dumps({"values": _plain(dict(values), "", arrays), "counters": list(counters)})
    arrays += counters.values()
    named = {f"a{i}": array for i, array in enumerate(arrays)}
    file = io.BytesIO()
    np.savez(file, json=np.frombuffer(text.encode(), np.uint8), **named)  # type: ignore[arg-type]
    return file.getvalue()


def _decode(data: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        content = json.loads(file["json"].tobytes())
        arrays = [file[f"a{i}"] for i in range(len(file.files) - 1)]
    names = content["counters"]
    counters = dict(zip(names, arrays[len(arrays) - len(names) :], strict=True))
    values: dict[str, Any] = _rich(content["values"], arrays)
    return values, counters


def _plain(value: Any, at: str, arrays: list[NDArray[Any]]) -> Any:
    """A value as JSON, with its arrays taken out of it."""
    if is_tensor(value):
        dtype = str(value.dtype).removeprefix("torch.")
        value = value.detach().cpu()
        arrays.append((value.float() if dtype == "bfloat16" else value).numpy())
        return {"$array": len(arrays) - 1, "torch": dtype}
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "fiubc":
            raise TypeError(f"round.state{at} is an array of {value.dtype}; it must be numbers")
        arrays.append(value)
        return {"$array": len(arrays) - 1}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise TypeError(f"round.state{at} has a key {key!r}; keys must be text without $")
        return {key: _plain(item, f"{at}[{key!r}]", arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{at}[{i}]", arrays) for i, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"round.state{at} is {type(value).__name__}; it must be an array, a tensor, a number, "
        "text, true, false, None, or a list or mapping of them"
    )


def _rich(value: Any, arrays: list[NDArray[Any]]) -> Any:
    if isinstance(value, list):
        return [_rich(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "$array" not in value:
        return {key: _rich(item, arrays) for key, item in value.items()}
    array = arrays[value["$array"]]
    if "torch" not in value:
        return array
    return to_tensor(array, value["torch"])


def _write(path: Path, data: bytes) -> None:
    """Returns when it outlives a power cut. Raises OSError."""
    part = path.with_name(f"{path.name}.part")
    with open(part, "wb", opener=_open_private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_directory(path.parent)


def _open_private(path: str, flags: int) -> int:
    """State may tell something of the data that it was made from."""
    return os.open(path, flags, 0o600)
