"""Errors of the parameter server, as callers of its client see them."""


class ParameterError(Exception):
    """Base of all errors here."""


class Invalid(ParameterError):
    """A request is wrong: shape, dtype, a value that is not finite, a key out of range, an unknown
    table. Nothing has changed. The text names the table and what it takes."""


class TableConflict(Invalid):
    """A table of this name exists with another shape, update rule or initialiser."""


class Unavailable(ParameterError):
    """No server answered for a key range within the time that the caller gave, or the scheduler did
    not. Some servers may have applied a push by then, or may apply it later.

    In a loop over clocks: leave the loop, begin another, and push the same in the same order. It
    begins with the clock that was not completed, whose pushes the servers know by their numbers, so
    each counts once. If other workers have gone on meanwhile, the loop begins with their clock:
    under BSP nothing of the failed clock counts, under SSP and ASP what was applied stays.
    Outside of clocks the same push again is another one, and counts again where the first did.
    """


class RequestFailed(ParameterError):
    """Some members did not answer a request to their handlers, or their handlers raised an error.

    answers: of the others, by name. failures: the reason of each member that is in the text.
    """

    def __init__(self, answers: dict[str, str], failures: dict[str, str]) -> None:
        num_shown = 10
        shown = [f"{name!r}: {why}" for name, why in list(failures.items())[:num_shown]]
        if len(failures) > num_shown:
            shown.append(f"and {len(failures) - num_shown} more")
        num = len(answers) + len(failures)
        super().__init__(f"no answer of {len(failures)} of {num}: {'; '.join(shown)}")
        self.answers = answers
        self.failures = failures


class RolledBack(ParameterError):
    """Servers were lost without replica or log, and all tables are those of the last checkpoint
    again. The iterator of clocks handles it by itself; other callers pull again."""


class Evicted(ParameterError):
    """The scheduler has taken this worker or server for dead, or another process has its name."""


class Closed(ParameterError):
    """The client or the server was closed."""


class Damaged(ParameterError):
    """A checkpoint or a log was cut short or changed. The text names the file and the place."""
