"""AccessControl with real keys and certificates, and files in a folder."""

import contextlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.logs import capture_logs
from support.refusals import refused_as
from xain_coordinator.access import audit_log
from xain_coordinator.access.control import AccessControl, initialise
from xain_coordinator.access.errors import (
    AccessError,
    Refusal,
    Unauthenticated,
)
from xain_foundation.security import tls
from xain_foundation.security.callers import Caller, Callers
from xain_foundation.security.identity import Identity, IdentityRules, Role
from xain_foundation.security.join_token import JoinToken
from xain_foundation.security.tls import Certificates
from xain_foundation.security.x509 import (
    digest_of_key,
    key_of_pem,
    make_request,
    new_key,
    read_certificate,
)

HOST = "coordinator.example.org"
ADDRESS = f"{HOST}:50051"
DAY = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority."""
    folder = tmp_path_factory.mktemp("template") / "access"
    initialise(folder, [HOST])
    return folder


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path, template: Path) -> Path:
    return shutil.copytree(template, tmp_path / "access")


@pytest.fixture
def control(folder: Path, clock: Clock) -> Iterator[AccessControl]:
    control = AccessControl.open(folder, now=clock)
    yield control
    control.close()


def caller_of(certificate: bytes, clock: Clock) -> Caller:
    return Callers(IdentityRules(authority=HOST), clock).of_certificate(certificate)


def token_of(control: AccessControl, clock: Clock, name: str = "ward-7", **options: Any) -> Caller:
    """The holder of a new token, as the server sees it."""
    text, _, _ = control.create_token(name, "participant", DAY, ADDRESS, by="alice", **options)
    return caller_of(JoinToken.decode(text).certificate, clock)


def request(key: Any = None, name: str = "whatever") -> bytes:
    return make_request(key or new_key(), name)


def test_site_joins_under_the_name_of_its_token(control, clock):
    """The site connects with the certificate that it got for its token, and is known."""
    text, serial, expires_at = control.create_token(
        "ward-7", Role.PARTICIPANT, DAY, ADDRESS, by="alice"
    )
    token = JoinToken.decode(text)
    assert token.address == ADDRESS
    assert token.authority == control.authority
    holder = caller_of(token.certificate, clock)
    assert holder == Caller(Identity(HOST, Role.JOINING, "ward-7"), serial, expires_at)
    key = new_key()
    certificate = control.join(holder, request(key, "mallory"), "ipv4:10.0.0.1:5000")
    assert caller_of(certificate, clock).identity == Identity(HOST, Role.PARTICIPANT, "ward-7")
    found = read_certificate(certificate)
    assert found.key_digest == digest_of_key(key.public_key())
    assert found.not_after == pytest.approx(clock.now + 90 * DAY, abs=2)
    control.check(caller_of(certificate, clock))


def test_same_key_gets_the_same_bytes_also_after_a_restart(folder, control, clock):
    key, holder = new_key(), token_of(control, clock)
    first = control.join(holder, request(key), "a")
    clock.now += 100
    assert control.join(holder, request(key, "again"), "b") == first
    renewing, site = new_key(), caller_of(first, clock)
    renewed = control.renew(site, request(renewing))
    assert renewed != first
    control.close()
    control = AccessControl.open(folder, now=clock)
    assert control.join(holder, request(key), "c") == first
    assert control.renew(site, request(renewing)) == renewed
    control.close()


@pytest.fixture
def holder(control: AccessControl, clock: Clock) -> Caller:
    return token_of(control, clock)


def test_used_token_names_both_times_and_hosts(folder, control, clock, holder):
    control.join(holder, request(), "ipv4:10.0.0.1:5000")
    clock.now += 3600
    with (
        capture_logs() as logs,
        refused_as("TOKEN_USED", match=r"by 10\.0\.0\.1, .* by 10\.9\.9\.9\..*certs revoke"),
    ):
        control.join(holder, request(), "ipv4:10.9.9.9:5000")
    assert [line["event"] for line in logs] == ["token_refused"]
    last = list(audit_log.read(folder / "audit.log"))[-1]
    assert (last.event, last.fields["peer"]) == ("token_refused", "10.9.9.9")
    assert last.fields["first_at"] == pytest.approx(last.at - 3600)


def test_broken_requests_are_refused_in_words(control, holder):
    for broken, why in (
        (b"", "no certificate request"),
        (b"x" * 1_000_000, "1000000 bytes"),
        (control.authority, "no certificate request"),
    ):
        for refused in (
            lambda broken=broken: control.join(holder, broken, "a"),
            lambda broken=broken: control.renew(holder, broken),
            lambda broken=broken: control.sign(broken, "x", "node", by="alice"),
        ):
            with refused_as("INVALID_CERTIFICATE_REQUEST", match=why):
                refused()
    assert control.join(holder, request(), "a"), "the token was not used up"


def test_only_tokens_join(control, clock):
    site = caller_of(control.sign(request(), "bob", "operator", by="alice"), clock)
    assert site.identity.role is Role.OPERATOR
    with refused_as("NOT_PERMITTED", match="only a token is exchanged"):
        control.join(site, request(), "a")


@pytest.mark.parametrize(
    "address", ["", "host", ":5000", "host:", "host:0", "host:99999", "a b:1", "http://h:1", "ä:1"]
)
def test_address_that_no_site_can_connect_to_is_refused(control, address):
    with refused_as("INVALID_CERTIFICATE_REQUEST", match=r"HOST:PORT|is no host"):
        control.create_token("ward-7", "participant", DAY, address, by="alice")
    assert all(each.kind != "token" for each in control.entries())


def test_revocation_holds_at_once_and_after_a_restart(folder, control, clock, holder):
    site = caller_of(control.join(holder, request(), "a"), clock)
    text, serial, _ = control.create_bearer("ward-7", "observer", DAY, by="alice")
    assert control.bearer(text) == Caller(
        Identity(HOST, Role.OBSERVER, "ward-7"), serial, pytest.approx(clock.now + DAY, abs=1)
    )
    told = []
    control.on_revoked = told.append
    revoked = control.revoke("ward-7", by="alice")
    assert told == [frozenset(revoked.serials)] == [{holder.serial, site.serial, serial}]
    assert control.revoke("ward-7", by="alice") == revoked, "a lost answer is asked for again"
    assert len(told) == 1
    control.close()
    again = AccessControl.open(folder, now=clock)
    for each in (control, again):
        for refused in (
            lambda each=each: each.check(site),
            lambda each=each: each.check(holder),
            lambda each=each: each.bearer(text),
            lambda each=each: each.join(holder, request(), "a"),
            lambda each=each: each.renew(site, request()),
        ):
            with pytest.raises(Unauthenticated, match="was revoked"):
                refused()
    again.close()


def test_subscriber_is_told_once_a_revocation_counts(folder, control, holder):
    """A call that arrives while the subscriber ends streams is refused."""
    heard = []

    def check(serials):
        with pytest.raises(Unauthenticated):
            control.check(holder)
        assert audit_log.verify(folder / "audit.log").last_hash == control.last_hash
        heard.append(serials)

    control.on_revoked = check
    control.revoke(holder.serial, by="alice")
    assert heard == [{holder.serial}]


def test_bearer_token_expires_and_others_are_refused(control, clock):
    text, _, expires_at = control.create_bearer("page", "observer", 10, by="alice")
    for wrong in ("", text[:-1], text + "x", "\udcff", "ä"):
        with pytest.raises(Unauthenticated, match="no bearer token"):
            control.bearer(wrong)
    clock.now = expires_at + 1
    with pytest.raises(Unauthenticated, match="has expired"):
        control.bearer(text)


def test_no_secret_is_in_the_folder_but_the_keys(folder, control):
    """The audit log, and the text of errors, have neither tokens nor keys."""
    text, _, _ = control.create_token("ward-7", "participant", DAY, ADDRESS, by="alice")
    bearer, _, _ = control.create_bearer("page", "observer", DAY, by="alice")
    key = key_of_pem(JoinToken.decode(text).key).private_numbers().private_value
    written = (folder / "audit.log").read_text()
    for secret in (text, bearer, bearer.removeprefix("xainb1."), str(key), f"{key:x}", "PRIVATE"):
        assert secret not in written
    files = (path for path in folder.rglob("*") if path.is_file())
    private = [path for path in files if b"PRIVATE" in path.read_bytes()]
    assert sorted(path.name for path in private) == ["ca.key", "tls.key"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in private)


def test_notes_and_refused_identities_are_lines(folder, control):
    control.note("settings_changed", by="alice", names=["rounds"], reason="x" * 5000)
    for port in range(5):
        control.note_refusal(f"ipv4:10.0.0.1:{port}", "no certificate")
    control.note_refusal("ipv4:10.0.0.2:5000", "no certificate")
    note, first, second = list(audit_log.read(folder / "audit.log"))[-3:]
    assert (note.event, note.by) == ("settings_changed", "alice")
    assert note.fields["names"] == ["rounds"]
    assert len(note.fields["reason"]) < 1100
    assert [line.fields["peer"] for line in (first, second)] == ["10.0.0.1", "10.0.0.2"]
    assert first.event == "identity_refused"


@pytest.mark.parametrize(
    "change",
    [
        lambda control, holder: control.join(holder, request(), "a"),
        lambda control, holder: control.revoke("ward-7", by="alice"),
        lambda control, holder: control.create_bearer("x", "observer", 1, by="alice"),
        lambda control, holder: control.note("x", by="alice"),
    ],
    ids=["join", "revoke", "bearer", "note"],
)
def test_change_counts_only_when_its_line_is_on_disk(control, monkeypatch, change, holder):
    """A certificate is not signed before, and a revocation that was not acknowledged counts not."""
    state = control.access

    def fails(fd):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with refused_as("NOT_RECORDED", match="Input/output error"):
            change(control, holder)
        control.note_refusal("a", "b")
    assert control.access is state
    control.check(holder)


def test_without_the_key_of_an_authority_nothing_is_signed(tmp_path, clock):
    """Bearer tokens, notes and revocations need none."""
    control = AccessControl.open(tmp_path / "access", now=clock)
    holder = Caller(Identity(HOST, Role.JOINING, "ward-7"), "70", clock.now + 1)
    site = Caller(Identity(HOST, Role.PARTICIPANT, "ward-7"), "71", clock.now + 1)
    for refused in (
        lambda: control.create_token("x", "node", DAY, ADDRESS, by="alice"),
        lambda: control.join(holder, request(), "a"),
        lambda: control.renew(site, request()),
        lambda: control.sign(request(), "x", "node", by="alice"),
        lambda: control.renew_own([HOST], tmp_path / "access/tls"),
    ):
        with refused_as("NO_AUTHORITY", match=r"ca.key is not there.*certs init"):
            refused()
    text, _, _ = control.create_bearer("page", "observer", DAY, by="alice")
    assert control.bearer(text).identity == Identity("", Role.OBSERVER, "page")
    control.note("session_opened", by="alice")
    control.revoke("page", by="alice")
    assert control.authority == b""
    control.close()


def test_key_of_the_authority_may_be_kept_elsewhere(folder, clock):
    """No certificate is signed then, and bearer tokens have identities of this authority."""
    (folder / "ca.key").unlink()
    control = AccessControl.open(folder, now=clock)
    text, _, _ = control.create_bearer("page", "observer", DAY, by="alice")
    assert control.bearer(text).identity.authority == HOST
    with refused_as("NO_AUTHORITY"):
        control.sign(request(), "x", "node", by="alice")
    control.close()


def test_new_authority_for_a_lost_one_is_in_the_log(folder, clock):
    for path in (folder / "ca.key", folder / "ca.crt"):
        path.unlink()
    shutil.rmtree(folder / "tls")
    initialise(folder, [HOST])
    created = [x for x in audit_log.read(folder / "audit.log") if x.event == "authority_created"]
    control = AccessControl.open(folder, now=clock)
    assert len(created) == 2
    assert created[1].fields["serial"] == read_certificate(control.authority).serial
    control.close()


def test_certificate_ends_with_its_authority(control, clock):
    """A certificate ends with the one that signs it; after that nothing is signed."""
    end = read_certificate(control.authority).not_after
    clock.now = end - 10
    _, _, expires_at = control.create_token("x", "node", DAY, ADDRESS, by="alice")
    assert expires_at <= end
    clock.now = end + 1
    with refused_as("NO_AUTHORITY", match="has expired"):
        control.create_token("x", "node", DAY, ADDRESS, by="alice")


def test_many_threads_join_with_one_token(folder, control, holder):
    """One of the keys gets a certificate, and all who have it get the same."""
    keys = [new_key() for _ in range(4)]
    results = []

    def join(number):
        with contextlib.suppress(Refusal):
            results.append((number, control.join(holder, request(keys[number]), "a")))

    threads = [threading.Thread(target=join, args=(number % 4,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert audit_log.verify(folder / "audit.log").num_lines == control.num_lines


# --- the files ---


def test_authority_and_own_certificate_are_made_once(folder, clock):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(AccessError, match="this coordinator has its certificates"):
        initialise(folder, [HOST])
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    own = Certificates(folder / "tls").own
    assert own.names.hosts == (HOST, "localhost", "127.0.0.1")
    assert own.names.uris == (f"spiffe://{HOST}/coordinator/coordinator",)
    entries = AccessControl.open(folder, now=clock).entries()
    assert [(each.name, each.role) for each in entries] == [("coordinator", Role.COORDINATOR)]


@pytest.mark.parametrize("host", ["", "a b", "host:50051", "http://host", "ä.example.org", "-x"])
def test_impossible_hosts_are_refused(tmp_path, host):
    with pytest.raises(AccessError, match="is no host"):
        initialise(tmp_path / "access", [host])
    assert not (tmp_path / "access").exists()


def test_hosts_may_be_names_and_addresses(tmp_path):
    initialise(tmp_path / "access", ["Ward_1.example.org", "10.0.0.1", "[::1]", "*.pods"])
    own = Certificates(tmp_path / "access/tls").own
    names = ("ward_1.example.org", "*.pods", "localhost")
    assert own.names.hosts == (*names, "10.0.0.1", "::1", "127.0.0.1")


def test_passphrase_encrypts_the_key_of_the_authority(tmp_path, clock):
    initialise(tmp_path / "access", [HOST], passphrase=b"secret")
    assert b"ENCRYPTED" in (tmp_path / "access/ca.key").read_bytes()
    for wrong, why in ((b"", "is encrypted.*passphrase_file"), (b"other", "passphrase is wrong")):
        with pytest.raises(AccessError, match=rf"ca\.key.*{why}"):
            AccessControl.open(tmp_path / "access", wrong, clock)
    control = AccessControl.open(tmp_path / "access", b"secret", clock)
    assert token_of(control, clock).identity.name == "ward-7"
    control.close()


def test_unusable_files_are_named(folder, clock):
    (folder / "ca.key").write_bytes(b"x")
    with pytest.raises(AccessError, match=r"ca\.key.*no key in PEM"):
        AccessControl.open(folder, now=clock)
    (folder / "ca.key").unlink()
    (folder / "ca.key").mkdir()
    with pytest.raises(AccessError, match=r"ca\.key: Is a directory"):
        AccessControl.open(folder, now=clock)


def test_certificate_without_its_key_is_not_replaced(folder):
    """A key without its certificate is not replaced either: the file has to be put back."""
    shutil.rmtree(folder / "tls")
    (folder / "ca.key").rename(folder / "kept")
    with pytest.raises(AccessError, match=r"ca.key is not; put it back"):
        initialise(folder, [HOST])
    (folder / "kept").rename(folder / "ca.key")
    (folder / "ca.crt").unlink()
    with pytest.raises(AccessError, match=r"ca.key is there, but its certificate"):
        initialise(folder, [HOST])


class Killed(BaseException):
    """The process ends here."""


def dying(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have the process end before its n-th sync or renaming."""
    left = number

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left <= 0:  # nor is anything done after it
                raise Killed
            return function(*args, **kwargs)

        return step

    monkeypatch.setattr(os, "fsync", wrap(os.fsync))
    monkeypatch.setattr(Path, "replace", wrap(Path.replace))
    monkeypatch.setattr(Path, "unlink", wrap(Path.unlink))


def test_initialising_can_be_repeated_after_a_kill_at_any_step(tmp_path, clock):
    """The folder has one authority in the end, and a certificate of it."""
    for number in range(1, 100):
        folder = tmp_path / str(number)
        with pytest.MonkeyPatch.context() as patch:
            dying(patch, number)
            try:
                initialise(folder, [HOST], now=clock)
            except Killed:
                pass
            else:
                break
        if not (folder / "tls").exists():  # else it was finished, and nobody was told
            initialise(folder, [HOST], now=clock)
        own = Certificates(folder / "tls").own
        control = AccessControl.open(folder, now=clock)
        created = [x for x in audit_log.read(folder / "audit.log") if x.event[:9] == "authority"]
        assert len(created) == 1, number
        assert created[0].fields["serial"] == read_certificate(control.authority).serial
        assert own.serial in control.access.issued
        control.close()
    assert number > 10


def test_renewal_of_the_own_certificate_can_end_at_any_step(folder, clock):
    """Key and certificate belong together after the next start, old ones or new ones."""
    serials = set()
    for number in range(1, 100):
        control = AccessControl.open(folder, now=clock)
        with pytest.MonkeyPatch.context() as patch:
            dying(patch, number)
            try:
                control.renew_own([], folder / "tls")
            except Killed:
                pass
            else:
                break
        control.close()
        AccessControl.open(folder, now=clock).close()
        serials.add(Certificates(folder / "tls").own.serial)
        assert stat.S_IMODE((folder / "tls" / tls.KEY).stat().st_mode) == 0o600
    assert number > 8
    assert len(serials) > 1
    control.close()
