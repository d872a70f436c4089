"""Servers of weights and metrics whose certificates an authority of one's own has signed."""

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.certificates import make_authority, write_folder
from support.logs import capture_logs
from support.waiting import beside
from xain_coordinator.config.sections.storage import StorageSettings
from xain_coordinator.core.vocabulary.values import Point
from xain_coordinator.ports import StoreError, StoreUnavailable
from xain_coordinator.stores.s3.s3_bucket import connect
from xain_coordinator.stores.secret_files import authorities_in
from xain_coordinator.telemetry.influx import InfluxWriter
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import AUTHORITY, CERTIFICATE, KEY

EMPTY = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


class Handler(BaseHTTPRequestHandler):
    """Lists no object, and takes all metrics."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(EMPTY)))
        self.end_headers()
        self.wfile.write(EMPTY)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tls", make_authority(), Role.NODE, "store")


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        with beside(server.serve_forever):
            yield f"https://127.0.0.1:{server.server_port}"
            server.shutdown()


def _list(url: str, ca_file: Path | None) -> None:
    bucket = connect(
        StorageSettings.model_validate(
            {
                "kind": "s3",
                "endpoint": url,
                "bucket": "b",
                "access_key_id": "id",
                "secret_access_key": "secret",
                "ca_file": ca_file,
            }
        )
    )
    try:
        bucket.check("")
    finally:
        bucket.close()


def test_store_by_an_authority_of_one_s_own(url, folder):
    """The store is refused without the file, and the message names the key."""
    _list(url, folder / AUTHORITY)
    with pytest.raises(StoreUnavailable, match=r"storage\.ca_file names a file"):
        _list(url, None)


def test_metrics_by_an_authority_of_one_s_own(url, folder):
    closing = threading.Event()
    closing.set()  # one try
    point = Point("m", {"f": 1.0}, {})
    with capture_logs() as logged:
        for authorities, num_lost in ((str(folder / AUTHORITY), 0), (None, 1)):
            writer = InfluxWriter(url, "o", "b", lambda: "hunter2", 5.0, authorities)
            try:
                assert writer.write([(1, point)], closing) == num_lost
            finally:
                writer.close()
    assert "CERTIFICATE_VERIFY_FAILED" in str(logged)


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_file_without_authorities_is_told_at_the_start(tmp_path, content):
    path = tmp_path / "ca.crt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StoreError, match=r"cannot use metrics\.ca_file, .*ca\.crt: [Nn]o "):
        authorities_in("metrics", path)
