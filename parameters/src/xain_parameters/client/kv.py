"""ps-lite's layer: sorted unique keys, timestamps, callbacks, priorities, commands.

Source: reference of ps-lite's KVWorker and SimpleApp. Other than there: keys that are not ascending
are refused, a wait has a timeout, the last key 2**64 - 1 works, and an error of a request is raised
by wait.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, PriorityQueue
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from xain_parameters.client.core import Ticket
from xain_parameters.client.cuts import is_ascending, whole_numbers
from xain_parameters.client.sync import Server, Table
from xain_parameters.errors import Closed, Invalid, Unavailable
from xain_parameters.tables.initialisers import Initialiser, Zeros
from xain_parameters.tables.part import is_finite
from xain_parameters.tables.rules import Add, Rule

SERVERS: Final = "servers"  # the group of all servers

Array: TypeAlias = NDArray[Any]
Callback: TypeAlias = Callable[[], None]
# For each number of values: the keys that have as many, and the positions of their values.
_Groups: TypeAlias = list[tuple[int, NDArray[np.intp], NDArray[np.intp]]]
_Pushes: TypeAlias = list[tuple[Table, Ticket]]  # a table and a ticket for each group


class KVWorker:
    """Pushes and pulls of keys and values, each with a timestamp to wait for.

    app_id: workers of the same app_id share their values; several may be in one process.
    update, init: of all values, as in Server.table; ps-lite's servers add.

    Values lie one key after another in a flat array: as many for each key, or lens[i] for keys[i].
    Keys of different lengths have nothing to do with each other.
    Requests run side by side, those of higher priority first; wait for one before another that
    depends on it.
    """

    max_kept = 1000  # requests that have ended, whose values and errors are kept for wait()

    def __init__(
        self,
        server: Server,
        app_id: int = 0,
        *,
        update: Rule = Add(),  # noqa: B008  a value
        init: Initialiser = Zeros(),  # noqa: B008  a value
        dtype: DTypeLike = np.float32,
    ) -> None:
        self._server = server
        self._app_id = app_id
        self._update = update
        self._init = init
        self._dtype = np.dtype(dtype)
        self._lock = threading.Lock()
        self._tables: dict[int, Table] = {}
        self._timestamps = itertools.count()
        self._requests: dict[int, Future[Any]] = {}
        self._ended: deque[int] = deque()  # timestamps of the last requests that have ended
        self._forgotten = -1  # the highest timestamp of a failed request whose error was dropped
        self._queue = _Queue()

    def push(
        self,
        keys: ArrayLike,
        vals: Array,
        lens: Sequence[int] | None = None,
        *,
        callback: Callback | None = None,
        priority: int = 0,
    ) -> int:
        """Begin a push; returns its timestamp. The arrays must not change until wait has returned.

        keys: unique and ascending. callback: called in a thread of the worker just before wait
        returns; not if the push fails. Raises Invalid at once for what cannot be right.
        """
        checked = _keys(keys)
        values = self._values(vals)
        groups = _groups(len(checked), lens, len(values))
        pushes = self._numbered(groups)
        return self._begin(
            lambda: self._push(checked, values, groups, pushes),
            callback,
            priority,
            lambda: self._drop(pushes),
        )

    def pull(
        self,
        keys: ArrayLike,
        vals: Array | None = None,
        lens: Sequence[int] | int = 1,
        *,
        callback: Callback | None = None,
        priority: int = 0,
    ) -> int:
        """Begin a pull and return its timestamp, for which wait returns the values, flat.

        lens: values of each key, or of every key. vals: filled with the values; its size must be
        theirs.
        """
        checked = _keys(keys)
        lengths = np.full(len(checked), lens) if isinstance(lens, int) else np.asarray(lens)
        size = int(np.sum(lengths, dtype=np.int64))
        out = np.empty(size, self._dtype) if vals is None else self._values(vals)
        groups = _groups(len(checked), lengths, len(out))
        return self._begin(lambda: self._pull(checked, groups, out), callback, priority)

    def push_pull(
        self,
        keys: ArrayLike,
        vals: Array,
        outs: Array | None = None,
        lens: Sequence[int] | None = None,
        *,
        callback: Callback | None = None,
        priority: int = 0,
    ) -> int:
        """Begin a push and, after it, a pull of the same keys; returns a timestamp, for which wait
        returns the values after the push."""
        checked = _keys(keys)
        values = self._values(vals)
        groups = _groups(len(checked), lens, len(values))
        out = np.empty(len(values), self._dtype) if outs is None else self._values(outs)
        if len(out) != len(values):
            raise Invalid(f"outs has {len(out)} values, vals {len(values)}")
        pushes = self._numbered(groups)

        def work() -> Array:
            self._push(checked, values, groups, pushes)
            return self._pull(checked, groups, out)

        return self._begin(work, callback, priority, lambda: self._drop(pushes))

    def wait(self, timestamp: int, timeout_s: float = 60.0) -> Any:
        """Wait until a request has ended; returns its values, its answers, or None for a push.

        Raises what the request failed with, and Unavailable after timeout_s, whereafter it may be
        waited for again. A timestamp that was waited for is None again, and so is one that max_kept
        others have ended after. But once the error of such a request is dropped that was not waited
        for, wait raises Unavailable for its timestamp and all below whose results are not kept
        either.
        """
        with self._lock:
            request = self._requests.get(timestamp)
            forgotten = self._forgotten
        if request is None:
            if timestamp <= forgotten:
                raise Unavailable(
                    f"request {timestamp}: its outcome is not known any more; more than "
                    f"{self.max_kept} requests have ended since"
                )
            return None
        try:
            result = request.result(timeout_s)
        except TimeoutError:
            if not request.done():
                text = f"request {timestamp} has no answer after {timeout_s:g} s"
                raise Unavailable(text) from None
            raise
        finally:
            if request.done():
                with self._lock:
                    self._requests.pop(timestamp, None)
        return result

    def request(
        self,
        head: int,
        body: str = "",
        group: str = SERVERS,
        *,
        callback: Callback | None = None,
        priority: int = 0,
    ) -> int:
        """Begin a command to each server of a group: all servers, or the server of that name. wait
        returns the answers by name."""
        names = self._server.servers if group == SERVERS else [group]

        def work() -> dict[str, str]:
            return {name: self._server.command(name, head, body) for name in names}

        return self._begin(work, callback, priority)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End waiting requests with Closed, and wait for those that are under way."""
        self._queue.close()

    def _begin(
        self,
        work: Callable[[], Any],
        callback: Callback | None,
        priority: int,
        drop: Callback = lambda: None,
    ) -> int:
        request: Future[Any] = Future()

        def run() -> None:
            try:
                result = work()
                if callback is not None:
                    callback()
            except BaseException as error:  # of a callback, too; wait() raises it
                self._note_end(timestamp)
                request.set_exception(error)
            else:
                self._note_end(timestamp)
                request.set_result(result)

        def end() -> None:
            drop()
            request.set_exception(Closed("the worker was closed"))

        timestamp = next(self._timestamps)
        with self._lock:
            self._requests[timestamp] = request
        self._queue.put(priority, run, end)
        return timestamp

    def _note_end(self, timestamp: int) -> None:
        with self._lock:
            self._ended.append(timestamp)
            if len(self._ended) > self.max_kept:
                dropped = self._ended.popleft()
                request = self._requests.pop(dropped, None)
                if request is not None and request.exception() is not None:
                    self._forgotten = max(self._forgotten, dropped)

    def _numbered(self, groups: _Groups) -> _Pushes:
        tables = [self._table(dim) for dim, _, _ in groups]
        return [(table, self._server._core.push_ticket(table.spec)) for table in tables]

    def _push(self, keys: Array, values: Array, groups: _Groups, pushes: _Pushes) -> None:
        """Push to the table of each length, one after the other, until one push fails."""
        done = 0
        core = self._server._core
        try:
            if len(groups) > 1 and not is_finite(values):
                raise Invalid(f"app {self._app_id}: a pushed value is not finite")
            for (table, ticket), (dim, which, where) in zip(pushes, groups, strict=True):
                done += 1
                core.push_keys(table.spec, ticket, keys[which], values[where].reshape(-1, dim))
        finally:
            self._drop(pushes[done:])

    def _drop(self, pushes: _Pushes) -> None:
        """Drop pushes that will never begin, so that the clock does not wait for them."""
        for _, ticket in pushes:
            self._server._core.answered(ticket, None)

    def _pull(self, keys: Array, groups: _Groups, out: Array) -> Array:
        core = self._server._core
        for dim, which, where in groups:
            table = self._table(dim)
            out[where] = core.pull_keys(table.spec, core.pull_ticket(), keys[which]).reshape(-1)
        return out

    def _table(self, dim: int) -> Table:
        with self._lock:
            if dim not in self._tables:
                name = f"kv{self._app_id}/{dim}"
                self._tables[dim] = self._server.table(
                    name, dim, update=self._update, init=self._init, dtype=self._dtype
                )
            return self._tables[dim]

    def _values(self, vals: object) -> Array:
        values = np.asarray(vals)
        if values.dtype != self._dtype or values.ndim != 1:
            raise Invalid(f"values are a flat array of {self._dtype}, not {values.dtype}")
        return values


def _keys(keys: ArrayLike) -> Array:
    array = whole_numbers(keys)
    if array.ndim != 1:
        raise Invalid(f"keys are a flat array, not one of shape {array.shape}")
    if not is_ascending(array):
        raise Invalid("keys must be unique and ascending")
    return array


def _groups(num_keys: int, lens: Sequence[int] | Array | None, num_values: int) -> _Groups:
    if not num_keys:
        if num_values:
            raise Invalid(f"{num_values} values for no keys")
        return []
    if lens is None:
        if num_values % num_keys or not num_values:
            raise Invalid(
                f"{num_values} values for {num_keys} keys: as many for each, or pass lens"
            )
        lengths = np.full(num_keys, num_values // num_keys)
    else:
        lengths = np.asarray(lens, np.int64)
        if len(lengths) != num_keys or (lengths < 1).any() or lengths.sum() != num_values:
            raise Invalid(f"lens must be {num_keys} positive numbers, {num_values} together")
    starts = np.cumsum(lengths) - lengths
    groups: _Groups = []
    for dim in np.unique(lengths).tolist():
        which = np.flatnonzero(lengths == dim)
        where = (starts[which][:, None] + np.arange(dim)).reshape(-1)
        groups.append((dim, which, where))
    return groups


class _Queue:
    """Runs work in a few threads: of what waits, the highest priority first, and among equals what
    came first."""

    num_threads = 4

    def __init__(self) -> None:
        self._waiting: PriorityQueue[tuple[float, int, Callback | None, Callback]] = PriorityQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def put(self, priority: int, run: Callback, end: Callback) -> None:
        """end: called in place of `run` if the queue is closed before."""
        with self._lock:
            if not self._is_closed:
                self._waiting.put((-priority, next(self._numbers), run, end))
                if len(self._threads) < self.num_threads:
                    thread = threading.Thread(target=self._work, name="kv", daemon=True)
                    self._threads.append(thread)
                    thread.start()
                return
        end()

    def close(self, timeout_s: float = 5.0) -> None:
        with self._lock:
            self._is_closed = True
            with suppress(Empty):
                while True:
                    *_, end = self._waiting.get_nowait()
                    end()
            for _ in self._threads:
                self._waiting.put((0, next(self._numbers), None, lambda: None))
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while True:
            _, _, run, _ = self._waiting.get()
            if run is None:
                return
            run()
            del run
