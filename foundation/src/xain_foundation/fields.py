"""Types of fields from which models of settings are made."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator


class WrongSetting(ValueError):
    """Raised by a model's validator where one key is wrong because of another.

    key: dotted, relative to the model. text: how the sentence "`key` is `value`; ..." goes on.
    """

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}: {text}")
        self.key = key
        self.text = text


@dataclass(frozen=True, slots=True)
class Allowed:
    """Annotates a type with what its values may be: "it must be `text`".

    is_url: messages show scheme, host and port of the value only.
    """

    text: str
    is_url: bool = False


class Section(BaseModel):
    """Base of all settings: immutable, strict, and without unknown keys.

    moved: what has become of keys and sections that older systems knew, such as
        {"ai.rounds": "is called rounds.rounds now"}. Read from the outermost model only.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # should pydantic's own error be printed, it has no secrets
    )

    moved: ClassVar[Mapping[str, str]] = {}


_MAX_PATH = 4096  # Linux's


def parse_path(value: object) -> object:
    """A path as written, "~" replaced.

    Raises ValueError if it is empty, too long or a URL, or if "~user" is no user here.
    """
    if isinstance(value, str):
        if not value or "://" in value or len(value) > _MAX_PATH:
            raise ValueError("no path")
        try:
            return Path(value).expanduser()
        except RuntimeError:
            raise ValueError("no such user") from None
    return value


FilePath = Annotated[
    Path,
    BeforeValidator(parse_path),
    Allowed('a path, not empty and no URL; "~NAME" must be a user of this machine'),
]


# Underscores are not allowed in DNS, but container networks call hosts as their services are
# called.
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_MAX_HOST_NAME = 253


def parse_host(value: object) -> str:
    """A host name, an IPv4 or an IPv6 address, the latter with or without brackets.

    Returns it without brackets. Raises ValueError.
    """
    if not isinstance(value, str):
        raise ValueError("not text")
    bracketed = value.startswith("[") and value.endswith("]")
    host = value[1:-1] if bracketed else value
    try:
        version: int = ip_address(host).version
    except ValueError:
        version = 0
    if version == 6 or (version == 4 and not bracketed):
        return host
    name = host.removesuffix(".")
    labels = name.split(".")
    if (
        bracketed
        or len(name) > _MAX_HOST_NAME
        or not all(_LABEL.fullmatch(label) for label in labels)
        # No top-level domain is a number, so this is an IPv4 address with a mistake in it.
        or labels[-1].isdigit()
    ):
        raise ValueError(f"{value!r} is neither a host name nor an IP address")
    return host


def join_host_port(host: str, port: int) -> str:
    """The address "host:port", or "[host]:port" for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, as only this machine reaches it."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def parse_json(text: str) -> object:
    """Raises ValueError, also for lists that are nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _parse_texts(value: object) -> tuple[str, ...]:
    """A list of texts and numbers; as text in JSON, or with commas between the items."""
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            return _parse_texts(parse_json(value))
        value = [item.strip() for item in value.split(",")] if value.strip() else []
    if not isinstance(value, list | tuple):
        raise ValueError("no list")
    if not all(isinstance(item, str | int | float) for item in value):
        raise ValueError("an item is neither text nor a number")
    return tuple(map(str, value))


Texts = Annotated[
    tuple[str, ...],
    PlainValidator(_parse_texts),
    Allowed('a list of texts such as ["age", "sex"], or one text with commas between the items'),
]


Host = Annotated[
    str,
    BeforeValidator(parse_host),
    Allowed('a host name, an IPv4 address, or an IPv6 address such as "::1"'),
]
