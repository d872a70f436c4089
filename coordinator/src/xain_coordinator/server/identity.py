"""Identity of the caller, and the age of its call."""

from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from typing import Any

import grpc

from xain_coordinator.access.errors import Unauthenticated
from xain_foundation.security.callers import Caller
from xain_foundation.security.identity import Identity, Role
from xain_foundation.settings.fields import join_host_port
from xain_wire.metadata import INSTANCE_ID_KEY, PARTICIPANT_ID_KEY, TIMEOUT_KEY


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a call as its metadata tell. said: its participant id; None if it says none.
    instance_id: of its process; "" if it sends none, as a XAIN client."""

    said: str | None
    instance_id: str


# The sender of the present call, which the interceptor has read.
SENDER: ContextVar[Sender] = ContextVar("SENDER")
# waited_s of the present call, where the interceptor has measured it.
WAITED_S: ContextVar[float | None] = ContextVar("WAITED_S", default=None)
# The caller of the present call, as the guard has found it; None where an open coordinator does not
# ask.
CALLER: ContextVar[Caller | None] = ContextVar("CALLER", default=None)
# The caller of a connection by the Unix socket beside the journal.
THIS_MACHINE = Caller(Identity("", Role.OPERATOR, "this machine"), "", inf)


def caller_said() -> str:
    """The caller, as the audit log names it."""
    caller = CALLER.get()
    assert caller is not None, "the guard lets nobody else call this"
    return str(caller.identity)


def certified_site() -> str | None:
    """The participant that calls under a certificate; None for all others."""
    caller = CALLER.get()
    if caller is None or caller.identity.role is not Role.PARTICIPANT:
        return None
    return caller.identity.name


def certified_caller() -> Caller:
    """The caller, who has a certificate. Raises Unauthenticated."""
    caller = CALLER.get()
    if caller is None or caller is THIS_MACHINE:
        raise Unauthenticated("the call needs a certificate, and came through the Unix socket")
    return caller


def participant_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The caller's own id, stable across reconnects: the name in its certificate. On an open
    coordinator what it says; without that its peer address, as in XAIN."""
    caller = CALLER.get()
    if caller is not None and caller.identity.role is Role.PARTICIPANT:
        return caller.identity.name
    said = SENDER.get().said
    return context.peer() if said is None else said


def sender_of(context: grpc.aio.ServicerContext[Any, Any]) -> Sender:
    """The sender of a call, by its metadata: the first of each key counts."""
    said: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        if key in (PARTICIPANT_ID_KEY, INSTANCE_ID_KEY) and key not in said:
            said[key] = value if isinstance(value, str) else value.decode("utf-8", "replace")
    return Sender(said.get(PARTICIPANT_ID_KEY), said.get(INSTANCE_ID_KEY, ""))


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


def peer_at(host: str, port: int) -> str:
    """The peer at an address, as gRPC names it."""
    return f"{'ipv6' if ':' in host else 'ipv4'}:{join_host_port(host, port)}"
