"""The cause of a failed TLS connection, found by handshakes with real servers of gRPC."""

import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from support import grpc_servers
from support.certificates import issued, make_authority, write_folder
from support.waiting import beside
from xain_foundation.net.channels import find_cause
from xain_foundation.security.handshakes import Cause, Fault
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import AUTHORITY, CERTIFICATE, KEY, Certificates
from xain_foundation.security.x509 import Authority
from xain_participant.tables.advice import advised

OURS = make_authority()
PATIENCE_S = 60.0


@contextmanager
def serving(credentials: grpc.ServerCredentials | None) -> Iterator[str]:
    with grpc_servers.serving(grpc.server(ThreadPoolExecutor(1)), credentials) as port:
        yield f"127.0.0.1:{port}"


@contextmanager
def closed(authority: Any = OURS, *, trusts: bytes = b"", **certificate: Any) -> Iterator[str]:
    """A server with a certificate. trusts: the authority of its clients."""
    own, key = issued(authority, Role.COORDINATOR, "coordinator", **certificate)
    with serving(
        grpc.ssl_server_credentials([(key, own)], trusts or OURS.certificate, True)
    ) as address:
        yield address


@pytest.fixture
def tls(tmp_path: Path) -> Certificates:
    return Certificates(write_folder(tmp_path / "site", OURS, Role.PARTICIPANT, "ward-7"))


def cause_of(address: str, tls: Certificates | None) -> Cause:
    return find_cause(address, tls=tls, timeout_s=PATIENCE_S)


def test_server_that_takes_our_certificate(tls):
    with closed() as address:
        assert not cause_of(address, tls)


def test_certificate_of_another_authority_names_both(tls, tmp_path):
    others = make_authority()
    with closed(others) as address:
        cause = cause_of(address, tls)
    assert cause.fault is Fault.OTHER_AUTHORITY
    assert f"its authority has the name of the one in {tls.folder / AUTHORITY}" in cause.text
    assert "another key" in cause.text
    assert "xain-participant join FILE" in advised(cause)


def test_authority_with_another_name(tls):
    others = Authority.create("elsewhere.example.org", time.time(), 3600.0)
    with closed(others) as address:
        cause = cause_of(address, tls)
    assert cause.fault is Fault.OTHER_AUTHORITY
    assert "its certificate is signed by CN=elsewhere.example.org, and " in cause.text
    assert "CN=coordinator.example.org" in cause.text


def test_expired_certificate_of_the_server_tells_both_times(tls):
    with closed(lifetime_s=-60.0) as address:
        cause = cause_of(address, tls)
    assert cause.fault is Fault.EXPIRED
    assert "its certificate has expired on 2" in cause.text
    assert "UTC here" in cause.text
    assert "xain-coordinator certs renew" in advised(cause)


def test_certificate_for_other_hosts_names_them_and_the_one_that_was_typed(tls):
    with closed(hosts=["fleet.example.org", "10.0.0.7"]) as address:
        cause = cause_of(address, tls)
    assert cause.fault is Fault.OTHER_HOST
    assert cause.text == (
        "its certificate is for fleet.example.org, 10.0.0.7, and not for 127.0.0.1"
    )
    assert "add --coordinator HOST:PORT" in advised(cause)
    assert "certs renew --host HOST" in advised(cause)


def test_server_without_tls(tls):
    with serving(None) as address:
        cause = cause_of(address, tls)
    assert (cause.fault, cause.text) == (Fault.NO_TLS, "it speaks gRPC without TLS")
    assert "xain-coordinator certs init --host HOST" in advised(cause)


def test_client_without_tls():
    with closed() as address:
        cause = cause_of(address, None)
    assert (cause.fault, cause.text) == (Fault.NEEDS_TLS, "it speaks TLS, and we do not")
    assert "this site has no certificate" in advised(cause)
    assert "xain-participant join FILE" in advised(cause)


def test_server_that_does_not_take_our_certificate_is_told_by_its_hanging_up(tls):
    with closed(trusts=make_authority().certificate) as address:
        cause = cause_of(address, tls)
    assert cause.fault is Fault.REFUSED
    assert f"it does not accept our certificate {tls.folder / CERTIFICATE}: it is one of" in (
        cause.text
    )
    assert "CN=coordinator.example.org" in cause.text


def test_our_certificate_has_expired_since_it_was_read(monkeypatch, tmp_path):
    """A program that was up all the time knows its old certificate."""
    other = write_folder(tmp_path / "short", OURS, Role.PARTICIPANT, "ward-7", lifetime_s=-60.0)
    with monkeypatch.context() as reading:
        reading.setattr("xain_foundation.security.tls._why_refused", lambda *_: "")
        short = Certificates(other)
    with closed() as address:
        cause = cause_of(address, short)
    assert cause.fault is Fault.REFUSED
    assert f"{other / CERTIFICATE}: it has expired on 2" in cause.text


def test_port_of_another_protocol(tls):
    """TLS is spoken there, and no HTTP/2."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    folder = write_folder(tls.folder.parent / "other", OURS, Role.COORDINATOR, "coordinator")
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def answer() -> None:
            with listening.accept()[0] as raw, context.wrap_socket(raw, server_side=True) as one:
                one.recv(64)
                one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        with beside(lambda: (listening.accept()[0].close(), answer())):
            cause = cause_of(f"127.0.0.1:{listening.getsockname()[1]}", tls)
    assert cause.text == "it speaks TLS, but no gRPC: is it another port?"


def test_port_of_another_program(tls):
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def answer() -> None:
            for _ in range(3):
                with listening.accept()[0] as raw:
                    raw.sendall(b"220 mail.example.org ESMTP\r\n")

        threading.Thread(target=answer, daemon=True).start()
        cause = cause_of(f"127.0.0.1:{listening.getsockname()[1]}", tls)
    assert cause.text == "it does not speak TLS as we do: is it another port?"


def test_files_that_are_gone_do_not_change_the_cause(tls):
    """Handshakes use what was read."""
    shutil.rmtree(tls.folder)
    with closed(hosts=["fleet.example.org"]) as address:
        assert cause_of(address, tls).fault is Fault.OTHER_HOST
