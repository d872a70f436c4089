"""A small pull or push to several ranges of a server, entered at once.

A server that enters one range after the other takes most of the time of a small request for that.
Here the ranges have one array, one call of the update rule and one check of what may have changed,
where nothing has to be done for one of them alone: their rows are known, their entries go to no
other server and to no log, and no checkpoint is being made. In all other cases a request changes
nothing here, and is entered range by range.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xain_parameters.messages import Pull, Push, Values
from xain_parameters.node.copy import Copy
from xain_parameters.tables.joined import JoinedRows, RowsOfPart
from xain_parameters.tables.part import Array, is_finite


class RangeRows(NamedTuple):
    """The rows of a request in one range. lock: that of the range."""

    lock: Any
    copy: Copy
    rows: RowsOfPart


class Together:
    """The rows of a request in all of its ranges, for all requests with the same ones.

    ranges: in the order of the numbers of their ranges, which locks are taken in. version: of the
        view that all of these ranges have taken. made_in: tells whether a range has got another
        role since: see ServerNode.
    """

    def __init__(
        self, ranges: Sequence[RangeRows], version: tuple[int, int], made_in: object
    ) -> None:
        self.version = version
        self.made_in = made_in
        part = ranges[0].rows.part
        num_rows = ranges[-1].rows.stop
        self._locks = [each.lock for each in ranges]
        self._copies = [each.copy for each in ranges]
        self._replicas = [each.copy.replica for each in ranges]
        self._rows = JoinedRows([each.rows for each in ranges])
        self._shape = num_rows, part.spec.dim
        self._dtype = part.dtype
        self._num_bytes = num_rows * part.row_bytes
        self._has_entries = any(
            each.copy.log is not None or not each.copy.is_alone for each in ranges
        )

    def pull(self, pull: Pull) -> Array | None:
        """The rows of a pull, (num_rows, dim); None: a range has held pushes to apply before."""
        opened = pull.opened
        for replica in self._replicas:
            if opened > replica.opened:
                return None
        return self._rows.values()

    def push(
        self, worker: str, push: Push, values: Values | None, is_current: Callable[[], bool]
    ) -> bool:
        """Take a push, if it is nothing but an update of its rows at once; returns whether it is.
        It is durable then.

        values: bytes. is_current: tells under the locks whether the ranges are as they were.
        """
        if self._has_entries or values is None or values.nbytes != self._num_bytes:
            return False
        shaped = values.view(self._dtype).reshape(self._shape)
        if not is_finite(shaped):
            return False
        locks, copies = self._locks, self._copies
        for lock in locks:
            lock.acquire()
        try:
            if not is_current():
                return False
            for copy in copies:
                if copy.is_broken or not copy.replica.takes_at_once(worker, push):
                    return False
            try:
                self._rows.update(shaped)
                for copy in copies:
                    copy.advanced(worker, push)
            except BaseException:  # it may have been applied in part
                for copy in copies:
                    copy.is_broken = True
                raise
        finally:
            for lock in locks:
                lock.release()
        return True
