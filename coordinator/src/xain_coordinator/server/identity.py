"""Who is calling."""

from typing import Any

import grpc

METADATA_KEY = "xain-participant-id"


def participant_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The caller's own id, stable across reconnects; without one its peer address, as in XAIN."""
    for key, value in context.invocation_metadata() or ():
        if key == METADATA_KEY:
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return context.peer()
