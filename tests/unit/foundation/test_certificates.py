"""Authorities, requests, identities in certificates, and folders of files that change."""

import base64
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509 as pyca
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from tests.support.certificates import AUTHORITY_NAME, issued, make_authority, write_folder
from tests.support.logs import capture_logs

from xain_foundation.security import tls
from xain_foundation.security.callers import Caller, Callers
from xain_foundation.security.certificate_watch import CertificateWatch
from xain_foundation.security.identity import (
    Identity,
    IdentityRules,
    Names,
    NoIdentity,
    Role,
    parse_uri,
)
from xain_foundation.security.join_token import JoinToken
from xain_foundation.security.tls import Certificates, InvalidCertificates
from xain_foundation.security.x509 import (
    Authority,
    InvalidCredential,
    digest_of_key,
    key_of_pem,
    key_to_pem,
    make_request,
    new_key,
    read_certificate,
    read_request,
)

AUTHORITY = make_authority()


@pytest.mark.parametrize("name", ["ward-7", "Station 3, Ost", "a%b:c", "~x"])
def test_identity_survives_its_uri_in_a_certificate(name):
    identity = Identity(AUTHORITY.name, Role.PARTICIPANT, name)
    assert parse_uri(identity.uri) == identity
    certificate, _ = issued(AUTHORITY, Role.PARTICIPANT, name)
    found = read_certificate(certificate)
    assert IdentityRules().identify(found.names) == identity
    assert found.not_before < time.time() < found.not_after


@pytest.mark.parametrize(
    "uri",
    [
        "https://a/participant/x",
        "spiffe://a/participant",
        "spiffe://a/participant/x/y",
        "spiffe:///participant/x",
        "spiffe://a/king/x",
        "spiffe://a/participant/",
        "spiffe://a/participant/global",
        "spiffe://a/participant/..%2Fx",
    ],
)
def test_other_uris_are_no_identities(uri):
    with pytest.raises(ValueError, match="spiffe"):
        parse_uri(uri)
    with pytest.raises(NoIdentity):
        IdentityRules().identify(Names(uris=(uri,)))


def test_names_of_another_authority_get_their_roles_from_lists():
    roles = {Role.OPERATOR: ("alice",), Role.PARTICIPANT: ("ward-*", "*.example.org")}
    by_dns, by_cn = IdentityRules("dns", roles), IdentityRules("cn", roles)
    names = Names(common_name="alice", dns=("a.example.org",))
    assert by_dns.identify(names) == Identity("", Role.PARTICIPANT, "a.example.org")
    assert by_cn.identify(names) == Identity("", Role.OPERATOR, "alice")
    with pytest.raises(NoIdentity, match="in no list"):
        by_cn.identify(Names(common_name="mallory"))
    with pytest.raises(NoIdentity, match="2 names"):
        by_dns.identify(Names(dns=("a.example.org", "b.example.org")))
    with pytest.raises(NoIdentity, match="no name"):
        by_dns.identify(Names(common_name="alice"))


def test_pattern_of_a_uri_is_compared_with_the_whole():
    """Workloads of other authorities whose last part is the same are other callers."""
    rules = IdentityRules("uri", {Role.OPERATOR: ("spiffe://corp/ns/admins/alice",)})
    assert rules.identify(Names(uris=("spiffe://corp/ns/admins/alice",))).name == "alice"
    for other in ("spiffe://corp/ns/dev/alice", "spiffe://evil/joining/alice", "alice"):
        with pytest.raises(NoIdentity, match="in no list"):
            rules.identify(Names(uris=(other,)))


def test_authority_that_a_uri_names_must_be_the_expected_one():
    names = Names(uris=("spiffe://other/operator/eve",))
    assert IdentityRules().identify(names).role is Role.OPERATOR
    with pytest.raises(NoIdentity, match="other"):
        IdentityRules(authority="ours").identify(names)


def test_key_is_encrypted_with_a_passphrase():
    key = new_key()
    pem = key_to_pem(key, b"long words")
    assert b"ENCRYPTED" in pem
    read = key_of_pem(pem, b"long words")
    assert digest_of_key(read.public_key()) == digest_of_key(key.public_key())
    for passphrase in (b"", b"other words"):
        with pytest.raises(InvalidCredential):
            key_of_pem(pem, passphrase)


def _request_of(key: Any) -> bytes:
    builder = pyca.CertificateSigningRequestBuilder().subject_name(pyca.Name([]))
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    signed = builder.sign(key, algorithm)
    return signed.public_bytes(serialization.Encoding.PEM)


def test_requests_that_cannot_be_signed_are_refused_with_the_reason():
    good = make_request(new_key(), "ward-7")
    assert read_request(good)
    request = pyca.load_pem_x509_csr(good)
    der = bytearray(request.public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1  # in the signature
    forged = pyca.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)
    weak = _request_of(rsa.generate_private_key(65537, 1024))
    slow = _request_of(rsa.generate_private_key(65537, 5120))
    at = der.index(b"\x02\x01\x00")  # the version
    other_version = bytes(der[: at + 2]) + b"\x07" + bytes(der[at + 3 :])
    encoded = base64.encodebytes(other_version)
    later = b"-----BEGIN CERTIFICATE REQUEST-----\n%s-----END CERTIFICATE REQUEST-----\n" % encoded
    other = _request_of(ed25519.Ed25519PrivateKey.generate())
    for pem, reason in [
        (b"", "no certificate request"),
        (good[:-40], "no certificate request"),
        (forged, "signature"),
        (weak, "1024 bits"),
        (slow, "5120 bits"),
        (later, "no certificate request"),
        (other, "Ed25519"),
        (good + b" " * (1 << 20), "limit"),
    ]:
        with pytest.raises(InvalidCredential, match=reason):
            read_request(pem)


def test_certificate_with_the_name_of_its_authority_is_none_that_signs_itself(tmp_path):
    folder = write_folder(tmp_path / "own", AUTHORITY, Role.COORDINATOR, AUTHORITY.name)
    assert Certificates(folder).identity.name == AUTHORITY.name


def test_authority_is_read_back_with_its_name():
    again = Authority.of_pem(AUTHORITY.certificate, key_to_pem(AUTHORITY.key))
    assert again.name == AUTHORITY_NAME
    with pytest.raises(InvalidCredential, match="not that of"):
        Authority.of_pem(AUTHORITY.certificate, key_to_pem(new_key()))


def test_expired_certificate_identifies_no_caller():
    at = time.time()
    callers = Callers(IdentityRules(), lambda: at, max_kept=1)
    certificate, _ = issued(AUTHORITY, Role.PARTICIPANT, "ward-7", lifetime_s=100.0)
    other, _ = issued(AUTHORITY, Role.OPERATOR, "alice")
    assert callers.of_certificate(certificate).identity.name == "ward-7"
    assert callers.of_certificate(other).identity.name == "alice"
    assert callers.of_certificate(certificate).identity.name == "ward-7"
    at += 1000.0
    with pytest.raises(NoIdentity, match="expired"):
        callers.of_certificate(certificate)


# --- folders ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tls", AUTHORITY, Role.COORDINATOR, "c", hosts=["localhost"])


def _put(folder: Path, other: Path, *names: str) -> None:
    for name in names:
        (other / name).replace(folder / name)


def test_changed_files_count_once_they_belong_together(folder, tmp_path):
    certificates = Certificates(folder)
    before = certificates.own.serial
    other = write_folder(tmp_path / "new", AUTHORITY, Role.COORDINATOR, "c", hosts=["localhost"])
    _put(folder, other, tls.KEY)
    assert not certificates.refresh()
    assert certificates.own.serial == before
    assert not certificates.trouble, "files that have just changed may be incomplete"
    _put(folder, other, tls.CERTIFICATE)
    assert certificates.refresh()
    assert certificates.own.serial != before
    assert certificates.version == 1
    assert not certificates.refresh()


def test_wrong_files_are_named_while_the_old_ones_are_used(folder):
    certificates = Certificates(folder)
    certificates.settles_s = 0.0
    before = certificates.own
    whole = (folder / tls.CERTIFICATE).read_bytes()
    for wrong in (b"", b"junk", whole[:300]):
        (folder / tls.CERTIFICATE).write_bytes(wrong)
        assert not certificates.refresh()
        assert tls.CERTIFICATE in certificates.trouble
    assert certificates.own is before
    (folder / tls.CERTIFICATE).write_bytes(whole)
    certificates.refresh()
    assert certificates.trouble == ""


def test_files_that_cannot_be_used_are_refused_by_name(folder, tmp_path):
    with pytest.raises(InvalidCertificates, match=r"nowhere/ca\.crt: No such file"):
        Certificates(tmp_path / "nowhere")
    old = write_folder(tmp_path / "old", AUTHORITY, Role.NODE, "n", lifetime_s=-1.0)
    with pytest.raises(InvalidCertificates, match="expired"):
        Certificates(old)
    foreign = write_folder(tmp_path / "other", make_authority(), Role.NODE, "n")
    _put(folder, foreign, tls.AUTHORITY)
    with pytest.raises(InvalidCertificates, match="refused by the other programs"):
        Certificates(folder)
    (folder / tls.AUTHORITY).write_bytes(b"\n")
    with pytest.raises(InvalidCertificates, match="empty"):
        Certificates(folder)


def test_callers_whose_serial_numbers_are_in_the_file_are_refused(folder):
    """Also when the file is written anew without them. One that is wrong is told, and what was
    read before counts on."""
    certificates = Certificates(folder)
    certificates.settles_s = 0.0
    numbers = [0x0ABC, 0x1000, 0x77]
    callers = [
        Caller(Identity("", Role.NODE, "n"), f"{number:x}", time.time() + 60.0)
        for number in numbers
    ]

    def refused():
        found = []
        for each in callers:
            try:
                certificates.callers.require(each)
            except NoIdentity:
                found.append(each.serial)
        return found

    assert refused() == []
    file = folder / tls.REVOKED
    file.write_text("0A:BC\n\n")
    assert not certificates.refresh(), "no connection needs to be made anew"
    assert refused() == ["abc"]
    file.write_text("0x1000\n")
    certificates.refresh()
    assert refused() == ["abc", "1000"]
    file.write_text("77\nward-7\n")
    certificates.refresh()
    assert refused() == ["abc", "1000", "77"]
    assert f"{file}, line 2: no serial number" in certificates.trouble
    with pytest.raises(InvalidCertificates, match="line 2"):
        Certificates(folder)
    file.write_text("77\n")
    assert Certificates(folder).callers.revoked == {"77"}
    certificates.refresh()
    assert (refused(), certificates.trouble) == (["abc", "1000", "77"], "")


def test_last_third_of_the_life_is_soon(folder):
    at = time.time()
    certificates = Certificates(folder, lambda: at)
    assert not certificates.expires_soon
    at = certificates.own.not_after - 1
    assert certificates.expires_soon


def test_watch_tells_each_thing_once(folder, tmp_path):
    at = time.time()
    certificates = Certificates(folder, lambda: at)
    certificates.look_s = certificates.settles_s = 0.0
    watch = CertificateWatch(certificates)

    def told():
        with capture_logs() as logs:
            watch.look()
            watch.look()
        return [each["event"] for each in logs]

    assert told() == []
    whole = (folder / tls.CERTIFICATE).read_bytes()
    (folder / tls.CERTIFICATE).write_bytes(b"junk")
    assert told() == ["certificates_not_used"]
    (folder / tls.CERTIFICATE).write_bytes(whole)
    assert told() == []
    other = write_folder(tmp_path / "new", AUTHORITY, Role.COORDINATOR, "c", hosts=["localhost"])
    _put(folder, other, tls.KEY, tls.CERTIFICATE)
    assert told() == ["certificates_changed"]
    at = certificates.own.not_after - 1
    assert told() == ["certificate_expires"]


# --- tokens ---


def test_token_is_a_line_of_text_that_shows_no_key_when_printed():
    certificate, key = issued(AUTHORITY, Role.JOINING, "ward-7", hosts=())
    token = JoinToken("coordinator.example.org:50051", certificate, key, AUTHORITY.certificate)
    text = token.encode()
    assert JoinToken.decode(f" {text}\n") == token
    assert len(text) < 1600
    assert "PRIVATE" not in repr(token)


@pytest.mark.parametrize("at", [0, 7, 100, 500, 900, -1])
def test_token_with_a_wrong_character_is_refused(at):
    certificate, key = issued(AUTHORITY, Role.JOINING, "ward-7", hosts=())
    text = JoinToken("localhost:1", certificate, key, AUTHORITY.certificate).encode()
    wrong = list(text)
    wrong[at] = "A" if wrong[at] != "A" else "Q"
    for spoilt in ("".join(wrong), text[:-9], text[:500]):
        with pytest.raises(InvalidCredential) as refused:
            JoinToken.decode(spoilt)
        assert text[20:60] not in str(refused.value)
