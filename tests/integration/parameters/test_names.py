"""A group with certificates: each program acts in its own name, and certificates may change while
it trains. The attacks are made over real sockets, by holders of valid certificates."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from support.certificates import make_authority, write_folder
from support.parameter_servers import LONG_S, Servers
from support.waiting import wait_until
from xain_foundation.net.channels import open_channel
from xain_foundation.security import tls
from xain_foundation.security.callers import Caller
from xain_foundation.security.identity import SCHEDULER, NoIdentity, Role, node_host
from xain_foundation.security.tls import Certificates
from xain_foundation.security.x509 import Authority
from xain_parameters.client.connecting import connect_sync
from xain_parameters.errors import Invalid, Unavailable
from xain_parameters.messages import Command, Refused
from xain_parameters.scheduler.client import SchedulerCalls
from xain_parameters.scheduler.journal import Journal
from xain_parameters.scheduler.permissions import GROUP, ROLES
from xain_parameters.scheduler.reports import Report
from xain_parameters.scheduler.service import SchedulerServer
from xain_parameters.scheduler.state import Settings
from xain_parameters.specs import encoded
from xain_parameters.transport.channel import hello
from xain_parameters.transport.connection import Connection
from xain_parameters.transport.listener import Listener
from xain_wire.messaging import membership_pb2 as mpb
from xain_wire.messaging.membership_pb2_grpc import MembershipStub
from xain_wire.parameters import scheduler_pb2 as pb
from xain_wire.parameters.scheduler_pb2_grpc import SchedulerStub

OURS = make_authority()


class Group(Servers):
    """A scheduler and servers s0 and s1, each range with a replica, all with certificates."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.certificates: dict[str, Certificates] = {}
        # No member is taken for dead on a slow machine.
        times = {"lease_s": LONG_S, "worker_lease_s": LONG_S}
        self.folder = folder
        super().__init__(folder, stack, self.tls, times, num_replicas=1)
        for name in ("s0", "s1"):
            self.start(name)

    def tls(self, name: str, role: Role, authority: Authority = OURS) -> Certificates:
        folder = self.folder / f"{role}-{name}-{len(self.certificates)}"
        made = Certificates(write_folder(folder, authority, role, name, hosts=()))
        self.certificates[name] = made
        return made

    def channel(self, name: str, role: Role) -> grpc.Channel:
        credentials = self.tls(name, role).of_channel()
        options = [("grpc.ssl_target_name_override", node_host(SCHEDULER))]
        return self.stack.enter_context(open_channel(self.target, options, credentials))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with ExitStack() as stack:
        yield Group(tmp_path, stack)


def code_of(call: Callable[..., Any], request: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as refused:
        _ = list(call(request, timeout=LONG_S))  # a stream ends as it is read
    return refused.value.code()


def sent_by(name: str, incarnation: int) -> pb.PassedRequest:
    return pb.PassedRequest(sender=name, incarnation=incarnation, number=1)


def test_requests_are_sent_by_workers_in_their_own_names(group):
    """To servers, workers and the scheduler: by participants, and by operators. An observer and a
    server are refused everywhere."""
    worker = group.worker("w0")
    assert worker.send("all").keys() == {"s0", "s1", "scheduler", "w0"}
    tls = group.tls("olga", Role.OPERATOR)
    operator = connect_sync(group.target, worker="olga", timeout_s=LONG_S, tls=tls)
    assert operator.send("all").keys() == {"s0", "s1", "scheduler", "w0", "olga"}
    operator.close()
    denied = grpc.StatusCode.PERMISSION_DENIED
    for role, name in ((Role.OBSERVER, "eve"), (Role.JOINING, "joe"), (Role.NODE, "s0")):
        scheduler = SchedulerStub(group.channel(name, role))
        for to in ("scheduler", "workers", "all", "w0"):
            request = pb.SendRequest(to=to, request=sent_by(name, 1))
            assert code_of(scheduler.Send, request) is denied, (name, to)
        assert code_of(scheduler.Answer, pb.AnswerRequest(name=name)) is denied
        if role is not Role.NODE:
            with pytest.raises(
                (Invalid, Unavailable),
                match=f"{role} .{name}. may not call|certificate is that of {role}",
            ):
                connect_sync(group.target, worker=name, timeout_s=1.0, tls=group.tls(name, role))
    # A server, which may connect to servers, has no request answered there.
    own = group.tls("s1", Role.NODE)
    address = group.servers["s0"].address
    connection = Connection(address, hello("s1", "server", 1), tls=own, server="s0")
    answer = connection.ask(Command(0, 1, "x", 1)).result(LONG_S).head
    assert isinstance(answer, Refused)
    assert answer.text == "servers send no requests"
    connection.close()


def test_member_cannot_act_in_the_name_of_another_one(group):
    """Three calls of Leave in healthy servers' names reset a replicated group once. A worker, a
    server and an observer try it, and whatever else a member could do for another one."""
    worker = group.worker("w0")
    w = worker.dense("w", (100,))
    w.push(np.ones(100, np.float32))
    group.wait_for_servers(2)
    before = group.scheduler.status()
    members = {name: server._scheduler.incarnation for name, server in group.servers.items()} | {
        "w0": worker._core.scheduler.incarnation
    }
    for name, role in (
        ("mallory", Role.PARTICIPANT),
        ("s9", Role.NODE),
        ("eve", Role.OBSERVER),
        ("joining", Role.JOINING),
    ):
        channel = group.channel(name, role)
        membership = MembershipStub(channel)
        scheduler = SchedulerStub(channel)
        is_member = role in (Role.PARTICIPANT, Role.NODE)
        refused = (
            grpc.StatusCode.UNAUTHENTICATED if is_member else grpc.StatusCode.PERMISSION_DENIED
        )
        for member, incarnation in members.items():
            who = {"group": GROUP, "name": member, "incarnation": incarnation}
            kind = "worker" if member == "w0" else "server"
            join = {
                "group": GROUP,
                "role": kind,
                "name": member,
                "address": "127.0.0.1:9",
            }
            former = mpb.Member(name=member, role=kind, incarnation=incarnation + 1)
            for method, request in (
                ("Leave", mpb.LeaveRequest(**who)),
                ("Renew", mpb.RenewRequest(**who)),
                ("Join", mpb.JoinRequest(**join)),
                ("Join", mpb.JoinRequest(**join, former=former)),
                ("Watch", mpb.WatchRequest(**who)),
            ):
                assert code_of(getattr(membership, method), request) is refused, (name, method)
            del who["group"]
            leaves = encoded(Report(is_leaving=True))
            for method, request in (
                ("Report", pb.ReportRequest(**who, report=leaves)),
                ("Tick", pb.TickRequest(**who, begins=True)),
                ("End", pb.EndRequest(**who)),
                ("Views", pb.ViewsRequest(**who)),
                ("Send", pb.SendRequest(to="scheduler", request=sent_by(member, incarnation))),
                ("Answer", pb.AnswerRequest(**who)),
            ):
                assert code_of(getattr(scheduler, method), request) in (
                    grpc.StatusCode.UNAUTHENTICATED,
                    grpc.StatusCode.PERMISSION_DENIED,
                ), (name, method)
        denied = grpc.StatusCode.PERMISSION_DENIED
        assert code_of(scheduler.RollBack, pb.RollBackRequest()) is denied
    # A worker does not become a server by its own name.
    promoted = mpb.JoinRequest(group=GROUP, role="server", name="mallory", address="127.0.0.1:9")
    channel = group.channel("mallory", Role.PARTICIPANT)
    stub = MembershipStub(channel)
    assert code_of(stub.Join, promoted) is grpc.StatusCode.UNAUTHENTICATED
    after = group.scheduler.status()
    generations = [[job.view.generation for job in each.jobs.values()] for each in (before, after)]
    assert generations[0] == generations[1]
    assert after.ranges == before.ranges
    assert after.addresses == before.addresses
    assert after.num_rollbacks == 0
    np.testing.assert_array_equal(w.pull(), 1)
    operator = SchedulerStub(group.channel("olga", Role.OPERATOR))
    operator.RollBack(pb.RollBackRequest(), timeout=LONG_S)


def test_servers_take_connections_of_the_names_in_certificates_alone(group):
    address = group.servers["s0"].address
    for name, role, said in (
        ("mallory", Role.PARTICIPANT, hello("w0", "worker", 1)),
        ("mallory", Role.PARTICIPANT, hello("mallory", "server", 1)),
        ("s9", Role.NODE, hello("s1", "server", 1)),
        ("s9", Role.NODE, hello("s9", "worker", 1)),
        ("eve", Role.OBSERVER, hello("eve", "worker", 1)),
    ):
        with pytest.raises(Invalid, match=f"the certificate is that of {role} '{name}'"):
            Connection(address, said, tls=group.tls(name, role), server="s0")
    own = group.tls("w0", Role.PARTICIPANT)
    with pytest.raises(Unavailable, match="certificate of node 's0', not of node 's1'"):
        Connection(address, hello("w0", "worker", 1), tls=own, server="s1")
    Connection(address, hello("w0", "worker", 1), tls=own, server="s0").close()
    # A participant that listens where a server should be is given nothing.
    there = Listener(
        "127.0.0.1:0", lambda channel, message: None, tls=group.tls("s0", Role.PARTICIPANT)
    )
    named = pytest.raises(Unavailable, match="certificate of participant 's0'")
    with closing(there), named:
        Connection(f"127.0.0.1:{there.port}", hello("w0", "worker", 1), tls=own, server="s0")


@pytest.mark.parametrize(
    ("role", "name"), [(Role.NODE, "s0"), (Role.PARTICIPANT, SCHEDULER), (Role.PARTICIPANT, "w0")]
)
def test_no_member_passes_for_the_scheduler(tmp_path, role, name):
    """A node of that name does, and a coordinator, which may have a scheduler in its process."""

    def holder(role: Role, name: str) -> Certificates:
        return Certificates(write_folder(tmp_path / f"{role}-{name}", OURS, role, name, hosts=()))

    client = holder(Role.OBSERVER, "eve")

    def ask(tls: Certificates, within_s: float) -> None:
        journal = Journal(tmp_path / f"{tls.folder.name}.db")
        with (
            SchedulerServer(journal, Settings(), tls=tls) as server,
            SchedulerCalls(server.target, client) as calls,
        ):
            calls.status(within_s)

    with pytest.raises(Unavailable, match=f"that of {role} {name!r}, and not of node 'scheduler'"):
        ask(holder(role, name), 1.0)
    ask(holder(Role.NODE, SCHEDULER), LONG_S)
    ask(holder(Role.COORDINATOR, "coordinator"), LONG_S)


def test_every_method_has_its_roles(group):
    """A method that is added and not listed is refused to everybody, which this tells."""
    served = {
        f"/{service.full_name}/{method.name}"
        for file, name in ((pb, "Scheduler"), (mpb, "Membership"))
        for service in [file.DESCRIPTOR.services_by_name[name]]
        for method in service.methods
    }
    assert served == set(ROLES)
    for role in Role:
        channel = group.channel("someone", role)
        for method, roles in ROLES.items():
            if role in roles:
                continue
            call = channel.unary_unary(method)
            assert code_of(call, b"") is grpc.StatusCode.PERMISSION_DENIED, (role, method)


def test_connection_ends_with_its_certificate(tmp_path):
    """A worker that is connected sends nothing that counts once its certificate has expired."""
    own = Certificates(write_folder(tmp_path / "s0", OURS, Role.NODE, "s0"))
    own_of_worker = Certificates(write_folder(tmp_path / "w0", OURS, Role.PARTICIPANT, "w0"))
    heard = []
    there = Listener("127.0.0.1:0", lambda channel, message: heard.append(message), tls=own)
    with closing(there):
        connection = Connection(
            f"127.0.0.1:{there.port}", hello("w0", "worker", 1), tls=own_of_worker, server="s0"
        )
        connection.ask(Command(0, 1, "x"))
        connection.flush()
        wait_until(lambda: len(heard) == 1)
        later = own_of_worker.own.not_after + 1.0
        own.callers._now = lambda: later
        answer = connection.ask(Command(0, 1, "x"))
        with pytest.raises(ConnectionError):
            answer.result(LONG_S)
        assert len(heard) == 1
        connection.close()


@pytest.mark.parametrize("how", ["by a coordinator", "in files"])
def test_revoked_worker_is_refused_from_its_next_message_on(group, how):
    """A coordinator with a parameter server knows what is revoked, other programs read it. Calls
    and connections stand by then."""
    honest, revoked = group.worker("w0"), group.worker("w1")
    revoked_serial = group.certificates["w1"].own.serial
    scheduler = SchedulerStub(group.channel("w1", Role.PARTICIPANT))
    stolen = group.certificates["w1"].own.serial  # of this channel; the worker has another one
    views = scheduler.Views(pb.ViewsRequest())
    next(views)
    tables = [worker.dense("w", (100,)) for worker in (honest, revoked)]
    for each in tables:
        each.push(np.ones(100, np.float32))
        np.testing.assert_array_less(0, each.pull())

    def check(caller: Caller) -> None:
        if caller.identity.name == "w1":
            raise NoIdentity("the certificate was revoked")

    for name in ("scheduler", "s0", "s1"):
        if how == "in files":
            serials = f"{stolen}\n{revoked_serial.upper()}\n"
            (group.certificates[name].folder / tls.REVOKED).write_text(serials)
        else:
            group.certificates[name].callers.check = check
    with pytest.raises(grpc.RpcError):
        _ = list(views)
    assert views.code() is grpc.StatusCode.UNAUTHENTICATED
    if how == "in files":
        # Servers look when they report to their scheduler.
        wait_until(lambda: all(group.certificates[one].callers.revoked for one in ("s0", "s1")))
    with pytest.raises((Invalid, Unavailable), match="revoked"):
        tables[1].push(np.ones(100, np.float32))
    np.testing.assert_array_equal(tables[0].pull(), 2)
