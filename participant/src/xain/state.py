"""State that a script keeps at the participant from round to round: round.state."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain.weights import is_tensor, to_tensor
from xain_participant.keep.versions import Versions


class ScriptState:
    """The states of one participant, see Versions. folder: None keeps them in memory."""

    def __init__(self, folder: Path | None, participant_id: str) -> None:
        self._versions = Versions(folder, "script-state", participant_id)

    def close(self) -> None:
        """Write no more: another process may use the folder."""
        self._versions.close()

    def load(self, session_id: str, round_: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """The state that a round begins with, and the tensors that the participant keeps; empty if
        there is none."""
        data = self._versions.load(session_id, round_)
        return ({}, {}) if data is None else _decode(data)

    def save(
        self,
        session_id: str,
        round_: int,
        values: Mapping[str, Any],
        tensors: Mapping[str, NDArray[Any]],
    ) -> None:
        """Keep the state that a round leaves; in a folder, it outlives a kill on return.

        tensors: of the script's model, those that do not travel.
        Raises TypeError for a value that is neither an array nor JSON, with its name.
        """
        if values or tensors or not self._versions.is_empty:
            self._versions.save(session_id, round_, _encode(values, tensors))


def _encode(values: Mapping[str, Any], counters: Mapping[str, NDArray[Any]]) -> bytes:
    """Values and tensors as an .npz file, without pickles. Raises TypeError."""
    arrays: list[NDArray[Any]] = []
    text = json.dumps({"values": _plain(dict(values), "", arrays), "counters": list(counters)})
    arrays += counters.values()
    named = {f"a{i}": array for i, array in enumerate(arrays)}
    file = io.BytesIO()
    np.savez(file, json=np.frombuffer(text.encode(), np.uint8), **named)  # type: ignore[arg-type]  # no array is called allow_pickle
    return file.getvalue()


def _decode(data: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Values and tensors of a file that _encode() has written."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        content = json.loads(file["json"].tobytes())
        arrays = [file[f"a{i}"] for i in range(len(file.files) - 1)]
    names = content["counters"]
    counters = dict(zip(names, arrays[len(arrays) - len(names) :], strict=True))
    values: dict[str, Any] = _rich(content["values"], arrays)
    return values, counters


def _plain(value: Any, at: str, arrays: list[NDArray[Any]]) -> Any:
    """A value as JSON, with its arrays taken out of it and appended to `arrays`. at: its path, for
    messages. Raises TypeError."""
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
        items = [(key, _plain(item, f"{at}[{key!r}]", arrays)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        for key, _ in items:
            if key is not None and not isinstance(key, bool | int | float | str):
                raise TypeError(
                    f"round.state{at} has a key {key!r}; a key must be text or a number"
                )
        return {"$items": items}  # JSON has text for keys only, and an optimizer has numbers
    if isinstance(value, list | tuple):
        return [_plain(item, f"{at}[{i}]", arrays) for i, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"round.state{at} is {type(value).__name__}; it must be an array, a tensor, a number, "
        "text, true, false, None, or a list or mapping of them"
    )


def _rich(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """The value that _plain() has written, with its arrays and tensors."""
    if isinstance(value, list):
        return [_rich(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "$items" in value:
        return {key: _rich(item, arrays) for key, item in value["$items"]}
    if "$array" not in value:
        return {key: _rich(item, arrays) for key, item in value.items()}
    array = arrays[value["$array"]]
    if "torch" not in value:
        return array
    return to_tensor(array, value["torch"])
