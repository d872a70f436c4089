"""Arguments of our programs, read by their own command lines without running them."""

from collections.abc import Sequence
from typing import Any

import typer

from xain_coordinator.cli import main as coordinator
from xain_coordinator.cli.demo import cli as demo
from xain_coordinator.cli.launch import cli as launch
from xain_parameters import cli as parameters
from xain_participant.cli import cli as participant

APPS = {
    "xain-coordinator": coordinator.app,
    "xain-coordinator demo": demo.app,
    "xain-coordinator launch": launch.app,
    "xain-parameter-server": parameters.app,
    "xain-participant": participant.app,
}


def parsed(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The values of a command's parameters. Fails for a command or a flag that does not exist."""
    if (whole := f"{program} {' '.join(arguments[:1])}") in APPS:  # it parses its flags itself
        program, arguments = whole, arguments[1:]
    command: Any = typer.main.get_command(APPS[program])
    context = command.make_context(program, list(arguments))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        if not rest:
            break
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return context.params
