"""A group with certificates: the scheduler, servers and workers as processes."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from integration.parameters.test_command_line import (
    LONG_S,
    PROGRAM,
    refused,
    run,
    running,
    scheduler_in,
)
from support.certificates import certified, make_authority, needs_openssl, write_folder
from support.process import ran
from xain_foundation.security.identity import IdentityRules, Role
from xain_foundation.security.x509 import Authority
from xain_parameters import Certificates, InvalidCertificates, Unavailable, connect_sync
from xain_parameters.transport.channel import hello
from xain_parameters.transport.connection import Connection

OURS, THEIRS = make_authority(), make_authority()

WORKER = """
import sys
import numpy as np
from xain_parameters import Certificates, connect_sync

target, folder = sys.argv[1:]
with connect_sync(target, worker="w0", tls=Certificates(folder)) as server:
    w = server.dense("w", (300_000,))
    for clock in server.clocks(stop=3):
        w.push(np.full(300_000, clock + 1, np.float32))
    print(w.pull().mean())
"""

Issue = Callable[..., str]


@pytest.fixture
def issue(tmp_path: Path) -> Issue:
    """Makes the folder of a program, with a certificate that names no host but what nodes have."""

    def made(
        name: str, role: Role, authority: Authority = OURS, *, lifetime_s: float = 3600.0
    ) -> str:
        folder = tmp_path / f"tls-{role}-{name}-{len(list(tmp_path.iterdir()))}"
        return str(write_folder(folder, authority, role, name, hosts=(), lifetime_s=lifetime_s))

    return made


def worker(name: str, issue: Issue, authority: Authority = OURS) -> Certificates:
    return Certificates(issue(name, Role.PARTICIPANT, authority))


def test_group_of_one_authority_trains_and_excludes_others(tmp_path, issue):
    """A replica of each range, so that servers connect to each other too."""
    flags = ("--tls", issue("scheduler", Role.NODE), "--replicas", "1")
    with scheduler_in(tmp_path / "scheduler", *flags) as (_, target):

        def serve(name: str) -> list[str]:
            own = issue(name, Role.NODE)
            return ["serve", "--scheduler", target, "--tls", own, "--name", name]

        with running(*serve("s1")) as first, running(*serve("s2")) as second:
            for process in (first, second):
                assert " serving on 127.0.0.1:" in process.stderr.readline()
            own = issue("w0", Role.PARTICIPANT)
            trained = ran("-c", WORKER, target, own)
            assert (trained.returncode, trained.stdout) == (0, "6.0\n"), trained.stderr
            for role in (Role.PARTICIPANT, Role.OBSERVER, Role.OPERATOR, Role.NODE):
                status = run("status", "--scheduler", target, "--tls", issue("x", role))
                assert re.findall(r"server (s\d) at", status.stdout) == ["s1", "s2"]
            for other in (None, worker("stranger", issue, THEIRS)):
                with pytest.raises(Unavailable):
                    connect_sync(target, worker="stranger", timeout_s=1.0, tls=other)
            with pytest.raises(Unavailable, match="certificate is that of participant 'w3'"):
                connect_sync(target, worker="w1", timeout_s=LONG_S, tls=worker("w3", issue))
            assert run("status", "--scheduler", target, "--timeout=1").exit_code == 1
            other = run(*serve("s3")[:-1], "s4")
            assert other.exit_code == 1
            assert "the certificate is that of node 's3'" in other.stderr
            # A server that is killed leaves its ranges to the other one, over TLS.
            first.kill()
            with connect_sync(target, worker="w1", tls=worker("w1", issue)) as server:
                np.testing.assert_array_equal(server.dense("w", (300_000,)).pull(), 6)


@needs_openssl
def test_certificate_without_our_names_counts_by_an_explicit_rule(tmp_path):
    """One certificate for all programs, as openssl makes it, is that of an operator then, who may
    act in any name."""
    folder = certified(tmp_path / "ours")
    rule = ("--set", "tls.identity=cn", "--set", "tls.roles.operator=peer")
    flags = ("--tls", str(folder), *rule)
    with (
        scheduler_in(tmp_path / "scheduler", *flags) as (_, target),
        running("serve", "--scheduler", target, "--name", "s1", *flags) as server,
    ):
        said = server.stderr.readline()
        assert " serving on 127.0.0.1:" in said
        address = said.split()[-1]
        with pytest.raises(Unavailable, match="no name of the kind 'uri'"):
            Connection(address, hello("w0", "worker", 1), tls=Certificates(folder), server="s1")
        rules = IdentityRules("cn", {Role.OPERATOR: ("*",)})
        with connect_sync(target, worker="w0", tls=Certificates(folder, rules=rules)) as one:
            np.testing.assert_array_equal(one.dense("w", (3,)).pull(), 0)
    with scheduler_in(tmp_path / "other", "--tls", str(folder)) as (_, target):
        status = run("status", "--scheduler", target, f"--timeout={LONG_S}", "--tls", str(folder))
        assert status.exit_code == 1
        assert "no name of the kind 'uri'" in status.stderr


def test_certificates_that_cannot_be_used_are_one_line(tmp_path, issue):
    """gRPC would tell of a handshake that failed, several times a second, and not why."""
    mixed, foreign = (Path(issue("n", Role.NODE)) for _ in range(2))
    theirs = Path(issue("n", Role.NODE, THEIRS))
    (mixed / "tls.key").write_bytes((theirs / "tls.key").read_bytes())
    (foreign / "ca.crt").write_bytes((theirs / "ca.crt").read_bytes())
    expired = issue("n", Role.NODE, lifetime_s=-1.0)
    for folder, text in (
        (mixed, "do not belong together"),
        (tmp_path / "none", "ca.crt"),
        (expired, f"{expired}/tls.crt would be refused by the other programs: certificate has exp"),
        (foreign, "unable to get local issuer"),
    ):
        with pytest.raises(InvalidCertificates, match=re.escape(text)):
            Certificates(folder)
        for command in ("scheduler", "serve", "status"):
            assert text in refused(command, "--tls", str(folder))


@needs_openssl
def test_certificate_of_a_curve_that_tls_does_not_have_is_refused(tmp_path):
    with pytest.raises(InvalidCertificates, match="P-256"):
        Certificates(certified(tmp_path / "unknown", curve="secp256k1"))


@needs_openssl
def test_certificate_of_a_scheduler_may_be_for_servers_alone(tmp_path):
    """Both purposes are needed by those that connect to others, too."""
    assert Certificates(certified(tmp_path / "scheduler", purposes="serverAuth"))
    assert Certificates(certified(tmp_path / "worker", purposes="clientAuth"))


def test_failed_handshake_is_one_line_of_the_program_that_asks(tmp_path, issue):
    flags = ("--tls", issue("scheduler", Role.NODE))
    theirs = issue("olga", Role.OPERATOR, THEIRS)
    with scheduler_in(tmp_path / "scheduler", *flags) as (scheduler, target):
        # The cause is looked for when the time of the calls is over, however short that is.
        words = ("status", "--scheduler", target, "--timeout=0.1", "--tls", theirs)
        failed = ran(*PROGRAM[1:], *words)
        assert (failed.returncode, failed.stderr.count("\n")) == (1, 1), failed.stderr
        assert "its authority has the name" in failed.stderr
        scheduler.terminate()
        assert scheduler.stderr.read() == ""


@pytest.mark.parametrize("content", ["", " \n"])
def test_empty_authority_is_refused(issue, content):
    """The authorities of the system are never trusted in its place."""
    ours = Path(issue("n", Role.NODE))
    (ours / "ca.crt").write_text(content)
    with pytest.raises(InvalidCertificates, match=r"ca\.crt is empty"):
        Certificates(ours)


def test_empty_folder_is_refused(monkeypatch):
    """A shell variable that is not set must not turn encryption off."""
    nowhere = ("--scheduler=127.0.0.1:1", "--timeout=0.1")
    for command in (
        ("scheduler", "--tls", ""),
        ("scheduler", "--set", "tls.folder="),
        ("serve", "--tls", ""),
        ("status", "--tls", "", *nowhere),
        ("checkpoint", "--tls", "", *nowhere),
        ("roll-back", "--tls", "", *nowhere),
    ):
        assert "leave it out" in refused(*command)
    monkeypatch.setenv("XAIN_PARAMETERS_TLS__FOLDER", "")
    for command in (("scheduler",), ("status", *nowhere)):
        assert "XAIN_PARAMETERS_TLS__FOLDER" in refused(*command)


def test_rule_that_names_no_role_is_refused(issue):
    own = issue("s1", Role.NODE)
    for key, value, text in (
        ("tls.identity", "cn", "list the names in [tls.roles]"),
        ("tls.roles.king", "*", "the roles are participant, observer, operator, node"),
    ):
        assert text in refused("serve", "--tls", own, "--set", f"{key}={value}")
