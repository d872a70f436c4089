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

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xain_coordinator.ports import JournalError

_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_MAGIC = 0x377F0682  # checksums are of little-endian words; with the lowest bit set, of big-endian
_PAGE_BYTES = 4096  # of our journals; for a log whose header cannot be read

# Read at a time. A log is as large as the largest transaction, such as the journal's new format.
_BLOCK_BYTES = 4 << 20

_Words = NDArray[np.uint32]


def require_sound_log(database: Path) -> None:
    """Refuse the write-ahead log of a database if transactions would be lost to damage. Raises
    JournalError and OSError. Changes nothing, and may run beside a process that writes."""
    path = database.with_name(f"{database.name}-wal")
    found = _find_damage(path)
    while found is not None:
        again = _find_damage(path)
        if again == found:
            offset, _ = found
            raise JournalError(
                f"the write-ahead log {path} is damaged at byte {offset}, and SQLite would drop "
                "what was acknowledged after it; restore the journal and its log from a backup. "
                f"To go on without what came after, run: truncate -s {offset} {path}",
                "damaged",
            )
        found = again  # another process is writing it


def _find_damage(path: Path) -> tuple[int, str] | None:
    """The offset of the first wrong header or frame that committed transactions follow, and the
    digest of the log. None if there is no log, or it is sound or torn at its end. Raises OSError.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    heads = [np.empty((0, 6), np.uint32)]  # the header of each frame
    sums = [np.empty((0, 2), np.uint32)]  # what each frame adds to the checksum
    with file:
        start = file.read(_HEADER_BYTES)
        header = _sound_header(start)
        page_bytes = _PAGE_BYTES if header is None else int(header[2])
        order = "<" if header is None else _order(header)
        size = _FRAME_HEADER_BYTES + page_bytes
        digest = xxhash.xxh3_128(start)
        while block := file.read(max(1, _BLOCK_BYTES // size) * size):
            digest.update(block)
            num_frames = len(block) // size  # half a frame is torn
            frames = np.frombuffer(block, np.uint8, num_frames * size).reshape(num_frames, size)
            head = frames[:, :_FRAME_HEADER_BYTES]
            heads.append(head.copy().view(">u4").astype(np.uint32))
            summed = np.hstack([head[:, :8], frames[:, _FRAME_HEADER_BYTES:]])
            sums.append(_sums(summed.view(f"{order}u4").astype(np.uint32, copy=False)))
    if header is not None:
        wrong = _wrong_frame(header, page_bytes, np.vstack(heads), np.vstack(sums))
        return None if wrong is None else (_HEADER_BYTES + wrong * size, digest.hexdigest())
    # SQLite syncs the header before the first frame, so that no power cut tears it before frames.
    salts = np.vstack(heads)[:, 2:4]
    is_written = (salts[1:] == salts[:-1]).all(axis=1) & salts[1:].any(axis=1)
    return (0, digest.hexdigest()) if is_written.any() else None


def _sound_header(start: bytes) -> _Words | None:
    """The words of a log's header: magic, version, page size, checkpoint, two of salts and two of
    the checksum. None if it is damaged."""
    if len(start) < _HEADER_BYTES:
        return None
    words = np.frombuffer(start, ">u4").astype(np.uint32)
    summed = np.frombuffer(start, f"{_order(words)}u4", 6).astype(np.uint32)
    is_sound = int(words[0]) & ~1 == _MAGIC and (_sums(summed[None])[0] == words[6:]).all()
    return words if is_sound else None


def _order(header: _Words) -> str:
    """Order of the bytes of the words that are summed."""
    return ">" if header[0] & 1 else "<"


def _wrong_frame(header: _Words, page_bytes: int, heads: _Words, sums: _Words) -> int | None:
    """The number of the first wrong frame that committed transactions follow; None without one."""
    if len(heads) < 2:
        return None
    _, carried = _weights((8 + page_bytes) // 4)
    # Salts and checksum of the frame before; of the first frame, those of the header.
    before = np.vstack([header[4:], heads[:-1, 2:]])
    is_current = (heads[:, 2:4] == header[4:6]).all(axis=1)
    expected = sums + before[:, 2:] @ carried
    is_sound = is_current & (expected == heads[:, 4:]).all(axis=1)
    if is_sound.all():
        return None
    wrong = int(np.argmin(is_sound))
    # A frame may also follow one of which only the checksum is wrong.
    expected = sums + np.vstack([header[6:], expected[:-1]]) @ carried
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
    The checksum (s, t) of two more words (x, y) is (s + t + x, t + y + s + t + x), modulo 2**32."""
    weights = np.zeros((num_words, 2), np.uint32)
    step = np.array([[1, 1], [1, 2]], np.uint32)  # what s and t add to the next s and t
    power: NDArray[Any] = np.eye(2, dtype=np.uint32)
    for start in range(num_words - 2, -1, -2):
        weights[start] = power @ np.array([1, 1], np.uint32)
        weights[start + 1] = power @ np.array([0, 1], np.uint32)
        power = power @ step
    return weights, power.T
