"""Connect a worker to the scheduler and, by its view, to the servers."""

from typing import Final

from xain_parameters.client import asynchronous, sync
from xain_parameters.client.core import Core
from xain_parameters.scheduler.client import WorkerScheduler

TIMEOUT_S: Final = 60.0


def connect(target: str, *, worker: str, timeout_s: float = TIMEOUT_S) -> asynchronous.Server:
    """The parameter server, for `async with`.

    target: "HOST:PORT" of the scheduler. worker: a name that no other living worker has; a process
    that takes the place of one goes on under its name.
    timeout_s: of each call, whatever fails meanwhile; then it raises Unavailable.
    """
    return asynchronous.Server(lambda: connect_sync(target, worker=worker, timeout_s=timeout_s))


def connect_sync(target: str, *, worker: str, timeout_s: float = TIMEOUT_S) -> sync.Server:
    """The same, for `with` and programs without an event loop."""
    scheduler = WorkerScheduler(target, worker)
    scheduler.join(timeout_s)
    return sync.Server(Core(scheduler, timeout_s))
