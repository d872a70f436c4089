"""Read an object of a store piece by piece."""

from collections.abc import Iterator

from xain_coordinator.ports import Reader

CHUNK_BYTES = 1 << 20  # of weights in a message
READ_BYTES = 8 << 20  # of weights in a read: a store far away takes as long for less


def chunks(reader: Reader, offset: int = 0) -> Iterator[bytes]:
    """The object from an offset to its end, in pieces of READ_BYTES."""
    while offset < reader.size:
        chunk = reader.read(offset, READ_BYTES)
        offset += len(chunk)
        yield chunk
