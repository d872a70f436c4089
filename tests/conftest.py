"""Real S3 servers, each started once for all tests and only if one wants it.

A test that kills its server starts one of its own.
"""

import functools
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from botocore.loaders import create_loader
from hypothesis import settings

from support.fork_server import Starts
from support.logs import restored
from support.s3_servers import MinioGateway, S3Server, SeaweedFS

# A shell lets its background jobs ignore SIGINT, and so do all processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No example fails for the time that it takes, which is the machine's matter.
settings.register_profile("unhurried", settings(), deadline=None)
settings.load_profile("unhurried")

STARTS = Starts()
STARTS.install()


@pytest.fixture(autouse=True)
def _starts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is marked real_exec starts its processes with all their imports to be done, and
    one that is marked frameworks with these imported."""
    if request.node.get_closest_marker("real_exec"):
        monkeypatch.setattr(STARTS, "are_real", True)
    if request.node.get_closest_marker("frameworks"):
        monkeypatch.setattr(STARTS, "have_frameworks", True)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """Commands that a test calls in this process take SIGINT and SIGTERM, and keep them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def running(kind: type[S3Server]) -> Iterator[S3Server]:
    missing = kind.missing()
    if missing is not None:
        pytest.skip(missing)  # says what is not installed
    with kind() as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def _read_once() -> Iterator[None]:
    """Cache botocore's description of S3: each store would read it anew, which takes longer than
    most of the tests that open one."""
    with mock.patch("botocore.session.create_loader", functools.cache(create_loader)):
        yield


@pytest.fixture(autouse=True)
def _logs_restored() -> Iterator[None]:
    with restored():
        yield


@pytest.fixture
async def keep() -> AsyncIterator[Callable[[Any], Any]]:
    """Take processes, which have ended when the test has."""
    kept: list[Any] = []

    def take(process: Any) -> Any:
        kept.append(process)
        return process

    yield take
    for process in kept:
        await process.end()


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Let torch compute with one thread: several would wait for each other on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[S3Server]:
    yield from running(SeaweedFS)


@pytest.fixture(scope="session")
def minio_gateway() -> Iterator[S3Server]:
    yield from running(MinioGateway)


@pytest.fixture
def s3fs_bucket(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A new bucket that s3:// URLs reach, by the variables that s3fs takes from a user."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweedfs.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweedfs.owner.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweedfs.owner.secret_access_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    yield seaweedfs.new_bucket()
    s3fs.S3FileSystem.clear_instance_cache()
