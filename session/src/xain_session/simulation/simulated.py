"""Simulated participants: xain.simulated(main, 1000, workers=2).

The participants are divided among workers. All of a worker join, send heartbeats and wait for
rounds at the same time, and the worker trains one participant at a time: when a participant is
given a round, the worker calls main(site), whose loop gets this round and ends with it. So a worker
has one model at a time, however many participants it has. The code after the loop runs in a call of
its own, when the session is over.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from xain.result import SessionError
from xain_foundation.backends.port import Backend, BackendError
from xain_foundation.backends.ray_backend import RayBackend
from xain_foundation.logs import streams
from xain_foundation.net.channels import require_private_way
from xain_foundation.settings.fields import is_loopback
from xain_foundation.wheels import pip_install
from xain_session.simulation.local import LocalBackend
from xain_session.simulation.worker import Main, Worker, sites_of


@dataclass(frozen=True, slots=True)
class Simulated:
    """Participants that a session starts; see simulated()."""

    main: Main
    participants: int
    workers: int
    evaluates: bool
    backend: str
    address: str | None
    resources: Mapping[str, float] | None
    state_dir: str | None
    insecure: bool

    @property
    def settings(self) -> Mapping[str, float]:
        """Settings for the coordinator of so many participants, by dotted key: time to join, and a
        hundred heartbeats a second at most, which may come late while all processors train."""
        heartbeat_time_s = max(10.0, self.participants / 100)
        return {
            "rounds.start_participants": self.participants,
            "rounds.max_participants": self.participants,
            "rounds.start_timeout_s": max(60.0, self.participants / 20),
            "server.heartbeat_time_s": heartbeat_time_s,
            "server.heartbeat_timeout_s": 60.0 + heartbeat_time_s,
        }

    @contextlib.contextmanager
    def started(self) -> "Iterator[Workplace]":
        """Open the backend within the block, before there is a coordinator; gives the workplace.

        Raises SessionError, also if workers on other machines would call the coordinator in the
        clear, and `insecure` is not set.
        """
        streams.fill()  # before pipes to workers take their numbers
        backend = _backend_of(self.backend, self.workers, self.address, self.resources)
        with _failures_told(), backend:
            if not (is_loopback(backend.host) or self.insecure):
                raise SessionError(
                    f"workers on other machines reach this one at {backend.host}, and simulated "
                    "participants have no certificates: insecure=True lets them call the "
                    "coordinator in the clear"
                )
            yield Workplace(self, backend)

    @contextlib.contextmanager
    def running(self, target: str) -> "Iterator[Pool]":
        """Run the participants against the coordinator at HOST:PORT, until the block ends. Raises
        as started() and Workplace.run() do, and SessionError if no worker can be started."""
        with self.started() as workplace:
            yield workplace.run(target)


class Workplace:
    """A backend that workers can be started on.

    host: address at which the coordinator has to listen, so that they reach it.
    """

    def __init__(self, spec: Simulated, backend: Backend) -> None:
        self._spec = spec
        self._backend = backend
        self.host = backend.host

    def run(self, target: str) -> "Pool":
        """Start the workers. Raises ValueError if the coordinator is on another machine, and
        `insecure` is not set."""
        require_private_way(target, None, insecure=self._spec.insecure)
        spec, sites = self._spec, sites_of(self._spec.participants)
        names = [f"xain-worker-{i}" for i in range(min(spec.workers, len(sites)))]
        for i, name in enumerate(names):
            worker = Worker(
                spec.main,
                sites[i :: len(names)],
                target,
                spec.evaluates,
                spec.state_dir,
            )
            with _failures_told():
                self._backend.start(name, worker.run)
        return Pool(self._backend, set(names))


class Pool:
    """Workers that run."""

    def __init__(self, backend: Backend, running: set[str]) -> None:
        self._backend = backend
        self._running = running

    @property
    def is_over(self) -> bool:
        """Whether the session is over for all participants, and the code after their loops has
        run."""
        return not self._running

    def check(self, timeout_s: float) -> None:
        """Wait so long for a worker to end. Raises SessionError if main() or a worker has
        failed."""
        with _failures_told():
            ended = self._backend.wait(timeout_s)
        for name, failure in ended.items():
            self._running.discard(name)
            if failure:
                raise SessionError(failure)


def simulated(
    main: Main,
    participants: int,
    *,
    backend: str = "local",
    workers: int = 2,
    evaluates: bool = False,
    address: str | None = None,
    resources: Mapping[str, float] | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    insecure: bool = False,
) -> Simulated:
    """Describe participants that run a script's main(site), for xain.session().

    main: a function of a module, with a loop over xain.rounds(). It is called anew for every round
        that a site is given, and is left with that round: what must last from round to round goes
        into round.state. When the session is over it is called once more for each site, with a loop
        that has no round, so that the code after the loop runs, which has rounds.result.
    workers: processes that train. evaluates: as in xain.rounds().
    backend: "local", processes of this machine, or "ray", actors of a cluster.
    address, resources: for Ray: of the cluster, by default "auto", and of each worker, such as
        {"num_cpus": 1, "num_gpus": 0.25}.
    state_dir: folder that keeps round.state when a worker or the script is lost; of all machines of
        the cluster. By default it is in memory.
    insecure: whether participants on another machine may call the coordinator in the clear.

    In a script, use it under `if __name__ == "__main__":`, as workers import the script anew.
    Raises ValueError for numbers that make no sense, and for a setting that the backend does not
    take; SessionError in a worker.
    """
    if multiprocessing.parent_process() is not None:
        raise SessionError(
            "participants are simulated by the script that runs them; put it under "
            'if __name__ == "__main__":'
        )
    if workers < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1")
    if participants < 1:
        raise ValueError(f"participants is {participants}; it must be at least 1")
    spec = Simulated(
        main,
        participants,
        workers,
        evaluates,
        backend,
        address,
        resources,
        None if state_dir is None else os.fspath(state_dir),
        insecure,
    )
    _backend_of(backend, workers, address, resources)  # raises ValueError at once
    return spec


def _backend_of(
    name: str, num_workers: int, address: str | None, resources: Mapping[str, float] | None
) -> Backend:
    """Make the backend of a name: "local", or "ray" with the address of a cluster and the resources
    of a worker.

    Raises ValueError for another name, and for settings that it does not take.
    """
    match name:
        case "local":
            if address is not None or resources is not None:
                raise ValueError('address and resources are of backend="ray"')
            return LocalBackend(num_workers)
        case "ray":
            without_ray = f'backend="ray" needs Ray: {pip_install("xain-session", "ray")}'
            return RayBackend(address or "auto", resources or {"num_cpus": 1}, without_ray)
        case _:
            raise ValueError(f'backend is {name!r}; it must be "local" or "ray"')


@contextlib.contextmanager
def _failures_told() -> Iterator[None]:
    """Turn errors of the backend within the block into SessionError."""
    try:
        yield
    except BackendError as error:
        raise SessionError(str(error)) from None
