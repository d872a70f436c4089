"""Common parts of the command lines of all processes.

A wrong flag gets one line on standard error that names it and the program, and exit status 2.
"""

import gc
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer

from xain_foundation.exit_statuses import EXIT_BAD_CONFIG
from xain_foundation.logs import streams

DEFAULT_PORT = 50051  # of a coordinator

# Typer raises it for all wrong command lines, and exports only this subclass.
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])
# New objects before the garbage collector looks at them. Python's default of 700 would cost a
# command an eighth of its start, and let a server collect every few calls: calls under way would be
# found alive several times, and then looked at together with all other objects.
COLLECTED_OBJECTS = 10_000
HELP_FLAGS = ["-h", "--help"]
_FLAG = re.compile(r"--?[A-Za-z][A-Za-z0-9-]{0,30}")

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="TOML file; without it, the defaults."),
]

# Flags of `predict`, which coordinator and participant have.
RowsFile = Annotated[
    Path,
    typer.Option(
        "--data",
        metavar="FILE",
        help="CSV, Parquet, Excel, SAS, SPSS or Stata with the columns.",
    ),
]
PredictionsFile = Annotated[
    Path | None, typer.Option("--to", metavar="FILE", help="Write the predictions here, as CSV.")
]
IdColumn = Annotated[
    str,
    typer.Option(
        "--id",
        metavar="COLUMN",
        help="It identifies the rows in the predictions, such as a patient's number; without it "
        "their row numbers do.",
        show_default=False,
    ),
]
MaxUnknown = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        min=0.0,
        max=1.0,
        help="Exit with status 6 if of one column a share is missing or unknown to the model that "
        "is larger than in training by more than this.",
    ),
]
RowAssignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="How the file is written, in keys of a participant's [data], e.g. 'data.decimal = "
        '","\'; by default as the file tells, and as the model keeps it. Repeatable.',
    ),
]
Builders = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-builder",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="Import this builder of the model's network; a pattern allows several.",
    ),
]


def make_app() -> typer.Typer:
    """Make a typer application without completion, and with -h."""
    return typer.Typer(
        add_completion=False,
        # Typer's own tracebacks may show local variables, and with them any secret.
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": HELP_FLAGS},
    )


def run_app(app: typer.Typer, program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, by default those of the process.

    Returns the exit status. A wrong command line is one line on standard error and status 2.
    """
    streams.fill()
    gc.set_threshold(COLLECTED_OBJECTS)
    # gRPC's C library would print a line for each failed TLS handshake, several a second. Read when
    # grpc is imported, which commands do later. Our own errors have gRPC's reasons.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    command = typer.main.get_command(app)
    for flag in _flags_of(command):
        flag.metavar = ""  # typer would show "<bool>", as if a value had to follow
    try:
        status = command(arguments, prog_name=program, standalone_mode=False)
    except _UsageError as error:
        typer.echo(f"{program}: command line: {_what_is_wrong(error)}", err=True)
        return EXIT_BAD_CONFIG
    return status if isinstance(status, int) else 0


def _flags_of(command: Any) -> Iterator[Any]:
    """Options without a value, of a command and of its sub-commands."""
    context = typer.Context(command, help_option_names=HELP_FLAGS)
    options = [*command.params, command.get_help_option(context)]
    yield from (option for option in options if getattr(option, "is_flag", False))
    for other in getattr(command, "commands", {}).values():
        yield from _flags_of(other)


def _what_is_wrong(error: Any) -> str:
    """Describe the error in one line, without the arguments: one of them may be a secret that a
    blank has separated from its key."""
    if hasattr(error, "possibilities"):  # there is no such option
        known = _FLAG.fullmatch(error.option_name)
        name = f"flag {error.option_name}" if known else "such flag"
        meant = list(error.possibilities or ())  # the closest first
        hint = f"did you mean {meant[0]}?" if meant else "see --help"
        return f"there is no {name}; {hint}"
    context = error.ctx
    if type(error) is _UsageError:  # no such command, or arguments where none are taken
        commands = getattr(context.command, "commands", {})
        there_are = f"; there are the commands: {', '.join(sorted(commands))}" if commands else ""
        return (
            f"one argument is neither a flag nor the value of one{there_are} "
            '(write KEY=VALUE without blanks, or in quotes: "KEY=VALUE")'
        )
    return " ".join(error.format_message().split())


def split_host_port(address: str) -> tuple[str, str | None]:
    """(host, port) of "HOST:PORT", "HOST", or an IPv6 address, with brackets if a port follows.

    port: None if the address has none. Neither part is checked.
    """
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]") or (":" in host and not host.endswith("]")):
        return address, None
    return host, port


def set_option(example: str) -> Any:
    """Make the option --set, for list[str] | None. example: such as "rounds.epochs=3"."""
    return typer.Option(
        "--set", metavar="KEY=VALUE", help=f"Any key of the file, e.g. {example}. Repeatable."
    )


def version_option(program: str, distribution: str = "") -> Any:
    """Make the option --version. distribution: by default it has the name of the program."""

    def show(wanted: bool) -> None:
        if wanted:
            from importlib.metadata import version

            typer.echo(f"{program} {version(distribution or program)}")
            raise typer.Exit

    return typer.Option("--version", callback=show, is_eager=True, help="Show it and exit.")


def parse_assignments(
    program: str, texts: Iterable[str] | None, example: str, *, flag: str = "--set"
) -> dict[str, str]:
    """Parse the KEY=VALUE texts of a flag. Ends the process if one is not of this form.

    Blanks around "=", as in TOML, are no part of the value.
    """
    values = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            # Without the text: it may be the value of a secret that lost its key.
            message = f"command line: {flag} takes KEY=VALUE, such as {example}"
            fail(program, message, EXIT_BAD_CONFIG)
        values[key.strip()] = value.lstrip() if key[-1].isspace() else value
    return values


def why_failed(error: Exception) -> str:
    """Reason of an error for a user: of the operating system with the file first."""
    match error:
        case OSError(filename=str() | Path() as file, strerror=str() as why):
            return f"{file}: {why}"
    return str(error)


def note(text: str) -> None:
    """Print a line that is not the command's result."""
    typer.echo(text, err=True)


def refuse_flags_before(program: str, command: str, values: Iterable[object]) -> None:
    """End the process if a flag was given before a command, which has its own and would ignore it.

    values: of the flags; None or False for one that was not given.
    """
    if any(value is not None and value is not False for value in values):
        why = f"{command} takes no flags before it; see {program} {command} --help"
        fail(program, f"command line: {why}", EXIT_BAD_CONFIG)


def fail(program: str, message: str, status: int) -> NoReturn:
    """End the process with a message on standard error, each line with the program's name."""
    for line in message.splitlines():
        typer.echo(f"{program}: {line}", err=True)
    raise typer.Exit(status)
