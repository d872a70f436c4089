"""Nodes of a cluster of Ray."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.ray_nodes import Node, running


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A head with room for two workers."""
    with running(2, tmp_path_factory.mktemp("head")) as node:
        yield node


@pytest.fixture
def second(head: Node, tmp_path: Path) -> Iterator[Node]:
    """A second node, with room for one worker."""
    with running(1, tmp_path, head.address) as node:
        yield node
