"""The gRPC driver with certificates."""

import shutil
import subprocess
import threading
from functools import partial
from pathlib import Path

import grpc
import pytest

from support.messaging import PATIENCE_S
from xain_messaging.drivers.grpc_streams import GrpcDriver, TlsFiles
from xain_messaging.ports import Arrived

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="needs openssl, which is not there")


def openssl(*arguments: str) -> None:
    assert OPENSSL is not None
    subprocess.run([OPENSSL, *arguments], check=True, capture_output=True)


def authority(folder: Path) -> TlsFiles:
    """A certificate for 127.0.0.1, and who has signed it."""
    folder.mkdir()
    key, ca = str(folder / "ca.key"), str(folder / "ca.pem")
    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl(*new, "-x509", "-days", "2", "-subj", "/CN=ca", "-keyout", key, "-out", ca)
    own_key, request = str(folder / "own.key"), str(folder / "own.csr")
    openssl(*new, "-subj", "/CN=peer", "-keyout", own_key, "-out", request)
    names = folder / "names"
    names.write_text("subjectAltName=IP:127.0.0.1")
    own = str(folder / "own.pem")
    sign = ["x509", "-req", "-days", "2", "-in", request, "-CA", ca, "-CAkey", key]
    openssl(*sign, "-CAcreateserial", "-extfile", str(names), "-out", own)
    return TlsFiles(*(Path(path).read_bytes() for path in (ca, own, own_key)))


def note_failure(failed: threading.Event, state: grpc.ChannelConnectivity) -> None:
    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
        failed.set()


def test_peers_of_one_authority_talk(tmp_path: Path) -> None:
    """And nobody else: neither with certificates of another, nor in the clear."""
    ours, theirs = authority(tmp_path / "ours"), authority(tmp_path / "theirs")
    there = GrpcDriver(tls=ours)
    drivers = {"friend": GrpcDriver(tls=ours), "stranger": GrpcDriver(tls=theirs)}
    drivers["naked"] = GrpcDriver()
    try:
        for name, driver in drivers.items():
            driver.connect("there", there.address)
            driver.send("there", [name.encode()])
        event = there.receive(PATIENCE_S)
        assert isinstance(event, Arrived)
        assert bytes(event.frames[0]) == b"friend"
        for name in ("stranger", "naked"):
            failed = threading.Event()
            drivers[name]._lines["there"]._channel.subscribe(partial(note_failure, failed))
            assert failed.wait(PATIENCE_S), f"{name} has not been turned away"
        drivers["friend"].send("there", [b"again"])
        event = there.receive(PATIENCE_S)
        assert isinstance(event, Arrived)
        assert bytes(event.frames[0]) == b"again"
        assert there.receive(0.0) is None
    finally:
        for driver in (there, *drivers.values()):
            driver.close(0.0)
