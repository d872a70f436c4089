"""Identity of the caller, and the age of its call."""

from contextvars import ContextVar
from typing import Any

import grpc

from xain_wire.metadata import INSTANCE_ID_KEY, PARTICIPANT_ID_KEY, TIMEOUT_KEY

# waited_s of the present call, where the interceptor has measured it.
WAITED_S: ContextVar[float | None] = ContextVar("WAITED_S", default=None)


def participant_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The caller's own id, stable across reconnects; without one its peer address, as in XAIN."""
    said = _said(context, PARTICIPANT_ID_KEY)
    return context.peer() if said is None else said


def instance_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The instance id of the caller's process; "" if it sends none, as a XAIN client."""
    return _said(context, INSTANCE_ID_KEY) or ""


def _said(context: grpc.aio.ServicerContext[Any, Any], wanted: str) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == wanted:
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return None


def waited_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Seconds that the call and its connection have waited until they were handled; None if
    its sender does not say, in metadata, how long it waits for the answer."""
    left_s = context.time_remaining()
    if left_s is None:
        return None
    for key, value in context.invocation_metadata() or ():
        if key == TIMEOUT_KEY and isinstance(value, str) and value.isascii() and value.isdigit():
            return max(0.0, int(value[:9]) / 1000 - left_s)
    return None
