"""Durable events as text, and back exactly.

An event is stored under the name of its class, its fields as JSON. Journals may be older than the
program: a field that came later has a default, which says what its absence meant. Any other change
of what is there is a new format of the journal: see FORMAT.
"""

import math
from typing import Any, get_args

import xxhash
from pydantic import ConfigDict, TypeAdapter, ValidationError

from xain_coordinator.core.vocabulary.events import DurableEvent, TimePassed
from xain_coordinator.ports import JournalError, Record

FORMAT = 4

# Events of earlier versions that change nothing any more. Each is read as a record of its time, so
# that the numbers of the others stay.
_FORMER = ("UploadNameBound",)

Row = tuple[float, str, str]  # session time, type, body

# Deferred: to build the adapters of all events takes a start longer than to write the few events
# of a new session.
_CONFIG = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants", defer_build=True)


def make_adapter(kind: type) -> TypeAdapter[Any]:
    """Adapter between (value,) and JSON, strict in both directions."""
    # pydantic takes a config for a tuple, which hands it down, but not for a dataclass.
    return TypeAdapter(tuple[kind], config=_CONFIG)  # type: ignore[valid-type]  # a value


_ADAPTERS = {kind.__name__: make_adapter(kind) for kind in get_args(DurableEvent)}


def encode_record(record: Record) -> Row:
    """Encode a record as a row of the journal. Raises JournalError, as encode does."""
    if not math.isfinite(record.at):
        raise JournalError(f"session time {record.at} cannot be written to the journal")
    return float(record.at), *encode(record.event)


def decode_record(row: Row) -> Record:
    """Decode a row of the journal. Raises JournalError."""
    at, name, body = row
    return Record(at, TimePassed(at) if name in _FORMER else decode(name, body))


def digest_of(*fields: object) -> bytes:
    """The checksum of a row of the journal: xxh3-64 of all its other columns. Since the numbers of
    the session and the record are among them, it also detects rows that were moved."""
    text = "\0".join([f.hex() if isinstance(f, float) else str(f) for f in fields])
    return xxhash.xxh3_64_digest(text.encode())


def encode(event: DurableEvent) -> tuple[str, str]:
    """Encode an event as (type, body). Raises JournalError if decoding them would not give the
    event back. Finding out after a restart would be too late."""
    name = type(event).__name__
    adapter = _find(name)
    try:
        text = adapter.dump_json((event,), warnings="error").decode()
        (again,) = adapter.validate_json(text)
    except ValueError as error:  # pydantic's errors are among them
        raise JournalError(f"{name} cannot be written to the journal: {reason(error)}") from error
    if again != event:
        raise JournalError(
            f"{name} cannot be written to the journal: {text[:200]} is not all of it"
        )
    return name, text[1:-1]


def decode(name: str, body: str) -> DurableEvent:
    """Decode the event that was stored as (type, body). Raises JournalError."""
    adapter = _find(name)
    try:
        event: DurableEvent
        (event,) = adapter.validate_json(f"[{body}]")
    except ValidationError as error:
        raise JournalError(f"a {name} in the journal is not readable: {reason(error)}") from error
    return event


def reason(error: Exception) -> str:
    """An error as one line of text."""
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(step) for step in first["loc"][1:]) or "body"
    return f"{where}: {first['msg']}"


def _find(name: str) -> TypeAdapter[Any]:
    """The adapter of events of this type. Raises JournalError if there are none."""
    adapter = _ADAPTERS.get(name)
    if adapter is None:
        raise JournalError(
            f"the journal does not know events of type {name!r}; "
            "they come from another version of this program"
        )
    return adapter
