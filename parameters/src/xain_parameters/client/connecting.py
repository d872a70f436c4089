"""Connect a worker to the scheduler and, by its view, to the servers."""

from collections.abc import Callable
from typing import Final

from xain_parameters.certificates import Certificates
from xain_parameters.client import asynchronous, sync
from xain_parameters.client.core import Core
from xain_parameters.scheduler.worker_client import WorkerScheduler

TIMEOUT_S: Final = 60.0


def connect(
    target: str, *, worker: str, timeout_s: float = TIMEOUT_S, tls: Certificates | None = None
) -> asynchronous.Server:
    """The parameter server, for `async with`.

    target: "HOST:PORT" of the scheduler. worker: a name that no other living worker has; a process
    that takes the place of one goes on under its name.
    timeout_s: of connecting and of each call, whatever fails meanwhile; then it raises Unavailable.
        clocks() has no timeout: it waits for other workers, and for a scheduler that is away.
    tls: None: nothing is encrypted.
    Raises Unavailable, and Evicted if a living worker keeps the name all this time.
    """
    return asynchronous.Server(lambda is_over: _connected(target, worker, timeout_s, tls, is_over))


def connect_sync(
    target: str, *, worker: str, timeout_s: float = TIMEOUT_S, tls: Certificates | None = None
) -> sync.Server:
    """The same, for `with` and programs without an event loop."""
    return _connected(target, worker, timeout_s, tls, lambda: False)


def _connected(
    target: str,
    worker: str,
    timeout_s: float,
    tls: Certificates | None,
    is_over: Callable[[], bool],
) -> sync.Server:
    """is_over: asked while it connects; True: Closed is raised."""
    scheduler = WorkerScheduler(target, worker, tls)
    try:
        scheduler.join(timeout_s, is_over)
    except BaseException:  # no other code closes it
        scheduler.close()
        raise
    return sync.Server(Core(scheduler, timeout_s, None if tls is None else tls.connects))
