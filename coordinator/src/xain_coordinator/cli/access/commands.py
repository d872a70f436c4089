"""The commands `certs`, `tokens`, `audit`, `participants` and `session` of the command line.

Commands import what they need, so that --help does not wait for it.
"""

import json
import os
import shlex
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TextIO

import typer

from xain_foundation.commands import (
    Config,
    fail,
    make_app,
    parse_assignments,
    set_option,
    why_failed,
)
from xain_foundation.exit_statuses import EXIT_BAD_CONFIG, EXIT_FAILED, CommandFailed
from xain_foundation.settings.hints import hint

if TYPE_CHECKING:
    from xain_coordinator.access.values import Entry
    from xain_coordinator.cli.access.names import NewToken
    from xain_coordinator.cli.access.operator import Operator
    from xain_coordinator.config.coordinator import CoordinatorConfig

PROGRAM: Final = "xain-coordinator"

DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder of all data of the coordinator. By default xain-data."
    ),
]
Assignments = Annotated[list[str] | None, set_option("journal.path=wards/journal.sqlite")]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Ask the coordinator that runs there, with --tls; without it, the one on this machine "
        "that has these settings.",
    ),
]
Tls = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        metavar="DIR",
        help="Folder with the operator's own ca.crt, tls.crt and tls.key, as `xain-participant "
        "join` writes it for a token of the role operator.",
    ),
]
Passphrase = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        metavar="FILE",
        help="What encrypts the key of the authority. [server.passphrase_file]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
Role = Annotated[str, typer.Option(metavar="ROLE", help="participant, observer, operator or node.")]

certs = make_app()
tokens = make_app()
audit = make_app()
participants = make_app()
session = make_app()

_CERTS_HELP = """Make the authority of a coordinator, list certificates, revoke and sign them.

With certificates the coordinator lets nobody in without one, and everything is encrypted. A
coordinator that runs is asked through the socket in its data folder, so that these commands need no
certificate on its machine; one that is stopped need not be started.
"""

_TOKENS_HELP = """Make tokens, with which sites and operators join.

A token is one line of text. It counts once, and for a day.
"""

_AUDIT_HELP = """Show the audit log, and check that nobody has changed it.

It has a line for everything that changed something: certificates, tokens, removals, sessions, and
settings that differed at a start. Each line has the SHA-256 of the line before. Who owns the disk
could write another log: keep the last hash, which `status` shows, elsewhere.
"""

_INIT_HELP = """Make the authority and the coordinator's own certificate, once.

They are in the folder access/ of the coordinator's data; a coordinator that is started with it lets
nobody in without a certificate. --host is a name or address that sites connect to; this machine's
own, localhost and 127.0.0.1, are added. Where it runs already, start it again.

With --to all is written to a folder of its own, for another machine or a Kubernetes secret.

Exit status: 0 if the certificates are there; 1 if not, as where there is an authority already; 2 if
a flag is wrong.
"""

_INIT_EXAMPLES = """**Examples**

- `xain-coordinator certs init --host coordinator.example.org`

- `xain-coordinator certs init --host 10.0.0.7 --host fleet.example.org --data-dir wards`

- `xain-coordinator certs init --host fleet.example.org --passphrase-file key.txt` : the key of the
  authority is encrypted
"""

_RENEW_HELP = """With the coordinator stopped, make a new key and certificate of its own.

A coordinator that runs renews it by itself. With --host it is for these names, which sites connect
to, instead of those before.

Exit status: 0 if it is there; 1 if not.
"""

_REVOKE_HELP = """Revoke a certificate by its serial number, or everything that a name has.

With a certificate go all that were renewed from one another, before it and after it; with a token
what it was exchanged for. What a revoked operator has made for others is listed, and not revoked. A
certificate of another authority has its whole serial number, as `openssl x509 -serial` shows it,
with 0x before it if it is short.

It holds from the next call on; within a second streams and transfers of its holder end, and a
participant leaves the session. What it handed in before counts. Give the site a new token if it may
come back. Parameter servers and peers in processes of their own follow the file revoked.txt beside
their certificates: `xain-coordinator certs list --revoked` prints it.

Exit status: 0 if it is revoked, also before; 1 if not.
"""

_SIGN_HELP = """Sign the request of a site, which came by other means than a token.

The site makes it with `xain-participant join --request`. The certificate is for the name and role
that are given here, whatever the request says. It is printed with that of the authority, for
`xain-participant join --certificate`.

Exit status: 0 if it is signed; 1 if not.
"""

_CREATE_HELP = """Make a token, and print it.

Send it to the site by a way that others cannot read: whoever uses it first gets the certificate. It
is printed alone, so that it can be redirected to a file; what else there is to say goes to standard
error. With --to each token is a file that only its owner can read, DIR/NAME.token.

Exit status: 0 if all tokens are made; 1 if not; 2 if a flag is wrong.
"""

_CREATE_EXAMPLES = """**Examples**

- `xain-coordinator tokens create --name ward-7 > ward-7.token` : for the site, which uses it with
  `xain-participant join ward-7.token`

- `xain-coordinator tokens create --name 'site-{001..100}' --to tokens` : a file for each of 100

- `xain-coordinator tokens create --name alice --role operator > alice.token` : who may do all this
  from another machine

- `xain-coordinator tokens create --name dashboard --role observer --bearer` : for the HTTP face
"""

_REMOVE_HELP = """Remove a participant from the session that is open, for good.

Its round goes on without it. What it handed in counts. It is not let into this session again; to
keep it out of later ones, revoke its certificate.

Exit status: 0 if it is removed; 1 if no coordinator runs, or its session is finished.
"""

_FINISH_HELP = """Finish the session that is open, with the last model that it has.

Its participants are told, and end. The reason is kept with the session.

Exit status: 0 if it is finished; 1 if there is none, or no coordinator runs.
"""


@certs.callback(help=_CERTS_HELP)
@tokens.callback(help=_TOKENS_HELP)
@audit.callback(help=_AUDIT_HELP)
@participants.callback(help="Act on the participants of the session.")
@session.callback(help="Act on the session that is open.")
def _group() -> None:
    pass


# --- certificates ---


@certs.command("init", help=_INIT_HELP, epilog=_INIT_EXAMPLES)
def _init(
    host: Annotated[
        list[str],
        typer.Option(
            metavar="HOST",
            help="That sites connect to; the first one names the authority. Repeatable.",
        ),
    ],
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write everything here instead.")
    ] = None,
    passphrase_file: Passphrase = None,
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
) -> None:
    with _explained("certs init"):
        settings = _settings(config, data_dir, assignments)

        from xain_coordinator.access.control import initialise
        from xain_coordinator.access.errors import AccessError
        from xain_coordinator.server.operators_socket import socket_that_answers

        folder = to or settings.access_folder
        try:
            initialise(folder, host, passphrase=_passphrase(settings, passphrase_file))
        except AccessError as error:
            raise CommandFailed(str(error)) from None
        typer.echo(f"the authority {host[0]!r} and the coordinator's certificate are in {folder}")
        if to is None and socket_that_answers(settings.journal.path) is not None:
            typer.echo("the coordinator that runs is open until it is started again")
        flags = _flags_again(config, data_dir, assignments)
        typer.echo(
            "Now: " + hint("xain-coordinator", f"xain-coordinator tokens create --name NAME{flags}")
        )


@certs.command("renew", help=_RENEW_HELP)
def _renew(
    host: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="That sites connect to. Repeatable.")
    ] = None,
    passphrase_file: Passphrase = None,
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
) -> None:
    with _explained("certs renew"):
        settings = _settings(config, data_dir, assignments)

        from xain_coordinator.cli.access.operator import renewed_own

        hosts = renewed_own(settings, host or (), _passphrase(settings, passphrase_file))
        typer.echo(f"the coordinator has a new certificate for {', '.join(hosts)}")


@certs.command("list")
def _list(
    as_json: AsJson = False,
    revoked: Annotated[
        bool,
        typer.Option(
            "--revoked",
            help="Only serial numbers that are revoked and have not expired, one a line: for the "
            "file revoked.txt of a parameter server or peer.",
        ),
    ] = False,
    address: Address = None,
    tls: Tls = None,
    passphrase_file: Passphrase = None,
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
) -> None:
    """List certificates, tokens and bearer tokens that were issued, the oldest first."""
    settings = _settings(config, data_dir, assignments)
    with _explained("certs list"), _operator(settings, address, tls, passphrase_file) as operator:
        entries = operator.entries()
    if revoked:
        now = time.time()
        entries = [one for one in entries if one.revoked and not 0 < one.expires_at < now]
    if as_json:
        typer.echo(json.dumps([_plain(entry) for entry in entries]))
        return
    if revoked:
        typer.echo("".join(f"{one.serial}\n" for one in entries), nl=False)
        return
    from rich.console import Console

    from xain_coordinator.cli.access.showing import show_entries

    show_entries(entries, Console())


@certs.command("revoke", help=_REVOKE_HELP)
def _revoke(
    which: Annotated[
        str, typer.Argument(metavar="NAME|SERIAL", help="As `certs list` shows them.")
    ],
    address: Address = None,
    tls: Tls = None,
    passphrase_file: Passphrase = None,
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
) -> None:
    settings = _settings(config, data_dir, assignments)
    with _explained("certs revoke"), _operator(settings, address, tls, passphrase_file) as operator:
        revoked = operator.revoke(which)
    for serial in revoked.serials:
        typer.echo(f"revoked: {serial}" + " (not issued here)" * revoked.is_foreign)
    if revoked.made:
        typer.echo(
            f"made by {which} for others, and valid still: {', '.join(revoked.made)}; "
            + hint("xain-coordinator", "xain-coordinator certs revoke NAME")
        )


@certs.command("sign", help=_SIGN_HELP)
def _sign(
    request: Annotated[Path, typer.Argument(metavar="FILE", help="The request.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the site.")],
    role: Role = "participant",
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the certificate here.")
    ] = None,
    address: Address = None,
    tls: Tls = None,
    passphrase_file: Passphrase = None,
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
) -> None:
    settings = _settings(config, data_dir, assignments)
    with _explained("certs sign"), _operator(settings, address, tls, passphrase_file) as operator:
        certificate, authority = operator.sign(request.read_bytes(), name, role)
        text = (certificate.rstrip() + b"\n" + authority).decode("ascii")
        if to is None:
            typer.echo(text, nl=False)
        else:
            to.write_text(text, encoding="ascii")
            typer.echo(f"the certificate of {role} {name} is in {to}")


# --- tokens ---


@tokens.command("create", help=_CREATE_HELP, epilog=_CREATE_EXAMPLES)
def _create(
    name: Annotated[
        str,
        typer.Option(metavar="NAME", help="Of the site, or many: 'site-{001..100}'."),
    ],
    role: Role = "participant",
    ttl: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="For how long it counts, such as 30m, 24h or 7d. "
            "By default 24h, and 90d with --bearer.",
        ),
    ] = None,
    reusable: Annotated[
        bool,
        typer.Option(
            "--reusable",
            help="It counts any number of times until it expires, for pods that keep nothing.",
        ),
    ] = False,
    bearer: Annotated[
        bool, typer.Option("--bearer", help="For the HTTP face: sent with each request.")
    ] = False,
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write DIR/NAME.token for each name.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the site reaches the coordinator; by default the first host of `certs "
            "init`. With --tls the coordinator is asked there, too.",
        ),
    ] = None,
    tls: Tls = None,
    as_json: AsJson = False,
    passphrase_file: Passphrase = None,
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
) -> None:
    from xain_coordinator.cli.access.names import NewToken, expanded, seconds_of

    command = "tokens create"
    try:
        wanted = [
            NewToken(
                each,
                role,
                seconds_of(ttl or ("90d" if bearer else "24h")),
                reusable=reusable,
                bearer=bearer,
                address=address or "",
            )
            for each in expanded(name)
        ]
    except ValueError as error:
        what = "--ttl" if "time such as" in str(error) else "--name"
        _fail(command, f"command line: {what}: {error}", EXIT_BAD_CONFIG)
    if len(wanted) > 1 and to is None and not as_json:
        _fail(
            command, "command line: tokens of many names need --to DIR, or --json", EXIT_BAD_CONFIG
        )
    if tls is not None and address is None:
        _fail(command, "command line: --tls goes with --address", EXIT_BAD_CONFIG)
    settings = _settings(config, data_dir, assignments)
    asked_at = address if tls is not None else None
    with _explained(command), _operator(settings, asked_at, tls, passphrase_file) as operator:
        made = list(_made(operator, wanted, to))
    if as_json:
        typer.echo(json.dumps(made if len(made) > 1 else made[0]))
    elif to is None:
        _keep_private(sys.stdout)
        typer.echo(made[0]["token"])
    if not as_json:
        _tell_of_tokens(made, to)


def _keep_private(stream: TextIO) -> None:
    """Let the owner alone read the file that a token, which has a key, is redirected to."""
    with suppress(OSError, ValueError):  # ValueError: the stream has no file
        if os.name == "posix" and stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            os.fchmod(stream.fileno(), 0o600)


def _made(
    operator: "Operator", wanted: Sequence["NewToken"], to: Path | None
) -> Iterator[dict[str, Any]]:
    """Raises OSError."""
    from xain_foundation.durable import make_directory, replace_file

    if to is not None:
        make_directory(to, 0o700)
    for each in wanted:
        token, serial, expires_at = operator.create_token(each)
        found: dict[str, Any] = {
            "name": each.name,
            "role": each.role,
            "serial": serial,
            "expires_at": expires_at,
        }
        if to is None:
            found["token"] = token
        else:
            file = to / f"{each.name}.token"
            replace_file(file, [token.encode() + b"\n"], 0o600)
            found["file"] = str(file)
        yield found


def _tell_of_tokens(made: Sequence[Mapping[str, Any]], to: Path | None) -> None:
    """Print the hint on standard error, since the token itself may be redirected."""
    from xain_coordinator.cli.access.showing import moment

    first = made[0]
    until = moment(first["expires_at"])
    if to is None:
        typer.echo(f"for {first['role']} {first['name']}, until {until}", err=True)
    else:
        plural = "" if len(made) == 1 else "s"
        typer.echo(f"{len(made)} token{plural} in {to}, until {until}", err=True)


# --- the audit log ---


@audit.command("show")
def _show(
    last: Annotated[
        int | None, typer.Option("--last", metavar="N", min=1, help="The latest N lines only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The lines as they are.")] = False,
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
) -> None:
    """Print the audit log of the coordinator on this machine, the oldest line first."""
    settings = _settings(config, data_dir, assignments)
    with _explained("audit show"):
        from collections import deque

        from xain_coordinator.access.audit_log import read
        from xain_coordinator.cli.access.showing import audit_line

        path = settings.access_folder / "audit.log"
        for line in deque(read(path), last) if last is not None else read(path):
            typer.echo(audit_line(line, as_json=as_json))


@audit.command("verify")
def _verify(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A copy; by default that of the coordinator here."),
    ] = None,
    expected: Annotated[
        str,
        typer.Option(
            "--hash",
            metavar="SHA256",
            help="That was noted earlier: one of the lines must have it.",
            show_default=False,
        ),
    ] = "",
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
) -> None:
    """Check the chain of the audit log; exit status 1 if a line was changed, removed or put in."""
    path = file
    if path is None:
        path = _settings(config, data_dir, assignments).access_folder / "audit.log"
    with _explained("audit verify"):
        from xain_coordinator.access.audit_log import read, verify

        found = verify(path)
        hashes = [found.last_hash, *(line.previous for line in read(path))] if expected else []
        if expected and expected not in hashes:
            raise CommandFailed(
                f"{path}: no line has the hash {expected}: the log was written anew since"
            )
        typer.echo(f"{path}: {found.num_lines} lines, the last one with the hash {found.last_hash}")


# --- participants and session ---


@participants.command("remove", help=_REMOVE_HELP)
def _remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `status` shows it.")],
    address: Address = None,
    tls: Tls = None,
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
) -> None:
    settings = _settings(config, data_dir, assignments)
    with _explained("participants remove"), _operator(settings, address, tls, None) as operator:
        operator.remove(name)
        typer.echo(f"participant {name} is removed from the session")


@session.command("finish", help=_FINISH_HELP)
def _finish(
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why, for those who read of it later.")
    ] = "",
    address: Address = None,
    tls: Tls = None,
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
) -> None:
    settings = _settings(config, data_dir, assignments)
    with _explained("session finish"), _operator(settings, address, tls, None) as operator:
        operator.finish(reason)
        typer.echo("the session is finished")


# --- common parts ---


def _flags_again(config: Path | None, data_dir: Path | None, assignments: list[str] | None) -> str:
    """The flags by which another command finds the same coordinator."""
    given: list[tuple[str, Path | str | None]] = [("--config", config), ("--data-dir", data_dir)]
    given += [("--set", one) for one in assignments or ()]
    return "".join(f" {flag} {shlex.quote(str(value))}" for flag, value in given if value)


def _settings(
    config: Path | None, data_dir: Path | None, assignments: list[str] | None
) -> "CoordinatorConfig":
    """Ends the process with status 2 if a setting is wrong."""
    from xain_coordinator.config.coordinator import ENV_PREFIX, CoordinatorConfig
    from xain_foundation.settings.settings import ConfigError, load

    values: dict[str, Any] = {}
    if data_dir is not None:
        values["journal.path"] = str(data_dir / "journal.sqlite")
    values |= parse_assignments(PROGRAM, assignments, "journal.path=wards/journal.sqlite")
    try:
        return load(CoordinatorConfig, config, ENV_PREFIX, values)
    except ConfigError as error:
        fail(PROGRAM, str(error), EXIT_BAD_CONFIG)


@contextmanager
def _operator(
    settings: "CoordinatorConfig",
    address: str | None,
    tls: Path | None,
    passphrase_file: Path | None,
) -> Iterator["Operator"]:
    from xain_coordinator.cli.access.operator import operator_of

    with operator_of(settings, address, tls, _passphrase(settings, passphrase_file)) as operator:
        yield operator


def _passphrase(settings: "CoordinatorConfig", file: Path | None) -> bytes:
    """Raises CommandFailed and OSError."""
    file = file or settings.server.passphrase_file
    if file is None:
        return b""
    passphrase = file.read_bytes().strip()
    if not passphrase:
        raise CommandFailed(f"{file} is empty; it must have the passphrase")
    return passphrase


def _plain(entry: "Entry") -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(entry)


@contextmanager
def _explained(command: str) -> Iterator[None]:
    """Report an error as one line and exit with status 1."""
    from xain_coordinator.access.errors import AccessError

    try:
        yield
    except (CommandFailed, AccessError, OSError) as error:
        _fail(command, why_failed(error), EXIT_FAILED)


def _fail(command: str, message: str, status: int) -> NoReturn:
    fail(f"{PROGRAM} {command}", message, status)
