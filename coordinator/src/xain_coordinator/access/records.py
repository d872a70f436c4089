"""Events of access control as lines of the audit log, and back."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

from xain_coordinator.access.audit_log import Line, NewLine
from xain_coordinator.access.events import Event
from xain_foundation.security.identity import Role

_CONVERTED: Final[Mapping[str, Callable[[Any], object]]] = {
    "role": Role,
    "hosts": tuple,
    "serials": tuple,
}


def _name_of(kind: type) -> str:
    """The name of an event's class in snake_case."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


KINDS: Final[Mapping[str, type[Event]]] = {_name_of(kind): kind for kind in get_args(Event)}


def line_of(event: Event) -> NewLine:
    """The line of an event, without fields that have their defaults."""
    fields = {
        each.name: value
        for each in dataclasses.fields(event)
        if each.name not in ("at", "by") and (value := getattr(event, each.name)) != each.default
    }
    return NewLine(event.at, _name_of(type(event)), event.by, fields)


def event_of(line: Line) -> Event | None:
    """The event in a line; None for a note, which changes nothing. Raises ValueError."""
    kind = KINDS.get(line.event)
    if kind is None:
        return None
    fields: dict[str, Any] = {
        name: _CONVERTED[name](value) if name in _CONVERTED else value
        for name, value in line.fields.items()
    }
    try:
        return kind(at=line.at, by=line.by, **fields)
    except TypeError:
        raise ValueError(f"its fields are not those of a line {line.event!r}") from None
