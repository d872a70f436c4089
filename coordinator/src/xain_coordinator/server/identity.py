"""Who is calling, and since when."""

from typing import Any

import grpc

METADATA_KEY = "xain-participant-id"
TIMEOUT_KEY = "xain-timeout-ms"


def participant_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The caller's own id, stable across reconnects; without one its peer address, as in XAIN."""
    for key, value in context.invocation_metadata() or ():
        if key == METADATA_KEY:
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return context.peer()


def waited_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """How long the call has waited until it was taken up, for its connection too. Seconds; None if
    its sender does not say, in metadata, how long it waits for the answer."""
    left_s = context.time_remaining()
    if left_s is None:
        return None
    for key, value in context.invocation_metadata() or ():
        if key == TIMEOUT_KEY and isinstance(value, str) and value.isascii() and value.isdigit():
            return max(0.0, int(value[:9]) / 1000 - left_s)
    return None
