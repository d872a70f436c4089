"""The operator's commands, carried out by the coordinator that runs, or in its folder if none does.

A coordinator on this machine is asked through the Unix socket beside its journal, one elsewhere at
its address under the operator's own certificate.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from xain_coordinator.access.control import AccessControl
from xain_coordinator.access.errors import AccessError
from xain_coordinator.access.values import Entry, Revocation
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.server.operators_socket import socket_that_answers
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.net import channels
from xain_foundation.net.grpc_calls import details_of
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import Certificates, InvalidCertificates
from xain_foundation.settings.fields import is_loopback, join_host_port
from xain_foundation.settings.hints import hint
from xain_wire.fl import access_pb2 as pb
from xain_wire.fl.access_pb2_grpc import ControlStub
from xain_wire.refusal import Refusal

if TYPE_CHECKING:
    from xain_coordinator.cli.access.names import NewToken

CALL_S = 20.0  # an answer waits for the coordinator's disk
_BY = "operator"


class Operator(Protocol):
    """Commands raise CommandFailed."""

    def create_token(self, wanted: "NewToken") -> tuple[str, str, float]:
        """Returns (text, serial number, seconds since the epoch at which it expires)."""

    def sign(self, request: bytes, name: str, role: str) -> tuple[bytes, bytes]:
        """A certificate for a request, and the authority's, in PEM."""

    def entries(self) -> list[Entry]:
        """Everything that was issued, oldest first, and what was revoked of other authorities."""

    def revoke(self, which: str) -> Revocation:
        """Revoke all of a name, or a serial number and what came of it."""

    def remove(self, name: str) -> None:
        """Remove a participant from the session."""

    def finish(self, reason: str) -> None:
        """Finish the session. reason: for those who read of it later."""


class Remote:
    """A coordinator that runs. where: it, for messages."""

    def __init__(self, channel: grpc.Channel, where: str, tls: Certificates | None = None) -> None:
        self._stub = ControlStub(channel)
        self._where = where
        self._tls = tls

    def create_token(self, wanted: "NewToken") -> tuple[str, str, float]:
        """Have the coordinator make a token. Returns (text, serial, expires_at)."""
        answer = self._ask(
            self._stub.CreateToken,
            pb.CreateTokenRequest(
                name=wanted.name,
                role=wanted.role,
                ttl_s=wanted.ttl_s,
                reusable=wanted.reusable,
                bearer=wanted.bearer,
                address=wanted.address,
            ),
        )
        return answer.token, answer.serial, answer.expires_at

    def sign(self, request: bytes, name: str, role: str) -> tuple[bytes, bytes]:
        answer = self._ask(self._stub.Sign, pb.SignRequest(request=request, name=name, role=role))
        return answer.certificate, answer.authority

    def entries(self) -> list[Entry]:
        """Certificates and tokens that the coordinator has issued."""
        answer = self._ask(self._stub.ListCertificates, pb.ListCertificatesRequest())
        return [
            Entry(
                one.serial,
                one.name,
                Role(one.role) if one.role else None,
                one.kind,
                one.issued_at,
                one.expires_at,
                one.revoked,
                one.used,
                one.reusable,
            )
            for one in answer.entries
        ]

    def revoke(self, which: str) -> Revocation:
        answer = self._ask(self._stub.Revoke, pb.RevokeRequest(which=which))
        return Revocation(list(answer.serials), list(answer.made), answer.is_foreign)

    def remove(self, name: str) -> None:
        self._ask(self._stub.RemoveParticipant, pb.RemoveParticipantRequest(name=name))

    def finish(self, reason: str) -> None:
        self._ask(self._stub.FinishSession, pb.FinishSessionRequest(reason=reason))

    def _ask(self, method: Any, request: Any) -> Any:
        """Call a method. Raises CommandFailed with the coordinator's reason."""
        try:
            return method(request, timeout=CALL_S)
        except grpc.RpcError as error:
            raise CommandFailed(self._why(error)) from None

    def _why(self, error: grpc.RpcError) -> str:
        """Why a call has failed, in words."""
        assert isinstance(error, grpc.Call)
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            cause = channels.find_cause(self._where, tls=self._tls).text
            if cause:
                return f"no coordinator can be asked at {self._where}: {cause}"
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return f"{self._where} answers, but takes no such commands: is it an earlier version?"
        return f"the coordinator refuses: {details_of(error)}"


class Stopped:
    """The folder of a coordinator that does not run.

    address: HOST:PORT that sites connect to; "" if it is not known.
    """

    def __init__(self, control: AccessControl, address: str) -> None:
        self._control = control
        self._address = address

    def create_token(self, wanted: "NewToken") -> tuple[str, str, float]:
        """Make a token in the folder. Returns (text, serial, expires_at). Raises CommandFailed."""
        if wanted.bearer:
            return self._control.create_bearer(wanted.name, wanted.role, wanted.ttl_s, by=_BY)
        address = wanted.address or self._address
        if not address:
            raise CommandFailed(
                "where do sites reach the coordinator? "
                + hint("xain-coordinator", "--address HOST:PORT")
            )
        return self._control.create_token(
            wanted.name, wanted.role, wanted.ttl_s, address, reusable=wanted.reusable, by=_BY
        )

    def sign(self, request: bytes, name: str, role: str) -> tuple[bytes, bytes]:
        return self._control.sign(request, name, role, by=_BY), self._control.authority

    def entries(self) -> list[Entry]:
        return self._control.entries()

    def revoke(self, which: str) -> Revocation:
        return self._control.revoke(which, by=_BY)

    def remove(self, name: str) -> None:
        self._require_running()

    def finish(self, reason: str) -> None:
        self._require_running()

    def _require_running(self) -> None:
        """Raise CommandFailed: only a coordinator that runs can carry out the command."""
        raise CommandFailed(
            "no coordinator runs on this machine with these settings; start it, or ask one "
            "elsewhere, " + hint("xain-coordinator", "--address HOST:PORT")
        )


@contextmanager
def operator_of(
    config: CoordinatorConfig, address: str | None, tls_folder: Path | None, passphrase: bytes = b""
) -> Iterator[Operator]:
    """The coordinator at an address, or else the one that runs with these settings, or else its
    folder.

    tls_folder: the operator's own certificate, for an address. passphrase: of the authority's key
        in the folder. Raises CommandFailed.
    """
    try:
        if address is not None:
            tls = None if tls_folder is None else Certificates(tls_folder)
            try:
                remedy = hint("xain-coordinator", "--tls FOLDER") + (
                    "; a coordinator without certificates takes this command on its own machine "
                    "alone, also"
                )
                channels.require_private_way(address, tls, insecure=False, remedy=remedy)
            except ValueError as error:
                raise CommandFailed(f"--address: {error}") from None
            credentials = None if tls is None else tls.of_channel()
            with channels.open_channel(address, (), credentials) as channel:
                yield Remote(channel, address, tls)
        elif (running := socket_that_answers(config.journal.path)) is not None:
            with channels.open_channel(f"unix:{running}") as channel:
                yield Remote(channel, str(running))
        else:
            if not config.access_folder.is_dir():
                raise CommandFailed(
                    f"there are no certificates in {config.access_folder}; make them first, "
                    + hint("xain-coordinator", "xain-coordinator certs init --host HOST")
                )
            control = AccessControl.open(config.access_folder, passphrase)
            try:
                yield Stopped(control, own_address(config))
            finally:
                control.close()
    except (AccessError, Refusal, InvalidCertificates) as error:
        raise CommandFailed(str(error)) from None


def own_address(config: CoordinatorConfig) -> str:
    """HOST:PORT that the coordinator's own certificate names first; "" if it names this machine
    only."""
    if config.certificates is None or not config.server.port:
        return ""
    with suppress(InvalidCertificates):
        names = Certificates(config.certificates).own.names
        hosts = [host for host in names.hosts if not is_loopback(host)]
        return join_host_port(hosts[0] if hosts else "localhost", config.server.port)
    return ""


def renew_own(
    config: CoordinatorConfig, hosts: Sequence[str], passphrase: bytes
) -> tuple[str, ...]:
    """Make a new certificate of the coordinator itself, which does not run. Returns the hosts that
    it is for. Raises CommandFailed."""
    folder = config.access_folder / "tls"
    if config.certificates != folder:
        raise CommandFailed(
            f"the coordinator uses the certificates in {config.certificates}, which are another "
            "authority's: put new files there"
            if config.certificates is not None
            else f"there are no certificates in {config.access_folder}; make them first, "
            + hint("xain-coordinator", "xain-coordinator certs init --host HOST")
        )
    try:
        control = AccessControl.open(config.access_folder, passphrase)
        try:
            control.renew_own(hosts, folder, by=_BY)
        finally:
            control.close()
        return Certificates(folder).own.names.hosts
    except (AccessError, Refusal, InvalidCertificates) as error:
        raise CommandFailed(str(error)) from None
