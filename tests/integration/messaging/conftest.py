"""Proxies that are closed in the end, and processes that are ended, on every driver."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.lossy import JoinLossy, LossyDriver
from support.messaging import DRIVERS, PATIENCE_S, discovery_of, driver_maker, until
from support.peers import PeerProcess
from support.process import CoordinatorProcess
from xain_membership.coordinator import CoordinatorDiscovery
from xain_membership.errors import Closed
from xain_membership.in_process import InProcessDiscovery
from xain_membership.ports import Discovery
from xain_messaging.drivers.in_process import Switchboard
from xain_messaging.format.messages import Message
from xain_messaging.links import Bounds
from xain_messaging.proxy import Proxy


class Group:
    """A group of proxies: make one with `group("worker", name=...)`, several at once with `all`,
    and one in a process of its own with `process`."""

    _numbers = itertools.count()  # tests may share a discovery

    def __init__(self, discovery: Discovery, driver: str) -> None:
        self.name = f"training-{next(self._numbers)}"
        self.discovery = discovery
        self._driver = driver
        self._make_driver = driver_maker(driver)
        self._made: list[Proxy] = []
        self._processes: list[PeerProcess] = []
        self._serving: list[threading.Thread] = []

    def __call__(self, role: str, expected: dict[str, int] | None = None, **options: Any) -> Proxy:
        options = {"timeout_s": PATIENCE_S, "join_timeout_s": PATIENCE_S, **options}
        proxy = Proxy(
            self.name,
            role,
            expected,
            discovery=self.discovery,
            driver=self._make_driver(),
            **options,
        )
        self._made.append(proxy)
        return proxy

    def process(
        self, role: str, expected: dict[str, int] | None = None, **options: Any
    ) -> PeerProcess:
        options = {"timeout_s": PATIENCE_S, "join_timeout_s": PATIENCE_S, **options}
        made = PeerProcess(self.name, role, expected, self.discovery, self._driver, options)
        self._processes.append(made)
        return made

    def all(self, number: int, role: str = "worker", **options: Any) -> list[Proxy]:
        """Proxies by rank, each of which knows the others."""
        with ThreadPoolExecutor(number) as pool:
            made = [
                pool.submit(self, role, {role: number - 1}, name=f"{role}-{i}", **options)
                for i in range(number)
            ]
        return sorted((future.result() for future in made), key=lambda proxy: proxy.rank)

    def peers(self, *names: str, role: str = "peer") -> list[Proxy]:
        """Proxies by name, each of which knows the others."""
        made = [self(role, name=name) for name in names]
        until(lambda: all(len(one.peers[role]) == len(names) - 1 for one in made), "all")
        return made

    def serve(self, proxy: Proxy, answer: Callable[[Message], object]) -> None:
        """Answer in a thread until the proxy is closed."""

        def run() -> None:
            with suppress(Closed):
                for message in proxy.receive():
                    answer(message)

        self._serving.append(threading.Thread(target=run))
        self._serving[-1].start()

    def double(self, *proxies: Proxy) -> None:
        """Answer with twice what a proxy is given."""
        for proxy in proxies:
            self.serve(proxy, lambda message, of=proxy: of.reply(message, body=message.body * 2))

    def close(self) -> None:
        for process in self._processes:
            process.end()
        for proxy in self._made:
            proxy.close(0.0)
        for thread in self._serving:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture(params=DRIVERS)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """On each driver."""
    with ExitStack() as stack:
        discovery = stack.enter_context(discovery_of("in-process"))
        made = Group(discovery, request.param)
        stack.callback(made.close)
        yield made


@pytest.fixture
def lossy() -> Iterator[JoinLossy]:
    """Peers of one group, with their drivers; closed in the end."""
    discovery, switchboard = InProcessDiscovery(), Switchboard()
    made = []

    def join_one(name: str, bounds: Bounds | None = None) -> tuple[Proxy, LossyDriver]:
        driver = LossyDriver(switchboard)
        proxy = Proxy(
            "g",
            "peer",
            name=name,
            discovery=discovery,
            driver=driver,
            bounds=bounds,
            timeout_s=PATIENCE_S,
        )
        made.append(proxy)
        return proxy, driver

    yield join_one
    for proxy in made:
        proxy.close(0.0)


# --- every driver with every discovery ------------------------------------------------------------

# "server" is the Membership service alone, "coordinator" that of a real coordinator.
DISCOVERIES = ["in-process", "server", "coordinator", "redis"]

# In one process all find each other in every way.
IN_ONE_PROCESS = list(itertools.product(DRIVERS, DISCOVERIES))

# Each driver and each discovery that crosses processes. A driver is told of members by the same
# calls, whichever discovery tells of them.
BETWEEN_PROCESSES = [("zmq", "server"), ("grpc", "coordinator"), ("zmq", "redis")]


@contextmanager
def _coordinator(folder: Path) -> Iterator[Discovery]:
    process = CoordinatorProcess(folder, {})
    with asyncio.Runner() as runner:
        runner.run(process.start())
        try:
            yield CoordinatorDiscovery(f"127.0.0.1:{process.port}")
        finally:
            runner.run(process.end())


@pytest.fixture(scope="session")
def discovery_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Discovery]]:
    """One of each kind, which is started when it is asked for."""
    with ExitStack() as stack:
        found = {}

        def at(kind: str) -> Discovery:
            if kind not in found:
                found[kind] = stack.enter_context(
                    _coordinator(tmp_path_factory.mktemp("coordinator"))
                    if kind == "coordinator"
                    else discovery_of("coordinator" if kind == "server" else kind)
                )
            return found[kind]

        yield at


def _made_group(
    request: pytest.FixtureRequest, discovery_at: Callable[[str], Discovery]
) -> Iterator[Group]:
    driver, discovery = request.param
    with closing(Group(discovery_at(discovery), driver)) as made:
        yield made


@pytest.fixture(params=IN_ONE_PROCESS, ids="-".join)
def group_anywhere(
    request: pytest.FixtureRequest, discovery_at: Callable[[str], Discovery]
) -> Iterator[Group]:
    """On each driver and each discovery."""
    yield from _made_group(request, discovery_at)


@pytest.fixture(params=BETWEEN_PROCESSES, ids="-".join)
def group_of_processes(
    request: pytest.FixtureRequest, discovery_at: Callable[[str], Discovery]
) -> Iterator[Group]:
    """On the drivers and discoveries of processes."""
    yield from _made_group(request, discovery_at)
