"""The operator's commands, typed as an operator does."""

import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

from xain_coordinator.access.audit_log import verify
from xain_coordinator.access.control import AccessControl
from xain_coordinator.cli.access.names import expanded, seconds_of
from xain_coordinator.cli.main import app
from xain_foundation.commands import run_app
from xain_foundation.security.join_token import JoinToken
from xain_foundation.security.tls import Certificates
from xain_foundation.security.x509 import make_request, new_key, read_certificate


class Typed:
    """Commands for one coordinator that does not run."""

    def __init__(self, data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.data_dir = data_dir
        self._capsys = capsys

    def status(self, *words: str) -> int:
        return run_app(app, "xain-coordinator", [*words, "--data-dir", str(self.data_dir)])

    def __call__(self, *words: str) -> str:
        assert self.status(*words) == 0, self._capsys.readouterr().err
        return self._capsys.readouterr().out

    def refused(self, *words: str, status: int = 1) -> str:
        assert self.status(*words) == status
        return self._capsys.readouterr().err


@pytest.fixture
def typed(tmp_path, capsys) -> Typed:
    return Typed(tmp_path / "data", capsys)


@pytest.fixture
def closed(typed) -> Typed:
    """Commands for a coordinator with certificates."""
    typed("certs", "init", "--host", "fleet.example.org")
    return typed


def test_certificates_are_made_once(closed):
    folder = closed.data_dir / "access"
    assert Certificates(folder / "tls").own.names.hosts[:2] == ("fleet.example.org", "localhost")
    assert (folder / "ca.key").stat().st_mode & 0o777 == 0o600
    before = (folder / "ca.crt").read_bytes()
    told = closed.refused("certs", "init", "--host", "fleet.example.org")
    assert told.startswith("xain-coordinator certs init: ")
    assert str(folder) in told
    assert (folder / "ca.crt").read_bytes() == before


def test_commands_without_certificates_name_the_one_that_makes_them(typed):
    told = typed.refused("tokens", "create", "--name", "ward-7")
    assert f"there are no certificates in {typed.data_dir / 'access'}" in told
    assert "run `xain-coordinator certs init --host HOST`" in told
    assert not typed.data_dir.exists()


def test_operators_command_goes_to_no_other_machine_in_the_clear(typed):
    told = typed.refused("certs", "list", "--address", "fleet.example.org:50051")
    assert "'fleet.example.org' is another machine" in told
    assert "add --tls FOLDER; a coordinator without certificates takes this command on its" in told


def test_token_is_all_that_is_printed(closed):
    """A token leads to the first host, at the coordinator's port."""
    token = JoinToken.decode(closed("tokens", "create", "--name", "ward-7"))
    assert token.address == "fleet.example.org:50051"
    entry = json.loads(closed("certs", "list", "--json"))[-1]
    assert (entry["name"], entry["role"], entry["kind"]) == ("ward-7", "participant", "token")
    assert entry["expires_at"] - entry["issued_at"] == pytest.approx(86_400.0, abs=2.0)
    made = json.loads(
        closed(
            *("tokens", "create", "--name", "alice", "--role", "operator", "--ttl", "30m"),
            *("--address", "other:7", "--json"),
        )
    )
    assert JoinToken.decode(made["token"]).address == "other:7"
    assert (made["name"], made["role"]) == ("alice", "operator")


def test_tokens_of_many_sites_are_files_of_their_own(closed, tmp_path):
    closed("tokens", "create", "--name", "site-{08..11}", "--to", str(tmp_path / "tokens"))
    files = sorted((tmp_path / "tokens").iterdir())
    assert [file.name for file in files] == [f"site-{n}.token" for n in ("08", "09", "10", "11")]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert len({JoinToken.decode(file.read_text()).key for file in files}) == 4
    told = closed.refused("tokens", "create", "--name", "site-{1..2}", status=2)
    assert "need --to DIR, or --json" in told


@pytest.mark.parametrize("words", [["--name", "a/b"], ["--name", "a", "--ttl", "soon"]])
def test_wrong_flag_of_a_token_is_named(closed, words):
    told = closed.refused("tokens", "create", *words, status=2)
    assert f"command line: {words[-2]}: " in told


def test_token_in_a_redirected_file_is_its_owners_alone(closed, tmp_path, monkeypatch):
    """The token has a key, and a shell makes the file with the mode that the umask leaves."""
    file = tmp_path / "ward-7.token"
    with file.open("w") as redirected:
        file.chmod(0o644)
        monkeypatch.setattr(sys, "stdout", redirected)
        assert closed.status("tokens", "create", "--name", "ward-7") == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert JoinToken.decode(file.read_text()).key


def test_next_command_is_for_the_same_coordinator(typed):
    told = typed("certs", "init", "--host", "fleet.example.org")
    assert f"tokens create --name NAME --data-dir {typed.data_dir}`" in told


def test_command_refuses_an_unknown_role(closed):
    told = closed.refused("tokens", "create", "--name", "a", "--role", "king")
    assert "king" in told
    assert "participant" in told


def test_revoked_by_name_or_by_the_serial_number_that_is_shown(closed):
    for name in ("ward-7", "ward-8"):
        closed("tokens", "create", "--name", name)
    entries = json.loads(closed("certs", "list", "--json"))
    assert closed("certs", "revoke", "ward-7") == f"revoked: {entries[-2]['serial']}\n"
    shown = entries[-1]["serial"][:12]
    assert shown in closed("certs", "list")
    assert closed("certs", "revoke", shown) == f"revoked: {entries[-1]['serial']}\n"
    assert all(each["revoked"] for each in json.loads(closed("certs", "list", "--json"))[-2:])
    assert "ward-9" in closed.refused("certs", "revoke", "ward-9")
    told = closed("certs", "revoke", "0x10:00")
    assert told == "revoked: 1000 (not issued here)\n"
    assert "foreign" in closed("certs", "list")
    serials = [entries[-2]["serial"], entries[-1]["serial"], "1000"]
    assert closed("certs", "list", "--revoked").splitlines() == serials


def test_names_made_by_a_revoked_operator_are_listed(closed):
    control = AccessControl.open(closed.data_dir / "access")
    for name, role, by in (
        ("alice", "operator", "operator 'root'"),
        ("ward-7", "participant", "operator 'alice'"),
        ("ward-8", "participant", "operator 'bob'"),
    ):
        control.create_token(name, role, 3600.0, "localhost:1", by=by)
    control.close()
    told = closed("certs", "revoke", "alice").splitlines()[1]
    assert "ward-7" in told
    assert "ward-8" not in told
    assert "certs revoke NAME" in told


def test_request_is_signed_for_the_name_that_is_typed(closed, tmp_path):
    request = tmp_path / "ward-7.csr"
    request.write_bytes(make_request(new_key(), "somebody-else"))
    pem = closed("certs", "sign", str(request), "--name", "ward-7").encode()
    assert read_certificate(pem).names.uris == ("spiffe://fleet.example.org/participant/ward-7",)
    assert pem.count(b"BEGIN CERTIFICATE") == 2
    request.write_bytes(b"nonsense")
    assert "no certificate request" in closed.refused(
        "certs", "sign", str(request), "--name", "ward-7"
    )


def test_own_certificate_is_renewed_for_other_hosts(closed):
    folder = closed.data_dir / "access" / "tls"
    before = Certificates(folder).own
    told = closed("certs", "renew", "--host", "new.example.org")
    assert told.startswith("the coordinator has a new certificate for new.example.org, ")
    after = Certificates(folder).own
    assert (before.serial != after.serial, after.names.dns[0]) == (True, "new.example.org")


def test_key_of_the_authority_needs_its_passphrase(typed, tmp_path):
    file = tmp_path / "passphrase"
    file.write_text("correct horse\n")
    typed("certs", "init", "--host", "a.example.org", "--passphrase-file", str(file))
    assert b"ENCRYPTED" in (typed.data_dir / "access" / "ca.key").read_bytes()
    told = typed.refused("tokens", "create", "--name", "ward-7")
    assert "ca.key" in told
    assert typed("tokens", "create", "--name", "ward-7", "--passphrase-file", str(file))


def test_audit_log_is_shown_and_its_chain_checked(closed, tmp_path):
    closed("tokens", "create", "--name", "ward-7")
    path = closed.data_dir / "access" / "audit.log"
    noted = verify(path).last_hash
    closed("certs", "revoke", "ward-7")
    lines = closed("audit", "show", "--last", "2").splitlines()
    assert ["token_created  by operator" in lines[0], "revoked  by operator" in lines[1]] == [
        True,
        True,
    ]
    assert "ward-7" in lines[0]
    assert f"5 lines, the last one with the hash {verify(path).last_hash}" in closed(
        "audit", "verify", "--hash", noted
    )
    assert "written anew" in closed.refused("audit", "verify", "--hash", "0" * 63 + "1")
    text = path.read_text()
    copy = tmp_path / "copy.log"
    copy.write_text(text.replace('"name":"ward-7"', '"name":"ward-8"', 1))
    told = closed.refused("audit", "verify", str(copy))
    assert f"line 4 of {copy} is damaged" in told


def test_session_commands_need_a_coordinator_that_runs(closed):
    for words in (["participants", "remove", "ward-7"], ["session", "finish"]):
        assert "no coordinator runs on this machine" in closed.refused(*words)


def test_folder_that_another_process_uses_is_told(closed):
    with closing(AccessControl.open(closed.data_dir / "access")):
        assert "another process has" in closed.refused("certs", "list")


def test_names_of_many_sites():
    assert expanded("ward-7") == ["ward-7"]
    assert expanded("s{1..3}x") == ["s1x", "s2x", "s3x"]
    with pytest.raises(ValueError, match="1 to 10000 numbers"):
        expanded("s{3..1}")


def test_lengths_of_time():
    assert [seconds_of(text) for text in ("90", "30m", "24h", "1.5d")] == [90, 1800, 86400, 129600]
    for text in ("", "0h", "h", "-1h", "1w"):
        with pytest.raises(ValueError, match="30m, 24h or 7d"):
            seconds_of(text)
