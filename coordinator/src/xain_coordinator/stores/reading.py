"""Read an object of a store piece by piece."""

from collections.abc import Iterator

from xain_coordinator.ports import Reader, StoreError

CHUNK_BYTES = 1 << 20  # of weights in a message
READ_BYTES = 8 << 20  # of weights in a read: a store far away takes as long for less


def chunks(reader: Reader, offset: int = 0) -> Iterator[bytes]:
    """The object from an offset to its end, in pieces of READ_BYTES. Raises StoreError."""
    while offset < reader.size:
        chunk = reader.read(offset, READ_BYTES)
        if not chunk:  # another program has cut the file
            raise StoreError(f"the object ends at byte {offset} of {reader.size}")
        offset += len(chunk)
        yield chunk
