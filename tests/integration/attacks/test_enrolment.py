"""Tokens and requests for certificates that must not count: each is refused with its status, and
nothing is issued."""

from collections.abc import Awaitable, Callable

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from support.closed_coordinator import ClosedCoordinator, outcome_of
from support.wire import Member
from xain_foundation.security.identity import Role
from xain_foundation.security.join_token import JoinToken
from xain_foundation.security.x509 import key_to_pem, make_request, new_key, read_certificate
from xain_wire.fl import access_pb2, access_pb2_grpc

NO_CONNECTION = "UNAVAILABLE"
UNAUTHENTICATED = "UNAUTHENTICATED UNAUTHENTICATED"
INVALID_REQUEST = "INVALID_ARGUMENT INVALID_CERTIFICATE_REQUEST"


def new_token(at: ClosedCoordinator, name: str = "ward-7", ttl_s: float = 3600.0) -> JoinToken:
    text, _, _ = at.access.create_token(
        name, "participant", ttl_s, f"127.0.0.1:{at.port}", by="the test"
    )
    at.secrets.add_text(text, "a token")
    token = JoinToken.decode(text)
    at.secrets.add_key(token.key, "a token")
    at.remember()
    return token


def held_by(at: ClosedCoordinator, token: JoinToken) -> Member:
    return at.caller(token.certificate, token.key)


def request_for(name: str) -> bytes:
    return make_request(new_key(), name)


async def join(member: Member, request: bytes) -> access_pb2.JoinResponse:
    stub = access_pb2_grpc.AccessStub(member.channel)
    return await stub.Join(access_pb2.JoinRequest(request=request))


# --- tokens ---


async def used_twice(at: ClosedCoordinator, told: list[str]) -> str:
    """A thief who has read the token on its way comes second."""
    token = new_token(at)
    await join(held_by(at, token), request_for("ward-7"))
    at.remember()
    return await outcome_of(join(held_by(at, token), request_for("ward-7")), told)


async def late(at: ClosedCoordinator, told: list[str]) -> str:
    certificate, key = at.certificate(Role.JOINING, "ward-7", lifetime_s=-1.0)
    return await outcome_of(join(at.caller(certificate, key), request_for("ward-7")), told)


async def late_on_a_connection_that_stands(at: ClosedCoordinator, told: list[str]) -> str:
    member = held_by(at, new_token(at))
    assert "INVALID" in await outcome_of(join(member, b"not yet"), told)
    at.pass_hours(2)
    return await outcome_of(join(member, request_for("ward-7")), told)


async def revoked(at: ClosedCoordinator, told: list[str]) -> str:
    member = held_by(at, new_token(at))
    at.access.revoke("ward-7", by="the test")
    at.remember()
    return await outcome_of(join(member, request_for("ward-7")), told)


async def not_of_this_coordinator(at: ClosedCoordinator, told: list[str]) -> str:
    """The signature is right, and the audit log knows nothing of it."""
    certificate, key = at.certificate(Role.JOINING, "ward-7")
    return await outcome_of(join(at.caller(certificate, key), request_for("ward-7")), told)


async def for_a_name_with_another_role(at: ClosedCoordinator, told: list[str]) -> str:
    """The holder of a certificate exchanges it as if it were a token."""
    site = at.enrolled(Role.PARTICIPANT, "mallory")
    at.remember()
    return await outcome_of(join(site, request_for("mallory")), told)


async def renewed_instead(at: ClosedCoordinator, told: list[str]) -> str:
    stub = access_pb2_grpc.AccessStub(held_by(at, new_token(at)).channel)
    request = access_pb2.RenewRequest(request=request_for("ward-7"))
    return await outcome_of(stub.Renew(request), told)


Attack = Callable[[ClosedCoordinator, list[str]], Awaitable[str]]

TOKENS: dict[Attack, str] = {
    used_twice: "UNAUTHENTICATED TOKEN_USED",
    late: NO_CONNECTION,
    late_on_a_connection_that_stands: UNAUTHENTICATED,
    revoked: UNAUTHENTICATED,
    not_of_this_coordinator: UNAUTHENTICATED,
    for_a_name_with_another_role: "PERMISSION_DENIED NOT_PERMITTED",
    renewed_instead: "PERMISSION_DENIED NOT_PERMITTED",
}


@pytest.mark.parametrize("attack", TOKENS, ids=lambda attack: attack.__name__)
async def test_token_that_does_not_count_is_refused(closed, said, attack):
    assert await attack(closed, said.messages) == TOKENS[attack]
    closed.require_unchanged()
    await closed.close_round()


# --- requests ---


def of_a_curve_of_160_bits() -> bytes:
    return signed(ec.generate_private_key(ec.SECP192R1()))


def of_a_megabyte() -> bytes:
    return request_for("ward-7") + b"\n" * (1 << 20)


def of_nothing() -> bytes:
    return b""


REQUESTS: dict[Callable[[], bytes], str] = {
    of_a_curve_of_160_bits: INVALID_REQUEST,
    of_a_megabyte: "RESOURCE_EXHAUSTED TOO_LARGE",
    of_nothing: INVALID_REQUEST,
}


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.__name__)
async def test_request_that_cannot_be_signed_is_refused_and_uses_no_token(closed, said, request_):
    token = new_token(closed)
    asked = join(held_by(closed, token), request_())
    assert await outcome_of(asked, said.messages) == REQUESTS[request_]
    closed.require_unchanged()
    assert (await join(held_by(closed, token), request_for("ward-7"))).certificate


async def test_name_in_a_request_counts_for_nothing(closed):
    """The name of a new or renewed certificate is that of the caller's own certificate."""
    token, key = new_token(closed, "mallory"), new_key()
    pem = key_to_pem(key)
    closed.secrets.add_key(pem, "mallory")
    joined = await join(held_by(closed, token), asking_for_more(key))
    renewing = access_pb2_grpc.AccessStub(closed.caller(joined.certificate, pem).channel)
    request = access_pb2.RenewRequest(request=asking_for_more(new_key()))
    renewed = await renewing.Renew(request)
    for certificate in (joined.certificate, renewed.certificate):
        names = read_certificate(certificate).names
        assert names.uris == (f"spiffe://{closed.authority.name}/participant/mallory",)
        assert "ward-1" not in str(names)
        assert "evil.example.org" not in str(names)
        parsed = x509.load_pem_x509_certificate(certificate)
        assert not parsed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def asking_for_more(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A request for the name, the hosts and the rights of others."""
    names = [
        x509.UniformResourceIdentifier("spiffe://127.0.0.1/operator/ward-1"),
        x509.DNSName("evil.example.org"),
    ]
    return (
        builder()
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )


def builder() -> x509.CertificateSigningRequestBuilder:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ward-1")])
    return x509.CertificateSigningRequestBuilder().subject_name(subject)


def signed(key: ec.EllipticCurvePrivateKey) -> bytes:
    return builder().sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
