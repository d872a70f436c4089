"""The command `tokens create`, and the files that tokens are written to."""

import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from xain_coordinator.cli.access.common import (
    AsJson,
    Assignments,
    DataDir,
    Passphrase,
    Role,
    explained,
    fail_command,
    operator_at,
)
from xain_coordinator.cli.commands.common import Tls, settings_of
from xain_foundation.commands import Config, make_app
from xain_foundation.exit_statuses import EXIT_BAD_CONFIG

if TYPE_CHECKING:
    from xain_coordinator.cli.access.names import NewToken
    from xain_coordinator.cli.access.operator import Operator

app = make_app()

_TOKENS_HELP = """Make tokens, with which sites and operators join.

A token is one line of text. It counts once, and for a day.
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


@app.callback(help=_TOKENS_HELP)
def _group() -> None:
    pass


@app.command("create", help=_CREATE_HELP, epilog=_CREATE_EXAMPLES)
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
    """The command `tokens create`: make a token for each name; print it or write its file."""
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
        fail_command(command, f"command line: {what}: {error}", EXIT_BAD_CONFIG)
    if len(wanted) > 1 and to is None and not as_json:
        fail_command(
            command, "command line: tokens of many names need --to DIR, or --json", EXIT_BAD_CONFIG
        )
    if tls is not None and address is None:
        fail_command(command, "command line: --tls goes with --address", EXIT_BAD_CONFIG)
    settings = settings_of(config, data_dir, assignments)
    asked_at = address if tls is not None else None
    with explained(command), operator_at(settings, asked_at, tls, passphrase_file) as operator:
        made = list(_create_each(operator, wanted, to))
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


def _create_each(
    operator: "Operator", wanted: Sequence["NewToken"], to: Path | None
) -> Iterator[dict[str, Any]]:
    """Create each token. Gives what is known of it, with its text, or with `to` the file in that
    folder that has the text. Raises CommandFailed and OSError."""
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
    """Print on standard error for whom tokens are or where they lie, and until when they count."""
    from xain_coordinator.cli.access.showing import moment

    first = made[0]
    until = moment(first["expires_at"])
    if to is None:
        typer.echo(f"for {first['role']} {first['name']}, until {until}", err=True)
    else:
        plural = "" if len(made) == 1 else "s"
        typer.echo(f"{len(made)} token{plural} in {to}, until {until}", err=True)
