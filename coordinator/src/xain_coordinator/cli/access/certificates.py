"""The commands `certs`: the authority of a coordinator and the certificates that it has issued."""

import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xain_coordinator.cli.access.common import (
    Address,
    AsJson,
    Assignments,
    DataDir,
    Passphrase,
    Role,
    explained,
    operator_at,
    read_passphrase,
)
from xain_coordinator.cli.commands.common import Tls, settings_of
from xain_foundation.commands import Config, make_app
from xain_foundation.settings.hints import hint

if TYPE_CHECKING:
    from xain_coordinator.access.values import Entry

app = make_app()

_CERTS_HELP = """Make the authority of a coordinator, list certificates, revoke and sign them.

With certificates the coordinator lets nobody in without one, and everything is encrypted. A
coordinator that runs is asked through the socket in its data folder, so that these commands need no
certificate on its machine; one that is stopped need not be started.
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


@app.callback(help=_CERTS_HELP)
def _group() -> None:
    pass


@app.command("init", help=_INIT_HELP, epilog=_INIT_EXAMPLES)
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
    """The command `certs init`: make an authority and the coordinator's certificate."""
    with explained("certs init"):
        settings = settings_of(config, data_dir, assignments)

        from xain_coordinator.access.control import initialise
        from xain_coordinator.server.operators_socket import socket_that_answers

        folder = to or settings.access_folder
        initialise(folder, host, passphrase=read_passphrase(settings, passphrase_file))
        typer.echo(f"the authority {host[0]!r} and the coordinator's certificate are in {folder}")
        if to is None and socket_that_answers(settings.journal.path) is not None:
            typer.echo("the coordinator that runs is open until it is started again")
        flags = _flags_again(config, data_dir, assignments)
        typer.echo(
            "Now: " + hint("xain-coordinator", f"xain-coordinator tokens create --name NAME{flags}")
        )


@app.command("renew", help=_RENEW_HELP)
def _renew(
    host: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="That sites connect to. Repeatable.")
    ] = None,
    passphrase_file: Passphrase = None,
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
) -> None:
    """The command `certs renew`: make a new certificate of the coordinator itself."""
    with explained("certs renew"):
        settings = settings_of(config, data_dir, assignments)

        from xain_coordinator.cli.access.operator import renew_own

        hosts = renew_own(settings, host or (), read_passphrase(settings, passphrase_file))
        typer.echo(f"the coordinator has a new certificate for {', '.join(hosts)}")


@app.command("list")
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
    settings = settings_of(config, data_dir, assignments)
    with explained("certs list"), operator_at(settings, address, tls, passphrase_file) as operator:
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


@app.command("revoke", help=_REVOKE_HELP)
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
    """The command `certs revoke`: revoke a certificate, or all of a name; print the serials."""
    settings = settings_of(config, data_dir, assignments)
    with (
        explained("certs revoke"),
        operator_at(settings, address, tls, passphrase_file) as operator,
    ):
        revoked = operator.revoke(which)
    for serial in revoked.serials:
        typer.echo(f"revoked: {serial}" + " (not issued here)" * revoked.is_foreign)
    if revoked.made:
        typer.echo(
            f"made by {which} for others, and valid still: {', '.join(revoked.made)}; "
            + hint("xain-coordinator", "xain-coordinator certs revoke NAME")
        )


@app.command("sign", help=_SIGN_HELP)
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
    """The command `certs sign`: sign a certificate request; print or write the certificate."""
    settings = settings_of(config, data_dir, assignments)
    with explained("certs sign"), operator_at(settings, address, tls, passphrase_file) as operator:
        certificate, authority = operator.sign(request.read_bytes(), name, role)
        text = (certificate.rstrip() + b"\n" + authority).decode("ascii")
        if to is None:
            typer.echo(text, nl=False)
        else:
            to.write_text(text, encoding="ascii")
            typer.echo(f"the certificate of {role} {name} is in {to}")


def _flags_again(config: Path | None, data_dir: Path | None, assignments: list[str] | None) -> str:
    """The flags by which another command finds the same coordinator."""
    given: list[tuple[str, Path | str | None]] = [("--config", config), ("--data-dir", data_dir)]
    given += [("--set", one) for one in assignments or ()]
    return "".join(f" {flag} {shlex.quote(str(value))}" for flag, value in given if value)


def _plain(entry: "Entry") -> dict[str, Any]:
    """The fields of a certificate or token by name, for JSON."""
    from dataclasses import asdict

    return asdict(entry)
