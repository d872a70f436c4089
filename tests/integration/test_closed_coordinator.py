"""A coordinator with certificates: who calls, and what is refused before it has any effect."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from integration.conftest import Start
from support.certificates import issued
from support.waiting import until
from support.wire import Code, Member, assert_refused, refused
from xain_coordinator.access.control import initialise
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.server.calls.admission_control import BURST_S, CALLS_PER_MEMBER
from xain_coordinator.server.guard import Guard
from xain_coordinator.server.serve import STREAMS_OF_HOLDER
from xain_foundation.security.identity import Role
from xain_foundation.security.join_token import JoinToken
from xain_foundation.security.tls_settings import TlsSettings
from xain_foundation.security.x509 import Authority, key_to_pem, make_request, new_key
from xain_membership.service import MAX_GROUPS
from xain_wire.fl import access_pb2, access_pb2_grpc, inspection_pb2
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.coordinator_pb2_grpc import CoordinatorStub
from xain_wire.fl.inspection_pb2_grpc import InspectionStub
from xain_wire.messaging.membership_pb2 import JoinRequest, RenewRequest
from xain_wire.messaging.membership_pb2_grpc import MembershipStub

Call = Callable[..., Member]


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Guard]:
    folder = tmp_path / "access"
    initialise(folder, ["127.0.0.1"])
    made = Guard.open(TlsSettings(), folder / "tls", folder)
    yield made
    made.close()


@pytest.fixture
def authority(guard: Guard, tmp_path: Path) -> Authority:
    folder = tmp_path / "access"
    return Authority.of_pem((folder / "ca.crt").read_bytes(), (folder / "ca.key").read_bytes())


@pytest.fixture
async def closed(start: Start, guard: Guard) -> AsyncIterator[SessionCoordinator]:
    watching = asyncio.create_task(guard.watch())
    yield await start(
        guard=guard, server={"health_port": 0}, rounds={"min_participants": 2, "rounds": 2}
    )
    watching.cancel()


@pytest.fixture
async def caller(authority: Authority) -> AsyncIterator[Call]:
    """Callers of a coordinator, each with a certificate."""
    members = []

    def make(at: SessionCoordinator, role: Role, name: str, says: str | None = None) -> Member:
        certificate, key = issued(authority, role, name)
        credentials = grpc.ssl_channel_credentials(authority.certificate, key, certificate)
        members.append(Member(at.port, says, credentials))
        return members[-1]

    yield make
    for member in members:
        await member.close()


@pytest.fixture
def call(closed: SessionCoordinator, caller: Call) -> Call:
    return partial(caller, closed)


async def test_caller_has_the_name_in_its_certificate(closed, call):
    """A site joins under that name with and without an id in the metadata of its calls."""
    for name, said in (("ward-7", None), ("ward-8", "ward-8")):
        assert (await call(Role.PARTICIPANT, name, said).rendezvous()).reply == pb.ACCEPT
    assert set(closed.driver.session.members) == {"ward-7", "ward-8"}


async def test_audit_log_has_a_line_of_each_call_of_a_script(start, guard, caller, tmp_path):
    """Also of one that only follows: it reads the settings of all sites."""
    settings = {"scripted": True, "rounds": 2, "initial_weights": "average"}
    coordinator = await start(guard=guard, rounds=settings)
    site = caller(coordinator, Role.PARTICIPANT, "ward-7")
    operator = caller(coordinator, Role.OPERATOR, "alice")
    await site.rendezvous()
    await site.until(pb.ROUND, 0)
    await site.hand_in([0.0, 1.0])
    control = access_pb2_grpc.ControlStub(operator.channel)
    stream = control.FollowScript(access_pb2.FollowScriptRequest())
    async for status in stream:
        if status.waits:
            break
    await control.ConfigureRound(access_pb2.ConfigureRoundRequest(round=status.round))
    await control.RecordEvaluation(
        access_pb2.RecordEvaluationRequest(model=status.model, metrics={"loss": 1.0})
    )
    await control.EndScript(access_pb2.EndScriptRequest(failure="ValueError: nan"))
    assert coordinator.driver.session.cause == "the script failed: ValueError: nan"
    expected = ["script_follows", "round_configured", "model_evaluated", "script_ended"]
    found = [line for line in lines("", tmp_path) if line["event"] in expected]
    assert [line["event"] for line in found] == expected
    assert {line["by"] for line in found} == {"operator 'alice'"}
    refusal = await refused(
        access_pb2_grpc.ControlStub(site.channel).EndScript(access_pb2.EndScriptRequest())
    )
    assert refusal[1] == "NOT_PERMITTED"


async def test_model_of_one_sites_statistics_is_not_made(start, guard, caller):
    """A site that joins later would read them out of the metadata of the model."""
    coordinator = await start(guard=guard, workload={"name": "sgd"})
    profile = pb.DataProfile(
        num_samples=10,
        num_features=1,
        classes=["no", "yes"],
        columns=[pb.Column(name="age", type="number")],
        target="ill",
        task="classification",
    )
    sites = [caller(coordinator, Role.PARTICIPANT, name) for name in ("ward-7", "ward-8")]
    await sites[0].rendezvous(profile)
    await until(lambda: coordinator.driver.session.trouble)
    assert "schema.min_sites is 2" in coordinator.driver.session.trouble
    await sites[1].rendezvous(profile)
    await until(lambda: coordinator.driver.session.model)


async def test_files_that_do_not_belong_together_are_told(closed, guard, call, tmp_path):
    """Status and metrics tell of them; calls go on under the old ones."""
    guard.certificates.settles_s = guard.look_s = 0.0
    (tmp_path / "access" / "tls" / "tls.crt").write_text("half a file")
    operator = call(Role.OPERATOR, "alice")
    await until(lambda: guard.warnings)
    status = await operator.status()
    assert "tls.crt" in status.warnings[-1]
    assert guard.fields_of_metrics["not_used"] == 1


async def test_member_of_messaging_takes_no_slot_of_another_and_joins_few_groups(closed, call):
    closed._server._membership._registry._open_at = 0.0  # for newcomers
    own, other = (MembershipStub(call(Role.NODE, name).channel) for name in ("a", "b"))

    def join(name: str, group: str) -> JoinRequest:
        return JoinRequest(group=group, role="server", name=name, address="127.0.0.1:1")

    member = (await own.Join(join("a", "0"))).member
    for group in range(1, MAX_GROUPS):
        await own.Join(join("a", str(group)))
    await assert_refused(own.Join(join("a", "one more")), Code.RESOURCE_EXHAUSTED)
    await other.Join(join("b", "one more"))
    closed._server.admission.capacities["0", "a"] = 0
    renew = RenewRequest(group="0", name="a", incarnation=member.incarnation)
    for stub, code in ((own, Code.RESOURCE_EXHAUSTED), (other, Code.UNAUTHENTICATED)):
        await assert_refused(stub.Renew(renew), code)


async def test_participant_is_told_of_itself_alone(closed, call):
    """Lists, rounds and status show a participant its own rows; an observer sees all."""
    own, other = (call(Role.PARTICIPANT, name, name) for name in ("ward-7", "ward-8"))
    for site in (own, other):
        await site.rendezvous()
    for site in (own, other):
        await site.until(pb.ROUND, 0)
        await site.hand_in([1.0, 2.0])
    await own.until(pb.ROUND, 1)

    async def told(asking: Member) -> list[str]:
        answers = (
            await asking.inspection.ListParticipants(inspection_pb2.ListParticipantsRequest()),
            await asking.inspection.ListRounds(inspection_pb2.ListRoundsRequest()),
            await asking.inspection.GetStatus(inspection_pb2.GetStatusRequest(whole=True)),
        )
        assert answers[1].rounds[0].num_contributors == 2
        return [name for name in ("ward-7", "ward-8") if name in str(answers)]

    assert await told(own) == ["ward-7"]
    assert await told(call(Role.OBSERVER, "ethics")) == ["ward-7", "ward-8"]


async def test_holder_of_a_certificate_has_a_rate_limit(start, guard, caller):
    """Ten seconds' worth of calls come at once, and one more is refused; the connection of a
    refused call is not kept for it. Other holders are served."""
    coordinator = await start(
        guard=guard, server={"max_calls_per_s": 1}, rounds={"min_participants": 3}
    )
    admission, kept = coordinator._server.admission, list[str]()
    admission._now = lambda: 0.0
    admission.on_accepted = lambda peer, member: kept.append(peer)
    sites = [caller(coordinator, Role.PARTICIPANT, name) for name in ("ward-7", "ward-8")]
    greedy, other = sites
    await greedy.rendezvous()
    for _ in range(BURST_S - 1):
        await greedy.heartbeat()
    await assert_refused(greedy.heartbeat(), Code.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
    assert len(kept) == BURST_S
    await other.rendezvous()


async def test_refused_calls_of_a_holder_are_held_back(closed, call):
    """Refused calls keep their streams, which are few, so that a client that calls again at
    once has few calls a second. Other holders are answered meanwhile."""
    admission = closed._server.admission
    admission.refusals_per_s = 1e-6
    greedy, modest = call(Role.PARTICIPANT, "ward-7"), call(Role.PARTICIPANT, "ward-8")
    await greedy.rendezvous()
    calls = [greedy.watch() for _ in range(2 * STREAMS_OF_HOLDER)]
    await until(lambda: admission.num_calls + admission.num_held_back == STREAMS_OF_HOLDER)
    await modest.rendezvous()
    await modest.heartbeat()
    await until(lambda: admission.num_calls == CALLS_PER_MEMBER)  # none of the others
    assert admission.num_held_back == STREAMS_OF_HOLDER - CALLS_PER_MEMBER
    assert not any(one.done() for one in calls)
    admission.max_held_back = admission.num_held_back
    again = call(Role.PARTICIPANT, "ward-7")  # on a connection with streams
    assert (await refused(again.heartbeat()))[1] == "TOO_MANY_CALLS"
    for one in calls:
        one.cancel()
    await until(lambda: not admission.num_held_back)


async def test_unix_socket_is_the_operators(closed, tmp_path):
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'journal.sock'}") as channel:
        health = await HealthStub(channel).Check(HealthCheckRequest())
        assert health.status == HealthCheckResponse.SERVING
        heartbeat = CoordinatorStub(channel).Heartbeat(pb.HeartbeatRequest())
        assert (await refused(heartbeat))[1] == "NOT_PERMITTED"


async def test_open_coordinator_has_the_operators_commands_on_its_socket_alone(start, tmp_path):
    coordinator = await start()
    request = access_pb2.FinishSessionRequest()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{coordinator.port}") as channel:
        call = access_pb2_grpc.ControlStub(channel).FinishSession(request)
        assert (await refused(call))[1] == "NOT_PERMITTED"
    assert not coordinator.driver.session.cause


def lines(event: str, folder: Path) -> list[dict[str, Any]]:
    """Lines of the audit log with this event; "": all."""
    log = (folder / "access" / "audit.log").read_text().splitlines()
    return [line for line in map(json.loads, log) if event in ("", line["event"])]


async def test_site_joins_with_a_token_renews_and_is_revoked(closed, tmp_path):
    """A site's life over the one port, from its token to the end of its streams. A used token
    serves no other key."""
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'journal.sock'}") as local:
        control = access_pb2_grpc.ControlStub(local)
        made = await control.CreateToken(
            access_pb2.CreateTokenRequest(name="ward-7", role="participant", ttl_s=600)
        )
        token = JoinToken.decode(made.token)
        assert token.address == f"127.0.0.1:{closed.port}"
        request, key = request_of("ward-7")
        joining = Member(closed.port, None, credentials_of(token.authority, token))
        join = access_pb2_grpc.AccessStub(joining.channel).Join
        first = await join(access_pb2.JoinRequest(request=request))
        assert await join(access_pb2.JoinRequest(request=request)) == first
        other, _ = request_of("ward-7")
        assert (await refused(join(access_pb2.JoinRequest(request=other))))[1] == "TOKEN_USED"
        credentials = grpc.ssl_channel_credentials(first.authority, key, first.certificate)
        site = Member(closed.port, None, credentials)
        await site.rendezvous()
        renewed, _ = request_of("ward-7")
        await access_pb2_grpc.AccessStub(site.channel).Renew(
            access_pb2.RenewRequest(request=renewed)
        )
        watch = site.watch()
        await watch.read()
        revoked = await control.Revoke(access_pb2.RevokeRequest(which="ward-7"))
        assert len(revoked.serials) == 3
        assert (await refused(watch.read()))[:2] == (Code.UNAUTHENTICATED, "UNAUTHENTICATED")
        assert (await refused(site.heartbeat()))[1] == "UNAUTHENTICATED"
        await until(lambda: "ward-7" not in closed.driver.session.members)
        await until(lambda: lines("identity_refused", tmp_path))

        async def tell_the_same():
            listed = await control.ListCertificates(access_pb2.ListCertificatesRequest())
            status = await InspectionStub(local).GetStatus(inspection_pb2.GetStatusRequest())
            return (status.audit_lines, status.audit_hash) == (listed.num_lines, listed.last_hash)

        await until(tell_the_same)  # a line may come between the two
    await joining.close()
    await site.close()


def request_of(name: str) -> tuple[bytes, bytes]:
    """A request for a certificate, and its key."""
    key = new_key()
    return make_request(key, name), key_to_pem(key)


def credentials_of(authority: bytes, token: JoinToken) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(authority, token.key, token.certificate)
