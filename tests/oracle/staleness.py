"""The discount of stale updates once more, for tests that follow what becomes of one."""

from math import sqrt


def discount(staleness: int) -> float:
    """s(τ) = 1 / sqrt(1 + τ): the share of its weight that an update keeps."""
    return 1 / sqrt(1 + staleness)
