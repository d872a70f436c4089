"""Permissions at a scheduler with certificates: which roles may call which methods.

What is not in the table is refused. A server or worker calls in its own name.
"""

from collections.abc import Mapping
from typing import Final

from xain_foundation.security.identity import Role
from xain_membership.permissions import OF_MEMBERSHIP, Roles

GROUP: Final = "parameters"
SERVER, WORKER = "server", "worker"
# The role in a certificate that members of a group have.
ROLE_OF: Final[Mapping[str, Role]] = {SERVER: Role.NODE, WORKER: Role.PARTICIPANT}

_OPERATORS: Final = frozenset((Role.OPERATOR, Role.COORDINATOR))
_WORKERS: Final = _OPERATORS | {Role.PARTICIPANT}
_SERVERS: Final = _OPERATORS | {Role.NODE}

ROLES: Final[Roles] = {
    **OF_MEMBERSHIP,
    **{
        f"/xain_proto.parameters.Scheduler/{method}": roles
        for method, roles in {
            "Views": _WORKERS | _SERVERS,
            "Declare": _WORKERS,
            "Enter": _WORKERS,
            "Take": _WORKERS,
            "Tick": _WORKERS,
            "End": _WORKERS,
            "Wait": _WORKERS,
            # Requests to handlers: a worker sends them in its own name, to the scheduler and the
            # workers of its job, and by its connections to servers. Servers and observers send
            # none.
            "Send": _WORKERS,
            "Answer": _WORKERS,
            "Report": _SERVERS,
            # Also for who types it where the scheduler runs, with the scheduler's certificate.
            "Checkpoint": _WORKERS | _SERVERS,
            "Status": _WORKERS | _SERVERS | {Role.OBSERVER},
            "RollBack": _OPERATORS,
            "RemoveJob": _OPERATORS,
        }.items()
    },
}
