"""Tell a damaged write-ahead log from one that a power cut has torn.

SQLite reads a log up to the first frame whose checksum is wrong, and drops the rest without a word.
A power cut leaves such an end: the frames of the last transaction, which was never acknowledged.
But a flipped bit in the middle drops transactions that were. With synchronous=FULL SQLite syncs a
transaction before it begins to write the next one, so a wrong frame is damage, and no torn end, if
a later transaction goes on from the checksum of the one before it. Frames that merely lie further
back prove nothing: they may be left of transactions that a kill or a power cut has ended.

Damage within the last transaction of the log looks like a torn end, and is taken for one.

Source: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xain_coordinator.ports import JournalDamaged

_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_MAGIC = 0x377F0682  # checksums are of little-endian words; with the lowest bit set, of big-endian
_PAGE_BYTES = 4096  # of our journals; for a log whose header cannot be read

# Read at a time. A log is as large as the largest transaction, such as the journal's new format.
_BLOCK_BYTES = 4 << 20

_Words = NDArray[np.uint32]


def require_sound_log(database: Path) -> None:
    """Refuse the write-ahead log of a database if transactions would be lost to damage.

    Raises JournalDamaged and OSError. Changes nothing, and may run beside a process that writes.
    """
    path = database.with_name(f"{database.name}-wal")
    log = _read(path)
    while log is not None and (found := _find_damage(log)) is not None:
        again = _read(path)
        if again is not None and again.digest == log.digest:
            raise JournalDamaged(
                f"the write-ahead log {path} is damaged at byte {found}, and SQLite would drop "
                "what was acknowledged after it; restore the journal and its log from a backup. "
                f"To go on without what came after, run: truncate -s {found} {path}"
            )
        log = again  # another process is writing it


@dataclass(frozen=True, slots=True)
class _Log:
    """Headers of a write-ahead log, without its pages.

    header: None if it is damaged. page_bytes: that of the header, or of our journals.
    heads: the header of each frame, (n, 6).
    sums: what each frame adds to the checksum, (n, 2), by the order of words: that of the header,
        or both if there is none.
    digest: of all its bytes.
    """

    header: "_Header | None"
    page_bytes: int
    heads: _Words
    sums: dict[str, _Words]
    digest: str


@dataclass(frozen=True, slots=True)
class _Header:
    """A log's header. order: of the words that are summed. rest: salts and checksum, four words."""

    page_bytes: int
    order: str
    rest: _Words

    @classmethod
    def of(cls, start: bytes) -> "_Header | None":
        """The header in the first bytes of a log; None if it is damaged."""
        if len(start) < _HEADER_BYTES:
            return None
        words = np.frombuffer(start, ">u4", 8)
        order = ">" if words[0] & 1 else "<"
        summed = np.frombuffer(start, f"{order}u4", 6).astype(np.uint32)
        is_sound = int(words[0]) & ~1 == _MAGIC and (_sums(summed[None])[0] == words[6:]).all()
        return cls(int(words[2]), order, words[4:].astype(np.uint32)) if is_sound else None


def _read(path: Path) -> _Log | None:
    """Read a log by blocks; None if there is none. Raises OSError."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        start = file.read(_HEADER_BYTES)
        header = _Header.of(start)
        page_bytes = _PAGE_BYTES if header is None else header.page_bytes
        size = _FRAME_HEADER_BYTES + page_bytes
        digest = xxhash.xxh3_128(start)
        heads: list[_Words] = []
        sums: dict[str, list[_Words]] = {o: [] for o in ("<>" if header is None else header.order)}
        while block := file.read(max(1, _BLOCK_BYTES // size) * size):
            digest.update(block)
            num_frames = len(block) // size  # half a frame is torn
            frames = np.frombuffer(block, np.uint8, num_frames * size).reshape(num_frames, size)
            head = frames[:, :_FRAME_HEADER_BYTES]
            heads.append(head.copy().view(">u4").astype(np.uint32))
            summed = np.hstack([head[:, :8], frames[:, _FRAME_HEADER_BYTES:]])
            for order, so_far in sums.items():
                so_far.append(_sums(summed.view(f"{order}u4").astype(np.uint32, copy=False)))
    by_order = {order: _stacked(each, 2) for order, each in sums.items()}
    return _Log(header, page_bytes, _stacked(heads, 6), by_order, digest.hexdigest())


def _stacked(blocks: Sequence[_Words], num_columns: int) -> _Words:
    return np.vstack([np.empty((0, num_columns), np.uint32), *blocks])


def _find_damage(log: _Log) -> int | None:
    """The offset of the first wrong header or frame that committed transactions follow; None if the
    log is sound, or torn at its end."""
    if log.header is None:
        # The order of the words is part of what cannot be read.
        return 0 if any(_wrong_frame(log, s) is not None for s in log.sums.values()) else None
    wrong = _wrong_frame(log, log.sums[log.header.order])
    if wrong is None:
        return None
    return _HEADER_BYTES + wrong * (_FRAME_HEADER_BYTES + log.page_bytes)


def _wrong_frame(log: _Log, sums: _Words) -> int | None:
    """The number of the first wrong frame that committed transactions follow."""
    heads, num_frames = log.heads, len(log.heads)
    if num_frames < 2:
        return None
    _, carried = _weights((8 + log.page_bytes) // 4)
    # Salts and checksum of the frame before; of the first frame, those of the header.
    first = np.zeros(4, np.uint32) if log.header is None else log.header.rest
    before = np.vstack([first, heads[:-1, 2:]])
    salts = before[:, :2] if log.header is None else first[:2]
    is_current = (heads[:, 2:4] == salts).all(axis=1)
    expected = sums + before[:, 2:] @ carried
    is_sound = is_current & (expected == heads[:, 4:]).all(axis=1)
    if is_sound.all():
        return None
    wrong = int(np.argmin(is_sound))
    # A frame may also follow one of which only the checksum is wrong.
    expected = sums + np.vstack([first[2:], expected[:-1]]) @ carried
    is_sound |= is_current & (expected == heads[:, 4:]).all(axis=1)
    # The end of a transaction may itself be what is damaged; behind it, half a header may be torn.
    is_sound[wrong] = True
    is_end = (heads[:, 1] != 0) & is_sound
    return wrong if (is_end[wrong:-1] & is_sound[wrong + 1 :]).any() else None


def _sums(words: _Words) -> _Words:
    """SQLite's checksums of rows of words, (n, 2), if zeros went before each of them."""
    weights, _ = _weights(words.shape[1])
    return words @ weights


@cache
def _weights(num_words: int) -> tuple[_Words, _Words]:
    """Weights of each word, and of each word of the previous checksum, in the two of the checksum.

    The checksum (s, t) of two more words (x, y) is (s + t + x, t + y + s + t + x), modulo 2**32.
    """
    weights = np.zeros((num_words, 2), np.uint32)
    step = np.array([[1, 1], [1, 2]], np.uint32)  # what s and t add to the next s and t
    power: NDArray[Any] = np.eye(2, dtype=np.uint32)
    for start in range(num_words - 2, -1, -2):
        weights[start] = power @ np.array([1, 1], np.uint32)
        weights[start + 1] = power @ np.array([0, 1], np.uint32)
        power = power @ step
    return weights, power.T
