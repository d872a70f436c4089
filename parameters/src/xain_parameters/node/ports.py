"""The ports of a server node: methods of the process around it."""

from collections.abc import Hashable
from typing import NamedTuple, Protocol

from xain_parameters.messages import Message
from xain_parameters.specs import RangeView, View


class Source(NamedTuple):
    """The sender of a message. connection: tells its connections apart; messages of one connection
    are in order and none is missing, until it breaks."""

    name: str
    connection: Hashable
    incarnation: int = 0


class RangeLog(Protocol):
    """The log of a range at a server: a segment on disk, and while a new one is begun two. No
    method blocks. What is durable is told by ServerNode.synced."""

    def append(self, message: Message) -> None:
        """Add a record to the segment, and to the new one if there is one."""

    def begin(self, range_: RangeView, generation: int) -> int:
        """Begin a new segment; an unfinished one is dropped. Returns the number of the segment;
        later ones have higher numbers."""
        ...

    def append_next(self, message: Message) -> None:
        """Add a record to the new segment only."""

    def abandon(self) -> None:
        """Drop the new segment, if there is one."""

    def finish(self, message: Message) -> None:
        """Add the record Whole to the new segment, which takes the place of the old one."""

    def wants_new_segment(self) -> bool:
        """Tell whether the segment has grown so much that a new one is worth its cost."""
        ...

    def drop(self) -> None:
        """Remove the log: the range is no longer here."""


class Host(Protocol):
    """Messages, logs, files and reports, as a server node uses them. No method blocks."""

    def emit(self, destination: Source | str, message: Message) -> None:
        """Send a message: back on the connection of a source, or to a server by its name. Where it
        cannot be sent, ServerNode.lost is called for that server."""

    def open_log(self, range_: int) -> RangeLog | None:
        """Open the log of a range; None in a group without logs."""

    def load(self, range_: RangeView, view: View) -> None:
        """Read a range from the checkpoint that the view was rolled back to, and call
        ServerNode.loaded."""

    def save(self, range_: int, view: View) -> None:
        """Write the part of a range of the view's checkpoint, as ServerNode.read_cut gives it."""

    def report_returned(self, generation: int, has: dict[int, int], lacks: dict[int, int]) -> None:
        """Tell the scheduler which of the ranges without a server this one has, and which not: the
        epoch of each in the view."""

    def report_whole(self, range_: int, epoch: int, server: str) -> None:
        """Tell the scheduler that a learner has everything, and that this primary acknowledges
        nothing without it."""
