"""Discoveries and drivers of each kind, started for tests."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from xain_membership.coordinator import CoordinatorDiscovery
from xain_membership.in_process import InProcessDiscovery
from xain_membership.ports import Discovery
from xain_membership.server import MembershipServer
from xain_messaging.discovery.redis import RedisDiscovery
from xain_messaging.drivers.grpc_streams import GrpcDriver
from xain_messaging.drivers.in_process import InProcessDriver, Switchboard
from xain_messaging.drivers.zeromq import ZmqDriver
from xain_messaging.ports import Driver
from xain_messaging.proxy import Proxy

PATIENCE_S = 60.0  # for what takes milliseconds, on a machine that has other things to do
LEASE_S = 4.0  # in a Redis, which has no other way to notice that a process has died

DRIVERS = ["in-process", "grpc", "zmq"]
DISCOVERIES = ["in-process", "coordinator", "redis"]


def until(is_so: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_at, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.01)  # a poll, not a race: it ends when it is so


def taken(proxy: Proxy, timeout_s: float = PATIENCE_S) -> Any:
    """The next message of a proxy, which must come."""
    message = proxy.receive_once(timeout_s)
    assert message is not None
    return message


def driver_maker(kind: str) -> Callable[[], Driver]:
    """Drivers that reach each other."""
    if kind == "grpc":
        return GrpcDriver
    if kind == "zmq":
        return ZmqDriver
    switchboard = Switchboard()
    return lambda: InProcessDriver(switchboard)


@contextmanager
def discovery_of(kind: str) -> Iterator[Discovery]:
    """One, with what it needs running."""
    if kind == "coordinator":
        with MembershipServer(settle_s=0.0) as server:
            yield CoordinatorDiscovery(server.target)
    elif kind == "redis":
        with RedisServer() as redis:
            yield RedisDiscovery(redis.url, LEASE_S, settle_s=0.0)
    else:
        yield InProcessDiscovery()


class RedisServer:
    """A real one, on a socket in a folder of its own, that keeps nothing."""

    @staticmethod
    def missing() -> str | None:
        """The reason why it cannot be started; None if it can."""
        if shutil.which("redis-server"):
            return None
        reason = "redis-server is not installed (Debian's package of that name)"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and CI is set", pytrace=False)
        return reason

    def __init__(self) -> None:
        missing = self.missing()
        if missing is not None:
            pytest.skip(missing)  # says what is not installed
        self._folder = tempfile.mkdtemp(prefix="redis-")  # short: the path of a socket has to be
        self._socket = Path(self._folder) / "socket"

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder)

    def start(self) -> None:
        flags = ["--port", "0", "--unixsocket", str(self._socket), "--dir", self._folder]
        self._process = subprocess.Popen(
            ["redis-server", *flags, "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
        )
        until(self._answers, "redis-server to answer")

    def _answers(self) -> bool:
        assert self._process.poll() is None, "redis-server has ended"
        cli = ["redis-cli", "-s", str(self._socket), "ping"]
        return b"PONG" in subprocess.run(cli, capture_output=True, check=False).stdout

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """All that it holds is gone."""
        self._process.kill()
        self._process.wait(PATIENCE_S)
        self._socket.unlink(missing_ok=True)
