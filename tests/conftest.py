"""Real S3 servers, each started once for all tests and only if one wants it.

A test that kills its server starts one of its own.
"""

from collections.abc import Iterator

import pytest

from support.s3_servers import MinioGateway, S3Server, SeaweedFS


def running(kind: type[S3Server]) -> Iterator[S3Server]:
    missing = kind.missing()
    if missing is not None:
        pytest.skip(missing)
    with kind() as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[S3Server]:
    yield from running(SeaweedFS)


@pytest.fixture(scope="session")
def minio_gateway() -> Iterator[S3Server]:
    yield from running(MinioGateway)
