"""The asynchronous face. Each call runs in a thread of the client's own, so many may be open at
once; pushes are numbered in the order of their calls."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeAlias, TypeVar

from numpy.typing import ArrayLike, NDArray

from xain_parameters.client import sync
from xain_parameters.client.batches import Batch, Divisible, Reading
from xain_parameters.client.batches import Batches as SyncBatches
from xain_parameters.client.core import Core, Ticket
from xain_parameters.handlers import Handler, Request, answer_nothing
from xain_parameters.specs import TableSpec

NUM_THREADS: Final = 32

Array: TypeAlias = NDArray[Any]
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
AsyncHandler: TypeAlias = Handler | Callable[[Request], Coroutine[Any, Any, str | None]]


def _awaited(
    method: Callable[Concatenate[sync.Server, P], T], made: Callable[["Server", T], R]
) -> Callable[Concatenate["Server", P], Coroutine[Any, Any, R]]:
    """Make a coroutine method that runs a synchronous one in a thread. made: makes its result."""

    @functools.wraps(method)
    async def call(self: "Server", /, *arguments: P.args, **more: P.kwargs) -> R:
        return made(self, await self._run(method, self._server, *arguments, **more))

    return call


def _as_it_is(_: object, result: T) -> T:
    return result


class Server(sync.View):
    """The parameter server, as one worker sees it. Made by connect."""

    def __init__(
        self,
        make: Callable[[Callable[[], bool], Handler], sync.Server],
        handler: AsyncHandler = answer_nothing,
    ) -> None:
        """make: given a function that returns True once nobody waits for the server any more, and
        the handler as a plain function."""
        self._make = make
        self._handler = handler
        self._made: sync.Server | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="parameters")
        # Loops that were left; a thread tells the scheduler of them. Garbage collection may end a
        # loop in a thread that holds a lock of the pool, where submit() would wait for ever.
        self._left: SimpleQueue[Core | None] = SimpleQueue()

    @property
    def _server(self) -> sync.Server:
        if self._made is None:
            raise RuntimeError("connect() is used with `async with`")
        return self._made

    async def _run(self, work: Callable[..., T], *arguments: Any, **more: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, functools.partial(work, *arguments, **more)
        )

    async def _push(self, ticket: Ticket, work: Callable[..., None], *arguments: Any) -> None:
        """Run a push in a thread. A push that is cancelled before it begins counts as answered."""
        begun = self._threads.submit(work, *arguments)
        try:
            await asyncio.wrap_future(begun)
        except asyncio.CancelledError:
            if begun.cancelled():  # before a thread was free for it
                self._core.answered(ticket, None)
            raise

    @property
    def _core(self) -> Core:
        return self._server._core

    dense = _awaited(sync.Server.dense, lambda server, made: Dense(server, made))
    table = _awaited(sync.Server.table, lambda server, made: Table(server, made))
    find = _awaited(
        sync.Server.find,
        lambda server, made: (
            Dense(server, made) if isinstance(made, sync.Dense) else Table(server, made)
        ),
    )
    barrier = _awaited(sync.Server.barrier, _as_it_is)
    checkpoint = _awaited(sync.Server.checkpoint, _as_it_is)
    send = _awaited(sync.Server.send, _as_it_is)

    def clocks(
        self, staleness: int | None = 0, *, workers: int | None = None, stop: int | None = None
    ) -> AsyncIterator[int]:
        """Iterate over the clocks of this worker; see sync.Server.clocks."""
        return _Clocks(self, self._core, staleness, workers, stop)

    def batches(
        self,
        data: Divisible,
        epochs: int,
        staleness: int | None = 0,
        *,
        name: str | None = None,
    ) -> "Batches":
        """Iterate over the batches of this worker; see sync.Server.batches."""
        return Batches(self, lambda: self._server.batches(data, epochs, staleness, name=name))

    async def close(self) -> None:
        """End all calls, also those that wait."""
        made, self._made = self._made, None
        if made is not None:
            try:
                await asyncio.to_thread(made.close)
            finally:
                self._left.put(None)
        await asyncio.to_thread(self._threads.shutdown)

    async def __aenter__(self) -> Self:
        has_given_up = threading.Event()
        loop = asyncio.get_running_loop()

        def handle(request: Request) -> str | None:
            answer = self._handler(request)
            if isinstance(answer, Coroutine):
                return asyncio.run_coroutine_threadsafe(answer, loop).result()
            return answer

        making = self._threads.submit(self._make, has_given_up.is_set, handle)
        try:
            self._made = await asyncio.wrap_future(making)
        except BaseException:  # on cancellation, too
            has_given_up.set()
            making.add_done_callback(_close_made)  # the thread may have made it already
            self._threads.shutdown(wait=False)
            raise
        threading.Thread(target=_tell_ends, args=(self._left,), daemon=True).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _close_made(making: Future[sync.Server]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().close()


def _tell_ends(left: "SimpleQueue[Core | None]") -> None:
    while (core := left.get()) is not None:
        core.tell_end()


class _Clocks:
    """The clocks of a loop. An iterator instead of a generator: Python drops one that a loop has
    left at once, which ends it, so that no other waits for this worker."""

    def __init__(
        self,
        server: Server,
        core: Core,
        staleness: int | None,
        workers: int | None,
        stop: int | None,
    ) -> None:
        self._server = server
        self._core = core
        self._staleness = staleness
        self._workers = 1 if workers is None else workers
        self._stop = stop
        self._loop = 0  # in the core; 0 before the first clock
        self._has_ended = False

    def __aiter__(self) -> "_Clocks":
        return self

    async def __anext__(self) -> int:
        """Complete the clock, and begin the next one; any error ends the loop."""
        if self._has_ended:
            raise StopAsyncIteration
        core, run = self._core, self._server._run
        try:
            if self._loop:
                clock = await run(core.next_clock, self._loop)
            else:
                self._loop = core.enter_clocks(self._staleness)
                clock = await run(
                    core.begin_clocks, self._loop, self._staleness, self._workers, self._stop
                )
        except BaseException:  # on cancellation, too, the loop ends
            self._end()
            raise
        if self._stop is not None and clock >= self._stop:
            self._has_ended = True
            await run(core.end_clocks, self._loop)
            raise StopAsyncIteration
        return clock

    def _end(self) -> None:
        """Leave the loop at once, and have a thread tell the scheduler."""
        self._has_ended = True
        if self._core.leave_clocks(self._loop):
            self._server._left.put(self._core)

    def __del__(self) -> None:
        self._end()


class Batches:
    """See client.batches.Batches; an iterator for the reason that _Clocks is one."""

    def __init__(self, server: Server, make: Callable[[], SyncBatches]) -> None:
        self._server = server
        self._make = make
        self._made: SyncBatches | None = None

    def __aiter__(self) -> "Batches":
        return self

    async def __anext__(self) -> Batch:
        try:
            if self._made is None:
                self._made = await self._server._run(self._make)
            batch = await self._server._run(self._made.next)
        except BaseException:  # on cancellation, too, the loop ends
            self._end()
            raise
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def reading(self) -> Reading:
        """See client.batches.Batches.reading."""
        assert self._made is not None, "the batches come first"
        return await self._server._run(self._made.reading)

    def _end(self) -> None:
        if self._made is not None and self._made.abandon():
            self._server._left.put(self._server._core)

    def __del__(self) -> None:
        self._end()


class Dense:
    """See sync.Dense."""

    def __init__(self, server: Server, made: sync.Dense) -> None:
        self._server = server
        self._made = made

    @property
    def spec(self) -> TableSpec:
        return self._made.spec

    async def pull(self, out: Array | None = None) -> Array:
        core = self._made._core
        return await self._server._run(core.pull_rows, self.spec, core.pull_ticket(), out)

    async def push(self, values: Array) -> None:
        core = self._made._core
        ticket = core.push_ticket(self.spec)
        await self._server._push(ticket, core.push_rows, self.spec, ticket, values)

    get = pull
    add = push


class Table:
    """See sync.Table."""

    def __init__(self, server: Server, made: sync.Table) -> None:
        self._server = server
        self._made = made

    @property
    def spec(self) -> TableSpec:
        return self._made.spec

    async def pull(self, ids: ArrayLike) -> Array:
        core = self._made._core
        return await self._server._run(core.pull_keys, self.spec, core.pull_ticket(), ids)

    async def push(self, ids: ArrayLike, values: Array) -> None:
        core = self._made._core
        ticket = core.push_ticket(self.spec)
        await self._server._push(ticket, core.push_keys, self.spec, ticket, ids, values)

    get = pull
    add = push
