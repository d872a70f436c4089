"""A reader that takes its contract at its word."""

from xain_coordinator.stores.memory import MemoryReader


class StrictReader(MemoryReader):
    """Reads within the object only: beyond its end, S3 answers with an error."""

    def read(self, offset: int, length: int) -> bytes:
        assert 0 <= offset < offset + length <= self.size
        return super().read(offset, length)
