"""The coordinator: rounds, aggregation, recovery, and the servers around them.

    from xain_coordinator import Coordinator

is a coordinator to embed; see process/embedding.py.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xain_coordinator.process.embedding import Coordinator

__all__ = ["Coordinator"]


def __getattr__(name: str) -> Any:
    """Import the coordinator when it is asked for: a command need not wait for it."""
    if name == "Coordinator":
        from xain_coordinator.process.embedding import Coordinator

        return Coordinator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
