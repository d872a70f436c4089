"""Pushes that a key range has taken, so that the same again changes nothing."""

import msgspec

from xain_parameters.messages import Entry, Push

# A worker whose last push is so many clocks before the one that is opened is forgotten.
KNOWN_CLOCKS = 100

PushKey = tuple[int, int]  # (table, part) of a push; worker and clock stand before it


class Known(msgspec.Struct):
    """Pushes of a worker that have been taken, so that the same again changes nothing.

    clock, parts: its newest clock and the parts of it; all parts of older clocks are known.
    loose: parts of pushes outside of clocks, from `settled` on, by the process `incarnation`.
    cut: the last mark that it passed.
    """

    clock: int = -1
    parts: set[PushKey] = set()
    incarnation: int = 0
    settled: int = 0
    loose: set[PushKey] = set()
    cut: int = 0

    def has(self, push: Push) -> bool:
        """Tell whether a push of this worker has been taken."""
        key = (push.table, push.part)
        if push.clock >= 0:
            return push.clock < self.clock or (push.clock == self.clock and key in self.parts)
        return push.incarnation == self.incarnation and (
            push.part < self.settled or key in self.loose
        )

    def add(self, entry: Entry | Push) -> None:
        """Record a push, or the entry of one."""
        push = (entry.table, entry.part)
        if entry.clock >= 0:
            if entry.clock > self.clock:
                self.clock, self.parts = entry.clock, set()
            self.parts.add(push)
            return
        if entry.incarnation > self.incarnation:
            self.incarnation, self.settled, self.loose = entry.incarnation, 0, set()
        if entry.settled > self.settled:
            self.settled = entry.settled
            self.loose = {each for each in self.loose if each[1] >= entry.settled}
        self.loose.add(push)

    def merge(self, other: "Known") -> None:
        """Record what another range knows of this worker. A push of its newest clock is known if
        one of the two knows it."""
        if other.clock > self.clock:
            self.clock, self.parts = other.clock, other.parts
        elif other.clock == self.clock:
            self.parts |= other.parts
        if other.incarnation > self.incarnation:
            self.incarnation, self.loose = other.incarnation, other.loose
            self.settled = other.settled
        elif other.incarnation == self.incarnation:
            self.loose |= other.loose
            self.settled = max(self.settled, other.settled)
        self.cut = max(self.cut, other.cut)

    def is_recent(self, opened: int) -> bool:
        """Tell whether the worker has to be remembered when clock `opened` is opened. A push of a
        closed clock changes nothing, known or not; the latest pushes are still answered."""
        return self.clock >= opened - KNOWN_CLOCKS or bool(self.incarnation)
