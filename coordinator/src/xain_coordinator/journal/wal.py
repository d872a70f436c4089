"""Telling a damaged write-ahead log from one that a power cut has torn.

SQLite reads a log up to the first frame whose checksum is wrong, and drops the rest without a word.
A power cut leaves such an end: the frames of the last transaction, which was never acknowledged.
But a flipped bit in the middle drops transactions that were. With synchronous=FULL SQLite syncs a
transaction before it begins to write the next one, so a wrong frame is damage, and no torn end, if
a frame of a later transaction follows it.

Damage within the last transaction of the log looks like a torn end, and is taken for one.

Source: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_coordinator.ports import JournalDamaged

_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_MAGIC = 0x377F0682  # checksums are of little-endian words; with the lowest bit set, of big-endian
_PAGE_BYTES = 4096  # of our journals; for a log whose header cannot be read

_Words = NDArray[np.uint32]


def require_sound_log(database: Path) -> None:
    """Refuse the write-ahead log of a database if transactions would be lost to damage.

    Raises JournalDamaged and OSError. Changes nothing, and may run beside a process that writes.
    """
    path = database.with_name(f"{database.name}-wal")
    content = _read(path)
    while (found := find_damage(content)) is not None:
        again = _read(path)
        if again == content:
            raise JournalDamaged(
                f"the write-ahead log {path} is damaged at byte {found}, and SQLite would drop "
                "what was acknowledged after it; restore the journal and its log from a backup. "
                f"To go on without what came after, run: truncate -s {found} {path}"
            )
        content = again  # another process is writing it


def find_damage(log: bytes) -> int | None:
    """The offset of the first wrong header or frame that committed transactions follow; None if the
    log is sound, or torn at its end."""
    header = _Header.of(log)
    if header is not None:
        return _find_damage(log, header)
    # The order of the bytes is part of what cannot be read.
    broken = (_Header(_PAGE_BYTES, order, None) for order in ("<", ">"))
    return 0 if any(_find_damage(log, each) is not None for each in broken) else None


@dataclass(frozen=True, slots=True)
class _Header:
    """A log's header. order: of the words that are summed. rest: salts and checksum, four words;
    None if the header is damaged."""

    page_bytes: int
    order: str
    rest: _Words | None

    @classmethod
    def of(cls, log: bytes) -> "_Header | None":
        if len(log) < _HEADER_BYTES:
            return None
        words = np.frombuffer(log, ">u4", 8)
        order = ">" if words[0] & 1 else "<"
        summed = np.frombuffer(log, f"{order}u4", 6).astype(np.uint32)
        sums = _checksums(summed[None], np.zeros((1, 2), np.uint32))[0]
        is_sound = int(words[0]) & ~1 == _MAGIC and (sums == words[6:]).all()
        page_bytes = int(words[2])
        return cls(page_bytes, order, words[4:].astype(np.uint32)) if is_sound else None


def _find_damage(log: bytes, header: _Header) -> int | None:
    size = _FRAME_HEADER_BYTES + header.page_bytes
    num_frames = (len(log) - _HEADER_BYTES) // size
    if num_frames < 2:
        return None
    frames = np.frombuffer(log, np.uint8, num_frames * size, _HEADER_BYTES)
    frames = frames.reshape(num_frames, size)
    heads = frames[:, :_FRAME_HEADER_BYTES].copy().view(">u4").astype(np.uint32)
    # Salts and checksum of the frame before; of the first frame, those of the header.
    first = np.zeros(4, np.uint32) if header.rest is None else header.rest
    before = np.vstack([first, heads[:-1, 2:]])
    salts = before[:, :2] if header.rest is None else header.rest[:2]
    summed = np.hstack([frames[:, :8], frames[:, _FRAME_HEADER_BYTES:]])
    words = summed.view(f"{header.order}u4").astype(np.uint32)
    sums = _checksums(words, before[:, 2:])
    is_current = (heads[:, 2:4] == salts).all(axis=1)
    is_sound = is_current & (sums == heads[:, 4:]).all(axis=1)
    if is_sound.all():
        return None
    wrong = int(np.argmin(is_sound))
    # A frame may also follow one of which only the checksum is wrong.
    sums = _checksums(words, np.vstack([first[2:], sums[:-1]]))
    is_sound |= is_current & (sums == heads[:, 4:]).all(axis=1)
    is_sound[wrong] = False
    # A sound frame tells that the one before it was written as it stands there, or nearly so.
    is_written = is_sound | np.append(is_sound[1:], [False])
    commits = np.flatnonzero((heads[:, 1] != 0) & is_written)
    commits = commits[commits >= wrong]
    if not commits.size or not is_sound[commits[0] + 1 :].any():
        return None
    return _HEADER_BYTES + wrong * size


def _checksums(words: _Words, before: _Words) -> _Words:
    """SQLite's checksums of rows of words, each of them going on from the two words before it."""
    weights, of_before = _weights(words.shape[1])
    return words @ weights + before @ of_before


@cache
def _weights(num_words: int) -> tuple[_Words, _Words]:
    """What each word, and each word of the checksum before them, adds to the two of the checksum.

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


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
