"""What the command lines of all processes have in common.

A wrong flag gets one line on standard error that names it and the program, and exit status 2.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

EXIT_BAD_CONFIG = 2

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="TOML file; without it, the defaults."),
]


def make_app() -> typer.Typer:
    """An application without completion, and with -h."""
    return typer.Typer(
        add_completion=False,
        # Typer's own tracebacks may show local variables, and with them any secret.
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def set_option(example: str) -> Any:
    """--set, for list[str] | None. example: such as "rounds.epochs=3"."""
    return typer.Option(
        "--set", metavar="KEY=VALUE", help=f"Any key of the file, e.g. {example}. Repeatable."
    )


def version_option(program: str) -> Any:
    """--version, for bool. program: its name, and that of its distribution."""

    def show(wanted: bool) -> None:
        if wanted:
            from importlib.metadata import version

            typer.echo(f"{program} {version(program)}")
            raise typer.Exit

    return typer.Option("--version", callback=show, is_eager=True, help="Show it and exit.")


def parse_assignments(
    program: str, texts: Iterable[str] | None, example: str, *, flag: str = "--set"
) -> dict[str, str]:
    """What was given with this flag, by key. Ends the process if one is no KEY=VALUE."""
    values = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            # Without the text: it may be the value of a secret that lost its key.
            message = f"command line: {flag} takes KEY=VALUE, such as {example}"
            fail(program, message, EXIT_BAD_CONFIG)
        values[key.strip()] = value
    return values


def fail(program: str, message: str, status: int) -> NoReturn:
    """End the process with one line."""
    typer.echo(f"{program}: {message}", err=True)
    raise typer.Exit(status)
