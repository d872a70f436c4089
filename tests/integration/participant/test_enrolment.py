"""A site joins, keeps its certificate, and renews it."""

import shutil
import signal
import subprocess
import sys
from random import Random

import pytest

import xain
from support.certificates import issued, make_authority, write_folder
from support.enrolling import Enroller, serving
from support.trainee import Trainee
from xain_foundation.commands import run_app
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import REVOKED, Certificates
from xain_foundation.settings.settings import ConfigError, load
from xain_participant.agent.agent import Agent
from xain_participant.cli.cli import app
from xain_participant.config import ParticipantConfig
from xain_participant.enrolment import joining
from xain_participant.enrolment.enrolled import enrolled
from xain_participant.enrolment.joining import Token
from xain_participant.enrolment.kept import KeptCertificates, extended
from xain_participant.enrolment.upkeep import Upkeep, renew
from xain_participant.wire.client import CoordinatorClient
from xain_wire.fl import coordinator_pb2 as pb


@pytest.fixture
def enroller() -> Enroller:
    return Enroller()


@pytest.fixture
def address(enroller, tmp_path):
    with serving(enroller, tmp_path / "server") as address:
        yield address


@pytest.fixture
def kept(tmp_path) -> KeptCertificates:
    return KeptCertificates(tmp_path / "ward-7")


def join(enroller: Enroller, address: str, kept: KeptCertificates) -> joining.Joined:
    return joining.join(kept, Token(enroller.token("ward-7", address), "ward-7.token"))


def refused(kept: KeptCertificates, token: str, address: str = "") -> str:
    with pytest.raises(CommandFailed) as caught:
        joining.join(kept, Token(token, "ward-7.token"), address)
    return str(caught.value)


def config_of(kept: KeptCertificates, **values: str) -> ParticipantConfig:
    given = {"participant.state_dir": str(kept.folder.parent)}
    given |= {key.replace("__", "."): value for key, value in values.items()}
    return load(ParticipantConfig, overrides=given)


def test_joined_site_needs_its_state_directory_only(enroller, address, kept):
    """Address, name and certificates come from there, and calls are made with them."""
    joined = join(enroller, address, kept)
    assert (joined.name, joined.role, joined.address) == ("ward-7", "participant", address)
    assert (kept.folder / "tls.key").stat().st_mode & 0o777 == 0o600
    there = enrolled(config_of(kept))
    assert (there.address, there.participant_id) == (address, "ward-7")
    with CoordinatorClient(there.address, there.participant_id, tls=there.tls) as client:
        client.heartbeat(pb.READY, 0)
    assert enroller.serials == [there.tls.own.serial]


def test_settings_prevail_over_the_state_directory(enroller, address, kept):
    join(enroller, address, kept)
    assert enrolled(config_of(kept, coordinator__host="other")).address == "other:50051"
    with pytest.raises(ConfigError, match=r'"ward-8", and .* "ward-7"; leave the id out'):
        enrolled(config_of(kept, participant__id="ward-8"))


def test_coordinator_beyond_this_machine_is_not_called_in_the_clear(enroller, address, kept):
    """Without certificates, unless that is meant; the message names both sides' commands."""
    elsewhere = {"coordinator__host": "fleet.example.org"}
    with pytest.raises(ConfigError, match=r"'fleet\.example\.org' is another machine") as caught:
        enrolled(config_of(kept, **elsewhere))
    for typed in ("tokens create --name NAME", "join FILE", "coordinator.insecure = true"):
        assert typed in str(caught.value)
    with pytest.raises(ValueError, match=r"'fleet\.example\.org' is another machine"):
        xain.rounds(coordinator="fleet.example.org")
    with pytest.raises(ValueError, match="pass tls=, or insecure=True"):
        Agent(Trainee("ward-7", 3), "fleet.example.org:50051")
    meant = enrolled(config_of(kept, **elsewhere, coordinator__insecure="true"))
    assert (meant.address, meant.tls) == ("fleet.example.org:50051", None)
    join(enroller, address, kept)
    assert enrolled(config_of(kept, **elsewhere)).tls is not None


def test_command_reads_no_settings_but_those_that_it_uses(enroller, address, tmp_path, monkeypatch):
    """A site joins while what it is to train on is not configured yet, or wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XAIN_PARTICIPANT_PARTITION__KIND", "nonsense")
    monkeypatch.setenv("XAIN_PARTICIPANT_UNKNOWN__KEY", "1")
    (tmp_path / "ward-7.token").write_text(enroller.token("ward-7", address))
    assert run_app(app, "xain-participant", ["join", "ward-7.token"]) == 0
    monkeypatch.setenv("XAIN_PARTICIPANT_COORDINATOR__PORT", "nonsense")
    assert run_app(app, "xain-participant", ["join", "ward-7.token"]) == 2


def test_expired_token_names_its_file_and_the_next_command(enroller, address, kept):
    told = refused(kept, enroller.token("ward-7", address, lifetime_s=-60.0))
    assert told.startswith("ward-7.token: the token for 'ward-7' has expired on ")
    assert "xain-coordinator tokens create" in told


def test_token_of_another_coordinator(enroller, address, kept):
    told = refused(kept, Enroller().token("ward-7", address))
    assert f"the coordinator at {address} cannot be reached: its authority has the name of" in told
    assert "the one in ward-7.token" in told


def test_coordinator_under_a_name_that_its_certificate_does_not_have(enroller, kept, tmp_path):
    with serving(enroller, tmp_path / "elsewhere", ["fleet.example.org"]) as address:
        told = refused(kept, enroller.token("ward-7", address))
    assert "its certificate is for fleet.example.org, and not for 127.0.0.1" in told
    assert "add --coordinator HOST:PORT" in told


def test_coordinator_that_is_not_there(enroller, kept):
    told = refused(kept, enroller.token("ward-7", "127.0.0.1:1"))
    assert "the coordinator at 127.0.0.1:1 cannot be reached: connection refused" in told


def test_folder_of_another_participant_is_left_alone(enroller, address, kept):
    join(enroller, address, kept)
    told = refused(kept, enroller.token("ward-8", address))
    assert "is that of participant 'ward-7', and the token is for 'ward-8'" in told
    assert enrolled(config_of(kept)).participant_id == "ward-7"


def test_request_is_signed_elsewhere(enroller, kept):
    request = joining.make_site_request(kept, "ward-7")
    assert joining.make_site_request(kept, "ward-7") != b""
    certificate = enroller._sign(request, "ward-7")
    for _ in range(2):
        joined = joining.take_certificate(
            kept, certificate, enroller.authority.certificate, "127.0.0.1:1", "ward-7.pem"
        )
        assert joined.name == "ward-7"
    assert kept.address == "127.0.0.1:1"
    other = enroller._sign(
        joining.make_site_request(KeptCertificates(kept.folder / "x"), "a"), "ward-7"
    )
    with pytest.raises(CommandFailed, match=r"ward-7.pem: the certificate is not for the key in"):
        joining.take_certificate(kept, other, b"", "127.0.0.1:1", "ward-7.pem")


# --- renewal ---


def test_certificate_is_renewed_with_a_new_key_at_two_thirds_of_its_life(enroller, address, kept):
    join(enroller, address, kept)
    tls = Certificates(kept.folder)
    before, begins = tls.own, tls.own.not_before
    life = before.not_after - begins
    at = begins + life * 0.66
    upkeep = Upkeep(tls, address, kept, now=lambda: at, chance=Random(1))
    assert upkeep.step() <= 60.0
    assert tls.own == before
    at = begins + life * 0.75
    upkeep.step()
    assert tls.own.serial != before.serial
    assert tls.own.key_digest != before.key_digest
    assert tls.version == 1
    assert kept.address == address
    assert joining.join(kept, Token(enroller.token("ward-7", address), "new")).already is False


def test_renewal_by_hand(enroller, address, kept, capsys):
    """Nodes and others do not renew by themselves. The list of revoked certificates goes
    along."""
    enroller.lifetime_s = 120.0  # beginning 300 s ago
    join(enroller, address, kept)
    (kept.folder / REVOKED).write_text("0abc\n")
    before = Certificates(kept.folder).own
    enroller.lifetime_s = 3600.0
    command = ["renew", "--state-dir", str(kept.folder.parent)]
    assert run_app(app, "xain-participant", command) == 0
    assert "is renewed, and is valid until" in capsys.readouterr().out
    after = Certificates(kept.folder)
    assert after.own.serial != before.serial
    assert after.callers.revoked == {"abc"}
    assert run_app(app, "xain-participant", command) == 0
    assert "is not due to be renewed" in capsys.readouterr().out
    assert run_app(app, "xain-participant", ["renew", "--state-dir", "nowhere"]) == 2


def test_mistake_in_the_settings_of_the_data_does_not_end_a_renewal(
    enroller, address, kept, tmp_path, capsys
):
    enroller.lifetime_s = 120.0  # beginning 300 s ago
    join(enroller, address, kept)
    file = tmp_path / "site.toml"
    file.write_text('[data]\ntest_fraction = 2\n[logging]\nlevel = "info"\n')
    command = ["renew", "--config", str(file), "--state-dir", str(kept.folder.parent)]
    assert run_app(app, "xain-participant", command) == 0
    assert "is renewed" in capsys.readouterr().out
    file.write_text("[coordinator]\nport = 0\n")
    assert run_app(app, "xain-participant", command) == 2
    assert "coordinator.port is 0" in capsys.readouterr().err


KILLED = """
import os, sys
from pathlib import Path
from xain_foundation import durable
from xain_participant.enrolment import joining, kept, upkeep
from xain_foundation.security.tls import Certificates

steps = int(sys.argv[1])

def step(call):
    def counted(*args, **kwargs):
        global steps
        if steps == 0:
            os.kill(os.getpid(), 9)
        steps -= 1
        return call(*args, **kwargs)
    return counted

for module, name in ((os, "fsync"), (os, "mkdir"), (Path, "replace"), (Path, "symlink_to")):
    setattr(module, name, step(getattr(module, name)))
site = kept.KeptCertificates(Path(sys.argv[2]))
if len(sys.argv) > 3:
    joining.join(site, joining.Token(sys.argv[3], "token"))
else:
    upkeep.renew(site, Certificates(site.folder), site.address)
"""


def killed_at(step: int, *arguments: str) -> bool:
    """Run join or renew, and kill it before its nth change of the disk. Whether it was killed."""
    ended = subprocess.run([sys.executable, "-c", KILLED, str(step), *arguments], check=False)
    assert ended.returncode in (0, -signal.SIGKILL)
    return ended.returncode != 0


def test_join_that_is_killed_at_any_step_can_be_repeated(enroller, address, tmp_path):
    step = 0
    while True:
        kept = KeptCertificates(tmp_path / f"site-{step}")
        token = enroller.token("ward-7", address)
        was_killed = killed_at(step, str(kept.folder.parent), token)
        assert joining.join(kept, Token(token, "token")).name == "ward-7"
        assert enrolled(config_of(kept)).participant_id == "ward-7"
        if not was_killed:
            break
        step += 1
    assert step > 8
    assert len(enroller.signed) == step + 1  # one key for each token


def test_renewal_that_is_killed_at_any_step_leaves_a_pair_that_works(enroller, address, kept):
    join(enroller, address, kept)
    step = 0
    while killed_at(step, str(kept.folder.parent)):
        with CoordinatorClient(address, "ward-7", tls=Certificates(kept.folder)) as client:
            client.heartbeat(pb.READY, 0)
        step += 1
    assert step > 8
    renew(kept, Certificates(kept.folder), address)


# --- connections ---


def test_calls_use_new_certificates_and_streams_go_on(enroller, address, tmp_path):
    """Files are exchanged one after the other, with junk and halves of files in between: no call
    fails, and the one stream sees the end."""
    folder = write_folder(tmp_path / "tls", enroller.authority, Role.PARTICIPANT, "ward-7")
    tls = Certificates(folder)
    tls.look_s = 0.0
    shown = {tls.own.serial}
    with CoordinatorClient(address, "ward-7", tls=tls) as client:
        news = client.watch()
        next(news)
        for number in range(25):
            other = write_folder(
                tmp_path / str(number), enroller.authority, Role.PARTICIPANT, "ward-7"
            )
            for file in other.iterdir():
                for wrong in (b"junk", file.read_bytes()[:200]):
                    (folder / file.name).write_bytes(wrong)
                    client.heartbeat(pb.READY, 0)
                file.replace(folder / file.name)
                client.heartbeat(pb.READY, 0)
            assert enroller.serials[-1] == tls.own.serial
            assert tls.own.serial not in shown
            shown.add(tls.own.serial)
            next(news)
        assert set(enroller.serials) == shown
        assert len(client._calls._former) == 1  # that of the stream
        news.close()
        assert not client._calls._former


def test_expired_certificate_is_told_at_the_start(enroller, address, kept):
    """The folder, what is wrong, and the next command."""
    enroller.lifetime_s = 3600.0
    join(enroller, address, kept)
    pem, key = issued(enroller.authority, Role.PARTICIPANT, "ward-7", lifetime_s=-60.0)
    (kept.folder / "tls.crt").write_bytes(pem)
    (kept.folder / "tls.key").write_bytes(key)
    with pytest.raises(ConfigError) as caught:
        enrolled(config_of(kept))
    told = str(caught.value)
    assert f"participant.state_dir is {kept.folder.parent}: {kept.folder / 'tls.crt'}" in told
    assert "certificate has expired" in told
    assert "xain-participant join FILE" in told
    # A new token mends it.
    assert not join(enroller, address, kept).already
    assert enrolled(config_of(kept)).participant_id == "ward-7"


def test_certificates_of_another_authority_are_used_and_not_renewed(enroller, tmp_path):
    folder = write_folder(tmp_path / "own", enroller.authority, Role.PARTICIPANT, "ward-7")
    there = enrolled(load(ParticipantConfig, overrides={"tls.folder": str(folder)}))
    assert (there.participant_id, there.kept) == ("ward-7", None)
    assert there.address == "localhost:50051"
    with pytest.raises(ConfigError, match=r"tls\.folder is .*: no certificates: "):
        enrolled(load(ParticipantConfig, overrides={"tls.folder": str(tmp_path / "none")}))


def test_warnings_before_the_end_of_a_certificate_that_is_not_renewed(enroller, tmp_path, caplog):
    """Once a day, with the file and the days that are left."""
    folder = write_folder(tmp_path / "own", enroller.authority, Role.PARTICIPANT, "ward-7")
    tls = Certificates(folder, now=lambda: at)
    at = tls.own.not_after - 1000.0
    upkeep = Upkeep(tls, "127.0.0.1:1", None, now=lambda: at)
    with caplog.at_level("WARNING"):
        for _ in range(3):
            upkeep.step()
    (line,) = [one for one in caplog.records if "certificate_expires" in str(one.msg)]
    assert str(folder / "tls.crt") in str(line.msg)


def test_certificates_that_are_gone_are_told(enroller, address, kept):
    """A site that has joined never connects without certificates instead."""
    join(enroller, address, kept)
    shutil.rmtree(kept.folder.parent / "certificates")
    with pytest.raises(ConfigError, match="certificates are gone"):
        enrolled(config_of(kept))


def test_authority_is_extended_and_never_replaced():
    """A program that passes itself off as the coordinator once is not trusted from then on."""
    known, other = make_authority().certificate, make_authority().certificate
    assert extended(known, other) == known
    assert extended(known, b"") == known
    assert extended(known, other + known) == other + known
