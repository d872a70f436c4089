"""Connect a worker to the scheduler and, by its view, to the servers."""

from collections.abc import Callable
from typing import Final

from xain_foundation.security.tls import Certificates
from xain_parameters.client import asynchronous, sync
from xain_parameters.client.core import Core
from xain_parameters.handlers import Handler, answer_nothing
from xain_parameters.scheduler.worker_client import WorkerScheduler
from xain_parameters.specs import check_job_name, check_num_workers

TIMEOUT_S: Final = 60.0


def connect(
    target: str,
    *,
    worker: str,
    job: str | None = None,
    workers: int | None = None,
    rank: int | None = None,
    timeout_s: float = TIMEOUT_S,
    tls: Certificates | None = None,
    insecure: bool = False,
    handler: asynchronous.AsyncHandler = answer_nothing,
) -> asynchronous.Server:
    """Connect a worker to the parameter server, for `async with`.

    target: "HOST:PORT" of the scheduler. worker: a name that no other living worker has; a process
    that takes the place of one goes on under its name.
    job: the training that this worker is part of: its tables, clocks and checkpoints are of this
        job. 1 to 64 letters, digits, "_", "-" and ".". None: the job of the first table that the
        worker declares or finds, among those of workers that name none.
    workers: the size of the job's group, the same at all of its workers. This worker has a rank in
        it, 0 to workers - 1, which it keeps when it is started again under its name, and the first
        clock waits for all. None: it has no rank. rank: the one that a new worker asks for, and has
        if it is free; None: the lowest that is.
    timeout_s: of connecting and of each call, whatever fails meanwhile; then it raises Unavailable.
        clocks() has no timeout: it waits for other workers, and for a scheduler that is away.
    tls: None: nothing is encrypted. insecure: without `tls` also on another machine.
    handler: answers requests that workers send to this one, see Server.send: takes a Request,
        returns a text or None, in a thread, one call at a time. Also a coroutine function, which
        runs in this event loop.
    Raises Unavailable, Evicted if a living worker keeps the name all this time, Invalid for a name
    that no job may have and for another size than the job's workers before gave, and ValueError for
    another machine with neither tls nor insecure.
    """
    return asynchronous.Server(
        lambda is_over, handler: _connect(
            target,
            worker,
            job,
            (workers, rank),
            timeout_s,
            tls,
            is_over,
            handler,
            insecure=insecure,
        ),
        handler,
    )


def connect_sync(
    target: str,
    *,
    worker: str,
    job: str | None = None,
    workers: int | None = None,
    rank: int | None = None,
    timeout_s: float = TIMEOUT_S,
    tls: Certificates | None = None,
    insecure: bool = False,
    handler: Handler = answer_nothing,
) -> sync.Server:
    """Connect to the parameter server, for `with`; see connect(). handler: a plain function."""
    return _connect(
        target,
        worker,
        job,
        (workers, rank),
        timeout_s,
        tls,
        lambda: False,
        handler,
        insecure=insecure,
    )


def _connect(
    target: str,
    worker: str,
    job: str | None,
    group: tuple[int | None, int | None],
    timeout_s: float,
    tls: Certificates | None,
    is_over: Callable[[], bool],
    handler: Handler,
    *,
    insecure: bool,
) -> sync.Server:
    """Join the scheduler at target as a worker.

    group: its size and the rank in it. is_over: asked meanwhile; raises Closed once it is true.
    """
    workers, rank = group
    if job is not None:
        check_job_name(job)
    if workers is not None:
        check_num_workers(workers)
    scheduler = WorkerScheduler(
        target,
        worker,
        tls,
        job,
        num_workers=workers,
        rank=rank,
        insecure=insecure,
        handler=handler,
    )
    try:
        scheduler.join(timeout_s, is_over)
    except BaseException:  # no other code closes it
        scheduler.close()
        raise
    return sync.Server(Core(scheduler, timeout_s, tls))
