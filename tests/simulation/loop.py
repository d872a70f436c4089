"""asyncio's event loop on virtual time, and the threads that a coordinator's work runs in.

Callbacks that are ready run in the order in which they became so, which asyncio promises. Work for
a thread is one step that happens some time later, and its result comes later still: in between, the
process may have died, before the work, or after it and before anybody has heard of it.
"""

import asyncio
import contextvars
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar

from simulation.hub import Hub, Killed, Process

T = TypeVar("T")

TIMER_LATE_S = 1e-6


class VirtualLoop(asyncio.AbstractEventLoop):
    """The loop of one process.

    work_s: how long work for a thread waits, or its result, by chance.
    """

    def __init__(self, hub: Hub, process: Process, work_s: Callable[[], float]) -> None:
        self._hub = hub
        self._process = process
        self._work_s = work_s
        # Futures of work in which the process died. Waiting code lives until they are dropped.
        self._unheard: list[asyncio.Future[Any]] = []

    # --- what asyncio's futures, tasks and handles ask of their loop ---

    def time(self) -> float:
        return self._hub.now * self._process.clock_rate

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._hub.soon(self._process, lambda: self._run(handle))
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        # No timer is early, and none is exact; the time that a callback takes is not simulated.
        when = max(when / self._process.clock_rate, self._hub.now) + TIMER_LATE_S
        self._hub.at(when, self._process, lambda: self._run(handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Asked for by TimerHandle; `_run` looks whether it is cancelled."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            result: T | None = None
            error: BaseException | None = None
            try:
                result = func(*args)
            except BaseException as raised:  # whatever it is, it is the caller's
                error = raised
            if not self._process.is_alive:
                self._unheard.append(future)
                return
            assert not isinstance(error, Killed), f"{self._process.name} lives"

            def deliver() -> None:
                if future.cancelled():
                    return
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)

            self._hub.after(self._work_s(), self._process, deliver)

        self._hub.after(self._work_s(), self._process, work)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._process.is_alive:
            return  # what a dead process leaves behind
        error = context.get("exception")
        self._hub.fail(f"{self._process.name}: {context['message']}: {error!r}")

    # --- running ---

    def _run(self, handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        with _Running(self):
            handle._run()

    def start(self, main: Coroutine[Any, Any, Any]) -> None:
        """Begin with this coroutine."""
        with _Running(self):
            self.create_task(main)

    def bury(self) -> None:
        """The process is dead: end its coroutines, so that nothing of them is left. What they still
        do on their way out has no effect."""
        assert not self._process.is_alive
        with _Running(self):
            # What they begin on their way is ended in its turn.
            while tasks := asyncio.all_tasks(self):
                for task in tasks:
                    _end(task)

    def _finalise(self, generator: AsyncGenerator[Any, Any]) -> None:
        """An unfinished async generator is about to go."""
        if self._process.is_alive:
            self.create_task(generator.aclose())


def _end(task: asyncio.Task[Any]) -> None:
    task._log_destroy_pending = False
    coroutine: Any = task.get_coro()
    # Thrown, not closed: closing does not reach into async generators. And closed, as not all that
    # is thrown is let through. What the code under test raises then does not count.
    if coroutine.cr_await is not None:
        with suppress(Exception, Killed, asyncio.CancelledError):
            coroutine.throw(Killed)
    with suppress(Exception, Killed, asyncio.CancelledError):
        coroutine.close()
    asyncio.tasks._unregister_task(task)


class _Running:
    """The loop whose callback is being run, as asyncio knows it; None: none."""

    def __init__(self, loop: VirtualLoop | None) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)
        if self._loop is not None:
            self._hooks = sys.get_asyncgen_hooks()
            sys.set_asyncgen_hooks(finalizer=self._loop._finalise)

    def __exit__(self, *_: object) -> None:
        asyncio._set_running_loop(self._before)
        if self._loop is not None:
            sys.set_asyncgen_hooks(*self._hooks)
