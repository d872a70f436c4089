"""A group with certificates: the scheduler, servers and workers as processes."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from integration.parameters.test_command_line import LONG_S, PROGRAM, run, running, scheduler_in
from support.certificates import certified, needs_openssl
from xain_parameters import Certificates, Invalid, Unavailable, connect_sync

pytestmark = needs_openssl

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


def test_group_of_one_authority_trains_and_excludes_others(tmp_path: Path) -> None:
    """A replica of each range, so that servers connect to each other too."""
    ours, theirs = (str(certified(tmp_path / name)) for name in ("ours", "theirs"))
    flags = ("--tls", ours, "--replicas", "1")
    with scheduler_in(tmp_path / "scheduler", *flags) as (_, target):
        serve = ("serve", "--scheduler", target, "--tls", ours, "--name")
        with running(*serve, "s1") as first, running(*serve, "s2") as second:
            for process in (first, second):
                assert process.stderr is not None
                assert " serving on 127.0.0.1:" in process.stderr.readline()
            worker = [sys.executable, "-c", WORKER, target, ours]
            trained = subprocess.run(
                worker, capture_output=True, text=True, timeout=LONG_S, check=False
            )
            assert (trained.returncode, trained.stdout) == (0, "6.0\n"), trained.stderr
            status = run("status", "--scheduler", target, "--tls", ours)
            assert re.findall(r"server (s\d) at", status.stdout) == ["s1", "s2"]
            for other in (None, Certificates(theirs)):
                with pytest.raises(Unavailable):
                    connect_sync(target, worker="stranger", timeout_s=1.0, tls=other)
            assert run("status", "--scheduler", target, "--timeout=1").exit_code == 1
            # A server that is killed leaves its ranges to the other one, over TLS.
            first.kill()
            with connect_sync(target, worker="w1", tls=Certificates(ours)) as server:
                np.testing.assert_array_equal(server.dense("w", (300_000,)).pull(), 6)


def test_certificates_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    ours, theirs = certified(tmp_path / "ours"), certified(tmp_path / "theirs")
    (ours / "tls.key").write_bytes((theirs / "tls.key").read_bytes())
    for folder, text in ((ours, "do not belong together"), (tmp_path / "none", "ca.crt")):
        with pytest.raises(Invalid, match=text):
            Certificates(folder)
        for command in ("scheduler", "serve", "status"):
            refused = run(command, "--tls", str(folder))
            assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), refused.stderr
            assert text in refused.stderr


def test_certificate_that_others_would_refuse_is_one_line(tmp_path: Path) -> None:
    """gRPC would tell of a handshake that failed, several times a second, and not why."""
    ours, theirs = certified(tmp_path / "ours"), certified(tmp_path / "theirs")
    expired = certified(tmp_path / "expired", days=-1)
    unknown = certified(tmp_path / "unknown", curve="secp256k1")
    (ours / "ca.crt").write_bytes((theirs / "ca.crt").read_bytes())
    for folder, text in (
        (expired, "certificate has expired"),
        (ours, "unable to get local issuer"),
        (unknown, "NO_SHARED_CIPHER"),
    ):
        for command in ("scheduler", "serve", "status"):
            refused = run(command, "--tls", str(folder))
            assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), refused.stderr
            assert (
                f"{folder}/tls.crt would be refused by the other programs: {text}" in refused.stderr
            )


def test_certificate_of_a_scheduler_may_be_for_servers_alone(tmp_path: Path) -> None:
    """Both purposes are needed by those that connect to others, too."""
    assert Certificates(certified(tmp_path / "scheduler", purposes="serverAuth"))
    assert Certificates(certified(tmp_path / "worker", purposes="clientAuth"))


def test_failed_handshake_is_one_line_of_the_program_that_asks(tmp_path: Path) -> None:
    ours, theirs = (str(certified(tmp_path / name)) for name in ("ours", "theirs"))
    with scheduler_in(tmp_path / "scheduler", "--tls", ours) as (scheduler, target):
        command = [*PROGRAM, "status", "--scheduler", target, "--timeout", "3", "--tls", theirs]
        refused = subprocess.run(
            command, capture_output=True, text=True, timeout=LONG_S, check=False
        )
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
        assert "CERTIFICATE_VERIFY_FAILED" in refused.stderr
        scheduler.terminate()
        assert scheduler.stderr is not None
        assert scheduler.stderr.read() == ""


@pytest.mark.parametrize("content", ["", " \n"])
def test_empty_authority_is_refused(tmp_path: Path, content: str) -> None:
    """The authorities of the system are never trusted in its place."""
    ours = certified(tmp_path / "ours")
    (ours / "ca.crt").write_text(content)
    with pytest.raises(Invalid, match=r"ours/ca\.crt is empty"):
        Certificates(ours)


def test_empty_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
        refused = run(*command)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert "leave it out" in refused.stderr
    monkeypatch.setenv("XAIN_PARAMETERS_TLS__FOLDER", "")
    for command in (("scheduler",), ("status", *nowhere)):
        refused = run(*command)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert "XAIN_PARAMETERS_TLS__FOLDER" in refused.stderr
