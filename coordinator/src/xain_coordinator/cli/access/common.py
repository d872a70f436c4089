"""Options of the operator's commands, and whom they ask."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from xain_coordinator.cli.commands.common import PROGRAM
from xain_foundation.commands import fail, set_option, why_failed
from xain_foundation.exit_statuses import EXIT_FAILED, CommandFailed

if TYPE_CHECKING:
    from xain_coordinator.cli.access.operator import Operator
    from xain_coordinator.config.coordinator import CoordinatorConfig

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


def operator_at(
    settings: "CoordinatorConfig",
    address: str | None,
    tls: Path | None,
    passphrase_file: Path | None,
) -> AbstractContextManager["Operator"]:
    """The coordinator that a command asks, or whose files it changes. Raises CommandFailed.

    address: of the coordinator; None: the one with these settings. tls: the operator's own
        certificate. passphrase_file: before that of the settings.
    """
    from xain_coordinator.cli.access.operator import operator_of

    return operator_of(settings, address, tls, read_passphrase(settings, passphrase_file))


def read_passphrase(settings: "CoordinatorConfig", file: Path | None) -> bytes:
    """The passphrase in a file, by default the one that the settings name; b"" without either.
    Raises CommandFailed and OSError."""
    file = file or settings.server.passphrase_file
    if file is None:
        return b""
    passphrase = file.read_bytes().strip()
    if not passphrase:
        raise CommandFailed(f"{file} is empty; it must have the passphrase")
    return passphrase


@contextmanager
def explained(command: str) -> Iterator[None]:
    """In this context, print an error as one line and exit with status 1."""
    from xain_coordinator.access.errors import AccessError

    try:
        yield
    except (CommandFailed, AccessError, OSError) as error:
        fail_command(command, why_failed(error), EXIT_FAILED)


def fail_command(command: str, message: str, status: int) -> NoReturn:
    """Print a command's error in one line, and end the process with this status."""
    fail(f"{PROGRAM} {command}", message, status)
