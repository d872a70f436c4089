"""A snapshot as JSON."""

import json
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from xain_coordinator.inspection.client import Snapshot


def snapshot_json(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot in plain values. Unlike protobuf's own JSON, whole numbers are numbers and digests
    are in hex."""
    told = snapshot.status.parameters
    return {
        "status": _plain(snapshot.status),
        "participants": _plain(snapshot.participants)["participants"],
        "rounds": _plain(snapshot.rounds)["rounds"],
        "models": _plain(snapshot.models)["models"],
        "parameters": json.loads(told) if told else None,
    }


# Fields that do not travel with a status, or, as `parameters`, are shown apart from it.
_LEFT_OUT = frozenset(
    (
        "xain_proto.fl.GetStatusResponse.parameters",
        "xain_proto.fl.Evaluation.tallies",
        "xain_proto.fl.WeightsRef.data",
        "xain_proto.fl.WeightsRef.url",
        "xain_proto.fl.DataProfile.columns",
        "xain_proto.fl.DataProfile.statistics",
    )
)


def _plain(message: Message) -> dict[str, Any]:
    """The fields of a message as a JSON object, without those of _LEFT_OUT."""
    fields = message.DESCRIPTOR.fields
    return {f.name: _field(f, message) for f in fields if f.full_name not in _LEFT_OUT}


def _field(field: Any, message: Message) -> Any:  # a FieldDescriptor, of Python's or upb's
    """A field of a message in plain values; None if it is optional and not set."""
    value = getattr(message, field.name)
    if isinstance(value, Mapping):
        of_values = field.message_type.fields_by_name["value"]
        return {key: _value(of_values, value[key]) for key in sorted(value)}
    if field.is_repeated:
        return [_value(field, item) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(field, value)


def _value(field: Any, value: Any) -> Any:
    """A value of a field: messages as objects, bytes in hex, enumerations by name."""
    if isinstance(value, Message):
        return _plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    return value
