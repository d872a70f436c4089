"""The parts of a job's data: which worker reads which, epoch by epoch.

In each epoch the data are divided into as many parts as there are workers, and the worker of rank r
has part r. What a worker leaves unread when it is gone is read by the next that has read its own.
How far a part is read is no matter of the scheduler: that is noted at the servers beside the model,
in the same clock as the gradients, so that a rollback takes both back.
"""

from collections.abc import Callable, Iterator
from typing import Final

import msgspec
from msgspec.structs import replace

# The next epoch begins before all workers have read their parts of the last one, since parts are
# not alike; and no later one.
MAX_OPEN_EPOCHS: Final = 2


class Source(msgspec.Struct, frozen=True, array_like=True):
    """The data of a job, which all of its workers must have the same.

    size: in bytes or rows. fingerprint: below 2**53; equal for equal data. num_epochs: passes over
    the data, the most that a worker has asked for.
    """

    size: int
    fingerprint: int
    num_epochs: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    """holder: the worker that reads it, or has read it."""

    holder: str
    is_done: bool = False


class Data(msgspec.Struct, frozen=True):
    """The data of a job, or one of several.

    epochs: the parts of each epoch that has begun, and that a rollback may take back.
    num_begun: epochs that have begun. divisions: (first epoch, number of parts from it on).
    """

    source: Source
    epochs: dict[int, tuple[Part, ...]] = {}
    num_begun: int = 0
    divisions: tuple[tuple[int, int], ...] = ()

    @property
    def num_done(self) -> int:
        """The number of epochs, from 0 on, all of whose parts are read."""
        return next((epoch for epoch, _, _ in self.open_parts()), self.num_begun)

    def open_parts(self) -> Iterator[tuple[int, int, Part]]:
        """Yield epoch and index of the parts that are not read yet, in their order."""
        for epoch in sorted(self.epochs):
            for index, part in enumerate(self.epochs[epoch]):
                if not part.is_done:
                    yield epoch, index, part

    def part_of(self, worker: str) -> tuple[int, int] | None:
        """Epoch and index of the part that a worker reads now."""
        return next(((e, i) for e, i, part in self.open_parts() if part.holder == worker), None)

    def part_left(self, is_gone: Callable[[str], bool]) -> tuple[int, int] | None:
        """Epoch and index of the first part whose holder is gone."""
        return next(((e, i) for e, i, part in self.open_parts() if is_gone(part.holder)), None)

    def may_begin(self) -> bool:
        """Tell whether the next epoch may begin."""
        is_last = self.num_begun >= self.source.num_epochs
        return not is_last and self.num_begun - self.num_done < MAX_OPEN_EPOCHS

    def with_part(self, epoch: int, index: int, part: Part) -> "Data":
        parts = self.epochs[epoch]
        return replace(
            self, epochs={**self.epochs, epoch: (*parts[:index], part, *parts[index + 1 :])}
        )

    def with_epoch(self, workers: list[str], keep_from: int) -> "Data":
        """Return the data with one more epoch. workers: by rank. keep_from: the first epoch that a
        rollback may go back to."""
        epoch = self.num_begun
        least = min(keep_from, self.num_done)
        epochs = {number: parts for number, parts in self.epochs.items() if number >= least}
        divisions = self.divisions
        if not divisions or divisions[-1][1] != len(workers):
            divisions = (*divisions, (epoch, len(workers)))
        return replace(
            self,
            epochs={**epochs, epoch: tuple(map(Part, workers))},
            num_begun=epoch + 1,
            divisions=divisions,
        )

    def reopened(self, epoch: int) -> "Data":
        """The data after a rollback to a checkpoint that was begun in an epoch: parts of it and of
        later ones may be unread again."""
        return replace(
            self,
            epochs={
                number: tuple(replace(part, is_done=False) for part in parts)
                for number, parts in self.epochs.items()
                if number >= epoch
            },
        )

    def parts_in(self, epoch: int) -> int:
        """The number of parts of an epoch that has begun."""
        return parts_in(self.divisions, epoch)


def parts_in(divisions: tuple[tuple[int, int], ...], epoch: int) -> int:
    """The number of parts of an epoch that has begun."""
    return next(num for first, num in reversed(divisions) if first <= epoch)
