"""Types of fields from which models of settings are made."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    ValidationInfo,
    model_validator,
)

MAX_DEPTH: Final = 100  # of lists and mappings in each other; no setting needs more than a few
# A text in quotes is passed over, also one that has no end: so that no text is read twice.
_BRACKETS: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[][{}]', re.DOTALL)
_STEPS: Final = {"[": 1, "{": 1, "]": -1, "}": -1}


class WrongSetting(ValueError):
    """A conflict: one key is wrong because of another one.

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


Conflicts = Iterator[WrongSetting]
UNCHECKED = object()  # context of a validation that leaves the checks out


@dataclass(frozen=True, slots=True)
class Check:
    """Decorates a method of a section that yields conflicts between keys, or raises its last one.

    All checks of a section run. A check ends where it reads a key whose value is wrong, so that
    keys that have nothing to do with each other belong into different checks.
    """

    find: Callable[[Any], Iterable[WrongSetting] | None]


class UnknownValue(Exception):
    """A check has read a key whose value is not known, because what is given for it is wrong."""


class Section(BaseModel):
    """Base of all settings: immutable, strict, and without unknown keys.

    Validation refuses a section whose checks find conflicts, with the first WrongSetting.

    moved: what has become of keys and sections that older systems knew, such as
        {"ai.rounds": "is called rounds.rounds now"}. Read from the outermost model only.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # should pydantic's own error be printed, it has no secrets
        ignored_types=(Check,),
    )

    moved: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # mypy would take any attribute for one

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise UnknownValue(name)
            return super().__getattr__(name)

    def known(self, *names: str) -> list[str]:
        """The fields among `names` whose values are known."""
        return [name for name in names if name in vars(self)]

    def changed(self, *names: str) -> list[str]:
        """The fields among `names` that are known not to have their defaults."""
        fields = type(self).model_fields
        return [
            name
            for name in self.known(*names)
            if getattr(self, name) != fields[name].get_default(call_default_factory=True)
        ]

    def conflicts(self) -> Conflicts:
        """Conflicts between keys whose values are known."""
        for each in [each for base in type(self).__mro__ for each in vars(base).values()]:
            if isinstance(each, Check):
                try:
                    yield from each.find(self) or ()
                except WrongSetting as conflict:
                    yield conflict
                except UnknownValue:
                    pass

    @model_validator(mode="after")
    def _has_no_conflict(self, info: ValidationInfo) -> Self:
        if info.context is not UNCHECKED:
            for conflict in self.conflicts():
                raise conflict
        return self


_MAX_PATH = 4096  # Linux's


def parse_path(value: object) -> object:
    """Parse text as a path, "~" replaced; other values stay as they are.

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


def is_any(host: str) -> bool:
    """Whether a host stands for all addresses of this machine."""
    try:
        return ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, as only this machine reaches it."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


REMEDY: Final = "pass tls=, or insecure=True"


def require_private(
    host: str,
    *,
    is_encrypted: bool,
    insecure: bool,
    connects: bool = False,
    remedy: str = REMEDY,
) -> None:
    """Refuse a host beyond this machine, where nothing is encrypted and nobody has said that this
    is so on purpose. Raises ValueError.

    connects: whether a client connects to the host; else a server listens there. remedy: what to
    do.
    """
    if is_encrypted or insecure or is_loopback(host):
        return
    if connects:
        what = (
            f"{host!r} is another machine, and without certificates everything would go in the "
            "clear, to whoever answers there"
        )
    else:
        what = (
            f"it is to listen on {host!r}, where other machines reach it, and without certificates "
            "whoever does may read and change everything"
        )
    raise ValueError(f"{what}: {remedy} in a network that you trust")


def parse_json(text: str, *, parse_constant: Callable[[str], object] | None = None) -> object:
    """Parse JSON that is not trusted. Raises ValueError, also for lists that are nested more than
    MAX_DEPTH deep.

    parse_constant: as in json.loads(). The depth is found before the text is read: a RecursionError
    at the end of the stack strikes what the garbage collector runs there, too.
    """
    if text.count("[") + text.count("{") > MAX_DEPTH:
        depth = 0
        for found in _BRACKETS.finditer(text):
            depth += _STEPS.get(found[0], 0)
            if depth > MAX_DEPTH:
                raise ValueError(f"nested more than {MAX_DEPTH} deep")
    return json.loads(text, parse_constant=parse_constant)


def _parse_texts(value: object) -> tuple[str, ...]:
    """Return a list of texts and numbers as texts. Text is parsed as JSON, or split at commas."""
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
