"""The stores of the contract suites."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.stores import FACTORIES, S3_SERVERS, opened
from xain_coordinator.ports import WeightsStore


@pytest.fixture(params=[*FACTORIES, *S3_SERVERS])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WeightsStore]:
    yield from opened(request, tmp_path, monkeypatch)
