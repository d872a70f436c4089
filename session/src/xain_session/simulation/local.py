"""Workers as processes of this machine."""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

import cloudpickle  # type: ignore[import-untyped]  # it has no types

from xain_foundation.backends.port import BackendError, Call
from xain_foundation.logs import streams
from xain_participant.config import ENV_PREFIX

STOP_S = 10.0


class LocalBackend:
    """Spawned processes. num_workers: that will be started, which share the processors."""

    host = "127.0.0.1"

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._processes: dict[Connection, SpawnProcess] = {}

    def start(self, name: str, call: Call) -> None:
        """Start a process that makes a call. Raises BackendError."""
        context = multiprocessing.get_context("spawn")
        call = _for_another_process(call)
        threads = max(1, (os.cpu_count() or 1) // self._num_workers)
        before = os.environ.get("OMP_NUM_THREADS")
        # torch and numpy read the variable when the worker imports them, before it runs any code.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        ours, theirs = context.Pipe()
        try:
            process = context.Process(target=_work, args=(call, theirs), name=name, daemon=True)
            process.start()
        finally:
            theirs.close()
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
        self._processes[ours] = process

    def wait(self, timeout_s: float) -> Mapping[str, str]:
        """Wait so long for processes to end. Returns what their calls have returned, by name.
        Raises BackendError."""
        ended = {}
        for pipe in wait(list(self._processes), timeout_s):
            assert isinstance(pipe, Connection)
            process = self._processes.pop(pipe)
            try:
                ended[process.name] = str(pipe.recv())
            except EOFError:
                process.join()
                why = f"{process.name} has died with status {process.exitcode}"
                raise BackendError(why, died=process.name) from None
            process.join(STOP_S)  # it ends by itself
            self._stop([process])
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(list(self._processes.values()))
        self._processes.clear()

    def _stop(self, processes: list[SpawnProcess]) -> None:
        """Terminate processes, and kill those that do not end in STOP_S."""
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join()


class _ByValue:
    """A call that other processes cannot import: pickled, it becomes its own code."""

    def __init__(self, call: Call) -> None:
        self._data = cloudpickle.dumps(call)

    def __reduce__(self) -> tuple[Any, ...]:
        # Only workers are given it, through the pipe in which multiprocessing gives them the rest.
        return cloudpickle.loads, (self._data,)

    def __call__(self) -> str:
        raise AssertionError("workers have the function itself")


def _for_another_process(call: Call) -> Call:
    """The call as a process can be given it: its functions by their names, or else, as in a
    notebook, by their code. Raises BackendError if neither works."""
    try:
        if hasattr(sys.modules["__main__"], "__file__"):
            with contextlib.suppress(Exception):  # whatever a reducer of the caller's raises
                ForkingPickler.dumps(call)
                return call
        return _ByValue(call)
    except Exception as error:  # a reducer of the caller's may raise anything
        raise BackendError(
            f"main cannot be given to another process ({error}); define it at the top of a module, "
            "not within a function or a notebook"
        ) from None


def _work(call: Call, pipe: Connection) -> None:
    """Run a worker, and tell the parent how it has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops us
    streams.unblock()  # what main() prints holds up no round

    def end(*_: object) -> None:
        streams.close()
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        del os.environ[name]  # a setting of one participant, such as its name
    result = call()
    with contextlib.suppress(OSError):  # the parent has gone, and takes us with it
        pipe.send(result)
