"""The table of permissions: every method of every service, and who may call it."""

import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from support.refusals import refused_as
from xain_coordinator.server import serve
from xain_coordinator.server.permissions import ROLES, require_permitted
from xain_foundation.security.callers import Caller
from xain_foundation.security.identity import Identity, Role
from xain_wire.fl import access_pb2, coordinator_pb2, inspection_pb2
from xain_wire.messaging import membership_pb2

FILES = (access_pb2, coordinator_pb2, inspection_pb2, membership_pb2, health_pb2, reflection_pb2)
SERVICES: dict[str, ServiceDescriptor] = {
    one.full_name: one for file in FILES for one in file.DESCRIPTOR.services_by_name.values()
}
METHODS = [
    f"/{name}/{method.name}" for name, service in SERVICES.items() for method in service.methods
]
SITE, OBSERVER, OPERATOR = Role.PARTICIPANT, Role.OBSERVER, Role.OPERATOR
NODE, JOINING = Role.NODE, Role.JOINING

# Written down once more, so that a method is not opened to a role by a slip.
ALLOWED = {
    "Coordinator": {SITE},
    "Coordinator/GetWeights": {SITE, OBSERVER, OPERATOR},
    "Inspection": {SITE, OBSERVER, OPERATOR},
    "Inspection/DescribeStudy": {OBSERVER, OPERATOR},
    "Inspection/AskPredictions": {OBSERVER, OPERATOR},
    "Membership": {SITE, NODE, OPERATOR},
    "Access/Join": {JOINING},
    "Access/Renew": {SITE, OBSERVER, OPERATOR, NODE},
    "Control": {OPERATOR},
    "Health": {SITE, OBSERVER, OPERATOR, NODE},
    "ServerReflection": {SITE, OBSERVER, OPERATOR, NODE},
}


def test_server_has_the_services_that_are_looked_at_here():
    assert {*serve.SERVICES, serve.HEALTH} < SERVICES.keys()
    assert ROLES.keys() == set(METHODS)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("method", METHODS)
def test_method_is_for_the_roles_in_the_table(method, role):
    service, _, name = method.removeprefix("/").partition("/")
    service = service.rpartition(".")[2]
    allowed = ALLOWED.get(f"{service}/{name}") or ALLOWED[service]
    caller = Caller(Identity("a", role, "alice"), "1", 0.0)
    if role in allowed:
        require_permitted(method, caller)
    else:
        with refused_as("NOT_PERMITTED", match=name):
            require_permitted(method, caller)


def test_method_without_an_entry_is_refused():
    operator = Caller(Identity("a", Role.OPERATOR, "alice"), "1", 0.0)
    with refused_as("NOT_PERMITTED"):
        require_permitted("/xain_proto.fl.Coordinator/New", operator)
