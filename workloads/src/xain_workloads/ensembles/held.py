"""The list of fitted estimators that stay at the participants: bagging with publish = false.

An update names the estimators that a participant has fitted in a round and keeps. The model lists
the estimators of all rounds in the order in which they were added. Neither has an estimator.

Format of both: MAGIC, the length of the list as uint32, and a JSON list with an object for each
training. A model of stacked votes has a linear model behind the list; see stacking.Stack.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from struct import Struct
from typing import Annotated

from msgspec import Meta

from xain_foundation.settings.hints import hint
from xain_workloads.errors import InvalidContent
from xain_workloads.tables.reading.json_forms import Count, read, written

MAGIC = b"XENHELD2"
_MAGIC_0_1 = b"XENHELD1"  # of version 0.1: a list with nothing behind it, and without its length
_LENGTH = Struct("<I")
MAX_UPDATE_BYTES = 1024
DIGEST_BYTES = 16
_DIGEST = rf"^[0-9a-f]{{{2 * DIGEST_BYTES}}}\Z"

WHY_NO_MODEL = (
    "the fitted estimators stay at the participants (workload.options.publish = false), and the "
    "model is only a list of them; to predict, "
    + hint("xain-coordinator", "xain-coordinator predict --address HOST:PORT --data FILE")
    + ", or train with "
    + hint("xain-coordinator", "workload.options.publish = true")
)


@dataclass(frozen=True, slots=True)
class Holding:
    """Estimators of one training.

    participant: that keeps them; "" in an update, whose sender is known.
    rows: that they were fitted on, the weight of each one's vote; 0 in an update.
    digest: of the frames, in hex; see digest_of().
    """

    estimators: Count
    digest: Annotated[str, Meta(pattern=_DIGEST)]
    participant: str = ""
    rows: Count = 0


def digest_of(frames: bytes) -> str:
    """The digest that names the packed frames of a training."""
    return sha256(frames).hexdigest()[: 2 * DIGEST_BYTES]


def pack_holdings(holdings: Sequence[Holding]) -> bytes:
    """The bytes of a list of estimators."""
    text = written(holdings).encode()
    return MAGIC + _LENGTH.pack(len(text)) + text


def unpack_holdings(data: bytes) -> list[Holding]:
    """Read a list of estimators with nothing behind it. Raises InvalidContent."""
    holdings, tail = split_holdings(data)
    if tail:
        raise InvalidContent(f"{len(tail)} bytes follow the list of estimators")
    return holdings


def is_list(data: bytes) -> bool:
    """Whether these are the bytes of a list of estimators, and not of an ensemble."""
    return data.startswith((MAGIC, _MAGIC_0_1))


def split_holdings(data: bytes) -> tuple[list[Holding], bytes]:
    """Read a list of estimators, and return the bytes behind it, too. Raises InvalidContent."""
    start = len(MAGIC) + _LENGTH.size
    if data.startswith(_MAGIC_0_1):
        start, end = len(_MAGIC_0_1), len(data)
    elif is_list(data) and len(data) >= start:
        end = start + _LENGTH.unpack_from(data, len(MAGIC))[0]
    else:
        raise InvalidContent("the bytes are no list of estimators")
    if end > len(data):
        raise InvalidContent("the list of estimators is cut off")
    holdings = read(data[start:end], list[Holding], "the list of estimators", InvalidContent)
    return holdings, data[end:]


def check_holding(data: bytes, estimators: int) -> None:
    """Refuse an update that does not name as many estimators as a round adds. Raises
    InvalidContent."""
    if len(data) > MAX_UPDATE_BYTES:
        raise InvalidContent(
            f"the update has {len(data)} bytes; with publish = false it names the estimators that "
            f"stay at the participant, which takes {MAX_UPDATE_BYTES} at most"
        )
    holdings = unpack_holdings(data)
    if len(holdings) != 1:
        raise InvalidContent(f"the update names {len(holdings)} trainings, and is of one")
    if holdings[0].estimators != estimators:
        raise InvalidContent(
            f"the update names {holdings[0].estimators} estimators, a round adds {estimators}"
        )


def listed(updates: Iterable[tuple[str, bytes, int]]) -> Iterator[Holding]:
    """Yield the estimators that updates name, with the participant and its rows.

    updates: participant, bytes and number of samples. Raises InvalidContent.
    """
    for participant, data, num_samples in updates:
        for one in unpack_holdings(data):
            yield replace(one, participant=participant, rows=num_samples)
