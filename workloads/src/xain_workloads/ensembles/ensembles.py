"""Ensembles as bytes: a frame for each fitted estimator, which is a file of arrays.

A model is all frames in the order in which they were added. An update is the frames that a
participant has added in a round. Nothing here loads an estimator, but load().

Format: MAGIC, the number of frames as uint32, and for each frame the vote's weight, its owner, its
number and the length of the file as uint64, and the file; see estimators/files.py. Numbers are
little-endian. A model of stacked votes has a linear model behind the frames; see stacking.Stack.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from struct import Struct
from typing import Any

from xain_workloads.ensembles.bagging_options import ONE_CLASS, BaggingOptions
from xain_workloads.ensembles.estimators import files
from xain_workloads.errors import InvalidContent

MAGIC = b"XENSEMB2"
_MAGIC_0_1 = b"XENSEMB1"  # of version 0.1, whose frames have no owner and no number
KEY = "ensemble"  # in the metadata of a model: {"num_features": p}

_COUNT = Struct("<I")
_FRAME = Struct("<QQQQ")
_FRAME_0_1 = Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Frame:
    """A fitted estimator as a file.

    weight: of its vote, the rows of its participant. owner: a number of the participant's own, and
    number: of the estimator there. Both together say of which bootstrap it is; both are 0 in
    ensembles of version 0.1.
    """

    weight: int
    file: bytes
    owner: int = 0
    number: int = 0


# --- frames ---


def pack(frames: Sequence[Frame]) -> bytes:
    """Write the frames of an ensemble as bytes."""
    parts = [MAGIC, _COUNT.pack(len(frames))]
    for frame in frames:
        head = _FRAME.pack(frame.weight, frame.owner, frame.number, len(frame.file))
        parts += [head, frame.file]
    return b"".join(parts)


def unpack(data: bytes) -> list[Frame]:
    """The frames of an ensemble with nothing behind them. Raises InvalidContent."""
    frames, tail = split(data)
    if tail:
        raise InvalidContent(f"{len(tail)} bytes follow the last frame of the ensemble")
    return frames


def split(data: bytes) -> tuple[list[Frame], bytes]:
    """The frames of an ensemble, and the bytes behind them. Raises InvalidContent."""
    at = len(MAGIC) + _COUNT.size
    if not data.startswith((MAGIC, _MAGIC_0_1)) or len(data) < at:
        raise InvalidContent("the bytes are no ensemble")
    frame = _FRAME if data.startswith(MAGIC) else _FRAME_0_1
    (count,) = _COUNT.unpack_from(data, len(MAGIC))
    frames = []
    for number in range(count):
        if len(data) < at + frame.size:
            raise InvalidContent(f"the ensemble ends within frame {number} of {count}")
        weight, *known, length = frame.unpack_from(data, at)
        at += frame.size
        if length > len(data) - at:
            raise InvalidContent(f"the ensemble ends within frame {number} of {count}")
        frames.append(Frame(weight, data[at : at + length], *known))
        at += length
    return frames, data[at:]


def added(updates: Iterable[tuple[bytes, int]]) -> Iterator[Frame]:
    """Yield the frames of all updates, each with the number of samples of its update as its weight.

    updates: bytes and number of samples. Raises InvalidContent.
    """
    for data, num_samples in updates:
        yield from (replace(frame, weight=num_samples) for frame in unpack(data))


def num_features_of(metadata: Mapping[str, str]) -> int:
    """Columns of the rows that an ensemble predicts. Raises ValueError."""
    try:
        return int(json.loads(metadata[KEY])["num_features"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"the model's metadata do not describe an ensemble: {error}") from error


# --- checks ---


def check_update(
    data: bytes, options: BaggingOptions, num_features: int, *, epochs: int = 1
) -> None:
    """Refuse an update that is not as many estimators of the model's type as a round adds.

    No estimator is loaded. Raises InvalidContent.
    """
    frames = unpack(data)
    expected = options.estimators * epochs
    if len(frames) != expected:
        raise InvalidContent(f"the update has {len(frames)} estimators, a round adds {expected}")
    for number, frame in enumerate(frames):
        try:
            check_file(frame.file, options, num_features)
        except InvalidContent as error:
            raise InvalidContent(f"estimator {number}: {error}") from None


def check_file(file: bytes, options: BaggingOptions, num_features: int) -> None:
    """Refuse a file that is not an estimator of the model's type, or has a type outside of
    scikit-learn and numpy. Nothing in the file is loaded. Raises InvalidContent."""
    names = {options.kind} | ({ONE_CLASS} if options.task == "classification" else set())
    files.check(file, names, num_features)


def load(file: bytes, options: BaggingOptions, num_features: int) -> Any:
    """The fitted estimator in a file. Raises InvalidContent, and ModuleNotFoundError."""
    check_file(file, options, num_features)
    return files.load(file)
