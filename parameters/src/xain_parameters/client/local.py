"""A parameter server in threads of this process, for notebooks and tests."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from xain_parameters.client import asynchronous, sync
from xain_parameters.client.connecting import TIMEOUT_S, connect_sync
from xain_parameters.handlers import Handler, answer_nothing
from xain_parameters.node.server import ParameterServer
from xain_parameters.scheduler.journal import Journal
from xain_parameters.scheduler.service import SchedulerServer
from xain_parameters.scheduler.state import Settings

# A program that computes may hold the interpreter for seconds. Its servers are then silent, and not
# dead.
LEASE_S = 10.0


class LocalGroup:
    """A scheduler and servers on loopback ports, from construction to close().

    shards: servers. replicas: backups of each range. log: servers write what they acknowledge to
    disk. checkpoint_interval: in clocks; 0: on demand.
    folder: for journal, logs and checkpoints; None: one that is removed at the end.
    handler, scheduler_handler: answer requests at each server and at the scheduler, see
        ParameterServer.
    """

    def __init__(
        self,
        shards: int = 2,
        replicas: int = 0,
        *,
        log: bool = False,
        checkpoint_interval: int = 0,
        folder: Path | None = None,
        handler: Handler = answer_nothing,
        scheduler_handler: Handler = answer_nothing,
    ) -> None:
        with ExitStack() as stack:
            if folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            checkpoints = folder / "checkpoints"
            checkpoints.mkdir(parents=True, exist_ok=True)
            settings = Settings(
                num_replicas=replicas,
                has_log=log,
                checkpoint_interval=checkpoint_interval,
                checkpoints=checkpoints.as_uri(),
            )
            journal = Journal(folder / "journal.sqlite")
            scheduler = stack.enter_context(
                SchedulerServer(journal, settings, lease_s=LEASE_S, handler=scheduler_handler)
            )
            self.target: str = scheduler.target
            self.servers = [
                stack.enter_context(
                    ParameterServer(
                        self.target,
                        f"s{i}",
                        folder=folder / f"s{i}" if log else None,
                        handler=handler,
                    )
                )
                for i in range(shards)
            ]
            # The scheduler ends before the servers: else it would warn of each, and roll back.
            stack.callback(scheduler.stop)
            self._stack = stack.pop_all()

    def connect(
        self,
        worker: str = "w0",
        *,
        job: str | None = None,
        workers: int | None = None,
        rank: int | None = None,
        timeout_s: float = TIMEOUT_S,
        handler: Handler = answer_nothing,
    ) -> sync.Server:
        return connect_sync(
            self.target,
            worker=worker,
            job=job,
            workers=workers,
            rank=rank,
            timeout_s=timeout_s,
            handler=handler,
        )

    def close(self) -> None:
        """Stop all servers and the scheduler. A second call does nothing."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LocalServer(sync.Server):
    """The only worker of a group, which ends with it."""

    def __init__(self, group: LocalGroup) -> None:
        self._group = group
        super().__init__(group.connect()._core)

    def close(self) -> None:
        super().close()
        self._group.close()


def local_sync(shards: int = 2, replicas: int = 0, *, log: bool = False) -> sync.Server:
    """A worker with a parameter server of its own, for `with`. LocalGroup takes several workers."""
    group = LocalGroup(shards, replicas, log=log)
    try:
        return _LocalServer(group)
    except BaseException:  # no other code closes the group
        group.close()
        raise


def local(shards: int = 2, replicas: int = 0, *, log: bool = False) -> asynchronous.Server:
    """The same, for `async with`."""
    return asynchronous.Server(lambda is_over, handler: local_sync(shards, replicas, log=log))
