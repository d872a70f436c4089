"""What can go wrong with data and training, told apart by what the caller should do next."""


class WorkloadError(Exception):
    """Base of every error that this package raises on purpose, wrong options aside."""


class DataError(WorkloadError, ValueError):
    """The data cannot be used as it is: fix the file or the settings that describe it."""


class NoData(DataError):
    """There are no rows. The others can go on without this participant."""


class Diverged(WorkloadError, ArithmeticError):
    """Training ran away to infinity, or towards it: take smaller steps or scale the data."""
