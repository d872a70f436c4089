"""Closing of readers, shared by all stores."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class ClosedAtEnd(ABC):
    """Base of readers that are closed at the end of a `with`."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
