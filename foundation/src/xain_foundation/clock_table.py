"""How far apart workers may be: the clock table behind BSP, SSP and ASP.

A worker's clock is the number of iterations, or rounds, that it has behind it. One whose clock is c
works on the next one as long as the slowest worker is at most `staleness` behind it, and waits
otherwise. So a worker at clock c builds on the work of all workers before clock c - staleness, and
the slowest never waits.

BSP, bulk synchronous parallel, is a staleness of 0: nobody begins the next iteration before all
have ended this one. SSP, stale synchronous parallel, is any other number. ASP, asynchronous
parallel, knows no limit.

Source: Ho et al. 2013, More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server, section 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ClockTable:
    """Clocks of the workers. Each change makes a new table; the old one stays as it is.

    staleness: s, not negative; None for no limit.
    slowest: the smallest clock; None if the table is empty.
    Raises ValueError if the staleness is negative.
    """

    clocks: Mapping[str, int]
    staleness: int | None
    # Looked for once in every table, since whether a worker may work is asked far more often than
    # a clock advances. A new table is a copy anyway; the search makes it a few times as long,
    # microseconds for hundreds of workers.
    slowest: int | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"the staleness must not be negative, got {self.staleness}")
        object.__setattr__(self, "slowest", min(self.clocks.values(), default=None))

    def admits(self, clock: int) -> bool:
        """Whether a worker with this clock, in the table or not, may work. If not, the worker waits
        until the slowest worker has advanced or has left."""
        if self.staleness is None or self.slowest is None:
            return True
        return clock - self.slowest <= self.staleness

    def with_clock(self, worker: str, clock: int) -> "ClockTable":
        """Add a worker, or change its clock, which may be smaller after a rollback."""
        return ClockTable({**self.clocks, worker: clock}, self.staleness)

    def without(self, worker: str) -> "ClockTable":
        """Remove a worker that has left; no other worker waits for it any more."""
        clocks = {name: clock for name, clock in self.clocks.items() if name != worker}
        return ClockTable(clocks, self.staleness)

    def ticked(self, worker: str) -> "ClockTable":
        """Advance the clock of a worker by one. Raises KeyError if it is not in the table."""
        return self.with_clock(worker, self.clocks[worker] + 1)
