"""Errors of a session that a script drives."""


class SessionFailed(RuntimeError):
    """The session cannot be begun or gone on with, or has ended without a result. The text is one
    sentence for the one who wrote the script."""


class DecidedOtherwise(SessionFailed):
    """The script decides something else than it has decided before: the text shows both."""
