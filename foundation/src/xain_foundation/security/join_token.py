"""Tokens: what a site is given to join, as one line of text.

A token is a short-lived client certificate of the role `joining` with its key, the certificate of
the authority and the address of the coordinator. So both sides know each other at the first
contact, through the one port that is open anyway.

    xain1.BASE64URL of: address, certificate, key, authority; each with its length in two bytes
"""

import base64
import binascii
import zlib
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from xain_foundation.security.x509 import InvalidCredential, PrivateKey, key_of_pem, key_to_pem

PREFIX: Final = "xain1."
MAX_TOKEN_CHARACTERS: Final = 8192
_CHECKSUM_BYTES: Final = 4
_KEY_BYTES: Final = 32  # the private number of P-256


@dataclass(frozen=True, slots=True)
class JoinToken:
    """address: "HOST:PORT" of the coordinator. certificate, key, authority: PEM."""

    address: str
    certificate: bytes
    key: bytes
    authority: bytes

    def __repr__(self) -> str:
        return f"JoinToken(address={self.address!r})"  # the key is a secret

    def encode(self) -> str:
        number = key_of_pem(self.key).private_numbers().private_value
        parts = (
            self.address.encode(),
            _der(self.certificate),
            number.to_bytes(_KEY_BYTES, "big"),
            _der(self.authority),
        )
        body = b"".join(len(part).to_bytes(2, "big") + part for part in parts)
        body += zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "big")
        return PREFIX + base64.urlsafe_b64encode(body).decode("ascii").rstrip("=")

    @classmethod
    def decode(cls, text: str) -> "JoinToken":
        """Read a token from its text. Raises InvalidCredential."""
        text = text.strip()
        if not text.startswith(PREFIX):
            raise InvalidCredential(f"a token begins with {PREFIX!r}, and this does not")
        if len(text) > MAX_TOKEN_CHARACTERS:
            raise InvalidCredential(f"the token is longer than {MAX_TOKEN_CHARACTERS} characters")
        encoded = text.removeprefix(PREFIX)
        try:
            body = base64.b64decode(
                encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True
            )
        except (binascii.Error, ValueError):
            raise InvalidCredential("the token has characters that no token has") from None
        body, checksum = body[:-_CHECKSUM_BYTES], body[-_CHECKSUM_BYTES:]
        if zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "big") != checksum:
            raise InvalidCredential("the token is not whole, or a character of it is wrong")
        parts = []
        while body:
            size = int.from_bytes(body[:2], "big")
            parts.append(body[2 : 2 + size])
            body = body[2 + size :]
        try:
            address, certificate, number, authority = parts
            key: PrivateKey = ec.derive_private_key(int.from_bytes(number, "big"), ec.SECP256R1())
            return cls(address.decode("ascii"), _pem(certificate), key_to_pem(key), _pem(authority))
        except (ValueError, InvalidCredential):
            raise InvalidCredential(
                "the token cannot be read; was it made by a later version?"
            ) from None


def _der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


def _pem(der: bytes) -> bytes:
    return x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)
