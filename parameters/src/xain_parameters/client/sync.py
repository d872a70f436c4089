"""The synchronous face: see client.asynchronous, which has the same names.

with parameters.connect_sync("HOST:50052", worker="w3") as server:
    w = server.dense("w", shape=(785, 10), update=Adam(1e-3))
    for clock in server.clocks(staleness=2, stop=100):
        x = w.pull()
        w.push(gradient(x))
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from xain_parameters.client.batches import Batches, Divisible
from xain_parameters.client.core import Core
from xain_parameters.scheduler.client import Among
from xain_parameters.specs import Plugin, Staleness, TableSpec
from xain_parameters.tables.initialisers import Initialiser, Zeros
from xain_parameters.tables.rules import Add, Rule

Array: TypeAlias = NDArray[Any]


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """(number of rows, values in a row) of a dense array of this shape."""
    if not shape:
        return 1, 1
    return shape[0], int(np.prod(shape[1:], dtype=np.int64))


class View(ABC):
    """The view of the group that both faces have."""

    @property
    @abstractmethod
    def _core(self) -> Core: ...

    @property
    def worker(self) -> str:
        return self._core.scheduler.worker

    @property
    def rank(self) -> int | None:
        """The rank of this worker in its job's group, from 0 on, as of the newest view. None: it
        gave no `workers`, has no job yet, or all ranks are taken."""
        return self._core.scheduler.view.ranks.get(self.worker)

    @property
    def num_workers(self) -> int:
        """The size of the job's group; 0: no worker has given one."""
        return self._core.scheduler.view.num_workers

    @property
    def servers(self) -> list[str]:
        """Names of the servers that there are now."""
        return sorted(self._core.scheduler.view.addresses)


class Server(View):
    """The parameter server, as one worker sees it. Made by connect_sync."""

    def __init__(self, core: Core) -> None:
        self._own = core

    @property
    def _core(self) -> Core:
        return self._own

    def dense(
        self,
        name: str,
        shape: int | tuple[int, ...],
        *,
        update: Rule = Add(),  # noqa: B008  a value
        init: Initialiser = Zeros(),  # noqa: B008  a value
        dtype: DTypeLike = np.float32,
        staleness: Staleness = "loop",
    ) -> "Dense":
        """Declare a dense array, or find it where it was declared the same. It is spread over the
        servers by its first axis. Raises TableConflict where it was declared otherwise.

        staleness: of this array in a loop over clocks; "loop": that of the loop. 0: a pull sees
            exactly the clocks before. s: all but the last s of them, and other pushes that have
            come; None: what has come. A pull waits for clocks that the loop has not waited for.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        num_rows, dim = rows_of(shape)
        spec = TableSpec(
            number=0,
            name=name,
            bound=num_rows,
            dim=dim,
            is_dense=True,
            dtype=np.dtype(dtype).name,
            update=Plugin.of(update),
            init=Plugin.of(init),
            shape=shape,
            staleness=staleness,
        )
        return Dense(self._core, self._core.declare(spec))

    def table(
        self,
        name: str,
        dim: int,
        *,
        update: Rule = Add(),  # noqa: B008  # immutable
        init: Initialiser = Zeros(),  # noqa: B008  # immutable
        bound: int | None = None,
        dtype: DTypeLike = np.float32,
        staleness: Staleness = "loop",
    ) -> "Table":
        """Declare a table whose rows are made when their keys are first pulled or pushed.

        bound: keys are 0 to bound - 1, and are found faster; None: any 64-bit key.
        staleness: see dense().
        """
        spec = TableSpec(
            number=0,
            name=name,
            bound=bound,
            dim=dim,
            is_dense=False,
            dtype=np.dtype(dtype).name,
            update=Plugin.of(update),
            init=Plugin.of(init),
            staleness=staleness,
        )
        return Table(self._core, self._core.declare(spec))

    def find(self, name: str) -> "Dense | Table":
        """The dense array or table that was declared as `name`. Raises Invalid if there is none."""
        spec = self._core.find(name)
        return Dense(self._core, spec) if spec.is_dense else Table(self._core, spec)

    def clocks(
        self, staleness: int | None = 0, *, workers: int | None = None, stop: int | None = None
    ) -> Iterator[int]:
        """Yield the clocks of this worker. Beginning the next one completes the one before, and
        waits for the others: with staleness 0 for all of them (BSP), with s until the slowest is at
        most s behind (SSP), with None for none (ASP).

        workers: wait for as many before the first. stop: end after clock stop - 1. A wait has no
        timeout; what it waits for is logged as waiting_for_workers or scheduler_away. Clocks belong
        to the group: a new worker that comes when its `stop` is over gets Invalid, and one that has
        been in a loop before a warning, no_clocks.
        A loop that is left by break, return or an error does not complete its clock: under BSP the
        pushes of that clock do not count. The next loop of this worker begins with that clock if
        the others have not gone on. It must push the same there in the same order: pushes that have
        come already are known by their numbers, and dropped. What is pushed between two loops is
        outside of clocks, and counts at once. After a loss of servers without replicas or log
        the clocks go on at that of the last checkpoint.
        """
        core = self._core
        loop = core.enter_clocks(staleness)
        try:
            clock = core.begin_clocks(loop, staleness, 1 if workers is None else workers, stop)
            while stop is None or clock < stop:
                yield clock
                clock = core.next_clock(loop)
        finally:
            core.end_clocks(loop)

    def batches(
        self,
        data: Divisible,
        epochs: int,
        staleness: int | None = 0,
        *,
        name: str | None = None,
    ) -> Batches:
        """Yield the batches of this worker, one in each clock, and each row of the data once in an
        epoch for all workers together, whoever of them comes, dies or comes back.

        The data are divided among the workers with a rank (see connect), anew in each epoch. The
        rest of a worker that is gone for a lease is read by the others. The loop ends when all
        workers have read all epochs; see Batches.reading, and the log: no_batches tells of a worker
        that had none, rows_missed of rows that were not read once.

        staleness: as in clocks(). name: of the data, where a job has several; None: that of the
        first table. Raises Invalid where other workers have data of another size or fingerprint,
        and before there is a table.
        """
        return Batches(self._core, data, epochs, staleness, name)

    def barrier(self, among: Among = "workers", timeout_s: float | None = None) -> None:
        """Wait until all workers of the job with a rank wait here, or all of these and the servers,
        which call ParameterServer.barrier. A worker that is gone for a lease is not waited for.

        Raises Invalid for a worker without a rank, and Unavailable after timeout_s.
        """
        self._core.barrier(among, timeout_s)

    def checkpoint(self) -> int:
        """Make a checkpoint of all tables, and return its number when it is whole."""
        return self._core.checkpoint()

    def send(
        self, to: str | int, head: int = 0, body: str = "", *, timeout_s: float | None = None
    ) -> dict[str, str]:
        """Send a request to the handlers of members of the group, and gather their answers, by
        name.

        to: "servers", "workers" (of this worker's job, itself too), "scheduler", "all" of these, or
            the name of a server or of a worker of the job, or the rank of one.
        head, body: a number and a text, of 60 KiB in UTF-8 at most, for the handler; None of it
            means anything to the group. A member without a handler answers "".
        timeout_s: None: that of connect().
        Each member does a request once, however often connections break; a server or scheduler that
        was killed and started again may do it again, and so may a member that has answered 64
        others meanwhile. A request whose time is over may still be done.
        Raises RequestFailed, which names those that did not answer or whose handlers raised an
        error, and has the answers of the others; Invalid for a body that is too long, and where no
        server and no worker has the name or the rank; Unavailable where there is no server.
        """
        return self._core.send(to, head, body, timeout_s)

    def close(self) -> None:
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Dense:
    """A dense array, all of whose values exist."""

    def __init__(self, core: Core, spec: TableSpec) -> None:
        self._core = core
        self.spec = spec

    def pull(self, out: Array | None = None) -> Array:
        """out: C-contiguous array of its shape and dtype that is filled and returned."""
        return self._core.pull_rows(self.spec, self._core.pull_ticket(), out)

    def push(self, values: Array) -> None:
        """Push values to all rows; returns when the push is as durable as the group promises.

        Raises Invalid for another shape or dtype, or values that are not finite; then nothing has
        changed.
        """
        self._core.push_rows(self.spec, self._core.push_ticket(self.spec), values)

    get = pull
    add = push


class Table:
    """Rows by key."""

    def __init__(self, core: Core, spec: TableSpec) -> None:
        self._core = core
        self.spec = spec

    def pull(self, ids: ArrayLike) -> Array:
        """The rows of ids, in their order, (*ids.shape, dim). ids: integers in any order; the same
        may come several times."""
        return self._core.pull_keys(self.spec, self._core.pull_ticket(), ids)

    def push(self, ids: ArrayLike, values: Array) -> None:
        """values: (*ids.shape, dim), or as ids with dim 1. Values of the same id are added up."""
        self._core.push_keys(self.spec, self._core.push_ticket(self.spec), ids, values)

    get = pull
    add = push
