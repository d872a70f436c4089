"""The commands `join` and `tunnel` of the command line.

Commands import what they need, so that --help does not wait for it.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from xain_foundation.commands import DEFAULT_PORT, Config, fail, split_host_port, why_failed
from xain_foundation.exit_statuses import EXIT_BAD_CONFIG, EXIT_FAILED, CommandFailed
from xain_foundation.logs import streams
from xain_foundation.settings.hints import hint

if TYPE_CHECKING:
    from xain_participant.config import ParticipantConfig
    from xain_participant.enrolment.enrolled import Enrolled

PROGRAM: Final = "xain-participant"
MAX_PORT: Final = 65_535

CoordinatorFlag = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="HOST[:PORT]",
        help="The coordinator, where it is not reached by the address in the token. "
        "[coordinator.host, coordinator.port]",
    ),
]

JOIN_HELP = """Get a certificate for this site, with the token that an operator has sent.

FILE has the token, one line that begins with xain1; with - it is read from standard input. The key
is made here and never leaves this machine. Certificate, key and the coordinator's address are kept
in --state-dir, by default a new folder with the name in the token; a participant that is started
with this --state-dir needs nothing else to connect, and renews the certificate in time.

Repeat it after any failure: an answer that was lost is given again. A token counts once.

Where no token can be sent, as with an authority that is kept elsewhere: --request writes a request,
the operator signs it with `xain-coordinator certs sign`, and --certificate takes what came back.

Exit status: 0 if this site has its certificate, or the request is written; 1 if not; 2 if a flag is
wrong.
"""

JOIN_EXAMPLES = """**Examples**

- `xain-participant join ward-7.token` : into the folder ward-7

- `xain-participant --state-dir ward-7 --data patients.csv` : take part

- `xain-participant join - --state-dir /var/lib/xain < ward-7.token`

- `xain-participant join --request ward-7.csr --name ward-7 --state-dir ward-7` : and after it was
  signed, `xain-participant join --certificate ward-7.pem --coordinator fleet.example.org:50051
  --state-dir ward-7`
"""


def join(
    token: Annotated[
        str | None, typer.Argument(metavar="FILE|-", help="The token.", show_default=False)
    ] = None,
    state_dir: Annotated[
        str | None,
        typer.Option(
            "--state-dir",
            metavar="DIR",
            help="Folder of this participant; by default one with the name in the token. "
            "[participant.state_dir]",
        ),
    ] = None,
    coordinator: CoordinatorFlag = None,
    request: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a request for an operator to sign."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Of this site, for --request.")
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the certificate that an operator has signed."),
    ] = None,
    config: Config = None,
) -> None:
    """Get a certificate: by a token, or by a request that an operator signs; the commands' help
    says more."""
    if sum(each is not None for each in (token, request, certificate)) != 1:
        _fail("give one of FILE, --request and --certificate; see --help", EXIT_BAD_CONFIG)
    host, port = (None, None) if coordinator is None else split_host_port(coordinator)
    settings = _settings(
        config,
        {
            "coordinator.host": host,
            "coordinator.port": port,
            "participant.state_dir": state_dir,
            "participant.id": name,
        },
        sections=("coordinator", "participant"),
    )
    where = settings.coordinator
    address = where.address if "host" in where.model_fields_set else ""
    folder: Path | None = settings.participant.state_dir

    from xain_participant.enrolment import joining
    from xain_participant.enrolment.kept import KeptCertificates

    try:
        if token is not None:
            given = joining.Token(_text(token), "standard input" if token == "-" else token)
            kept = KeptCertificates(folder or Path(given.name))
            _tell(joining.join(kept, given, address))
        elif request is not None:
            wanted = settings.participant.id
            if folder is None or not wanted:
                _fail("--request needs --state-dir DIR and --name NAME", EXIT_BAD_CONFIG)
            request.write_bytes(joining.make_site_request(KeptCertificates(folder), wanted))
            typer.echo(
                f"the request is in {request}; have it signed with `xain-coordinator certs sign "
                f"{request} --name {wanted}`, and take what comes back with --certificate"
            )
        elif certificate is not None:
            if folder is None or not address:
                _fail(
                    "--certificate needs --state-dir DIR and --coordinator HOST:PORT",
                    EXIT_BAD_CONFIG,
                )
            own, authority = _parts(certificate)
            kept = KeptCertificates(folder)
            _tell(joining.take_certificate(kept, own, authority, address, str(certificate)))
    except CommandFailed as error:
        _fail(str(error), EXIT_FAILED)
    except OSError as error:
        _fail(why_failed(error), EXIT_FAILED)


RENEW_HELP = """Renew the certificate that `join` has written, if two thirds of its life are over.

Participants and tunnels that run do that themselves. This is for the folders of others: nodes of a
parameter server, peers of messaging, operators and observers. Run it once a day, by cron, a systemd
timer or a CronJob; programs that use the folder follow it, without a restart.

Exit status: 0 if the certificate is renewed, or is not due; 1 if not; 2 if a setting is wrong.
"""

RENEW_EXAMPLES = """**Examples**

- `xain-participant renew --state-dir s0` : of the node s0, whose server has `--tls s0/tls`
"""


def renew(
    state_dir: Annotated[
        str | None,
        typer.Option(
            "--state-dir",
            metavar="DIR",
            help="Folder that `join` has written. [participant.state_dir]",
        ),
    ] = None,
    coordinator: CoordinatorFlag = None,
    config: Config = None,
) -> None:
    """Renew the certificate that `join` has got, if that is due."""
    command = f"{PROGRAM} renew"
    site, _ = _site(command, state_dir, coordinator, config)
    from xain_foundation.security.tls import InvalidCertificates
    from xain_participant.enrolment import upkeep
    from xain_participant.enrolment.asking import Refused

    if site.tls is None or site.kept is None:
        remedy = hint("xain-participant", "--state-dir FOLDER")
        fail(command, f"{remedy}, which `xain-participant join` has written", EXIT_BAD_CONFIG)
    is_due = time.time() >= upkeep.due_at(site.tls)
    try:
        if is_due:
            upkeep.renew(site.kept, site.tls, site.address)
            site.tls.refresh()
    except (Refused, BlockingIOError, InvalidCertificates) as error:
        fail(command, f"{site.address}: {error}", EXIT_FAILED)
    except OSError as error:
        fail(command, why_failed(error), EXIT_FAILED)
    what = "is renewed, and" if is_due else "is not due to be renewed: it"
    typer.echo(
        f"the certificate in {site.tls.folder} {what} is valid until {_day(site.tls.own.not_after)}"
    )


TUNNEL_HELP = """Carry clients without TLS to the coordinator, under this site's certificate.

It listens on this machine alone. Clients such as XAIN's SDK, and grpcurl -plaintext, connect to it
as to a coordinator; the coordinator takes them for the participant that --state-dir is of. Whoever
may connect to this port acts as this site, so keep other users off this machine. The certificate is
renewed in time.

Exit status: 0 when it was stopped, by Ctrl-C or SIGTERM; 1 if the port is taken; 2 if a setting is
wrong.
"""

TUNNEL_EXAMPLES = """**Examples**

- `xain-participant tunnel --state-dir ward-7` : at localhost:50051

- `xain-participant tunnel --state-dir ward-7 --listen 0` : at a free port, which is printed
"""


def tunnel(
    state_dir: Annotated[
        str | None,
        typer.Option(
            "--state-dir",
            metavar="DIR",
            help="Folder that `join` has written. [participant.state_dir]",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="[HOST:]PORT", help="On this machine; 0 takes a free port.")
    ] = str(DEFAULT_PORT),
    coordinator: CoordinatorFlag = None,
    config: Config = None,
) -> None:
    """Carry connections of clients without TLS to the coordinator, until a signal comes."""
    from xain_foundation.settings.fields import is_loopback

    command = f"{PROGRAM} tunnel"
    host, port = split_host_port(listen)
    if port is None:
        host, port = "127.0.0.1", host
    if not is_loopback(host) or not port.isdecimal() or int(port) > MAX_PORT:
        message = f"--listen is {listen!r}; it must be PORT, or a host of this machine and a port"
        fail(command, f"command line: {message}", EXIT_BAD_CONFIG)
    site, settings = _site(command, state_dir, coordinator, config)
    if site.tls is None:
        fail(
            command,
            "this site has no certificate: "
            + hint("xain-participant", "--state-dir FOLDER")
            + ", with the folder that `xain-participant join` has written",
            EXIT_BAD_CONFIG,
        )
    streams.unblock()
    settings.logging.configure()
    import threading

    from xain_participant.enrolment.tunnel import Tunnel, run_until_stopped

    def ready(port: int) -> None:
        name = site.participant_id or "this site"
        typer.echo(f"{host}:{port} leads to the coordinator at {site.address}, as {name}")

    upkeep = site.upkeep()
    assert upkeep is not None, "there are certificates"
    threading.Thread(target=upkeep.run, name="upkeep", daemon=True).start()
    try:
        run_until_stopped(Tunnel(site.tls, site.address, host=host, port=int(port), on_ready=ready))
    except OSError as error:
        fail(command, f"cannot listen at {listen}: {error.strerror or error}", EXIT_FAILED)
    finally:
        upkeep.close()


def _day(at: float) -> str:
    """A date, in UTC."""
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d}"


def _tell(joined: Any) -> None:
    """Print what has joined, and the next step."""
    until = _day(joined.expires_at)
    folder = joined.folder.parent
    has = "has joined before" if joined.already else "has joined"
    typer.echo(
        f"{joined.role} {joined.name} {has} the coordinator at {joined.address}; the certificate in"
        f" {joined.folder} is valid until {until}"
    )
    if joined.role == "participant":
        typer.echo(f"Now: xain-participant --state-dir {folder} --data FILE")
    elif joined.role == "node":
        typer.echo(
            f"Now: give its program --tls {joined.folder}, and once a day run xain-participant "
            f"renew --state-dir {folder}"
        )
    else:
        typer.echo(f"Now: xain-coordinator status --address {joined.address} --tls {joined.folder}")


def _parts(file: Path) -> tuple[bytes, bytes]:
    """Split a file of certificates into the first one and those behind it, of the authority."""
    end = b"-----END CERTIFICATE-----\n"
    own, found, authority = file.read_bytes().replace(b"\r\n", b"\n").partition(end)
    return own + found, authority


def _text(token: str) -> str:
    """The text of a token, from standard input for "-". Raises OSError."""
    from xain_foundation.security.join_token import MAX_TOKEN_CHARACTERS

    most = 2 * MAX_TOKEN_CHARACTERS
    if token == "-":
        return sys.stdin.read(most)
    with Path(token).open(encoding="ascii", errors="replace") as file:
        return file.read(most)


def _site(
    command: str, state_dir: str | None, coordinator: str | None, config: Path | None
) -> "tuple[Enrolled, ParticipantConfig]":
    """The means by which the site in --state-dir connects, and its settings. Ends the process with
    status 2 if they cannot be used."""
    from xain_foundation.settings.settings import ConfigError
    from xain_participant.enrolment.enrolled import enrolled

    host, port = (None, None) if coordinator is None else split_host_port(coordinator)
    values = {
        "coordinator.host": host,
        "coordinator.port": port,
        "participant.state_dir": state_dir,
    }
    # A mistake in other sections, such as [data], must not keep a certificate from its renewal.
    settings = _settings(config, values, ("coordinator", "participant", "tls", "logging"))
    try:
        return enrolled(settings), settings
    except ConfigError as error:
        fail(command, str(error), EXIT_BAD_CONFIG)


def _settings(
    config: Path | None, values: dict[str, Any], sections: tuple[str, ...]
) -> "ParticipantConfig":
    """The settings of some sections. Ends the process with status 2 if one is wrong."""
    from xain_foundation.settings.settings import ConfigError, load
    from xain_participant.config import ENV_PREFIX, ParticipantConfig

    try:
        return load(ParticipantConfig, config, ENV_PREFIX, values, sections)
    except ConfigError as error:
        fail(PROGRAM, str(error), EXIT_BAD_CONFIG)


def _fail(message: str, status: int) -> NoReturn:
    """Report an error of `join`, and end the process."""
    fail(f"{PROGRAM} join", message, status)
