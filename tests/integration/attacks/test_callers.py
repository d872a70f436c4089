"""Callers of the coordinator's port who are not who they say, or may not do what they ask: each is
refused with its status, and changes neither session nor journal."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from support.certificates import make_authority
from support.closed_coordinator import MODEL, ClosedCoordinator, outcome_of
from support.hostile import METHODS, path
from support.wire import Member
from xain_foundation.security.identity import Role
from xain_foundation.security.x509 import Authority, key_of_pem
from xain_wire.fl import access_pb2
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.messaging import membership_pb2
from xain_wire.messaging.membership_pb2_grpc import MembershipStub

UNAUTHENTICATED = "UNAUTHENTICATED UNAUTHENTICATED"
NOT_PERMITTED = "PERMISSION_DENIED NOT_PERMITTED"
NO_CONNECTION = "UNAVAILABLE"

Stub = Callable[[ClosedCoordinator], Member]


async def heartbeat(member: Member, told: list[str]) -> str:
    return await outcome_of(member.heartbeat(), told)


# --- certificates ---


def without_certificate(at: ClosedCoordinator) -> Member:
    credentials = grpc.ssl_channel_credentials(at.authority.certificate)
    at.members.append(Member(at.port, "ward-1", credentials))
    return at.members[-1]


def in_the_clear(at: ClosedCoordinator) -> Member:
    at.members.append(Member(at.port, "ward-1"))
    return at.members[-1]


def of_another_authority(at: ClosedCoordinator) -> Member:
    return at.member(Role.PARTICIPANT, "ward-1", by=make_authority())


def of_an_authority_of_the_same_name(at: ClosedCoordinator) -> Member:
    forged = Authority.create(at.authority.name, 0.0, 4e9)
    return at.member(Role.PARTICIPANT, "ward-1", by=forged)


def signed_by_a_participant(at: ClosedCoordinator) -> Member:
    """A certificate is no authority, though its chain ends at ours."""
    certificate, key = at.certificate(Role.PARTICIPANT, "mallory")
    own = Authority(at.authority.name, key_of_pem(key), certificate)
    leaf, leaf_key = at.certificate(Role.PARTICIPANT, "ward-1", by=own)
    return at.caller(leaf + certificate, leaf_key)


def expired(at: ClosedCoordinator) -> Member:
    return at.member(Role.PARTICIPANT, "ward-1", lifetime_s=-1.0)


def not_yet_valid(at: ClosedCoordinator) -> Member:
    return at.member(Role.PARTICIPANT, "ward-1", begins_in_s=3600.0)


def of_another_coordinator_by_our_authority(at: ClosedCoordinator) -> Member:
    return at.member(Role.COORDINATOR, "coordinator")


def under_an_authority_that_it_names_itself(at: ClosedCoordinator) -> Member:
    """The signature is ours, the name in the identity another's: such as an authority that two
    coordinators share."""
    other = Authority("other.example.org", at.authority.key, at.authority.certificate)
    return at.member(Role.PARTICIPANT, "ward-1", by=other)


CERTIFICATES: dict[Stub, str] = {
    without_certificate: NO_CONNECTION,
    in_the_clear: NO_CONNECTION,
    of_another_authority: NO_CONNECTION,
    of_an_authority_of_the_same_name: NO_CONNECTION,
    signed_by_a_participant: NO_CONNECTION,
    expired: NO_CONNECTION,
    not_yet_valid: NO_CONNECTION,
    of_another_coordinator_by_our_authority: NOT_PERMITTED,
    under_an_authority_that_it_names_itself: UNAUTHENTICATED,
}


def caller_id(stub: Stub) -> str:
    return stub.__name__


@pytest.mark.parametrize("stub", CERTIFICATES, ids=caller_id)
async def test_certificate_that_does_not_count_is_refused(closed, said, stub):
    assert await heartbeat(stub(closed), said.messages) == CERTIFICATES[stub]
    closed.require_unchanged()
    await closed.close_round()


# --- names ---


def call(member: Member, method: MethodDescriptor, data: Sequence[bytes] = (b"",)) -> Any:
    """A call with raw messages, whatever the method takes."""

    async def requests() -> AsyncIterator[bytes]:
        for one in data:
            yield one

    async def answers() -> None:
        tries = 10
        while True:
            made = member.channel.stream_stream(path(method))(requests(), metadata=member.metadata)
            try:
                async for _ in made:
                    made.cancel()  # one will do: a Watch has no end
                    return
                return
            except grpc.aio.AioRpcError as error:
                # gRPC's client says so of itself where a call was refused while it sent.
                tries -= 1
                if error.code() is not grpc.StatusCode.INTERNAL or not tries:
                    raise

    return answers()


def named(service: str) -> list[Any]:
    return [
        pytest.param(one, id=one.name) for one in METHODS if one.containing_service.name == service
    ]


@pytest.mark.parametrize("method", named("Coordinator"))
async def test_name_of_another_in_the_metadata_is_refused(closed, said, method):
    mallory = closed.member(Role.PARTICIPANT, "mallory", says="ward-1")
    assert await outcome_of(call(mallory, method), said.messages) == UNAUTHENTICATED
    closed.require_unchanged()


async def update_of_another_in_the_body(at: ClosedCoordinator, told: list[str]) -> str:
    """A site hands in an upload that is another's."""
    mallory = at.member(Role.PARTICIPANT, "mallory")
    ref = await at.sites[0].upload(MODEL)
    at.remember()
    return await outcome_of(mallory.end(ref, name="ward-1"), told)


async def update_in_the_name_of_another(at: ClosedCoordinator, told: list[str]) -> str:
    mallory = at.member(Role.PARTICIPANT, "mallory")
    ref = pb.WeightsRef(data=b"whatever")
    return await outcome_of(mallory.end(ref, num_samples=2_000_000_000, name="ward-1"), told)


async def second_process_without_an_instance_id(at: ClosedCoordinator, told: list[str]) -> str:
    """The key of a site is stolen, and the thief calls beside it."""
    certificate, key = at.certificate(Role.PARTICIPANT, "ward-3")
    owner, thief = at.caller(certificate, key), at.caller(certificate, key)
    owner.metadata = (("xain-instance-id", "first"),)
    await owner.rendezvous()
    at.remember()
    outcomes = {
        await outcome_of(thief.rendezvous(), told),
        await outcome_of(thief.heartbeat(pb.FINISHED), told),
        await outcome_of(thief.end(name="ward-3"), told),
        await outcome_of(thief.watch().read(), told),
    }
    return " or ".join(outcomes)


def membership(member: Member) -> MembershipStub:
    return MembershipStub(member.channel)


WHO = {"group": "training", "name": "ward-1"}


async def member_that_another_takes_away(at: ClosedCoordinator, told: list[str]) -> str:
    """A Leave in the name of a healthy server of the parameter server."""
    owner = at.member(Role.PARTICIPANT, "ward-1")
    request = membership_pb2.JoinRequest(**WHO, role="worker", address="here")
    joined = None
    while joined is None:
        with suppress(grpc.aio.AioRpcError):  # newcomers wait for members of before
            joined = await membership(owner).Join(request, wait_for_ready=True)
    who = {**WHO, "incarnation": joined.member.incarnation}
    mallory = membership(at.member(Role.PARTICIPANT, "mallory"))
    outcomes = {
        await outcome_of(mallory.Leave(membership_pb2.LeaveRequest(**who)), told),
        await outcome_of(mallory.Renew(membership_pb2.RenewRequest(**who)), told),
        await outcome_of(
            mallory.Join(membership_pb2.JoinRequest(**WHO, role="worker", address="x")), told
        ),
    }
    await membership(owner).Renew(membership_pb2.RenewRequest(**who))  # it is a member still
    return " or ".join(outcomes)


NAMES: dict[Callable[[ClosedCoordinator, list[str]], Any], str] = {
    update_of_another_in_the_body: UNAUTHENTICATED,
    update_in_the_name_of_another: UNAUTHENTICATED,
    second_process_without_an_instance_id: UNAUTHENTICATED,
    member_that_another_takes_away: "UNAUTHENTICATED",
}


@pytest.mark.parametrize("attack", NAMES, ids=caller_id)
async def test_name_of_another_is_refused(closed, said, attack):
    assert await attack(closed, said.messages) == NAMES[attack]
    closed.require_unchanged()


# --- roles ---

PARTICIPANTS = [
    "Rendezvous", "Heartbeat", "StartTrainingRound", "EndTrainingRound", "Watch", "PutWeights",
    "FindUpload", "ReportFailure", "Predict",
]  # fmt: skip
CONTROL = [
    "CreateToken", "Sign", "ListCertificates", "Revoke", "RemoveParticipant", "FinishSession",
    "CopyJournal",
]  # fmt: skip
ALL = [*METHODS, *(m for s in access_pb2.DESCRIPTOR.services_by_name.values() for m in s.methods)]


async def attempted(member: Member, names: Sequence[str], told: list[str]) -> dict[str, str]:
    """Outcomes that are not what one expects of a role."""
    outcomes = {
        method.name: await outcome_of(call(member, method), told)
        for method in ALL
        if method.name in names and method.containing_service.name in ("Coordinator", "Control")
    }
    assert len(outcomes) == len(names)
    return {name: outcome for name, outcome in outcomes.items() if outcome != NOT_PERMITTED}


@pytest.mark.parametrize(
    ("role", "names"),
    [
        (Role.PARTICIPANT, CONTROL),
        (Role.OBSERVER, [*PARTICIPANTS, *CONTROL]),
        (Role.NODE, [*PARTICIPANTS, "GetWeights", *CONTROL]),
        (Role.JOINING, [*PARTICIPANTS, "GetWeights", *CONTROL]),
    ],
)
async def test_role_that_may_not_is_refused(closed, said, role, names):
    """Methods are refused by role, also to a caller that gives a participant's name."""
    for name in ("ward-1", "mallory"):
        assert await attempted(closed.member(role, name), names, said.messages) == {}
    closed.require_unchanged()
    await closed.close_round()
