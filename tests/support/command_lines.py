"""Arguments of our programs, read by their own command lines without running them."""

from collections.abc import Sequence
from typing import Any

import typer

from xain_parameters import cli as parameters
from xain_participant import cli as participant

APPS = {"xain-parameter-server": parameters.app, "xain-participant": participant.app}


def parsed(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The values of a command's parameters. Fails for a flag that the command does not have."""
    name, *rest = arguments
    command: Any = typer.main.get_command(APPS[program])
    values: dict[str, Any] = command.commands[name].make_context(name, list(rest)).params
    return values
