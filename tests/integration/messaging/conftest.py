"""Proxies that are closed in the end, on every driver."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from support.messaging import DRIVERS, PATIENCE_S, discovery_of, driver_maker
from xain_messaging.ports import Discovery, Driver
from xain_messaging.proxy import Proxy

MakeProxy = Callable[..., Proxy]


class Group:
    """Of proxies: make one with `group("worker", name=...)`, several at once with `all`."""

    def __init__(self, discovery: Discovery, make_driver: Callable[[], Driver]) -> None:
        self._discovery = discovery
        self._make_driver = make_driver
        self._made: list[Proxy] = []

    def __call__(self, role: str, expected: dict[str, int] | None = None, **options: Any) -> Proxy:
        options = {"timeout_s": PATIENCE_S, "join_timeout_s": PATIENCE_S, **options}
        proxy = Proxy(
            "training",
            role,
            expected,
            discovery=self._discovery,
            driver=self._make_driver(),
            **options,
        )
        self._made.append(proxy)
        return proxy

    def all(self, number: int, role: str = "worker", **options: Any) -> list[Proxy]:
        """By rank, each of which knows the others."""
        with ThreadPoolExecutor(number) as pool:
            made = [
                pool.submit(self, role, {role: number - 1}, name=f"{role}-{i}", **options)
                for i in range(number)
            ]
        return sorted((future.result() for future in made), key=lambda proxy: proxy.rank)

    def close(self) -> None:
        for proxy in self._made:
            proxy.close(0.0)


@pytest.fixture(params=DRIVERS)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """On each driver."""
    with ExitStack() as stack:
        discovery = stack.enter_context(discovery_of("in-process"))
        made = Group(discovery, driver_maker(request.param))
        stack.callback(made.close)
        yield made


@pytest.fixture(
    params=[("in-process", "in-process"), ("coordinator", "grpc"), ("redis", "zmq")],
    ids=lambda pair: "-".join(pair),
)
def group_anywhere(request: pytest.FixtureRequest) -> Iterator[Group]:
    """On each discovery."""
    kind, driver = request.param
    with ExitStack() as stack:
        discovery = stack.enter_context(discovery_of(kind))
        made = Group(discovery, driver_maker(driver))
        stack.callback(made.close)
        yield made
