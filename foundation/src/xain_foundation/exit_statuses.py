"""Exit statuses: one table for every program of the project, and the error of a failed command.

docs/operations.md shows the table, and a test compares the two.
"""

from collections.abc import Mapping
from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_BAD_CONFIG: Final = 2
EXIT_FENCED: Final = 3
EXIT_NO_BETTER: Final = 4
EXIT_NOTHING_COUNTED: Final = 5
EXIT_UNKNOWN_INPUT: Final = 6
EXIT_ROWS_MISSED: Final = 7
EXIT_SIGNAL: Final = 128  # plus the number of the signal, as a shell counts

MEANINGS: Final[Mapping[int, str]] = {
    EXIT_OK: "done, or stopped as asked",
    EXIT_FAILED: "failed; the last line says why",
    EXIT_BAD_CONFIG: "a setting or the command line is wrong",
    EXIT_FENCED: "another coordinator has taken over the session",
    EXIT_NO_BETTER: "completed, but the model is no better than the baseline",
    EXIT_NOTHING_COUNTED: "this process trained nothing, or nothing of it ever counted",
    EXIT_UNKNOWN_INPUT: "answered, but too much of the input was unknown",
    EXIT_ROWS_MISSED: "completed, but rows were read twice or not at all",
}

# The work has come to its end, and the same start again would end alike.
FINAL: Final = (EXIT_NO_BETTER, EXIT_NOTHING_COUNTED, EXIT_UNKNOWN_INPUT, EXIT_ROWS_MISSED)


class CommandFailed(Exception):
    """A command cannot be carried out. The message is one line for the operator."""


class CannotStart(CommandFailed):
    """A mistake in what a program was given, which ends it with EXIT_BAD_CONFIG."""
