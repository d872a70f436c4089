"""The table of permissions: which roles may call a method.

A method that is not in the table is refused, to whoever calls it.
"""

from collections.abc import Mapping

from xain_coordinator.access.errors import not_permitted
from xain_foundation.security.callers import Caller
from xain_foundation.security.identity import Role

PARTICIPANT, OBSERVER, OPERATOR, NODE = Role.PARTICIPANT, Role.OBSERVER, Role.OPERATOR, Role.NODE

Roles = frozenset[Role]

_SITES: Roles = frozenset((PARTICIPANT,))
_READERS: Roles = frozenset((OBSERVER, OPERATOR))
_SITES_AND_READERS: Roles = _SITES | _READERS
_OPERATORS: Roles = frozenset((OPERATOR,))
_PEERS: Roles = frozenset((PARTICIPANT, NODE, OPERATOR))
_HOLDERS: Roles = frozenset((PARTICIPANT, OBSERVER, OPERATOR, NODE))


def _of(service: str, methods: Mapping[str, Roles]) -> dict[str, Roles]:
    """Roles by the full name of each method of a service."""
    return {f"/{service}/{method}": roles for method, roles in methods.items()}


ACCESS, CONTROL = "/xain_proto.fl.Access/", "/xain_proto.fl.Control/"

ROLES: Mapping[str, Roles] = {
    **_of(
        "xain_proto.fl.Coordinator",
        {
            "Rendezvous": _SITES,
            "Heartbeat": _SITES,
            "StartTrainingRound": _SITES,
            "EndTrainingRound": _SITES,
            "Watch": _SITES,
            "GetWeights": _SITES_AND_READERS,
            "PutWeights": _SITES,
            "FindUpload": _SITES,
            "ReportFailure": _SITES,
            "Predict": _SITES,
        },
    ),
    # A participant is told of itself alone.
    **_of(
        "xain_proto.fl.Inspection",
        {
            "GetStatus": _SITES_AND_READERS,
            "ListParticipants": _SITES_AND_READERS,
            "ListRounds": _SITES_AND_READERS,
            "ListModels": _SITES_AND_READERS,
            "Describe": _SITES_AND_READERS,
            "DescribeStudy": _READERS,
            "AskPredictions": _READERS,
        },
    ),
    **_of(
        "xain_proto.messaging.Membership",
        dict.fromkeys(("Join", "Renew", "Watch", "Leave", "Barrier"), _PEERS),
    ),
    **_of("xain_proto.fl.Access", {"Join": frozenset((Role.JOINING,)), "Renew": _HOLDERS}),
    **_of(
        "xain_proto.fl.Control",
        {
            "CreateToken": _OPERATORS,
            "Sign": _OPERATORS,
            "ListCertificates": _OPERATORS,
            "Revoke": _OPERATORS,
            "RemoveParticipant": _OPERATORS,
            "FinishSession": _OPERATORS,
            "FollowScript": _OPERATORS,
            "ConfigureRound": _OPERATORS,
            "RecordEvaluation": _OPERATORS,
            "EndScript": _OPERATORS,
            "CopyJournal": _OPERATORS,
        },
    ),
    **_of("grpc.health.v1.Health", {"Check": _HOLDERS, "Watch": _HOLDERS, "List": _HOLDERS}),
    **_of("grpc.reflection.v1alpha.ServerReflection", {"ServerReflectionInfo": _HOLDERS}),
}


def require_permitted(method: str, caller: Caller) -> None:
    """Check that the caller's role may call a method; what the table lacks is refused. Raises
    NOT_PERMITTED."""
    if caller.identity.role not in ROLES.get(method, ()):
        raise not_permitted(f"{caller.identity} may not call {method.removeprefix('/')}")


def require_open(method: str) -> None:
    """Refuse what an open coordinator does for the operator of its machine alone. Raises
    NOT_PERMITTED."""
    if method.startswith((ACCESS, CONTROL)):
        raise not_permitted(
            f"{method.removeprefix('/')} is for the operator on the coordinator's machine, since "
            "this coordinator has no certificates: there, give as the address the path of its "
            "socket, journal.sock beside the journal"
        )
