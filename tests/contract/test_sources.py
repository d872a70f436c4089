"""Rows in files, in a real S3, in a real HDFS and behind a real HTTP server are read alike."""

import contextlib
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import fsspec
import pyarrow as pa
import pytest
from pyarrow import parquet

from support.hdfs import BLOCK_BYTES, Hdfs, missing
from support.http_files import HttpFiles
from support.logs import capture_logs
from support.process import PATIENCE_S
from support.s3_servers import S3Server
from xain_foundation.net.sockets import free_ports
from xain_workloads.errors import DataError
from xain_workloads.sources.parts import Part, find, read_bytes
from xain_workloads.sources.reading import read, schema
from xain_workloads.sources.shares import shares

NUM_ROWS = 1_000


class Location(Protocol):
    """A folder of files. url: of the folder, without a slash at its end."""

    url: str

    def put(self, name: str, content: bytes) -> None: ...


class Folder:
    def __init__(self, path: Path, url: str = "") -> None:
        self._path = path
        self.url = url or str(path)

    def put(self, name: str, content: bytes) -> None:
        (self._path / name).write_bytes(content)


class Bucket:
    def __init__(self, name: str, server: S3Server) -> None:
        self._name, self._server = name, server
        self.url = f"s3://{name}/rows"

    def put(self, name: str, content: bytes) -> None:
        with contextlib.closing(self._server.client()) as client:
            client.put_object(Bucket=self._name, Key=f"rows/{name}", Body=content)


class HdfsFolder:
    def __init__(self, url: str) -> None:
        self.url = url
        self._files, self._path = fsspec.core.url_to_fs(url)
        self._files.makedirs(self._path, exist_ok=True)

    def put(self, name: str, content: bytes) -> None:
        self._files.pipe_file(f"{self._path}/{name}", content)


@pytest.fixture(scope="module")
def hdfs() -> Iterator[Hdfs]:
    why = missing()
    if why is not None:
        pytest.skip(why)  # says what is not installed
    with Hdfs() as started:
        yield started


@pytest.fixture
def http_files(tmp_path: Path) -> Iterator[HttpFiles]:
    with HttpFiles(tmp_path) as server:
        yield server


@pytest.fixture(params=["file", "s3", "hdfs", "http"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    match request.param:
        case "s3":
            bucket = request.getfixturevalue("s3fs_bucket")
            return Bucket(bucket, request.getfixturevalue("seaweedfs"))
        case "hdfs":
            return HdfsFolder(f"{request.getfixturevalue('hdfs').url}/{tmp_path.name}")
        case "http":
            return Folder(tmp_path, request.getfixturevalue("http_files").url)
    return Folder(tmp_path)


def folder_of(location: Location) -> str:
    return f"{location.url}/" if location.url.startswith("http") else location.url


def content(kind: str, first: int, stop: int) -> bytes:
    """A file with rows of these numbers."""
    numbers = range(first, stop)
    match kind:
        case "libsvm":
            return "".join(f"{i} {i % 97}:1 {i + 1_000}:0.5\n" for i in numbers).encode()
        case "csv":
            return ("text,target\r\n" + "".join(f"row {i},{i}\r\n" for i in numbers)).encode()
    file = io.BytesIO()
    table = pa.table({"text": [f"row {i}" for i in numbers], "target": [float(i) for i in numbers]})
    parquet.write_table(table, file, row_group_size=50)
    return file.getvalue()


def targets(parts: list[Part], num_shares: int) -> list[float]:
    columns = schema(parts)
    return [
        value
        for share in shares(parts, num_shares)
        for table in read(share, columns, 3_000)
        for value in table.column("target").to_pylist()
    ]


@pytest.mark.parametrize("kind", ["libsvm", "csv", "parquet"])
def test_each_row_is_read_once(location, kind):
    """Two files, divided within lines, and blocks that divide lines; hidden files are left out."""
    suffix = "svm" if kind == "libsvm" else kind
    location.put(f"a.{suffix}", content(kind, 0, 400))
    location.put(f"b.{suffix}", content(kind, 400, NUM_ROWS))
    location.put("_SUCCESS", b"x")
    for url in (folder_of(location), f"{location.url}/*.{suffix}"):
        parts = find(url)
        assert [part.name for part in parts] == [f"a.{suffix}", f"b.{suffix}"]
        assert parts[0].size == len(content(kind, 0, 400))
        for num_shares in (1, 3, 50):
            assert targets(parts, num_shares) == list(range(NUM_ROWS))
    (one,) = find(f"{location.url}/a.{suffix}")
    assert targets([one], 2) == list(range(400))


def test_missing_and_empty_files_are_told_apart(location):
    location.put("empty.svm", b"")
    for name in ("no.svm", "no*.svm", "no/*.svm"):
        with pytest.raises(DataError, match="there is no file"):
            find(f"{location.url}/{name}")
    with pytest.raises(DataError, match="is empty"):
        find(f"{location.url}/empty.svm")


def test_shares_of_a_file_of_several_hdfs_blocks_have_each_row_once(hdfs):
    location = HdfsFolder(f"{hdfs.url}/large")
    rows = "".join(f"{i} {i % 97}:1 {i + 1_000}:0.5\n" for i in range(70_000)).encode()
    assert len(rows) > BLOCK_BYTES
    location.put("a.svm", rows)
    assert targets(find(location.url), 3) == list(range(70_000))


def test_missing_bucket_is_a_data_error(s3fs_bucket):
    with pytest.raises(DataError, match="there is no file"):
        find("s3://no-bucket-of-that-name/x.svm")


def test_name_node_that_does_not_answer_is_told_in_time():
    """hdfs-native by itself tries for minutes, longer than a test waits for anything."""
    (port,) = free_ports(1)
    url = f"hdfs://127.0.0.1:{port}/clicks"
    began = time.monotonic()
    with pytest.raises(DataError, match=f"{url} cannot be read.*Connection refused"):
        find(url)
    assert time.monotonic() - began < PATIENCE_S


def test_http_server_without_ranges_is_refused_in_words(tmp_path):
    (tmp_path / "x.csv").write_bytes(content("csv", 0, 10))
    with HttpFiles(tmp_path, has_ranges=False) as server:
        for url in (f"{server.url}/x.csv", f"{server.url}/*.csv"):
            with pytest.raises(DataError, match=r"x\.csv: the server sends whole files only"):
                find(url)


def test_http_server_that_does_not_answer_is_told():
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/x.csv"
    with pytest.raises(DataError, match=f"{url} cannot be read.*Connect call failed"):
        find(url)


@pytest.mark.parametrize("kind", ["libsvm", "csv", "parquet"])
def test_reads_over_http_that_fail_or_are_cut_are_done_again(tmp_path, kind):
    """Whichever read it is, each row comes once."""
    (tmp_path / f"x.{kind}").write_bytes(content(kind, 0, 100))
    faults = ["503", "none", "cut", "none", "none", "429", "cut"]
    with HttpFiles(tmp_path, faults=faults) as server, capture_logs() as log:
        assert targets(find(f"{server.url}/x.{kind}"), 5) == list(range(100))
    assert [each["event"] for each in log] == ["reading_again"] * 4


@pytest.mark.parametrize(
    ("faults", "words", "num_again"),
    [
        (["cut"] * 6, "cannot be read", 5),
        (["503"] * 6, "cannot be read.*503", 5),
        (["403"], "cannot be read.*403", 0),
        (["404"], "there is no file", 0),
    ],
)
def test_read_over_http_is_given_up(tmp_path, faults, words, num_again):
    """After a few times, and at once where the server says that it will send nothing."""
    (tmp_path / "x.svm").write_bytes(content("libsvm", 0, 100))
    with HttpFiles(tmp_path, faults=faults) as server, capture_logs() as log:
        (part,) = find(f"{server.url}/x.svm")
        with pytest.raises(DataError, match=words):
            read_bytes(part, 10, 90, first_wait_s=0.0)
        assert len(read_bytes(part, 10, 90)) == 80
    assert [each["event"] for each in log] == ["reading_again"] * num_again


def test_query_of_a_url_is_no_part_of_the_name(http_files, tmp_path):
    """As in the signed URL of an object."""
    (tmp_path / "x.csv").write_bytes(content("csv", 0, 10))
    (part,) = find(f"{http_files.url}/x.csv?signature=a/b.c*")
    assert (part.name, part.format) == ("x.csv", "csv")
    assert targets([part], 3) == list(range(10))
