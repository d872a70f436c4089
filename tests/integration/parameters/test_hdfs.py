"""Training data in a real HDFS."""

import time
from collections.abc import Iterator

import fsspec
import numpy as np
import pytest

from support.hdfs import BLOCK_BYTES, Hdfs, missing
from support.process import PATIENCE_S
from xain_foundation.sockets import free_ports
from xain_workloads.errors import DataError
from xain_workloads.sparse.libsvm import LibsvmFiles


@pytest.fixture(scope="module")
def hdfs() -> Iterator[Hdfs]:
    why = missing()
    if why is not None:
        pytest.skip(why)  # says what is not installed
    with Hdfs() as started:
        yield started


def test_each_line_in_hdfs_is_read_exactly_once(hdfs: Hdfs) -> None:
    """Two files of several HDFS blocks each, and three workers; hidden files are left out."""
    files, root = fsspec.core.url_to_fs(f"{hdfs.url}/clicks")
    files.makedirs(root, exist_ok=True)
    lines = [f"{i} {i % 97}:1 {i + 1_000}:0.5\n" for i in range(150_000)]
    for name, part in (("a.svm", lines[:70_000]), ("b.svm", lines[70_000:])):
        text = "".join(part).encode()
        assert len(text) > BLOCK_BYTES
        files.pipe_file(f"{root}/{name}", text)
    files.pipe_file(f"{root}/_SUCCESS", b"")
    for url in (f"{hdfs.url}/clicks", f"{hdfs.url}/clicks/*.svm"):
        source = LibsvmFiles(url)
        parts = [
            np.concatenate([rows.targets for rows in source.read(source.part(i, 3), 300_000)])
            for i in range(3)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), np.arange(150_000))


def test_missing_file_in_hdfs_is_a_data_error(hdfs: Hdfs) -> None:
    with pytest.raises(DataError, match="nowhere"):
        LibsvmFiles(f"{hdfs.url}/nowhere/*.svm")


def test_name_node_that_does_not_answer_is_told_in_time() -> None:
    """hdfs-native by itself tries for minutes, longer than a test waits for anything."""
    (port,) = free_ports(1)
    url = f"hdfs://127.0.0.1:{port}/clicks"
    began = time.monotonic()
    with pytest.raises(DataError, match=f"{url} cannot be read.*Connection refused"):
        LibsvmFiles(url)
    assert time.monotonic() - began < PATIENCE_S
