"""Workers as actors of a Ray cluster, which places them, and moves those of a lost machine."""

import socket
from collections.abc import Mapping
from typing import Any, Self

from xain_foundation.backends.port import BackendError, Call

# A machine that is lost has its workers moved. One that dies again and again on others has another
# cause, such as memory.
MAX_RESTARTS = 10
REACH_S = 5.0  # for a cluster to accept a connection


class RayBackend:
    """An actor for each worker, which takes 70 MB.

    address: of the cluster, as ray.init() takes it; not used where the script has called that.
    resources: of a worker, as Ray names them: num_cpus, num_gpus, memory, or one's own.
    without_ray: the error where Ray is not installed.
    max_restarts: how often a worker whose machine is lost is called anew elsewhere.
    """

    def __init__(
        self,
        address: str,
        resources: Mapping[str, float],
        without_ray: str,
        *,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        self._address = address
        self._resources = dict(resources)
        self._without_ray = without_ray
        self._max_restarts = max_restarts
        self._is_ours = False  # the connection to the cluster
        self._ray: Any = None
        self._actors: dict[str, Any] = {}
        self._results: dict[Any, str] = {}  # names, by reference

    @property
    def host(self) -> str:
        """Address of this machine for workers; 127.0.0.1 if the cluster has no other machine."""
        ours = self._ray.util.get_node_ip_address()
        nodes = {node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]}
        return "127.0.0.1" if nodes <= {ours, "127.0.0.1"} else str(ours)

    def start(self, name: str, call: Call) -> None:
        """Start a worker as an actor. Raises BackendError if the call cannot be pickled."""
        known = {"num_cpus", "num_gpus", "memory"}
        options: dict[str, Any] = {k: v for k, v in self._resources.items() if k in known}
        own = {k: v for k, v in self._resources.items() if k not in known}
        actor_class = self._ray.remote(
            **options,
            resources=own,
            max_restarts=self._max_restarts,
            max_task_retries=-1 if self._max_restarts else 0,
            scheduling_strategy="SPREAD",
        )(_Actor)
        actor = actor_class.remote()
        try:
            result = actor.run.remote(call)
        except (TypeError, ValueError) as error:  # of Ray's pickling
            self._ray.kill(actor)
            raise BackendError(f"{name} cannot be given to another process ({error})") from None
        self._actors[name] = actor
        self._results[result] = name

    def wait(self, timeout_s: float) -> Mapping[str, str]:
        """Wait until a worker ends; results by name, {} after timeout_s. Raises BackendError."""
        ended: dict[str, str] = {}
        if not self._results:
            return ended
        ready, _ = self._ray.wait(list(self._results), timeout=timeout_s)  # for one
        for result in ready:
            name = self._results.pop(result)
            try:
                ended[name] = str(self._ray.get(result))
            except self._ray.exceptions.RayError as error:
                raise BackendError(f"{name} has died: {error}", died=name) from None
            finally:
                self._ray.kill(self._actors.pop(name))
        return ended

    def stop(self, name: str) -> None:
        """Kill a worker. No effect on one that has ended."""
        if (actor := self._actors.pop(name, None)) is not None:
            self._results = {result: n for result, n in self._results.items() if n != name}
            self._ray.kill(actor)

    def queue(self, size: int) -> Any:
        """A ray.util.queue.Queue on this machine, which workers can be given. It is empty again
        after a death of its process.

        size: number of items; a worker that puts more waits.
        """
        from ray.util.queue import Queue
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = self._ray.get_runtime_context().get_node_id()
        options = {
            "num_cpus": 0,
            "max_restarts": -1,
            "max_task_retries": -1,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=True),
        }
        return Queue(size, options)

    def __enter__(self) -> Self:
        """Connect to the Ray cluster, unless Ray is connected. Raises BackendError."""
        try:
            import ray
        except ModuleNotFoundError:
            raise BackendError(self._without_ray) from None
        self._ray = ray
        if not ray.is_initialized():
            try:
                _reach(self._address)
                ray.init(address=self._address, logging_level="warning")
            except (ConnectionError, RuntimeError, ValueError) as error:
                why = str(error).partition("\n")[0]
                raise BackendError(f"no Ray cluster at {self._address!r}: {why}") from None
            self._is_ours = True
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        self._results.clear()
        if self._is_ours:
            self._ray.shutdown()


def _reach(address: str) -> None:
    """Raise ConnectionError if nobody listens at the address of a cluster: ray.init() would try for
    ever, as at the address that a killed cluster has left for "auto"."""
    from ray._private.services import canonicalize_bootstrap_address

    if "://" not in address and (found := canonicalize_bootstrap_address(address)) is not None:
        host, _, port = found.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        except OSError as error:
            raise ConnectionError(f"nobody listens at {found}") from error


class _Actor:
    """A worker."""

    def run(self, call: Call) -> str:
        return call()
