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
from heapq import heappop, heappush
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from xain_parameters.client.core import Ticket
from xain_parameters.client.cuts import whole_numbers
from xain_parameters.client.requests import KnownMessages
from xain_parameters.client.sync import Server, Table
from xain_parameters.errors import Closed, Invalid, Unavailable
from xain_parameters.handlers import SERVERS
from xain_parameters.keys import KEY_DTYPE, is_ascending
from xain_parameters.tables.initialisers import Initialiser, Zeros
from xain_parameters.tables.part import is_finite
from xain_parameters.tables.rules import Add, Rule

SHORT_KEYS: Final = 4096  # a request for more is large

Array: TypeAlias = NDArray[Any]
Callback: TypeAlias = Callable[[], None]
# For each number of values: the keys that have as many, and the positions of their values.
_Some: TypeAlias = slice | NDArray[np.intp]
_Groups: TypeAlias = list[tuple[int, _Some, _Some]]
_Pushes: TypeAlias = list[tuple[Table, Ticket]]  # a table and a ticket for each group


class KVWorker:
    """Pushes and pulls of keys and values, each with a timestamp to wait for.

    app_id: workers of the same app_id share their values; several may be in one process.
    update, init: of all values, as in Server.table; ps-lite's servers add.

    Values lie one key after another in a flat array: as many for each key, or lens[i] for keys[i].
    Keys of different lengths have nothing to do with each other.
    Requests run side by side, those of higher priority first; wait for one before another that
    depends on it. A small one that nobody has begun runs in the thread that waits for it.
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
        self._core = server._core
        # Its tables depend on the lengths of values: which comes first does not choose the job.
        self._core.scheduler.enter()
        self._app_id = app_id
        self._update = update
        self._init = init
        self._dtype = np.dtype(dtype)
        self._tables: dict[int, Table] = {}
        self._declaring = threading.Lock()
        self._timestamps = itertools.count()
        self._lock = threading.Lock()  # of the queue, too
        self._requests: dict[int, _Request] = {}
        self._ended: deque[int] = deque()  # timestamps of the last requests that have ended
        self._forgotten = -1  # the highest timestamp of a failed request whose error was dropped
        self._queue = _Queue(self._lock, self._note_end)

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
        array = _flat_keys(keys)
        values = self._flat_values(vals)
        groups = _group_keys(len(array), lens, len(values))
        known = self._known_messages(array, groups)
        pushes = self._numbered(groups)
        return self._begin(
            lambda: self._push(array, values, groups, pushes, known),
            callback,
            priority,
            lambda: self._drop(pushes),
            is_short=len(array) <= SHORT_KEYS and len(groups) == 1,
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
        array = _flat_keys(keys)
        if isinstance(lens, int):
            lengths, size = None, lens * len(array)
        else:
            lengths = np.asarray(lens)
            size = int(np.sum(lengths, dtype=np.int64))
        out = None if vals is None else self._flat_values(vals)
        if lengths is None and out is not None and len(out) != size:
            raise Invalid(f"{len(out)} values for {len(array)} keys of {lens} each")
        groups = _group_keys(len(array), lengths, size if out is None else len(out))
        known = self._known_messages(array, groups)
        if out is None and len(groups) != 1:
            out = np.empty(size, self._dtype)
        is_known = len(groups) == 1 and groups[0][0] in self._tables
        return self._begin(
            lambda: self._pull(array, groups, out, known),
            callback,
            priority,
            is_short=len(array) <= SHORT_KEYS and is_known,
        )

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
        array = _flat_keys(keys)
        values = self._flat_values(vals)
        groups = _group_keys(len(array), lens, len(values))
        known = self._known_messages(array, groups)
        out = np.empty(len(values), self._dtype) if outs is None else self._flat_values(outs)
        if len(out) != len(values):
            raise Invalid(f"outs has {len(out)} values, vals {len(values)}")
        pushes = self._numbered(groups)

        def work() -> Any:
            self._push(array, values, groups, pushes, known)
            return self._pull(array, groups, out, known)

        return self._begin(work, callback, priority, lambda: self._drop(pushes))

    def wait(self, timestamp: int, timeout_s: float | None = None) -> Any:
        """Wait until a request has ended; returns its values, its answers, or None for a push.

        timeout_s: None: that of the connection.
        Raises what the request failed with, and Unavailable after timeout_s, whereafter it may be
        waited for again. A timestamp that was waited for is None again, and so is one that max_kept
        others have ended after. But once the error of such a request is dropped that was not waited
        for, wait raises Unavailable for its timestamp and all below whose results are not kept
        either.
        """
        longest_s = self._core.timeout_s
        timeout_s = longest_s if timeout_s is None else timeout_s
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
        # All of it is one call, so it ends as early as wait has to.
        if request.is_short and timeout_s >= longest_s:
            self._queue.run_now(request)
        if not request.is_done and not request.wait(timeout_s):
            raise Unavailable(f"request {timestamp} has no answer after {timeout_s:g} s")
        self._requests.pop(timestamp, None)
        if request.error is not None:
            raise request.error
        return request.result

    def request(
        self,
        head: int,
        body: str = "",
        group: str = SERVERS,
        *,
        callback: Callback | None = None,
        priority: int = 0,
    ) -> int:
        """Begin a request to the handlers of a group or of a member, see Server.send; returns its
        timestamp, for which wait returns the answers by name."""
        return self._begin(lambda: self._server.send(group, head, body), callback, priority)

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
        drop: Callback | None = None,
        *,
        is_short: bool = False,
    ) -> int:
        """Queue a request; returns its timestamp. is_short: the work is one call for few keys."""
        timestamp = next(self._timestamps)
        request = _Request(timestamp, work, callback, drop, is_short)
        self._requests[timestamp] = request
        self._queue.put(priority, request)
        return timestamp

    def _note_end(self, request: "_Request") -> None:
        """Count a request as ended, and drop the oldest of too many. Called under the lock."""
        self._ended.append(request.timestamp)
        if len(self._ended) > self.max_kept:
            dropped = self._ended.popleft()
            oldest = self._requests.pop(dropped, None)
            if oldest is not None and oldest.error is not None:
                self._forgotten = max(self._forgotten, dropped)

    def _numbered(self, groups: _Groups) -> _Pushes:
        tables = [self._table(dim) for dim, _, _ in groups]
        return [(table, self._core.push_ticket(table.spec)) for table in tables]

    def _known_messages(self, keys: Array, groups: _Groups) -> KnownMessages | None:
        """Return the messages of a list of keys that has come lately; None for another list, which
        must be unique and ascending: raises Invalid."""
        known = None
        table = self._tables.get(groups[0][0]) if len(groups) == 1 else None
        if table is not None and keys.dtype == KEY_DTYPE:
            known = self._core.known_messages(table.spec, keys)
        if known is None and not is_ascending(keys):
            raise Invalid("keys must be unique and ascending")
        return known

    def _push(
        self,
        keys: Array,
        values: Array,
        groups: _Groups,
        pushes: _Pushes,
        known: KnownMessages | None,
    ) -> None:
        """Push to the table of each length, one after the other, until one push fails."""
        done = 0
        try:
            if len(groups) > 1 and not is_finite(values):
                raise Invalid(f"app {self._app_id}: a pushed value is not finite")
            for (table, ticket), (dim, which, where) in zip(pushes, groups, strict=True):
                done += 1
                rows = values[where].reshape(-1, dim)
                self._core.push_keys(table.spec, ticket, keys[which], rows, known)
        finally:
            self._drop(pushes[done:])

    def _drop(self, pushes: _Pushes) -> None:
        """Drop pushes that will never begin, so that the clock does not wait for them."""
        for _, ticket in pushes:
            self._core.answered(ticket, None)

    def _pull(
        self, keys: Array, groups: _Groups, out: Array | None, known: KnownMessages | None
    ) -> Any:
        """Pull the groups of keys into `out`, and return it; None: return the only group's rows."""
        core = self._core
        for dim, which, where in groups:
            table = self._table(dim)
            rows = core.pull_keys(table.spec, core.pull_ticket(), keys[which], known).reshape(-1)
            if out is None:
                return rows
            out[where] = rows
        return out

    def _table(self, dim: int) -> Table:
        """Return the table for values of a length, declared when it is first needed."""
        with self._declaring:
            if dim not in self._tables:
                name = f"kv{self._app_id}/{dim}"
                self._tables[dim] = self._server.table(
                    name, dim, update=self._update, init=self._init, dtype=self._dtype
                )
            return self._tables[dim]

    def _flat_values(self, vals: object) -> Array:
        values = np.asarray(vals)
        if values.dtype != self._dtype or values.ndim != 1:
            raise Invalid(f"values are a flat array of {self._dtype}, not {values.dtype}")
        return values


def _flat_keys(keys: ArrayLike) -> Array:
    array = whole_numbers(keys)
    if array.ndim != 1:
        raise Invalid(f"keys are a flat array, not one of shape {array.shape}")
    return array


def _group_keys(num_keys: int, lens: Sequence[int] | Array | None, num_values: int) -> _Groups:
    """Group keys by the length of their values: length, positions of keys, those of values."""
    if not num_keys:
        if num_values:
            raise Invalid(f"{num_values} values for no keys")
        return []
    if lens is None:
        if num_values % num_keys or num_values < 1:
            raise Invalid(
                f"{num_values} values for {num_keys} keys: as many for each, or pass lens"
            )
        return [(num_values // num_keys, slice(None), slice(None))]
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


class _Request:
    """A request, from its begin to its end.

    work: returns what wait() returns. drop: called instead of it, if it never begins.
    """

    __slots__ = (
        "_callback",
        "_drop",
        "_ended",
        "_work",
        "error",
        "is_done",
        "is_short",
        "result",
        "timestamp",
    )

    def __init__(
        self,
        timestamp: int,
        work: Callable[[], Any],
        callback: Callback | None,
        drop: Callback | None,
        is_short: bool,
    ) -> None:
        self.timestamp = timestamp
        self._work = work
        self._callback = callback
        self._drop = drop
        # A callback runs in a thread of the worker, never in the one that waits.
        self.is_short = is_short and callback is None
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def run(self) -> None:
        try:
            self.result = self._work()
            if self._callback is not None:
                self._callback()
        except BaseException as error:  # of a callback, too; wait() raises it
            self.result, self.error = None, error

    def drop(self) -> None:
        """Fail the request before it has begun."""
        if self._drop is not None:
            self._drop()
        self.error = Closed("the worker was closed")

    def wait(self, timeout_s: float) -> bool:
        """Wait until the request has ended; returns whether it has."""
        if self._ended.acquire(timeout=max(0.0, timeout_s)):
            self._ended.release()  # for others that wait
        return self.is_done

    def end(self) -> None:
        self.is_done = True
        self._ended.release()


class _Queue:
    """Runs requests in a few threads: of those that wait, the one of the highest priority first,
    and among equals the one that came first.

    A short request that comes alone is left for hold_s to the thread that waits for it: to have
    another thread run it takes two changes of threads, which is most of its time.

    on_end: called under the lock with each request that has ended.
    """

    num_threads = 4
    hold_s = 0.001
    awake_s = 0.1  # after a short request a thread looks every hold_s, and need not be woken

    def __init__(self, lock: threading.Lock, on_end: Callable[[_Request], None]) -> None:
        self._on_end = on_end
        self._waiting: list[tuple[float, int, _Request]] = []  # a heap
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._threads: list[threading.Thread] = []
        self._num_running = 0
        self._num_asleep = 0  # threads that wait to be woken
        self._is_looking = False  # a thread wakes by itself, after hold_s at the latest
        self._due = 0.0  # when threads may run what waits
        self._came = 0.0
        self._is_closed = False

    def put(self, priority: int, request: _Request) -> None:
        """Queue a request and wake a thread, unless wait() may soon run it itself."""
        with self._lock:
            if not self._is_closed:
                is_alone = request.is_short and not self._waiting
                self._came = time.monotonic()
                self._due = self._came + self.hold_s if is_alone else 0.0
                heappush(self._waiting, (-priority, request.timestamp, request))
                if not is_alone or not self._is_looking:
                    self._call_thread()
                return
        self._drop_request(request)

    def run_now(self, request: _Request) -> None:
        """Run a request in this thread, if it is the next one and no thread has it."""
        with self._lock:
            waiting = self._waiting
            if not waiting or waiting[0][2] is not request or not self._has_room:
                return
            heappop(waiting)
            self._num_running += 1
        self._run(request)

    def close(self, timeout_s: float = 5.0) -> None:
        with self._lock:
            self._is_closed = True
            dropped, self._waiting = self._waiting, []
            self._changed.notify_all()
        for _, _, request in dropped:
            self._drop_request(request)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def _has_room(self) -> bool:
        return self._num_running < self.num_threads

    def _run(self, request: _Request) -> None:
        """Run a request that counts as running, note its end, and wake a thread for others."""
        try:
            request.run()
        finally:
            with self._lock:
                self._num_running -= 1
                self._on_end(request)
                request.end()
                if self._waiting:
                    self._call_thread()

    def _drop_request(self, request: _Request) -> None:
        request.drop()
        with self._lock:
            self._on_end(request)
            request.end()

    def _call_thread(self) -> None:
        """Have a thread look at what waits. Called under the lock."""
        if self._num_asleep:
            self._changed.notify()
        elif len(self._threads) < self.num_threads:
            thread = threading.Thread(target=self._work, name="kv", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (request := self._await_next()) is not None:
            self._run(request)
            del request

    def _await_next(self) -> _Request | None:
        """Wait for the next request that may run, and take it out; None once it is closed."""
        with self._lock:
            while not self._is_closed:
                now = time.monotonic()
                if self._waiting and self._has_room and now >= self._due:
                    self._num_running += 1
                    request = heappop(self._waiting)[2]
                    if self._waiting:
                        self._call_thread()
                    return request
                is_looking = not self._is_looking and now < self._came + self.awake_s
                self._is_looking |= is_looking
                self._num_asleep += 1
                self._changed.wait(self.hold_s if is_looking else None)
                self._num_asleep -= 1
                self._is_looking &= not is_looking
        return None
