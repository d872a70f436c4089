"""The commands `audit`, `participants` and `session`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xain_coordinator.cli.access.common import Address, Assignments, DataDir, explained, operator_at
from xain_coordinator.cli.commands.common import Tls, settings_of
from xain_foundation.commands import Config, make_app
from xain_foundation.exit_statuses import CommandFailed

if TYPE_CHECKING:
    pass

audit = make_app()
participants = make_app()
session = make_app()

_AUDIT_HELP = """Show the audit log, and check that nobody has changed it.

It has a line for everything that changed something: certificates, tokens, removals, sessions, and
settings that differed at a start. Each line has the SHA-256 of the line before. Who owns the disk
could write another log: keep the last hash, which `status` shows, elsewhere.
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


@audit.callback(help=_AUDIT_HELP)
@participants.callback(help="Act on the participants of the session.")
@session.callback(help="Act on the session that is open.")
def _group() -> None:
    pass


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
    settings = settings_of(config, data_dir, assignments)
    with explained("audit show"):
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
        path = settings_of(config, data_dir, assignments).access_folder / "audit.log"
    with explained("audit verify"):
        from xain_coordinator.access.audit_log import read, verify

        found = verify(path)
        hashes = [found.last_hash, *(line.previous for line in read(path))] if expected else []
        if expected and expected not in hashes:
            raise CommandFailed(
                f"{path}: no line has the hash {expected}: the log was written anew since"
            )
        typer.echo(f"{path}: {found.num_lines} lines, the last one with the hash {found.last_hash}")


@participants.command("remove", help=_REMOVE_HELP)
def _remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `status` shows it.")],
    address: Address = None,
    tls: Tls = None,
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
) -> None:
    """The command `participants remove`: remove a participant from the session."""
    settings = settings_of(config, data_dir, assignments)
    with explained("participants remove"), operator_at(settings, address, tls, None) as operator:
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
    """The command `session finish`: finish the session with its last model."""
    settings = settings_of(config, data_dir, assignments)
    with explained("session finish"), operator_at(settings, address, tls, None) as operator:
        operator.finish(reason)
        typer.echo("the session is finished")
