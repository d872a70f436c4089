"""Lines of text files by ranges of bytes: each line is of the range in which it begins."""

from collections.abc import Iterator

from xain_workloads.errors import DataError
from xain_workloads.sources.parts import Part, read_bytes

BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 20
_LINE_BYTES = 64 << 10  # read first where the end of a line is looked for


def blocks(
    part: Part, start: int, stop: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[int, bytes]]:
    """Whole lines that begin in bytes [start, stop), about block_bytes at a time, each block with
    its offset in the file. Raises DataError."""
    position = start
    if position:  # a line that began before is of the range before
        position += len(line_at(part, position - 1)) - 1
    while position < stop:
        block = read_bytes(part, position, min(position + block_bytes, stop))
        if not block:
            break
        if not block.endswith(b"\n"):
            block += line_at(part, position + len(block))
        if len(block) > block_bytes + MAX_LINE_BYTES:
            raise _too_long(part, position)
        yield position, block
        position += len(block)


def line_at(part: Part, start: int) -> bytes:
    """The bytes of a file from `start` to the end of the line, or of the file. Raises DataError."""
    line = b""
    while not line.endswith(b"\n"):
        begin = start + len(line)
        more = read_bytes(part, begin, begin + max(_LINE_BYTES, len(line)))
        if not more:
            break
        line += more[: more.find(b"\n") + 1 or None]
        if len(line) > MAX_LINE_BYTES:
            raise _too_long(part, start)
    return line


def _too_long(part: Part, position: int) -> DataError:
    return DataError(
        f"{part.path}: a line behind byte {position} has more than {MAX_LINE_BYTES} bytes"
    )
