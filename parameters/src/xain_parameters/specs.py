"""What the scheduler tells servers and workers: tables, key ranges, who serves them, who works.

Plain values that msgspec encodes. A newer view has the higher (generation, number); no server goes
back to an older one.
"""

from typing import Any

import msgspec

from xain_parameters.keys import Range


class Plugin(msgspec.Struct, frozen=True):
    """An update rule or an initialiser by name, with its parameters."""

    name: str
    options: dict[str, float | int | str | bool] = {}


class TableSpec(msgspec.Struct, frozen=True):
    """A declared table.

    number: given by the scheduler, from 1 on; requests carry it.
    bound: keys are 0 to bound - 1; None: any 64-bit key, rows are made when they are first seen.
        A dense array is a table whose bound is its number of rows and whose rows all exist.
    dim: values in a row.
    dtype: "float32" or "float64".
    """

    number: int
    name: str
    bound: int | None
    dim: int
    is_dense: bool
    dtype: str
    update: Plugin
    init: Plugin
    shape: tuple[int, ...] = ()  # of a dense array, as its caller sees it; its rows are shape[0]


class RangeView(msgspec.Struct, frozen=True):
    """Who has a key range.

    number: identifies the range; a range that is split ends, and two new numbers begin.
    servers: names; the first is the primary, the others are backups that have everything. Empty:
        the range waits for a server.
    learners: servers that are being filled, and become backups when they have everything.
    epoch: raised whenever servers or learners change. A server refuses what comes with a lower one.
    """

    number: int
    start: int
    stop: int
    epoch: int
    servers: tuple[str, ...]
    learners: tuple[str, ...] = ()
    parent: int = 0  # the range that it was split off from; its servers have the data already

    @property
    def range(self) -> Range:
        return Range(self.start, self.stop)


class WorkerView(msgspec.Struct, frozen=True):
    """A worker.

    ticked: clocks that it has completed; its pushes of those clocks count, and no others of a
        worker that has ended.
    is_live: whether it is counted by barriers.
    """

    ticked: int
    is_live: bool


class View(msgspec.Struct, frozen=True):
    """The state of the group.

    generation: raised when all tables are rolled back to a checkpoint, or a new scheduler begins.
    number: raised by every other change.
    addresses: "HOST:PORT" of the servers, by name.
    workers: those that have ended since the last rollback, so that servers know what of theirs
        counts; live ones are not listed, since they change with every clock.
    rolled_back_to: the checkpoint that this generation began from; None: it began empty.
    """

    generation: int
    number: int
    tables: tuple[TableSpec, ...]
    ranges: tuple[RangeView, ...]
    addresses: dict[str, str]
    ended: dict[str, int] = {}
    rolled_back_to: int | None = None

    @property
    def version(self) -> tuple[int, int]:
        return self.generation, self.number

    def table(self, number: int) -> TableSpec | None:
        return next((each for each in self.tables if each.number == number), None)


def encoded(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


decode_view = msgspec.msgpack.Decoder(View).decode
decode_table = msgspec.msgpack.Decoder(TableSpec).decode
