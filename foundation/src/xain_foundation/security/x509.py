"""Keys, certificate requests and certificates (X.509, RFC 5280), made and read by `cryptography`.

Keys are ECDSA P-256: gRPC takes no Ed25519 certificate. Times are seconds since the epoch.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from xain_foundation.security.identity import SCHEDULER, Identity, Names, Role, node_host, peer_host

MAX_PEM_BYTES: Final = 16 << 10
MIN_RSA_BITS: Final = 2048
MAX_RSA_BITS: Final = 4096
MAX_RSA_EXPONENT: Final = 65537
_MAX_COMMON_NAME: Final = 64  # of RFC 5280
# Clocks of two machines may differ by so much; see tokens that are used at once.
_BACKDATED: Final = timedelta(minutes=5)

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey


class InvalidCredential(ValueError):
    """Text that is no usable key, request, certificate or join token; the message says why."""


def new_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: PrivateKey, passphrase: bytes = b"") -> bytes:
    """Encode a private key in PKCS#8 and PEM, encrypted if there is a passphrase."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase)
        if passphrase
        else serialization.NoEncryption(),
    )


def key_of_pem(pem: bytes, passphrase: bytes = b"") -> PrivateKey:
    """Read a private key. Raises InvalidCredential."""
    try:
        key = serialization.load_pem_private_key(pem, passphrase or None)
    except TypeError:
        wrong = "is not encrypted, but a passphrase is given"
        raise InvalidCredential(f"the key {wrong if passphrase else 'is encrypted'}") from None
    except (ValueError, UnsupportedAlgorithm):
        wrong = ", or the passphrase is wrong" if passphrase else ""
        raise InvalidCredential(f"this is no key in PEM{wrong}") from None
    if not isinstance(key, PrivateKey):
        raise InvalidCredential("the key is not ECDSA")
    return key


def digest_of_key(key: PublicKey) -> str:
    """SHA-256 of a public key, in hex: tells keys apart."""
    encoded = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(encoded).hexdigest()


def make_request(key: PrivateKey, name: str) -> bytes:
    """A certificate request (PKCS#10) in PEM. name: for people; whoever signs decides on it."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(_subject(name))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def read_request(pem: bytes) -> PublicKey:
    """The public key that a request asks a certificate for. Raises InvalidCredential."""
    if len(pem) > MAX_PEM_BYTES:
        raise InvalidCredential(f"the request has {len(pem)} bytes; the limit is {MAX_PEM_BYTES}")
    try:
        request = x509.load_pem_x509_csr(pem)
        # Before the signature: to check that of a key of any size would take as long as its sender
        # likes.
        key = _require_strong(request.public_key())
        is_signed = request.is_signature_valid
    except InvalidCredential:
        raise
    except Exception:  # the parser has many exceptions, and the text comes from anybody
        raise InvalidCredential("this is no certificate request in PEM") from None
    if not is_signed:
        raise InvalidCredential("the signature of the request is not that of its key")
    return key


def _require_strong(key: object) -> PublicKey:
    """Return the key. Raises InvalidCredential if gRPC refuses its kind, or it is too short."""
    match key:
        case ec.EllipticCurvePublicKey(curve=ec.SECP256R1() | ec.SECP384R1()):
            return key
        case rsa.RSAPublicKey(key_size=bits) if not MIN_RSA_BITS <= bits <= MAX_RSA_BITS:
            raise InvalidCredential(
                f"the RSA key has {bits} bits; it must have {MIN_RSA_BITS} to {MAX_RSA_BITS}"
            )
        case rsa.RSAPublicKey():
            if key.public_numbers().e > MAX_RSA_EXPONENT:
                raise InvalidCredential(f"the exponent of the RSA key is above {MAX_RSA_EXPONENT}")
            return key
        case _:
            kind = type(key).__name__.removeprefix("_").removesuffix("PublicKey")
            raise InvalidCredential(
                f"the key is of the kind {kind}; gRPC takes ECDSA P-256 and P-384, and RSA"
            )


@dataclass(frozen=True, slots=True)
class Certificate:
    """Facts of a certificate. serial: in hex. key_digest: see digest_of_key."""

    serial: str
    names: Names
    issuer: str
    subject: str
    not_before: float
    not_after: float
    key_digest: str


def read_certificate(pem: bytes) -> Certificate:
    """Read the first certificate of a PEM text. Raises InvalidCredential, also for a weak key."""
    if len(pem) > 4 * MAX_PEM_BYTES:
        raise InvalidCredential(f"the certificate has {len(pem)} bytes")
    try:
        found = x509.load_pem_x509_certificate(pem)
        key = found.public_key()
        names = _names_of(found)
    except Exception:  # as in read_request
        raise InvalidCredential("this is no certificate in PEM") from None
    return Certificate(
        serial=serial_of(found.serial_number),
        names=names,
        issuer=found.issuer.rfc4514_string(),
        subject=found.subject.rfc4514_string(),
        not_before=found.not_valid_before_utc.timestamp(),
        not_after=found.not_valid_after_utc.timestamp(),
        key_digest=digest_of_key(_require_strong(key)),
    )


def serial_of(number: int) -> str:
    return f"{number:x}"


def _names_of(certificate: x509.Certificate) -> Names:
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    try:
        alternative = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value
    except x509.ExtensionNotFound:
        return Names(str(common[0].value) if common else "")
    return Names(
        str(common[0].value) if common else "",
        tuple(alternative.get_values_for_type(x509.UniformResourceIdentifier)),
        tuple(alternative.get_values_for_type(x509.DNSName)),
        tuple(map(str, alternative.get_values_for_type(x509.IPAddress))),
    )


def _subject(name: str, role: str = "") -> x509.Name:
    """Make a subject. role: of what an authority issues. Without it a certificate with the name of
    its authority would count as one that signs itself."""
    common = x509.NameAttribute(NameOID.COMMON_NAME, name[:_MAX_COMMON_NAME])
    unit = x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role) if role else None
    return x509.Name([common] if unit is None else [unit, common])


@dataclass(frozen=True, slots=True)
class Authority:
    """An authority that signs certificates: its key, and its own certificate, in PEM.

    name: part of the identities that it gives, such as "coordinator.example.org".
    """

    name: str
    key: PrivateKey
    certificate: bytes

    @classmethod
    def create(cls, name: str, now: float, lifetime_s: float) -> "Authority":
        """Make an authority with a new key, and a certificate that it signs itself."""
        key = new_key()
        own = _subject(name)
        builder = (
            _builder(own, own, key.public_key(), now, lifetime_s, x509.random_serial_number())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
        )
        signed = builder.sign(key, hashes.SHA256())
        return cls(name, key, signed.public_bytes(serialization.Encoding.PEM))

    @classmethod
    def of_pem(cls, certificate: bytes, key: bytes, passphrase: bytes = b"") -> "Authority":
        """Read an authority from its certificate and key. Raises InvalidCredential, also if key and
        certificate do not belong together."""
        own = key_of_pem(key, passphrase)
        if read_certificate(certificate).key_digest != digest_of_key(own.public_key()):
            raise InvalidCredential("the authority's key is not that of its certificate")
        subject = x509.load_pem_x509_certificate(certificate).subject
        names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return cls(str(names[0].value) if names else "", own, certificate)

    def issue(
        self,
        key: PublicKey,
        identity: Identity,
        now: float,
        lifetime_s: float,
        *,
        hosts: Iterable[str] = (),
        serial: int | None = None,
    ) -> bytes:
        """Sign a certificate for both sides of a connection. Returns it in PEM: the same bytes for
        the same arguments (RFC 6979).

        hosts: names and IP addresses that a server with it may be reached by, besides those of
            hosts_of(). serial: as
        new_serial() makes it.
        """
        alternative: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
        alternative += map(_general_name, dict.fromkeys((*hosts, *hosts_of(identity))))
        issuer = x509.load_pem_x509_certificate(self.certificate)
        # A certificate must not outlive the one that signs it.
        lifetime_s = min(lifetime_s, issuer.not_valid_after_utc.timestamp() - now)
        builder = (
            _builder(
                _subject(identity.name, identity.role),
                issuer.subject,
                key,
                now,
                lifetime_s,
                x509.random_serial_number() if serial is None else serial,
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
                    if identity.role in (Role.COORDINATOR, Role.NODE, Role.PARTICIPANT)
                    else [ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName(alternative), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
        )
        return _signed(builder, self.key).public_bytes(serialization.Encoding.PEM)


def _signed(builder: x509.CertificateBuilder, key: PrivateKey) -> x509.Certificate:
    try:
        return builder.sign(key, hashes.SHA256(), ecdsa_deterministic=True)
    except UnsupportedAlgorithm:  # built with an OpenSSL before 3.2
        return builder.sign(key, hashes.SHA256())


def new_serial() -> int:
    return x509.random_serial_number()


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: PublicKey,
    now: float,
    lifetime_s: float,
    serial: int,
) -> x509.CertificateBuilder:
    begins = datetime.fromtimestamp(now, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(begins - _BACKDATED)
        .not_valid_after(begins + timedelta(seconds=lifetime_s))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def hosts_of(identity: Identity) -> tuple[str, ...]:
    """Hosts that follow from an identity. None is a real one: whoever has a real host passes for
    the coordinator there."""
    match identity.role:
        case Role.PARTICIPANT:
            return (peer_host(identity.name),)
        case Role.NODE:
            return (peer_host(identity.name), node_host(identity.name))
        case Role.COORDINATOR:
            return (node_host(SCHEDULER),)
    return ()


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)
