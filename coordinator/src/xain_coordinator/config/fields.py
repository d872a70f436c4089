"""Types of single settings: how text and values of TOML are parsed and checked."""

import re
from fractions import Fraction
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, PlainValidator

from xain_coordinator.core.rules import pacing
from xain_coordinator.core.vocabulary.keys import MAX_PREFIX_BYTES, check_key
from xain_coordinator.core.vocabulary.values import Expression
from xain_foundation.settings import tags as tag_rules
from xain_foundation.settings.fields import (
    Allowed,
    is_loopback,
    join_host_port,
    parse_host,
    parse_json,
)

MAX_PARTICIPANTS = 1_000_000
MAX_SILENCE_S = 24 * 3600.0  # of a peer that is to answer

# Without a limit "1e-400000000" would be computed for minutes, with 400 million digits.
_EXACT = re.compile(r"[+-]?(\d{1,20}/\d{1,20}|\d{0,20}(\.\d{0,30})?([eE][+-]?\d{1,2})?)")


def _exact(value: object) -> Fraction:
    """A number, or text such as "1/3", as the fraction that it is written as. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Fraction):
        raise ValueError("no number")
    text = str(value).strip()
    if not _EXACT.fullmatch(text):
        raise ValueError("no number, or one with too many digits")
    try:
        return Fraction(text)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _fraction(value: object) -> Fraction:
    """A share of participants as an exact fraction. Raises ValueError."""
    return pacing.exact_fraction(_exact(value))


ExactFraction = Annotated[
    Fraction,
    PlainValidator(_fraction),
    PlainSerializer(str),
    Allowed('a number above 0 and at most 1, or a fraction as text such as "1/3"'),
]


def _excess(value: object) -> Fraction:
    """A fraction that is not negative. Raises ValueError."""
    excess = _exact(value)
    if excess < 0:
        raise ValueError(f"must not be negative, got {value}")
    return excess


ExactExcess = Annotated[
    Fraction,
    PlainValidator(_excess),
    PlainSerializer(str),
    Allowed('a number, not negative, such as 0.3, or a fraction as text such as "1/3"'),
]


# No name of a participant begins like this.
_LIST = re.compile(r'\s*\[\s*["\[]')


def _quorum(value: object) -> Expression:
    """A quorum with lists as tuples, which do not change. Its syntax is checked later. Raises
    ValueError."""
    if isinstance(value, str):
        # In the environment and in flags a list is text.
        return _quorum(parse_json(value)) if _LIST.match(value) else value
    if isinstance(value, list | tuple):
        return tuple(_quorum(part) for part in value)
    raise ValueError("neither text nor a list")


Quorum = Annotated[
    Expression,
    PlainValidator(_quorum),
    Allowed(
        'a conditional event such as "participant:update:80%", "hospital-a:update:1", or a list of '
        'them that ends in "AND" or "OR"'
    ),
]


def _tag_values(value: object) -> tuple[str, ...]:
    """Values that a tag may have: one value, or a list of them. Raises ValueError."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not values:
        raise ValueError("neither text nor a list")
    for one in values:
        if not isinstance(one, str) or tag_rules.why_not_value(one) is not None:
            raise ValueError("no value of a tag")
    return tuple(values)


TagValues = Annotated[
    tuple[str, ...],
    PlainValidator(_tag_values),
    Allowed(f'{tag_rules.VALUE_RULE}, such as "north", or a list of such texts'),
]


def _url(value: object) -> str:
    """ "" or an http(s) URL of a server, without a slash at its end. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError("not text")
    if value == "":
        return value
    parts = urlsplit(value)
    if (
        not value.isprintable()  # urlsplit() passes over line ends
        or " " in value
        or parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.port == 0
        or parts.username is not None
        or parts.query
        or parts.fragment
    ):
        raise ValueError("no URL of a server")
    return value.rstrip("/")


def is_plaintext(url: str) -> bool:
    """Whether others can read what travels to the server of a URL: no TLS, and another machine."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")


OptionalUrl = Annotated[
    str,
    BeforeValidator(_url),
    Allowed('a URL such as "https://host:9000", without user or query', is_url=True),
]


def _key_prefix(value: str) -> str:
    """The same prefix, if keys may begin so. Raises ValueError."""
    if value:
        check_key(value)
    if len(value.encode()) > MAX_PREFIX_BYTES:
        raise ValueError("no room for the rest of a key")
    return value


KeyPrefix = Annotated[
    str,
    AfterValidator(_key_prefix),
    Allowed(
        f'the beginning of a key, such as "trials/7", of at most {MAX_PREFIX_BYTES} bytes and '
        "without a slash at its ends"
    ),
]

# A participant answers predictions within this time, and is asked so often after the first time.
MAX_PREDICT_TIMEOUT_S = 3600.0
MAX_PREDICT_RETRIES = 100

# Calls a second of one holder of a certificate. A site that trains rounds of 10 ms makes 100.
CALLS_PER_S = 500


def _weights_address(value: object) -> str:
    """ "" or HOST:PORT, as a URL has it. Raises ValueError."""
    if value == "":
        return ""
    if not isinstance(value, str):
        raise ValueError("no text")
    host, separator, port = value.rpartition(":")
    if not separator or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError("no HOST:PORT")
    return join_host_port(parse_host(host), int(port))


WeightsAddress = Annotated[
    str, BeforeValidator(_weights_address), Allowed('HOST:PORT, or "" for none')
]
