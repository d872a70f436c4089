"""Errors of data and training, one for each thing that the caller can do next."""


class WorkloadError(Exception):
    """Base of every error that this package raises on purpose, wrong options aside."""


class DataError(WorkloadError, ValueError):
    """The data have no rows, or cannot be used as they are: fix the file or the settings that
    describe it."""


class NoModel(WorkloadError):
    """The model does not exist, cannot be read, or has no form in the format that was asked for."""


class Diverged(WorkloadError, ArithmeticError):
    """Training ran away to infinity, or towards it: take smaller steps or scale the data."""


class InvalidContent(ValueError):
    """Bytes are no update or model of the kind that they should be: trees, sums or estimators. The
    message says what is wrong."""
