"""Errors of data and training, one for each thing that the caller can do next."""


class WorkloadError(Exception):
    """Base of every error that this package raises on purpose, wrong options aside."""


class DataError(WorkloadError, ValueError):
    """The data cannot be used as it is: fix the file or the settings that describe it."""


class NoData(DataError):
    """The data have no rows. Other participants can go on without this one."""


class NoWorkload(WorkloadError, RuntimeError):
    """The coordinator names no workload to train a table with."""


class NoModel(WorkloadError):
    """The model does not exist, cannot be read, or has no form in the format that was asked for."""


class Diverged(WorkloadError, ArithmeticError):
    """Training ran away to infinity, or towards it: take smaller steps or scale the data."""


class InvalidContent(ValueError):
    """Bytes are no update or model of the kind that they should be: trees, sums or estimators. The
    message says what is wrong."""
