"""Requests that no honest program sends: raw bytes on every method of a server.

The synchronous client of gRPC sends them. The asyncio one takes a write that fails, because the
call has been refused already, for an INTERNAL of the server's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from xain_wire.fl import coordinator_pb2, inspection_pb2
from xain_wire.messaging import membership_pb2

_FILES = (coordinator_pb2, inspection_pb2, membership_pb2, health_pb2, reflection_pb2)
METHODS: Sequence[MethodDescriptor] = [
    method
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]

Metadata = Sequence[tuple[str, str]]
ANSWER_S = 2.0


def path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


@contextmanager
def channel(port: int) -> Iterator[grpc.Channel]:
    """A connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as opened:
        yield opened


@dataclass(frozen=True, slots=True)
class Answer:
    code: grpc.StatusCode
    details: str


def ask(
    opened: grpc.Channel,
    method: MethodDescriptor,
    requests: Sequence[bytes],
    metadata: Metadata = (),
    *,
    timeout_s: float = ANSWER_S,
) -> Answer:
    """Call a method with these messages, however many it takes, and wait for its end."""
    call = opened.stream_stream(path(method))(iter(requests), metadata=metadata, timeout=timeout_s)
    try:
        for _ in call:
            call.cancel()  # the first message will do: a Watch has no end
    except grpc.RpcError:
        pass  # its status is asked for below
    return Answer(call.code(), call.details() or "")


# --- messages ---

_NUMBERS = (0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
_NINES = "9" * 5000
_TEXTS = (
    "",
    "a",
    "global",
    "../0/global",
    "\x00",
    "\U0001f600" * 50,
    "x" * 5000,
    _NINES,
    f"{_NINES}/a",
    f"0/a.{'0' * 32}",
    f"0/a.{'0' * 32}/{_NINES}-1",
    f"0/a.{'0' * 32}/1-{_NINES}",
    "1/global",
    f'[{{"measurement": "participant", "time": {_NINES}, "fields": {{"a": {_NINES}}}}}]',
    "[" * 5000,
)


def npy_with_shape(shape: str) -> bytes:
    """An .npy file whose header has this text for its shape, and no data."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


_BYTES = (
    b"",
    b"\x00",
    b"\xff" * 16,
    b"x" * 5000,
    b"\x93NUMPY",
    npy_with_shape("(3,)"),
    npy_with_shape(f"({'9' * 3900},)"),
    npy_with_shape(f"(0x{'f' * 3900},)"),
    npy_with_shape(f"({'9,' * 1900})"),
    npy_with_shape("(-1,)"),
    npy_with_shape("(True,)"),
)


def extreme(message: Message, chance: Random, depth: int = 0) -> Message:
    """Fill some of the fields of a message with values at the borders of their types."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.3:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value_field = field.message_type.fields_by_name["value"]
            for _ in range(chance.choice((1, 40))):
                entries, key = getattr(message, field.name), chance.choice(_TEXTS)
                if value_field.message_type is None:
                    entries[key] = _value(value_field, chance)
                elif depth < 3:
                    extreme(entries[key], chance, depth + 1)
        elif field.is_repeated:
            if field.message_type is None:
                values = [_value(field, chance) for _ in range(chance.choice((1, 100)))]
                getattr(message, field.name).extend(values)
            elif depth < 3:
                for _ in range(chance.choice((1, 10))):
                    extreme(getattr(message, field.name).add(), chance, depth + 1)
        elif field.message_type is not None:
            if depth < 3:
                extreme(getattr(message, field.name), chance, depth + 1)
                getattr(message, field.name).SetInParent()
        else:
            setattr(message, field.name, _value(field, chance))
    return message


_RANGES: Mapping[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def _value(field: FieldDescriptor, chance: Random) -> Any:
    if field.cpp_type in _RANGES:
        least, most = _RANGES[field.cpp_type]
        return chance.choice([number for number in _NUMBERS if least <= number <= most])
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_STRING:
            return chance.choice(_BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS)
        case _:
            return chance.choice((0.0, -1.0, float("inf"), float("nan")))


def _random(method: MethodDescriptor, chance: Random) -> bytes:
    return chance.randbytes(chance.choice((1, 3, 30, 1000)))


def _truncated(method: MethodDescriptor, chance: Random) -> bytes:
    whole = _extreme(method, chance)
    return whole[: chance.randrange(len(whole) + 1)]


def _damaged(method: MethodDescriptor, chance: Random) -> bytes:
    data = bytearray(_extreme(method, chance))
    for _ in range(min(3, len(data))):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def _extreme(method: MethodDescriptor, chance: Random) -> bytes:
    return extreme(GetMessageClass(method.input_type)(), chance).SerializeToString()


KINDS: Sequence[Callable[[MethodDescriptor, Random], bytes]] = (
    _random,
    _truncated,
    _damaged,
    _extreme,
    _extreme,
)


def malformed(method: MethodDescriptor, chance: Random) -> list[bytes]:
    """The messages of a call; mostly one."""
    number = chance.choice((0, 1, 1, 1, 1, 2, 3))
    return [chance.choice(KINDS)(method, chance) for _ in range(number)]
